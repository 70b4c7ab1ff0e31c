"""Where keys and values lie: a tuple of arrays that share rows and slots.

Every array has shape (rows, heads, slots, features). A *codec* says how keys
and values become arrays (dense: two; quantized: a packed array, scales and
biases for each) and what attention is handed; everything else is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..errors import CacheError

Arrays = tuple[mx.array, ...]


class Codec(Protocol):
    """How keys and values are represented."""

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        """Arrays to store for ``keys`` and ``values`` of shape (B, H, S, D)."""

    def present(self, arrays: Arrays) -> tuple[Any, Any]:
        """Keys and values as mlx-lm's attention takes them."""

    def collect(self, keys: Any, values: Any) -> Arrays:
        """The inverse of :meth:`present`."""


@dataclass(frozen=True)
class DenseCodec:
    """Keys and values as they are."""

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        return keys, values

    def present(self, arrays: Arrays) -> tuple[Any, Any]:
        return arrays[0], arrays[1]

    def collect(self, keys: Any, values: Any) -> Arrays:
        return keys, values


@dataclass(frozen=True)
class QuantizedCodec:
    """Packed keys and values with scales and biases, as ``mx.quantize`` makes them."""

    bits: int = 8
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise CacheError(f"kv bits is {self.bits}: it must be 4 or 8")
        if self.group_size not in (32, 64, 128):
            raise CacheError(
                f"kv group size is {self.group_size}: it must be 32, 64 or 128"
            )

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        return self._quantize(keys) + self._quantize(values)

    def _quantize(self, x: mx.array) -> Arrays:
        if x.shape[-1] % self.group_size:
            raise CacheError(
                f"kv group size {self.group_size} does not divide the head size "
                f"{x.shape[-1]}: choose a --kv-group-size that does"
            )
        return tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def present(self, arrays: Arrays) -> tuple[Any, Any]:
        return arrays[:3], arrays[3:]

    def collect(self, keys: Any, values: Any) -> Arrays:
        return tuple(keys) + tuple(values)


class Storage:
    """Rows of slots; knows nothing of positions.

    ``arrays`` is ``None`` until the first write, which fixes heads, features
    and dtypes.
    """

    def __init__(self, codec: Codec, arrays: Arrays | None = None):
        self.codec = codec
        self.arrays = arrays

    @property
    def capacity(self) -> int:
        """Slots allocated per row."""
        return 0 if self.arrays is None else int(self.arrays[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0 if self.arrays is None else sum(a.nbytes for a in self.arrays)

    @property
    def dtype(self) -> mx.Dtype | None:
        """Type of the scores that attention computes, once something is stored."""
        # The last array is the values, or their biases: in the model's dtype.
        return None if self.arrays is None else self.arrays[-1].dtype

    def allocate_like(self, arrays: Arrays, rows: int, capacity: int) -> None:
        """Allocate zeros with the heads, features and dtypes of ``arrays``."""
        self.arrays = tuple(
            mx.zeros((rows, a.shape[1], capacity, a.shape[3]), a.dtype) for a in arrays
        )

    def grow(self, capacity: int) -> None:
        """Append zeroed slots up to ``capacity``; one copy, nothing else held."""
        if self.arrays is not None and capacity > self.capacity:
            more = capacity - self.capacity
            widths = [(0, 0), (0, 0), (0, more), (0, 0)]
            self.arrays = tuple(mx.pad(a, widths) for a in self.arrays)

    def write(self, updates: Arrays, slots: mx.array) -> None:
        """Scatter ``updates`` of shape (B, H, S, D) to ``slots`` of shape (B, S)."""
        assert self.arrays is not None
        rows = mx.arange(slots.shape[0])[:, None]
        for array, update in zip(self.arrays, updates, strict=True):
            array[rows, :, slots] = update.transpose(0, 2, 1, 3)

    def read(self, extent: int) -> tuple[Any, Any]:
        """The first ``extent`` slots, as attention takes them."""
        assert self.arrays is not None
        if extent == self.capacity:
            return self.codec.present(self.arrays)
        return self.codec.present(tuple(a[:, :, :extent] for a in self.arrays))

    def take_rows(self, rows: mx.array) -> None:
        """Keep the given rows, in that order."""
        if self.arrays is not None:
            n = rows.shape[0]
            self.arrays = tuple(a[rows] if n else a[:0] for a in self.arrays)

    def take_slots(self, slots: mx.array) -> None:
        """Let slot ``j`` of row ``i`` hold what slot ``slots[i, j]`` held."""
        if self.arrays is not None:
            index = slots[:, None, :, None]
            self.arrays = tuple(
                mx.take_along_axis(a, index, axis=2) for a in self.arrays
            )

    def row(self, row: int, slots: mx.array) -> Arrays:
        """A copy of the given slots of one row, shape (1, H, len(slots), D)."""
        assert self.arrays is not None
        return tuple(mx.contiguous(a[row : row + 1][:, :, slots]) for a in self.arrays)

    @classmethod
    def stack(cls, parts: Sequence[tuple[Storage, int]]) -> Storage:
        """Rows of several storages; ``parts`` are (storage, its number of rows)."""
        codec = parts[0][0].codec
        filled = [s for s, _ in parts if s.arrays is not None]
        if not filled:
            return cls(codec)
        if any(s.codec != codec for s, _ in parts):
            raise CacheError("caches stored differently cannot be joined")
        capacity = max(s.capacity for s in filled)
        first = filled[0].arrays
        assert first is not None
        columns = []
        for storage, rows in parts:
            part = cls(codec, storage.arrays)
            if part.arrays is None:
                part.allocate_like(first, rows, capacity)
            part.grow(capacity)
            assert part.arrays is not None
            columns.append(part.arrays)
        return cls(
            codec, tuple(mx.concatenate(c, axis=0) for c in zip(*columns, strict=True))
        )
