"""Every recipe that comes with specdec runs, cut down, from prompts to report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.cli import main
from specdec.tools.bench.figures import Figures
from specdec.tools.bench.raw import Results
from specdec.tools.bench.recipe import Recipe, shipped_recipes

from ...models.folders import write_folder

NAMES = [file.stem for file in shipped_recipes()]
# Prompts that a user has to bring, in the form of their data set.
BROUGHT: dict[str, list[dict[str, Any]]] = {
    "acceptance-gsm8k": [{"question": "2 + 2?", "answer": "4"}] * 2,
    "acceptance-specbench": [
        {"question_id": n, "category": kind, "turns": ["Write.", "Again."]}
        for n, kind in enumerate(("writing", "roleplay"))
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with a tokenizer, whose keys can be packed."""
    path = tmp_path_factory.mktemp("shipped") / "model"
    heads: dict[str, Any] = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    write_folder(path, num_hidden_layers=1, max_position_embeddings=8192, **heads)
    return str(path)


def cut_down(name: str, recipe: Recipe, folder: str) -> list[str]:
    """The same recipe at a size of seconds, with its own prompts and KV bits."""
    return [
        f"target={folder}",
        *([f"draft={folder}"] if recipe.draft else []),
        "dtype=float32",
        "count=2",
        "batch=2",
        f"context={min(max(recipe.sweep.context), 40)}",
        *(["least_tokens=1", "prompts_per_row=2"] if name == "jobs" else []),
        f"temperature={max(recipe.sweep.temperature)}",
        "num_draft_tokens=2",
        "max_tokens=2",
        "repeat=1",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name: str, folder: str, tmp_path: Path) -> None:
    """A key of the recipe that nothing reads, prompts that are not there, a crash."""
    brought = []
    if name in BROUGHT:
        file = tmp_path / "questions.jsonl"
        file.write_text("\n".join(map(json.dumps, BROUGHT[name])), "utf-8")
        brought = [f"prompts.source=file:{file}"]
    settings = brought + cut_down(name, Recipe.read(name, brought), folder)
    out = tmp_path / "out"
    arguments = ["bench", name, "--quiet", "--out", str(out)]
    for setting in settings:
        arguments += ["--set", setting]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    figures = Figures(Results.read(out))
    assert figures.missing == []
    report = (out / "report.md").read_text("utf-8")
    assert report.startswith(f"# {Recipe.read(name, brought).title}\n")
    assert "Not complete" not in report
    assert ("| category | system |" in report) == (name == "acceptance-specbench")
    assert bool(figures.drafted) == bool(figures.recipe.draft)
