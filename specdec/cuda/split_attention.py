"""Attention to keys and values in two parts, in MLX's own operations, on any backend.

Caches with a tail hand out two parts, see :mod:`specdec.cache.tail`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import CacheError

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """Keys and values in two parts, which a cache hands to attention.

    Args:
        base, tail: keys and values, (B, KV, L, D) and (B, KV, T, D) each.
    """

    base: Arrays
    tail: Arrays

    def attention(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of few queries, which copies neither keys nor values.

        Args:
            queries: shape (B, H, N, D).
            mask: boolean or additive, shape (B, 1, N, L + T).

        Returns:
            Shape (B, H, N, D').

        Raises:
            CacheError: there are sinks, or the mask is not the cache's.
        """
        (keys, values), (new_keys, new_values) = self.base, self.tail
        rows, heads, tokens, size = queries.shape
        pairs, columns = keys.shape[1], keys.shape[2] + new_keys.shape[2]
        shape = rows, 1, tokens, columns
        if sinks is not None or getattr(mask, "shape", None) != shape:
            raise CacheError(f"attention to two parts takes masks of shape {shape}")
        q = (queries * scale).reshape(rows, pairs, -1, size)
        both = [q @ each.swapaxes(-1, -2) for each in (keys, new_keys)]
        scores = mx.concatenate(both, axis=-1)
        scores = scores.reshape(rows, pairs, -1, tokens, columns).astype(mx.float32)
        shown = mask[:, :, None]
        if mask.dtype == mx.bool_:
            scores = mx.where(shown, scores, -mx.inf)
        else:
            scores = scores + shown
        shares = mx.softmax(scores, axis=-1).astype(values.dtype)
        shares = shares.reshape(rows, pairs, -1, columns)
        in_base, in_tail = mx.split(shares, [keys.shape[2]], axis=-1)
        out = in_base @ values + in_tail @ new_values
        return out.reshape(rows, heads, tokens, -1).astype(queries.dtype)
