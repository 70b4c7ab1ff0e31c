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

    @property
    def folder(self) -> Path | None: ...


# Names of the number of positions, in the order in which they count. GPT-2's and
# GPTBigCode's is the size of a table of positions; nobody reads past it.
_POSITIONS = (
    "n_positions", "max_position_embeddings", "max_seq_len", "max_seq_length",
    "max_sequence_length", "seq_length", "n_ctx", "block_size",
)  # fmt: skip
# No model has so many.
_ENDLESS = 1e15
# Parts of a configuration that describe the model of text, or hold such a part.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions that a model serves; ``None`` if its configuration does not say.

    For a scaled rotary embedding, the original length times the factor, if that is
    larger than the number that the configuration names.
    """
    parts = [config]
    for part in parts:  # which grows
        held = (part.get(name) for name in _TEXT_PARTS)
        parts += [each for each in held if isinstance(each, Mapping)]
    parts.reverse()  # the innermost first
    named = (_number(part.get(name)) for part in parts for name in _POSITIONS)
    length = next((int(n) for n in named if n >= 1), None)
    if length is None:
        return None
    scalings = (p.get("rope_scaling") or p.get("rope_parameters") for p in parts)
    scaling = next((each for each in scalings if isinstance(each, Mapping)), {})
    original = _number(scaling.get("original_max_position_embeddings"))
    return max(length, int(_number(scaling.get("factor")) * original))


def _number(value: Any) -> float:
    """A number of a configuration; 0 if it is none, or no number of positions."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and 0 < value < _ENDLESS else 0


def setting(config: Mapping[str, Any], *names: str) -> Any:
    """The first of ``names`` that a configuration, or its text part, has."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    return next((p[k] for k in names for p in parts if p.get(k) is not None), None)
