"""Three plots that can be read without a text, as PNG and SVG, with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from . import plot_speedup
from .counts import positions, unconditional
from .figures import CellFigures, Figures
from .plot_style import COLOURS, STYLE, headline, legend_below, panel_size, panels

MISSING = "no new plots without matplotlib: pip install matplotlib"
#: Of the plots, in the order of the report: their files are called so.
NAMES = ("speedup", "acceptance", "round")

#: Part of a round: its colour, and what the legend calls it.
SHOWN_PARTS = {
    "draft": ("#E69F00", "draft"),
    "verify": ("#0072B2", "verify (target)"),
    "sampling": ("#CC79A7", "sampling and accepting"),
    "host": ("#999999", "host"),
}
#: Draws into a figure; what the plot says, or nothing when it is empty.
Draw = Callable[[Figures, Any], str | None]
Size = Callable[[Figures], tuple[float, float]]


def draw_all(figures: Figures, folder: Path) -> list[tuple[str, str]] | None:
    """Draw what there is something to draw of, into ``folder``.

    Returns:
        What each plot says and the name of its PNG file; ``None`` where matplotlib
        is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    drawn = []
    draws: tuple[tuple[Draw, Size], ...] = (
        (plot_speedup.draw, plot_speedup.size),
        (_acceptance, lambda f: panel_size(len(_longest(f)))),
        (_round, lambda f: (8.0, 2.0 + 0.36 * len(_profiled(f)))),
    )
    for name, (draw, size) in zip(NAMES, draws, strict=True):
        with rc_context(STYLE):  # type: ignore[arg-type]
            figure = Figure(figsize=size(figures))
            FigureCanvasAgg(figure)
            title = draw(figures, figure)
            if title is None:
                continue
            for suffix in ("png", "svg"):
                still = {"Date": None} if suffix == "svg" else {"Software": None}
                figure.savefig(folder / f"{name}.{suffix}", metadata=still)
        drawn.append((title, f"{name}.png"))
    return drawn


# -- acceptance --------------------------------------------------------------


def _longest(figures: Figures) -> dict[tuple[str | None, float], CellFigures]:
    """By draft and temperature, the cell with the longest draft length."""
    chosen: dict[tuple[str | None, float], CellFigures] = {}
    for f in figures.drafted:
        key = f.cell.draft, f.cell.conditions.temperature
        best = chosen.get(key)
        if f.rows and (best is None or f.cell.k > best.cell.k):
            chosen[key] = f
    return chosen


def _acceptance(figures: Figures, figure: Any) -> str | None:
    """Acceptance by position, at the longest draft length of each draft."""
    chosen = _longest(figures)
    if not chosen:
        return None
    grid = panels(
        figure,
        len(chosen),
        x="position (1 = first drafted token)",
        y="drafted tokens accepted",
    )
    longest = max(len(positions(f.rows)) for f in chosen.values())
    for axes, ((_, temperature), f) in zip(grid, chosen.items(), strict=True):
        each = positions(f.rows)
        at = range(1, len(each) + 1)
        words = [f.cell.draft_name] if len(figures.recipe.draft) > 1 else []
        if len(figures.among["temperature"]) > 1:
            words.append(f"T = {temperature:g}")
        axes.set_title(", ".join(words))
        alone, joint = [p.conditional for p in each], unconditional(each)
        given = "given that all before it were (conditional)"
        axes.plot(at, alone, "o-", color=COLOURS[0], label=given)
        together = "together with all before it (unconditional)"
        axes.plot(at, joint, "s--", color=COLOURS[1], label=together)
        _label_points(axes, zip(at, alone, strict=True), COLOURS[0], 7)
        # At the first position both are the same.
        second = [(x, y) for x, y in zip(at, joint, strict=True) if x > 1]
        _label_points(axes, second, COLOURS[1], -15)
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlim(0.6, longest + 0.4)
        axes.set_ylim(0, 1.15)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    legend_below(figure, grid)
    f = max(chosen.values(), key=lambda f: f.acceptance().rate)
    k = f.cell.k
    mean = f.acceptance().length - 1
    title = f"On average {mean:.1f} of {k} drafted tokens are accepted"
    if len(figures.recipe.draft) > 1:
        title += f" ({f.cell.draft_name}, the best draft)"
    headline(figure, title)
    return title


def _label_points(
    axes: Any, points: Iterable[tuple[int, float]], colour: str, offset: int
) -> None:
    """Write percentages beside points, above those that lie at the bottom."""
    for x, y in points:
        axes.annotate(
            f"{y:.0%}",
            (x, y),
            xytext=(0, offset if y > 0.08 else 7),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=8,
        )


# -- time of a round -----------------------------------------------------------


def _profiled(figures: Figures) -> list[CellFigures]:
    return [f for f in figures.cells.values() if f.parts is not None]


def _round(figures: Figures, figure: Any) -> str | None:
    """Time of a round by part, a bar for each cell."""
    cells = _profiled(figures)
    if not cells:
        return None
    axes = figure.subplots()
    names = [_bar(figures, f) for f in cells]
    longest = max(_total(f) for f in cells)
    # Without times, for the legend.
    for colour, name in SHOWN_PARTS.values():
        axes.barh(0, 0, color=colour, label=name)
    for i, f in enumerate(cells):
        for part, left, width in _stacked(f):
            colour = SHOWN_PARTS[part][0]
            axes.barh(i, width, left=left, color=colour, height=0.72)
        tokens = f"{f.acceptance().length:.2f} tokens" if f.rows else "1 token"
        digits = 0 if longest >= 50 else 1
        axes.annotate(
            f"{_total(f):.{digits}f} ms for {tokens} per row",
            (_total(f), i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(cells)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, longest * 1.5)
    axes.set_xlabel("milliseconds of a round, the device waited for behind each part")
    legend_below(figure, [axes])
    title = _round_title(figures, cells)
    headline(figure, title)
    return title


def _bar(figures: Figures, f: CellFigures) -> str:
    what = f"k = {f.cell.k}" if f.cell.draft else "no draft"
    if f.cell.draft and len(figures.recipe.draft) > 1:
        what = f"{f.cell.draft_name}, {what}"
    return f"{f.cell.conditions.label(figures.among)}, {what}"


def _total(f: CellFigures) -> float:
    assert f.parts is not None
    return f.parts.total


def _stacked(f: CellFigures) -> Iterator[tuple[str, float, float]]:
    """Part, where it begins and how long it is; parts without time are left out."""
    assert f.parts is not None
    left = 0.0
    for part, share in f.parts.shares.items():
        width = share * f.parts.total
        if width > 0:
            yield part, left, width
        left += width


def _round_title(figures: Figures, cells: list[CellFigures]) -> str:
    plain_cells = {f.cell for f in cells if not f.cell.draft}
    drafted = [f for f in cells if f.cell.draft and f.cell.plain in plain_cells]
    if not drafted:
        return f"A step takes {_total(cells[0]):.0f} ms at batch " + str(
            cells[0].cell.conditions.batch
        )
    f = max(drafted, key=lambda f: (f.cell.k, -f.cell.conditions.batch))
    plain = figures.find(f.cell.plain)
    assert plain is not None
    assert f.parts is not None
    several = len(figures.recipe.draft) > 1
    return (
        f"A round of {f'{f.cell.draft_name}, ' * several}"
        f"k = {f.cell.k} costs "
        f"{_total(f) / _total(plain):.1f} plain steps, "
        f"{f.parts.shares['draft']:.0%} of it drafting "
        f"(batch {f.cell.conditions.batch})"
    )
