"""Arguments of small random models, of every kind of layer that is supported.

Windows and chunks are 8 tokens, so that a short run goes far past them.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_causal_mask
from mlx_lm.models.cache import ChunkedKVCache, KVCache
from mlx_lm.models.llama import ModelArgs, TransformerBlock

from tests.conftest import SMALLEST
from tests.models.architectures import arguments_of

WINDOW = 8


def _small(arch: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """An architecture and its arguments beside those of ``tiny_model``."""
    arguments = arguments_of(arch, vocab_size_per_layer_input=97, **SMALLEST | changes)
    module = import_module(f"mlx_lm.models.{arch}")
    known = {*inspect.signature(module.ModelArgs).parameters} - {"model_type"}
    return arch, {k: v for k, v in arguments.items() if k in known}


_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

#: name -> (architecture, arguments beside those of the ``tiny_model`` fixture)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "sliding": ("llama", _ALTERNATING),
    "gemma3": _small("gemma3_text", num_hidden_layers=3, sliding_window_pattern=3),
    # Attention sinks.
    "gpt-oss": _small(
        "gpt_oss", num_local_experts=2, num_experts_per_tok=1, **_ALTERNATING
    ),
    "mistral": _small("ministral3", **_ALTERNATING),  # queries scaled by position
    # It takes masks for boolean arrays.
    "latent": _small("deepseek_v3", n_routed_experts=None, num_key_value_heads=4),
    # Two caches a layer.
    "list": _small("longcat_flash", n_routed_experts=2, moe_topk=1),
    # Fewer caches than layers.
    "shared-kv": _small("gemma4_text", num_hidden_layers=4),
    "shared-kv-3n": _small("gemma3n", num_hidden_layers=4),
}

LLAMA4 = _small("llama4", num_hidden_layers=4)[1]
#: Layers without keys of their own, which turn their queries by the columns that they
#: are handed.
AFM7 = _small("afm7", num_hidden_layers=4)[1]
#: Attention to some blocks of keys, chosen by the columns that are read.
MINIMAX_M3 = _small("minimax_m3_vl", num_hidden_layers=4)[1]
#: A mask one token wider than the ring that decoding reads.
PLAMO3 = _small("plamo3", tie_word_embeddings=False)[1]


class ChunkedModel(nn.Module):
    """llama4's kind of attention, with masks that come from the cache.

    Without caches it attends by a mask of its own: the reference.
    """

    def __init__(self, hidden_size: int = 32, head_dim: int = 8):
        super().__init__()  # type: ignore[no-untyped-call]
        args = ModelArgs(
            model_type="llama",
            hidden_size=hidden_size,
            num_hidden_layers=3,
            intermediate_size=2 * hidden_size,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            vocab_size=97,
        )
        self.embed = nn.Embedding(97, hidden_size)
        self.layers = [TransformerBlock(args) for _ in range(3)]
        self.out = nn.Linear(hidden_size, 97, bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed(inputs)
        if cache is None:
            masks = self._masks(inputs.shape[1])
            cache = [None] * 3
        else:
            masks = [create_attention_mask(h, c) for c in cache]
        for layer, mask, c in zip(self.layers, masks, cache, strict=True):
            h = layer(h, mask, c)
        logits: mx.array = self.out(h)
        return logits

    def _masks(self, length: int) -> list[mx.array]:
        chunk = mx.arange(length) // WINDOW
        full = create_causal_mask(length)
        chunked = full & (chunk[:, None] == chunk[None])
        return [chunked, full, chunked]

    def make_cache(self) -> list[Any]:
        return [ChunkedKVCache(WINDOW), KVCache(), ChunkedKVCache(WINDOW)]
