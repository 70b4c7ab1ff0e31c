"""The measured tables of the pages are what the raw results come to."""

from __future__ import annotations

import re

import pytest

from .scripts import ROOT, load_script

script = load_script("readme_tables")
RESULTS = ROOT / "benchmarks" / "results"


def test_the_pages_are_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
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
