"""Stores keys and values: a tuple of arrays that share rows and slots.

Every array has shape (rows, heads, slots, features). A *codec* defines how keys and
values become arrays (dense: two; quantized: a packed array, scales and biases for each)
and what attention gets. Everything else is the same for all codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from ..cuda import cache_write
from ..cuda.cache_write import Unwritten
from ..errors import CacheError
from .positions import whole
from .tail import Tail

Arrays = tuple[mx.array, ...]
# For an array of rows: the row that each placed element goes to, int32, in the shape of
# the placed rows; the row alone, shape (1,), if it is one.
Index = Callable[[mx.array], mx.array]
GROUP_SIZES = (32, 64, 128)


class Codec(Protocol):
    """How keys and values are represented."""

    @property
    def options(self) -> dict[str, int]:
        """Arguments of a cache's constructor that select this codec."""

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        """Arrays to store for ``keys`` and ``values`` of shape (B, H, S, D)."""

    def present(self, arrays: Arrays) -> tuple[Any, Any]:
        """Keys and values as mlx-lm's attention takes them."""

    def dense(self, arrays: Arrays) -> tuple[mx.array, mx.array]:
        """Keys and values as :meth:`encode` takes them."""

    def collect(self, keys: Any, values: Any) -> Arrays:
        """The inverse of :meth:`present`."""


@dataclass(frozen=True)
class DenseCodec:
    """Keys and values, unquantized."""

    @property
    def options(self) -> dict[str, int]:
        return {}

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        return keys, values

    def present(self, arrays: Arrays) -> tuple[Any, Any]:
        return arrays[0], arrays[1]

    dense = present

    def collect(self, keys: Any, values: Any) -> Arrays:
        return keys, values


class GroupSizeError(CacheError):
    """The quantization group does not divide the head size of keys or values."""

    def __init__(self, group_size: int, head_sizes: Sequence[int]):
        which = " and ".join(map(str, dict.fromkeys(head_sizes)))
        heads = f"head size{'s' * (' ' in which)} {which}"
        fitting = [n for n in GROUP_SIZES if not any(size % n for size in head_sizes)]
        super().__init__(
            f"kv group size {group_size} does not divide its {heads}: "
            f"use {' or '.join(map(str, fitting))}"
            if fitting
            else f"its {heads} cannot be quantized in groups of 32, 64 or 128: "
            "leave out kv_bits"
        )


@dataclass(frozen=True)
class QuantizedCodec:
    """Packed keys and values with scales and biases, as ``mx.quantize`` makes them."""

    bits: int = 8
    group_size: int = 64

    def __post_init__(self) -> None:
        if whole("kv bits", self.bits) not in (4, 8):
            raise CacheError(f"kv bits is {self.bits}: it must be 4 or 8")
        if whole("kv group size", self.group_size) not in GROUP_SIZES:
            raise CacheError(
                f"kv group size is {self.group_size}: it must be 32, 64 or 128"
            )

    @property
    def options(self) -> dict[str, int]:
        return {"bits": self.bits, "group_size": self.group_size}

    def encode(self, keys: mx.array, values: mx.array) -> Arrays:
        sizes = keys.shape[-1], values.shape[-1]
        if sizes[0] % self.group_size or sizes[1] % self.group_size:
            raise GroupSizeError(self.group_size, sizes)
        return self._quantize(keys) + self._quantize(values)

    def _quantize(self, x: mx.array) -> Arrays:
        return tuple(mx.quantize(x, group_size=self.group_size, bits=self.bits))

    def unpack(self, packed: Arrays) -> mx.array:
        """Dense keys or values, from a packed array, its scales and its biases."""
        array, scales, biases = packed
        return mx.dequantize(
            array, scales, biases, group_size=self.group_size, bits=self.bits
        )

    def present(self, arrays: Arrays) -> tuple[Any, Any]:
        return arrays[:3], arrays[3:]

    def dense(self, arrays: Arrays) -> tuple[mx.array, mx.array]:
        return self.unpack(arrays[:3]), self.unpack(arrays[3:])

    def collect(self, keys: Any, values: Any) -> Arrays:
        return tuple(keys) + tuple(values)


def _nobody() -> None:
    """What attention has written before it has written anything."""


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    """What a write comes after if nothing is before it."""
    array = mx.zeros((1, 1, 1, 1), dtype)
    mx.eval(array)
    return array


def _widened(arrays: Arrays, capacity: int) -> Arrays:
    """Copies of ``arrays`` with zeroed slots appended up to ``capacity``."""
    # This copies even with nothing to append: the arrays of a first write may be views
    # of something larger.
    more = capacity - arrays[0].shape[2]
    return tuple(mx.pad(a, [(0, 0), (0, 0), (0, more), (0, 0)]) for a in arrays)


def rows_at(rows: Sequence[int], array: mx.array) -> mx.array:
    """For each element of ``rows`` of an array, its row: an index for one scatter."""
    at = mx.array(list(rows), mx.int32).reshape(-1, *[1] * (array.ndim - 1))
    return mx.broadcast_to(at, (len(rows), *array.shape[1:]))


def put_rows(array: mx.array, rows: Sequence[int], new: mx.array) -> mx.array:
    """``array`` with the first rows of ``new`` in the given ones, by one operation."""
    at = rows_at(rows, array)
    return mx.put_along_axis(array, at, new[: len(rows)], axis=0)


def placed(arrays: Arrays, updates: Arrays, index: Index) -> Arrays:
    """``arrays`` with the first rows of ``updates`` put where ``index`` says.

    It is one operation for each array, whatever the number of rows: where launches take
    the time, more of them would delay the next round.
    """
    results = []
    for array, update in zip(arrays, updates, strict=True):
        at = index(array)
        if at.shape[0] < update.shape[0]:
            update = update[: at.shape[0]]
        if at.shape[0] == 1:  # a CPU copies a slice ten times as fast as it scatters
            results.append(mx.slice_update(array, update, at, axes=(0,)))
        else:
            results.append(mx.put_along_axis(array, at, update, axis=0))
    return tuple(results)


class Storage:
    """Rows of slots; knows nothing of positions.

    MLX does not know of writes in place, so their order is kept here. What reads the
    arrays is handed to the device before the next such write, as wide forwards are, or
    the write depends on it (:attr:`after`). Who gets them by :attr:`arrays` may read
    them at any time, since the next write goes to a copy.

    Attributes:
        least: the fewest slots that the first write allocates.
        expected: :attr:`dtype` after the first write, if it is known.
        waiting: what attention is to write, and where, see :meth:`write_later`.
        asked: gives what attention has written last, if anything holds it.
        after: what the next write in place has to come after: the result of attention,
            or of the write before. ``None``: MLX made the arrays, and attention of few
            tokens has not read them.
        unsettled: whether a write in place may not be handed to the device yet.
        lent: whether arrays that are written in place may be held elsewhere.
        tail: the newest tokens, if they are held apart.
    """

    waiting: tuple[Arrays, mx.array] | None
    asked: Callable[[], Unwritten | None]
    after: mx.array | None
    unsettled: bool
    lent: bool
    tail: Tail | None
    _arrays: Arrays | None

    def __init__(self, codec: Codec, arrays: Arrays | None = None):
        self.codec = codec
        self.arrays = arrays
        self.least = 0
        self.expected: mx.Dtype | None = None
        self.asked = _nobody

    @property
    def arrays(self) -> Arrays | None:
        """What is stored; ``None`` until the first write, which fixes shapes and types.

        These arrays keep their contents.
        """
        arrays = self.settled()
        self.lent = True
        return arrays

    @arrays.setter
    def arrays(self, arrays: Arrays | None) -> None:
        self._arrays, self.waiting, self.after, self.tail = arrays, None, None, None
        self.unsettled = self.lent = False

    def current(self) -> Arrays | None:
        """The arrays, for attention and for who waits until they are computed.

        What a tail holds is written to them; there is none then.
        """
        if (waiting := self.waiting) is not None:
            self.write_waiting(waiting[0][0])
        if (tail := self.tail) is not None:
            self.tail = None
            if tail.most:
                self.write(*tail.flushed())
        return self._arrays

    def settled(self) -> Arrays | None:
        """The arrays, for reads that are handed to the device before the next write.

        Writes in place are handed over now, as a read in the same graph may miss them.
        That is impossible in a function that is traced.
        """
        arrays = self.current()
        if self.unsettled:
            assert arrays is not None
            mx.async_eval(arrays)
            self.unsettled = False
        return arrays

    def unshare(self) -> None:
        """Copy the arrays if something else may hold them."""
        if self.lent and (arrays := self.settled()) is not None:
            self.arrays = _widened(arrays, self.capacity)

    def parts(self, *, in_place: bool) -> Arrays:
        """The arrays for a graph; to write in place, with :attr:`after`."""
        arrays = self.current() or ()
        if not arrays or not in_place or not cache_write.writes_in_place(arrays):
            return self.settled() or ()
        self.unshare()
        arrays, after = self._arrays or (), self.after
        if after is None:
            after = _nothing(arrays[-1].dtype)
        return *arrays, after[:1, :1, :1, :1]

    def take(self, arrays: Arrays) -> None:
        """Hold what :meth:`parts` returned, here or in a graph."""
        if len(arrays) % 2:  # keys and values alone are an even number
            self.arrays, self.after = arrays[:-1], arrays[-1]
            self.unsettled = True
        else:
            self.arrays = arrays or None

    @property
    def held(self) -> Arrays:
        """The arrays, without what waits for attention, and those of the tail."""
        tail = () if self.tail is None else self.tail.arrays
        return (*(self._arrays or ()), *tail)

    def base(self, extent: int) -> Arrays:
        """The first ``extent`` slots, without what a tail holds."""
        return tuple([a[:, :, :extent] for a in self._arrays or ()])

    def empty_tail(self) -> None:
        """Write what the tail holds to the base, if there is a tail."""
        self.current()

    @property
    def empty(self) -> bool:
        """Whether nothing was written."""
        return self._arrays is None

    @property
    def capacity(self) -> int:
        """Slots allocated per row."""
        return 0 if self._arrays is None else int(self._arrays[0].shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(a.nbytes for a in self.held)

    @property
    def dtype(self) -> mx.Dtype | None:
        """Type of the scores that attention computes, as far as it is known."""
        # The last array is the values, or their biases: in the model's dtype.
        return self.expected if self._arrays is None else self._arrays[-1].dtype

    def grow(self, capacity: int) -> None:
        """Append zeroed slots up to ``capacity``; one copy, nothing else held."""
        if capacity > self.capacity and (arrays := self.settled()) is not None:
            self.arrays = _widened(arrays, capacity)

    def write(self, updates: Arrays, slots: mx.array) -> None:
        """Put ``updates``, shape (B, H, S, D), into ``slots``, shape (B, S).

        Arrays handed out before keep their contents. If nobody holds them any more,
        MLX writes in place.
        """
        assert self.arrays is not None
        index = slots[:, None, :, None]
        written = []
        for array, update in zip(self.arrays, updates, strict=True):
            written.append(mx.put_along_axis(array, index, update, axis=2))
        self.arrays = tuple(written)

    def write_later(self, updates: Arrays, slots: mx.array, extent: int) -> Unwritten:
        """As :meth:`write`, in place and once attention asks for ``extent`` slots.

        Dense keys and values only.
        """
        self.current()
        self.unshare()
        self.waiting = updates, slots
        return Unwritten(self, extent, self.waiting)

    def write_waiting(self, queries: mx.array) -> mx.array:
        """Write what waits; the queries that attention has to read.

        Raises:
            CacheError: they differ in type or shape from the keys that wait.
        """
        assert self.waiting is not None
        (new, slots), self.waiting = self.waiting, None
        arrays = self.current()
        assert arrays is not None
        if not cache_write.writes_in_place(arrays):
            self.write(new, slots)
            return queries
        if not cache_write.takes(queries, arrays, new):
            # MLX cannot write them in a graph, see settled.
            raise CacheError("attention's queries and keys differ in type or shape")
        queries, written = cache_write.write(queries, arrays, new, slots, self.after)
        self.arrays, self.after, self.unsettled = written, queries, True
        return queries

    def write_first(self, updates: Arrays, capacity: int) -> None:
        """Allocate ``capacity`` slots or more; the first of them hold ``updates``."""
        self.arrays = _widened(updates, max(capacity, self.least))

    def read(self, extent: int) -> Arrays:
        """The first ``extent`` slots, for attention."""
        # Queries do not come after a write that no attention has asked for.
        arrays = self.current() if self.waiting is None else self.settled()
        assert arrays is not None
        if extent == arrays[0].shape[2]:
            return arrays
        return tuple([a[:, :, :extent] for a in arrays])

    def blank(self, rows: int) -> Storage:
        """A storage of the same kind and size, with ``rows`` rows of zeros."""
        assert self.arrays is not None
        return Storage(
            self.codec,
            tuple(mx.zeros((rows, *a.shape[1:]), a.dtype) for a in self.arrays),
        )

    def take_rows(self, rows: mx.array) -> None:
        """Keep the given rows, in that order; if there are none, drop the arrays."""
        if self.arrays is not None:
            keep = rows.shape[0] > 0
            self.arrays = tuple(a[rows] for a in self.arrays) if keep else None

    def place(self, index: Index, other: Storage, capacity: int) -> None:
        """Put the first rows of ``other`` into rows of this; no other is touched.

        The rest of these rows is zeroed: no mask would hide a NaN left there. Like
        :meth:`write`, it happens in place if nobody holds the arrays.

        Args:
            index: where they go.
            capacity: slots per row afterwards, at least as many as there are now.
        """
        if other.codec != self.codec:
            raise CacheError("caches stored differently cannot be joined")
        if self.arrays is None or other.arrays is None:
            raise CacheError("a cache that holds nothing cannot be placed into another")
        self.grow(capacity)
        updates = other.arrays
        if other.capacity > capacity:
            updates = tuple(a[:, :, :capacity] for a in updates)
        elif other.capacity < capacity:
            updates = _widened(updates, capacity)
        self.arrays = placed(self.arrays, updates, index)

    def take_slots(self, slots: mx.array) -> None:
        """Let slot ``j`` of row ``i`` hold what slot ``slots[i, j]`` held."""
        if self.arrays is not None:
            index = slots[:, None, :, None]
            self.arrays = tuple(
                mx.take_along_axis(a, index, axis=2) for a in self.arrays
            )

    def zero(self, at: mx.array) -> None:
        """Zero the slots that ``at``, shape (B, capacity), boolean, marks."""
        if self.arrays is not None:
            self.arrays = tuple(
                mx.where(at[:, None, :, None], mx.zeros((), a.dtype), a)
                for a in self.arrays
            )

    def make_finite(self, rows: Sequence[int]) -> None:
        """Zero what is not finite in the given rows.

        This waits for the device, and copies nothing if all of it is finite.
        """
        arrays = self.settled() or ()
        finite = [mx.isfinite(a[row : row + 1]).all() for a in arrays for row in rows]
        mx.eval(finite)
        if all(each.item() for each in finite):
            return
        which = mx.array([row in rows for row in range(len(arrays[0]))])
        self.arrays = tuple(
            mx.where(
                which.reshape(-1, *[1] * (a.ndim - 1)) & ~mx.isfinite(a),
                mx.zeros((), a.dtype),
                a,
            )
            for a in arrays
        )

    def row(self, row: int, slots: mx.array) -> Arrays:
        """A copy of the given slots of one row, shape (1, H, len(slots), D).

        It has to be handed to the device before the next write.
        """
        arrays = self.settled()
        assert arrays is not None
        return tuple(mx.contiguous(a[row : row + 1][:, :, slots]) for a in arrays)

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
        sample = filled[0].arrays
        columns: list[Arrays] = []
        for storage, rows in parts:
            arrays = storage.arrays
            if arrays is None:  # rows that hold nothing yet
                assert sample is not None
                arrays = tuple(
                    mx.zeros((rows, a.shape[1], 0, a.shape[3]), a.dtype) for a in sample
                )
            if rows:
                fits = arrays[0].shape[2] == capacity
                columns.append(arrays if fits else _widened(arrays, capacity))
        return cls(
            codec,
            tuple(mx.concatenate(list(c), axis=0) for c in zip(*columns, strict=True)),
        )
