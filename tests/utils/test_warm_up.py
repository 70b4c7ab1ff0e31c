"""What is compiled before the first request: counted, and reported where it is slow."""

from __future__ import annotations

import logging

import pytest

from specdec.utils.warm_up import PATIENCE, WarmUp


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_all_is_counted_and_only_what_is_slow_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second process compiles nothing, and has nothing to say."""
    caplog.set_level(logging.INFO, "specdec.warm_up")
    clock = Clock()
    warm_up = WarmUp(clock)
    warm_up.run([lambda: clock.passes(PATIENCE / 8)] * 8)
    assert warm_up.seconds == PATIENCE
    assert caplog.messages == []
    warm_up.run([lambda: clock.passes(2.0), lambda: clock.passes(0.5)])
    assert warm_up.seconds == PATIENCE + 2.5
    assert caplog.messages == [
        "compiling kernels for this GPU: 2 of 2",
        "kernels for this GPU were compiled in 2.5 seconds",
    ]


def test_a_step_that_fails_is_counted() -> None:
    clock = Clock()
    warm_up = WarmUp(clock)

    def fail() -> None:
        clock.passes(3.0)
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        warm_up.run([fail, fail])
    assert warm_up.seconds == 3.0
