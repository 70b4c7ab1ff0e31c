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


# Names of the number of positions, in the order in which they count. GPT-2's and
# GPTBigCode's is the size of a table of positions; nobody reads past it.
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length",
    "max_sequence_length", "seq_length", "n_ctx", "block_size",
)  # fmt: skip
# Parts of a configuration that describe the model of text.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions that a model serves; ``None`` if its configuration does not say.

    For a scaled rotary embedding, the original length times the factor, if that is
    larger than the number that the configuration names.
    """
    parts = [config[k] for k in _TEXT_PARTS if isinstance(config.get(k), Mapping)]
    named = (p.get(k) for p in (*parts, config) for k in _POSITIONS)
    length = next((n for n in named if type(n) is int and n > 0), None)
    if length is None:
        return None
    text = parts[0] if parts else config
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return length
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if isinstance(factor, int | float) and isinstance(original, int):
        return max(length, int(factor * original))
    return length


def setting(config: Mapping[str, Any], *names: str) -> Any:
    """The first of ``names`` that a configuration, or its text part, has."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    return next((p[k] for k in names for p in parts if p.get(k) is not None), None)
