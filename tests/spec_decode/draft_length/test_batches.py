"""What one batch leaves to the next, and what a batch's deadline counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.spec_decode.draft_length import (
    AutoLength,
    BatchState,
    ForwardCosts,
    RoundCosts,
    RoundOutcome,
)
from specdec.spec_decode.draft_length.rest import CALM

from .simulation import Costs, ask

GPU = Costs(1.0, 0.2, 0.005)


def fresh(k: int, left: dict[int, int] | None = None) -> BatchState:
    """A batch of which no round was handed out, with a draft of its own."""
    return BatchState(2, [k] * 2, 100.0, left=left or {}, fresh=True)


def test_a_batch_does_not_pay_for_rounds_of_the_one_before() -> None:
    """Which were plain, and not looked at one by one."""
    length = AutoLength(RoundCosts(ForwardCosts([GPU.measured(8)])))
    length._credit.left = -5.0
    left = dict.fromkeys(range(8), 100)
    for _ in range(CALM + 4):
        ask(length, BatchState(8, [8] * 8, 100.0, 100_000, left=left))
        length.observe(RoundOutcome(8, 0, [], 1.0))
    assert length._rest._read
    left = dict.fromkeys(range(8, 12), 60)
    length.choose(BatchState(4, [8] * 4, 60.0, left=left, fresh=True))
    length.observe(RoundOutcome(4, 0, [], 1.0))
    one = length.costs.forwards.round(4, 0)
    assert length._deadline._spent == pytest.approx(one)


def resting(num_rows: int, *, spent: float) -> AutoLength:
    """Behind many plain rounds, in the middle of a rest that has taken so long."""
    length = AutoLength(RoundCosts(ForwardCosts([GPU.measured(num_rows)])))
    length._credit.left = -5.0
    left = dict.fromkeys(range(num_rows), 100)
    state = BatchState(num_rows, [8] * num_rows, 100.0, 100_000, left=left)
    while length.held(num_rows) is None:
        length.choose(state)
        length.observe(RoundOutcome(num_rows, 0, [], 1.0))
    length._deadline._spent = 0.0
    for _ in range(3):
        length.observe(RoundOutcome(num_rows, 0, [], 1.0, spent=spent))
    assert length.held(num_rows) == 0
    return length


def test_a_batch_begins_with_a_thought() -> None:
    """Also where the one before had as many rows, and was resting."""
    length = resting(8, spent=1.0)
    thoughts: list[BatchState] = []
    length._think = lambda state: thoughts.append(state) or 0  # type: ignore[method-assign,func-returns-value]
    length.choose(BatchState(8, [8] * 8, 100.0, fresh=True))
    assert len(thoughts) == 1
    assert length.held(8) is None


def test_where_a_row_ends_what_was_rested_through_counts() -> None:
    """The thought that follows is about what is left of the deadline."""
    length = resting(8, spent=5.0)
    left = dict.fromkeys(range(7), 60)
    spent: list[float] = []
    length._think = lambda state: spent.append(length._deadline._spent) or 0  # type: ignore[method-assign,func-returns-value]
    length.choose(BatchState(7, [8] * 7, 60.0, left=left))
    one = length.costs.forwards.round(8, 0)
    assert spent[0] == pytest.approx(15 * one, rel=0.05)


def test_a_rest_is_taken_in_by_its_median() -> None:
    """One of them took a hundred times as long."""
    length = resting(1, spent=0.0)
    for seconds in (1.0, 100.0, 1.0, 1.0, 1.0):
        length.observe(RoundOutcome(1, 0, [], seconds))
    assert length.held(1) is None
    assert length.costs.plain_seconds(1) == pytest.approx(1.0, rel=0.02)


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
            state = BatchState(2, [8] * 2, 100.0, number and 1, fresh=not number)
            k = length.choose(state) if begins else 0
            length.observe(RoundOutcome(2, k, [(k, 0)] * 2 if k else [], costs(2, k)))
    assert 1 <= begun <= 8
