"""Three plots that can be read without a text, as PNG and SVG."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..plots import COLOURS, GREY, MISSING, Chart, Line, headline, legend_below, save
from .cells import Cell
from .counts import positions, unconditional
from .figures import CellFigures, Figures, RoundParts

__all__ = ["MISSING", "NAMES", "draw_all"]

#: Names of the plots and of their files, in the order of the report.
NAMES = ("speedup", "acceptance", "round")

#: Colour and legend entry of each part of a round.
_PARTS = {
    "draft": ("#E69F00", "draft"),
    "verify": ("#0072B2", "verify (target)"),
    "sampling": ("#CC79A7", "sampling and accepting"),
    "host": ("#999999", "host"),
}


def draw_all(figures: Figures, folder: Path) -> list[tuple[str, str]] | None:
    """Draw all plots that have data, into ``folder``.

    Returns:
        The title and the name of the PNG file of each plot; ``None`` if matplotlib is
        not installed.
    """
    drawn = []
    try:
        for name, chart in (
            ("speedup", speedup(figures)),
            ("acceptance", acceptance(figures)),
        ):
            if chart is not None:
                drawn.append((chart.title, save(folder / name, chart.size, chart.draw)))
        bars = [f for f in figures.at_once if f.parts is not None]
        if bars:
            size = 8.0, 2.0 + 0.36 * len(bars)
            title, draw = rounds(figures, bars)
            drawn.append((title, save(folder / "round", size, draw)))
    except ImportError:
        return None
    return [(title, file.name) for title, file in drawn]


# -- speed-up ------------------------------------------------------------------


def speedup(figures: Figures) -> Chart | None:
    """A chart of speed-ups over k, or over the batch if it varies and k does not."""
    ratios: dict[Cell, list[float]] = {}
    for f in figures.at_once:
        each = f.ratios(figures.plain(f)) if f.cell.draft is not None else []
        if each and not f.idle_draft:
            ratios[f.cell] = each
    ours = [c for c in ratios if c.drafts]
    if not ours:
        return None
    lengths = {c.num_draft_tokens for c in ours} - {"auto"}
    over_k = len(lengths) > 1 or "batch" not in figures.varied
    several = len(figures.recipe.draft) > 1

    def line_of(cell: Cell) -> str:
        if not cell.drafts:
            return "mlx-lm's speculation"
        return f"batch {cell.batch}" if over_k else f"{cell.draft_name}, {cell.length}"

    def x_of(cell: Cell) -> int | str:
        return cell.num_draft_tokens if over_k else cell.batch

    labels = dict.fromkeys(map(line_of, ours))
    colours = dict(zip(labels, COLOURS * len(labels), strict=False))
    # Numbers in ascending order, then "auto".
    ticks = sorted(set(map(x_of, ratios)), key=lambda x: (isinstance(x, str), x))
    panels: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for cell, each in ratios.items():
        words = [cell.draft_name] if several and over_k else []
        name = ", ".join([*words, *cell.words(figures.varied - {"load"})])
        at = float(ticks.index(x_of(cell)))
        point = at, min(each), statistics.median(each), max(each)
        panels.setdefault(name, {}).setdefault(line_of(cell), []).append(point)
    return Chart(
        title=_speedup_title(figures, ratios),
        x="draft length k (tokens drafted)" if over_k else "batch (rows)",
        y="speed-up over no draft",
        panels={
            name: [
                Line(label, points, colours.get(label, GREY), label not in colours)
                for label, points in lines.items()
            ]
            for name, lines in panels.items()
        },
        ticks=ticks,
        baseline="no draft",
    )


def _speedup_title(figures: Figures, ratios: dict[Cell, list[float]]) -> str:
    # The title ignores cells whose plain decoding was held up by other work.
    sound = {
        c: r
        for c, r in ratios.items()
        if c.drafts and figures.cells[c].can_be(statistics.median(r))
    }
    if not sound:
        return "Other work held plain decoding up"
    best = max(sound, key=lambda c: (statistics.median(sound[c]), min(sound[c])))
    each = sound[best]
    words = [best.named(figures.varied), best.length]
    if len(figures.recipe.draft) > 1:
        words.insert(1, best.draft_name)
    times = f"{statistics.median(each):.2f} times as fast ({', '.join(words)})"
    if min(each) > 1:
        once = "" if len(each) > 1 else "; one pass only"
        return f"A draft pays: at best {times}{once}"
    if statistics.median(each) > 1:
        return f"No draft length is clearly faster: at best {times}"
    return f"No draft length pays here: at best {times}"


# -- acceptance ----------------------------------------------------------------


def acceptance(figures: Figures) -> Chart | None:
    """A chart of acceptance by position, for each draft and temperature.

    Each is shown at its longest draft length.
    """
    chosen: dict[tuple[str | None, float], CellFigures] = {}
    for f in figures.drafted:
        key = f.cell.draft, f.cell.temperature
        best = chosen.get(key)
        # Rounds at the end of a job may have drafted for rows that had ended.
        if f.acceptance().rounds and (best is None or _most(f) > _most(best)):
            chosen[key] = f
    if not chosen:
        return None
    panels = {}
    for f in chosen.values():
        each = positions(f.rows)
        words = [f.cell.draft_name] if len(figures.recipe.draft) > 1 else []
        words += f.cell.words(figures.varied & {"temperature"})
        name = ", ".join([*words, f"n = {len(f.rows)} rounds of a row"])
        alone = [(float(j), p.conditional) for j, p in enumerate(each)]
        joint = [(float(j), p) for j, p in enumerate(unconditional(each))]
        panels[name] = [
            Line(
                "given that all before it were (conditional)",
                alone,
                COLOURS[0],
                numbers=range(len(alone)),
            ),
            Line(
                "together with all before it (unconditional)",
                joint,
                COLOURS[1],
                dashed=True,
                # At the first position both are the same.
                numbers=range(1, len(joint)),
                above=False,
            ),
        ]
    best = max(chosen.values(), key=lambda f: f.acceptance().rate)
    a = best.acceptance()
    named = f" ({best.cell.draft_name}, the best draft)"
    return Chart(
        title=f"On average {a.accepted / a.rounds:.1f} of the "
        f"{a.drafted / a.rounds:.1f} tokens drafted in a round are accepted"
        + named
        * (len(figures.recipe.draft) > 1),
        x="position (1 = first drafted token)",
        y="drafted tokens accepted",
        panels=panels,
        ticks=range(1, max(map(_most, chosen.values())) + 1),
        percent=True,
        top=1.15,
    )


def _most(f: CellFigures) -> int:
    return max((drafted for drafted, _ in f.rows), default=0)


# -- time of a round -----------------------------------------------------------


def rounds(
    figures: Figures, bars: list[CellFigures]
) -> tuple[str, Callable[[Any], None]]:
    """A plot with a bar for each cell: the time of a round by part.

    Returns:
        The title, and a function that draws the plot into a figure.
    """
    parts = [_parts(f) for f in bars]
    longest = max(p.total for p in parts)
    title = _round_title(figures, bars)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        # Empty bars, for the legend.
        for colour, name in _PARTS.values():
            axes.barh(0, 0, color=colour, label=name)
        for i, (f, p) in enumerate(zip(bars, parts, strict=True)):
            left = 0.0
            for part, share in p.shares.items():
                width = share * p.total
                if width > 0:
                    axes.barh(i, width, left=left, color=_PARTS[part][0], height=0.72)
                left += width
            tokens = f"{f.acceptance().length:.2f} tokens" if f.rows else "1 token"
            digits = 0 if longest >= 50 else 1
            axes.annotate(
                f"{p.total:.{digits}f} ms for {tokens} per row (n = {p.number})",
                (p.total, i),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(bars)), [_bar(figures, f.cell) for f in bars])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, longest * 1.6)
        axes.set_xlabel("milliseconds of a round, synchronised after each stage")
        legend_below(figure, [axes])
        headline(figure, title)

    return title, draw


def _parts(f: CellFigures) -> RoundParts:
    assert f.parts is not None
    return f.parts


def _bar(figures: Figures, cell: Cell) -> str:
    what = cell.length if cell.draft else "no draft"
    if cell.draft and len(figures.recipe.draft) > 1:
        what = f"{cell.draft_name}, {what}"
    return f"{cell.named(figures.varied)}, {what}"


def _round_title(figures: Figures, bars: list[CellFigures]) -> str:
    plain = {f.cell: _parts(f).total for f in bars if not f.cell.draft}
    drafted = [f for f in bars if f.cell.draft and f.cell.plain in plain]
    if not drafted:
        where = f"at batch {bars[0].cell.batch}"
        return f"A step takes {_parts(bars[0]).total:.0f} ms {where}"
    f = max(drafted, key=lambda f: (f.cell.num_draft_tokens, -f.cell.batch))
    named = f"{f.cell.draft_name}, " * (len(figures.recipe.draft) > 1)
    return (
        f"A round of {named}{f.cell.length} costs "
        f"{_parts(f).total / plain[f.cell.plain]:.1f} plain steps, "
        f"{_parts(f).shares['draft']:.0%} of it drafting (batch {f.cell.batch}, "
        f"n = {_parts(f).number})"
    )
