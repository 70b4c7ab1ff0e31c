"""Plots: that all of what is written in them can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.tools.bench.figures import Figures
from specdec.tools.bench.plots import draw_all
from specdec.tools.bench.raw import Results
from specdec.tools.plots import headline, legend_below, panel_size, panels, style

figure_module: Any = pytest.importorskip("matplotlib.figure")
agg: Any = pytest.importorskip("matplotlib.backends.backend_agg")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def check(figure: Any) -> None:
    """All of it lies within the picture."""
    figure.canvas.draw()
    width, height = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert min(box.x0, box.y0) > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02


def with_more_drafts(whole: Path, folder: Path) -> Path:
    """The results, with those of its draft given to two others as well."""
    folder.mkdir()
    names = ["random:tiny:1", "layers:0", "ngram"]
    lines = []
    for line in (whole / "raw.jsonl").read_text("utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "recipe":
            assert record["recipe"]["draft"] == names[:1]
            record["recipe"]["draft"] = names
            lines.append(json.dumps(record))
        elif record.get("cell", {}).get("draft") is None:
            lines.append(line)
        else:
            for name in names:
                record["cell"]["draft"] = name
                lines.append(json.dumps(record))
    (folder / "raw.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.mark.parametrize("source", ["whole", "quick", "jobs", "several"])
def test_nothing_is_cut_off(
    source: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Titles, legends, labels: of one panel or several, with long names and short."""
    drawn: list[Any] = []
    savefig = figure_module.Figure.savefig

    def kept(self: Any, file: Path, **options: Any) -> None:
        if file.suffix == ".png":
            drawn.append(self)
            savefig(self, file, **options)

    monkeypatch.setattr(figure_module.Figure, "savefig", kept)
    folder = {
        "quick": RESULTS / "acceptance-quick",
        "jobs": RESULTS / "jobs-smollm2-h200",
    }.get(source, whole)
    if source == "several":
        folder = with_more_drafts(whole, tmp_path / "several")
    figures = Figures(Results.read(folder))
    made = draw_all(figures, tmp_path)
    assert made is not None
    # In jobs no round is taken apart.
    assert len(drawn) == len(made) == (2 if source == "jobs" else 3)
    for figure in drawn:
        check(figure)


@pytest.mark.parametrize("number", [1, 4, 5])
def test_long_names_are_wrapped(number: int) -> None:
    with style():
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


def test_panels_have_room() -> None:
    for number, columns in ((1, 1), (2, 2), (3, 3), (4, 2), (7, 3)):
        width, height = panel_size(number)
        assert width / columns > 3
        assert height * columns / number > 3


def test_a_draft_that_no_request_used_has_no_acceptance(
    whole: Path, tmp_path: Path
) -> None:
    """Rounds may have drafted only for rows that had ended: 0 of 0 is no rate."""
    lines = [json.loads(x) for x in (whole / "raw.jsonl").read_text().splitlines()]
    for record in lines:
        for request in record.get("requests", []):
            request |= {"rounds": 0, "drafted": 0, "accepted": 0}
    text = "".join(json.dumps(record) + "\n" for record in lines)
    (tmp_path / "raw.jsonl").write_text(text, "utf-8")
    made = draw_all(Figures(Results.read(tmp_path)), tmp_path)
    assert made is not None
    assert "acceptance.png" not in [name for _, name in made]
