"""Jobs: what is asked of whom, what is timed, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.tools.bench.cells import units_of
from specdec.tools.bench.figures import Figures
from specdec.tools.bench.job import Rounds, requests_of
from specdec.tools.bench.raw import Results
from specdec.tools.bench.report import report

from .conftest import Ticks, Tiny, run


def test_every_system_decodes_the_same_requests_to_the_same_tokens(whole: Path) -> None:
    """A request lost, or given to the wrong row, or cut at another length."""
    results = Results.read(whole)
    systems = {cell.system for cell in results.passes}
    assert systems == {"mlx-lm step", "mlx-lm batch", "mlx-lm speculative", "specdec"}
    first = None
    for passes in results.passes.values():
        assert sorted(passes) == [0, 1, 2]
        for job in passes.values():
            answers = [(r.prompt_tokens, r.tokens, r.digest) for r in job.requests]
            first = first or answers
            assert answers == first
            for r in job.requests:
                assert 0 < r.first <= r.ended <= job.seconds
    assert first is not None
    assert len({tokens for _, tokens, _ in first}) > 2


def test_rounds_are_all_there(whole: Path) -> None:
    """Rounds that no time was taken of, or that are counted twice."""
    for cell, passes in Results.read(whole).passes.items():
        if cell.system != "specdec":
            continue
        for number, job in passes.items():
            if cell.batch == 1:
                rounds = sum(r.rounds for r in job.requests)
                assert sum(r.number for r in job.rounds) == rounds
            rows = [row for _, rows in job.traced for row in rows]
            if number:
                assert not rows
                continue
            assert sum(d for d, _ in rows) == sum(r.drafted for r in job.requests)
            assert sum(a for _, a in rows) == sum(r.accepted for r in job.requests)
            # First tokens come from prompts; each row's round adds one more than it
            # accepted.
            for r in job.requests:
                assert r.tokens <= 1 + r.rounds + r.accepted


def test_the_order_gives_a_stopped_run_some_of_all(tiny: Tiny) -> None:
    """A run that time ends early would have no figure of its last batch."""
    units = list(units_of(tiny()))
    assert len(set(units)) == len(units)
    assert [u.number for u in units] == sorted(u.number for u in units)
    assert {u.cell.batch for u in units if u.number == 0} == {1, 2}


def test_a_run_without_time_stops_and_says_so(tiny: Tiny, tmp_path: Path) -> None:
    figures = Figures(run(tiny("minutes=0.0001"), tmp_path / "out"))
    assert 0 < len(figures.cells) < figures.num_units
    assert "**Not complete" in report(figures)


def test_lengths_are_the_same_in_every_run(tiny: Tiny) -> None:
    """Systems compared on other lengths, or all prompts of one length."""
    recipe = tiny("max_tokens=256", "least_tokens=32", "prompts_per_row=8")
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
    few = requests_of(prompts, tiny("max_tokens=9", "least_tokens=5"), 32)
    assert {r.max_tokens for r in few} == {5, 6, 7, 8, 9}
    # A prompt has its length in every job.
    by_prompt = {tuple(r.prompt): r.max_tokens for r in all_}
    assert all(by_prompt[tuple(r.prompt)] == r.max_tokens for r in one)


def test_a_round_is_near_a_join_on_either_side() -> None:
    """A round held up by the prompt of a row that joins, counted as a quiet one."""
    rounds = Rounds(Ticks())
    rounds.begin()
    for i in range(7):
        if i == 3:
            rounds.join()
        rounds.end(k=2)
    rounds.begin()  # nothing ran meanwhile
    rounds.end(k=2)
    numbers = {(r.k, r.near_join): r.number for r in rounds.times()}
    assert numbers == {(2, 1): 3, (2, 0): 5}
    assert {r.p50 for r in rounds.times()} == {round(1e3 / 1024, 3)}


def test_a_prefix_cache_is_warm_when_it_counts(tiny: Tiny, tmp_path: Path) -> None:
    """Both prompts find the common text there, in every pass."""
    settings = ("draft=[]", "context=[40]", "prefix_cache=[false, true]", "batch=2")
    few = ("prefill_step_size=8", "mlx_lm=false", "count=2")
    results = run(tiny(*settings, *few), tmp_path / "out")
    for cell, passes in results.passes.items():
        for job in passes.values():
            reused = [r.prefix_tokens for r in job.requests]
            assert min(reused) >= 40 if cell.prefix_cache else reused == [0, 0]
    text = report(Figures(results))
    assert "times sooner (n = 4)." in text
    assert "context" not in text.partition("| system |")[2].partition("\n\nTokens")[0]


def test_any_draft_can_be_measured(tiny: Tiny, tmp_path: Path) -> None:
    """N-grams, which mlx-lm's speculation does not know, and layers of the target."""
    drafts = ("draft=['ngram', 'layers:0']", "temperature=0.8", "count=2")
    results = run(tiny(*drafts, "repeat=1"), tmp_path / "out")
    theirs = {c.draft for c in results.passes if c.system == "mlx-lm speculative"}
    assert theirs == {"layers:0"}
    figures = Figures(results)
    assert {f.cell.draft for f in figures.drafted} == {"ngram", "layers:0"}
    # Every system samples; this engine's counts do not depend on the batch.
    for draft in ("ngram", "layers:0"):
        one, two = (
            sorted(f.rows)
            for f in figures.drafted
            if f.cell.draft == draft and f.cell.num_draft_tokens == 2
        )
        assert one == two
    # An n-gram draft without a match drafts nothing in a round.
    for f in figures.drafted:
        first = f.cold or f.counted[0]
        drafted = [any(d for d, _ in rows) for _, rows in first.traced]
        assert sum(r.number for r in first.rounds if r.k) == len(drafted)
        if f.cell.num_draft_tokens == 2:
            assert all(drafted) == (f.cell.draft == "layers:0")
