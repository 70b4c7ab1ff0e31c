"""How whoever runs it can end a run: long loops ask whether to go on."""

from __future__ import annotations

from collections.abc import Callable

# Raises where an end was asked for, KeyboardInterrupt on the command line.
Check = Callable[[], None]


def go_on() -> None:
    """Nobody asks for an end but by an exception."""
