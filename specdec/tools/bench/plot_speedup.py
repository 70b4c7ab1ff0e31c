"""The plot of speed-ups: over draft length, or over the batch where there is one k."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .figures import Figures
from .plot_style import COLOURS, GREY, headline, legend_below, panel_size, panels


@dataclass(frozen=True)
class _Point:
    """One cell's speed-ups over plain decoding, pass by pass."""

    cell: Any
    ratios: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def theirs(self) -> bool:
        """Whether mlx-lm speculated."""
        return bool(self.cell.system == "mlx-lm speculative")


def size(figures: Figures) -> tuple[float, float]:
    """Inches: wider and higher with the number of panels."""
    return panel_size(len(_panels(figures, _points(figures))))


def draw(figures: Figures, figure: Any) -> str | None:
    """A panel for what differs besides, a line for each batch (or each draft)."""
    points = _points(figures)
    ours = [p for p in points if not p.theirs]
    if not ours:
        return None
    # Where other work held plain decoding up, no title is made of it.
    sound = [p for p in ours if figures.cells[p.cell].can_be(p.median)]
    over_k = _over_k(figures)
    at = {x: i for i, x in enumerate(sorted({_x(p, over_k) for p in points}))}
    lines = list(dict.fromkeys(_line(p, over_k) for p in ours))
    found = _panels(figures, points)
    grid = panels(
        figure,
        len(found),
        x="draft length k (tokens drafted)" if over_k else "batch (rows)",
        y="speed-up over no draft",
    )
    for axes, (name, shown) in zip(grid, found.items(), strict=True):
        axes.set_title(name)
        _panel(axes, shown, lines, at, over_k=over_k)
        axes.set_xticks(range(len(at)), list(at))
        axes.set_xlim(-0.5, len(at) - 0.5)
        axes.set_ylim(bottom=0)
    legend_below(figure, grid)
    title = _title(figures, sound) if sound else "Other work held plain decoding up"
    headline(figure, title)
    return title


def _points(figures: Figures) -> list[_Point]:
    """Of all cells that speculated, and whose plain decoding was measured."""
    wanted = [f.cell for f in figures.drafted]
    wanted += [c for c in figures.cells if c.system == "mlx-lm speculative"]
    found = []
    for cell in wanted:
        ratios = figures.cells[cell].ratios(figures.find(cell.plain))
        if ratios:
            found.append(_Point(cell, ratios))
    return found


def _over_k(figures: Figures) -> bool:
    """Whether k is along the axis; else the batch, as where there is one k."""
    ks = {f.cell.k for f in figures.drafted}
    return len(ks) > 1 or len(figures.among["batch"]) == 1


def _x(point: _Point, over_k: bool) -> int:
    cell = point.cell
    return int(cell.k if over_k else cell.conditions.batch)


def _line(point: _Point, over_k: bool) -> Any:
    return point.cell.conditions.batch if over_k else point.cell.draft_name


def _panels(figures: Figures, points: list[_Point]) -> Mapping[str, list[_Point]]:
    """Points by what neither axis nor lines show: other conditions, and the draft."""
    several = len(figures.recipe.draft) > 1 and _over_k(figures)
    found: dict[str, list[_Point]] = {}
    for point in points:
        words = point.cell.conditions.besides_batch(figures.among)
        name = ", ".join([*([point.cell.draft_name] if several else []), *words])
        found.setdefault(name, []).append(point)
    return found


def _panel(
    axes: Any,
    points: list[_Point],
    lines: list[Any],
    at: Mapping[int, int],
    *,
    over_k: bool,
) -> None:
    axes.axhline(1.0, color="black", linewidth=1, label="no draft")
    for theirs in (False, True):
        for i, line in enumerate(lines):
            found = [p for p in points if p.theirs == theirs]
            found = [p for p in found if _line(p, over_k) == line]
            if not found:
                continue
            # Side by side, so that no bar hides another.
            aside = 0.0 if theirs else 0.05 * (i - (len(lines) - 1) / 2)
            name = "mlx-lm's speculation" if theirs else _named(line, over_k)
            colour = GREY if theirs else COLOURS[i % len(COLOURS)]
            middle = [p.median for p in found]
            axes.errorbar(
                [at[_x(p, over_k)] + aside for p in found],
                middle,
                yerr=[
                    [m - min(p.ratios) for m, p in zip(middle, found, strict=True)],
                    [max(p.ratios) - m for m, p in zip(middle, found, strict=True)],
                ],
                fmt="s--" if theirs else "o-",
                color=colour,
                capsize=3,
                label=name,
            )


def _named(line: Any, over_k: bool) -> str:
    return f"batch {line}" if over_k else str(line)


def _title(figures: Figures, sound: list[_Point]) -> str:
    best = max(sound, key=lambda p: (p.median, min(p.ratios)))
    where = best.cell.conditions.label(figures.among)
    if len(figures.recipe.draft) > 1:
        where += f", {best.cell.draft_name}"
    times = f"{best.median:.2f} times as fast ({where}, k = {best.cell.k})"
    if min(best.ratios) > 1:
        once = "" if len(best.ratios) > 1 else "; one pass only"
        return f"A draft pays: at best {times}{once}"
    if best.median > 1:
        return f"No draft length is clearly faster: at best {times}"
    return f"No draft length pays here: at best {times}"
