"""Layers like Gemma 4's, and DSpark heads that are built of them.

Norms stand before and after attention and MLP; values are normed without a gain; scores
are not scaled; only a part of each head is rotated. If a layer has no projection for
values, they are its keys before norm and rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from .block import BlockConfig, BlockHead, block_values
from .config import LayerSizes, Published
from .layers import MLP, HeadAttention, HeadLayer

#: What Gemma's configurations call their activation.
ACTIVATION = "gelu_pytorch_tanh"


class GemmaMLP(MLP):
    """An MLP gated by the tangent's approximation of GELU."""

    def __call__(self, x: mx.array) -> mx.array:
        """The output (B, S, D) for ``x``."""
        out: mx.array = self.down_proj(
            nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x)
        )
        return out


class GemmaAttention(HeadAttention):
    """Attention with normed values and unscaled scores.

    Args:
        sizes: sizes of the layer.
        values: whether it has a projection for values.
    """

    def __init__(self, sizes: LayerSizes, *, values: bool):
        super().__init__(sizes, sizes.hidden_size)
        self.scale = 1.0
        self._eps = sizes.rms_norm_eps
        if not values:
            del self.v_proj

    def keys_values(
        self, x: mx.array, offset: mx.array | int
    ) -> tuple[mx.array, mx.array]:
        """Keys and values of ``x``, each (B, kv_heads, S, d)."""
        k = self._heads(self.k_proj(x), self.n_kv_heads)
        v = k
        if "v_proj" in self:
            v = self._heads(self.v_proj(x), self.n_kv_heads)
        values = mx.fast.rms_norm(v, None, self._eps)
        return self.rope(self.k_norm(k), offset=offset), values


class GemmaLayer(HeadLayer):
    """A decoder layer with norms before and after attention and MLP."""

    def __init__(self, sizes: LayerSizes, attention: HeadAttention):
        super().__init__(sizes)
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.self_attn = attention
        self.mlp = GemmaMLP(size, sizes.intermediate_size)
        self.pre_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(size, eps=eps)
        self.layer_scalar = mx.ones((1,))

    def around(self, x: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """The layer's output for ``x``, with ``attend`` as its attention."""
        h = x + self.post_attention_layernorm(attend(self.input_layernorm(x)))
        mixed = self.mlp(self.pre_feedforward_layernorm(h))
        out: mx.array = h + self.post_feedforward_layernorm(mixed)
        return out * self.layer_scalar


def gemma_sizes(published: Published, kind: str) -> LayerSizes:
    """Sizes of layers that attend as Gemma 4's of this kind (``full_attention``) do.

    Raises:
        UnsupportedModelError: the layers have experts or inputs of their own.
    """
    layers = published.layers
    if layers.get("enable_moe_block") or layers.get("hidden_size_per_layer_input"):
        raise UnsupportedModelError(
            f"{published.source} has layers with experts or inputs of their own, which "
            "are not supported: take another draft"
        )
    sizes = published.sizes(ACTIVATION)
    rope = (layers.get("rope_parameters") or {}).get(kind) or {}
    full = kind == "full_attention"
    shares = full and layers.get("attention_k_eq_v")
    kv_heads = layers.get("num_global_key_value_heads") if shares else None
    size = layers.get("global_head_dim") if full else None
    return replace(
        sizes,
        head_dim=size or sizes.head_dim,
        num_kv_heads=kv_heads or sizes.num_kv_heads,
        rope_theta=float(rope.get("rope_theta") or (1e6 if full else 1e4)),
        rope_scaling=rope or None,
        rope_traditional=False,
        qk_norm=True,
    )


@dataclass(frozen=True, kw_only=True)
class GemmaBlockConfig(BlockConfig):
    """A DSpark head of Gemma layers.

    Args:
        has_values: whether its layers have projections for values.
    """

    has_values: bool


class GemmaBlockHead(BlockHead):
    """A DSpark head of Gemma layers."""

    def _layer(self, config: Any) -> HeadLayer:
        sizes = config.sizes
        return GemmaLayer(sizes, GemmaAttention(sizes, values=config.has_values))


def gemma_block_config(published: Published) -> GemmaBlockConfig:
    """The configuration of a DSpark head of Gemma layers."""
    sizes = gemma_sizes(published, "full_attention")
    values = block_values(published, sizes)
    if values["owns_embedding"]:  # a target's embedding has this factor already
        values["embedding_scale"] *= sizes.hidden_size**0.5
    return GemmaBlockConfig(
        **values, has_values="layers.0.self_attn.v_proj.weight" in published.names
    )
