"""The draft in the package is the one that its card describes."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from specdec.model_names import default_draft
from specdec.tools.distill.card import readme

FOLDER = Path(str(default_draft()))
# The package stays below 20 MB.
MOST_BYTES = 19_000_000


def test_its_files_fit_each_other() -> None:
    card = json.loads((FOLDER / "distill.json").read_text("utf-8"))
    config = json.loads((FOLDER / "config.json").read_text("utf-8"))
    weights = mx.load(str(FOLDER / "model.safetensors"))
    assert isinstance(weights, dict)
    layers = {name.split(".")[1] for name in weights if name.startswith("layers")}
    assert len(layers) == len(card["layers"]) == config["num_hidden_layers"]
    # A width of the MLPs that the card names, packed in the bits that it names.
    packed = weights["layers.0.mlp.down_proj.weight"]
    assert packed.shape[1] * 32 // card["bits"] == config["intermediate_size"]
    assert config["quantization"]["bits"] == card["bits"]
    assert config["intermediate_size"] == 1536 * card["widen"]
    assert config["block_size"] == card["block_size"]
    assert len(config["target_layer_ids"]) == len(card["layers"])
    assert not any("embed_tokens" in name or "lm_head" in name for name in weights)


def test_it_is_small_and_made_of_the_targets_own_text() -> None:
    card = json.loads((FOLDER / "distill.json").read_text("utf-8"))
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES
    assert card["data"]["written_by_target"] == card["data"]["tokens"]


def test_its_readme_is_its_card() -> None:
    """With the target's licence and where that is from, which nothing else is."""
    card = json.loads((FOLDER / "distill.json").read_text("utf-8"))
    lines_there = (FOLDER / "README.md").read_text("utf-8").splitlines()
    of_card = readme(card).splitlines()
    added = [line for line in lines_there if line not in of_card]
    assert [line for line in lines_there if line and line in of_card] == [
        line for line in of_card if line
    ]
    assert added[0] == "license: apache-2.0"
