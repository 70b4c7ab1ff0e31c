"""Folders of drafts that were made for a target: their card, and shared embeddings.

``distill.json`` beside the weights says which target a draft was made for. Where it
says that the embedding is the target's, only layers are stored: embedding, head and
tokenizer are the target's own objects.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from ..errors import ModelError
from .fingerprint import fingerprint
from .loaded import LoadedModel
from .precision import cast
from .trunk import check_trunk

log = logging.getLogger("specdec.models")

CARD = "distill.json"
FORMAT = "specdec draft"


def read_card(source: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The card of a draft's folder; ``None`` where there is none.

    Raises:
        ModelError: it cannot be read.
    """
    path = Path(os.path.expanduser(os.fspath(source))) / CARD
    try:
        card = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: make the draft again") from error
    return card if isinstance(card, dict) and card.get("format") == FORMAT else None


def has_layers_only(card: dict[str, Any] | None) -> bool:
    """Whether embedding and head are to come from the target."""
    return card is not None and card.get("embedding") == "target"


def check_target(card: dict[str, Any], source: str, target: LoadedModel) -> None:
    """Warn where a draft was made for another target."""
    made_for = card.get("target") or {}
    if made_for.get("fingerprint") != fingerprint(target.model):
        log.warning(
            "draft %s was made for %s, which is another model than %s: it may be "
            "accepted seldom",
            source,
            made_for.get("name", "another target"),
            target.name,
        )


def load_layers(
    source: str, target: LoadedModel, dtype: mx.Dtype | None
) -> LoadedModel:
    """Load a draft of which only layers are stored.

    Raises:
        ModelError: it does not fit the target, or cannot be read.
    """
    check_trunk(target.model, target.name, "lending its embedding")
    path = Path(os.path.expanduser(source))
    try:
        model, config = load_model(path, lazy=True, strict=False)
    except Exception as error:  # a folder's files can be wrong in any way
        raise ModelError(
            f"{source} cannot be loaded ({type(error).__name__}): make it again"
        ) from error
    lender = target.model
    if "language_model" in lender:
        lender = lender["language_model"]
    # Copies of the modules, not of their arrays: casting must not reach the target.
    embedding = copy.copy(lender["model"]["embed_tokens"])
    model["model"]["embed_tokens"] = embedding
    if "lm_head" in lender:
        model["lm_head"] = copy.copy(lender["lm_head"])
    if dtype is not None:
        cast(model, dtype)
    width = config.get("hidden_size")
    leaves: Any = tree_flatten(model["model"]["norm"].parameters())
    if any(array.shape != (width,) for _, array in leaves):
        raise ModelError(f"{source}: its weights are not those of its config.json")
    mx.eval(model.parameters())
    return LoadedModel(model, target.tokenizer, config, source)
