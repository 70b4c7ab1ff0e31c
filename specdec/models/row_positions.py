"""mlx-lm's models that take columns for positions, with the rows' own positions.

Layers that use the keys of another layer do not see its cache, and some work out where
their queries are from the number of keys that they are handed. In a batch of rows that
differ in length that is right for the longest row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import afm7, gemma2
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from ..cuda.flattened_matmul import as_kind


class _AFM7(afm7.AFMModel):
    """Its layers without keys turn their queries by the row's position."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        if cache is None:
            usual: mx.array = super().__call__(inputs)
            return usual
        h = self.embedding(inputs)
        mask = create_attention_mask(h, cache[0])
        # As it is before the layers write.
        offset = cache[0].offset
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=c)
        shared = cache[-1]
        keys, values = shared.keys_and_values()
        for reusing in self.kv_reuse_layers:
            own, x = reusing.self_attn, reusing.input_layernorm(h)
            rows, tokens, _ = x.shape
            q = own.q_proj(x).reshape(rows, tokens, own.n_heads, -1)
            q = own.q_norm(own.rope(q.transpose(0, 2, 1, 3), offset=offset))
            found = scaled_dot_product_attention(
                q, keys, values, cache=shared, scale=own.scale, mask=mask
            )
            found = found.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
            h = h + own.out_proj(found)
            h = h + reusing.mlp(reusing.post_attention_layernorm(h))
        normed: mx.array = self.output_norm(h)
        return normed


def _afm7(model: Any) -> nn.Module:
    twin = as_kind(model, type(model))
    twin["model"] = as_kind(model.model, _AFM7)
    made: nn.Module = twin
    return made


class _Gemma2Attention(gemma2.Attention):
    """Its scores have an axis more than the mask, where heads share keys."""

    def __call__(
        self, x: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        if mask is not None and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        found: mx.array = super().__call__(x, mask, cache)
        return found


def _gemma2(model: Any) -> nn.Module:
    twin = as_kind(model, type(model))
    twin["model"] = as_kind(model.model, type(model.model))
    layers = [as_kind(layer, type(layer)) for layer in model.model.layers]
    for layer in layers:
        layer["self_attn"] = as_kind(layer.self_attn, _Gemma2Attention)
    twin["model"]["layers"] = layers
    made: nn.Module = twin
    return made


_TWINS: dict[type, Callable[[Any], nn.Module]] = {
    afm7.Model: _afm7,
    gemma2.Model: _gemma2,
}


def with_row_positions(model: nn.Module) -> nn.Module:
    """The model, or a second one that shares its weights, right for rows of a batch.

    The model itself does not change.
    """
    twin = _TWINS.get(type(model))
    return model if twin is None else twin(model)
