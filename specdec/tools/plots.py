"""Panels of lines, drawn with matplotlib as PNG and SVG, all in one style."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils.extras import install

MISSING = f"no new plots without matplotlib: {install('bench')}"
# Okabe and Ito's palette, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
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
    # The same figures give the same file.
    "svg.hashsalt": "specdec",
}
# Size of a panel in inches.
_WIDTH, _HEIGHT = 3.4, 3.2
# Characters per inch of a bold title and of a legend; characters that a legend's marker
# takes.
_TITLE, _LEGEND, _MARKER = 10.0, 13.0, 7


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Args:
        label: its name in the legend.
        points: (x, y); if the chart has ticks, x is the index of a tick.
        numbers: indices of the points that are labelled with their value.
        above: whether these labels stand above their points.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    numbers: Sequence[int] = ()
    above: bool = True


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels that share both axes.

    Args:
        title: what the chart says.
        x, y: labels of the axes.
        panels: lines by the panel's title.
        ticks: labels at x = 0, 1, 2, ...; without them x is a number line from 0.
        top: upper end of the y axis.
    """

    title: str
    x: str
    y: str
    panels: Mapping[str, Sequence[Line]] = field(default_factory=dict)
    ticks: Sequence[object] = ()
    top: float | None = None

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, including the text around the panels."""
        return panel_size(len(self.panels))

    def draw(self, figure: Any) -> None:
        """Draw the chart into a figure of :attr:`size`."""
        grid = panels(figure, len(self.panels), x=self.x, y=self.y)
        for axes, (name, lines) in zip(grid, self.panels.items(), strict=True):
            axes.set_title(name)
            for line in lines:
                self._line(axes, line)
            if self.ticks:
                axes.set_xticks(range(len(self.ticks)), list(map(str, self.ticks)))
                axes.set_xlim(-0.5, len(self.ticks) - 0.5)
            else:
                axes.set_xlim(left=0)
            axes.set_ylim(0, self.top)
        legend_below(figure, grid)
        headline(figure, self.title)

    def _line(self, axes: Any, line: Line) -> None:
        xs, ys = zip(*sorted(line.points), strict=True)
        marked = "o-" if self.ticks else "-"
        axes.plot(xs, ys, marked, color=line.colour, label=line.label)
        for i in line.numbers:
            # Below the point, unless the point lies at the bottom.
            low = not line.above and ys[i] > 0.08
            axes.annotate(
                f"{ys[i]:.2f}",
                (xs[i], ys[i]),
                xytext=(0, -15 if low else 7) if self.ticks else (4, -3),
                textcoords="offset points",
                ha="center" if self.ticks else "left",
                color=line.colour,
                fontsize=8,
            )


def style() -> AbstractContextManager[Any]:
    """A context in which all figures have the same style.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context

    return rc_context(STYLE)  # type: ignore[arg-type]


def save(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    """Draw a figure and write it, as PNG and SVG.

    Args:
        path: the path of both files, without a suffix.

    Returns:
        The path of the PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        draw(figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("svg", "png"):
            still = {"Date": None} if suffix == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{suffix}"), metadata=still)
    return path.with_suffix(".png")


def _grid(number: int) -> tuple[int, int]:
    """The rows and columns in which ``number`` panels are laid out."""
    across = 2 if number == 4 else max(1, min(number, 3))
    return -(-number // across), across


def panel_size(number: int) -> tuple[float, float]:
    """Inches of a figure of ``number`` panels, including the text around them."""
    down, across = _grid(number)
    return max(8.0, _WIDTH * across), 1.4 + _HEIGHT * max(1, down)


def panels(figure: Any, number: int, *, x: str, y: str) -> list[Any]:
    """``number`` axes in rows, which share both directions.

    Args:
        x, y: labels of the axes, written once for each column and row.
    """
    down, across = _grid(number)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < number)
        if i % across == 0:
            axes.set_ylabel(y)
        # The lowest visible panel of its column.
        if i < number <= i + across:
            axes.set_xlabel(x)
            axes.tick_params(labelbottom=True)
    return list(grid.flat)[:number]


def headline(figure: Any, text: str) -> None:
    """Write the title above the plot, wrapped to its width."""
    width = int(figure.get_size_inches()[0] * _TITLE)
    figure.suptitle(textwrap.fill(text, width), x=0.01, ha="left")


def legend_below(figure: Any, axes: Sequence[Any]) -> None:
    """Put one legend of all axes below them: each label once, in columns that fit."""
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
