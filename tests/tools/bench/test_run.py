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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.errors import ConfigError, ModelNotFoundError, SpecdecError
from specdec.tools.bench import plots
from specdec.tools.bench.cells import Cell, Unit, units_of
from specdec.tools.bench.figures import Figures
from specdec.tools.bench.raw import Results
from specdec.tools.bench.recipe import Recipe
from specdec.tools.bench.report import report, write_report
from specdec.tools.bench.run import run_recipe

from .conftest import TINY, Ticks

Tiny = Callable[..., Recipe]
# What a process's history decides, beside the recipe.
HISTORY = ("peak_memory_bytes", "memory_before_bytes")


def run(recipe: Recipe, folder: Path, **options: Any) -> Results:
    return run_recipe(recipe, folder, command="test", clock=Ticks(), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all results of the tiny recipe, by the fake clock."""
    folder = tmp_path_factory.mktemp("whole")
    file = folder / "tiny.toml"
    file.write_text(TINY, "utf-8")
    run(Recipe.read(file), folder / "out")
    return folder / "out"


def measured(results: Results) -> Any:
    passes = {
        cell: {
            n: {k: v for k, v in record.items() if k not in HISTORY}
            for n, record in records.items()
        }
        for cell, records in results.passes.items()
    }
    return results.recipe, results.prompts, passes, results.profiles


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "raw.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_unit_is_kept_once(whole: Path, tiny: Tiny) -> None:
    kept = [
        Unit(Cell.of(line["cell"]), line.get("pass"))
        for line in lines(whole)
        if line["kind"] in ("pass", "profile")
    ]
    assert kept == list(units_of(tiny()))
    assert [line["kind"] for line in lines(whole)][:2] == ["recipe", "start"]


def test_counts_agree_with_the_tokens(whole: Path) -> None:
    """Every pass generates all tokens; rounds bring what requests say."""
    results = Results.read(whole)
    for cell, passes in results.passes.items():
        assert sorted(passes) == [0, 1, 2]
        for record in passes.values():
            for wave in record["waves"]:
                assert [r[3] for r in wave["requests"]] == [6] * wave["rows"]
                assert len(wave["first_tokens"]) == wave["rows"]
        if cell.system != "specdec":
            continue
        for wave in passes[0]["waves"]:
            rows = [row for _, rows in wave["rounds"] for row in rows]
            assert sum(d for d, _ in rows) == wave["drafted"]
            assert sum(a for _, a in rows) == wave["accepted"]
            assert len(rows) == wave["row_rounds"]
            # First tokens come from prompts; each row's round adds one more than
            # it accepted.
            tokens = sum(1 + a for _, a in rows)
            assert tokens == wave["generated_tokens"] - wave["rows"]
        assert "rounds" not in passes[1]["waves"][0]


def test_a_killed_run_goes_on_where_it_was(tiny: Tiny, tmp_path: Path) -> None:
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

    recipe, out = tiny(), tmp_path / "out"
    for after in (5, 9):
        with pytest.raises(StopError):
            run(recipe, out, progress=stopping(after))
        with open(out / "raw.jsonl", "a", encoding="utf-8") as file:
            file.write('{"kind": "pass", "cell": {"ba')
    half = Figures(Results.read(out))
    assert half.num_units - len(half.missing) == 14
    assert "**Not complete: 14 of" in report(half)

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
    command = [sys.executable, "-m", "specdec", "bench", str(recipe)]
    command += ["--out", str(out), "--set", "batch=2", "--set", "repeat=8"]
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
    expected = list(units_of(Recipe.read(recipe, ["batch=2", "repeat=8"])))
    results = Results.read(out)
    assert all(results.has(unit) for unit in expected)
    kinds = [line["kind"] for line in lines(out)]
    assert kinds.count("pass") + kinds.count("profile") == len(expected)
    assert kinds.count("start") == 2
    assert f"[{len(expected)}/{len(expected)}]" in done.stderr
    assert f"wrote {out / 'report.md'}" in done.stderr
    assert "batch 2" in done.stdout


def test_another_recipe_in_the_folder_is_refused(
    whole: Path, tiny: Tiny, tmp_path: Path
) -> None:
    before = (whole / "raw.jsonl").read_bytes()
    with pytest.raises(ConfigError) as caught:
        run(tiny("max_tokens=7"), whole)
    assert "run.max_tokens is 6 there, 7 here" in str(caught.value)
    assert (whole / "raw.jsonl").read_bytes() == before


def test_what_is_no_folder_of_results(tmp_path: Path, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="holds no results: there is no"):
        Results.read(tmp_path)
    raw = tmp_path / "raw.jsonl"
    raw.write_text("half a line", "utf-8")
    with pytest.raises(ConfigError, match="holds no results: its"):
        Results.read(tmp_path)
    raw.write_text('{"kind": "recipe", "format": 99}\n', "utf-8")
    with pytest.raises(ConfigError, match="jsonl:1: no line of results"):
        Results.read(tmp_path)
    raw.write_text("")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be used"):
        run(tiny(), tmp_path / "file")


# -- reports -----------------------------------------------------------------


def test_a_report_is_the_same_when_made_anew(whole: Path, tmp_path: Path) -> None:
    """Text, PNG and SVG, byte for byte, from a copy of the raw results alone."""
    write_report(whole)
    (tmp_path / "raw.jsonl").write_bytes((whole / "raw.jsonl").read_bytes())
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout == ""
    made = sorted(file.name for file in tmp_path.iterdir())
    names = ("acceptance", "round", "speedup")
    pictures = [f"{n}.{suffix}" for n in names for suffix in ("png", "svg")]
    assert made == sorted(["raw.jsonl", "report.md", *pictures])
    for name in made:
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")


COMMITTED = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "folder", [raw.parent for raw in COMMITTED.rglob("raw.jsonl")], ids=lambda f: f.name
)
def test_a_committed_report_is_that_of_its_raw_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``specdec report`` was not forgotten, and nobody edited it.

    Plots are not kept beside results.
    """
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "raw.jsonl").write_bytes((folder / "raw.jsonl").read_bytes())
    write_report(tmp_path)
    made = (tmp_path / "report.md").read_text("utf-8")
    assert made == (folder / "report.md").read_text("utf-8")


def test_a_report_has_all_that_it_promises(whole: Path) -> None:
    text = report(Figures(Results.read(whole)))
    for part in (
        "| / no draft | / mlx-lm |",
        "ms to first token",
        "rows busy",
        "peak MiB",
        "it counts the extra token",
        "rate, request mean",
        "length, token-weighted",
        "| conditional |",
        "| unconditional |",
        "## Accepted tokens in a round",
        "draft step / plain | verify / plain | draft | verify | sampling | host |",
        "by formula",
        "every row cut to the batch's minimum",
        "per-sequence trim (what ran)",
        "oracle draft length",
        "    test\n",
        "MLX ",
        "commit ",
    ):
        assert part in text, part
    assert "Not complete" not in text


def test_figures_from_a_clock_that_counts(whole: Path) -> None:
    """Rates, ratios, occupancy and parts, worked out by hand from the raw lines."""
    results = Results.read(whole)
    figures = Figures(results)
    for f in figures.drafted:
        records = results.passes[f.cell]
        plain = results.passes[f.cell.plain]
        for n, ratio in zip((1, 2), f.ratios(figures.find(f.cell.plain)), strict=True):
            rates = []
            for record in (records[n], plain[n]):
                tokens = sum(w["decode_tokens"] for w in record["waves"])
                rates.append(tokens / sum(w["decode_seconds"] for w in record["waves"]))
            assert ratio == pytest.approx(rates[0] / rates[1])
        assert 0 < f.occupancy <= 1
        assert f.parts is not None
        assert sum(f.parts.shares.values()) == pytest.approx(1)
        # A look at the clock before and after each part, one more at the end.
        assert f.parts.total == pytest.approx(1e3 * 7 / 1024)
        assert f.parts.draft == f.parts.verify == pytest.approx(1e3 * 2 / 1024)
        assert f.parts.shares["draft"] == pytest.approx(1 / 7)
        assert f.cost is not None
        assert f.cost.draft_step == pytest.approx(1 / f.cell.k)
        assert f.cost.verify == 1
    batch_1, batch_2 = figures.drafted
    assert batch_1.occupancy == 1
    assert batch_1.acceptance().rate == batch_2.acceptance().rate


def test_without_matplotlib_the_report_is_there(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raw.jsonl").write_bytes((whole / "raw.jsonl").read_bytes())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0
    wrote, note = result.stderr.splitlines()
    assert wrote == f"wrote {tmp_path / 'report.md'}"
    assert plots.MISSING in note
    assert sorted(f.name for f in tmp_path.iterdir()) == ["raw.jsonl", "report.md"]
    assert "![" not in (tmp_path / "report.md").read_text("utf-8")


def test_without_matplotlib_the_plots_that_are_there_stay_in_the_report(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links dropped, or to a file that is not there; titles that are forgotten."""
    pytest.importorskip("matplotlib")
    (tmp_path / "raw.jsonl").write_bytes((whole / "raw.jsonl").read_bytes())
    file, _ = write_report(tmp_path)
    drawn = file.read_text("utf-8")
    assert all(
        f"]({name}.png)\n" in drawn for name in ("speedup", "acceptance", "round")
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_report(tmp_path) == (file, False)
    assert file.read_text("utf-8") == drawn
    (tmp_path / "round.png").unlink()
    write_report(tmp_path)
    kept = file.read_text("utf-8")
    assert "(round.png)" not in kept
    assert drawn.startswith(kept.partition("(acceptance.png)")[0])
    # Nothing says what they show any more.
    file.unlink()
    write_report(tmp_path)
    links = [x for x in file.read_text("utf-8").splitlines() if x.startswith("![")]
    assert links == ["![speedup](speedup.png)", "![acceptance](acceptance.png)"]


def test_two_runs_are_compared(whole: Path, tiny: Tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run(tiny("batch=2", "max_tokens=8", "mlx_lm=false", "profile_rounds=0"), other)
    result = CliRunner().invoke(main, ["bench", "--compare", str(whole), str(other)])
    assert result.exit_code == 0
    rows = [x for x in result.stdout.splitlines() if x.startswith("| batch")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "batch 2: specdec, no draft",
        "batch 2: specdec, random:tiny:1, k = 2",
    ]
    assert "The recipes differ in `run`." in result.stdout
    assert "Different machines" not in result.stdout
    alone = tmp_path / "alone"
    run(tiny("batch=1", "num_draft_tokens=1", "repeat=1", "profile_rounds=0"), alone)
    # Plain decoding at batch 1 is all that they share with the second.
    result = CliRunner().invoke(main, ["bench", "--compare", str(other), str(alone)])
    assert result.exit_code == 2
    assert "have nothing in common" in result.stderr


def test_a_prefix_cache_is_warm_when_it_counts(tiny: Tiny, tmp_path: Path) -> None:
    """Both prompts find the common text there, in every pass."""
    settings = ("draft=[]", "context=[40]", "prefix_cache=[false, true]", "batch=2")
    recipe = tiny(*settings, "prefill_step_size=8", "mlx_lm=false", "profile_rounds=0")
    results = run(recipe, tmp_path / "out")
    for cell, passes in results.passes.items():
        for record in passes.values():
            (wave,) = record["waves"]
            if cell.conditions.prefix_cache:
                assert wave["prefix_tokens"] >= 2 * 40
            else:
                assert wave["prefix_tokens"] == 0
    text = report(Figures(results))
    assert "times sooner." in text
    assert "context" not in text.partition("## Speed")[2].partition("\n\nMedian")[0]


def test_sampled_cells_run_for_all_systems(tiny: Tiny, tmp_path: Path) -> None:
    """Every system can sample; this engine's counts do not depend on the batch."""
    results = run(tiny("temperature=0.8", "repeat=1"), tmp_path / "out")
    assert {c.conditions.temperature for c in results.passes} == {0.8}
    batch_1, batch_2 = Figures(results).drafted
    assert sorted(batch_1.rows) == sorted(batch_2.rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench"], "name a recipe: a .toml file, or one of acceptance-gsm8k"),
        (["bench", "nothing"], "no recipe 'nothing'"),
        (["bench", "prefix", "--set", "batch=0"], "recipe prefix: sweep.batch is 0"),
        (["bench", "prefix", "--out", " "], "--out is empty"),
        (["bench", "prefix", "--compare", "a", "b"], "--compare takes two folders"),
        (["bench", "--compare", "nothing", "b"], "nothing holds no results"),
        (["report", "nothing"], "nothing holds no results"),
        (["bench", "acceptance-gsm8k"], "prompts.source is missing: give it"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("specdec: error: ")
    assert message in line


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


def test_a_misspelt_draft_is_told_before_the_target_loads(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("specdec.tools.bench.run.load_model")
    with pytest.raises(ModelNotFoundError, match="no model at no-such: give a folder"):
        run(tiny("draft=['random:tiny:1', 'no-such']"), tmp_path / "out")


def test_any_draft_can_be_measured(tiny: Tiny, tmp_path: Path) -> None:
    """N-grams, which mlx-lm's speculation does not know, and layers of the target."""
    recipe = tiny("draft=['ngram', 'layers:0']", "repeat=1", "max_tokens=12")
    results = run(recipe, tmp_path / "out")
    theirs = {c.draft for c in results.passes if c.system == "mlx-lm speculative"}
    assert theirs == {"layers:0"}
    figures = Figures(results)
    assert {f.cell.draft for f in figures.drafted} == {"ngram", "layers:0"}
    text = report(figures)
    assert "fastest draft" in text


# -- results that were edited by hand, and recipes of any kind ----------------------

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
    kinds = {(json.loads(x)["kind"], "rounds" in x, '"draft"' in x): x for x in lines}
    rng = random.Random(3)
    cases = [
        (lines.index(line), at, odd)
        for line in kinds.values()
        for at in places(json.loads(line))
        for odd in ODD
    ]
    refused = []
    for number, at, odd in rng.sample(cases, 400):
        changed = [*lines]
        changed[number] = edited(lines[number], at, odd)
        text = "\n".join(changed) + "\n"
        (tmp_path / "raw.jsonl").write_text(text, "utf-8")
        try:
            report(Figures(Results.read(tmp_path))).encode()
        except ConfigError as error:
            refused.append(str(error))
    assert max(map(len, refused)) <= 1000
    assert len(refused) > 200  # the others are free texts, or numbers that may be so


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

    monkeypatch.setattr("specdec.tools.bench.raw.os.fsync", full)
    with pytest.raises(SpecdecError, match=r"raw.jsonl cannot be written \(No space"):
        run(tiny(), tmp_path / "out")
    monkeypatch.undo()
    assert len(run(tiny(), tmp_path / "out").passes) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" + ".a" * 5000 + " = 1", "nested too deep"),
        ("a = " + "[" * 5000, "nested too deep"),
        ("a = " + "9" * 5000, "too many digits"),
        (
            "target = 5\n[prompts]\nsource = 'file:x'",
            "target is 5: it must be the name of a model",
        ),
        (TINY.replace("repeat = 2", "repeat = 1000000000"), "lower run.repeat"),
        (TINY.replace("random:9", "random:\u0663"), "random:LENGTH, LENGTH above 0"),
        (TINY.replace("batch = [1, 2]", "batch = [" + "9" * 400 + "]"), "at most"),
    ],
)
def test_recipes_of_any_kind(text: str, message: str, tmp_path: Path) -> None:
    """They end in errors of Python's own, or in lists that fill the memory."""
    (tmp_path / "a.toml").write_text(text, "utf-8")
    with pytest.raises(ConfigError) as error:
        Recipe.read(tmp_path / "a.toml")
    assert message in str(error.value)
