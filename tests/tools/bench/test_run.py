"""Recipes, run on random models: what is kept, resumed, refused and reported."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.errors import ConfigError, ModelNotFoundError, SpecdecError
from specdec.models import load, map_vocabulary
from specdec.tools.bench.cells import Cell, Unit, units_of
from specdec.tools.bench.figures import Figures
from specdec.tools.bench.raw import Results
from specdec.tools.bench.recipe import Recipe
from specdec.tools.bench.report import block, report, write_report
from specdec.utils.validation import read_record

from ...models.draft_heads.published import dflash_config, write_head
from ...models.folders import write_folder
from ...models.gguf_files import byte_level
from .conftest import TINY, Tiny, run

HEADS = ("embed_tokens", "lm_head")
FEW = ("batch=2", "repeat=1", "mlx_lm=false")


def measured(results: Results) -> Any:
    """Without what a process's history decides."""
    passes = {
        cell: {
            n: replace(job, peak_memory_bytes=0, memory_before_bytes=0)
            for n, job in jobs.items()
        }
        for cell, jobs in results.passes.items()
    }
    return results.recipe, results.prompts, passes


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "raw.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_unit_is_kept_once(whole: Path, tiny: Tiny) -> None:
    kept = [
        Unit(read_record(Cell, line["cell"]), line["pass"])
        for line in lines(whole)
        if line["kind"] == "job"
    ]
    assert kept == list(units_of(tiny()))
    assert [line["kind"] for line in lines(whole)][:2] == ["recipe", "start"]


def test_a_stopped_run_goes_on_where_it_was(tiny: Tiny, tmp_path: Path) -> None:
    """Interrupted twice, a line cut off: as if nothing had happened."""

    class StopError(Exception):
        pass

    def stopping(after: int) -> Any:
        ran = 0

        @contextmanager
        def bracket(unit: Unit) -> Iterator[None]:
            nonlocal ran
            if ran == after:
                raise StopError
            ran += 1
            yield

        return lambda total, done: bracket

    recipe, out = tiny("num_draft_tokens=2", "batch=2", "count=2"), tmp_path / "out"
    for after in (3, 4):
        with pytest.raises(StopError):
            run(recipe, out, progress=stopping(after))
        with open(out / "raw.jsonl", "a", encoding="utf-8") as file:
            file.write('{"kind": "job", "cell": {"ba')
    half = Figures(Results.read(out))
    assert half.num_units - len(half.missing) == 7
    assert "**Not complete: 7 of 9" in report(half)

    resumed = run(recipe, out)
    fresh = run(recipe, tmp_path / "fresh")
    assert measured(resumed) == measured(fresh)
    assert measured(Results.read(out)) == measured(fresh)
    assert len(resumed.starts) == 3
    before = (out / "raw.jsonl").read_bytes()
    run(recipe, out)
    assert (out / "raw.jsonl").read_bytes() == before


def test_a_process_killed_for_good(tmp_path: Path) -> None:
    """SIGKILL between two lines, or within one; the same command completes it."""
    recipe, out = tmp_path / "tiny.toml", tmp_path / "out"
    recipe.write_text(TINY, "utf-8")
    settings = ["batch=2", "repeat=2", "num_draft_tokens=2"]
    command = [sys.executable, "-m", "specdec", "bench", str(recipe)]
    command += ["--out", str(out), *(x for s in settings for x in ("--set", s))]
    raw = out / "raw.jsonl"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not raw.exists() or raw.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = list(units_of(Recipe.read(recipe, settings)))
    results = Results.read(out)
    assert all(results.has(unit) for unit in expected)
    kinds = [line["kind"] for line in lines(out)]
    assert kinds.count("job") == len(expected)
    assert kinds.count("start") == 2
    assert f"[{len(expected)}/{len(expected)}]" in done.stderr
    # The command ends with a block that fits into an issue.
    assert done.stdout.startswith("**Tiny**\n")
    assert "MLX " in done.stdout
    assert "| batch 2: specdec, no draft |" in done.stdout
    assert f"wrote {out / 'report.html'}" in done.stderr


def test_another_recipe_in_the_folder_is_refused(whole: Path, tiny: Tiny) -> None:
    before = (whole / "raw.jsonl").read_bytes()
    with pytest.raises(ConfigError) as caught:
        run(tiny("max_tokens=7"), whole)
    assert "run.max_tokens is 9 there, 7 here" in str(caught.value)
    assert (whole / "raw.jsonl").read_bytes() == before


def test_what_is_no_folder_of_results(tmp_path: Path, tiny: Tiny) -> None:
    raw = tmp_path / "raw.jsonl"
    for text, message in (
        (None, "holds no results: there is no"),
        ("half a line", "holds no results: its"),
        ('{"kind": "recipe", "format": 99}\n', "jsonl:1: no line of results"),
    ):
        if text is not None:
            raw.write_text(text, "utf-8")
        with pytest.raises(ConfigError, match=message):
            Results.read(tmp_path)
    with pytest.raises(ConfigError, match=r"jsonl cannot be used: .*: name another"):
        run(tiny(), raw)


# -- reports -----------------------------------------------------------------


def test_a_report_is_the_same_when_made_anew(whole: Path, tmp_path: Path) -> None:
    """Text and page, byte for byte, from a copy of the raw results alone."""
    write_report(whole)
    (tmp_path / "raw.jsonl").write_bytes((whole / "raw.jsonl").read_bytes())
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout == ""
    report = sorted(file.name for file in tmp_path.iterdir())
    assert report == ["raw.jsonl", "report.html", "report.md"]
    for name in report:
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name
    assert (tmp_path / "report.html").read_text("utf-8").count("<table>") == 1


COMMITTED = Path(__file__).parents[3] / "benchmarks" / "results"


FOLDERS = sorted(file.parent for file in COMMITTED.glob("*/raw.jsonl"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_committed_report_is_that_of_its_raw_results(
    folder: Path, tmp_path: Path
) -> None:
    """``specdec report`` was not forgotten, and nobody edited it."""
    (tmp_path / "raw.jsonl").write_bytes((folder / "raw.jsonl").read_bytes())
    write_report(tmp_path)
    report = (tmp_path / "report.md").read_text("utf-8")
    assert report == (folder / "report.md").read_text("utf-8")


def test_a_report_has_all_that_it_promises(whole: Path) -> None:
    figures = Figures(Results.read(whole))
    text, pasted = report(figures), block(figures)
    for each in (text, pasted):
        for part in (
            "    test\n", "MLX ", "commit ", "| / no draft | / mlx-lm |",
            "ms to first token", "peak MiB", "batch 2: mlx-lm, batch_generate",
            "batch 1: mlx-lm, generate_step", "batch 1: mlx-lm, random:tiny:1, k = 2",
            "batch 2: specdec, random:tiny:1, auto", "5 of 5",
        ):  # fmt: skip
            assert part in each, part
        assert "Not complete" not in each
        assert each.count("|---|") == 1
    assert "\n#" not in f"\n{pasted}"
    assert "the extra token included" in text


def test_figures_from_a_clock_that_counts(whole: Path) -> None:
    """Rates and ratios, worked out by hand from the raw lines."""
    figures = Figures(Results.read(whole))
    jobs: dict[tuple[str, Any], dict[str, Any]] = {
        (json.dumps(line["cell"]), line["pass"]): line
        for line in lines(whole)
        if line["kind"] == "job"
    }
    for f in figures.drafted:
        for n, ratio in zip((1, 2), f.ratios(figures.plain(f)), strict=True):
            rates = []
            for cell in (f.cell, f.cell.plain):
                line = jobs[json.dumps(cell.__dict__), n]
                tokens = sum(r["tokens"] for r in line["requests"])
                rates.append(tokens / line["seconds"])
            assert ratio == pytest.approx(rates[0] / rates[1])
    one, two = (f for f in figures.drafted if f.cell.num_draft_tokens == 2)
    assert one.acceptance().rate == two.acceptance().rate


def test_without_markdown_it_there_is_no_page(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw.jsonl").write_bytes((whole / "raw.jsonl").read_bytes())
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    wrote, note = result.stderr.splitlines()
    assert wrote == f"wrote {tmp_path / 'report.md'}"
    assert "no report.html without markdown-it-py: " in note


def test_two_runs_are_compared(whole: Path, tiny: Tiny, tmp_path: Path) -> None:
    other, alone = tmp_path / "other", tmp_path / "alone"
    run(tiny(*FEW, "max_tokens=8"), other)
    result = CliRunner().invoke(main, ["bench", "--compare", str(whole), str(other)])
    assert result.exit_code == 0
    rows = [x for x in result.stdout.splitlines() if x.startswith("| batch")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "batch 2: specdec, no draft",
        "batch 2: specdec, random:tiny:1, k = 2",
        "batch 2: specdec, random:tiny:1, auto",
    ]
    assert "The recipes differ in `run`." in result.stdout
    assert "Different machines" not in result.stdout
    run(tiny(*FEW, "batch=3", "num_draft_tokens=1"), alone)
    result = CliRunner().invoke(main, ["bench", "--compare", str(other), str(alone)])
    assert result.exit_code == 2
    assert "have nothing in common" in result.stderr


def test_an_interrupt_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, progress: Any, **__: Any) -> None:
        bracket = progress(5, 2)
        with bracket(next(units_of(Recipe.read("prefix")))):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.tools.bench.run.run_recipe", interrupted)
    out = str(tmp_path / "out")
    result = CliRunner().invoke(main, ["bench", "prefix", "--out", out])
    assert result.exit_code == 130
    part, line = result.stderr.splitlines()
    assert part.startswith("[3/5] batch 2, context 512: specdec, no draft, pass 0: ")
    assert line == (
        f"specdec: interrupted: 3 of 5 parts are kept in {out}; "
        "the same command continues"
    )


def test_a_refused_run_leaves_no_folder(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at no-such: give a folder"):
        run(tiny("draft=['no-such']"), tmp_path / "in" / "out")
    assert not [*tmp_path.glob("in*")]


# -- results that were edited by hand, and a full disk ------------------------------

ODD: list[Any] = [
    None, True, "x", "", 5, -1, 0, 1.5, 10**400, 10**18, float("nan"), float("inf"),
    [], {}, [[]], [1], {"a": 1}, "\ud800", "x" * 5000, "\x1b[31m", "deep",
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a line; of a list, only the first value."""
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def edited(line: str, at: tuple[Any, ...], odd: Any) -> str:
    document = json.loads(line)
    holder = document
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = odd
    return json.dumps(document).replace('"deep"', "[" * 3000 + "]" * 3000)


def test_results_edited_by_hand(whole: Path, tmp_path: Path) -> None:
    """A value of another kind ends with "unexpected TypeError: ..." somewhere."""
    lines = (whole / "raw.jsonl").read_text("utf-8").splitlines()
    kinds = {
        (json.loads(x)["kind"], '"traced": [[' in x, '"draft"' in x): x for x in lines
    }
    rng = random.Random(3)
    cases = [
        (lines.index(line), at, odd)
        for line in kinds.values()
        for at in places(json.loads(line))
        for odd in ODD
    ]
    refused = []
    for number, at, odd in rng.sample(cases, 150):
        changed = [*lines]
        changed[number] = edited(lines[number], at, odd)
        text = "\n".join(changed) + "\n"
        (tmp_path / "raw.jsonl").write_text(text, "utf-8")
        try:
            report(Figures(Results.read(tmp_path))).encode()
        except ConfigError as error:
            refused.append(str(error))
    assert max(map(len, refused)) <= 1000
    assert len(refused) > 75  # the others are free texts, or numbers that may be so


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "null", "NaN", "9" * 5000, "[" * 100_000, '{"kind": 1}']
)
def test_lines_that_are_none(line: str, whole: Path, tmp_path: Path) -> None:
    """The file and the line are named, whatever stands there."""
    lines = (whole / "raw.jsonl").read_text("utf-8").splitlines()
    for number in (1, 2, len(lines)):
        changed = [*lines]
        changed[number - 1] = line
        (tmp_path / "raw.jsonl").write_text("\n".join(changed) + "\n", "utf-8")
        with pytest.raises(ConfigError, match=rf"raw.jsonl:{number}: no line of res"):
            Results.read(tmp_path)


def test_a_full_disk(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError without a way out; what was kept before must go on to count."""
    calls, sync = [], os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    # With auto, costs are written to the disk, too, and may be lost.
    recipe = tiny(*FEW, "num_draft_tokens=2")
    monkeypatch.setattr("specdec.tools.bench.raw.os.fsync", full)
    with pytest.raises(SpecdecError, match=r"raw.jsonl cannot be written \(No space"):
        run(recipe, tmp_path / "out")
    monkeypatch.undo()
    assert len(run(recipe, tmp_path / "out").passes) == 2


def test_a_draft_with_another_vocabulary(tmp_path: Path, tiny: Tiny) -> None:
    """The target under other ids is accepted, also where rows have token ids alone.

    Whoever drops the map with the tokenizer sees hardly any acceptance.
    """
    other = byte_level()
    other.tokens[:256] = other.tokens[128:256] + other.tokens[:128]
    for name, tokens in (("target", None), ("draft", other)):
        mx.random.seed(1)
        write_folder(tmp_path / name, vocabulary=tokens)
    target, draft = (load(str(tmp_path / name)) for name in ("target", "draft"))
    vocabulary = map_vocabulary(target, draft)
    assert vocabulary is not None
    file = tmp_path / "draft" / "model.safetensors"
    weights: Any = mx.load(str(file))
    for name in [name for name in weights if name.split(".")[-2] in HEADS]:
        rows = weights[name] + 0
        weights[name][mx.array(vocabulary.reads)] = rows[: len(vocabulary.reads)]
    mx.save_safetensors(str(file), dict(weights), {"format": "mlx"})
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Don't {i}12 the ab\n" for i in range(5)))
    results = run(
        tiny(
            f"target={tmp_path / 'target'}", f"draft={tmp_path / 'draft'}",
            f"source=file:{prompts}", "num_draft_tokens=2", "end_of_sequence=false",
            *FEW,
        ),
        tmp_path / "out",
    )  # fmt: skip
    figures = Figures(results)
    (found,) = figures.drafted
    assert found.acceptance().drafted > 0
    assert found.acceptance().accepted == found.acceptance().drafted


def test_mlx_lm_runs_no_draft_head(tiny: Tiny, tmp_path: Path) -> None:
    """Its speculation is left out, and the folder is complete without it."""
    sizes = {"hidden_size": 64, "head_dim": 16, "vocab_size": 256}
    config = dflash_config(**sizes, num_target_layers=2)
    config["dflash_config"] = {"mask_token_id": 1, "target_layer_ids": [0, 0, 1]}
    write_head(tmp_path / "head", config)
    recipe = tiny(f"draft={tmp_path / 'head'}", "repeat=1", "batch=1")
    run(recipe, tmp_path / "out")
    results = Results.read(tmp_path / "out")
    (refused,) = results.refused
    assert refused.system == "mlx-lm speculative"
    assert not Figures(results).missing
    drafted = [c for c in results.passes if c.draft and c.system == "specdec"]
    assert len(drafted) == 2

    before = (tmp_path / "out/raw.jsonl").read_bytes()
    run(recipe, tmp_path / "out")
    assert (tmp_path / "out/raw.jsonl").read_bytes() == before
