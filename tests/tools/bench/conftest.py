"""A small recipe on random models, and a clock that counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.tools.bench.recipe import Recipe

TINY = """
title = "Tiny"
target = "random:tiny"
draft = "random:tiny:1"
dtype = "float32"

[prompts]
source = "random:9"
count = 2

[sweep]
num_draft_tokens = [2]
batch = [1, 2]

[run]
max_tokens = 6
repeat = 2
profile_rounds = 2
"""


class Ticks:
    """Every look at it is 1/1024 of a second later: sums of that are exact."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        self.now += 1
        return self.now / 1024


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Recipe]:
    """Read the recipe, with settings."""
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, "utf-8")
    return lambda *settings: Recipe.read(file, settings)
