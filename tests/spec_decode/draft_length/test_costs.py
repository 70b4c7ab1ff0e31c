"""Costs of rounds: between and beyond what was measured, and corrected by rounds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specdec.spec_decode.draft_length import (
    AutoLength,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)
from tests.spec_decode.draft_length.simulation import Costs

CPU = Costs(0.1, 0.3, 0.036)


def test_verify_forwards_between_and_beyond_the_measured() -> None:
    costs = ForwardCosts([CPU.measured(8)])
    for num_tokens in range(1, 12):
        assert costs.verify(8, num_tokens) == pytest.approx(CPU.verify(8, num_tokens))
    # Other batch sizes, by the number of tokens.
    assert costs.verify(1, 1) == pytest.approx(CPU.verify(1, 1), rel=0.05)
    assert costs.verify(4, 3) == pytest.approx(CPU.verify(4, 3), rel=0.05)
    assert costs.draft_step(2) == pytest.approx(CPU.draft_step(2), rel=0.05)


def test_a_slower_measurement_of_fewer_tokens_makes_none_cheaper() -> None:
    costs = ForwardCosts([Forwards(1, {1: 0.2, 2: 0.1}, 0.01)])
    assert costs.verify(1, 8) >= costs.verify(1, 2)
    assert costs.verify(1, 8) > 0


def test_near_batch_sizes_are_covered() -> None:
    costs = ForwardCosts([CPU.measured(8)])
    assert [b for b in range(1, 20) if costs.covers(b)] == [6, 7, 8, 9, 10, 11, 12]


def test_a_context_adds_to_every_round_what_reading_it_takes() -> None:
    """Catches a context that is charged to k, and one that is thought to be free."""
    plain = Forwards(4, {1: 1.0, 2: 1.1, 5: 1.4}, 0.1)
    even = replace(plain, context=2048, longer={1: 1.5, 2: 1.6, 5: 1.9})
    steep = replace(plain, context=2048, longer={1: 1.5, 2: 1.7, 5: 2.4})
    alone = replace(plain, context=2048, longer={1: 1.5})
    for measured, read_by_5 in ((even, 0.5), (steep, 1.0), (alone, 0.5)):
        costs = ForwardCosts([measured])
        assert costs.round(4, 0) == 1.0
        assert costs.round(4, 4) == pytest.approx(1.8)
        for rows, tokens in ((4, 2048), (4, 8192), (2, 4096)):
            costs.context = 0
            step, wide = costs.drafting(rows, 4), costs.verify(rows, 5)
            once, costs.context = costs.verify(rows, 1), tokens
            share = rows * tokens / (4 * 2048)
            assert costs.round(rows, 0) == pytest.approx(once + 0.5 * share)
            drafting = step * (1 + 0.5 * share / once)
            assert costs.round(rows, 4) == pytest.approx(
                drafting + wide + read_by_5 * share
            )
    costs = ForwardCosts([plain])
    costs.context = 8192  # nothing is known of it
    assert costs.round(4, 4) == pytest.approx(1.8)


def test_long_prompts_are_measured_with_a_context() -> None:
    plain = Forwards(4, {1: 1.0}, 0.1)
    known = replace(plain, context=2048, longer={1: 1.5})
    assert [ForwardCosts([plain]).covers(4, n) for n in (0, 1000, 2000)] == [1, 1, 0]
    assert ForwardCosts([known]).covers(4, 30_000)
    asked: list[tuple[int, int]] = []

    def measure(rows: int, *, context: int) -> Forwards:
        asked.append((rows, context))
        return replace(known, num_rows=rows) if context else plain

    length = AutoLength(RoundCosts(ForwardCosts()), forwards=measure)
    for tokens in (500, 700, 3000, 9000):
        if rows := length.unmeasured(4, tokens):
            length.measure(rows, tokens)
    assert asked == [(4, 0), (4, 3000)]


def observe(
    costs: RoundCosts, k: int, seconds: float, *, joining: bool = False
) -> bool:
    timing = RoundTiming(1, k, [], seconds, not joining, joining=joining)
    return costs.observe(timing, once=0.0)


def run(costs: RoundCosts, truth: Costs, ks: list[int], pace: float = 1.0) -> None:
    rng = random.Random(0)
    for k in ks:
        observe(costs, k, truth(1, k) * pace * rng.uniform(0.97, 1.03))


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_rounds_correct_what_was_measured_wrong(wrong: float) -> None:
    measured = CPU.measured(1, draft=wrong, verify=wrong)
    costs = RoundCosts(ForwardCosts([measured]))
    run(costs, CPU, [0] * 4 + ([2] * 4 + [0] * 4) * 30)
    found = costs.relative(1, 2)
    assert found == pytest.approx(CPU(1, 2) / CPU(1, 0), rel=0.1)
    # Its neighbours are seen in the same light.
    found = costs.relative(1, 3)
    assert found == pytest.approx(CPU(1, 3) / CPU(1, 0), rel=0.35)
    doubted = costs.relative(1, 3, doubt=1.0) / found
    assert doubted < costs.relative(1, 2, doubt=1.0) / costs.relative(1, 2)


def test_the_pace_of_the_machine_is_no_cost() -> None:
    """Slow for a long time at one k, then fast: ratios stay what they were."""
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0, 0, 2, 2, 0, 0])
    run(costs, CPU, [0] * 200, pace=3.0)
    run(costs, CPU, [2] * 200, pace=3.0)
    run(costs, CPU, [2] * 200, pace=1.0)
    found = costs.relative(1, 2)
    assert found == pytest.approx(CPU(1, 2) / CPU(1, 0), rel=0.1)


def test_fewer_rows_at_the_end_of_jobs_do_not_change_a_cost() -> None:
    """Catches a wrong forward of few rows that each job charges to k with many."""
    forwards = Forwards(32, {1: 4e-3, 2: 4.2e-3, 7: 5e-3}, 1e-6, draft_once=1e-3)
    costs = RoundCosts(ForwardCosts([forwards]))

    def rounds(num_rows: int, k: int, seconds: float) -> None:
        for _ in range(20):
            timing = RoundTiming(num_rows, k, [], seconds)
            costs.observe(timing, once=0.0)

    for rows in (32, 8):
        for k, seconds in ((0, 4e-3), (6, 6e-3), (0, 4e-3), (6, 6e-3)):
            rounds(rows, k, seconds)
    known = costs.relative(32, 6)
    assert known == pytest.approx(1.5, rel=0.05)
    for _ in range(20):
        for rows, pace in ((32, 1.0), (8, 1.25)):
            rounds(rows, 6, 6e-3 * pace)
    assert costs.relative(32, 6) == pytest.approx(known, rel=0.05)


def test_a_plain_round_shows_whose_the_change_is() -> None:
    """Rounds that draft become slower; the next plain one says whether all did."""
    truth = CPU(1, 2) / CPU(1, 0)
    for of_all in (False, True):
        costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
        run(costs, CPU, [0] * 4 + [2] * 50)
        assert costs.relative(1, 0, doubt=1.0) > 0.8
        run(costs, CPU, [2] * 30, pace=3.0)
        assert costs.relative(1, 2) == pytest.approx(truth, rel=0.2)
        assert costs.relative(1, 0, doubt=1.0) < 0.4
        run(costs, CPU, [0], pace=3.0 if of_all else 1.0)
        found = costs.relative(1, 2)
        assert found == pytest.approx(truth if of_all else 3 * truth, rel=0.2)
        # Other k are as much slower, and less sure.
        assert (costs.relative(1, 4) > 2.5 * CPU(1, 4) / CPU(1, 0)) is not of_all
        if of_all:  # the next change is doubted less
            run(costs, CPU, [2] * 30, pace=9.0)
            assert 0.5 < costs.relative(1, 0, doubt=1.0) < 0.7


def test_a_block_costs_hardly_more_than_a_token() -> None:
    """Taken for steps, blocks would be kept short; of other batch sizes too."""
    costs = ForwardCosts([Forwards(2, {1: 1.0, 9: 1.8}, 0.01, draft_once=0.3)])
    for k, drafting in ((0, 0.0), (1, 0.31), (8, 0.38)):
        verify = costs.verify(2, k + 1)
        assert costs.round(2, k) == pytest.approx(drafting + verify)
    assert costs.drafting(4, 8) == pytest.approx(0.38 * costs.verify(4, 1))


def test_drafting_is_never_cheaper_than_not() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    for _ in range(20):
        observe(costs, 0, 0.1)
        observe(costs, 1, 0.05)
    assert costs.relative(1, 1) == 1.0


def test_a_stall_does_not_spoil_a_cost() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0, 0, 0, 2, 2, 2, 0, 0, 0])
    observe(costs, 2, 30.0)
    run(costs, CPU, [0, 0, 0])
    assert costs.relative(1, 2) < 1.5 * CPU(1, 2) / CPU(1, 0)


def test_a_stall_after_a_change_does_not_spoil_a_cost() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0] * 6)
    observe(costs, 2, 30 * CPU(1, 2))
    run(costs, CPU, [2, 2, 0, 0, 0, 2, 2, 2])
    assert costs.relative(1, 2) < 1.5 * CPU(1, 2) / CPU(1, 0)


def test_a_new_shape_costs_once_and_is_not_timed() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]), new_shape=1.0)
    # A fifth of it: later requests use the shape too.
    assert costs.once(1, 2, 0) == pytest.approx(2.0)
    before = costs.relative(1, 2)
    assert not observe(costs, 2, CPU(1, 2) + 1.0)
    assert costs.once(1, 2, 0) == 0
    assert costs.once(1, 4, 0) == pytest.approx(2.0)
    assert costs.relative(1, 2) == before


def test_catching_up_costs_by_tokens() -> None:
    """A draft's forward grows with its tokens as the target's does."""
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    expected = CPU.catch_up(1, 100) / CPU(1, 0)
    assert costs.once(1, 2, 100) == pytest.approx(expected, rel=0.1)
    free = RoundCosts(ForwardCosts([Costs(0.1, 0.0, 0.001).measured(1)]))
    assert free.once(1, 4, 10_000) == 0


def test_a_cost_is_doubted_as_time_goes_by() -> None:
    """Catches plain rounds that are never tried again while a draft seems to pay."""
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0, 0, 2])
    before = costs.relative(1, 0, doubt=1.0)
    run(costs, CPU, [2] * 200)
    assert costs.relative(1, 0, doubt=1.0) < before < 1 == costs.relative(1, 0)


def test_new_forwards_are_used_at_once() -> None:
    costs = RoundCosts(ForwardCosts([Forwards(4, {1: 1.0, 2: 1.0}, 0.1)]))
    assert costs.relative(16, 1) == pytest.approx(1.1)
    costs.forwards.add(Forwards(16, {1: 1.0, 2: 5.0}, 0.1))
    assert costs.relative(16, 1) == pytest.approx(5.1)


def test_rounds_beside_prompts_teach_no_costs() -> None:
    """Catches rounds beside a prefill that are taken for usual ones, or for joins.

    One of them may compile, and says nothing about the next join.
    """
    forwards = ForwardCosts([CPU.measured(1)])
    usual, compiled = RoundCosts(forwards), RoundCosts(forwards)
    for costs, more in (usual, 0.0), (compiled, 100.0):
        run(costs, CPU, [0, 0, 2, 2, 0])
        before = costs.relative(1, 2)
        for _ in range(3):
            assert not observe(costs, 0, 3 * CPU(1, 0), joining=True)
            assert not observe(costs, 2, CPU(1, 2) + 4 * CPU(1, 0) + more, joining=True)
            more = 0.0
        assert costs.relative(1, 2) == before
    assert vars(usual) == vars(compiled)
