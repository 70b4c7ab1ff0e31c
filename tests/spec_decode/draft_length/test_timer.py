"""What rounds are said to have taken, by clocks that tests hold."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from specdec.spec_decode.draft_length import RoundTiming, StepTimer


def test_a_rounds_time_begins_with_the_read_before_it() -> None:
    """Catches a time that counts a wait twice, or another k's building as its own."""
    times = iter([10.0, 11.0, 13.0, 14.0, 17.0, 18.0, 20.0, 21.0, 25.0, 26.0, 26.5])
    timer, found = StepTimer(lambda: next(times)), []
    timer.begin(0, (0, 0))  # 10
    timer.begin(0, (0, 0))  # 11
    found.append(timer.read([1, 1]))  # 13: two were built meanwhile
    timer.begin(0, (0, 0))  # 14
    found.append(timer.read([1, 1]))  # 17: since the read at 13
    timer.begin(2, (2, -1), backlog=3)  # 18
    found.append(timer.read([1, 1]))  # 20: another k was built meanwhile
    timer.begin(2, (2, -1))  # 21
    found.append(timer.read([3, None]))  # 25: since the read at 20
    timer.interrupt()  # 26
    found.append(timer.read([3, None]))  # 26.5: a prefill chunk ran meanwhile
    assert [t.seconds for t in found] == [3.0, 4.0, 3.0, 5.0, 1.5]
    assert [t.fair for t in found[:4]] == [False, True, False, True]
    assert [t.joining for t in found] == [False] * 4 + [True]
    assert not found[4].fair
    assert found[3].accepted == [(2, 2)]
    assert [t.backlog for t in found] == [0, 0, 0, 3, 0]


def test_a_round_that_is_waited_for_is_timed_alone() -> None:
    """Catches a rule for overlapped rounds that leaves others without any time."""
    timer = StepTimer(count(0, 3).__next__)
    alone = []
    for _ in range(3):
        timer.begin(1, (1,))
        alone.append(timer.read([1]))
    assert [(t.seconds, t.fair) for t in alone] == [(3, True)] * 3
    # The second was not built while the first ran, nor anything beside it.
    timer.begin(1, (1,))
    timer.begin(1, (1,))
    assert not timer.read([1]).fair
    assert not timer.read([1]).fair


@pytest.mark.parametrize(
    ("new_shapes", "seconds", "fair"),
    [([], 2.0, True), ([True], 2.0, False), ([True, False], 2.0, False)],
)
def test_what_held_a_round_up_is_reported(
    new_shapes: list[bool], seconds: float | None, fair: bool
) -> None:
    """A draft's new shapes are part of what it costs; other work is nobody's."""
    now = 0.0
    timer = StepTimer(lambda: now)
    for _ in range(3):
        timer.begin(0, (0,))
        now += 1.0
    timer.read([1])
    now += 1.0
    for new_shape in new_shapes:
        timer.interrupt(new_shape=new_shape)
    now += 1.0
    found = timer.read([1])
    assert found.seconds == seconds
    assert found.fair is fair
    assert found.joining is (False in new_shapes)


def test_a_round_beside_a_look_is_not_fair() -> None:
    """Catches plain rounds that seem slow, so that drafts seem to pay."""
    timer = StepTimer(count(0.0, 1.0).__next__)
    looked, found = [], list[RoundTiming]()
    for number in range(24):
        timer.begin(0, (0,))
        looked.append(number % 8 < 4)
        if looked[-1]:
            timer.look()
        if number:
            found.append(timer.read([1]))
    by_look: dict[tuple[bool, bool], set[bool]] = {}
    for timing, pair in zip(found[1:], list(pairwise(looked))[1:], strict=True):
        by_look.setdefault(pair, set()).add(timing.fair)
    assert by_look.pop((False, False)) == {True}
    assert by_look == {
        pair: {False} for pair in ((True, True), (True, False), (False, True))
    }


def test_rows_that_ended_or_may_not_draft_say_nothing() -> None:
    """Catches an idle slot that counts as a row that accepted nothing."""
    timer = StepTimer(count().__next__)
    timer.begin(2, (2, -1, 0, 2), (7, 8, 9, 4), forced=True)
    found = timer.read([3, None, 1, 1])
    assert found.accepted == [(2, 2), (2, 0)]
    assert found.rows == [7, 4]
    assert found.forced
