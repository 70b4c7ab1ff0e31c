"""Attention of few queries by a CUDA kernel of our own, launched as one node.

A decode step has one query a row, or k + 1, and a mask, since rows differ in length.
MLX's CUDA backend leaves that to cuDNN, whose graph takes the host 15 to 20
microseconds to launch, once per layer, and which reads keys again for every head that
shares them; with heads of 256 it does not take it at all, and attention is six
operations. A kernel is one node.

Each query's result is summed in an order that depends on the positions of its keys
alone. So it has the same bits whatever is computed beside it (other rows, other tokens
of a verification) and however many columns are read after its last one.
"""

from __future__ import annotations

from functools import cache, partial
from math import e, log2
from typing import Any

import mlx.core as mx

from . import decode_attention_source as text
from .kernels import TYPES, cuda_kernel, tensor_cores
from .proofs import holds

# What the kernel is given: up to MOST_TOKENS queries of a row (more are a prompt's),
# and heads of these sizes, with up to so many keys (``None``: any number). Of the
# widest, more take longer than MLX's operations where many queries are asked
# (benchmarks/results/attention-h200.md).
MOST_TOKENS = 16
MOST_COLUMNS: dict[int, int | None] = {64: None, 128: None, 256: 2048}
# Warps of a block; queries of a tile, and keys that a warp takes at a time: what a
# tensor core's products take. Keys that a block goes through at most: blocks share
# those of a longer row, and what they found is brought together by a second kernel.
WARPS, TILE, SPAN = 8, 16, 1024


@cache
def _kernel(dtype: mx.Dtype, mask: str, scale: float, pieces: bool) -> Any:
    # Powers of two are computed, of which a score's logarithm is one.
    source = text.SOURCE.replace("@SCALE@", f"{scale * log2(e)!r}")
    source = source.replace("@MASK@", text.MASKS[mask])
    source = source.replace("@WRITE@", text.PIECE if pieces else text.WHOLE)
    return cuda_kernel(
        f"attention_{TYPES[dtype]}_{mask}",
        source,
        ("q", "k", "v", *(() if mask == "causal" else ("mask",))),
        ("out", "seen") if pieces else ("out",),
        header=tensor_cores(dtype),
        copies_views=False,
    )


def _gathering(dtype: mx.Dtype) -> Any:
    inputs = ("found", "seen")
    return cuda_kernel(
        f"attention_gather_{TYPES[dtype]}", text.GATHER, inputs, ("out",)
    )


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str,
) -> mx.array:
    """Scaled dot-product attention of few queries.

    Args:
        queries: shape (B, H, S, D).
        keys, values: shape (B, KV, L, D), KV a divisor of H.
        scale: of the products of queries and keys.
        mask: shape (B or 1, 1, S, L), boolean, or of the queries' type and added; or
            ``"causal"``: the last query sees all keys, the one before it one fewer.

    Returns:
        Shape (B, H, S, D), the heads of a token one after the other in memory. What
        it can compute :func:`takes` says.
    """
    rows, heads, tokens, size = queries.shape
    kind = "causal"
    inputs = [queries, keys, values]
    if not isinstance(mask, str):
        kind = "bool" if mask.dtype == mx.bool_ else "added"
        inputs.append(mask)
    pieces = -(-keys.shape[2] // SPAN)
    count = rows * tokens * heads
    shapes: list[tuple[int, ...]] = [(rows, tokens, heads, size)]
    if pieces > 1:
        shapes = [(pieces, count, size), (pieces, count, 2)]
    dtype = mx.float32 if pieces > 1 else queries.dtype
    threads = 32 * WARPS
    tiles = -(-heads // keys.shape[1] * tokens // TILE)
    template = [("T", queries.dtype), ("D", size)]
    found = _kernel(queries.dtype, kind, float(scale), pieces > 1)(
        inputs=inputs,
        template=[*template, ("WARPS", WARPS), ("SPAN", SPAN)],
        grid=(tiles * threads, keys.shape[1], rows * pieces),
        threadgroup=(threads, 1, 1),
        output_shapes=shapes,
        output_dtypes=[dtype] * len(shapes),
    )
    if pieces > 1:
        found = _gathering(queries.dtype)(
            inputs=found,
            template=template,
            grid=(-(-count * size // threads) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, tokens, heads, size)],
            output_dtypes=[queries.dtype],
        )
    out: mx.array = found[0]
    return out.transpose(0, 2, 1, 3)


def takes(queries: mx.array, keys: Any, values: Any, mask: Any) -> bool:
    """Whether this attention is left to :func:`attention`.

    Only of head sizes that :func:`proven` was asked about. The queries of one row with
    nothing to hide have a fast kernel of MLX's.
    """
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return False
    _, heads, tokens, size = queries.shape
    return (
        0 < tokens <= MOST_TOKENS
        and _proven.get((size, queries.dtype), False)
        and 0 < keys.shape[2] <= (MOST_COLUMNS[size] or keys.shape[2])
        and keys.shape == values.shape
        and keys.shape[0] == queries.shape[0]
        and keys.shape[-1] == size
        and heads % keys.shape[1] == 0
        and queries.dtype in TYPES
        and queries.dtype == keys.dtype == values.dtype
        and (_shown(mask, queries, keys) or (mask == "causal" and tokens > 1))
    )


def _shown(mask: Any, queries: mx.array, keys: mx.array) -> bool:
    """Whether the mask is an array that the kernel reads."""
    return (
        isinstance(mask, mx.array)
        and mask.dtype in (mx.bool_, queries.dtype)
        and mask.ndim == 4
        and mask.shape[0] in (1, queries.shape[0])
        and mask.shape[1:] == (1, queries.shape[2], keys.shape[2])
    )


# Head sizes and types for which the kernel was tried, and whether it is right there.
# Functions that are traced ask for it, and nothing can be tried in them.
_proven: dict[tuple[int, mx.Dtype], bool] = {}


def proven(size: int, dtype: mx.Dtype) -> bool:
    """Whether the kernel runs on this device for heads of a size and type, rightly.

    It is tried when that is first asked, not within a function that is traced.
    """
    if (size, dtype) not in _proven:
        known = size in MOST_COLUMNS and dtype in TYPES
        name = f"attention of {size} {TYPES.get(dtype)}"
        _proven[size, dtype] = known and holds(name, partial(_agrees, size, dtype))
    return _proven[size, dtype]


def _agrees(size: int, dtype: mx.Dtype) -> bool:
    """Whether the kernel computes what MLX does, with few keys and with many."""
    few, many = 150, MOST_COLUMNS[size] or SPAN + 100
    return all(_agrees_on(size, columns, dtype) for columns in (few, many))


def _agrees_on(size: int, columns: int, dtype: mx.Dtype) -> bool:
    shapes = [(2, 6, 3, size), (2, 2, columns, size), (2, 2, columns, size)]
    q, k, v = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate(shapes)
    )
    lengths = mx.array([columns - 30, columns])[:, None, None, None]
    seen = mx.arange(columns) < lengths - 2 + mx.arange(3)[:, None]
    added = mx.where(seen, 0.0, -mx.inf).astype(dtype)
    for mask in (added, seen, "causal"):
        with mx.stream(mx.cpu):  # where MLX has its operations compiled
            exact = mx.fast.scaled_dot_product_attention(
                *(x.astype(mx.float32) for x in (q, k, v)),
                scale=0.1,
                mask=mask if isinstance(mask, str) else seen,
            )
        found = attention(q, k, v, 0.1, mask).astype(mx.float32)
        # Not the other way round: NaN is no agreement.
        off = mx.abs(found - exact).max()
        if not (off <= 0.02 * mx.abs(exact).max()).item():
            return False
    return True
