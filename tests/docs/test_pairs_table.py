"""docs/pairs.md is what the registry says."""

from __future__ import annotations

from .scripts import load_script


def test_the_page_is_what_the_registry_says() -> None:
    """A pair was added, or the page edited by hand."""
    script = load_script("pairs_table")
    assert script.PAGE.read_text("utf-8") == script.page()
