"""The programs of pages that no other test runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from specdec import EngineConfig, SpecDecoder
from tests.models.folders import write_folder
from tests.models.test_adapters import write_adapter

from .scripts import ROOT


def programs(page: str) -> str:
    """The Python of a page, in one text."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    return "\n".join(found)


def test_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints two answers of the adapted model and what was accepted."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "MODEL")
    write_folder(tmp_path / "DRAFT", seed=1)
    write_adapter(tmp_path / "adapters", tmp_path / "MODEL")
    usual = SpecDecoder.from_pretrained

    def fixed(*names: str, **options: Any) -> SpecDecoder:
        return usual(*names, config=EngineConfig(num_draft_tokens=2), **options)

    monkeypatch.setattr(SpecDecoder, "from_pretrained", fixed)
    exec(programs("lora.md"), {})
    assert "of the draft's tokens were accepted" in capsys.readouterr().out


def test_batch_generator(capsys: pytest.CaptureFixture[str]) -> None:
    """mlx-lm's generator gives its own tokens with these caches."""
    exec(programs("batch-generator.md"), {})
    assert capsys.readouterr().out == "True 12\n"
