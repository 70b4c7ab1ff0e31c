"""First come, first served, within rows and memory, without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec.engine.scheduler as scheduler_module
from specdec.engine.scheduler import Scheduler
from specdec.request import Request
from specdec.sampling_params import SamplingParams


def row(index: int, length: int = 1) -> Request:
    return Request(index, "", (1,) * length, SamplingParams(), frozenset())


def total(requests: Sequence[Request]) -> int:
    return sum(len(r.prompt_tokens) for r in requests)


def indices(rows: list[Request]) -> list[int]:
    return [s.index for s in rows]


def test_requests_get_rows_in_the_order_they_came() -> None:
    scheduler = Scheduler(3)
    for index in range(5):
        scheduler.add(row(index))
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
    scheduler = Scheduler(8, budget=10, cost=total)
    for index, length in enumerate((4, 7, 1)):
        scheduler.add(row(index, length))
    first = scheduler.admit([])
    assert indices(first) == [0]  # 4 + 7 is too much, and 1 has to wait its turn
    assert scheduler.admit(first) == []
    assert indices(scheduler.admit([])) == [1, 2]


def test_a_row_that_never_fits_runs_alone() -> None:
    scheduler = Scheduler(8, budget=10, cost=total)
    for index, length in enumerate((50, 1)):
        scheduler.add(row(index, length))
    assert indices(scheduler.admit([])) == [0]
    assert indices(scheduler.admit([])) == [1]


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
    scheduler = Scheduler(
        batch_size, join_rounds=join_rounds, budget=budget, cost=total
    )
    for index, length in enumerate(lengths):
        scheduler.add(row(index, length))
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
    rows = [row(index, length) for index, length in enumerate(lengths)]
    order = sorted(rows, key=lambda r: len(r.prompt_tokens))
    most = 0
    for i in range(len(order)):
        for j in range(i + 1, len(order) + 1):
            some = order[i:j]
            longest = len(some[-1].prompt_tokens)
            if rows[0] in some and longest * len(some) <= 2 * total(some):
                most = max(most, len(some))
    scheduler = Scheduler(len(rows))
    for each in rows:
        scheduler.add(each)
    assert len(scheduler.admit([])) == most


def test_a_long_prompt_among_short_ones_does_not_split_the_rest() -> None:
    """Prompts in any order take few joins, not one at each long prompt."""
    draw = random.Random(0)
    scheduler = Scheduler(256)
    for index in range(256):
        scheduler.add(row(index, draw.choice((20, 25, 30, 40, 60, 200))))
    running: list[Request] = []
    groups = 0
    while scheduler.waiting:
        running += scheduler.admit(running)
        groups += 1
    assert groups == 2


def test_rows_join_together_where_a_join_is_dear() -> None:
    """One by one each would cost the others a join; none waits for long."""
    scheduler = Scheduler(8, join_rounds=2)
    for index in range(30):
        scheduler.add(row(index))
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
    scheduler = Scheduler(32, join_rounds=4)
    for index in range(64):
        scheduler.add(row(index))
    running = scheduler.admit([])
    assert not any(scheduler.admit(running) for _ in range(200))
    waits = [scheduler.admit(running[1:]) for _ in range(64)]
    assert [bool(admitted) for admitted in waits] == [False] * 63 + [True]


@pytest.mark.parametrize(("left", "together"), [(2, True), (30, False)])
def test_rows_that_end_a_little_apart_are_replaced_together(
    left: int, together: bool
) -> None:
    """Half of the batch joins, and two rounds later the other half."""
    scheduler = Scheduler(32, join_rounds=4)
    for index in range(64):
        scheduler.add(row(index))
    running = scheduler.admit([])
    for each in running[16:]:
        each.tokens = [1] * (each.params.max_tokens - left)
    assert bool(scheduler.admit(running[16:])) is not together


def test_no_row_stays_idle_for_others_that_would_be_of_no_use() -> None:
    """The next prompt is read apart, however many rows are free by then."""
    scheduler = Scheduler(8, join_rounds=4)
    for index, length in enumerate((*[9] * 8, 1, 1, 1000, 1, 1, 1)):
        scheduler.add(row(index, length))
    running = scheduler.admit([])
    assert len(running) == 8
    assert scheduler.admit(running[1:]) == []  # two could join, and one row is free
    assert indices(scheduler.admit(running[2:])) == [8, 9]
    assert scheduler.admit(running[1:]) == []
    assert indices(scheduler.admit(running[2:])) == [10, 11]


def test_prompts_are_compared_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """To decide whether to wait; those that join are compared again, without others."""
    compared: list[int] = []

    def alike(rows: Sequence[Request]) -> list[Request]:
        compared.append(len(rows))
        return right(rows)

    right = scheduler_module._alike
    monkeypatch.setattr(scheduler_module, "_alike", alike)
    scheduler = Scheduler(8, join_rounds=2)
    for index in range(20):
        scheduler.add(row(index))
    running = scheduler.admit([])
    compared.clear()
    waits = [scheduler.admit(running[2:]) for _ in range(8)]
    assert [len(admitted) for admitted in waits] == [0] * 7 + [2]
    assert compared == [*[3] * 8, 2]


def test_requests_that_were_passed_over_join_in_the_next_round() -> None:
    """Free rows wait for others after them, but not for those passed over."""
    scheduler = Scheduler(32, join_rounds=4)
    for index in range(64):
        scheduler.add(row(index, 400 if index % 3 == 0 else 20))
    running = scheduler.admit([])
    assert 0 < len(running) < 32
    for _ in range(4):
        running += scheduler.admit(running)
    assert len(running) == 32
    assert scheduler.admit(running[1:]) == []  # one row is free: nobody passed over
    assert sorted(indices(running))[:20] == list(range(20))


def test_admitting_looks_at_no_more_than_the_free_rows() -> None:
    scheduler = Scheduler(2)
    for index in range(50):
        scheduler.add(row(index))
    queue = scheduler._waiting
    scheduler.admit([])
    assert scheduler._waiting is queue
    assert indices(list(queue)) == list(range(2, 50))


def test_one_free_place_of_many_is_not_idle_for_long() -> None:
    scheduler = Scheduler(256, join_rounds=4)
    for index in range(300):
        scheduler.add(row(index))
    running = scheduler.admit([])
    waits = [scheduler.admit(running[1:]) for _ in range(64)]
    assert [bool(admitted) for admitted in waits] == [False] * 63 + [True]


def test_prompts_of_very_different_length_are_not_read_together() -> None:
    """Seven short ones would be padded to a thousand tokens each."""
    scheduler = Scheduler(8)
    lengths = (1024, 3, 3, 3, 3, 3, 3, 3)
    for index, length in enumerate(lengths):
        scheduler.add(row(index, length))
    groups: list[list[int]] = []
    running: list[Request] = []
    while scheduler.waiting:
        admitted = scheduler.admit(running)
        groups.append([len(s.prompt_tokens) for s in admitted])
        running += admitted
    assert [n for group in groups for n in group] == list(lengths)
    assert len(groups) == 2
    for group in groups:
        assert max(group) * len(group) <= 2 * sum(group)


def test_nothing_is_asked_again_while_the_rows_are_the_same() -> None:
    asked: list[int] = []

    def cost(requests: Sequence[Request]) -> int:
        asked.append(len(requests))
        return total(requests)

    scheduler = Scheduler(8, budget=10, cost=cost)
    for index, length in enumerate((4, 3, 7, 1)):
        scheduler.add(row(index, length))
    running = scheduler.admit([])
    assert indices(running) == [0, 1]
    asked.clear()
    for _ in range(5):
        assert scheduler.admit(running) == []
    assert asked == []
    # 3 + 7 fit as soon as the first has ended; the last waits, asked about once.
    running = [*running[1:], *scheduler.admit(running[1:])]
    assert indices(running) == [1, 2]
    asked.clear()
    assert scheduler.admit(running) == []
    assert asked == []


def test_few_numbers_of_many_rows_are_tried() -> None:
    """What memory has is asked some ten times for a thousand rows, not for each."""
    asked: list[int] = []

    def cost(requests: Sequence[Request]) -> int:
        asked.append(len(requests))
        return total(requests)

    scheduler = Scheduler(1024, budget=700, cost=cost)
    for index in range(1024):
        scheduler.add(row(index))
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
    lonely = Scheduler(8, budget=1, cost=total)
    unbounded = Scheduler(2)
    for each in (lonely, unbounded):
        for index in range(3):
            each.add(row(index, 4))
    assert (lonely.together(), unbounded.together()) == (1, 2)


def test_what_did_not_fit_is_expected_once_it_may_fit() -> None:
    """Slots were not held for requests whose memory had become free."""
    scheduler = Scheduler(4, budget=10, cost=total)
    for index, length in enumerate((6, 7, 1)):
        scheduler.add(row(index, length))
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
    scheduler = Scheduler(4)
    for index in range(5):
        scheduler.add(row(index))
    first = scheduler.admit([])
    scheduler.part(first[:3])
    assert [indices(scheduler.admit([])) for _ in range(3)] == [[0], [1], [2]]
    assert indices(scheduler.admit([])) == [4]
