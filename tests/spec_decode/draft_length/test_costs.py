"""Costs of rounds: between and beyond what was measured, and corrected by rounds."""

from __future__ import annotations

import random

import pytest

from specdec.spec_decode.draft_length import (
    TAKEN_IN,
    ForwardCosts,
    Forwards,
    RoundCosts,
)
from specdec.spec_decode.draft_length.costs import FEW
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


def run(costs: RoundCosts, truth: Costs, ks: list[int], pace: float = 1.0) -> None:
    rng = random.Random(0)
    for k in ks:
        costs.observe(1, k, truth(1, k) * pace * rng.uniform(0.97, 1.03))


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_rounds_correct_what_was_measured_wrong(wrong: float) -> None:
    measured = CPU.measured(1, draft=wrong, verify=wrong)
    costs = RoundCosts(ForwardCosts([measured]))
    run(costs, CPU, [0] * 4 + ([2] * 4 + [0] * 4) * 30)
    found, _ = costs.relative(1, 2)
    assert found == pytest.approx(CPU(1, 2) / CPU(1, 0), rel=0.1)
    # Its neighbours are seen in the same light.
    found, deviation = costs.relative(1, 3)
    assert found == pytest.approx(CPU(1, 3) / CPU(1, 0), rel=0.35)
    assert deviation > costs.relative(1, 2)[1]


def test_the_pace_of_the_machine_is_no_cost() -> None:
    """Slow for a long time at one k, then fast: ratios stay what they were."""
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0, 0, 2, 2, 0, 0])
    run(costs, CPU, [0] * 200, pace=3.0)
    run(costs, CPU, [2] * 200, pace=3.0)
    run(costs, CPU, [2] * 200, pace=1.0)
    found, _ = costs.relative(1, 2)
    assert found == pytest.approx(CPU(1, 2) / CPU(1, 0), rel=0.1)


def test_drafting_is_never_cheaper_than_not() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    for _ in range(20):
        costs.observe(1, 0, 0.1)
        costs.observe(1, 1, 0.05)
    assert costs.relative(1, 1)[0] == 1.0


def test_a_stall_does_not_spoil_a_cost() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0, 0, 0, 2, 2, 2, 0, 0, 0])
    costs.observe(1, 2, 30.0)
    run(costs, CPU, [0, 0, 0])
    assert costs.relative(1, 2)[0] < 1.5 * CPU(1, 2) / CPU(1, 0)


def test_a_stall_behind_a_change_does_not_spoil_a_cost() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0] * 6)
    costs.observe(1, 2, 30 * CPU(1, 2))
    run(costs, CPU, [2, 2, 0, 0, 0, 2, 2, 2])
    assert costs.relative(1, 2)[0] < 1.5 * CPU(1, 2) / CPU(1, 0)


def test_a_new_shape_costs_once_and_is_not_timed() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]), new_shape=1.0)
    # A fifth of it: later requests use the shape too.
    assert costs.extra(1, 2, 0) == pytest.approx(2.0)
    before = costs.relative(1, 2)
    costs.observe(1, 2, CPU(1, 2) + 1.0)
    assert costs.extra(1, 2, 0) == 0
    assert costs.extra(1, 4, 0) == pytest.approx(2.0)
    assert costs.relative(1, 2)[0] == before[0]


def test_catching_up_costs_by_tokens_and_is_not_taken_for_the_round() -> None:
    costs = RoundCosts(ForwardCosts([CPU.measured(1)]))
    run(costs, CPU, [0, 0, 2, 2, 0, 0])
    before, expected = costs.relative(1, 2)[0], costs.extra(1, 2, 100)
    assert expected == pytest.approx(CPU.catch_up(1, 100) / CPU(1, 0), rel=0.1)
    # It turns out to take a third.
    for _ in range(6):
        costs.observe(1, 2, CPU(1, 2) + CPU.catch_up(1, 100) / 3, undrafted=100)
    assert costs.relative(1, 2)[0] == before
    assert costs.extra(1, 2, 100) == pytest.approx(expected / 3, rel=0.3)


def test_what_a_drafter_takes_in_costs_what_was_measured() -> None:
    """At other batch sizes in proportion; little is taken in by the way."""
    verify = {1: 1.0, 2: 1.0, 5: 1.0}
    costs = ForwardCosts([Forwards(8, verify, 0.2, taking_in=4.0)])
    assert costs.catch_up(8, 0) == 0
    assert costs.catch_up(8, FEW) == 0
    assert costs.catch_up(8, TAKEN_IN) == 4.0
    assert costs.catch_up(8, 3 * TAKEN_IN) == 12.0
    assert costs.catch_up(16, TAKEN_IN) == 8.0
    # A forward of the draft, at least.
    assert costs.catch_up(1, FEW + 1) == pytest.approx(0.2)


def test_where_shapes_repeat_padding_is_taken_in_too() -> None:
    """Twenty tokens are written as 128, and cost as many."""
    forwards = Forwards(8, {1: 1.0, 2: 1.0, 5: 1.0}, 0.2, taking_in=4.0)
    exact = RoundCosts(ForwardCosts([forwards]))
    padded = RoundCosts(ForwardCosts([forwards]), new_shape=1.0)
    padded.meet(8, 2)
    for missed, as_many in ((2 * FEW, 2 * FEW), (20, TAKEN_IN), (TAKEN_IN + 3, None)):
        expected = exact.extra(8, 2, as_many or missed)
        assert padded.extra(8, 2, missed) == pytest.approx(expected)


def test_a_free_drafter_has_nothing_to_catch_up_with() -> None:
    free = Costs(0.1, 0.0, 0.001)
    costs = RoundCosts(ForwardCosts([free.measured(1)]))
    assert costs.extra(1, 4, 10_000) == 0
    run(costs, free, [0, 0])
    for _ in range(4):
        costs.observe(1, 1, 0.15, undrafted=50)
        costs.observe(1, 0, 0.1)
    assert costs.relative(1, 1)[0] > 1.2


def test_new_forwards_are_looked_at_at_once() -> None:
    costs = RoundCosts(ForwardCosts([Forwards(4, {1: 1.0, 2: 1.0}, 0.1)]))
    assert costs.relative(16, 1)[0] == pytest.approx(1.1)
    costs.add(Forwards(16, {1: 1.0, 2: 5.0}, 0.1))
    assert costs.relative(16, 1)[0] == pytest.approx(5.1)
