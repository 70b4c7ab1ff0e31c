"""Small models, and forwards through some of their layers without mlx-lm's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from tests.cache.small_models import MODELS

WINDOW = 8
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 6}),
    "llama-sliding": (
        "llama",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]
            * 2,
        },
    ),
    "qwen2": ("qwen2", {"num_hidden_layers": 6}),
    "qwen3": ("qwen3", {"num_hidden_layers": 6}),
    "gemma3": (
        "gemma3_text",
        {**MODELS["gemma3"][1], "num_hidden_layers": 6},
    ),
}


def build(tiny_model: Callable[..., Any], name: str, seed: int = 0) -> Any:
    arch, options = ARCHITECTURES[name]
    return tiny_model(arch, seed=seed, **options)


def layer_outputs(
    model: Any, layers: Sequence[int], tokens: mx.array
) -> list[mx.array]:
    """By hand, without caches: only these layers, each with a mask of its kind."""
    trunk, outputs = model.model, []
    h = trunk.embed_tokens(tokens)
    if type(trunk).__name__ == "Gemma3Model":
        h = h * mx.array(32**0.5, mx.bfloat16).astype(h.dtype)
    position = mx.arange(tokens.shape[1])
    full = position[:, None] >= position
    near = full & (position[:, None] < position + WINDOW)
    kinds = make_prompt_cache(model)
    for i in layers:
        sliding = getattr(kinds[i], "max_size", None) is not None
        h = trunk.layers[i](h, near if sliding else full, None)
        outputs.append(h)
    return outputs


def plain_forward(model: Any, layers: Sequence[int], tokens: mx.array) -> mx.array:
    """Logits of those layers alone."""
    h = model.model.norm(layer_outputs(model, layers, tokens)[-1])
    if "lm_head" in model:
        logits: mx.array = model.lm_head(h)
        return logits
    tied: mx.array = model.model.embed_tokens.as_linear(h)
    return tied
