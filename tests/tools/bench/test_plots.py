"""Plots: that all of what is written in them can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.tools.bench.figures import Figures
from specdec.tools.bench.plot_style import (
    STYLE,
    headline,
    legend_below,
    panel_size,
    panels,
)
from specdec.tools.bench.plots import draw_all
from specdec.tools.bench.raw import Results

matplotlib: Any = pytest.importorskip("matplotlib")
figure_module: Any = pytest.importorskip("matplotlib.figure")
agg: Any = pytest.importorskip("matplotlib.backends.backend_agg")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
# Whole jobs have tables alone.
FOLDERS = sorted(
    raw.parent
    for raw in RESULTS.rglob("raw.jsonl")
    if not Results.read(raw.parent).recipe["run"].get("jobs")
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_nothing_is_cut_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Titles, legends, labels: of one panel or several, with long names and short."""
    drawn: list[Any] = []
    savefig = figure_module.Figure.savefig

    def kept(self: Any, file: Path, **options: Any) -> None:
        if file.suffix == ".png":
            drawn.append(self)
        savefig(self, file, **options)

    monkeypatch.setattr(figure_module.Figure, "savefig", kept)
    figures = Figures(Results.read(folder))
    draw_all(figures, tmp_path)
    assert bool(drawn) is bool(figures.drafted)
    for figure in drawn:
        check(figure)


def check(figure: Any) -> None:
    """All of it lies within the picture."""
    figure.canvas.draw()
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert box.x0 > -0.02
    assert box.y0 > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02


@pytest.mark.parametrize("number", [1, 4, 5])
def test_long_names_are_wrapped(number: int) -> None:
    with matplotlib.rc_context(STYLE):
        figure = figure_module.Figure(figsize=panel_size(number))
        agg.FigureCanvasAgg(figure)
        grid = panels(figure, number, x="draft length", y="speed-up")
        for i, axes in enumerate(grid):
            for j in range(6):
                name = f"batch {i}, T = 0.7, some-owner/Some-Long-Name-{j}B-Instruct"
                axes.plot([1, 2], [j, i], label=name)
        legend_below(figure, grid)
        headline(figure, "A draft pays, of all that were tried: " * 5)
        check(figure)


@pytest.mark.parametrize(
    ("number", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (7, 3)]
)
def test_panels_have_room(number: int, columns: int) -> None:
    width, height = panel_size(number)
    assert width / columns > 3
    assert height * columns / number > 3
