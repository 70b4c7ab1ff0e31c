"""Folders of drafts that were made for a target: their card, and shared embeddings.

The card, ``distill.json``, lies next to the weights and names the target that a draft
was made for. If it says that the embedding is the target's, only layers are stored:
embedding, head and tokenizer are the target's own objects.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model

from ..errors import ModelError, UnsupportedModelError
from ..utils.data_files import DataError, read_json
from ..utils.validation import check, table
from .folder import check_folder, explained, plain_folder
from .layers import arrays_of, text_model
from .loaded import Described, LoadedModel

log = logging.getLogger("specdec.models")

CARD = "distill.json"
FORMAT = "specdec draft"
# The keys of a card that are read, if they are there.
_KEYS = table({}, embedding=str, target=table({}, name=str, fingerprint=str) | None)


def read_card(source: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The card of a draft's folder; ``None`` if there is none.

    Raises:
        ModelError: the card cannot be read, or the draft's folder is half written.
    """
    path = Path(os.path.expanduser(os.fspath(source))) / CARD
    try:
        card = read_json(path)
        if not isinstance(card, dict) or card.get("format") != FORMAT:
            return None
        check(_KEYS, card)
    except FileNotFoundError:
        return None
    except DataError as error:
        raise ModelError(
            f"{path} cannot be read ({error}): make the draft again"
        ) from error
    if not path.with_name("config.json").exists():  # written last, removed first
        raise ModelError(
            f"{path.parent} is half written, because specdec distill was stopped: run "
            "its command again, with --resume"
        )
    return card


def has_layers_only(card: dict[str, Any] | None) -> bool:
    """Whether the target provides embedding and head."""
    return card is not None and card.get("embedding") == "target"


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's shape and of its norms.

    Norms are never packed, and training a model changes them. Rounded to bfloat16, they
    are the same in a GGUF file, a folder made from it, and a quantized copy.
    """
    digest = hashlib.sha256()
    every = sorted(arrays_of(model))
    norms = [(name, a) for name, a in every if "norm" in name and a.ndim == 1]
    for name, array in norms:
        short = name.removeprefix("language_model.")
        digest.update(f"{short} {array.size}".encode())
        rounded = array.astype(mx.bfloat16).astype(mx.float32)
        digest.update(np.array(rounded).tobytes())
    return digest.hexdigest()


def is_made_for(card: dict[str, Any], target: LoadedModel) -> bool:
    """Whether the draft of this card was made for exactly this model."""
    made_for = card.get("target") or {}
    return bool(made_for.get("fingerprint") == fingerprint(target.model))


def check_target(card: dict[str, Any], source: str, target: LoadedModel) -> None:
    """Warn if a draft was made for another target."""
    if not is_made_for(card, target):
        made_for = card.get("target") or {}
        log.warning(
            "draft %s was made for %s, which is another model than %s: it may be "
            "accepted seldom",
            source,
            made_for.get("name", "another target"),
            target.name,
        )


def open_layers(
    source: str, *, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """Open a draft that stores only layers, without embedding and head.

    Nothing is computed. :func:`lend` provides embedding and head.

    Returns:
        The model and its configuration.

    Raises:
        UnsupportedModelError: the draft wants to run code that is not trusted, or
            embeddings cannot be lent to its architecture.
        ModelError: the draft cannot be read.
    """
    folder = Path(os.path.expanduser(source))
    with explained(source):
        check_folder(folder)
        with plain_folder(folder) as plain:
            model, config = load_model(
                plain, lazy=True, strict=False, trust_remote_code=trust_remote_code
            )
    # An embedding of the configured size would be filled with random numbers.
    part = text_model(model, source, "lending an embedding")
    part["model"]["embed_tokens"] = nn.Embedding(1, 1)
    if "lm_head" in part:
        part["lm_head"] = nn.Linear(1, 1)
    return model, config


def take_type(model: nn.Module, target: Described) -> None:
    """Let a draft that uses the target's embedding compute in the target's 16-bit type.

    MLX promotes a mix of two 16-bit types to float32.

    Raises:
        UnsupportedModelError: the target's architecture is not known to have an
            embedding.
    """
    embedding: Any = _lender(target)["model"]["embed_tokens"]
    dtype = embedding.get("scales", embedding["weight"]).dtype
    if dtype in (mx.bfloat16, mx.float16):
        model.set_dtype(dtype)


def _lender(target: Described) -> nn.Module:
    """The part of a target that has an embedding and a head."""
    return text_model(target.model, target.name, "lending its embedding")


def lend(model: nn.Module, source: str, target: Described) -> None:
    """Give a model from :func:`open_layers` the target's embedding and head.

    Raises:
        UnsupportedModelError: the model is of another width, or the target's
            architecture is not known to have them.
    """
    lender = _lender(target)
    part = text_model(model, source, "lending an embedding")
    width = lender["model"]["norm"]["weight"].shape
    head_width = part["model"]["norm"]["weight"].shape
    if head_width != width:
        raise UnsupportedModelError(
            f"{source} was made for a target of width {head_width[0]}, and "
            f"{target.name} has {width[0]}: name the target that it was made for"
        )
    part["model"]["embed_tokens"] = lender["model"]["embed_tokens"]
    if "lm_head" in lender:
        part["lm_head"] = lender["lm_head"]
    elif "lm_head" in part:  # Gemma 3 drops its head once it finds no weights for it
        part.sanitize({})
