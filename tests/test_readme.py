"""The Python of README.md and docs/python.md runs as pasted, with a small model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import EngineConfig, SpecDecoder
from specdec.models import LoadedModel
from tests.test_decoder import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
#: How many examples a page has at least, and what one of them prints.
PAGES = {"README.md": (1, " length"), "docs/python.md": (3, " cancelled ")}


@pytest.mark.parametrize("page", PAGES)
def test_the_examples(
    page: str,
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Any = Tokenizer({chr(i + 30): i for i in range(97)})
    model = LoadedModel(tiny_model("llama"), tokenizer, {}, "tiny")

    def from_pretrained(*, dtype: str, config: EngineConfig) -> SpecDecoder:
        return SpecDecoder(model, config=config)

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    text = (ROOT / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    least, shown = PAGES[page]
    assert len(blocks) >= least
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    assert len(scope["results"]) == 2
    assert any(shown in line for line in printed)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_what_examples_write_is_ignored_by_git(page: str) -> None:
    """After a newcomer's first command, a checkout has no changes."""
    text = (ROOT / page).read_text("utf-8")
    written = re.findall(r"^specdec .*--out(?:put)? (\S+)", text, re.MULTILINE)
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    assert written
    assert not [name for name in written if f"/{name}" not in ignored]


def test_every_public_name_is_there() -> None:
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
