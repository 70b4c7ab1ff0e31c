"""The Python of docs/caches.md runs as pasted, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "caches.md"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What is defined once every block has run, in order."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), scope)
    return scope


def test_next_tokens_are_those_of_every_row_alone(example: dict[str, Any]) -> None:
    model, following = example["model"], example["following"]
    for row, (token,) in zip(example["rows"], following.tolist(), strict=True):
        assert token == mx.argmax(model(mx.array([row]))[0, -1]).item()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_of_another_size_fails_in_the_model(
    rows: int, example: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="rope"):
        example["model"](mx.zeros((rows, 1), mx.int32), cache=example["caches"])
