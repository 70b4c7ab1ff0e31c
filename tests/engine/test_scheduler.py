"""First come, first served, within rows and memory, without a model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.scheduler import Scheduler
from specdec.request import Request
from specdec.sampling_params import SamplingParams


def row(index: int, length: int = 1) -> Request:
    return Request(index, "", (1,) * length, SamplingParams(), frozenset())


def scheduler_of(num_rows: int, lengths: Iterable[int], **options: Any) -> Scheduler:
    """Rows, and requests that wait for them, with prompts of these lengths."""
    scheduler = Scheduler(num_rows, **options)
    for index, length in enumerate(lengths):
        scheduler.add(row(index, length))
    return scheduler


def total(requests: Sequence[Request]) -> int:
    return sum(len(r.prompt_tokens) for r in requests)


def indices(rows: list[Request]) -> list[int]:
    return [s.index for s in rows]


def test_requests_get_rows_in_the_order_they_came() -> None:
    scheduler = scheduler_of(3, [1] * 5)
    running = scheduler.admit([])
    assert indices(running) == [0, 1, 2]
    assert scheduler.admit(running) == []
    assert scheduler.waiting == 2
    assert indices(scheduler.admit(running[:2])) == [3]
    scheduler.add(row(9))
    assert indices(scheduler.admit(running[:1])) == [4, 9]
    assert scheduler.waiting == 0
    assert scheduler.admit([]) == []


def test_rows_that_ended_while_they_waited_leave_the_queue() -> None:
    scheduler = Scheduler(2)
    rows = [row(index) for index in range(4)]
    for each in rows:
        scheduler.add(each)
    rows[0].cancel()
    rows[2].cancel()
    assert indices(scheduler.ended()) == [0, 2]
    assert scheduler.ended() == []
    assert indices(scheduler.admit([])) == [1, 3]


def test_nobody_overtakes_a_row_that_does_not_fit() -> None:
    scheduler = scheduler_of(8, (4, 7, 1), budget=10, cost=total)
    first = scheduler.admit([])
    assert indices(first) == [0]  # 4 + 7 is too much, and 1 has to wait its turn
    assert scheduler.admit(first) == []
    assert indices(scheduler.admit([])) == [1, 2]


@given(
    lengths=st.lists(st.integers(1, 9), max_size=20),
    batch_size=st.integers(1, 5),
    budget=st.integers(1, 20),
    join_rounds=st.integers(0, 3),
    leaving=st.lists(st.integers(0, 4), max_size=40),
)
def test_every_row_is_admitted_once_within_bounds(
    lengths: list[int],
    batch_size: int,
    budget: int,
    join_rounds: int,
    leaving: list[int],
) -> None:
    scheduler = scheduler_of(
        batch_size, lengths, join_rounds=join_rounds, budget=budget, cost=total
    )
    running: list[Request] = []
    waiting = list(range(len(lengths)))
    for leave in [*leaving, *([0] * len(lengths))]:
        free = batch_size - len(running)
        admitted = scheduler.admit(running)
        if admitted:
            # The first that waits is one of them, and nobody takes the place of
            # another.
            assert indices(admitted) == sorted(indices(admitted))
            assert admitted[0].index == waiting[0]
            assert set(indices(admitted)) <= set(waiting[:free])
            assert max(len(s.prompt_tokens) for s in admitted) * len(
                admitted
            ) <= 2 * total(admitted)
        waiting = [index for index in waiting if index not in indices(admitted)]
        running += admitted
        cost = sum(len(s.prompt_tokens) for s in running)
        assert len(running) <= batch_size
        assert cost <= budget or len(running) == 1
        if running:
            running.pop(leave % len(running))
    assert not waiting


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_as_many_prompts_as_possible_are_read_together(lengths: list[int]) -> None:
    """Among all runs of prompts in the order of their lengths."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    most = 0
    for i in range(len(order)):
        for j in range(i + 1, len(order) + 1):
            some = [lengths[index] for index in order[i:j]]
            if 0 in order[i:j] and some[-1] * len(some) <= 2 * sum(some):
                most = max(most, len(some))
    assert len(scheduler_of(len(lengths), lengths).admit([])) == most


def test_a_long_prompt_among_short_ones_does_not_split_the_rest() -> None:
    """Prompts in any order take few joins, not one at each long prompt."""
    draw = random.Random(0)
    scheduler = scheduler_of(256, draw.choices((20, 25, 30, 40, 60, 200), k=256))
    running: list[Request] = []
    groups = 0
    while scheduler.waiting:
        running += scheduler.admit(running)
        groups += 1
    assert groups == 2


def test_rows_join_together_where_a_join_is_dear() -> None:
    """One by one each would cost the others a join; none waits for long."""
    scheduler = scheduler_of(8, [1] * 30, join_rounds=2)
    running = scheduler.admit([])
    assert len(running) == 8

    def rounds_until_some_join(free: int) -> tuple[int, list[int]]:
        for number in range(1, 100):
            if admitted := scheduler.admit(running[free:]):
                return number, indices(admitted)
        raise AssertionError("they wait for ever")

    # 2 rounds of 8 rows: 16 of one free place.
    assert rounds_until_some_join(1) == (16, [8])
    assert rounds_until_some_join(3) == (6, [9, 10, 11])
    assert scheduler.admit(running) == []
    assert rounds_until_some_join(4) == (1, [12, 13, 14, 15])
    # Places idle for long are not counted once they are taken.
    for _ in range(10):
        assert scheduler.admit(running[1:]) == []
    assert rounds_until_some_join(2) == (3, [16, 17])
    assert rounds_until_some_join(8)[0] == 1
    # As soon as no more wait than places are free, nobody waits.
    assert rounds_until_some_join(3) == (6, [26, 27, 28])
    assert rounds_until_some_join(1) == (1, [29])


def test_rounds_in_which_no_row_is_free_are_not_idle() -> None:
    """The first row that ended after a long time would join alone."""
    scheduler = scheduler_of(32, [1] * 64, join_rounds=4)
    running = scheduler.admit([])
    assert not any(scheduler.admit(running) for _ in range(200))
    waits = [scheduler.admit(running[1:]) for _ in range(64)]
    assert [bool(admitted) for admitted in waits] == [False] * 63 + [True]


@pytest.mark.parametrize(("left", "together"), [(2, True), (30, False)])
def test_rows_that_end_a_little_apart_are_replaced_together(
    left: int, together: bool
) -> None:
    """Half of the batch joins, and two rounds later the other half."""
    scheduler = scheduler_of(32, [1] * 64, join_rounds=4)
    running = scheduler.admit([])
    for each in running[16:]:
        each.tokens = [1] * (each.params.max_tokens - left)
    assert bool(scheduler.admit(running[16:])) is not together


def test_no_row_stays_idle_for_others_that_would_be_of_no_use() -> None:
    """The next prompt is read apart, however many rows are free by then."""
    scheduler = scheduler_of(8, (*[9] * 8, 1, 1, 1000, 1, 1, 1), join_rounds=4)
    running = scheduler.admit([])
    assert len(running) == 8
    assert scheduler.admit(running[1:]) == []  # two could join, and one row is free
    assert indices(scheduler.admit(running[2:])) == [8, 9]
    assert scheduler.admit(running[1:]) == []
    assert indices(scheduler.admit(running[2:])) == [10, 11]


def test_requests_that_were_passed_over_join_in_the_next_round() -> None:
    """Free rows wait for others after them, but not for those passed over."""
    lengths = [400 if index % 3 == 0 else 20 for index in range(64)]
    scheduler = scheduler_of(32, lengths, join_rounds=4)
    running = scheduler.admit([])
    assert 0 < len(running) < 32
    for _ in range(4):
        running += scheduler.admit(running)
    assert len(running) == 32
    assert scheduler.admit(running[1:]) == []  # one row is free: nobody passed over
    assert sorted(indices(running))[:20] == list(range(20))


def test_few_numbers_of_many_rows_are_tried() -> None:
    """What memory has is asked some ten times for a thousand rows, not for each."""
    asked: list[int] = []

    def cost(requests: Sequence[Request]) -> int:
        asked.append(len(requests))
        return total(requests)

    scheduler = scheduler_of(1024, [1] * 1024, budget=700, cost=cost)
    assert len(scheduler.admit([])) == 700
    assert len(asked) <= 12


def test_rows_that_wait_are_known_to_fit_together() -> None:
    """What is measured for more rows than ever run together may not fit."""
    scheduler = Scheduler(8, budget=10, cost=total)
    assert scheduler.together() == 0
    for index, length in enumerate((4, 5, 1, 3)):
        scheduler.add(row(index, length))
    assert scheduler.together() == 3
    assert scheduler.waiting == 4
    assert indices(scheduler.admit([])) == [0, 1, 2]
    lonely = scheduler_of(8, [4] * 3, budget=1, cost=total)
    unbounded = scheduler_of(2, [4] * 3)
    assert (lonely.together(), unbounded.together()) == (1, 2)


def test_what_did_not_fit_is_expected_once_it_may_fit() -> None:
    """Slots were not held for requests whose memory had become free."""
    scheduler = scheduler_of(4, (6, 7, 1), budget=10, cost=total)
    running = scheduler.admit([])
    assert indices(running) == [0]
    assert (scheduler.admit(running), scheduler.expected) == ([], 0)
    scheduler.add(row(3))
    assert scheduler.expected == 0
    running = scheduler.admit([])
    assert indices(running) == [1, 3]
    assert scheduler.expected == 1  # it was passed over, and does not lack memory
    assert indices(scheduler.admit(running)) == [2]


def test_who_waited_behind_one_that_lacked_memory_is_expected() -> None:
    """Once that one is cancelled, the next waits only for a row."""
    scheduler = Scheduler(4, budget=10, cost=total)
    rows = [row(index, length) for index, length in enumerate((6, 7, 1))]
    for each in rows:
        scheduler.add(each)
    assert scheduler.admit(scheduler.admit([])) == []
    assert scheduler.expected == 0
    rows[1].cancel()
    scheduler.ended()
    assert scheduler.expected == 1


def test_requests_that_failed_together_join_one_by_one() -> None:
    """Those after them join as usual, and nobody overtakes."""
    scheduler = scheduler_of(4, [1] * 5)
    first = scheduler.admit([])
    scheduler.part(first[:3])
    assert [indices(scheduler.admit([])) for _ in range(3)] == [[0], [1], [2]]
    assert indices(scheduler.admit([])) == [4]
    scheduler = scheduler_of(4, [1] * 9, join_rounds=4)
    first = scheduler.admit([])
    scheduler.part(first[3:])
    assert indices(scheduler.admit(first[:3])) == [3]  # it had its row: no wait
