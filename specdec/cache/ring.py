"""Ring bookkeeping: what may be written, and how much can be taken back.

A ring of ``window + max_write - 1`` slots keeps, while up to ``max_write``
tokens are written, everything that their queries can see. Writing past a row's
end overwrites the row's oldest positions, so a row that has wrapped can take
back only what has not destroyed a position that would become visible again:
(tokens ever written) - offset <= ring - window + 1 = ``max_write``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import CacheError
from .capacity import ring_slots
from .positions import RingLayout, at_least


class Ring:
    """What the host knows about the rows of a ring, without reading the device.

    A cache with a ring asks it before each write and trim.

    Args:
        window: tokens that a query may see, its own included, sinks not counted.
        keep: first tokens of every row that stay (sinks).
        max_write: most tokens that one call writes once a row may have wrapped.

    Attributes:
        layout: which slot holds which position.
        slots: slots of a row, the pinned ones included.
        reach: tokens ever written to any row, an upper bound.
        undone: how many of them were taken back since a row may have wrapped.

    Raises:
        CacheError: an argument is out of range.
    """

    def __init__(self, window: int, keep: int, max_write: int):
        if window < 1 or keep < 0:
            raise CacheError(
                f"a ring of window {window} and keep {keep} holds nothing: window "
                "must be 1 or more, keep 0 or more"
            )
        self.window, self.keep = window, keep
        self.reach = self.undone = 0
        self._lay(max_write)

    def _lay(self, max_write: int) -> None:
        self.max_write = at_least("max_write", max_write, 1)
        self.layout = RingLayout(self.window + max_write - 1, self.keep)
        self.slots = ring_slots(self.window, max_write, self.keep)

    @property
    def size(self) -> int:
        """The most tokens of a row that a query can see."""
        return self.keep + self.window

    @property
    def budget(self) -> int | None:
        """Tokens per row that can be taken back now; ``None``: all of them."""
        return None if self.reach <= self.slots else self.max_write - self.undone

    def takes(self, num_tokens: int, longest: int) -> bool:
        """Whether a write leaves all that its own queries see.

        Args:
            longest: tokens of the longest row after the write.
        """
        return num_tokens <= self.max_write or longest <= self.slots

    def check(self, num_tokens: int, longest: int) -> None:
        """Raise :class:`CacheError` unless the ring :meth:`takes` the write."""
        if not self.takes(num_tokens, longest):
            raise CacheError(
                f"{num_tokens} tokens in one write would overwrite what they attend "
                f"to: this ring takes {self.max_write} at a time (max_write)"
            )

    def write(self, num_tokens: int, longest: int) -> None:
        """Account for a write, which was checked."""
        self.reach = max(self.reach, longest)
        self.undone = max(0, self.undone - num_tokens)

    def trim(self, at_most: int | None) -> None:
        """Account for a trim of up to ``at_most`` tokens (``None``: any number).

        Raises:
            CacheError: they cannot be taken back.
        """
        budget = self.budget
        if budget is None:
            return
        if at_most is None or at_most > budget:
            raise CacheError(
                f"{at_most} tokens cannot be taken back: this ring has wrapped and "
                f"can undo {budget}; make it with a larger max_write"
            )
        self.undone += at_most

    def clean(self, width: int, longest: int) -> None:
        """Account for slots that are zeroed: a write of ``width`` and its trim.

        Raises:
            CacheError: ``width`` is more than the ring takes at a time.
        """
        self.check(width, longest)
        self.reach = max(self.reach, longest)
        if self.budget is not None:
            self.undone = max(self.undone, width)

    def resize(self, max_write: int, longest: int) -> None:
        """Lay the ring for other writes; rows have up to ``longest`` tokens."""
        wrapped = self.budget is not None
        # The slots that a wider ring gains hold nothing that could come back.
        gained = max_write - self.max_write
        self.undone = max(0, self.undone + gained) if wrapped else 0
        self._lay(max_write)
        self.reach = max(longest, self.slots + 1) if wrapped else longest

    def join(self, rings: Iterable[Ring]) -> None:
        """Account for the rows of ``rings``, of the same layout, and no others."""
        known = [(ring.reach, ring.undone) for ring in rings]
        self.reach = max((reach for reach, _ in known), default=0)
        self.undone = max((undone for _, undone in known), default=0)

    def positions(self, length: int) -> list[int]:
        """Positions that a row of ``length`` tokens hands to mlx-lm's cache."""
        # After a trim the oldest position may be overwritten: the next query does not
        # see it any more, but mlx-lm's cache needs its slot.
        if length <= self.size:
            return list(range(length))
        return [*range(self.keep), *range(length - self.window, length)]

    def holds(self, positions: Sequence[int], length: int) -> list[int]:
        """Indices of the ``positions`` that a row of ``length`` tokens has room for."""
        oldest = length - (self.slots - self.keep)
        return [i for i, p in enumerate(positions) if p < self.keep or p >= oldest]

    def fill(self, positions: Sequence[int], length: int) -> None:
        """Account for one row that holds ``positions``; others are lost in a wrap."""
        self.reach, self.undone = length, 0
        if length >= self.size:
            oldest = next(p for p in positions if p >= self.keep)
            self.reach = max(length, self.slots + 1)
            # One more, because an extracted row's oldest may be stale (positions).
            lost = oldest + 1 + self.slots - self.keep - length
            self.undone = min(max(0, lost), self.max_write)
