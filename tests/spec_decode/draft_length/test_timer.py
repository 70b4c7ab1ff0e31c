"""What rounds are said to have taken, by clocks that tests hold."""

from __future__ import annotations

from itertools import count

import pytest

from specdec.spec_decode.draft_length import StepTimer


def test_a_rounds_time_begins_with_the_read_before_it() -> None:
    """Catches a time that counts a wait twice, or another k's building as its own."""
    times = iter([10.0, 11.0, 13.0, 14.0, 17.0, 18.0, 20.0, 21.0, 25.0, 26.0, 26.5])
    timer = StepTimer(lambda: next(times))
    assert [timer.begin(), timer.begin()] == [10.0, 11.0]
    assert timer.read(10.0, [True]) == (3.0, False, False)  # two were built meanwhile
    assert timer.begin() == 14.0
    assert timer.read(11.0, [True]) == (4.0, True, False)  # since the read at 13
    assert timer.begin() == 18.0
    assert timer.read(14.0, [False]) == (3.0, False, False)  # another k was built
    assert timer.begin() == 21.0
    assert timer.read(18.0, [True]) == (5.0, True, False)  # since the read at 20
    timer.interrupt()  # 26: a prefill chunk
    assert timer.read(21.0, []) == (1.5, False, True)


def test_a_round_that_is_waited_for_is_timed_alone() -> None:
    """Catches a rule for overlapped rounds that leaves others without any time."""
    timer = StepTimer(count(1, 3).__next__)
    for _ in range(3):
        assert timer.read(timer.begin(), []) == (3, True, False)
    # The second was not built while the first ran, nor anything beside it.
    first, second = timer.begin(), timer.begin()
    assert timer.read(first, [True])[1] is False
    assert timer.read(second, [])[1] is False


@pytest.mark.parametrize(
    ("new_shapes", "fair"), [([], True), ([True], False), ([True, False], False)]
)
def test_what_held_a_round_up_is_reported(new_shapes: list[bool], fair: bool) -> None:
    """Catches a time beside a prefill, or with a new shape, that counts as usual."""
    now = 1.0
    timer, began = StepTimer(lambda: now), []
    for _ in range(3):
        began.append(timer.begin())
        now += 1.0
    timer.read(began[0], [True, True])
    now += 1.0
    for new_shape in new_shapes:
        timer.interrupt(new_shape=new_shape)
    now += 1.0
    assert timer.read(began[1], [True]) == (2.0, fair, False in new_shapes)
