"""``specdec advise`` on random models: what it measures, prints and concludes."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.decoder import SpecDecoder
from specdec.spec_decode import DraftModel
from specdec.tools.advice import Division
from specdec.tools.decoding import token_level
from tests.models.folders import write_folder


@pytest.fixture
def advised(
    tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run it with the target as its own draft."""
    target = tiny_model("llama", seed=0)

    def from_pretrained(*names: Any, config: Any, **_: Any) -> SpecDecoder:
        return SpecDecoder(token_level(target), token_level(target), config=config)

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    encoded = iter(range(1, 1000))

    def encode(*args: Any, **options: Any) -> Any:
        from specdec.prompts import EncodedPrompt

        return [EncodedPrompt("", (1, next(encoded) % 97)) for _ in args[1]]

    monkeypatch.setattr("specdec.decoder.encode_all", encode)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")

    def run(*arguments: str) -> str:
        command = ["advise", "--draft", "a/D", "--prompts", str(prompts), *arguments]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        sys.stderr.write(result.stderr)
        return result.stdout

    return run


def test_json(advised: Callable[..., str]) -> None:
    record = json.loads(
        advised("--json", "--batch", "2", "--batch", "1", "--max-tokens", "12")
    )
    assert record["survival"] == [1.0] * 8
    assert record["measured"] == 4
    assert [p["num_rows"] for p in record["predictions"]] == [1, 2]
    for prediction in record["predictions"]:
        assert prediction["speedup"][0] == 1
        assert len(prediction["speedup"]) == len(prediction["verify"]) == 9
        assert prediction["draft_step"] > 0
    assert record["prompts"] == 3
    assert record["prompts_file"].endswith("prompts.txt")
    assert record["sure"] is False, "three prompts are too few"
    assert record["verdict"].startswith(("--num-draft", "this pair")) is True


def test_a_draft_that_proposes_few_tokens(
    advised: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft length that no round would have is not advised."""
    monkeypatch.setattr(DraftModel, "max_proposals", 3)
    for asked in ("2", "4"):
        options = "--num-draft-tokens", asked, "--max-tokens", "12"
        record = json.loads(advised("--json", "--batch", "1", *options))
        (prediction,) = record["predictions"]
        assert len(record["survival"]) == len(prediction["speedup"]) - 1 == 3


def test_text(
    advised: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report, and on standard error how much is left of decoding and of timing."""
    for name in ("LINE_SECONDS", "_LEFT_SECONDS"):
        monkeypatch.setattr(f"specdec.cli.progress.{name}", 0.0)
    text = advised("--batch", "1", "--max-tokens", "12", "--num-prompts", "2")
    # Numbers without the prompts that they depend on mislead.
    assert re.search(r"\n2 prompts of \S*prompts\.txt, \d+ rounds of", text)
    assert " rounds of up to 4 draft tokens\n" in text
    assert "predicted speed-up" in text
    note, first, *lines = capsys.readouterr().err.splitlines()
    assert note.startswith("specdec: note: decoding 2 prompts, then timing")
    assert first == "specdec: decoding, 0 of 2 prompts"
    assert any(
        re.fullmatch(r"specdec: decoding, 1 of 2 prompts, about \d+ seconds left", line)
        for line in lines
    )
    assert "specdec: timing forwards of 1, 0 of 1 batch size" in lines
    assert text.splitlines()[-1].startswith("verdict (unsure): ")
    assert "from 2 prompts: too few to say how sure that is: give 5" in text


def test_the_device_is_empty_before_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that stays would leave the timed ones no room."""
    write_folder(tmp_path / "model", hidden_size=128, intermediate_size=1024)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nabd\n")
    held: list[int] = []

    def seconds_of_rounds(loading: Any, batches: Any, devices: int) -> list[float]:
        held.append(mx.get_active_memory())
        return [0.01 / devices] * len(batches)

    monkeypatch.setattr("specdec.cli.timing.seconds_of_rounds", seconds_of_rounds)
    command = [
        "advise", "--target", str(tmp_path / "model"), "--draft", "ngram", "--prompts",
        str(prompts), "--tensor-parallel", "2", "--max-tokens", "4", "--batch", "1",
        "--ignore-chat-template",
    ]  # fmt: skip
    gc.collect()
    before = mx.get_active_memory()
    result = CliRunner().invoke(main, command)
    assert re.search(r"batch 1, k = \d +10\.0 +5\.0 +2\.00\n", result.stdout)
    assert held[0] - before < 100_000
    assert len(held) == 2


def test_when_to_divide_a_target() -> None:
    """A division that loses, or gains within the noise, is not advised."""
    batches = ((1, 0), (8, 4), (32, 0))
    mixed = Division(2, batches, (0.012, 0.013, 0.014), (0.008, 0.015, 0.0139))
    assert mixed.speedup[0] == pytest.approx(1.5)
    assert (
        "--tensor-parallel 2 is up to 1.50 times as fast, at batch 1;" in mixed.verdict
    )
    worse = Division(4, batches[:1], (0.005,), (0.006,))
    assert worse.verdict == "no faster than one: for more requests use --replicas 4"
    equal = Division(2, batches[:1], (0.0102,), (0.01,))
    assert equal.verdict.startswith("no faster than one")


def test_the_draft_of_a_target_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The help names another draft than the one that is loaded."""
    asked: list[Any] = []

    def load(*_: Any, draft: Any, **__: Any) -> Any:
        asked.append(draft)
        raise SystemExit

    monkeypatch.setattr("specdec.cli.ranks.load", load)
    monkeypatch.setattr("specdec.cli.auto_draft.offer", lambda *_: None)
    (tmp_path / "p.txt").write_text("one\n")
    words = ["advise", "--prompts", str(tmp_path / "p.txt")]
    write_folder(tmp_path / "model")
    for more in ([], ["--target", str(tmp_path / "model")]):
        CliRunner().invoke(main, [*words, *more])
    assert asked == [None, "auto"]
    shown = " ".join(CliRunner().invoke(main, ["advise", "--help"]).stdout.split())
    assert "[default: auto; for the default target smollm2-135m-head," in shown


@pytest.mark.parametrize("others", [0.0, 64.0])
def test_a_busy_machine(
    advised: Callable[..., str], monkeypatch: pytest.MonkeyPatch, others: float
) -> None:
    """Times that other programs made are reported without a word."""
    command = sys.modules["specdec.cli.advise"]
    monkeypatch.setattr(command, "others_running", lambda: [others])
    monkeypatch.setattr("specdec.cli.busy.os.cpu_count", lambda: 2)
    options = "--max-tokens", "12", "--batch", "1"
    text = advised(*options)
    note = "This machine is busy: on average 64.0 other threads wanted its 2 cores."
    assert (note in text) is (others > 0)
    record = json.loads(advised("--json", *options))
    if others:
        assert record["disturbed"] == "the machine is busy"
