"""mlx-lm's sparse attention over blocks of columns, for rows that differ in length.

It takes the last columns for its queries. In a batch a row's queries are where its own
tokens end, so that each has its own blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import minimax_m3_vl, phi3small

from ..cuda.flattened_matmul import as_kind


def own_layers(trunk: Any) -> list[Any]:
    """Give a twin's trunk layers of its own, which share their weights."""
    trunk["layers"] = layers = [as_kind(each, type(each)) for each in trunk.layers]
    return layers


def with_attention(model: Any, kind: type) -> nn.Module:
    """A twin that shares all weights, whose layers' attention is of this class."""
    twin = as_kind(model, type(model))
    twin["model"] = trunk = as_kind(model.model, type(model.model))
    for layer in own_layers(trunk):
        layer["self_attn"] = as_kind(layer.self_attn, kind)
    made: nn.Module = twin
    return made


def of_rows(cache: Any) -> bool:
    """Whether it has a position for each row, which mlx-lm's caches have not."""
    return isinstance(getattr(cache, "offset", None), mx.array)


def queries_at(offset: mx.array, count: int) -> mx.array:
    """Positions of the queries of each row, shape (B, count)."""
    return offset[:, None] + mx.arange(count)


class _MiniMaxM3Attention(minimax_m3_vl.Attention):
    """Its indexer puts the queries of all rows at the last columns."""

    #: Columns are positions here, see :mod:`specdec.cache.columns`.
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
        if not isinstance(mask, mx.array):  # none, or in words
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
    twin = as_kind(model, type(model))
    twin["language_model"] = part = as_kind(
        model.language_model, type(model.language_model)
    )
    part["model"] = trunk = as_kind(part.model, type(part.model))
    for layer in own_layers(trunk):
        if layer.self_attn.is_sparse_attn:
            layer["self_attn"] = as_kind(layer.self_attn, _MiniMaxM3Attention)
    made: nn.Module = twin
    return made


class _Phi3SmallAttention(phi3small.Attention):
    """Its sparse attention puts all queries at the last columns.

    It adds the mask of mlx-lm's caches to scores, which is boolean: of a prompt, that
    hides nothing. Here masks hide, as where mlx-lm is given a prompt token by token.
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
        seen = (distance < self.blocksparse_num_local_blocks) | (
            (key + head) % stride == 0
        )
        return None, (distance >= 0) & seen


#: By a model's class, what makes a second one that shares its weights.
SPARSE: dict[type, Callable[[Any], nn.Module]] = {
    minimax_m3_vl.Model: _minimax_m3,
    phi3small.Model: partial(with_attention, kind=_Phi3SmallAttention),
}
