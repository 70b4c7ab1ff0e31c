"""Whole jobs: what is asked of whom, what is timed, what the report says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.errors import ConfigError
from specdec.tools.bench.cells import units_of
from specdec.tools.bench.figures import Figures
from specdec.tools.bench.job_figures import JobFigures, Jobs, arrivals_per_second
from specdec.tools.bench.jobs import Job, RoundTimes, requests_of
from specdec.tools.bench.prompts import encode_set
from specdec.tools.bench.raw import Results
from specdec.tools.bench.recipe import Recipe
from specdec.tools.bench.report import block, report
from specdec.tools.bench.run import run_recipe
from specdec.tools.bench.tables import percentile

from .conftest import Ticks

Tiny = Callable[..., Recipe]
JOBS = ("jobs=true", "count=5", "batch=[1, 2]", "max_tokens=9", "least_tokens=3")
AUTO = "num_draft_tokens=[2, 'auto']"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with jobs of all kinds, by a clock that counts."""
    from .conftest import TINY

    folder = tmp_path_factory.mktemp("jobs")
    file = folder / "tiny.toml"
    file.write_text(TINY, "utf-8")
    recipe = Recipe.read(file, [*JOBS, AUTO, "load=[0, 0.5]", "repeat=1"])
    with pytest.MonkeyPatch.context() as patch:
        # Time passes by looking at the clock: waiting for a request waits for nothing.
        patch.setattr(time, "sleep", lambda seconds: None)
        run_recipe(recipe, folder / "out", command="test", clock=Ticks())
    return folder / "out"


def test_every_system_decodes_the_same_requests_to_the_same_tokens(done: Path) -> None:
    """A request lost, or given to the wrong row, or cut at another length."""
    results = Results.read(done)
    systems = {cell.system for cell in results.passes}
    assert systems == {"mlx-lm step", "mlx-lm batch", "mlx-lm speculative", "specdec"}
    first = None
    for passes in results.passes.values():
        for job in passes.values():
            found = [
                (r["prompt_tokens"], r["tokens"], r["digest"]) for r in job["requests"]
            ]
            first = first or found
            assert found == first
            for r in job["requests"]:
                assert r["arrived"] <= r["first"] <= r["ended"] <= job["seconds"]
    assert first is not None
    assert len({tokens for _, tokens, _ in first}) > 2


def test_rounds_are_all_there(done: Path) -> None:
    """Rounds that no time was taken of, or that are counted twice."""
    for cell, passes in Results.read(done).passes.items():
        if cell.system != "specdec" or cell.conditions.batch > 1:
            continue
        for job in passes.values():
            timed = sum(r["number"] for r in job["rounds"])
            assert timed == sum(r["rounds"] for r in job["requests"])


def test_the_order_gives_a_stopped_run_some_of_all(tiny: Tiny) -> None:
    """A run that time ends early would have no figure of its last batch."""
    units = list(units_of(tiny(*JOBS, "load=[0, 1]", "repeat=2")))
    at_once = [u for u in units if not u.cell.conditions.load]
    assert [u.number for u in at_once] == sorted(u.number or 0 for u in at_once)
    assert {u.cell.conditions.batch for u in at_once if u.number == 0} == {1, 2}
    assert units[: len(at_once)] == at_once
    assert {u.number for u in units[len(at_once) :]} == {1}
    assert len(set(units)) == len(units)


def test_a_run_without_time_stops_and_says_so(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny(*JOBS, "minutes=0.0001")
    results = run_recipe(recipe, tmp_path / "out", command="test", clock=Ticks())
    figures = Figures(results)
    assert 0 < len(figures.cells) < figures.num_units
    assert "**Not complete" in report(figures)


def test_lengths_and_arrivals_are_the_same_in_every_run(tiny: Tiny) -> None:
    """Systems compared on other lengths, or all prompts of one length."""
    recipe = tiny(*JOBS, "max_tokens=256", "least_tokens=32", "prompts_per_row=8")
    prompts: list[Any] = [[i] for i in range(64)]
    one = requests_of(prompts, recipe, 1)
    assert one == requests_of(prompts, recipe, 1)
    assert len(one) == 8
    all_ = requests_of(prompts, recipe, 32)
    lengths = [r.max_tokens for r in all_]
    assert len(all_) == 64
    assert min(lengths) < 45
    assert max(lengths) > 243
    assert 135 < sum(lengths) / 64 < 153
    # A prompt has its length in every job.
    by_prompt = {tuple(r.prompt): r.max_tokens for r in all_}
    assert all(by_prompt[tuple(r.prompt)] == r.max_tokens for r in one)
    spaced = [r.arrives for r in requests_of(prompts, recipe, 32, rate=2.0)]
    assert spaced == sorted(spaced)
    assert spaced[0] == 0
    assert 20 < spaced[-1] < 50
    assert {r.arrives for r in all_} == {0.0}


def test_prompts_are_mixed_in_equal_parts(tmp_path: Path) -> None:
    """A long file that leaves a short one a few prompts, or none at the front."""
    (tmp_path / "a.txt").write_text("\n".join(f"a{i}" for i in range(40)), "utf-8")
    (tmp_path / "b.txt").write_text("\n".join(f"b{i}" for i in range(5)), "utf-8")
    table = {
        "prompts": {"source": ["file:a.txt", "file:b.txt"], "count": 8},
        "run": {"jobs": True},
        "target": "x",
    }

    class Words:
        has_chat_template = False
        bos_token = None

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1]

    target: Any = type("T", (), {"tokenizer": Words()})()
    recipe = Recipe.of(table, name="mixed", folder=tmp_path)
    found = encode_set(recipe, target, 100)
    assert [str(p)[0] for p in found.prompts] == list("abababab")
    table["prompts"] = {**table["prompts"], "count": 14}  # type: ignore[dict-item]
    recipe = Recipe.of(table, name="mixed", folder=tmp_path)
    letters = [str(p)[0] for p in encode_set(recipe, target, 100).prompts]
    assert letters.count("b") == 5
    assert letters.count("a") == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["load=0.5"], "sweep.load is for jobs: set run.jobs=true"),
        ([AUTO], "'auto' is for jobs"),
        (["least_tokens=2"], "run.least_tokens is for jobs"),
        (["jobs=true", "context=5"], "sweep.context is [5]: it must be 0"),
        (["jobs=true", "least_tokens=9"], "run.least_tokens is 9: it must be at most"),
        (["jobs=true", "source=[]"], "prompts.source is []"),
        (["jobs=true", "load=-1"], "sweep.load is -1"),
        (["jobs=true", "num_draft_tokens=car"], "sweep.num_draft_tokens is 'car'"),
    ],
)
def test_what_does_not_go_together(
    tiny: Tiny, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(*settings)
    assert message in str(caught.value)


def test_a_round_is_near_a_join_on_either_side() -> None:
    """A round held up by the prompt of a row that joins, counted as a quiet one."""
    ticks = Ticks()
    job = Job([], ticks)
    times = RoundTimes(job)
    times.begin()
    for i in range(7):
        if i == 3:
            times.join()
        times.round(k=2)
    times.begin()  # nothing ran meanwhile
    times.round(k=2)
    times.finish()
    assert {key: len(ms) for key, ms in job.rounds.items()} == {
        (2, True): 3,
        (2, False): 5,
    }
    assert {ms for each in job.rounds.values() for ms in each} == {1e3 / 1024}


def made(
    seconds: float, requests: list[tuple[float, float, float, int]]
) -> dict[str, Any]:
    """A job of (arrived, first, ended, tokens)."""
    zero = dict.fromkeys(("prompt_tokens", "rounds", "drafted", "accepted"), 0)
    rows = [
        {**zero, "arrived": a, "first": f, "ended": e, "tokens": n, "digest": "x"}
        for a, f, e, n in requests
    ]
    return {"seconds": seconds, "requests": rows, "rounds": []}


def test_latencies_and_queues_by_hand() -> None:
    """Waiting counted from the job's beginning, or a queue that nobody sees."""
    from specdec.tools.bench.cells import Cell, Conditions

    cell = Cell(system="specdec", conditions=Conditions(load=0.5))
    steady = made(10, [(i, i + 0.5, i + 1.5, 11) for i in range(8)])
    f = JobFigures(cell, {1: steady})
    assert set(f.first_token_ms) == {500.0}
    assert f.token_ms == pytest.approx([100.0] * 8)
    assert f.offered == 1
    assert f.waiting == 0
    assert not f.saturated
    full = made(40, [(i, 4.0 * i, 4.0 * i + 4, 5) for i in range(1, 9)])
    f = JobFigures(cell, {1: full})
    assert f.waiting == 5
    assert f.saturated
    assert f.rates == {1: 1.0}


def test_percentiles_are_values_that_came() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (1, 10, 50, 99, 100)] == [1, 10, 50, 99, 100]
    assert percentile([3.0], 10) == percentile([3.0], 99) == 3.0


def test_requests_arrive_at_a_share_of_what_the_engine_does(done: Path) -> None:
    results = Results.read(done)
    for cell, passes in results.passes.items():
        rate = arrivals_per_second(results, cell)
        if not cell.conditions.load:
            assert rate == 0
            continue
        plain = next(
            f
            for c, f in Jobs(Figures(results)).cells.items()
            if c.system == "specdec"
            and c.draft is None
            and c.conditions.batch == cell.conditions.batch
            and not c.conditions.load
        )
        assert rate == pytest.approx(0.5 * 5 / plain.passes[1]["seconds"])
        arrived = [r["arrived"] for r in passes[1]["requests"]]
        assert arrived == sorted(arrived)
        assert arrived[-1] > 0


def test_the_report_and_the_block_have_every_system(done: Path) -> None:
    figures = Figures(Results.read(done))
    assert figures.missing == []
    text, pasted = report(figures), block(figures)
    for each in (text, pasted):
        assert "batch 2, all at once: mlx-lm, batch_generate" in each
        assert "batch 1, all at once: mlx-lm, generate_step" in each
        assert "batch 1, all at once: mlx-lm, random:tiny:1, k = 2" in each
        assert "batch 2, load 0.5: specdec, random:tiny:1, auto" in each
        assert "5 of 5" in each
    assert "\n#" not in f"\n{pasted}"
    assert "Median" not in pasted
    assert len(pasted) < len(text)


def test_the_command_ends_with_the_block(tiny: Tiny, tmp_path: Path) -> None:
    from .conftest import TINY

    file = tmp_path / "tiny.toml"
    file.write_text(TINY, "utf-8")
    arguments = ["bench", str(file), "--quiet", "--out", str(tmp_path / "out")]
    for setting in (*JOBS, "repeat=1", "batch=2"):
        arguments += ["--set", setting]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("**Tiny**\n")
    assert "MLX " in result.stdout
    assert "| batch 2: specdec, no draft |" in result.stdout
    assert (tmp_path / "out" / "report.md").is_file()


def test_a_draft_that_is_never_right(tiny: Tiny, tmp_path: Path) -> None:
    """The worst case of auto: tokens lost to it, or proposals that are right."""
    recipe = tiny(*JOBS, "draft=wrong:random:tiny", "batch=2", "repeat=1", AUTO)
    results = run_recipe(recipe, tmp_path / "out", command="test", clock=Ticks())
    digests = set()
    for cell, passes in results.passes.items():
        requests = passes[1]["requests"]
        digests.add(tuple(r["digest"] for r in requests))
        if cell.num_draft_tokens == 2:
            assert sum(r["drafted"] for r in requests) > 0
        assert sum(r["accepted"] for r in requests) == 0
    assert len(digests) == 1
    for draft in ("wrong:ngram", "wrong:ngram+random:tiny", "wrong:", "wrong:none"):
        with pytest.raises(ConfigError, match="stands before the name of a model"):
            tiny(f"draft={draft}")
