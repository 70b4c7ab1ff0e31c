"""Every page can be found: from the documentation's first page, and in the side bar."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

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


def test_commits_are_named_by_results_and_the_changelog_alone() -> None:
    """A page says what is, not how it came to be."""
    commit = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b")
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
    for page in pages:
        if page.name != "CHANGELOG.md":
            assert not commit.findall(page.read_text("utf-8")), page.name


def test_paths_that_pages_name_exist() -> None:
    """A file was moved, or is gone, and a page still sends readers to it."""
    start = r"(?<![\w./~-])(?:tests|specdec|scripts|benchmarks|recipes|docs)/"
    named = re.compile(start + r"[\w./-]*\w/?")
    # The first is where costs are kept in the user's folder of caches.
    elsewhere = re.compile(r"specdec/costs\.json|benchmarks/results/(\w+-)?NAME")
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
    lost = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        if page.name != "CHANGELOG.md"
        for path in named.findall(page.read_text("utf-8"))
        if not (ROOT / path).exists() and not elsewhere.fullmatch(path)
    ]
    assert not lost


def test_headings_that_links_name_exist() -> None:
    """A heading was reworded, and links to it end at the top of its page."""

    def headings(page: Path) -> set[str]:
        """As a forge names them in links."""
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
        found = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in found}

    pages = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
    lost = [
        f"{page.relative_to(ROOT)}: {path}#{heading}"
        for page in pages
        for path, heading in re.findall(
            r"\]\(([\w./-]+\.md)?#([^)]+)\)", page.read_text("utf-8")
        )
        if heading not in headings(page.parent / path if path else page)
    ]
    assert not lost


def test_every_result_is_listed() -> None:
    """With what to know about it: a result that nobody finds, or that is gone."""
    folder = ROOT / "benchmarks"
    listed = set(
        re.findall(
            r"\]\((results/[^)]+\.md)\)", (folder / "README.md").read_text("utf-8")
        )
    )
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("results/**/*.md")}
    assert listed == found


def test_first_pages_stay_short() -> None:
    """README is a screen and a half, the tuning guide advice and not a log."""
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700
    assert len((DOCS / "tuning.md").read_text("utf-8").splitlines()) <= 200


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
