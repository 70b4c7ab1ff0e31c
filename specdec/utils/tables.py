"""Tables: columns of plain text for a terminal, and Markdown. No mlx here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


def text_table(
    rows: Sequence[Sequence[object]], *, align: Literal["left", "right"] = "left"
) -> str:
    """Columns as wide as their widest cell, two blanks apart.

    Args:
        rows: the header, if there is one, is the first.
        align: of all columns but the first, which is always on the left.
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
