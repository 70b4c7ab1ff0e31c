"""States of recurrent layers, where every row takes back its own number of tokens.

Attention stores a column per token, so lowering an offset takes a token back. A
recurrent layer folds all tokens into states of a fixed size (and windows of a
convolution's newest inputs). To take tokens back, it starts from the states before the
last write and adds the tokens that stay::

    states before --- a b c d (the last write) ---> states
          |
          +---------- a b (kept) -----------------> states after the trim

The layer itself does both: a :class:`Write` can repeat the layer's call. What the call
needs is held until the next write. No state is kept for any position.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, Self, Unpack

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import CacheError
from .batch import BatchCache
from .core import Memo, RowCounts, Settings
from .positions import whole
from .storage import Arrays, DenseCodec, Index, Storage, placed

Kept = Sequence[int] | mx.array
#: The states of a layer, by index; ``None``: not written yet.
Slots = list[mx.array | None]


class Write(Protocol):
    """A recurrent layer and the inputs of one of its calls."""

    #: The layer, which writes to its cache once in each forward.
    layer: Any
    #: Tokens of every row, padding included.
    width: int

    def run(
        self, slots: Slots, offset: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots]:
        """The layer's output, and the states after the call.

        Args:
            slots: the states before the call.
            offset: tokens of every row before the call, shape (B,).
            lengths: how many of the tokens are a row's own; the rest is padding.
        """

    def again(self, slots: Slots, offset: mx.array, kept: Kept) -> Slots:
        """The states after ``kept[i]`` of the tokens of row ``i``."""

    @property
    def logged(self) -> bool:
        """Whether :meth:`run` computes :attr:`arrays` anyway, not only for undoing."""

    def takes_in(self, before: Write, lengths: Sequence[int]) -> bool:
        """Whether :meth:`run_after` can also repeat ``before``."""

    def run_after(
        self, before: Write, slots: Slots, kept: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots, Slots]:
        """Do ``before.again`` and then :meth:`run`.

        Args:
            slots: the states before ``before``.
            kept: how many tokens of ``before`` each row keeps, shape (B,).

        Returns:
            The layer's output, the states before its tokens, and the states after them.
        """

    @property
    def form(self) -> Hashable:
        """All that repeating the write depends on, besides :attr:`arrays`."""

    @property
    def arrays(self) -> Arrays:
        """The arrays that repeating the write needs."""

    def holding(self, arrays: Arrays) -> Write:
        """A write like this one, with other arrays."""


class StateStorage(Storage):
    """Arrays of any shape whose first axis is the rows."""

    def __init__(self, arrays: Arrays | None = None):
        super().__init__(DenseCodec(), arrays)

    @property
    def capacity(self) -> int:
        """States do not grow with the tokens: 1, or 0 before the first write."""
        return 0 if self.arrays is None else 1

    def grow(self, capacity: int) -> None:
        """States do not grow."""

    def take(self, arrays: Arrays) -> None:
        """Hold new states."""
        self.arrays = arrays or None

    def blank(self, rows: int) -> StateStorage:
        """A storage like this one, with ``rows`` rows of zeros."""
        return StateStorage(super().blank(rows).arrays)

    def place(self, index: Index, other: Storage, capacity: int) -> None:
        """Put the first rows of ``other`` into rows of this; no other is touched."""
        assert self.arrays is not None
        assert other.arrays is not None
        self.arrays = placed(self.arrays, other.arrays, index)

    @classmethod
    def stack(cls, parts: Sequence[tuple[Storage, int]]) -> StateStorage:
        """Rows of several storages; ``parts`` are (storage, its number of rows)."""
        filled = [s for s, _ in parts if s.arrays is not None]
        if not filled:
            return cls()
        columns = [
            (filled[0].blank(rows) if s.arrays is None else s).arrays
            for s, rows in parts
            if rows
        ]
        stacked = zip(*columns, strict=True)
        return cls(tuple(mx.concatenate(list(c), axis=0) for c in stacked))


class BatchRecurrentCache(BatchCache):
    """States of recurrent layers: stands in for mlx-lm's ``ArraysCache``.

    Layers write to it through :meth:`write` (see :mod:`specdec.models.recurrent`).
    Any number of tokens of the last write can be taken back, row by row.

    Args:
        batch_size: number of rows.
        size: states of a row.
        single_stays: hold nothing to take back a write of a single token. Only rows
            that have ended may lose that token: their states are not read again.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        size: int = 1,
        single_stays: bool = False,
        **settings: Unpack[Settings],
    ):
        super().__init__(
            batch_size,
            options={"size": whole("size", size), "single_stays": single_stays},
            **settings,
        )
        self.num_states = size
        self._storage: Storage = StateStorage()
        self._begin()

    # -- writing -------------------------------------------------------------

    def checkpoint(self) -> None:
        """Let the next trim take back any of the tokens written from now on.

        Without it, a trim can take back only tokens of the last write.
        """
        self._settle()
        self._begin(spans=True)

    def skip(self, num_tokens: int) -> None:
        """As in the base class; states stay."""
        self._settle()
        super().skip(num_tokens)
        self._begin()

    @property
    def lent(self) -> bool:
        """States are never written in place."""
        return False

    def _begin(self, *, spans: bool = False) -> None:
        """Remember the states before the next write; ``spans``: the next writes."""
        self._before: Slots = self._slots
        self._offset_before = self.offset
        self._spans = spans
        # What was written since: calls of layers, and tokens per row.
        self._written: list[tuple[int, Write]] = []
        self._num_written = 0
        # How many of those tokens are kept: all (None), or a number per row.
        self._kept: Kept | None = None
        # The forward under way: its layers so far, and the states after them; offsets
        # before it; tokens of every row without padding.
        self._layers: list[Any] = []
        self._now: Slots = []
        self._offset_now = self.offset
        self._valid: list[int] = []

    @property
    def _goes_on(self) -> bool:
        """Whether the next write is taken back together with the writes before it."""
        return self._spans and self._kept is None

    @property
    def _slots(self) -> Slots:
        arrays = self._storage.arrays
        return [None] * self.num_states if arrays is None else list(arrays)

    def write(self, write: Write) -> Any:
        """Run a recurrent layer on the next tokens of every row.

        Returns:
            The layer's output.

        Raises:
            CacheError: the rows are others than the cache has.
        """
        undone = None
        if not self._layers or any(write.layer is layer for layer in self._layers):
            undone = self._next_forward(write)
        self._layers.append(write.layer)
        if undone is None:
            output, self._now = write.run(self._now, self._offset_now, self._valid)
        else:
            output, before, self._now = write.run_after(*undone, self._valid)
            if self._num_written:
                self._before = before
        if self._of_prompts:
            # A window is a view of all inputs of the chunk, and would keep them in
            # memory.
            self._now = [None if a is None else mx.contiguous(a) for a in self._now]
        if self._num_written:
            begin = self._num_written - max(self._valid, default=0)
            self._written.append((begin, write))
        self._store(self._now)
        if self._stays:
            self._num_written, self._before, self._written = 0, [], []
        return output

    def _next_forward(self, write: Write) -> tuple[Write, Slots, mx.array] | None:
        """Begin a forward, of which ``write`` is the first write.

        Returns:
            What ``write`` has to repeat: the last write, the states before it, and how
            many tokens are kept of it; ``None``: nothing.
        """
        width, undone = write.width, None
        valid = [width] * self.batch_size
        if self._lengths is not None:
            valid = [min(width, n) for n in self._lengths]
        spans = self._goes_on
        if not spans or not self._num_written:
            kept = self._kept
            if kept is not None and len(self._written) == 1:
                last = self._written[0][1]
                if write.takes_in(last, valid):
                    undone = last, self._before, _array(kept)
            if undone is None:
                self._settle()
            self._begin(spans=spans)
        self._layers, self._now = [], self._slots
        self._offset_now, self._valid = self.offset, valid
        self._num_written += max(self._valid, default=width)
        self._advance(width, self._longest + width)
        if self._of_prompts:  # never taken back: hold no inputs
            self._num_written, self._before = 0, []
        return undone

    @property
    def _of_prompts(self) -> bool:
        """Whether the forward under way writes chunks of prompts, of any length."""
        ragged = len(set(self._valid)) > 1
        return ragged or (self._lengths is not None and max(self._valid, default=0) > 1)

    @property
    def _stays(self) -> bool:
        """Whether the forward under way writes a token that is not taken back."""
        single = max(self._valid, default=0) <= 1 and not self._spans
        return single and bool(self._options["single_stays"])

    def _store(self, slots: Slots) -> None:
        """Hold states, once every layer has written its own."""
        arrays = tuple(a for a in slots if a is not None)
        if len(arrays) == len(slots):
            self._storage.arrays = arrays

    def _settle(self) -> None:
        """Compute the states that the last trim has left."""
        kept, written, slots = self._kept, self._written, self._before
        if kept is not None:
            if self._num_written == 1:
                slots = select(kept, 1, self._slots, slots)
            else:
                for begin, write in written:
                    left = _within(kept, begin, write.width)
                    slots = write.again(slots, self._offset_before + begin, left)
            self._store(slots)
        self._begin()
        self._before = []

    @property
    def arrays(self) -> Arrays:
        """The states, shape (B, ...) each."""
        self._settle()
        return super().arrays

    def _capacity_for(self, longest: int, capacity: int | None = None) -> int:
        return 1

    # -- compiled forwards -----------------------------------------------------

    def reserve(self, num_tokens: int, *, padded: bool = False) -> Hashable:
        """As in the base class; padding cannot be left out of states."""
        if self.empty() or self._lengths is not None or padded:
            return None
        stays = self._options["single_stays"]
        return type(self), self.num_states, stays, self._goes_on

    def given(self, num_tokens: int) -> tuple[Hashable, Arrays]:
        """As in the base class, with the work that the last trim has left to do."""
        if self._kept is None:
            return None, super().arrays
        form = self._num_written, *((begin, w.form) for begin, w in self._written)
        parts = [w.arrays for _, w in self._written]
        before, now = _arrays(self._before), super().arrays
        kept = _array(self._kept), self._offset_before
        return form, sum(parts, (*before, *now, *kept))

    def holding(self, arrays: Arrays, offset: mx.array, memo: Memo) -> Self:
        """As in the base class."""
        n = self.num_states
        twin = super().holding(arrays[-n:], offset, memo)
        twin._storage = StateStorage(arrays[-n:])
        if self._kept is None:
            twin._begin(spans=self._spans)
            return twin
        twin._before, twin._storage = list(arrays[:n]), StateStorage(arrays[n : 2 * n])
        twin._kept, twin._offset_before = arrays[2 * n : 2 * n + 2]
        twin._written = _written(self._written, arrays[2 * n + 2 :])
        return twin

    def without_arrays(self) -> Self:
        """As in the base class."""
        bare = super().without_arrays()
        bare._before, bare._now, bare._layers = [], [], []
        bare._kept = None if self._kept is None else []
        bare._written = _without_arrays(self._written)
        del bare._offset_before, bare._offset_now
        return bare

    def left(self) -> tuple[Any, Arrays]:
        """As in the base class, with what undoing the write needs."""
        # Undoing a single token needs no writes, unless it is one of several. If they
        # are logged anyway, they make undoing faster.
        logged = all(write.logged for _, write in self._written)
        needed = self._num_written > 1 or logged or self._spans
        written = self._written if needed else []
        parts = [write.arrays for _, write in written]
        form = self._num_written, _without_arrays(written)
        return form, sum(parts, (*super().arrays, *_arrays(self._before)))

    def take(
        self,
        form: Any,
        arrays: Arrays,
        offset: mx.array,
        num_tokens: int,
        taken_back: int = 0,
        valid: Sequence[int] = (),
    ) -> None:
        """As in the base class."""
        n = self.num_states
        before = self.offset
        super().take(form, arrays[:n], offset, num_tokens, taken_back)
        if not self._goes_on:
            self._begin()
            self._before, self._offset_before = list(arrays[n : 2 * n]), before
        begin = self._num_written
        num_written, written = form
        self._num_written += num_written
        self._written += [
            (begin + at, write) for at, write in _written(written, arrays[2 * n :])
        ]

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm's name
        return_array: bool = False,
        window_size: int | None = None,
        *,
        both_ways: bool = False,
    ) -> None:
        """``None``: layers are shown masks where they need them."""

    def __getitem__(self, index: int) -> mx.array:
        raise CacheError("its layers read recurrent states by themselves")

    def __setitem__(self, index: int, value: mx.array) -> None:
        self[index]

    # -- trimming ------------------------------------------------------------

    def is_trimmable(self) -> bool:
        """Whether there are tokens of the last write to take back."""
        return self._num_written > 0

    def trim_per_sequence(
        self,
        n: RowCounts,
        at_most: int | None = None,
        fewest: int = 0,
        *,
        fresh: bool = False,
    ) -> None:
        """Take back the last ``n[i]`` tokens of row ``i``, all from the last write.

        Args: as for :class:`~specdec.cache.core.CacheCore`.

        Raises:
            CacheError: as there, or ``n`` holds more tokens than were last written.
        """
        if not isinstance(n, mx.array):
            at_most = max((whole("a count", v) for v in n), default=0)
        elif at_most is None:
            at_most = int(n.max()) if n.size else 0
        if at_most <= 1 and not self._num_written and self._options["single_stays"]:
            super().trim_per_sequence(n, at_most, fewest, fresh=fresh)
            return
        kept = self._kept
        if kept is None:
            kept = [self._num_written] * self.batch_size
        elif isinstance(kept, mx.array):  # a second trim, which is rare
            listed: list[int] = kept.tolist()  # type: ignore[assignment]
            kept = listed
        counts = [at_most] * len(kept) if isinstance(n, mx.array) else n
        left = [k - c for k, c in zip(kept, counts, strict=False)]
        if min(left, default=0) < 0:
            raise CacheError(
                f"{at_most} tokens cannot be taken back: {self._num_written} were "
                "written last, and states before those are gone"
            )
        super().trim_per_sequence(n, at_most, fewest, fresh=fresh)
        if at_most > 0:
            self._kept = left
            if isinstance(n, mx.array):
                trimmed = n
                self._kept = self._memo.get(
                    "kept",
                    (trimmed,),
                    tuple(kept),
                    lambda: mx.maximum(
                        _array(kept) - mx.maximum(_array(trimmed), 0), 0
                    ),
                )

    # -- rows ----------------------------------------------------------------

    def filter(self, batch_indices: RowCounts) -> None:
        """As in the base class."""
        self._settle()
        super().filter(batch_indices)

    def _matching(self, other: BatchCache) -> Self:
        matching = super()._matching(other)
        matching._settle()
        return matching

    def _join(self, parts: Sequence[Self]) -> None:
        for part in parts:
            part._settle()
        super()._join(parts)

    def place(self, rows: Sequence[int], other: Self) -> None:
        """As in the base class."""
        self._settle()
        if other.empty():
            self._zero(rows)
        super().place(rows, other)

    def reset(self, rows: Sequence[int]) -> None:
        """As in the base class: states begin with zeros again."""
        self._settle()
        super().reset(rows)
        self._zero(rows)

    def clean(self, rows: Sequence[int], width: int) -> None:
        """Do nothing: no state is left of tokens that were taken back."""

    def make_finite(self, rows: Sequence[int]) -> None:
        """As in the base class."""
        self._settle()
        super().make_finite(rows)

    def _zero(self, rows: Sequence[int]) -> None:
        if self.empty():
            return

        def stays() -> mx.array:
            return mx.array([row not in rows for row in range(self.batch_size)])

        which = self._memo.get("stays", (), (self.batch_size, *rows), stays)
        self._storage.arrays = tuple(
            mx.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, mx.zeros((), a.dtype))
            for a in self._storage.arrays or ()
        )

    # -- single sequences and state --------------------------------------------

    def extract(self, idx: int) -> Any:
        """Row ``idx`` as mlx-lm's ``ArraysCache``.

        Raises:
            CacheError: there is no such row.
        """
        if not 0 <= whole("a row", idx) < self.batch_size:
            raise CacheError(f"extract got row {idx}: the batch has {self.batch_size}")
        self._settle()
        single: Any = mlx_lm_cache.ArraysCache(self.num_states)
        lengths: list[int] = self.offset.tolist()  # type: ignore[assignment]
        if not self.empty() and lengths[idx]:
            single.cache = list(self.states_of(idx))
        return single

    def states_of(self, row: int) -> Arrays:
        """A copy of the states of a row, shape (1, ...) each."""
        return tuple(mx.contiguous(a[row : row + 1]) for a in self.arrays)

    @property
    def remembers(self) -> bool:
        """Whether the states before the last write are still there."""
        before = _arrays(self._before)
        return self._num_written > 0 and len(before) == self.num_states

    def states_before(self, row: int) -> Arrays:
        """A copy of the states of a row before the last write, shape (1, ...) each.

        They are there if the cache :attr:`remembers` them.
        """
        return tuple(mx.contiguous(a[row : row + 1]) for a in _arrays(self._before))

    def _fill_row(self, arrays: Arrays, positions: Sequence[int], length: int) -> None:
        """Become one row of ``length`` tokens with these states."""
        self._storage.arrays = arrays
        self.offset = mx.array([length], mx.int32)
        self._longest, self._uniform = length, True

    @classmethod
    def _from_single(cls, single: Any) -> Self:
        if not isinstance(single, mlx_lm_cache.ArraysCache):
            return super()._from_single(single)
        row = cls(1, size=len(single.cache))
        if not single.empty():
            # mlx-lm's class does not know how many tokens are in it: one or more.
            row._fill_row(tuple(single.cache), (), 1)  # type: ignore[arg-type]
        return row

    @property
    def is_dense(self) -> bool:
        """States are never packed."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of what is needed to take back the last write."""
        before = [a.nbytes for a in self._before if a is not None]
        return self._storage.nbytes + sum(before) + self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the inputs of the last write, held to take tokens back."""
        return sum(a.nbytes for _, write in self._written for a in write.arrays)

    @property
    def written(self) -> Any:
        """As in the base class."""
        return self.state

    @property
    def state(self) -> tuple[Any, ...]:
        """All of the cache: states, offset and options."""
        self._settle()
        return self._slots, None, self.offset, ({**self._options}, [])

    @state.setter
    def state(self, v: tuple[Any, ...]) -> None:
        slots, _, offset, (options, _) = v
        vars(self).update(vars(self._like(0, **options)))
        self._store(slots)
        self._restore(offset)


def _arrays(slots: Slots) -> Arrays:
    return tuple(a for a in slots if a is not None)


def _written(
    written: Sequence[tuple[int, Write]], arrays: Arrays
) -> list[tuple[int, Write]]:
    """The same writes with other arrays, which are in the writes' order."""
    writes, first = [], 0
    for begin, write in written:
        last = first + len(write.arrays)
        writes.append((begin, write.holding(arrays[first:last])))
        first = last
    return writes


def _without_arrays(written: Sequence[tuple[int, Write]]) -> list[tuple[int, Write]]:
    nothing = mx.array(0)
    each = [(begin, write, len(write.arrays)) for begin, write in written]
    return [(begin, write.holding((nothing,) * n)) for begin, write, n in each]


def _array(counts: Kept) -> mx.array:
    if isinstance(counts, mx.array):
        return counts.astype(mx.int32)
    return mx.array(list(counts), mx.int32)


def _within(kept: Kept, begin: int, width: int) -> Kept:
    """How many of ``kept`` tokens are among the ``width`` from ``begin`` on."""
    if isinstance(kept, mx.array):
        return mx.clip(kept - begin, 0, width)
    return [min(max(n - begin, 0), width) for n in kept]


def select(kept: Kept, fewest: int, new: Slots, old: Slots) -> Slots:
    """``new`` for the rows that keep ``fewest`` tokens or more, ``old`` for others."""
    if not isinstance(kept, mx.array):
        if all(n >= fewest for n in kept):
            return new
        kept = _array(kept)
    which = kept >= fewest
    chosen: Slots = []
    for a, b in zip(new, old, strict=True):
        if a is None or a is b:
            chosen.append(a)
            continue
        rows = which.reshape(-1, *[1] * (a.ndim - 1))
        chosen.append(mx.where(rows, a, mx.zeros((), a.dtype) if b is None else b))
    return chosen
