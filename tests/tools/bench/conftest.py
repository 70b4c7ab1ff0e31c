"""A small recipe on random models, and a clock that counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.tools.bench.raw import Results
from specdec.tools.bench.recipe import Recipe
from specdec.tools.bench.run import run_recipe

TINY = """
title = "Tiny"
target = "random:tiny"
draft = "random:tiny:1"
dtype = "float32"

[prompts]
source = "random:9"
count = 5

[sweep]
num_draft_tokens = [2, "auto"]
batch = [1, 2]

[run]
max_tokens = 9
least_tokens = 3
repeat = 2
"""

Tiny = Callable[..., Recipe]


class Ticks:
    """Every look at it is 1/1024 of a second later: sums of that are exact."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        self.now += 1
        return self.now / 1024


def run(recipe: Recipe, folder: Path, **options: object) -> Results:
    """Run it by the clock that counts."""
    return run_recipe(recipe, folder, command="test", clock=Ticks(), **options)  # type: ignore[arg-type]


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """Read the recipe, with settings."""
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, "utf-8")
    return lambda *settings: Recipe.read(file, settings)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all results of the tiny recipe."""
    folder = tmp_path_factory.mktemp("whole")
    file = folder / "tiny.toml"
    file.write_text(TINY, "utf-8")
    run(Recipe.read(file), folder / "out")
    return folder / "out"
