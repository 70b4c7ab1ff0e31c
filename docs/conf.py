"""How the site is built: the repository's own Markdown, and the API's docstrings.

The source folder is the repository's root, so that every relative link means the same
here as on the repository's page. ``scripts/docs`` runs it; any warning fails.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import specdec

project = "specdec"
author = "the specdec authors"
version = release = specdec.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/README"
include_patterns = [
    "*.md",
    "docs/**.md",
    "recipes/README.md",
    "benchmarks/README.md",
    "benchmarks/results/**.md",
]
exclude_patterns = ["**/.*", ".*", "build", "dist", "specdec", "tests"]
templates_path = ["_templates"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# The side bar, by heading. A page that is in none of these lists fails the build.
NAVIGATION = {
    "Use": [
        "What it is </README>",
        "/docs/getting-started",
        "/docs/apple-silicon",
        "/docs/python",
        "/docs/models",
        "/docs/gguf",
        "/docs/images",
        "/docs/lora",
        "/docs/questions",
        "/docs/tuning",
        "/docs/sampling",
        "/docs/server",
        "/docs/clients",
        "/docs/evaluations",
        "/docs/structured",
        "/docs/serving",
        "/docs/scaling",
        "/docs/memory",
        "/docs/prefix",
        "/docs/distill",
        "/docs/bench",
        "Recipes that come with it </recipes/README>",
    ],
    "Understand": [
        "/docs/words",
        "/docs/exactness",
        "/docs/architecture",
        "/docs/devices",
        "/docs/caches",
        "/docs/batch-generator",
        "/docs/draft-length",
        "/docs/drafters",
        "/docs/pairs",
    ],
    "Reference": ["/docs/cli", "/docs/api/README", "/CHANGELOG"],
    "Measure": ["/docs/benchmarks", "/benchmarks/README"],
    "Take part": ["/CONTRIBUTING", "/SECURITY"],
}
API = ["specdec", "cache", "drafters", "memory", "models", "parity", "ray"]


def result_pages() -> list[str]:
    """Every result, by the name that other pages cite it with."""
    pages = sorted(RESULTS.rglob("*.md"))
    names = [page.relative_to(RESULTS).with_suffix("").as_posix() for page in pages]
    return [
        f"{name.removesuffix('/report')} </benchmarks/results/{name}>" for name in names
    ]


# Pages below another one.
BELOW = {
    "docs/api/README": [f"/docs/api/{name}" for name in API],
    "benchmarks/README": result_pages(),
}

# -- Markdown and Python

myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# -- HTML

html_theme = "furo"
html_title = f"specdec {release}"
html_copy_source = False
html_show_copyright = False
html_additional_pages = {"index": "redirect.html"}

#: What the API reference has to show: all names in the ``__all__`` of these.
PUBLIC = (
    "specdec",
    "specdec.cache",
    "specdec.ray",
    "specdec.tools.parity",
    "specdec.spec_decode",
    "specdec.memory",
    "specdec.models",
    "specdec.sampling",
)


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the side bar to the first page; on disk, pages are plain Markdown."""
    if docname == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += _toctree(pages, f":caption: {caption}")
    elif docname in BELOW:
        source[0] += _toctree(BELOW[docname])


def _toctree(pages: list[str], *options: str) -> str:
    lines = ["", "```{toctree}", ":hidden:", *options, "", *pages]
    return "\n".join([*lines, "```", ""])


def check_public_names(app: Sphinx, env: Any) -> None:
    """Warn of every public name that the API reference does not show."""
    shown = env.domains["py"].objects
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            full = f"{module}.{name}"
            if name != "__version__" and full not in shown:
                logging.getLogger(__name__).warning("%s is not in docs/api", full)


def show_factories(*args: Any) -> tuple[str | None, str | None]:
    """A default that a dataclass makes anew each time, as Python could be written."""
    *_, signature, returns = args
    return signature and signature.replace("<factory>", "..."), returns


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-signature", show_factories)
    app.connect("env-check-consistency", check_public_names)
