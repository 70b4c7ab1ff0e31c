"""Signals, and what becomes of what their handlers raise."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any


def interrupted(do: Callable[..., object], *arguments: object) -> bool:
    """Whether it raises KeyboardInterrupt, which would end all of the tests."""
    try:
        do(*arguments)
    except KeyboardInterrupt:
        return True
    return False


def drop(number: signal.Signals) -> None:
    """Have it come while an object is taken away: Python drops the exception."""
    dropped: list[Any] = []

    class Leaving:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def noted(lost: Any) -> None:
        # Other threads may drop something of their own meanwhile.
        if lost.object is Leaving.__del__:
            dropped.append(lost.exc_type)
        else:
            before(lost)

    before = sys.unraisablehook
    sys.unraisablehook = noted
    try:
        Leaving()
    finally:
        sys.unraisablehook = before
    assert dropped == [KeyboardInterrupt]
