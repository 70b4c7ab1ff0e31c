"""The table of docs/gguf.md is what its script measures."""

from __future__ import annotations

from .scripts import ROOT, load_script


def test_the_table_is_what_is_measured() -> None:
    """Bits of a type change, or a row is edited by hand."""
    page = (ROOT / "docs" / "gguf.md").read_text("utf-8")
    assert "\n".join(load_script("gguf_table").table()) in page
