"""mlx-lm's models that want one position or one mask for all rows, with one each.

Layers that use the keys of another layer do not see its cache, and some work out where
their queries are from the number of keys that they are handed. In a batch of rows that
differ in length that is right for the longest row alone. Others read the offset as a
number, or add a mask to scores of another shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import afm7, deepseek_v41, gemma2, gpt_bigcode, llama4
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from ..cuda.flattened_matmul import as_kind
from .compressed_rows import with_compressed_rows
from .sparse_rows import SPARSE, of_rows, own_layers, queries_at, with_attention


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
    """Its scores have an axis of groups of heads, which a mask per row has not."""

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any | None = None
    ) -> mx.array:
        if self.repeats > 1 and isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mask[:, :, None]
        usual: Any = super()
        attended: mx.array = usual.__call__(x, mask, cache)
        return attended


class _FromZero:
    """A cache whose rows seem to begin: positions are added elsewhere."""

    offset = 0

    def __init__(self, cache: Any):
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _Shifted(nn.Embedding):
    """Embeddings of positions, counted from those that rows have already."""

    def __call__(self, positions: mx.array) -> mx.array:
        usual: Any = super()
        embedded: mx.array = usual.__call__(vars(self)["rows"][:, None] + positions)
        return embedded


class _GPTBigCode(gpt_bigcode.GPTBigCodeModel):
    """It makes a range of the offset, on the host."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        if cache is None:
            usual: mx.array = super().__call__(inputs)
            return usual
        offset = cache[0].offset
        vars(self.wpe)["rows"] = offset if of_rows(cache[0]) else mx.array([offset])
        hidden: mx.array = super().__call__(inputs, [_FromZero(c) for c in cache])
        return hidden


def _gpt_bigcode(model: Any) -> nn.Module:
    twin = as_kind(model, type(model))
    twin["transformer"] = trunk = as_kind(model.transformer, _GPTBigCode)
    trunk["wpe"] = as_kind(trunk.wpe, _Shifted)
    vars(trunk.wpe)["rows"] = mx.zeros((1,), mx.int32)
    made: nn.Module = twin
    return made


class _Scaled(nn.Module):
    """A projection whose output is scaled, by the position of the token."""

    def __init__(self, projection: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.projection = projection
        vars(self)["scales"] = None

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.projection(x)
        scales = vars(self)["scales"]
        return output if scales is None else (output * scales).astype(output.dtype)


class _Llama4Attention(llama4.Attention):
    """It scales queries by a range of the offset, in layers without RoPE."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if of_rows(cache):
            tokens = queries_at(cache.offset + 1, x.shape[1]) / self.floor_scale
            scales = mx.log(mx.floor(tokens) + 1.0) * self.attn_scale + 1.0
            vars(self.q_proj)["scales"] = scales[..., None]
        usual: Any = super()
        attended: mx.array = usual.__call__(x, mask, cache)
        vars(self.q_proj)["scales"] = None
        return attended


class _Llama4Model(llama4.LlamaModel):
    """It makes one mask of chunks for all rows; caches make one for each."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        if cache is None or not of_rows(cache[0]):
            usual: Any = super()
            alone: mx.array = usual.__call__(inputs, cache)
            return alone
        h = self.embed_tokens(inputs)
        # Every fourth layer sees everything.
        masks = [create_attention_mask(h, cache[i]) for i in (0, 3)]
        for i, (layer, c) in enumerate(zip(self.layers, cache, strict=True)):
            h = layer(h, masks[i % 4 == 3], cache=c)
        normed: mx.array = self.norm(h)
        return normed


def _llama4(model: Any) -> nn.Module:
    twin = as_kind(model, type(model))
    twin["language_model"] = part = as_kind(
        model.language_model, type(model.language_model)
    )
    part["model"] = trunk = as_kind(part.model, _Llama4Model)
    for layer in own_layers(trunk):
        own = layer.self_attn
        if own.attn_temperature_tuning and not own.use_rope:
            layer["self_attn"] = own = as_kind(own, _Llama4Attention)
            own.attn_temperature_tuning = 0
            own["q_proj"] = _Scaled(own.q_proj)
    made: nn.Module = twin
    return made


_TWINS: dict[type, Callable[[Any], nn.Module]] = {
    afm7.Model: _afm7,
    deepseek_v41.Model: with_compressed_rows,
    gemma2.Model: partial(with_attention, kind=_Gemma2Attention),
    gpt_bigcode.Model: _gpt_bigcode,
    llama4.Model: _llama4,
    **SPARSE,
}


def with_row_positions(model: nn.Module) -> nn.Module:
    """The model, or a second one that shares its weights, right for rows of a batch.

    The model itself does not change.
    """
    twin = _TWINS.get(type(model))
    return model if twin is None else twin(model)
