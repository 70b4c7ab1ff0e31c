"""Attention of few queries by a CUDA kernel of our own, launched as one node.

A decode step has one query per row, or k + 1, and a mask, since rows differ in length.
MLX's CUDA backend leaves such attention to cuDNN. The host takes 15 to 20 microseconds
per layer to launch cuDNN's graph, and cuDNN reads keys again for every head that shares
them. Heads of 256 do not go to cuDNN: their attention is six operations. Our kernel is
one node.

Each query's result is summed in an order that depends on the positions of its keys
alone. So it has the same bits whatever else is computed (other rows, other tokens of a
verification) and however many columns are read after its last key.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import e, log2
from typing import Any

import mlx.core as mx
import numpy as np

from . import decode_attention_source as text
from .kernels import TYPES, cuda_kernel, tensor_cores
from .proofs import Proofs, close

# Limits of the kernel: up to MOST_TOKENS queries of a row (more are a prompt's), and
# these sizes of heads. With 256 and 32 rows of 5 queries, 8192 keys take 1.3 times as
# long as MLX's operations (benchmarks/results/attention-h200.md); but MLX would compile
# a kernel for those when rows become so long, which stops all rows for seconds.
MOST_TOKENS = 16
SIZES = (64, 128, 256)
# WARPS: warps of a block. TILE: queries of a tile, and keys that a warp takes at a
# time, as tensor cores' products take them. SPAN: the most keys of a block. Blocks
# share the keys of a longer row, and a second kernel combines their results.
WARPS, TILE, SPAN = 8, 16, 1024


@cache
def _kernel(dtype: mx.Dtype, mask: str, scale: float) -> Any:
    # The kernel computes powers of two, so scores are scaled by log2(e).
    source = text.SOURCE.replace("@SCALE@", f"{scale * log2(e)!r}")
    source = source.replace("@MASK@", text.MASKS[mask])
    return cuda_kernel(
        f"attention_{TYPES[dtype]}_{mask}",
        source,
        ("q", "k", "v", "mask"),
        ("out",),
        header=tensor_cores(dtype),
        copies_views=False,
    )


def _gathering(dtype: mx.Dtype) -> Any:
    name = f"attention_gather_{TYPES[dtype]}"
    return cuda_kernel(name, text.GATHER, ("found",), ("out",))


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Scaled dot-product attention of few queries.

    Args:
        queries: shape (B, H, S, D).
        keys, values: shape (B, KV, L, D), KV a divisor of H.
        scale: factor of the products of queries and keys.
        mask: shape (B or 1, 1, S, L), boolean, or of the queries' type and added; or
            ``"causal"``: the last query sees all keys, the one before it one fewer; or
            ``None`` for one query, which sees all.

    Returns:
        Shape (B, H, S, D), the heads of a token one after the other in memory.
        :func:`takes` says what it can compute.
    """
    rows, heads, tokens, size = queries.shape
    if not isinstance(mask, mx.array):
        mask = _causal(tokens, keys.shape[2])
    kind = "bool" if mask.dtype == mx.bool_ else "added"
    pieces = -(-keys.shape[2] // SPAN)
    count = rows * tokens * heads
    shape = rows, tokens, heads, size
    threads = 32 * WARPS
    tiles = -(-heads // keys.shape[1] * tokens // TILE)
    template = [("T", queries.dtype), ("D", size)]
    (out,) = _kernel(queries.dtype, kind, float(scale))(
        inputs=[queries, keys, values, mask],
        template=[*template, ("WARPS", WARPS), ("SPAN", SPAN)],
        grid=(tiles * threads, keys.shape[1], rows * pieces),
        threadgroup=(threads, 1, 1),
        # A number of 32 bits takes the place of two.
        output_shapes=[(pieces, count, size + 2, 2) if pieces > 1 else shape],
        output_dtypes=[queries.dtype],
    )
    if pieces > 1:
        (out,) = _gathering(queries.dtype)(
            inputs=[out],
            template=template,
            grid=(-(-count * size // threads) * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[shape],
            output_dtypes=[queries.dtype],
        )
    result: mx.array = out.transpose(0, 2, 1, 3)
    return result


@lru_cache(maxsize=32)
def _causal(tokens: int, columns: int) -> mx.array:
    """The mask that ``"causal"`` stands for, which needs no kernel of its own.

    It is rare where shapes repeat. NumPy computes it, because operations in a traced
    function would become a kernel too.
    """
    visible = np.tri(tokens, columns, columns - tokens, dtype=np.bool_)
    return mx.array(visible[None, None])


def takes(queries: mx.array, keys: Any, values: Any, mask: Any) -> bool:
    """Whether this attention is left to :func:`attention`.

    It takes only head sizes that :func:`proven` was asked about. For one query without
    a mask MLX has a fast kernel, but not with the widest heads.
    """
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return False
    _, heads, tokens, size = queries.shape
    return (
        0 < tokens <= MOST_TOKENS
        and proven.reached((size, queries.dtype))
        and keys.shape[2] > 0
        and keys.shape == values.shape
        and keys.shape[0] == queries.shape[0]
        and keys.shape[-1] == size
        and heads % keys.shape[1] == 0
        and queries.dtype in TYPES
        and queries.dtype == keys.dtype == values.dtype
        and (
            _shown(mask, queries, keys)
            or (isinstance(mask, str) and mask == "causal" and tokens > 1)
            or (mask is None and tokens == 1 and size == SIZES[-1])
        )
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


Form = tuple[int, mx.Dtype]  # size of a head, and type


def _agrees(form: Form) -> bool:
    """Whether the kernel computes what MLX does, with few keys and with many."""
    return all(_agrees_on(columns, *form) for columns in (150, SPAN + 100))


proven = Proofs[Form](
    "attention", _agrees, lambda form: form[0] in SIZES and form[1] in TYPES
)


def _agrees_on(columns: int, size: int, dtype: mx.Dtype) -> bool:
    shapes = [(2, 6, 3, size), (2, 2, columns, size), (2, 2, columns, size)]
    q, k, v = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate(shapes)
    )
    lengths = mx.array([columns - 30, columns])[:, None, None, None]
    visible = mx.arange(columns) < lengths - 2 + mx.arange(3)[:, None]
    added = mx.where(visible, 0.0, -mx.inf).astype(dtype)
    scale = size**-0.5  # as most models have it: the same kernels serve them
    with mx.stream(mx.cpu):  # where MLX's operations are compiled already
        exact = mx.fast.scaled_dot_product_attention(
            *(x.astype(mx.float32) for x in (q, k, v)), scale=scale, mask=visible
        )
    masks = added, visible
    return all(close(attention(q, k, v, scale, m), exact, 0.02) for m in masks)
