"""Order of runs, and spread. No mlx here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from ...utils.tables import markdown_table

__all__ = ["interleaved", "markdown_table", "show_spread", "spread", "turns"]

S = TypeVar("S")
T = TypeVar("T")


def turns(systems: Sequence[S], passes: int) -> Iterator[tuple[int, S]]:
    """The order of runs, every system once a pass: A B C, then B C A, then C A B, ...

    What drifts in the machine meanwhile then falls on all of them alike.
    """
    for number in range(passes):
        turn = number % len(systems)
        yield from ((number, each) for each in [*systems[turn:], *systems[:turn]])


def interleaved(
    systems: Mapping[str, Callable[[], T]], passes: int
) -> Iterator[tuple[int, str, T]]:
    """Run every system once a pass, in the order of :func:`turns`."""
    for number, name in turns(list(systems), passes):
        yield number, name, systems[name]()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of them are at most: one of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show_spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (min to max)``; the median alone for a single value."""
    s = spread(values)
    text = f"{s['median']:.{digits}f}"
    if len(values) > 1:
        text += f" ({s['min']:.{digits}f} to {s['max']:.{digits}f})"
    return text
