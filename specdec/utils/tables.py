"""Tables in plain text and Markdown, and numbers for them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal


def text_table(
    rows: Sequence[Sequence[object]], *, align: Literal["left", "right"] = "left"
) -> str:
    """Columns as wide as their widest cell, two blanks apart.

    Args:
        rows: the rows; a header, if there is one, comes first.
        align: alignment of all columns but the first, which is aligned left.
    """
    cells = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: list[str]) -> str:
        rest = zip(row[1:], widths[1:], strict=True)
        padded = [c.rjust(w) if align == "right" else c.ljust(w) for c, w in rest]
        return "  ".join([row[0].ljust(widths[0]), *padded]).rstrip()

    return "\n".join(map(line, cells))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; columns but the first are aligned right."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|---|" + "---:|" * (len(header) - 1),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def show_spread(values: Sequence[float], digits: int = 1) -> str:
    """``median (min to max)``; the median alone for a single value."""
    text = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text
