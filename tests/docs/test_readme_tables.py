"""The measured tables of the pages are what the raw results come to."""

from __future__ import annotations

import pytest

from .scripts import load_script

script = load_script("readme_tables")


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
