"""Three plots that can be read without a text, as PNG and SVG, with matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .counts import positions, unconditional
from .figures import CellFigures, Figures

MISSING = "no plots without matplotlib: pip install 'mlx-specdec[bench]'"

# Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: Part of a round: its colour, and what the legend calls it.
SHOWN_PARTS = {
    "draft": ("#E69F00", "draft"),
    "verify": ("#0072B2", "verify (target)"),
    "sampling": ("#CC79A7", "sampling and accepting"),
    "host": ("#999999", "host"),
}
GREY = "#666666"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    # The same file for the same figures.
    "svg.hashsalt": "specdec",
}

#: Draws into axes that it asks for; what the plot says, or nothing when it is empty.
Draw = Callable[[Figures, Any], str | None]


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
    draws: dict[str, tuple[Draw, Callable[[Figures], float]]] = {
        "speedup": (_speedup, lambda _: 4.6),
        "acceptance": (_acceptance, lambda _: 4.2),
        "round": (_round, lambda f: 1.9 + 0.36 * len(_profiled(f))),
    }
    for name, (draw, height) in draws.items():
        with rc_context(STYLE):  # type: ignore[arg-type]
            figure = Figure(figsize=(8.0, height(figures)))
            FigureCanvasAgg(figure)
            title = draw(figures, figure.add_subplot())
            if title is None:
                continue
            for suffix in ("png", "svg"):
                still = {"Date": None} if suffix == "svg" else {"Software": None}
                figure.savefig(folder / f"{name}.{suffix}", metadata=still)
        drawn.append((title, f"{name}.png"))
    return drawn


# -- speed-up ----------------------------------------------------------------


def _speedup(figures: Figures, axes: Any) -> str | None:
    """Speed-up by draft length, a line for each batch."""
    lines: dict[str, list[tuple[int, list[float]]]] = {}
    for f in figures.drafted:
        ratios = f.ratios(figures.find(f.cell.plain))
        if ratios:
            key = _line(figures, f)
            lines.setdefault(key, []).append((f.cell.num_draft_tokens, ratios))
    if not lines:
        return None
    for i, (name, points) in enumerate(lines.items()):
        style = "o-" if i < len(COLOURS) else "^-"
        # Side by side, so that no bar hides another.
        aside = 0.04 * (i - (len(lines) - 1) / 2)
        _curve(axes, name, points, COLOURS[i % len(COLOURS)], style, aside)
    theirs: dict[str, list[tuple[int, list[float]]]] = {}
    for cell, f in figures.cells.items():
        if cell.system == "mlx-lm speculative":
            ratios = f.ratios(figures.find(cell.plain))
            key = f"{_line(figures, f)}, mlx-lm's speculation"
            if ratios:
                theirs.setdefault(key, []).append((cell.num_draft_tokens, ratios))
    for name, points in theirs.items():
        _curve(axes, name, points, GREY, "s--", 0.0)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.annotate(
        "no draft",
        (1.0, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
    )
    ks = sorted(
        {k for points in (*lines.values(), *theirs.values()) for k, _ in points}
    )
    axes.set_xticks(ks)
    axes.set_xlim(min(ks) - 0.4, max(ks) + 0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("draft length k (tokens drafted in a round)")
    axes.set_ylabel("speed-up over no draft, same batch")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15), ncols=3)
    title = _speedup_title(lines)
    axes.set_title(title)
    return title


def _speedup_title(lines: dict[str, list[tuple[int, list[float]]]]) -> str:
    ratio, worst, name, k = max(
        (statistics.median(r), min(r), name, k)
        for name, points in lines.items()
        for k, r in points
    )
    best = f"{ratio:.2f} times as fast ({name}, k = {k})"
    if worst > 1:
        return f"A draft pays: at best {best}"
    if ratio > 1:
        return f"No draft length is clearly faster: at best {best}"
    return f"No draft length pays here: at best {best}"


def _curve(
    axes: Any,
    name: str,
    points: list[tuple[int, list[float]]],
    colour: str,
    style: str,
    aside: float,
) -> None:
    """Medians, with bars from the smallest to the largest."""
    middle = [statistics.median(r) for _, r in points]
    below = [m - min(r) for m, (_, r) in zip(middle, points, strict=True)]
    above = [max(r) - m for m, (_, r) in zip(middle, points, strict=True)]
    axes.errorbar(
        [k + aside for k, _ in points],
        middle,
        yerr=[below, above],
        fmt=style,
        color=colour,
        capsize=3,
        label=name,
    )


def _line(figures: Figures, f: CellFigures) -> str:
    """Conditions, and the draft where there are several."""
    name = f.cell.conditions.label(figures.among)
    several = len(figures.recipe.draft) > 1
    return f"{name}, {f.cell.draft}" if several else name


# -- acceptance --------------------------------------------------------------


def _acceptance(figures: Figures, axes: Any) -> str | None:
    """Acceptance by position, at the longest draft length of each draft."""
    chosen: dict[tuple[str | None, float], CellFigures] = {}
    for f in figures.drafted:
        key = f.cell.draft, f.cell.conditions.temperature
        best = chosen.get(key)
        if f.rows and (
            best is None or f.cell.num_draft_tokens > best.cell.num_draft_tokens
        ):
            chosen[key] = f
    if not chosen:
        return None
    longest = 0
    for i, ((draft, temperature), f) in enumerate(chosen.items()):
        each = positions(f.rows)
        longest = max(longest, len(each))
        at = range(1, len(each) + 1)
        colour = COLOURS[i % len(COLOURS)]
        name = f"{draft}, " if len(figures.recipe.draft) > 1 else ""
        if len(figures.among["temperature"]) > 1:
            name += f"T = {temperature:g}, "
        alone, joint = [p.conditional for p in each], unconditional(each)
        given = f"{name}given that all before it were (conditional)"
        axes.plot(at, alone, "o-", color=colour, label=given)
        together = f"{name}together with all before it (unconditional)"
        axes.plot(at, joint, "s--", color=colour, label=together)
        _label_points(axes, zip(at, alone, strict=True), colour, 7)
        # At the first position both are the same.
        second = [(x, y) for x, y in zip(at, joint, strict=True) if x > 1]
        _label_points(axes, second, colour, -15)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.6, longest + 0.4)
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.set_xlabel("position in the draft (1 = first drafted token)")
    axes.set_ylabel("rounds that accept it")
    axes.legend(loc="upper left")
    f = max(chosen.values(), key=lambda f: f.acceptance().rate)
    k = f.cell.num_draft_tokens
    mean = f.acceptance().length - 1
    title = f"On average {mean:.1f} of {k} drafted tokens are accepted"
    if len(figures.recipe.draft) > 1:
        title += f" ({f.cell.draft}, the best draft)"
    axes.set_title(title)
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


def _round(figures: Figures, axes: Any) -> str | None:
    """Time of a round by part, a bar for each cell."""
    cells = _profiled(figures)
    if not cells:
        return None
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
    axes.set_xlim(0, longest * 1.4)
    axes.set_xlabel("milliseconds of a round, the device waited for behind each part")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.4, -0.5 / (0.36 * len(cells) + 0.6)),
        ncols=4,
    )
    title = _round_title(figures, cells)
    axes.set_title(title)
    return title


def _bar(figures: Figures, f: CellFigures) -> str:
    what = f"k = {f.cell.num_draft_tokens}" if f.cell.draft else "no draft"
    if f.cell.draft and len(figures.recipe.draft) > 1:
        what = f"{f.cell.draft}, {what}"
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
    f = max(drafted, key=lambda f: (f.cell.num_draft_tokens, -f.cell.conditions.batch))
    plain = figures.find(f.cell.plain)
    assert plain is not None
    assert f.parts is not None
    return (
        f"A round of k = {f.cell.num_draft_tokens} costs "
        f"{_total(f) / _total(plain):.1f} plain steps, "
        f"{f.parts.shares['draft']:.0%} of it drafting "
        f"(batch {f.cell.conditions.batch})"
    )
