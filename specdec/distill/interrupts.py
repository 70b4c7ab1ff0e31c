"""Ctrl-C and a request to end, heard between steps. No mlx here."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered, the first signal is noted; a second one acts at once.

    So that a step is done or not begun, and a checkpoint is of one moment.
    """

    def __init__(self) -> None:
        self._noted = False
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = [(s, signal.signal(s, self._note)) for s in _SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
        self._before = []

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            KeyboardInterrupt: a signal came.
        """
        if self._noted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True
