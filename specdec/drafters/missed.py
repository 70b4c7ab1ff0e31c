"""What rounds without proposals committed, for a draft's cache to catch up with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import mlx.core as mx

# Rounds whose tokens are kept as they came, before they become one array.
_COMPACT = 64


class Missed:
    """One token per row and round; rows that joined later missed fewer rounds.

    Nothing is computed while it grows: it holds on to arrays that the rounds have
    anyhow, a token's id of each.

    Args:
        num_rows: number of rows.
    """

    def __init__(self, num_rows: int):
        #: Rounds that each row missed.
        self.counts = [0] * num_rows
        self._tokens: list[mx.array] = []
        self._compacted: mx.array | None = None

    @property
    def width(self) -> int:
        """Most rounds that a row missed."""
        return max(self.counts, default=0)

    def add(self, tail: mx.array) -> None:
        """Note a round, by the last two tokens of each row when it began, (B, 2).

        A cache that was two tokens behind before it now lacks the first of them.
        """
        self._tokens.append(tail)
        self.counts = [n + 1 for n in self.counts]
        if len(self._tokens) >= _COMPACT:
            self._compact()

    def _compact(self) -> mx.array:
        """All tokens, shape (B, W), right-aligned."""
        columns = [t if t is self._compacted else t[:, :1] for t in self._tokens]
        if not columns:
            return mx.zeros((len(self.counts), 0), mx.int32)
        tokens = mx.concatenate(columns, axis=1)
        mx.async_eval(tokens)
        self._tokens = [tokens]
        self._compacted = tokens
        return tokens

    def take(self) -> mx.array:
        """All tokens, shape (B, W), a row's own at the right; none are left."""
        tokens = self._compact()
        self.clear()
        return tokens

    def clear(self) -> None:
        """Forget all."""
        self._tokens, self._compacted = [], None
        self.counts = [0] * len(self.counts)

    def pieces(self, narrow: int, wide: int) -> Iterator[tuple[int, int]]:
        """Columns (first, last + 1) to write at a time.

        No row's tokens begin within a piece. As long as there are rows whose own
        have not begun, pieces are ``narrow``: what is written for those rows is
        padding, for which there is little room. Then they are ``wide``.
        """
        width = self.width
        begins = sorted({width - n for n in self.counts} | {0, width})
        for begin, end in pairwise(begins):
            step = wide if begin == width - min(self.counts) else narrow
            for first in range(begin, end, step):
                yield first, min(first + step, end)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        before = self.width
        self.counts = [self.counts[i] for i in rows]
        if before:
            tokens = self._compact()[mx.array(list(rows), mx.int32)]
            self._hold(tokens[:, before - self.width :])

    def extend(self, other: Missed) -> None:
        """Append the rows of ``other``."""
        parts = [self._compact(), other._compact()]
        self.counts += other.counts
        width = self.width
        self._hold(
            mx.concatenate(
                [mx.pad(p, [(0, 0), (width - p.shape[1], 0)]) for p in parts]
            )
        )

    def _hold(self, tokens: mx.array) -> None:
        self._tokens = [tokens] if self.width else []
        self._compacted = tokens if self.width else None
