"""Own positions and masks for each row, in mlx-lm's models that have one for all rows.

Layers that use the keys of another layer do not see its cache. Some compute the
positions of their queries from the number of keys. If the rows of a batch differ in
length, that is right only for the longest row. Other layers read the offset as a
number, or add a mask to scores of another shape. Sparse attention assumes that its
queries are at the last columns. In a batch, they are where each row's own tokens end,
and each row has its own blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from ..cuda.modules import as_kind
from .layers import architecture_of, mixed


def own_layers(trunk: Any) -> list[Any]:
    """Give a twin's trunk layers of its own, which share their weights."""
    trunk["layers"] = layers = [as_kind(each, type(each)) for each in trunk.layers]
    return layers


def with_attention(model: Any, kind: type) -> nn.Module:
    """A twin that shares all weights; its layers' attention is of this class."""
    twin: nn.Module = as_kind(model, type(model))
    twin["model"] = trunk = as_kind(model.model, type(model.model))
    for layer in own_layers(trunk):
        layer["self_attn"] = mixed(layer.self_attn, kind)
    return twin


def of_rows(cache: Any) -> bool:
    """Whether a cache has a position for each row; mlx-lm's caches do not."""
    return isinstance(getattr(cache, "offset", None), mx.array)


def queries_at(offset: mx.array, count: int) -> mx.array:
    """Positions of the queries of each row, shape (B, count)."""
    return offset[:, None] + mx.arange(count)


class _AFM7(nn.Module):
    """Its layers without keys rotate their queries by each row's positions."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        if cache is None:
            usual: Any = super()
            alone: mx.array = usual.__call__(inputs)
            return alone
        h = self.embedding(inputs)
        mask = create_attention_mask(h, cache[0])
        # The offset before the layers write.
        offset = cache[0].offset
        for layer, c in zip(self.layers, cache, strict=True):
            h = layer(h, mask, cache=c)
        shared = cache[-1]
        keys, values = shared.keys_and_values()
        for reusing in self.kv_reuse_layers:
            attention, x = reusing.self_attn, reusing.input_layernorm(h)
            rows, tokens, _ = x.shape
            q = attention.q_proj(x).reshape(rows, tokens, attention.n_heads, -1)
            q = attention.q_norm(attention.rope(q.transpose(0, 2, 1, 3), offset=offset))
            attended = scaled_dot_product_attention(
                q, keys, values, cache=shared, scale=attention.scale, mask=mask
            )
            attended = attended.transpose(0, 2, 1, 3).reshape(rows, tokens, -1)
            h = h + attention.out_proj(attended)
            h = h + reusing.mlp(reusing.post_attention_layernorm(h))
        normed: mx.array = self.output_norm(h)
        return normed


def _afm7(model: Any) -> nn.Module:
    twin: nn.Module = as_kind(model, type(model))
    twin["model"] = mixed(model.model, _AFM7)
    return twin


class _Gemma2Attention(nn.Module):
    """Adds to a mask per row the axis of head groups that the scores have."""

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any | None = None
    ) -> mx.array:
        if self.repeats > 1 and isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mask[:, :, None]
        usual: Any = super()
        attended: mx.array = usual.__call__(x, mask, cache)
        return attended


class _FromZero:
    """A cache that shows the offset 0, because positions are added elsewhere."""

    offset = 0

    def __init__(self, cache: Any):
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _PositionTable(nn.Module):
    """Embeddings of positions, none of them beyond the table.

    Only padding, and tokens that no row keeps, have positions beyond it. MLX reads
    whatever lies there, and what is no number spreads through masked products.
    """

    def __call__(self, positions: mx.array) -> mx.array:
        first = vars(self).get("rows")
        if first is not None:
            positions = first[:, None] + positions
        usual: Any = super()
        last = self.weight.shape[0] - 1
        embedded: mx.array = usual.__call__(mx.minimum(positions, last))
        return embedded


class _GPTBigCode(nn.Module):
    """Hides the offset from mlx-lm's code, which makes a range of it on the host."""

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        usual: Any = super()
        if cache is None:
            alone: mx.array = usual.__call__(inputs)
            return alone
        offset = cache[0].offset
        vars(self.wpe)["rows"] = offset if of_rows(cache[0]) else mx.array([offset])
        hidden: mx.array = usual.__call__(inputs, [_FromZero(c) for c in cache])
        return hidden


def _gpt_bigcode(model: Any) -> nn.Module:
    twin: nn.Module = as_kind(model, type(model))
    twin["transformer"] = trunk = mixed(model.transformer, _GPTBigCode)
    trunk["wpe"] = mixed(trunk.wpe, _PositionTable)
    vars(trunk.wpe)["rows"] = mx.zeros((1,), mx.int32)
    return twin


def _gpt2(model: Any) -> nn.Module:
    twin: nn.Module = as_kind(model, type(model))
    twin["model"] = trunk = as_kind(model.model, type(model.model))
    trunk["wpe"] = mixed(trunk.wpe, _PositionTable)
    return twin


class _Scaled(nn.Module):
    """A projection whose output is scaled by the position of the token."""

    def __init__(self, projection: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.projection = projection
        vars(self)["scales"] = None

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.projection(x)
        scales = vars(self)["scales"]
        return output if scales is None else (output * scales).astype(output.dtype)


class _Llama4Attention(nn.Module):
    """Scales queries by each row's positions, in layers without RoPE."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if of_rows(cache):
            tokens = queries_at(cache.offset + 1, x.shape[1]) / self.floor_scale
            scales = mx.log(mx.floor(tokens) + 1.0) * self.attn_scale + 1.0
            vars(self.q_proj)["scales"] = scales[..., None]
        usual: Any = super()
        attended: mx.array = usual.__call__(x, mask, cache)
        vars(self.q_proj)["scales"] = None
        return attended


class _Llama4Model(nn.Module):
    """Takes masks of chunks from the caches; mlx-lm makes one mask for all rows."""

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
    twin: nn.Module = as_kind(model, type(model))
    twin["language_model"] = part = as_kind(
        model.language_model, type(model.language_model)
    )
    part["model"] = trunk = mixed(part.model, _Llama4Model)
    for layer in own_layers(trunk):
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            layer["self_attn"] = attention = mixed(attention, _Llama4Attention)
            attention.attn_temperature_tuning = 0
            attention["q_proj"] = _Scaled(attention.q_proj)
    return twin


class _MiniMaxM3Attention(nn.Module):
    """Its indexer uses each row's positions; mlx-lm's uses the last columns."""

    #: Its columns are positions, see :mod:`specdec.cache.columns`.
    counts_by_row = True

    def _block_mask(
        self, x: mx.array, mask: mx.array | None, offset: Any, cache: Any
    ) -> mx.array | None:
        if not of_rows(cache):
            usual: Any = super()
            alone: mx.array | None = usual._block_mask(x, mask, offset, cache)
            return alone
        rows, tokens, _ = x.shape
        heads: Any = self.index_n_heads
        size: Any = self.index_block_size
        most: Any = self.index_topk_blocks

        def projected(project: Any, norm: Any, count: int) -> mx.array:
            each = norm(project(x).reshape(rows, tokens, count, -1))
            turned: mx.array = self.index_rope(each.transpose(0, 2, 1, 3), offset)
            return turned

        keys = projected(self.index_k_proj, self.index_k_norm, 1)
        nothing = mx.zeros((rows, 1, tokens, 0), keys.dtype)
        keys, _ = cache.update_and_fetch(keys, nothing)
        columns = keys.shape[2]
        blocks = -(-columns // size)
        if blocks <= most:
            return mask
        at = queries_at(offset, tokens)[:, None, :, None]
        if not isinstance(mask, mx.array):  # None or "causal"
            mask = mx.arange(columns) <= at
        queries = projected(self.index_q_proj, self.index_q_norm, heads)
        scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        scores = mx.where(mask, scores, -mx.inf)
        rest = [(0, 0), (0, 0), (0, 0), (0, blocks * size - columns)]
        scores = mx.pad(scores, rest, constant_values=-mx.inf)
        best = scores.reshape(rows, heads, tokens, blocks, size).max(axis=-1)
        distance = at // size - mx.arange(blocks)
        local = (distance >= 0) & (distance < self.index_local_blocks)
        best = mx.where(local, mx.inf, best)
        least = mx.topk(best, most, axis=-1).min(-1, keepdims=True)
        chosen = mx.repeat(best >= least, size, axis=-1)[..., :columns] & mask
        return mx.repeat(chosen, self.num_attention_heads // heads, axis=1)


def _minimax_m3(model: Any) -> nn.Module:
    twin: nn.Module = as_kind(model, type(model))
    twin["language_model"] = part = as_kind(
        model.language_model, type(model.language_model)
    )
    part["model"] = trunk = as_kind(part.model, type(part.model))
    for layer in own_layers(trunk):
        if layer.self_attn.is_sparse_attn:
            layer["self_attn"] = mixed(layer.self_attn, _MiniMaxM3Attention)
    return twin


class _Phi3SmallAttention(nn.Module):
    """Its sparse attention uses each row's positions; mlx-lm's uses the last columns.

    mlx-lm adds the boolean mask of its caches to the scores, which hides nothing in a
    prompt. Here masks hide tokens, as if mlx-lm were given a prompt token by token.
    """

    counts_by_row = True

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        usual: Any = super()
        if not self.block_sparse or not of_rows(cache):
            alone: mx.array = usual.__call__(x, mask, cache)
            return alone
        if isinstance(mask, mx.array):
            if mask.dtype == mx.bool_:
                hidden = mx.array(mx.finfo(x.dtype).min, x.dtype)
                mask = mx.where(mask, mx.array(0, x.dtype), hidden)
            mask = mask[:, :, None]  # scores have an axis of groups of heads
        vars(self)["at"] = queries_at(cache.offset, x.shape[1])
        attended: mx.array = usual.__call__(x, mask, cache)
        vars(self)["at"] = None
        return attended

    def _block_sparse_mask(self, q_len: int, kv_len: int) -> tuple[Any, mx.array]:
        at = vars(self).get("at")
        if at is None:
            usual: Any = super()
            alone: tuple[Any, mx.array] = usual._block_sparse_mask(q_len, kv_len)
            return alone
        size, stride = self.blocksparse_block_size, self.blocksparse_vert_stride
        key = mx.arange(kv_len) // size
        distance = (at // size)[:, None, None, :, None] - key
        head = mx.arange(1, self.n_heads + 1).reshape(self.n_kv_heads, -1, 1, 1)
        visible = (distance < self.blocksparse_num_local_blocks) | (
            (key + head) % stride == 0
        )
        return None, (distance >= 0) & visible


def _deepseek_v41(model: Any) -> nn.Module:
    from .compressed_rows import with_compressed_rows  # subclasses of mlx-lm's module

    return with_compressed_rows(model)


# By mlx-lm's names of architectures, so that only the one in use is imported.
_TWINS: dict[str, Callable[[Any], nn.Module]] = {
    "afm7": _afm7,
    "deepseek_v41": _deepseek_v41,
    "gemma2": partial(with_attention, kind=_Gemma2Attention),
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "llama4": _llama4,
    "minimax_m3_vl": _minimax_m3,
    "phi3small": partial(with_attention, kind=_Phi3SmallAttention),
}


def with_row_positions(model: nn.Module) -> nn.Module:
    """The model, or a twin that is right for rows of a batch.

    The twin shares the model's weights. The model itself does not change.
    """
    twin = _TWINS.get(architecture_of(model))
    return model if twin is None else twin(model)
