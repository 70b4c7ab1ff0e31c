"""Ring bookkeeping: what may be written, and how much can be taken back.

A ring of ``window + max_write - 1`` slots keeps, while up to ``max_write``
tokens are written, everything that their queries can see. Writing past a row's
end overwrites the row's oldest positions, so a row that has wrapped can take
back only what has not destroyed a position that would become visible again:
(tokens ever written) - offset <= ring - window + 1 = ``max_write``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import mlx.core as mx

from ..errors import CacheError
from .batch import BatchCache
from .memo import Memo
from .positions import RingLayout, Rule, grown_capacity
from .storage import Codec


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
        max_length: int | None,
        read_bucket: int,
        memo: Memo | None,
        options: Mapping[str, int | None],
    ):
        if window < 1 or keep < 0:
            raise CacheError(
                f"a ring of window {window} and keep {keep} holds nothing: window "
                "must be 1 or more, keep 0 or more"
            )
        if not 1 <= max_write:
            raise CacheError(f"max_write is {max_write}: it must be 1 or more")
        super().__init__(
            batch_size,
            codec=codec,
            layout=RingLayout(window + max_write - 1, keep),
            rules=rules,
            max_length=max_length,
            read_bucket=read_bucket,
            memo=memo,
            options={**options, "max_write": max_write},
        )
        self.window = window
        self.keep = keep
        self.max_write = max_write
        # Host bounds over rows: tokens ever written, and, for rows that may
        # have wrapped, how many of those are taken back.
        self._reach = 0
        self._undone = 0

    @property
    def _slots(self) -> int:
        return self.keep + self.window + self.max_write - 1

    def size(self) -> int:
        """Tokens held for the longest row, at most ``keep + window``."""
        return min(self._measure_longest(), self.keep + self.window)

    def _check_write(self, num_tokens: int, longest: int) -> None:
        if num_tokens <= self.max_write or longest <= self._slots:
            return
        if self._measure_longest() + num_tokens > self._slots:
            raise CacheError(
                f"{num_tokens} tokens in one write would overwrite what they attend "
                f"to: this ring takes {self.max_write} at a time (max_write)"
            )

    def _advance(self, num_tokens: int, longest: int) -> None:
        self._reach = max(self._reach, longest)
        self._undone = max(0, self._undone - num_tokens)
        super()._advance(num_tokens, longest)

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
        """
        if max_write == self.max_write:
            return
        longest = self._measure_longest()
        wrapped = self._reach > self._slots
        old, old_capacity = self.layout, self.capacity
        # Of a wider ring, the slots gained hold nothing that could come back.
        gained = max_write - self.max_write
        self._undone = max(0, self._undone + gained) if wrapped else 0
        self.max_write = self._options["max_write"] = max_write
        self.layout = RingLayout(self.window + max_write - 1, self.keep)
        self._reach = max(longest, self._slots + 1) if wrapped else longest
        if self.empty() or not self.batch_size:
            return
        needed = self._slots_needed(longest)
        capacity = grown_capacity(needed, self._limit())
        held = self.layout.held(capacity, self.offset - 1)
        source = mx.minimum(old.slots(mx.maximum(held, 0)), old_capacity - 1)
        self._storage.take_slots(source)

    def _same_shape(self, others: Sequence[Self]) -> None:
        parts = [self, *others]
        if len({(p.window, p.keep) for p in parts}) > 1:
            raise CacheError("rings of different window or keep cannot be joined")
        widest = max(p.max_write for p in parts)
        for part in parts:
            part.resize(widest)

    def _join(self, parts: Sequence[Self]) -> None:
        super()._join(parts)
        self._reach = max((p._reach for p in parts), default=0)
        self._undone = max((p._undone for p in parts), default=0)

    def _row_positions(self, length: int) -> list[int]:
        if length <= self.keep + self.window:
            return list(range(length))
        return [*range(self.keep), *range(length - self.window, length)]

    def _fill_row(
        self, arrays: tuple[mx.array, ...], positions: Sequence[int], length: int
    ) -> None:
        super()._fill_row(arrays, positions, length)
        self._reach = length

    def _bookkeeping(self) -> tuple[int, ...]:
        return self._reach, self._undone

    def _restore_bookkeeping(self, counters: tuple[int, ...]) -> None:
        self._reach, self._undone = counters or (self._longest, 0)
