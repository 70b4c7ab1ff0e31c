"""What of a row's caches is kept, and rows made from it again.

A linear cache keeps every column, so a block of them serves any prefix that ends
within it. A ring holds the last window and some tokens before it, so what is kept
of it serves one end and a few before. See docs/prefix.md.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache import BatchCache, BatchCacheList, RingCache
from .entries import Kind, Plan

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """A block or a ring in memory (see :mod:`specdec.prefix_cache.entries`).

    ``arrays`` holds the columns of each linear cache, or of each ring, in the order
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


def members(caches: Sequence[Any]) -> list[BatchCache]:
    """The caches of a model's layers, lists taken apart."""
    found: list[BatchCache] = []
    for cache in caches:
        found += members(cache.caches) if isinstance(cache, BatchCacheList) else [cache]
    return found


def linear_caches(caches: Sequence[Any]) -> list[BatchCache]:
    """Those that keep every column."""
    return [c for c in members(caches) if not isinstance(c, RingCache)]


def ring_caches(caches: Sequence[Any]) -> list[RingCache]:
    """Those that keep a window."""
    return [c for c in members(caches) if isinstance(c, RingCache)]


def ring_positions(ring: RingCache, end: int, slack: int) -> list[int]:
    """Positions to keep so that a row can go on behind ``end - slack .. end`` tokens.

    The query at position ``e`` sees ``e - window + 1 .. e`` and the first ``keep``.
    """
    # Of a window of 1 nothing is needed; one column all the same, not to be empty.
    first = max(ring.keep, end - slack - max(ring.window - 1, 1))
    return [*range(min(ring.keep, end)), *range(first, end)]


def cut(
    caches: Sequence[Any], row: int, kind: Kind, start: int, end: int, slack: int
) -> Piece:
    """Copy a block, or the rings, of a row out of its caches.

    Of rings, the caches must still hold :func:`ring_positions`.
    """
    if kind == "block":
        block = range(start, end)
        arrays = [c.columns(row, block) for c in linear_caches(caches)]
    else:
        arrays = [
            c.columns(row, ring_positions(c, end, slack)) for c in ring_caches(caches)
        ]
    mx.eval(arrays)
    return Piece(kind, start, end, slack, tuple(arrays))


def refill(caches: Sequence[Any], rows: Sequence[Plan[Piece]]) -> list[Any]:
    """Caches like these, with a row for each plan, behind the tokens it restores."""
    # The caches of one kind, in the order in which pieces hold them.
    order = {id(c): i for i, c in enumerate(linear_caches(caches))}
    order |= {id(c): i for i, c in enumerate(ring_caches(caches))}

    def made(cache: Any) -> Any:
        if isinstance(cache, BatchCacheList):
            return BatchCacheList(*map(made, cache.caches))
        index = order[id(cache)]
        ring = cache if isinstance(cache, RingCache) else None
        new = cache.refilled([_row(plan, index, ring) for plan in rows])
        mx.eval(new.state)  # layer by layer: no more than one is held twice
        return new

    return [made(cache) for cache in caches]


def _row(
    plan: Plan[Piece], index: int, ring: RingCache | None
) -> tuple[Arrays, Sequence[int], int] | None:
    """Columns of cache ``index``, their positions, and how many tokens they make."""
    if plan.length == 0:
        return None
    if ring is None:
        columns = [
            tuple(a[:, :, : plan.length - block.start] for a in block.arrays[index])
            for block in plan.blocks
        ]
        parts = zip(*columns, strict=True)
        joined = tuple(mx.concatenate(list(a), axis=2) for a in parts)
        return joined, range(plan.length), plan.length
    piece = plan.ring
    assert piece is not None
    positions = ring_positions(ring, piece.end, piece.slack)
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


def unpack(data: bytes, kind: Kind, start: int, end: int, slack: int) -> Piece:
    """The inverse of :func:`pack`."""
    named: Any = mx.load(io.BytesIO(data), format="safetensors")
    mx.eval(named)
    return Piece(kind, start, end, slack, tuple(_grouped(named)))


def _grouped(named: dict[str, mx.array]) -> Iterator[Arrays]:
    groups: dict[int, dict[int, mx.array]] = {}
    for name, array in named.items():
        i, j = map(int, name.split("."))
        groups.setdefault(i, {})[j] = array
    for i in range(len(groups)):
        yield tuple(groups[i][j] for j in range(len(groups[i])))
