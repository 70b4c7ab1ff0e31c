"""A model whose next token shows exactly which keys it saw.

What a layer stores for a token is a whole number that follows from the token, its
position, the layer, and the sum of all that the token saw in the layers below; the
next token is that sum, modulo the vocabulary. One column too many, too few or
misplaced, in a prompt or after it, and the output is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache

VOCABULARY = 97
WINDOW, KEEP, CHUNK = 8, 2, 6
LAYERS = ("full", "window", "sinks", "chunk")


class TellTale(nn.Module):
    """Layers of the given kinds; ``max_kv_size`` makes rings of the full ones."""

    def __init__(self, layers: Sequence[str] = LAYERS):
        super().__init__()  # type: ignore[no-untyped-call]
        self.args = tuple(layers)
        self.weight = mx.ones((1,))

    @property
    def layers(self) -> list[str]:
        return list(self.args)

    def make_cache(self) -> list[Any]:
        makers: dict[str, Any] = {
            "full": KVCache,
            "window": lambda: RotatingKVCache(WINDOW),
            "sinks": lambda: RotatingKVCache(WINDOW, keep=KEEP),
            "chunk": lambda: ChunkedKVCache(CHUNK),
        }
        return [makers[kind]() for kind in self.args]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        rows, width = inputs.shape
        if cache is None:
            return mx.zeros((rows, width, VOCABULARY))
        total: Any = mx.zeros((rows, width), mx.int32)
        for layer, c in enumerate(cache):
            positions = c.offset[:, None] + mx.arange(width)
            stored = stored_number(inputs, positions, layer, total)
            mask = c.make_mask(width, return_array=True)
            columns = mx.repeat(stored.astype(mx.float32)[:, None, :, None], 32, -1)
            keys, values = c.update_and_fetch(columns, columns)
            if isinstance(keys, tuple):  # equal numbers are quantized exactly
                how = {"group_size": c.group_size, "bits": c.bits}
                keys, values = (
                    mx.dequantize(*keys, **how),
                    mx.dequantize(*values, **how),
                )
            visible = mask if mask.dtype == mx.bool_ else mask == 0
            for seen in (keys, values):
                seen = mx.round(seen[:, :, None, :, 0])  # (rows, 1, 1, columns)
                total += mx.where(visible, seen, 0).sum(axis=(1, 3)).astype(mx.int32)
        chosen: mx.array = total % VOCABULARY
        one_hot: mx.array = mx.arange(VOCABULARY) == chosen[..., None]
        return one_hot.astype(mx.float32)


def stored_number(token: Any, position: Any, layer: int, seen: Any) -> Any:
    return (token * 31 + position * 17 + layer * 13 + seen) % 101


def visible_positions(kind: str, query: int, max_kv_size: int | None) -> list[int]:
    """What the query at a position sees, from the definitions of the layers."""
    if kind == "full" and max_kv_size is not None:
        newest = range(max(4, query - max_kv_size + 4 + 1), query + 1)
        return [*range(min(4, query + 1)), *newest]
    first, keep = {
        "full": (0, 0),
        "window": (query - WINDOW + 1, 0),
        "sinks": (query - (WINDOW - KEEP) + 1, KEEP),
        "chunk": (query // CHUNK * CHUNK, 0),
    }[kind]
    return [p for p in range(query + 1) if p >= first or p < keep]


def decoded(
    layers: Sequence[str],
    prompt: Sequence[int],
    max_tokens: int,
    max_kv_size: int | None = None,
) -> list[int]:
    """The model's greedy output, from the definitions alone."""
    tokens = list(prompt)
    stored: list[list[int]] = [[] for _ in layers]
    while True:
        for query in range(len(stored[0]), len(tokens)):
            total = 0
            for layer, kind in enumerate(layers):
                stored[layer].append(stored_number(tokens[query], query, layer, total))
                seen = visible_positions(kind, query, max_kv_size)
                total += 2 * sum(stored[layer][p] for p in seen)
        if len(tokens) == len(prompt) + max_tokens:
            return tokens[len(prompt) :]
        tokens.append(total % VOCABULARY)
