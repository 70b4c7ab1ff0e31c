"""``specdec run``: what goes to standard output, to standard error and to files."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from specdec.cli import main
from specdec.cli.options import grouped
from specdec.cli.output import OutputFile, open_streams
from specdec.cli.run import _piped
from specdec.cli.sink import Sink
from specdec.config import EngineConfig
from specdec.errors import SpecdecError
from specdec.grammar import Grammar
from specdec.outputs import RunStats, StreamEvent
from specdec.prompts import PromptRecord
from specdec.request import TokenLogprobs
from specdec.sampling_params import SamplingParams

from .conftest import Specdec, result_of

FIELDS = {
    "settings", "kv_bits", "index", "prompt", "text", "token_ids", "finish_reason",
    "seed", "prompt_tokens", "prefix_tokens", "generated_tokens", "rounds", "drafted",
    "accepted", "acceptance_rate", "acceptance_length", "acceptance_by_position",
    "stop_reason", "stop_token", "error", "time_to_first_token", "tokens_per_second",
}  # fmt: skip
NO_CONTENT: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_several_prompts_come_whole_and_in_order(specdec: Specdec) -> None:
    """The fake finishes its last prompt first."""
    result = specdec("run", "-p", "Hi", "-p", "two\nlines " + "x" * 100)
    title = ("two lines " + "x" * 100)[:67] + "..."
    assert result.stdout == (
        f"== [0] Hi\nBonjour n°0\n\n== [1] {title}\nBonjour n°1\n\n"
    )


def test_output_lines_come_as_rows_finish(specdec: Specdec, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("of an earlier run\n")
    assert specdec("run", "-p", "a", "-p", "b", "--output", str(path)).exit_code == 0
    rows = read_lines(path)
    assert [row["index"] for row in rows] == [1, 0]
    assert all(row.keys() == FIELDS for row in rows)
    assert rows[0]["text"] == "Bonjour n°1"
    assert "n°" in path.read_text("utf-8"), "text stays readable in the file"


def test_an_interrupted_run_is_resumed(specdec: Specdec, tmp_path: Path) -> None:
    """A prompt that is decoded twice or never, or with the seed of another one.

    What failed runs again, and so does what was being written; a file of other prompts
    stays as it is. Who cannot read the file cannot read it afterwards.
    """
    path, prompts = tmp_path / "out.jsonl", tmp_path / "p.txt"
    prompts.write_text("a\nb\nc\nd\n")
    good = result_of(2, "c", "Salut n°2").to_dict()
    bad = result_of(0, "a", "").to_dict() | {"finish_reason": "error", "error": "e"}
    lines = "".join(json.dumps(line) + "\n" for line in (bad, good))
    path.write_text(lines + lines[:40])
    path.chmod(0o600)
    arguments = ("run", "--prompts", str(prompts), "--output", str(path), "--temp", "1")
    resume = (*arguments, "--seed", "5", "--resume")
    result = specdec(*resume)
    assert result.exit_code == 0, result.output
    assert specdec.calls["prompts"] == ["a", "b", "d"]
    assert [each.seed for each in specdec.calls["params"]] == [5, 6, 8]
    rows = read_lines(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert rows[0] == good
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 3]
    assert [x for x in result.stdout.splitlines() if "==" in x] == [
        "== [0] a", "== [1] b", "== [3] d",
    ]  # fmt: skip
    specdec.calls.clear()
    result = specdec(*resume)
    assert (result.exit_code, result.stdout, specdec.calls) == (0, "", {})
    assert "all 4 prompts have their results" in result.stderr
    assert read_lines(path) == rows
    # Results of two models, or of two temperatures, in one file.
    rows = [{**row, "seed": 5 + row["index"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed: tuple[tuple[tuple[str, ...], str], ...] = (
        (("--temp", "0.5"), "temperature 1.0, not 0.5"),
        (("--temp", "1", "--target", "a/T"), "target SmolLM2-135M-Instruct, not a/T"),
        (("--temp", "1", "--seed", "7"), r"seed \d, not \d"),
        (("--temp", "1", "-m", "9"), "the default max_tokens, not 9"),
        (
            ("--temp", "1", "--system-prompt", "s" * 99),
            "the default system_prompt, not sha256:",
        ),
    )
    for more, differs in changed:
        said = specdec.refuses(*resume, *more)
        assert re.search(rf"out\.jsonl:\d was made with .*{differs}", said)
    assert read_lines(path) == rows
    for line, message in (
        ({**good, "index": 3}, "is of another prompt 3"),
        ({**good, "id": "x"}, "is of another prompt 2"),
        ({**good, "index": 4}, "is of no prompt"),
        ("text", "is of no prompt"),
    ):
        text = json.dumps(line) + "\n"
        path.write_text(text)
        assert f"out.jsonl:1 {message}" in specdec.refuses(*resume)
        assert path.read_text() == text
    (tmp_path / "t.jsonl").write_text('{"turns": ["a", "b"]}\n')
    for more, message in (
        ((*resume, "--output-format", "openai"), "--resume needs --output"),
        (
            ("run", "--prompts", str(tmp_path / "t.jsonl"), "--ray", "local"),
            "out --ray",
        ),
    ):
        assert message in specdec.refuses(*more)


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [
        (b"Salut", b"\\ud800", True),  # half of a pair, which UTF-8 cannot hold
        (b"Salut", b"Sal\xe9", False),
        (b"Salut", b"Sal\xed\xa0\x80", False),
        (b'"Salut', b"\xff", False),
        (b'"text"', b'"settings": [], "text"', False),
        (b'"text"', b'"settings": null, "text"', False),
    ],
)
def test_a_damaged_line_is_decoded_again(
    old: bytes, new: bytes, stays: bool, specdec: Specdec, tmp_path: Path
) -> None:
    """Bytes that are no text were kept as others, and made the file unreadable."""
    path = tmp_path / "out.jsonl"
    result = result_of(0, "a", "Salut").to_dict()
    line = json.dumps(result).encode()
    failed = json.dumps({**result, "index": 1, "finish_reason": "error"}).encode()
    path.write_bytes(b"\n".join([line.replace(old, new), failed, b""]))
    done = specdec("run", "-p", "a", "-p", "a", "--output", str(path), "--resume")
    assert done.exit_code == 0, done.output
    assert specdec.calls["prompts"] == ["a"] * (2 - stays)
    assert sorted(row["index"] for row in read_lines(path)) == [0, 1]


def test_a_conversation_may_end_without_a_text(
    specdec: Specdec, tmp_path: Path
) -> None:
    """A last message that only calls tools ended the run with KeyError 'content'."""
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    talks = [[{"role": "user", "content": "Hi"}, calls | more] for more in NO_CONTENT]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))
    result = specdec("run", "--prompts", str(file))
    assert result.exit_code == 0
    assert result.stdout.count("assistant, without text") == len(NO_CONTENT)


def test_ratio_rules_are_resumed_with_the_same_draft(
    specdec: Specdec, tmp_path: Path
) -> None:
    """By these rules another draft draws other texts: one file would hold two runs'.

    By the other rule a run may go on with any draft.
    """
    path = tmp_path / "out.jsonl"
    drawn = ("run", "-p", "a", "--output", str(path), "--temp", "1", "--target", "a/T")
    ratio = (*drawn, "--verification", "block")
    for again in ((), ("--resume",)):
        assert specdec(*ratio, "--draft", "ngram+a/D", *again).exit_code == 0
    for more, differs in (
        ("--draft a/D", "draft ngram.a/D, not a/D"),
        ("--draft ngram+a/D --num-draft-tokens 2", r"num_draft_tokens \w+, not 2"),
        (f"--draft ngram+a/D --draft-adapter-path {tmp_path}",
         f"the default draft_adapter_path, not {tmp_path}"),
    ):  # fmt: skip
        said = specdec.refuses(*ratio, *more.split(), "--resume")
        assert re.search(f"out.jsonl:1 was made with {differs}", said)
    assert specdec(*drawn, "--draft", "a/D").exit_code == 0
    assert specdec(*drawn, "--draft", "none", "--resume").exit_code == 0


def test_options_of_mlx_lm_reach_the_decoder(specdec: Specdec, tmp_path: Path) -> None:
    """An option is accepted and dropped."""
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    options = (
        "--model a/T --draft-model a/D --max-tokens 4 --batch-size 2 --adapter-path l "
        "--draft-adapter-path d --revision main --prefill-response Sure "
        f'--chat-template {tmp_path}/t.jinja --chat-template-config {{"think":false}}'
    )
    assert specdec("run", "-p", "Hi", *options.split()).exit_code == 0
    expected = {
        "target": "a/T", "draft": "a/D", "config": EngineConfig(batch_size=2),
        "params": SamplingParams(max_tokens=4), "adapter_path": "l",
        "draft_adapter_path": "d", "revision": "main", "prefill_response": "Sure",
        "chat_template": "{{ messages }}", "chat_template_config": {"think": False},
    }  # fmt: skip
    assert specdec.calls.items() >= expected.items()
    assert specdec("run", "-p", "Hi", "--ignore-chat-template").exit_code == 0
    assert specdec.calls["ignore_chat_template"] is True


def test_defaults_are_those_of_the_library(specdec: Specdec) -> None:
    assert specdec("run", "-p", "Hi").exit_code == 0
    assert specdec.calls["target"] is None
    assert specdec.calls["config"] == EngineConfig()
    assert specdec.calls["params"] == SamplingParams()
    specdec("run", "-p", "Hi", "--kv-bits", "4", "--quantized-kv-start", "11")
    assert specdec.calls["config"] == EngineConfig(kv_bits=4, quantized_kv_start=11)


def test_the_default_target_has_a_draft(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of drafts go with it, unless it is unwanted, or the target another."""
    monkeypatch.setattr("specdec.model_names.default_draft", lambda: "with/specdec")
    for arguments, drafts in (
        ([], True),
        (["--target", "SmolLM2-135M-Instruct"], True),
        (["--draft", "none"], False),
        (["--target", "a/T"], False),
        (["--target", "a/T", "--draft", "a/D"], True),
    ):
        result = specdec("run", "-p", "Hi", "--num-draft-tokens", "2", *arguments)
        assert (result.exit_code == 0) == drafts, result.output
        assert ("--num-draft-tokens " in result.stderr) != drafts


def test_a_pipe_that_brings_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that leaves its pipe open, and a command that waits in silence."""
    monkeypatch.setattr(sys.modules["specdec.cli.run"], "_PATIENCE", 0.01)
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        ending = threading.Timer(0.5, os.close, (writer,))
        ending.start()
        assert _piped(quiet=False) == ""
        ending.join()
    assert "reading standard input; </dev/null leaves it out" in capsys.readouterr().err


def test_help_pages_begin_with_the_common_options(specdec: Specdec) -> None:
    """Forty options in the order in which they were thought of; or one left out."""
    lines = specdec("run", "--help").stdout.splitlines()
    titles = [x.rstrip(":") for x in lines if x and not x.startswith(" ")]
    assert titles[1:3] == ["Common options", "Models"]
    for name, command in main.commands.items():
        context = click.Context(command, info_name=name)
        shown = [o for some in grouped(command, context).values() for o in some]
        parameters = command.get_params(context)
        options = [p for p in parameters if isinstance(p, click.Option)]
        assert sorted(map(id, shown)) == sorted(map(id, options))


def test_progress_until_there_is_a_rate(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate of 0.0 tokens/s while prompts are read."""
    monkeypatch.setattr("specdec.cli.progress.LINE_SECONDS", 0)
    lines = specdec("run", "-p", "Hi", "-p", "Ho").stderr.splitlines()
    assert lines[0] == "specdec: prefill, 0 of 2 prompts, 0 tokens prefilled"
    assert lines[1] == "specdec: 0 of 2 prompts, 8 tokens, 3.0 tokens/s"
    specdec.decoder.stats = RunStats(
        prefill_tokens=5, generated_tokens=1, decode_seconds=9.0
    )
    lines = specdec("run", "-p", "Hi", "-p", "Ho").stderr.splitlines()
    assert lines[1] == "specdec: prefill, 0 of 2 prompts, 5 tokens prefilled"


def test_notes_about_the_machine(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice to take float32 for a model that is stored so, or that was loaded so."""
    asked: list[tuple[bool, bool]] = []

    def product_notes(*, float32: bool, fixed_draft: bool) -> list[str]:
        asked.append((float32, fixed_draft))
        return ["products are slow"]

    monkeypatch.setattr("specdec.backend.check_compiler", lambda: "no g++ found")
    monkeypatch.setattr("specdec.backend.product_notes", product_notes)
    lines = specdec("run", "-p", "Hi").stderr.splitlines()
    assert lines[:2] == [
        "specdec: note: no g++ found", "specdec: note: products are slow",
    ]  # fmt: skip
    specdec("run", "-p", "Hi", "--draft", "ngram", "--num-draft-tokens", "2")
    specdec("run", "-p", "Hi", "--draft", "ngram", "--dtype", "float32")
    specdec.decoder.target.in_float32 = True
    assert specdec("run", "-p", "Hi", "--quiet").stderr == ""
    specdec("run", "-p", "Hi")
    assert asked == [(False, False), (False, True), (True, False), (True, False)]


def test_ctrl_c_keeps_the_finished_rows(specdec: Specdec, tmp_path: Path) -> None:
    """Interrupted when rows 2 and 1 have finished; rows 0 and 1 come before 2."""
    specdec.decoder.raises = (5, KeyboardInterrupt())
    path = tmp_path / "out.jsonl"
    result = specdec(
        "run", "-p", "a", "-p", "b", "-p", "c", "--output", str(path), "--quiet"
    )
    assert result.exit_code == 130
    assert [row["index"] for row in read_lines(path)] == [2, 1]
    assert result.stdout == "== [1] b\nBonjour n°1\n\n== [2] c\nBonjour n°2\n\n"
    assert result.stderr == (
        f"specdec: interrupted: 2 of 3 prompts finished; {path} has the results, "
        "and --resume continues\n"
    )


@pytest.mark.parametrize("quiet", [False, True])
def test_a_prompt_that_ends_with_an_error_is_reported(
    specdec: Specdec, tmp_path: Path, quiet: bool
) -> None:
    """The others are as ever; the exit code is for scripts."""
    path = tmp_path / "out.jsonl"
    words = ["run", *(["--quiet"] if quiet else []), "--output", str(path)]
    result = specdec(*words, "-p", "a", "-p", "failing", "-p", "b", "-p", "failing")
    assert result.exit_code == 1
    first, second, *summary = result.stderr.splitlines()
    assert first == "specdec: error: prompt 1: the logits are NaN"
    assert second == "specdec: error: prompt 3: the logits are NaN"
    if quiet:
        assert not summary
    else:
        assert "failed:      2 prompts, see above" in summary
    assert result.stdout.count("== [") == 4
    reasons = {row["index"]: row["finish_reason"] for row in read_lines(path)}
    assert reasons == {0: "stop", 1: "error", 2: "stop", 3: "error"}


def test_prompts_of_a_file_are_named_by_line(specdec: Specdec, tmp_path: Path) -> None:
    """Where to look, among thousands: those that end badly and those refused."""
    path = tmp_path / "prompts.txt"
    for text, command, error in (
        ("one\n\nfailing\n", "run -p a", "3 (prompt 2): the logits are NaN"),
        ("\nunusable\n", "run", "2 (prompt 0): it is unusable"),
        ("\nunusable\n", "advise --draft ngram", "2 (prompt 0): it is unusable"),
    ):
        path.write_text(text)
        result = specdec(*command.split(), "--quiet", "--prompts", str(path))
        assert result.exit_code == 1
        assert result.stderr == f"specdec: error: {path}:{error}\n"


@pytest.mark.parametrize("left", [False, True])
def test_what_a_crash_leaves_is_tidied(
    specdec: Specdec, tmp_path: Path, left: bool
) -> None:
    """Zeros where the system lost data, rows twice, and rows without their tokens.

    They stayed in the file if nothing was left to do.
    """
    path = tmp_path / "out.jsonl"
    rows = [result_of(i, text, f"n°{i}").to_dict() for i, text in enumerate("ab")]
    one, two = (json.dumps(row, ensure_ascii=False) for row in rows)
    zeros = "\0" * 99

    def resume(text: str, *prompts: str) -> list[str]:
        """Prompts that are decoded when a file goes on."""
        path.write_text(text, "utf-8")
        specdec.calls.clear()
        asked = [word for prompt in prompts for word in ("-p", prompt)]
        result = specdec("run", *asked, "--output", str(path), "--resume")
        assert result.exit_code == 0, result.output
        return list(specdec.calls.get("prompts", []))

    bare = json.dumps({k: v for k, v in rows[1].items() if k != "token_ids"})
    torn = f"{bare}\n{one}\n{zeros}{two}\n{one}\n{two}\n{zeros}"
    assert resume(torn, "a", "b", *["c"] * left) == ["c"] * left
    assert sorted(row["index"] for row in read_lines(path)) == [*range(2 + left)]
    assert read_lines(path)[:2] == rows
    # A line that was torn in the middle of the file, and a mark of another editor.
    assert resume(f"\ufeff{two}\n{one[:30]}{zeros}{two}\n{one[:9]}", "a", "b") == ["a"]
    for token_ids in ("1 2", [1, "a"], [-1], [1.5], [], [2**31]):
        odd = json.dumps({**rows[1], "token_ids": token_ids})
        assert resume(f"{one}\n{odd}\n", "a", "b") == ["b"], token_ids


def test_ids_of_prompts_are_kept(specdec: Specdec, tmp_path: Path) -> None:
    """Rows finish in any order: what calls them by name need not count."""
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"id": "q7", "prompt": "a"},
        {"question_id": 81, "turns": ["b"]},
        {"task_id": "HumanEval/0", "id": None, "prompt": "c"},
        {"prompt": "d"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert specdec("run", "--prompts", str(path), "--output", str(out)).exit_code == 0
    lines = sorted(read_lines(out), key=lambda line: line["index"])
    assert [line.get("id") for line in lines] == ["q7", 81, "HumanEval/0", None]
    assert list(lines[0])[:3] == ["index", "id", "prompt"]
    assert "id" not in lines[3]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    ("raises", "words"),
    [
        (SpecdecError("no such model"), "-p a"),
        (SpecdecError("no such model"), "-p a --resume"),
        ((0, SpecdecError("no memory")), "-p a -p b"),
        ((0, KeyboardInterrupt()), "-p a"),
        (None, "-p unusable"),
        (None, "--prompts nowhere.txt"),
    ],
)
def test_a_run_that_writes_nothing_leaves_the_file_as_it_was(
    specdec: Specdec, tmp_path: Path, there: bool, raises: Any, words: str
) -> None:
    """An empty file looks like a run without results, or replaces one with results."""
    path = tmp_path / "out.jsonl"
    earlier = json.dumps(result_of(0, "a", "").to_dict() | {"finish_reason": "error"})
    if there:
        path.write_text(earlier)
    specdec.decoder.raises = raises
    result = specdec("run", *words.split(), "--output", str(path), "--quiet")
    assert result.exit_code != 0
    assert result.stdout == ""
    assert path.exists() is there
    assert not there or path.read_text() == earlier


def test_a_file_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first line is written after hours."""
    monkeypatch.setattr("os.access", lambda *_: False)
    result = specdec("run", "-p", "a", "--output", "out.jsonl")
    assert result.exit_code == 2
    assert "--output out.jsonl cannot be written: Permission denied" in result.stderr
    assert not specdec.calls


def test_standard_output_has_nothing_of_a_prompt_without_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header with nothing under it. The file says why."""
    refused = replace(
        result_of(0, "a", ""), finish_reason="error", error="it is too long"
    )
    ended = replace(result_of(1, "b", ""), index=1)  # an answer, and it is empty
    events = [
        StreamEvent(index=each.index, text="", token_ids=[], result=each)
        for each in (refused, ended)
    ]
    with click.Context(main):
        output = OutputFile("--output", str(tmp_path / "o"), None)
        sink = Sink([PromptRecord("a"), PromptRecord("b")], output)
        for event in events:
            sink.take(event)
        sink.close()
    assert capsys.readouterr().out == "== [1] b\n\n\n"
    assert [row["error"] for row in read_lines(tmp_path / "o")] == [
        "it is too long", None,
    ]  # fmt: skip
    for event, text in ((events[0], ""), (replace(events[1], index=0), "\n")):
        sink = Sink([PromptRecord("a")], None)
        sink.take(event)
        sink.close()
        assert capsys.readouterr().out == text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_is_reported_on_a_line_of_its_own(specdec: Specdec) -> None:
    """The text is on standard output all the same."""
    line = (
        "specdec: error: --output /dev/full cannot be written: "
        "No space left on device: make room or name another file\n"
    )
    for prompts, text in (
        (["-p", "a"], "Bonjour n°0\n"),
        (["-p", "a", "-p", "b"], "== [1] b\nBonjour n°1\n\n"),
    ):
        result = specdec("run", *prompts, "--output", "/dev/full")
        assert (result.exit_code, result.stdout, result.stderr) == (1, text, line)


_FULL_STDOUT = """
import sys
import click
from specdec.cli.sink import Sink
from specdec.prompts import PromptRecord
from specdec.outputs import StreamEvent
from specdec.request import TokenLogprobs
from specdec.outputs import RunStats
sink = Sink([PromptRecord("a")], None)
try:
    sink._write("Bonjour")
except click.ClickException as error:
    print(error.message, file=sys.stderr)
sink.close()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_standard_output_is_reported_once() -> None:
    """Neither closing nor the interpreter's last flush fails again."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", _FULL_STDOUT],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # else nothing waits to fail
            text=True,
            check=False,
        )
    assert done.returncode == 0
    assert done.stderr == (
        "standard output cannot be written: No space left on device\n"
    )


def test_broken_pipe_is_quiet(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless there is a file of results, which says how far the job went."""

    def fail(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    path = tmp_path / "out.jsonl"
    asked = ("run", "-p", "a", "-p", "b", "--quiet")
    said = (
        "specdec: error: standard output was closed: 2 of 2 prompts finished; "
        f"{path} has the results\n"
    )
    # An answer that waits for an earlier prompt is written at the end.
    for at in ("_write", "close"):
        with monkeypatch.context() as patched:
            patched.setattr(Sink, "_write", lambda self, text: None)
            patched.setattr(Sink, at, fail)
            plain = specdec(*asked)
            assert (plain.exit_code, plain.output) == (1, "")
            output = specdec(*asked, "--output", str(path))
            assert (output.exit_code, output.output) == (1, said)
            assert len(read_lines(path)) == 2


def test_a_terminal_without_the_character_gets_a_question_mark(
    specdec: Specdec, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    open_streams()
    sink = Sink([PromptRecord("a")], None)
    sink._write("n°0")
    assert raw.getvalue() == b"n?0"


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    """``specdec --help`` answers at once."""
    code = (
        "import sys, specdec.cli\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'tqdm'}\n"
        "print(heavy & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_every_line_of_output_is_json(specdec: Specdec, tmp_path: Path) -> None:
    r"""An id such as "\ud800" ends the run with the other results lost."""
    ids = [r'"\ud800"', r'"a\udc00b"', '"é"', str(10**400), "[[1], {}]", "1.5", "false"]
    lines = [f'{{"prompt": "p", "id": {each}}}' for each in ids]
    (tmp_path / "p.jsonl").write_text("\n".join(lines), "utf-8")
    out = tmp_path / "out.jsonl"
    asked = ["--prompts", str(tmp_path / "p.jsonl"), "--output", str(out)]
    result = specdec("run", *asked, "--top-logprobs", "2")
    assert result.exit_code == 0, result.output
    records = {
        row["index"]: row["id"]
        for row in map(strictly, out.read_text("utf-8").splitlines())
    }
    assert [records[i] for i in range(len(ids))] == [json.loads(each) for each in ids]


def test_what_is_no_number_is_written_as_null(tmp_path: Path) -> None:
    """A forbidden token has a log-probability of minus infinity."""
    result = replace(
        result_of(0, "p", "a b"),
        logprobs=[
            TokenLogprobs(-1.5, [(3, -math.inf), (4, math.nan)], "x", ["y", "z"])
        ],
    )
    with click.Context(main):
        output = OutputFile("--output", str(tmp_path / "o"), None)
        sink = Sink([PromptRecord("p"), PromptRecord("q")], output)
        sink.take(StreamEvent(index=0, text="", token_ids=[], result=result))
    record = strictly((tmp_path / "o").read_text("utf-8"))
    assert record["logprobs"] == [
        {
            "token_id": 0,
            "text": "x",
            "logprob": -1.5,
            "top": [
                {"token_id": 3, "text": "y", "logprob": None},
                {"token_id": 4, "text": "z", "logprob": None},
            ],
        }
    ]


def strictly(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 5000])
def test_an_id_that_is_no_number_is_refused(
    number: str, specdec: Specdec, tmp_path: Path
) -> None:
    """It would be written as what is not JSON, or fail when it is written."""
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a", "id": {number}}}\n')
    result = specdec("run", "--prompts", str(tmp_path / "p.jsonl"))
    assert result.exit_code == 2
    assert "p.jsonl:1: " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 400


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_shown_what_is_printable(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, or a file of prompts, sets the terminal's title.

    Elsewhere the text is what the model wrote.
    """
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", stdout)
    sink = Sink([PromptRecord("\x1b]0;a\x07"), PromptRecord("b")], None)
    result = result_of(0, "p", "\x1b[31mred\n\tΩ👩‍💻\x9b")
    sink.take(StreamEvent(index=0, text="", token_ids=[], result=result))
    text = "?[31mred\n\tΩ👩‍💻?" if terminal else result.text
    assert stdout.getvalue() == f"== [0] ?]0;a?\n{text}\n\n"


def test_a_seed_that_is_not_given_is_random_and_shown(specdec: Specdec) -> None:
    """It was 0 for everybody; the summary's gives the same text again."""
    seeds = []
    for options in ((), (), ("--seed", "3")):
        result = specdec("run", "-p", "Hi", "--temp", "1", *options)
        params = specdec.calls["params"]
        assert f"seed:        {params.seed}\n" in result.stderr
        seeds.append(params.seed)
    assert seeds[0] != seeds[1]  # false alarm: 1 in 2**32
    assert seeds[2] == 3
    result = specdec("run", "-p", "Hi")
    assert specdec.calls["params"].seed is None
    assert "seed:" not in result.stderr


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ("--json-schema FILE", Grammar.json_object()),
        ("--grammar LARK", Grammar.lark('start: "a"')),
        ("--regex a+", Grammar.regex("a+")),
        ("--regex a(", "the regular expression cannot be used"),
        ("--regex a --json-schema FILE", "give one of them"),
        ("--json-schema BYTES", "not UTF-8"),
        ("--grammar NONE", "there is no such file"),
        ("--json-schema=", "name a file"),
        ("--regex a --min-tokens 2", "--min-tokens"),
    ],
)
def test_what_output_has_to_be_is_checked_before_a_model_is_loaded(
    specdec: Specdec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: str, outcome: Grammar | str,
) -> None:  # fmt: skip
    """A schema that cannot be used would be found when everything is loaded."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text('{"type": "object"}')
    Path("LARK").write_text('start: "a"')
    Path("BYTES").write_bytes(b"\xff")
    result = specdec("run", "-p", "Hi", *options.split())
    if isinstance(outcome, str):
        assert result.exit_code != 0
        assert outcome in result.stderr
        assert not specdec.calls
    else:
        assert result.exit_code == 0, result.output
        assert specdec.calls["params"].grammar == outcome


@pytest.mark.parametrize(
    "data",
    [b"my notes", b"\0\1\2 a model", b'{"a": 1', b"[", b"null\n",
     b'{"name": "Andr\xe9"}\n', b'{"index": 0}\n{"name": "Andr\xe9"}\n'],
)  # fmt: skip
def test_a_file_of_another_kind_is_left_alone(
    specdec: Specdec, tmp_path: Path, data: bytes
) -> None:
    """A file of the user's was taken for torn or damaged results, and emptied."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(data)
    assert specdec.refuses("run", "-p", "a", "--output", str(path), "--resume")
    assert path.read_bytes() == data


TURNS = '{"turns": ["a", "b"]}\n{"turns": ["failing", "x", "y"]}\n'


@pytest.mark.parametrize(
    ("prompts", "events", "lines"),
    [
        ("-p a", None, "interrupted"),
        ("-p a", 0, "interrupted: no prompt had finished"),
        ("-p a -p a", 0, "interrupted: no prompt had finished"),
        ("-p a -p a -p a", 4, "interrupted: 1 of 3 prompts finished"),
        ("-p a -p failing", 3, "error: prompt 1: the logits are NaN\n"
         "interrupted: 1 of 2 prompts finished"),
        # Turns after an answer that failed never come.
        ("--prompts turns.jsonl", 3, "error: turns.jsonl:2 (prompt 1): the logits are "
         "NaN\ninterrupted: 1 of 3 turns finished"),
    ],
)  # fmt: skip
def test_what_an_interrupt_says(
    specdec: Specdec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    prompts: str, events: int | None, lines: str,
) -> None:  # fmt: skip
    """A wrong count, or an error that nobody is told of."""
    monkeypatch.chdir(tmp_path)
    Path("turns.jsonl").write_text(TURNS)
    interrupt = KeyboardInterrupt()
    specdec.decoder.raises = interrupt if events is None else (events, interrupt)
    result = specdec("run", "--quiet", *prompts.split())
    assert result.exit_code == 130
    assert result.stderr.splitlines() == [f"specdec: {x}" for x in lines.split("\n")]


DRAFTED = "--draft self:4bit"
PLAIN = {"drafted": 0, "accepted": 0}
FAILED = {**PLAIN, "draft_error": "drafter X failed (ValueError: no)"}


@pytest.mark.parametrize(
    ("changes", "options", "says", "never"),
    [
        ({}, f"{DRAFTED} --kv-bits 8", "KV cache:    8 bits\n", "auto:"),
        ({}, DRAFTED, "target:      the-target\ndraft:       self:4bit, as many tokens "
         "a round as are worth it\nprefill:     2 prompts, 10 tokens, 20.0 tokens/s\n"
         "decode:      6 tokens after the first of each prompt, 2 rounds, 3.0 "
         "tokens/s\nacceptance:  rate 0.500, length 2.50 tokens a round\npeak memory: "
         "1.50 GB\n",
         "KV cache"),
        ({}, f"{DRAFTED} --num-draft-tokens 3", ", 3 tokens a round\n", "worth"),
        (PLAIN, "", "draft:       none\n", "acceptance"),
        (FAILED, DRAFTED, "as are worth it, until it failed\n", "not worth it"),
        (PLAIN, DRAFTED, "acceptance:  nothing was drafted: it is not worth it", "!"),
        (PLAIN, "--draft ngram", "nothing was drafted: no words came again, or", "!"),
        # A request that an interrupt cut off has rounds, and no counts of its draft.
        ({**PLAIN, "row_rounds": 0}, DRAFTED, "decode:", "nothing was drafted"),
        ({"prefix_tokens": 8}, "", "10 tokens (8 from the prefix cache), 20.0", "k = "),
        ({}, "--seed 3", "note: --seed has no effect at --temp 0: nothing is", "layer"),
        ({}, "--seed 3 --temp 1", "seed:        3\n", "no effect"),
        ({}, "--draft layers:4", "layers:4 is layer 4 alone; the first 4 are layers:0",
         "seed"),
        ({}, "--draft ngram+layers:1", "layers:1 is layer 1 alone", "seed"),
        ({}, "--draft layers:0-3", "draft:", "alone"),
    ],
)  # fmt: skip
def test_what_the_summary_says_of_a_run(
    specdec: Specdec, changes: dict[str, Any], options: str, says: str, never: str
) -> None:
    """What changes the output is missing, or a draft that failed did not pay."""
    decoder = specdec.decoder
    decoder.stats = replace(decoder.stats, **changes)
    stderr = specdec("run", "-p", "Hi", *options.split()).stderr
    assert says in stderr
    assert never not in stderr


def test_the_summary_names_the_target_shortly_and_what_auto_chose(
    specdec: Specdec,
) -> None:
    specdec.decoder.target_name = "/a/long/way/to/model.gguf"
    specdec.decoder.draft_length_reason = "4 draft tokens in 90% of the rounds"
    lines = specdec("run", "-p", "Hi", *DRAFTED.split()).stderr.splitlines()
    assert "target:      model.gguf" in lines
    assert f"auto:        {specdec.decoder.draft_length_reason}" in lines


@pytest.mark.parametrize(
    ("options", "stdin", "prompts"),
    [
        ("", "one\ntwo\n", ["one", "two"]),
        ("", '{"question": "one"}\n{"question": "two"}\n', ["one", "two"]),
        ("--prompts -", "one\n", ["one"]),
        ("-p -", "one\ntwo\n", ["one\ntwo\n"]),
        ("-p - -p b", "a", ["a", "b"]),
        ("-p a: -p b:", "long\ntext\n", ["a:\n\nlong\ntext\n", "b:\n\nlong\ntext\n"]),
        ("-p a: -p b:", " \n", ["a:", "b:"]),
        ("-p zero --prompts FILE", "", ["zero", "one", "two"]),
    ],
)
def test_where_prompts_come_from(
    specdec: Specdec, tmp_path: Path, options: str, stdin: str, prompts: list[str]
) -> None:
    """A file that is silently left out of what is asked about it."""
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    words = options.replace("FILE", str(tmp_path / "p.txt")).split()
    assert specdec("run", *words, stdin=stdin).exit_code == 0
    assert specdec.calls["prompts"] == prompts


def test_options_reach_the_decoder(specdec: Specdec, tmp_path: Path) -> None:
    """An option that is accepted and dropped."""
    options = (
        "--target a/T --draft self:4bit --batch 3 --num-draft-tokens 5 --dtype float32 "
        "--prefill-step-size 64 --system-prompt S "
        "--kv-bits 8 --kv-group-size 32 --max-kv-size 99 "
        f"--prefix-cache {tmp_path} --prefix-cache-size 2GB --prefix-cache-memory 3MiB "
        "--top-p 0.9 --min-p 0.05 --top-k 40 "
        "--temp 0.5 --seed 9 --min-tokens 3 --max-tokens 4 "
        "--stop STOP --stop END --stop-token-id 7 --stop-token-id 9 "
        "--xtc-probability 0.4 --xtc-threshold 0.2 "
        "--repetition-penalty 1.1 --presence-penalty 0.3 --frequency-penalty -0.2 "
        "--logit-bias 5=-inf --logit-bias 6=2.5 --verification block --top-logprobs 2 "
        "--prompt-logprobs 3"
    )
    path = tmp_path / "out.jsonl"
    command = ("run", "-p", "Hi", *options.split(), "--output", str(path))
    result = specdec(*command)
    assert result.exit_code == 0, result.output
    assert specdec.calls == {
        "target": "a/T",
        "draft": "self:4bit",
        "dtype": "float32",
        "trust_remote_code": False,
        "config": EngineConfig(
            batch_size=3, num_draft_tokens=5, prefill_step_size=64, kv_bits=8,
            kv_group_size=32, max_kv_size=99,
            prefix_cache=str(tmp_path), prefix_cache_size=2 * 10**9,
            prefix_cache_memory=3 * 2**20,
        ),
        "prompts": ["Hi"],
        "params": SamplingParams(
            temperature=0.5, seed=9, top_p=0.9, min_p=0.05, top_k=40, min_tokens=3,
            max_tokens=4, stop=("STOP", "END"), stop_token_ids=(7, 9),
            xtc_probability=0.4, xtc_threshold=0.2, repetition_penalty=1.1,
            presence_penalty=0.3, frequency_penalty=-0.2,
            logit_bias={5: float("-inf"), 6: 2.5}, verification="block", logprobs=True,
            top_logprobs=2, prompt_logprobs=3,
        ),
        "system_prompt": "S",
        "ignore_chat_template": False,
        "keep_going": False,
        "turns": [()],
    }  # fmt: skip
    # They are stored as JSON, and compared when the run goes on.
    (row,) = read_lines(path)
    assert row["settings"]["stop"] == ["STOP", "END"]
    assert row["settings"]["logit_bias"] == {"5": "-inf", "6": 2.5}
    assert "has its result" in specdec(*command, "--resume").stderr
    assert "was made with stop" in specdec.refuses(*command, "--stop", "!", "--resume")
