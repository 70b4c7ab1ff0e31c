"""What is committed of the rows of a batch, as far as rounds look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Committed:
    """Each row's newest tokens, and how many it has; on the device.

    Args:
        recent: the newest tokens, the last one last, shape (B, W), int32; -1 in
            front of a row that has fewer. Of one that has ended they mean nothing.
        lengths: tokens of every row, the prompt included, shape (B,), int32.
    """

    recent: mx.array
    lengths: mx.array

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], width: int) -> Committed:
        """Prompts, with the newest ``width`` tokens of each."""
        newest = [list(p[-width:]) for p in prompts]
        recent = [[-1] * (width - len(p)) + p for p in newest]
        return cls(
            mx.array(recent, mx.int32), mx.array([len(p) for p in prompts], mx.int32)
        )

    @property
    def newest(self) -> mx.array:
        """The last token of every row, shape (B, 1)."""
        return self.recent[:, -1:]

    def placed(self, rows: Sequence[int], other: Committed) -> Committed:
        """These, with ``other`` in the given rows."""
        width = max(self.recent.shape[1], other.recent.shape[1])
        at, new = mx.array(list(rows), mx.int32), other.within(width).recent
        index = mx.broadcast_to(at[:, None], new.shape)
        return Committed(
            mx.put_along_axis(self.within(width).recent, index, new, axis=0),
            mx.put_along_axis(self.lengths, at, other.lengths, axis=0),
        )

    def joined(self, other: Committed) -> Committed:
        """These rows, then those of ``other``."""
        width = max(self.recent.shape[1], other.recent.shape[1])
        return Committed(
            mx.concatenate([self.within(width).recent, other.within(width).recent]),
            mx.concatenate([self.lengths, other.lengths]),
        )

    def only(self, rows: Sequence[int]) -> Committed:
        """The given rows, in that order."""
        which = mx.array(list(rows), mx.int32)
        return Committed(self.recent[which], self.lengths[which])

    def within(self, width: int) -> Committed:
        """The same with the newest ``width`` tokens of each row."""
        missing = width - self.recent.shape[1]
        if not missing:
            return self
        recent = self.recent[:, -width:]
        if missing > 0:
            recent = mx.pad(recent, [(0, 0), (missing, 0)], constant_values=-1)
        return Committed(recent, self.lengths)
