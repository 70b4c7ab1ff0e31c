"""A model in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..parallel import Ranks
from .layers import arrays_of


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its tokenizer and its configuration.

    Args:
        model: an mlx-lm model; its weights are evaluated.
        tokenizer: mlx-lm's wrapper; the text that its streaming detokenizer
            yields equals ``tokenizer.decode``, or has more whole characters (see
            :class:`~specdec.models.tokenizer.ExactStreamingDetokenizer`).
        config: the model's configuration, as in ``config.json``.
        name: the name that the user gave.
        ranks: the ranks that hold one shard each; ``None``: the model is whole.
        folder: the folder that the model was loaded from, if any.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    name: str
    ranks: Ranks | None = None
    folder: Path | None = None

    @property
    def in_float32(self) -> bool:
        """Whether all weights are float32, and none is packed."""
        return all(array.dtype == mx.float32 for _, array in arrays_of(self.model))

    @property
    def loading_bytes(self) -> int:
        """Bytes that loading still takes: none."""
        return 0


class Described(Protocol):
    """A :class:`LoadedModel`, or an outline of one (:mod:`.model_outline`)."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def name(self) -> str: ...

    @property
    def loading_bytes(self) -> int: ...


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions that a model serves; ``None`` if its configuration does not say.

    The larger of ``max_position_embeddings`` and, for a scaled rotary embedding, the
    original length times the factor.
    """
    text = config.get("text_config") or config
    length = text.get("max_position_embeddings") or config.get(
        "max_position_embeddings"
    )
    if not isinstance(length, int):
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
    original = (
        scaling.get("original_max_position_embeddings")
        if isinstance(scaling, Mapping)
        else None
    )
    if isinstance(factor, int | float) and isinstance(original, int):
        return max(length, int(factor * original))
    return length


def setting(config: Mapping[str, Any], *names: str) -> Any:
    """The first of ``names`` that a configuration, or its text part, has."""
    parts = (config, config.get("text_config") or {})
    return next((p[k] for k in names for p in parts if p.get(k) is not None), None)
