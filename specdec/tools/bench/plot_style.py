"""What all plots look like, and what is written around their axes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

# Okabe and Ito's palette, which the colour-blind can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#666666"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    # The same file for the same figures.
    "svg.hashsalt": "specdec",
}
# Inches of a panel.
_WIDTH, _HEIGHT = 3.4, 3.2
# Characters to an inch: of a bold title, and of a legend, whose markers take some.
_TITLE, _LEGEND, _MARKER = 10.0, 13.0, 7


def _grid(number: int) -> tuple[int, int]:
    """Rows and columns of so many panels."""
    across = 2 if number == 4 else max(1, min(number, 3))
    return -(-number // across), across


def panel_size(number: int) -> tuple[float, float]:
    """Inches of a figure with so many panels, and what is written around them."""
    down, across = _grid(number)
    return max(8.0, _WIDTH * across), 1.4 + _HEIGHT * max(1, down)


def panels(figure: Any, number: int, *, x: str, y: str) -> list[Any]:
    """So many axes that share both directions, in rows.

    Args:
        x, y: what is along them, written once for each column and row.
    """
    down, across = _grid(number)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < number)
        if i % across == 0:
            axes.set_ylabel(y)
        # The lowest of its column that is there.
        if i < number <= i + across:
            axes.set_xlabel(x)
            axes.tick_params(labelbottom=True)
    return list(grid.flat)[:number]


def headline(figure: Any, text: str) -> None:
    """What the plot says, above it, in as many lines as it takes."""
    width = int(figure.get_size_inches()[0] * _TITLE)
    figure.suptitle(textwrap.fill(text, width), x=0.01, ha="left")


def legend_below(figure: Any, axes: Sequence[Any]) -> None:
    """What is drawn in any of the axes, each once, in columns that fit."""
    named: dict[str, Any] = {}
    for each in axes:
        handles, names = each.get_legend_handles_labels()
        for name, handle in zip(names, handles, strict=True):
            named.setdefault(name, handle)
    longest = max(map(len, named), default=0) + _MARKER
    columns = max(1, int(figure.get_size_inches()[0] * _LEGEND) // longest)
    figure.legend(
        named.values(),
        named.keys(),
        loc="outside lower center",
        ncols=min(columns, max(1, len(named))),
    )
