"""mlx-lm's attention to compressed groups of tokens, for rows that differ in length.

DeepSeek V4.1 pools groups of tokens. mlx-lm's ``LayerCache`` keeps pooled groups and
the open group for all rows alike, and cannot take tokens back. Here the window is a
ring, and another cache keeps the input of pooling, with a column for each token; every
forward pools it again. So taking a token back lowers an offset, as in any other cache,
and each row has its own groups. mlx-lm's code computes all of it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v41
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from ..cuda.modules import as_kind


class _Layer:
    """Stands in for a ``LayerCache`` during one forward."""

    compress_kv: mx.array | None = None
    index_k: mx.array | None = None

    def __init__(self, cache: Any):
        members = getattr(cache, "caches", [cache])
        self._window, self._pooled = members[0], members[-1]

    def update_window(self, kv: mx.array) -> mx.array:
        """The ring's columns, including the new ones."""
        nothing = mx.zeros((*kv.shape[:2], 0), kv.dtype)
        return _written(self._window, kv, nothing)[0]

    def pool(self, kv: mx.array, gate: mx.array) -> tuple[mx.array, mx.array]:
        """The input of pooling for all tokens, by position."""
        return _written(self._pooled, kv, gate)


def _written(cache: Any, *new: mx.array) -> tuple[mx.array, mx.array]:
    """Write arrays of shape (B, S, D) and return the arrays of all columns."""
    first, second = cache.update_and_fetch(*(array[:, None] for array in new))
    return first[:, 0], second[:, 0]


class _Compressor(deepseek_v41.Compressor):
    """Pools all groups; groups that a row has not closed are hidden from it."""

    def __call__(
        self, x: mx.array, start_pos: Any, cache: Any
    ) -> tuple[mx.array | None, Any]:
        if not isinstance(cache, _Layer):
            usual: Any = super()
            alone: tuple[mx.array | None, Any] = usual.__call__(x, start_pos, cache)
            return alone
        h = x if self.ratio == 1 else x.astype(mx.float32)
        kv = self.kv_proj(h)
        gate = kv[..., :0] if self.ratio == 1 else self.gate_proj(h)
        kv, gate = cache.pool(kv, gate)
        rows, columns, _ = kv.shape
        groups = columns // self.ratio
        if not groups:
            return None, 0

        def grouped(array: mx.array) -> mx.array:
            array = array[:, : groups * self.ratio]
            return array.reshape(rows, groups, self.ratio, array.shape[-1])

        if self.ratio > 1:
            weights = mx.softmax(grouped(gate), axis=2)
            kv = mx.sum(grouped(kv) * weights, axis=2)
        return self.kv_norm(kv.astype(x.dtype)), 0


class _Indexer(deepseek_v41.Indexer):
    """Chooses groups for one row at a time."""

    def __call__(
        self,
        x: mx.array,
        q_residual: mx.array,
        *,
        index_k: mx.array | None,
        candidates: mx.array | None,
        rope: Any,
        start_pos: Any,
    ) -> tuple[mx.array, mx.array | None]:
        usual: Any = super().__call__
        if index_k is None or not isinstance(start_pos, mx.array):
            alone: tuple[mx.array, mx.array | None] = usual(
                x,
                q_residual,
                index_k=index_k,
                candidates=candidates,
                rope=rope,
                start_pos=start_pos,
            )
            return alone
        chosen, columns = [], []
        for i in range(x.shape[0]):
            row = slice(i, i + 1)
            one, candidate = usual(
                x[row],
                q_residual[row],
                index_k=index_k[row],
                candidates=None if candidates is None else candidates[row],
                rope=rope,
                start_pos=start_pos[i],
            )
            chosen.append(one)
            columns.append(candidate)
        whole = None if columns[0] is None else mx.concatenate(columns)
        return mx.concatenate(chosen), whole


class _TextModel(deepseek_v41.TextModel):
    """Has a window for each row, and caches of the usual kinds."""

    #: Its columns are positions, see :mod:`specdec.cache.columns`.
    counts_by_row = True

    def make_cache(self) -> list[Any]:
        def of(layer: Any) -> Any:
            window = RotatingKVCache(max_size=self.args.sliding_window)
            attention = layer.self_attn
            pools = attention.ratio and attention.is_kv_source
            return CacheList(window, KVCache()) if pools else window

        return [of(layer) for layer in self.layers]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        h = self.embed_tokens(inputs)
        rows, tokens, width = h.shape
        caches = [_Layer(c) for c in cache or self.make_cache()]
        window = caches[0]._window
        start_pos = window.offset
        if not isinstance(start_pos, mx.array):  # mlx-lm's own cache of one sequence
            start_pos = mx.full((rows,), start_pos, mx.int32)
        span: int = self.args.sliding_window
        at = start_pos[:, None] + mx.arange(tokens)
        positions = at[..., None] + mx.arange(1 - span, 1)
        columns = positions
        if hasattr(window, "layout"):
            columns = window.layout.slots(mx.maximum(positions, 0))
        window_idx = mx.where(positions < 0, -1, columns)
        streams = mx.broadcast_to(
            h[:, :, None], (rows, tokens, self.args.hc_mult, width)
        )
        pre_mix = mx.zeros((rows, tokens, self.args.hc_mult), dtype=mx.float32)
        pre_mix[..., 0] = 1.0
        shared: dict[str, mx.array | None] = {}
        for layer, c in zip(self.layers, caches, strict=True):
            streams, pre_mix = layer(
                streams,
                pre_mix,
                start_pos=start_pos,
                window_idx=window_idx,
                cache=c,
                shared=shared,
            )
        normed: mx.array = self.norm(deepseek_v41._collapse(streams, pre_mix))
        return normed


def with_compressed_rows(model: Any) -> nn.Module:
    """A twin of a DeepSeek V4.1 model that shares all weights."""
    twin = as_kind(model, type(model))
    twin["model"] = trunk = as_kind(model.model, _TextModel)
    trunk["layers"] = [as_kind(each, type(each)) for each in trunk.layers]
    for layer in trunk.layers:
        layer["self_attn"] = attention = as_kind(layer.self_attn, type(layer.self_attn))
        for name, kind in ("compressor", _Compressor), ("indexer", _Indexer):
            if name in attention:
                attention[name] = as_kind(attention[name], kind)
    module: nn.Module = twin
    return module
