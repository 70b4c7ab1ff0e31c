"""Order of runs, and spread. No mlx here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ...utils.tables import markdown_table

__all__ = ["interleaved", "markdown_table", "show_spread", "turns"]

S = TypeVar("S")
T = TypeVar("T")


def turns(systems: Sequence[S], number: int) -> list[S]:
    """The order of systems in a pass: A B C, then B C A, then C A B, ...

    What drifts in the machine meanwhile then falls on all of them alike.
    """
    turn = number % len(systems)
    return [*systems[turn:], *systems[:turn]]


def interleaved(
    systems: Mapping[str, Callable[[], T]], passes: int
) -> Iterator[tuple[int, str, T]]:
    """Run every system once a pass, in the order of :func:`turns`."""
    for number in range(passes):
        for name in turns(list(systems), number):
            yield number, name, systems[name]()


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of them are at most: one of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show_spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (min to max)``; the median alone for a single value."""
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text
