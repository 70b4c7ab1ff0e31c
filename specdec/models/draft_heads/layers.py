"""Parts of draft heads: attention over a context, and a decoder layer around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from ...cuda.attention_patch import attend
from ...cuda.residual_norm import added, following
from .config import LayerSizes


class MLP(nn.Module):
    """Two projections, one of them a gate, and the projection back.

    Args:
        size, hidden_size: widths of its inputs, and within.
    """

    def __init__(self, size: int, hidden_size: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate_proj = nn.Linear(size, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(size, hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return output


class HeadAttention(nn.Module):
    """Attention whose queries may have another input than its keys and values.

    Args:
        sizes: sizes of the layer.
        input_size: width of its inputs.
    """

    # Keys and values of a context are made without queries.
    siblings = (("k_proj", "v_proj"),)

    def __init__(self, sizes: LayerSizes, input_size: int):
        super().__init__()  # type: ignore[no-untyped-call]
        heads, kv_heads, size = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        self.n_heads, self.n_kv_heads = heads, kv_heads
        self.scale = size**-0.5
        self.q_proj = nn.Linear(input_size, heads * size, bias=sizes.bias)
        self.k_proj = nn.Linear(input_size, kv_heads * size, bias=sizes.bias)
        self.v_proj = nn.Linear(input_size, kv_heads * size, bias=sizes.bias)
        self.o_proj = nn.Linear(heads * size, sizes.hidden_size, bias=sizes.output_bias)
        if sizes.gated:
            self.g_proj = nn.Linear(input_size, heads * size, bias=False)
        if sizes.sinks:
            self.attention_sink_bias = mx.zeros((heads,))
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(size, eps=sizes.rms_norm_eps)
            self.k_norm = nn.RMSNorm(size, eps=sizes.rms_norm_eps)
        scaling = None if sizes.rope_scaling is None else dict(sizes.rope_scaling)
        self.rope: Any = initialize_rope(
            sizes.rope_dims or size,
            sizes.rope_theta,
            bool(sizes.rope_traditional),
            scaling,
            sizes.max_positions,
        )

    def queries(self, x: mx.array, offset: mx.array | int) -> mx.array:
        """Queries of ``x`` (B, S, D) at positions from ``offset`` on, (B, H, S, d)."""
        q = self._heads(self.q_proj(x), self.n_heads)
        if "q_norm" in self:
            q = self.q_norm(q)
        turned: mx.array = self.rope(q, offset=offset)
        return turned

    def keys_values(
        self, x: mx.array, offset: mx.array | int
    ) -> tuple[mx.array, mx.array]:
        """Keys and values of ``x``, each (B, kv_heads, S, d)."""
        k = self._heads(self.k_proj(x), self.n_kv_heads)
        v = self._heads(self.v_proj(x), self.n_kv_heads)
        if "k_norm" in self:
            k = self.k_norm(k)
        return self.rope(k, offset=offset), v

    def attend(
        self,
        x: mx.array,
        q: mx.array,
        keys: Any,
        values: Any,
        mask: Any,
        cache: Any = None,
    ) -> mx.array:
        """The projected output (B, S, D) of attention for queries (B, H, S, d).

        Args:
            x: what the queries were made from.
            keys, values: of all tokens that may be seen, as a cache returns them.
            mask: boolean or additive, broadcast to (B, H, S, T); ``"causal"``; or
                ``None``: everything is seen.
            cache: the cache that returned them.
        """
        sinks = self.get("attention_sink_bias")
        mixed = attend(
            q,
            keys,
            values,
            cache=cache,
            scale=self.scale,
            mask=mask,
            sinks=None if sinks is None else sinks.astype(q.dtype),
        )
        rows, _, width, _ = mixed.shape
        mixed = mixed.transpose(0, 2, 1, 3).reshape(rows, width, -1)
        if "g_proj" in self:
            mixed = mixed * mx.sigmoid(self.g_proj(x)).reshape(mixed.shape)
        out: mx.array = self.o_proj(mixed)
        return out

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """Attention of ``x`` to itself and the cache; ``x`` is written to the cache."""
        offset = cache.offset
        q = self.queries(x, offset)
        keys, values = cache.update_and_fetch(*self.keys_values(x, offset))
        return self.attend(x, q, keys, values, mask, cache)

    @staticmethod
    def _heads(x: mx.array, num_heads: int) -> mx.array:
        rows, width, _ = x.shape
        return x.reshape(rows, width, num_heads, -1).transpose(0, 2, 1, 3)


class HeadLayer(nn.Module):
    """A decoder layer with norms before attention and MLP.

    Args:
        sizes: sizes of the layer.
        pair: whether its attention reads a token and a feature side by side, as in
            the first layer of EAGLE-3.
    """

    def __init__(self, sizes: LayerSizes, *, pair: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.self_attn = HeadAttention(sizes, 2 * size if pair else size)
        self.mlp = MLP(size, sizes.intermediate_size)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        if pair:
            self.hidden_norm = nn.RMSNorm(size, eps=eps)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """The layer's output for ``x`` (B, S, D), which is written to the cache."""
        return self.around(x, lambda normed: self.self_attn(normed, mask, cache))

    def around(self, x: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """The layer's output for ``x``, with ``attend`` as its attention."""
        return self.after_attention(x, attend(self.input_layernorm(x)))

    def after_attention(self, residual: mx.array, mixed: mx.array) -> mx.array:
        """The rest of the layer, from the output of attention on."""
        h = added(residual, mixed, self.post_attention_layernorm)
        return added(h, self.mlp(self.post_attention_layernorm(h)), following(self))
