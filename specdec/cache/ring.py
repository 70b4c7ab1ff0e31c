"""Ring bookkeeping: what may be written, and how much can be taken back.

A ring of ``window + max_write - 1`` slots keeps, while up to ``max_write``
tokens are written, everything that their queries can see. Writing past a row's
end overwrites the row's oldest positions, so a row that has wrapped can take
back only what has not destroyed a position that would become visible again:
(tokens ever written) - offset <= ring - window + 1 = ``max_write``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, Unpack

import mlx.core as mx

from ..errors import CacheError
from .batch import BatchCache
from .capacity import grown_capacity, ring_slots
from .core import Options, Settings
from .positions import RingLayout, Rule, at_least
from .storage import Arrays, Codec


class RingCache(BatchCache):
    """A batch cache that holds the last ``window`` tokens (and ``keep`` first ones).

    Args:
        window: tokens that a query may see, its own included, sinks not counted.
        keep: first tokens of every row that stay (sinks).
        max_write: most tokens that one call writes once a row may have wrapped.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        codec: Codec,
        window: int,
        keep: int,
        max_write: int,
        rules: tuple[Rule, ...],
        options: Options,
        **settings: Unpack[Settings],
    ):
        if window < 1 or keep < 0:
            raise CacheError(
                f"a ring of window {window} and keep {keep} holds nothing: window "
                "must be 1 or more, keep 0 or more"
            )
        at_least("max_write", max_write, 1)
        super().__init__(
            batch_size,
            codec=codec,
            layout=RingLayout(window + max_write - 1, keep),
            rules=rules,
            options={**options, "max_write": max_write},
            **settings,
        )
        self.window = window
        self.keep = keep
        self.max_write = max_write
        # Host bounds over rows: tokens ever written, and how many of them were taken
        # back since a row may have wrapped.
        self._reach = 0
        self._undone = 0

    @property
    def _slots(self) -> int:
        return ring_slots(self.window, self.max_write, self.keep)

    def size(self) -> int:
        """Tokens held for the longest row, at most ``keep + window``."""
        return min(self._measure_longest(), self.keep + self.window)

    def _longest_after(self, num_tokens: int) -> int:
        longest = super()._longest_after(num_tokens)
        if num_tokens > self.max_write and longest > self._slots:
            # A loose bound must not refuse what a short row can take.
            longest = self._measure_longest() + num_tokens
        return longest

    def _check_write(self, num_tokens: int, longest: int) -> None:
        if num_tokens > self.max_write and longest > self._slots:
            raise CacheError(
                f"{num_tokens} tokens in one write would overwrite what they attend "
                f"to: this ring takes {self.max_write} at a time (max_write)"
            )

    def _count(self, num_tokens: int, longest: int) -> None:
        self._reach = max(self._reach, longest)
        self._undone = max(0, self._undone - num_tokens)
        super()._count(num_tokens, longest)

    def is_trimmable(self) -> bool:
        """Whether any token can be taken back now."""
        return self._trim_budget() != 0

    def _trim_budget(self) -> int | None:
        if self._reach <= self._slots:
            return None
        return self.max_write - self._undone

    def _note_trim(self, at_most: int | None) -> None:
        budget = self._trim_budget()
        if budget is None:
            return
        if at_most is None or at_most > budget:
            raise CacheError(
                f"{at_most} tokens cannot be taken back: this ring has wrapped and "
                f"can undo {budget}; make it with a larger max_write"
            )
        self._undone += at_most

    def resize(self, max_write: int) -> None:
        """Re-lay the ring for writes of up to ``max_write`` tokens: one gather.

        Shrinking after prefill returns memory; only the newest
        ``keep + window + max_write - 1`` positions stay.

        Raises:
            CacheError: ``max_write`` is less than 1.
        """
        at_least("max_write", max_write, 1)
        if max_write == self.max_write:
            return
        longest = self._measure_longest()
        wrapped = self._reach > self._slots
        old, old_capacity = self.layout, self.capacity
        # The slots that a wider ring gains hold nothing that could come back.
        gained = max_write - self.max_write
        self._undone = max(0, self._undone + gained) if wrapped else 0
        self.max_write = self._options["max_write"] = max_write
        self.layout = RingLayout(self.window + max_write - 1, self.keep)
        self._reach = max(longest, self._slots + 1) if wrapped else longest
        if self.empty():
            return
        capacity = grown_capacity(self._slots_needed(longest), self._limit())
        offset, layout = self.offset, self.layout

        def sources() -> mx.array:
            held = layout.held(capacity, offset - 1)
            return mx.minimum(old.slots(mx.maximum(held, 0)), old_capacity - 1)

        params = (capacity, old_capacity)
        self._storage.take_slots(
            self._memo.get(("relay", old, layout), (offset,), params, sources)
        )

    def _same_shape(self, others: Sequence[Self]) -> None:
        parts = [self, *others]
        if len({(p.window, p.keep) for p in parts}) > 1:
            raise CacheError("rings of different window or keep cannot be joined")
        widest = max(p.max_write for p in parts)
        for part in parts:
            part.resize(widest)

    def place(self, rows: Sequence[int], other: Self) -> None:
        # This makes the layouts equal, which changes what each can undo.
        super().place(rows, other)
        if rows:
            self._reach = max(self._reach, other._reach)
            self._undone = max(self._undone, other._undone)

    def clean(self, rows: Sequence[int], width: int) -> None:
        """As in the base class; it counts as writing the tokens and taking them back.

        Raises:
            CacheError: ``width`` is more than the ring takes at a time.
        """
        longest = self._longest + width
        self._check_write(width, longest)
        self._reach = max(self._reach, longest)
        if self._reach > self._slots:
            self._undone = max(self._undone, width)
        super().clean(rows, width)

    def _join(self, parts: Sequence[Self]) -> None:
        self._same_shape(parts)  # changes what the parts can undo
        filled = [p for p in parts if p.batch_size]
        reach = max((p._reach for p in filled), default=0)
        undone = max((p._undone for p in filled), default=0)
        super()._join(parts)
        self._reach, self._undone = reach, undone

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._reach = self._undone = 0

    def _row_positions(self, length: int) -> list[int]:
        # After a trim the oldest position may be overwritten: the next query does not
        # see it any more, but mlx-lm's cache needs its slot.
        if length <= self.keep + self.window:
            return list(range(length))
        return [*range(self.keep), *range(length - self.window, length)]

    def _fill_row(self, arrays: Arrays, positions: Sequence[int], length: int) -> None:
        """As in the base class; missing positions count as lost in a wrap."""
        ring = self._slots - self.keep
        held = [
            (slot, p)
            for slot, p in enumerate(positions)
            if p < self.keep or p >= length - ring
        ]
        chosen = mx.array([slot for slot, _ in held])
        kept = [p for _, p in held]
        super()._fill_row(tuple(a[:, :, chosen] for a in arrays), kept, length)
        self._reach, self._undone = length, 0
        if length >= self.keep + self.window:
            oldest = next(p for p in kept if p >= self.keep)
            self._reach = max(length, self._slots + 1)
            # One more, because an extracted row's oldest may be stale (_row_positions).
            self._undone = min(max(0, oldest + 1 + ring - length), self.max_write)

    def _bookkeeping(self) -> tuple[int, ...]:
        return self._reach, self._undone

    def _restore_bookkeeping(self, counters: tuple[int, ...]) -> None:
        self._reach, self._undone = counters or (self._longest, 0)
