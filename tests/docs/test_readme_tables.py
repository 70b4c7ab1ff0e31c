"""The measured tables of the pages are what the raw results come to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .scripts import ROOT, load_script

script = load_script("readme_tables")
RESULTS = ROOT / "benchmarks" / "results"


def test_the_pages_are_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    """A result was measured anew, or a number edited by hand."""
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_every_table_is_shown_somewhere() -> None:
    """And ends: what has no end would stay as it is."""
    text = "".join(page.read_text("utf-8") for page in script.PAGES)
    for name in script.TABLES:
        assert f"<!-- table: {name} -->" in text, name
    marks = text.count("<!-- table: ") + text.count("<!-- end of table -->")
    assert marks == 2 * len(script.MARKED.findall(text))


def test_numbers_are_those_of_the_reports() -> None:
    """Two programs worked them out: one when it was measured, and this script."""
    for table in script.TABLES.values():
        shown = script.render(table, "").splitlines()[2:]
        for row, line in zip(table.rows, shown, strict=False):
            report = (RESULTS / script.page_of(row.results)).read_text("utf-8")
            for batch, ours in zip(table.batches, line.split("|")[2:], strict=False):
                (theirs,) = (
                    each.split("|")[_column(row)].split()[0]
                    for each in report.splitlines()
                    if _is_of(each, row, batch)
                )
                assert ours.split()[0] == theirs


def _column(row: Any) -> int:
    if row.prompts is not None:
        return 5
    return 3 if row.over == "no draft" else 4


def _is_of(line: str, row: Any, batch: int) -> bool:
    """Whether a line of a report has the numbers of a row of a table."""
    if row.prompts is not None:
        return line.startswith(f"| {row.prompts} | {batch} |")
    system = re.match(rf"\| batch {batch}: specdec, ", line)
    return bool(system) and ("no draft" not in line) == row.drafts
