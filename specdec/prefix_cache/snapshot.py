"""Cuts pieces out of a row's caches, and makes rows from them again.

A linear cache keeps every column, so a block of them serves any prefix that ends
within it. A ring holds the last window and some tokens before it, so a piece of it
serves one end and a few before. The states of a recurrent layer serve only the end at
which they were cut; they are stored with the rings. See docs/prefix.md.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache import BatchCache, BatchCacheList, BatchRecurrentCache, members
from ..cache.ring import Ring
from ..cache.storage import Arrays
from .entries import Kind, Plan
from .files import DamagedError, tensors

# The names in safetensors of the types that caches store.
_TYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int64: "I64",
}
_OTHER = "its arrays are not those of the model's caches"


@dataclass(frozen=True, eq=False)
class Piece:
    """A block or a ring in memory (see :mod:`specdec.prefix_cache.entries`).

    In a block, ``arrays`` holds the columns of each linear cache; in a ring, the
    columns of each ring, then the states of each recurrent cache. They are in the order
    of the model's layers.
    """

    kind: Kind
    start: int
    end: int
    slack: int
    arrays: tuple[Arrays, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(a.nbytes for arrays in self.arrays for a in arrays)


def linear_caches(caches: Sequence[Any]) -> list[BatchCache]:
    """The caches that keep every column."""
    recurrent = BatchRecurrentCache
    return [
        c for c in members(caches) if c.ring is None and not isinstance(c, recurrent)
    ]


def ring_caches(caches: Sequence[Any]) -> list[tuple[Ring, BatchCache]]:
    """The caches that keep a window."""
    return [(c.ring, c) for c in members(caches) if c.ring is not None]


def recurrent_caches(caches: Sequence[Any]) -> list[BatchRecurrentCache]:
    """The caches that keep states."""
    return [c for c in members(caches) if isinstance(c, BatchRecurrentCache)]


@dataclass(frozen=True)
class _Array:
    heads: int
    features: int
    dtype: mx.Dtype


@dataclass(frozen=True)
class Form:
    """What pieces of a model's caches must hold; files are checked against it.

    Args:
        linear: the arrays of each linear cache.
        rings: how many first and newest tokens each ring sees, and its arrays.
        states: shapes, without the rows, and types of each recurrent cache's arrays.
    """

    linear: tuple[tuple[_Array, ...], ...]
    rings: tuple[tuple[int, int, tuple[_Array, ...]], ...]
    states: tuple[tuple[tuple[tuple[int, ...], mx.Dtype], ...], ...] = ()

    @property
    def has_ends(self) -> bool:
        """Whether there are caches that serve only a few ends."""
        return bool(self.rings or self.states)

    @classmethod
    def of(cls, caches: Sequence[Any]) -> Form:
        """The form of caches that hold tokens; their arrays are not computed."""
        return cls(
            tuple(map(_arrays_of, linear_caches(caches))),
            tuple(
                (ring.keep, ring.window, _arrays_of(cache))
                for ring, cache in ring_caches(caches)
            ),
            tuple(
                tuple((a.shape[1:], a.dtype) for a in cache.arrays)
                for cache in recurrent_caches(caches)
            ),
        )

    def shapes(
        self, kind: Kind, start: int, end: int, slack: int
    ) -> list[list[tuple[mx.Dtype, tuple[int, ...]]]]:
        """Types and shapes of a piece, cache by cache."""
        if kind == "block":
            each = [(arrays, end - start) for arrays in self.linear]
        else:
            each = [
                (arrays, len(ring_positions(keep, window, end, slack)))
                for keep, window, arrays in self.rings
            ]
        shapes: list[list[tuple[mx.Dtype, tuple[int, ...]]]] = [
            [(a.dtype, (1, a.heads, columns, a.features)) for a in arrays]
            for arrays, columns in each
        ]
        if kind == "ring":
            shapes += [[(d, (1, *shape)) for shape, d in s] for s in self.states]
        return shapes


def _arrays_of(cache: BatchCache) -> tuple[_Array, ...]:
    return tuple(_Array(a.shape[1], a.shape[3], a.dtype) for a in cache.arrays)


def ring_positions(keep: int, window: int, end: int, slack: int) -> list[int]:
    """Positions to keep so that a row can go on after ``end - slack .. end`` tokens.

    The query at position ``e`` sees ``e - window + 1 .. e`` and the first ``keep``.
    """
    # A window of 1 needs no column, but arrays must not be empty: keep one.
    first = max(keep, end - slack - max(window - 1, 1))
    return [*range(min(keep, end)), *range(first, end)]


def cut(
    caches: Sequence[Any],
    row: int,
    kind: Kind,
    start: int,
    end: int,
    slack: int,
    *,
    before: bool = False,
    waits: bool = True,
) -> Piece:
    """Copy a block, or the rings, of a row out of its caches.

    Ring caches must still hold their :func:`ring_positions`.

    Args:
        before: take recurrent states as they were before the last write.
        waits: wait until the copies are computed; otherwise they are only begun.
    """
    if kind == "block":
        block = range(start, end)
        arrays = [c.columns(row, block) for c in linear_caches(caches)]
    else:
        arrays = [
            c.columns(row, ring_positions(ring.keep, ring.window, end, slack))
            for ring, c in ring_caches(caches)
        ]
        arrays += [
            c.states_before(row) if before else c.states_of(row)
            for c in recurrent_caches(caches)
        ]
    (mx.eval if waits else mx.async_eval)(arrays)
    return Piece(kind, start, end, slack, tuple(arrays))


def refill(caches: Sequence[Any], rows: Sequence[Plan[Piece]]) -> list[Any]:
    """Caches like ``caches`` with a row for each plan, holding what it restores."""
    # Indices of the caches of one kind, in the order in which pieces hold them.
    order = {id(c): i for i, c in enumerate(linear_caches(caches))}
    ends = [c for _, c in ring_caches(caches)] + recurrent_caches(caches)
    order |= {id(c): i for i, c in enumerate(ends)}

    def empty(cache: Any) -> Any:
        if isinstance(cache, BatchCacheList):
            return BatchCacheList(*map(empty, cache.caches))
        index = order[id(cache)]
        new = cache.refilled([_row(plan, index, cache) for plan in rows])
        mx.eval(new.written)  # layer by layer, so that only one is held twice
        return new

    return [empty(cache) for cache in caches]


def _row(
    plan: Plan[Piece], index: int, cache: BatchCache
) -> tuple[Arrays, Sequence[int], int] | None:
    """Columns of cache ``index``, their positions, and the row's length."""
    if plan.length == 0:
        return None
    ring = cache.ring
    if ring is None and not isinstance(cache, BatchRecurrentCache):
        columns = [
            tuple(a[:, :, : plan.length - block.start] for a in block.arrays[index])
            for block in plan.blocks
        ]
        parts = zip(*columns, strict=True)
        joined = tuple(mx.concatenate(list(a), axis=2) for a in parts)
        return joined, range(plan.length), plan.length
    piece = plan.ring
    assert piece is not None
    if ring is None:
        return piece.arrays[index], (), plan.length
    positions = ring_positions(ring.keep, ring.window, piece.end, piece.slack)
    held = [p for p in positions if p < plan.length]  # ascending
    arrays = tuple(a[:, :, : len(held)] for a in piece.arrays[index])
    return arrays, held, plan.length


def pack(piece: Piece, metadata: dict[str, str]) -> bytes:
    """A piece as a safetensors file."""
    named = {
        f"{i}.{j}": array
        for i, arrays in enumerate(piece.arrays)
        for j, array in enumerate(arrays)
    }
    file = io.BytesIO()
    mx.save_safetensors(file, named, metadata)
    return file.getvalue()


def unpack(
    data: bytes, kind: Kind, start: int, end: int, slack: int, form: Form
) -> Piece:
    """The inverse of :func:`pack`.

    Raises:
        DamagedError: ``data`` does not hold a piece of this form.
    """
    entries = tensors(data)
    pieces: list[Arrays] = []
    for i, wanted in enumerate(form.shapes(kind, start, end, slack)):
        arrays = []
        for j, (dtype, shape) in enumerate(wanted):
            tensor = entries.pop(f"{i}.{j}", None)
            size = math.prod(shape) * dtype.size
            if (
                tensor is None
                or (tensor.dtype, tensor.shape) != (_TYPES.get(dtype), shape)
                or tensor.end - tensor.begin != size
            ):
                raise DamagedError(_OTHER)
            words = np.frombuffer(data, np.uint8, size, tensor.begin)
            arrays.append(mx.array(words).view(dtype).reshape(shape))
        pieces.append(tuple(arrays))
    if entries:
        raise DamagedError(_OTHER)
    floats = [a for each in pieces for a in each if mx.issubdtype(a.dtype, mx.floating)]
    finite = [mx.isfinite(a).all() for a in floats]
    mx.eval(pieces, finite)
    if not all(each.item() for each in finite):
        raise DamagedError("it holds values that are not finite")
    return Piece(kind, start, end, slack, tuple(pieces))
