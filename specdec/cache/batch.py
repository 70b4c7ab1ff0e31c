"""Row operations of a batch cache: pad, filter, extend, extract, merge."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import CacheError
from .core import CacheCore, RowCounts
from .positions import positions_after, whole
from .storage import Arrays, put_rows, rows_at

C = TypeVar("C", bound="BatchCache")
# Columns of a row, their positions (ascending), and how many tokens the row has.
RowContents = tuple[Arrays, Sequence[int], int]


class BatchCache(CacheCore):
    """A whole batch cache; :mod:`specdec.cache.kinds` has the public classes."""

    @property
    def single(self) -> Any:
        """mlx-lm's class for one sequence of this kind; ``None``: it has none."""
        raise NotImplementedError

    # -- padding -----------------------------------------------------------

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce that the next writes are padded on the right.

        Args:
            lengths: real tokens of every row in the writes to come; what follows
                them is padding and never counts as kept.
            right_padding: padding of every row. Without ``lengths``, :meth:`finalize`
                takes it back; a ring can take back only as much padding as it can trim.

        Raises:
            CacheError: left padding, which these caches do not support, or counts for
                another number of rows.
        """
        if left_padding is not None and any(left_padding):
            raise CacheError(
                "left padding is not supported: pad on the right and pass lengths"
            )
        for counts in (lengths, right_padding):
            if counts is not None and len(counts) != self.batch_size:
                raise CacheError(
                    f"prepare got {len(counts)} counts for {self.batch_size} rows"
                )
        if right_padding is not None and not any(right_padding):
            return
        if lengths is not None:
            self._lengths = [whole("a length", n) for n in lengths]
        elif right_padding is not None:
            self._right_padding = [whole("a padding", n) for n in right_padding]

    def finalize(self) -> None:
        """End what :meth:`prepare` began."""
        self._lengths = None
        if self._right_padding is not None:
            self.trim_per_sequence(self._right_padding)
            self._right_padding = None

    # -- rows --------------------------------------------------------------

    def filter(self, batch_indices: RowCounts) -> None:
        """Keep only the given rows, in that order; there may be none.

        Raises:
            CacheError: there is no such row, or padding is announced.
        """
        if self._lengths is not None or self._right_padding is not None:
            raise CacheError("rows cannot be filtered between prepare and finalize")
        if isinstance(batch_indices, mx.array):
            rows = batch_indices
        else:
            indices = [whole("a row", i) for i in batch_indices]
            if not all(0 <= i < self.batch_size for i in indices):
                raise CacheError(
                    f"filter got rows {indices}: the batch has {self.batch_size}"
                )
            rows = self._memo.get(
                "rows", (), tuple(indices), lambda: mx.array(indices, mx.int32)
            )
        self._storage.take_rows(rows)
        if rows.shape[0] == 0:  # forget what the host knew about the rows
            self._longest, self._uniform = 0, True
            if self.ring is not None:
                self.ring.join([])
        offset = self.offset
        self.offset = self._memo.get(
            "filter",
            (offset, rows),
            None,
            lambda: offset[rows] if rows.shape[0] else offset[:0],
        )

    def extend(self: C, other: C) -> None:
        """Append the rows of ``other``, which may be longer, shorter or empty.

        Raises:
            CacheError: ``other`` is of another kind or has other settings.
        """
        self._join([self, self._matching(other)])

    def place(self: C, rows: Sequence[int], other: C) -> None:
        """Put the first rows of ``other`` into rows of this cache, in place.

        Unless the capacity has to grow, no other row is copied and no shape changes.

        Args:
            rows: where these rows of ``other`` go, if any; their old contents are lost.
            other: the cache to place, which should not be used any more.

        Raises:
            CacheError: ``other`` is of another kind or has other settings, or ``rows``
                are more than its rows, or are not rows of this cache.
        """
        other = self._matching(other)
        if sorted(set(rows)) != sorted(rows) or len(rows) > other.batch_size:
            raise CacheError(
                f"place got rows {list(rows)} for {other.batch_size} rows to place"
            )
        if not all(0 <= row < self.batch_size for row in rows):
            raise CacheError(
                f"place got rows {list(rows)}: the batch has {self.batch_size}"
            )
        if not rows:
            return
        self._same_shape([self, other])
        limits = self.max_length, other.max_length
        self.max_length = None if None in limits else max(n for n in limits if n)
        self._options["max_length"] = self.max_length

        def index(array: mx.array) -> mx.array:
            def places() -> mx.array:
                alone = len(rows) == 1
                return mx.array(list(rows)) if alone else rows_at(rows, array)

            return self._memo.get(("places", array.shape[1:]), (), tuple(rows), places)

        if not other.empty():
            if self.empty():
                self._storage = other._storage.blank(self.batch_size)
            capacity = max(self.capacity, self._capacity_for(other._longest))
            self._storage.place(index, other._storage, capacity)
        self._storage.empty_tail()
        offset, new = self.offset, other.offset

        def placed() -> mx.array:
            return put_rows(offset, rows, new)

        self.offset = self._memo.get("place", (offset, new), tuple(rows), placed)
        everything = len(rows) == self.batch_size
        self._uniform = other._uniform and (
            everything or (self._uniform and self._longest == other._longest)
        )
        self._longest = max(other._longest, 0 if everything else self._longest)
        if self.ring is not None and other.ring is not None:
            self.ring.join([self.ring, other.ring])

    def reset(self, rows: Sequence[int]) -> None:
        """Empty the given rows; the other rows and all shapes stay.

        Raises:
            CacheError: there is no such row.
        """
        if not all(0 <= row < self.batch_size for row in rows):
            raise CacheError(
                f"reset got rows {list(rows)}: the batch has {self.batch_size}"
            )
        self._storage.empty_tail()
        offset = self.offset

        def emptied() -> mx.array:
            stays = [row not in rows for row in range(self.batch_size)]
            return mx.where(mx.array(stays), offset, 0)

        self.offset = self._memo.get("reset", (offset,), tuple(rows), emptied)
        self._uniform = self._uniform and not (rows and self._longest)

    def clean(self, rows: Sequence[int], width: int) -> None:
        """Zero the slots of the next ``width`` tokens of the given rows.

        They hold tokens that were taken back. A mask hides those, but attention still
        multiplies their values by 0, which is NaN for a value that is not finite.

        Raises:
            CacheError: ``width`` is more than a ring takes at a time.
        """
        if self.empty() or not rows:
            return
        if self.ring is not None:
            self.ring.clean(width, self._longest + width)
        taken = self.layout.slots(positions_after(self.offset, width))
        at = (taken[..., None] == mx.arange(self.capacity)).any(axis=1)
        which = mx.array([[row in rows] for row in range(self.batch_size)])
        self._storage.zero(at & which)

    def make_finite(self, rows: Sequence[int]) -> None:
        """Zero whatever is not finite in the given rows, their tokens' values too."""
        self._storage.make_finite(rows)

    def _same_shape(self: C, others: Sequence[C]) -> None:
        """Make ``self`` and ``others`` joinable (equal layouts)."""
        parts = [self, *others]
        rings = [p.ring for p in parts if p.ring is not None]
        if len({(ring.window, ring.keep) for ring in rings}) > 1:
            raise CacheError("rings of different window or keep cannot be joined")
        widest = max((ring.max_write for ring in rings), default=1)
        for part in parts:
            part.resize(widest)

    def _matching(self: C, other: BatchCache) -> C:
        """``other``, in a form whose rows can join this cache's."""
        if isinstance(other, type(self)):
            if self.packing and other.is_dense:
                return other.to_quantized(**self.packing)
            if self.packing == other.packing:
                return other
        raise CacheError(f"{other._called} cannot join {self._called}")

    @property
    def _called(self) -> str:
        packed = f" of {self.packing['bits']} bits" if self.packing else ""
        return f"a {type(self).__name__}{packed}"

    # -- quantizing --------------------------------------------------------

    @property
    def is_dense(self) -> bool:
        """Whether this holds keys and values that :meth:`to_quantized` would pack."""
        return not self.packing

    def to_quantized(self: C, group_size: int = 64, bits: int = 4) -> C:
        """A dense cache with its contents quantized; drop this one then.

        Raises:
            CacheError: bits or group size are not supported, or do not fit.
        """
        packed = self._like(self.batch_size, bits=bits, group_size=group_size)
        codec, arrays = self._storage.codec, self._storage.arrays
        if arrays is not None:
            packed._storage.arrays = packed._storage.codec.encode(*codec.dense(arrays))
        packed.offset = self.offset
        packed._longest, packed._uniform = self._longest, self._uniform
        packed._lengths, packed._right_padding = self._lengths, self._right_padding
        packed.ring = copy.copy(self.ring)
        return packed

    def _join(self: C, parts: Sequence[C]) -> None:
        """Become the rows of ``parts``, in order; ``self`` may be one of them."""
        self._same_shape(parts)
        limits = [p.max_length for p in parts]
        known = [n for n in limits if n is not None]
        self.max_length = max(known) if len(known) == len(limits) else None
        self._options["max_length"] = self.max_length
        stack = type(self._storage).stack
        self._storage = stack([(p._storage, p.batch_size) for p in parts])
        filled = [p for p in parts if p.batch_size]
        longest = max((p._longest for p in filled), default=0)
        self._uniform = all(p._uniform and p._longest == longest for p in filled)
        self._longest = longest
        if self.ring is not None:
            self.ring.join([p.ring for p in filled if p.ring is not None])
        offsets = tuple(p.offset for p in parts)
        self.offset = self._memo.get(
            "join", offsets, None, lambda: mx.concatenate(list(offsets))
        )

    # -- single sequences and state ------------------------------------------

    def extract(self, idx: int) -> Any:
        """Row ``idx`` as mlx-lm's own cache of one sequence, with its exact contents.

        Raises:
            CacheError: there is no such row, or mlx-lm has no such cache.
        """
        if not 0 <= whole("a row", idx) < self.batch_size:
            raise CacheError(f"extract got row {idx}: the batch has {self.batch_size}")
        if self.single is None:
            raise CacheError(
                f"a row of {self._called} cannot be extracted: mlx-lm has no class "
                "for it"
            )
        lengths: list[int] = self.offset.tolist()  # type: ignore[assignment]
        length = lengths[idx]
        if self.empty() or length == 0:
            return self._make_single(None, 0)
        ring = self.ring
        held = list(range(length)) if ring is None else ring.positions(length)
        slots = self.layout.slots(mx.array(held))
        arrays = self._storage.row(idx, slots)
        mx.async_eval(arrays)
        return self._make_single(arrays, length)

    # -- prefixes ------------------------------------------------------------

    @property
    def kind(self) -> dict[str, int | str | None]:
        """What decides which keys and values are stored, and how."""
        how = ("max_size", "keep", "chunk_size", "bits", "group_size")
        options = {k: v for k, v in self._options.items() if k in how}
        return {"class": type(self).__name__, **options}

    def columns(self, row: int, positions: Sequence[int]) -> Arrays:
        """A copy of what row ``row`` holds at ``positions``, as it is stored.

        The caller must know that the row still holds them, and hands the copy to the
        device before the next write.

        Returns:
            Arrays of shape (1, heads, len(positions), features).
        """
        assert not self.empty()
        return self._storage.row(row, self.layout.slots(mx.array(list(positions))))

    def refilled(self: C, rows: Sequence[RowContents | None]) -> C:
        """A cache like this one, with rows made from results of :meth:`columns`.

        Args:
            rows: contents of each row. In a ring, positions must go back as far as the
                next query sees. ``None`` is a row without tokens.
        """
        parts = []
        for row in rows:
            part = self._like(1)
            if row is not None and row[2]:
                part._fill_row(*row)
            parts.append(part)
        cache = self._like(0)
        cache._join(parts)
        return cache

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        """Such a cache of ``length`` tokens; ``arrays`` holds its positions."""
        raise NotImplementedError

    def _like(self: C, batch_size: int, **others: int | None) -> C:
        """An empty cache with the same settings, except for ``others``."""
        make: Any = type(self)
        cache: C = make(batch_size, memo=self._memo, **{**self._options, **others})
        return cache

    def _fill_row(self, arrays: Arrays, positions: Sequence[int], length: int) -> None:
        """Become one row of ``length`` tokens holding ``positions``, ascending."""
        if self.ring is not None:
            held = self.ring.holds(positions, length)
            positions = [positions[i] for i in held]
            arrays = tuple(a[:, :, mx.array(held)] for a in arrays)
            self.ring.fill(positions, length)
        capacity = self._capacity_for(length)
        if len(positions) == length <= capacity:  # all of them, slot after slot
            self._storage.write_first(arrays, capacity)
        else:
            slots = self.layout.slots(mx.array([list(positions)], mx.int32))
            self._storage.write_first(tuple(a[:, :, :0] for a in arrays), capacity)
            self._storage.write(arrays, slots)
        self.offset = self._memo.get(
            ("row", length), (), None, lambda: mx.array([length], mx.int32)
        )
        self._longest, self._uniform = length, True

    @classmethod
    def merge(cls: type[C], caches: Sequence[Any]) -> C:
        """One batch cache from caches of one sequence each, mlx-lm's or this class's.

        Raises:
            CacheError: nothing to merge, or caches with different settings.
        """
        if not caches:
            raise CacheError("merge needs at least one cache")
        parts = [c if isinstance(c, cls) else cls._from_single(c) for c in caches]
        merged = parts[0]._like(0)
        merged._join(parts)
        return merged

    @classmethod
    def _from_single(cls: type[C], cache: Any) -> C:
        """A cache of one row from mlx-lm's ``cache``."""
        raise CacheError(
            f"a {type(cache).__name__} cannot become part of a {cls.__name__}"
        )

    @property
    def keys(self) -> Any:
        """All allocated keys, or ``None``."""
        arrays = self._storage.arrays
        return None if arrays is None else self._storage.codec.present(arrays)[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        # Some models make the keys depend on other arrays, or drop the values.
        self._storage.arrays = self._storage.codec.collect(keys, self.values)
        self._storage.lent = True

    @property
    def values(self) -> Any:
        """All allocated values, or ``None``."""
        arrays = self._storage.arrays
        return None if arrays is None else self._storage.codec.present(arrays)[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._storage.arrays = self._storage.codec.collect(self.keys, values)
        self._storage.lent = True

    @property
    def state(self) -> tuple[Any, ...]:
        """Keys, values, offset, and (options, what a ring can undo): all of it."""
        ring = self.ring
        counters = [] if ring is None else [ring.reach, ring.undone]
        return self.keys, self.values, self.offset, ({**self._options}, counters)

    @state.setter
    def state(self, v: tuple[Any, ...]) -> None:
        keys, values, offset, (options, counters) = v
        self.__dict__ = vars(self._like(0, **options))
        if keys is not None:
            self._storage.arrays = self._storage.codec.collect(keys, values)
            self._storage.lent = True
        self._restore(offset)
        if self.ring is not None:
            self.ring.reach, self.ring.undone = counters

    def _restore(self, offset: mx.array) -> None:
        """Hold rows of ``offset`` tokens, which is read."""
        self.offset = offset
        lengths: list[int] = offset.tolist()  # type: ignore[assignment]
        self._longest = max(lengths, default=0)
        self._uniform = len(set(lengths)) <= 1

    @classmethod
    def from_state(cls: type[C], state: tuple[Any, ...]) -> C:
        """A cache with the given ``state``."""
        make: Any = cls
        cache: C = make(0, **state[3][0])
        cache.state = state
        return cache
