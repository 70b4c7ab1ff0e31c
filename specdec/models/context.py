"""How many positions a model was made for, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def context_length(config: Mapping[str, Any]) -> int | None:
    """Positions that a model serves; ``None`` when its configuration does not say.

    ``max_position_embeddings``, or what scaled rotary embeddings make of the length
    that the model was trained with, where that is more.
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
