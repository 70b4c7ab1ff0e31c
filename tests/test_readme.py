"""The Python of README.md runs as pasted, here with a small random model."""

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

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_examples(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer: Any = Tokenizer({chr(i + 30): i for i in range(97)})
    model = LoadedModel(tiny_model("llama"), tokenizer, {}, "tiny")

    def from_pretrained(*, dtype: str, config: EngineConfig) -> SpecDecoder:
        return SpecDecoder(model, config=config)

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    text = README.read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    assert len(scope["results"]) == 2
    assert any(" cancelled " in line for line in printed)


def test_every_public_name_is_there() -> None:
    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
