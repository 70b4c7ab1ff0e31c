"""A base and a tail: the newest tokens of rows, apart from all others.

MLX copies an array that a command in flight still reads, instead of writing into it. So
each of the k forwards of a draft would copy the whole cache. With a tail, they write,
and copy, a few columns; nothing writes to the base until the tail is full, or something
other than a round touches the cache. Attention of few queries reads both::

    base  [a b c d . . .]   tail  [A B . .]     starts = [4, 2]    offset = [6, 3]
          [e f . . . . .]         [E . . .]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from .positions import LinearLayout, positions_after

Arrays = tuple[mx.array, ...]


@dataclass(frozen=True, eq=False)
class Tail:
    """The columns of a tail, and what the host knows about them.

    For masks it is the layout of base and tail, side by side.

    Args:
        width: columns of a row.
        starts: tokens of each row in the base, shape (B,). Column ``j`` holds position
            ``starts + j``.
        longest: no row has more tokens in the base.
        most: no row has more tokens in the tail.
        fewest: no row has fewer tokens in the tail.
        arrays: keys and values, (B, H, width, D) each; empty before the first write.
    """

    width: int
    starts: mx.array
    longest: int
    most: int = 0
    fewest: int = 0
    arrays: Arrays = ()

    def fits(self, num_tokens: int, capacity: int) -> bool:
        """Whether it takes a write, and a base of ``capacity`` slots then takes it."""
        most = self.most + num_tokens
        return most <= self.width and self.longest + most <= capacity

    def written(self, updates: Arrays, offset: mx.array) -> Tail:
        """This tail with ``updates``, (B, H, S, D), after every row's last token."""
        num_tokens = updates[0].shape[2]
        if self.arrays:
            columns = self.slots(positions_after(offset, num_tokens))
            index = columns[:, None, :, None]
            pairs = zip(self.arrays, updates, strict=True)
            arrays = tuple(mx.put_along_axis(a, index, u, axis=2) for a, u in pairs)
        else:
            missing = [(0, 0), (0, 0), (0, self.width - num_tokens), (0, 0)]
            arrays = tuple(mx.pad(each, missing) for each in updates)
        most, fewest = self.most + num_tokens, self.fewest + num_tokens
        return replace(self, arrays=arrays, most=most, fewest=fewest)

    def trimmed(self, at_most: int | None, fewest: int) -> Tail | None:
        """This tail without the last tokens; ``None``: a row may lose others, too.

        Args:
            at_most, fewest: the most and the fewest tokens that a row loses.
        """
        if at_most is None or at_most > self.fewest:
            return None
        return replace(self, most=self.most - fewest, fewest=self.fewest - at_most)

    def flushed(self) -> tuple[Arrays, mx.array]:
        """What to write to the base, and the slots, shape (B, most)."""
        arrays = tuple(a[:, :, : self.most] for a in self.arrays)
        return arrays, positions_after(self.starts, self.most)

    # -- as a layout ---------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """More than columns are shown: some hold no position of a row."""
        return self.longest + self.width

    def slots(self, positions: mx.array) -> mx.array:
        """The tail's columns of positions, shape (B, S); those before have none."""
        return positions - self.starts[:, None]

    def held(self, num_slots: int, last: mx.array) -> mx.array:
        """The positions of the base's first columns, and of the tail's."""
        starts = self.starts[:, None]
        base = LinearLayout().held(num_slots - self.width, last)
        tail = starts + mx.arange(self.width)[None]
        return mx.concatenate([mx.where(base < starts, base, -1), tail], axis=1)
