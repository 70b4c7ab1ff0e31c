"""The measured tables of the pages are what the raw results come to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .scripts import ROOT, load_script

script = load_script("readme_tables")
RESULTS = ROOT / "benchmarks" / "results"


def test_the_pages_are_what_the_results_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A result was measured anew, or a number edited by hand."""
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_shown_somewhere() -> None:
    text = "".join(page.read_text("utf-8") for page in script.PAGES)
    for name in script.TABLES:
        assert f"<!-- table: {name} -->" in text, name


def test_numbers_are_those_of_the_reports() -> None:
    """Two programs worked them out: ``specdec bench``, when it ran, and this script."""
    for table in script.TABLES.values():
        shown = script.render(table, "").splitlines()[2:]
        for row, line in zip(table.rows, shown, strict=False):
            report = (RESULTS / row.folder / "report.md").read_text("utf-8")
            column = 3 if row.over == "no draft" else 4
            for batch, ours in zip(table.batches, line.split("|")[2:], strict=False):
                (theirs,) = (
                    each.split("|")[column].split()[0]
                    for each in report.splitlines()
                    if re.match(rf"\| batch {batch}: specdec, ", each)
                    and ("no draft" not in each) == row.drafts
                )
                assert ours.split()[0] == theirs


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of its own, in a folder below the root."""
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("a\n<!-- table: cpu-jobs -->\nold\n<!-- end of table -->\nb\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PAGES", [page])
    return page


def test_a_stale_page_is_told_in_one_line(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = page.read_text("utf-8")
    assert script.main(["--check"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: tables of docs/page.md are not what")
    assert page.read_text("utf-8") == before
    assert script.main([]) == 0
    text = page.read_text("utf-8")
    assert "(../benchmarks/results/jobs-cpu/report.md)" in text
    assert text.endswith("\n\n<!-- end of table -->\nb\n")
    assert script.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: u -->\n<!-- end of table -->\n", "table u: no such table"),
        ("<!-- table: t -->\n", "page.md: a table without its end, or twice"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    page: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    page.write_text(text, "utf-8")
    assert script.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: page.md: ")
    assert message in line
    assert page.read_text("utf-8") == text
