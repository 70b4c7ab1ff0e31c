"""Compare two runs: the cells that both have, side by side."""

from __future__ import annotations

import statistics
from pathlib import Path

from ...errors import ConfigError
from ...utils.tables import markdown_table
from .figures import CellFigures, Figures
from .raw import Results


def compare(a: Path, b: Path) -> str:
    """A comparison of the cells that two folders of results share, as Markdown."""
    first, second = Figures(Results.read(a)), Figures(Results.read(b))
    rows = [
        [first.name(cell), *_row(f, second.cells[cell])]
        for cell, f in first.cells.items()
        if cell in second.cells
    ]
    if not rows:
        raise ConfigError(
            f"{a} and {b} have nothing in common: same systems, drafts, draft lengths "
            "and conditions can be compared"
        )
    both = [
        f"{letter} {what}"
        for what in ("length", "ms to first token")
        for letter in ("A", "B")
    ]
    return (
        f"# {first.recipe.title}: two runs\n\n"
        f"A is {a}: {_origin(first)}.\n\nB is {b}: {_origin(second)}.\n\n"
        + _differences(first, second)
        + markdown_table(["system", "A tokens/s", "B tokens/s", "B / A", *both], rows)
        + "\nMedians. *B / A* is followed by its smallest and largest value over all "
        "pairs of passes: the runs did not take turns, so that it also holds what "
        "the machine did meanwhile. *length*: tokens per row and round, the extra "
        "token included.\n"
    )


def _row(a: CellFigures, b: CellFigures) -> list[str]:
    rates = list(a.rates.values()), list(b.rates.values())
    ratio = "-"
    if all(rates) and min(rates[0]) and a.rate:
        least, most = min(rates[1]) / max(rates[0]), max(rates[1]) / min(rates[0])
        ratio = f"{b.rate / a.rate:.2f} ({least:.2f} to {most:.2f})"
    lengths = [f"{f.acceptance().length:.2f}" if f.cell.draft else "-" for f in (a, b)]
    first = [
        f"{statistics.median(f.first_token_ms):.0f}" if f.counted else "-"
        for f in (a, b)
    ]
    return [f"{a.rate:.1f}", f"{b.rate:.1f}", ratio, *lengths, *first]


def _origin(figures: Figures) -> str:
    start = figures.results.starts[-1]
    return f"{start.place}, {start.date}"


def _differences(a: Figures, b: Figures) -> str:
    """Other differences between the runs, which may explain different rates."""
    notes = []
    ours, theirs = (f.results.starts[-1].machine for f in (a, b))
    if (ours.cpu, ours.device, ours.cores) != (theirs.cpu, theirs.device, theirs.cores):
        notes.append("**Different machines: rates cannot be compared.**\n")
    for name in ("target", "dtype", "prompts", "run"):
        if getattr(a.recipe, name) != getattr(b.recipe, name):
            notes.append(f"The recipes differ in `{name}`.\n")
    if a.results.prompts.digest != b.results.prompts.digest:
        notes.append("The prompts differ.\n")
    for letter, figures in (("A", a), ("B", b)):
        if figures.missing:
            notes.append(f"{letter} is not complete.\n")
    return "\n".join([*notes, ""]) if notes else ""
