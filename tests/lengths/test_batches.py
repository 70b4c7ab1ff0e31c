"""What one batch leaves to the next, and what a batch's deadline counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.lengths import (
    AutoLength,
    BatchState,
    ForwardCosts,
    RoundCosts,
    RoundOutcome,
)
from specdec.lengths.auto import CALM

from .simulation import Costs

GPU = Costs(1.0, 0.2, 0.005)


def fresh(k: int, left: dict[int, int] | None = None) -> BatchState:
    """A batch of which no round was handed out, with a draft of its own."""
    return BatchState(2, [k] * 2, 100.0, left=left or {}, fresh=True)


def test_a_batch_is_not_given_what_another_waited_for() -> None:
    """Its rows ended while their drafter was still taking in what they had."""
    length = AutoLength(RoundCosts(ForwardCosts([GPU.measured(2)])))
    length.observe(RoundOutcome(2, 0, [], 1.0))
    late = BatchState(2, [8] * 2, 5.0, 4000, begun=False)
    assert length.choose(late) == 0
    length._wanted = (8, True)
    length.observe(RoundOutcome(2, 0, [], undrafted=4000, forced=True))
    length._credit.left = -3.0
    expected = AutoLength(length.costs)
    expected._credit.left = -3.0
    assert length.choose(fresh(8)) == expected.choose(fresh(8)) != 8


def test_a_batch_does_not_pay_for_rounds_of_the_one_before() -> None:
    """Which were plain, and not looked at one by one."""
    length = AutoLength(RoundCosts(ForwardCosts([GPU.measured(8)])))
    length._credit.left = -5.0
    left = dict.fromkeys(range(8), 100)
    for _ in range(CALM + 4):
        length.choose(BatchState(8, [8] * 8, 100.0, 100_000, left=left, begun=False))
        length.observe(RoundOutcome(8, 0, [], 1.0))
    assert length._rest._read
    left = dict.fromkeys(range(8, 12), 60)
    length.choose(BatchState(4, [8] * 4, 60.0, left=left, fresh=True))
    length.observe(RoundOutcome(4, 0, [], 1.0))
    one = length.costs.forwards.round(4, 0)
    assert length._deadline._spent == pytest.approx(one)


def test_a_new_shape_is_foreseen_once() -> None:
    """Though none of the rounds in which it is got ready for is timed."""
    costs = RoundCosts(ForwardCosts([GPU.measured(1)]), new_shape=10.0)
    length = AutoLength(costs)
    for _ in range(3):
        length.observe(RoundOutcome(1, 0, [], 1.0))
    found = []
    for _ in range(3):
        found.append(costs.extra(1, 4, 0))
        length.observe(RoundOutcome(1, 4, [(4, 0)]))
    assert found[0] > 0
    assert found[1:] == [0, 0]


def test_what_drafting_held_up_counts_for_when_a_batch_ends() -> None:
    length = AutoLength(RoundCosts(ForwardCosts([GPU.measured(2)])))
    for _ in range(4):
        length.observe(RoundOutcome(2, 0, [], 1.0))
    length.choose(fresh(8, {0: 100, 1: 100}))
    one = length.costs.forwards.round(2, 0)
    length.observe(RoundOutcome(2, 0, [], spent=12.0))
    assert length._deadline._spent == pytest.approx(12 * one, rel=0.01)
    # Not without bounds: something else may have been in the way.
    length.observe(RoundOutcome(2, 0, [], spent=1e6))
    assert length._deadline._spent < 40 * one


def test_prompts_that_a_drafter_took_for_nothing_are_charged() -> None:
    """Of a draft that is never right, most batches begin without one."""
    costs = Costs(1.0, 0.5, 0.005)
    forwards = replace(costs.measured(2), taking_in=6.0)
    length = AutoLength(RoundCosts(ForwardCosts([forwards])))
    begun = 0
    for _ in range(40):
        begins = length.may_pay(BatchState(2, [8] * 2, 100.0, 200))
        begun += begins
        for number in range(100):
            state = BatchState(
                2, [8] * 2, 100.0, number and 1, fresh=not number, begun=begins
            )
            k = length.choose(state) if begins else 0
            length.observe(RoundOutcome(2, k, [(k, 0)] * 2 if k else [], costs(2, k)))
    assert 1 <= begun <= 8
