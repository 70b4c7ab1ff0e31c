"""Every page can be found: from the documentation's first page, and in the side bar."""

from __future__ import annotations

import importlib
import re

import pytest

from .scripts import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "README")
CONF = (DOCS / "conf.py").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_named_where_readers_look(page: str) -> None:
    """The site would not be built otherwise; this says so sooner."""
    index = (DOCS / "README.md").read_text("utf-8")
    assert f"]({page}.md" in index, f"docs/README.md: give docs/{page}.md a line"
    named = re.search(rf"docs/{re.escape(page)}\b", CONF)
    assert named, f"docs/conf.py: name docs/{page} in NAVIGATION"


def test_public_modules_have_a_page() -> None:
    """What the site checks name by name is there to be checked."""
    index = (DOCS / "api" / "README.md").read_text("utf-8")
    modules = re.findall(r'^    "(specdec[\w.]*)",$', CONF, re.MULTILINE)
    assert len(modules) > 5
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    for module in modules:
        assert importlib.import_module(module).__all__
        assert f" {module}" in pages, module
    for page in (DOCS / "api").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
