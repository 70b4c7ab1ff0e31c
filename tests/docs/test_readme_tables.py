"""The measured tables of the pages are what the raw results come to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .scripts import ROOT, load_script

script = load_script("readme_tables")
Table = script.Table

RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {
    "cpu": "CPU",
    "cores": 2,
    "memory_gib": 8,
    "backend": "cpu",
    "device": "CPU",
    "mlx": "1",
    "mlx_lm": "2",
    "python": "3",
}


def test_the_pages_are_what_the_results_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A result was measured anew, or a number edited by hand."""
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_shown_somewhere() -> None:
    text = "".join(page.read_text("utf-8") for page in script.PAGES)
    for name in script.TABLES:
        assert f"<!-- table: {name} -->" in text, name


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def medians(text: str) -> list[str]:
    """The first number of every cell of a report, without its range."""
    return [cell.partition(" (")[0] for cell in cells(text)]


@pytest.mark.parametrize("name", ["decode-cpu-plain", "decode-cpu-draft"])
def test_numbers_are_those_of_the_benchmark_itself(name: str) -> None:
    """Two programs worked them out: the benchmark, when it ran, and this script."""
    columns = ("batch", "k", "tokens/s", "first pass", "ms", "peak")
    report = (RESULTS / f"{name}.md").read_text("utf-8").splitlines()
    theirs = [medians(x) for x in report if re.match(r"\| (mlx-lm|specdec)", x)]
    made = script.render(Table(name, "system", columns), "").splitlines()
    ours = [cells(x) for x in made[2 : 2 + len(theirs)]]
    for mine, (_, batch, k, speed, _, first, ms, _, peak, *_) in zip(
        ours, theirs, strict=True
    ):
        assert mine[1:5] == [batch, k.strip("-"), speed, first]
        assert float(mine[5]) == pytest.approx(float(ms), abs=0.06)
        assert mine[6] == f"{peak} MiB"


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("acceptance-quick", "one pass"),
        ("jobs-smollm2-h100", "median of 3 passes"),
    ],
)
def test_numbers_are_those_of_the_report(name: str, passes: str) -> None:
    """Rates of whole jobs, not of their decoding; ratios pass by pass."""
    report = (RESULTS / name / "report.md").read_text("utf-8")
    speed = report.partition("\n## Speed")[2].partition("<details>")[0].splitlines()
    theirs = [medians(x)[:4] for x in speed if x.startswith("| batch ")]
    columns = ("batch", "job tokens/s", "/ no draft", "/ mlx-lm")
    made = script.render(Table(name, "system", columns), "").splitlines()
    assert len(theirs) > 5
    for line, (system, *numbers) in zip(made[2:], theirs, strict=False):
        batch = system.removeprefix("batch ").partition(":")[0]
        # A system's ratio to itself is left empty.
        assert cells(line)[1:] == [batch, *(x.replace("-", "") for x in numbers)]
    assert made[-1].endswith(f"; {passes} after the first.")


# -- results made by hand --------------------------------------------------


def record(speed: float, drafted: int = 0, accepted: int = 0) -> dict[str, Any]:
    """A pass of 60 tokens; its rounds drafted, and accepted, so much."""
    wave = {
        "rows": 1,
        "decode_tokens": 60,
        "decode_seconds": 60 / speed,
        "drafted": drafted,
        "accepted": accepted,
        "row_rounds": drafted // 2,
        # The first step begins the caches, and is in no rate of full batches.
        "step_ms": [1.0, 60_000 / speed],
        "step_rows": [1, 1],
        "rounds": [[0, [[0, 0]]], [59, [[59, 59]]]],
    }
    return {
        "peak_memory_bytes": 3 << 20,
        "memory_before_bytes": 1 << 20,
        "waves": [wave],
    }


def passes(*speeds_accepted: tuple[float, int]) -> list[dict[str, Any]]:
    """Of 40 draft tokens each; what the first pass accepted does not count."""
    return [record(speed, 40, accepted) for speed, accepted in speeds_accepted]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results and a page, in the place of the repository's."""
    lengths = {
        "plain B=1 k=0": [record(5), record(10), record(30), record(20)],
        "ngram B=1 k=2": [record(5, 40, 40), *passes((30, 10), (30, 10), (40, 10))],
        "ngram B=1 k=4": [record(5, 40, 40), *passes((9, 30), (9, 30), (9, 30))],
        "ngram B=1 k=auto": [record(5, 40, 9), *passes((30, 10), (60, 20), (40, 30))],
        "wrong:/a/model B=1 k=2": [record(5), *passes((1, 0), (1, 0), (1, 0))],
    }
    start = {"machine": MACHINE, "command": "x", "commit": "abc", "date": "today"}
    raw = {**start, "options": {"repeat": 3}}
    lengths_json = json.dumps({**raw, "passes": lengths})
    (tmp_path / "lengths.json").write_text(lengths_json, "utf-8")
    (tmp_path / "other.json").write_text(json.dumps(raw), "utf-8")
    odd = json.dumps({**raw, "passes": {"odd": [record(1), record(1)]}})
    (tmp_path / "odd.json").write_text(odd, "utf-8")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table: t -->\nold\n<!-- end of table -->\nb\n", "utf-8")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "PAGES", [page])
    columns = ("batch", "k", "tokens/s", "/ no draft", "best fixed", "rate")
    table = Table("lengths", "draft", (*columns, "tokens per round", "range"))
    monkeypatch.setattr(script, "TABLES", {"t": table})
    return tmp_path


def test_draft_lengths(results: Path) -> None:
    """Ratios are medians of ratios, pass by pass, and not ratios of medians."""
    assert script.main([]) == 0
    page = (results / "page.md").read_text("utf-8")
    assert page.startswith("a\n<!-- table: t -->\n\n| draft | batch | k |")
    assert page.endswith("\n\n<!-- end of table -->\nb\n")
    *table, _, source, _, _, _ = page.splitlines()[3:]
    assert [cells(line) for line in table[2:]] == [
        ["no draft", "1", "", "20.0", "", "", "", "", "20.0 (10.0 to 30.0)"],
        ["ngram", "1", "2", "30.0", "2.00", "", "0.25", "1.50", "30.0 (30.0 to 40.0)"],
        ["ngram", "1", "4", "9.0", "0.45", "", "0.75", "2.50", "9.0 (9.0 to 9.0)"],
        [
            *("ngram", "1", "auto", "40.0", "2.00", "2.00 (k = 2)", "0.50", "2.00"),
            "40.0 (30.0 to 60.0)",
        ],
        ["wrong", "1", "2", "1.0", "0.05", "", "0.00", "1.00", "1.0 (1.0 to 1.0)"],
    ]
    assert source == (
        "[lengths](benchmarks/results/lengths.md): CPU, 2 cores, 8 GiB; MLX 1, "
        "mlx-lm 2, Python 3; median of 3 passes after the first."
    )
    assert script.main(["--check"]) == 0


def test_links_lead_to_the_results_from_any_folder(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = results / "docs" / "page.md"
    page.parent.mkdir()
    (results / "page.md").rename(page)
    monkeypatch.setattr(script, "PAGES", [page])
    assert script.main([]) == 0
    assert "(../benchmarks/results/lengths.md)" in page.read_text("utf-8")


def test_rows_are_chosen_and_ordered(results: Path) -> None:
    table = Table("lengths", "draft", ("k",), ("ngram B=1 k=auto", "plain"))
    made = script.render(table, "").splitlines()
    assert made[2:4] == ["| ngram | auto |", "| no draft |  |"]


def test_rows_of_several_files(results: Path) -> None:
    """Each has its label, and every file its link, once; a missing row is an error."""
    copy = results / "again.json"
    copy.write_bytes((results / "lengths.json").read_bytes())
    parts = [
        ("lengths", "ngram B=1 k=auto", "n-grams"),
        ("again", "ngram B=1 k=auto", "the same"),
        ("again", "ngram B=1 k=4", "four"),
    ]
    made = script.render(Table(parts, "draft", ("auto", "passes")), "../")
    *rows, _, source = made.splitlines()[2:]
    shown = [["n-grams", "2.00", "3"], ["the same", "2.00", "3"], ["four", "0.45", "3"]]
    assert [cells(row) for row in rows] == shown
    assert source == (
        "Raw results: [lengths](../benchmarks/results/lengths.md), "
        "[again](../benchmarks/results/again.md)."
    )
    with pytest.raises(script.TableError, match="no row begins with 'gone'"):
        script.render(Table([("again", "gone", "x")], "draft", ("k",)), "")


def test_a_stale_page_is_told_in_one_line(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([]) == 0
    file = results / "lengths.json"
    changed = file.read_text("utf-8").replace(': 60, "', ': 66, "')
    file.write_text(changed, "utf-8")
    page = (results / "page.md").read_bytes()
    assert script.main(["--check"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: tables of page.md are not what")
    assert line.endswith("run scripts/readme_tables.py")
    assert (results / "page.md").read_bytes() == page


@pytest.mark.parametrize(
    ("table", "text", "message"),
    [
        (None, "<!-- table: u -->\n<!-- end of table -->\n", "table u: no such table"),
        (None, "<!-- table: t -->\n", "page.md: a table without its end, or twice"),
        (("gone", "x", ("k",)), None, "there is no gone.json"),
        (("other", "x", ("k",)), None, "other.json has no passes"),
        (("odd", "x", ("k",)), None, "'odd' is no name of a row"),
        (("lengths", "x", ("tempo",)), None, "no column 'tempo': there are batch, k"),
        (("lengths", "x", ("k",), ("wrog",)), None, "no row begins with 'wrog'"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    table: tuple[Any, ...] | None,
    text: str | None,
    message: str,
) -> None:
    if table is not None:
        monkeypatch.setattr(script, "TABLES", {"t": Table(*table)})
    if text is not None:
        (results / "page.md").write_text(text, "utf-8")
    before = (results / "page.md").read_bytes()
    assert script.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: page.md: ")
    assert message in line
    assert (results / "page.md").read_bytes() == before
