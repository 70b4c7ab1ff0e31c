"""What rounds without proposals committed, for a draft's cache to catch up with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

# Rounds whose tokens are kept as they came, before they become one array.
_COMPACT = 64


@dataclass(frozen=True)
class Piece:
    """What is written with one forward.

    Args:
        tokens: of every row, shape (B, S).
        valid: how many of them are a row's own, the first ones; what follows is
            padding, which has to be taken back.
    """

    tokens: mx.array
    valid: Sequence[int]

    @property
    def width(self) -> int:
        """S, tokens of every row, padding included."""
        return int(self.tokens.shape[1])


class Backlog:
    """One token per row and round; rows that joined later missed fewer rounds.

    Nothing is computed while it grows: it holds on to arrays that the rounds have
    anyhow, a token's id of each.

    Args:
        num_rows: number of rows.
    """

    def __init__(self, num_rows: int):
        #: Rounds that each row missed; 0 for one that nobody needs (:meth:`reset`).
        self.counts = [0] * num_rows
        self._idle: set[int] = set()
        self._tokens: list[mx.array] = []
        self._compacted: mx.array | None = None

    @property
    def width(self) -> int:
        """Most rounds that a row missed."""
        return max(self.counts, default=0)

    @property
    def mean(self) -> int:
        """Rounds that a row missed, on average."""
        return round(sum(self.counts) / max(1, len(self.counts) - len(self._idle)))

    @property
    def _begun(self) -> list[int]:
        """The counts, idle rows taking whatever the others need: it is taken back."""
        width = self.width
        return [width if i in self._idle else n for i, n in enumerate(self.counts)]

    def add(self, tail: mx.array) -> None:
        """Note a round, by the last two tokens of each row when it began, (B, 2).

        A cache that lagged by two tokens before it now lacks the first of them.
        """
        self._tokens.append(tail)
        self.counts = [n + (i not in self._idle) for i, n in enumerate(self.counts)]
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

    def clear(self) -> None:
        """Forget all."""
        self._tokens, self._compacted = [], None
        self.counts = [0] * len(self.counts)

    def pieces(self, narrow: int, wide: int) -> Iterator[tuple[int, int]]:
        """Columns (first, last + 1) to write at a time, where each one costs.

        No row's tokens begin within a piece. As long as there are rows whose own
        have not begun, pieces are ``narrow``: what is written for those rows is
        padding, for which there is little room. Then they are ``wide``.
        """
        width, counts = self.width, self._begun
        begins = sorted({width - n for n in counts} | {0, width})
        for begin, end in pairwise(begins):
            step = wide if begin == width - min(counts) else narrow
            for first in range(begin, end, step):
                yield first, min(first + step, end)

    def exact(self, narrow: int, wide: int) -> Iterator[Piece]:
        """All of it, as :meth:`pieces` says: rows have all of a piece, or nothing."""
        tokens, width = self._compact(), self.width
        for first, end in self.pieces(narrow, wide):
            came = [first >= width - n for n in self._begun]
            yield Piece(tokens[:, first:end], [(end - first) * c for c in came])

    def padded(
        self, narrow: int, wide: int, fits: Callable[[int], bool]
    ) -> Iterator[Piece]:
        """All of it in two widths, where new ones cost: ``narrow`` for a short rest.

        All rows begin with the first piece, and have padding after what they missed.

        Args:
            fits: whether so many tokens have room after what every row has now.
                Where wide padding has none, pieces are narrow; where narrow padding
                has none, there is none.
        """
        tokens, width = self._compact(), self.width
        begins = mx.array([[width - n] for n in self._begun])
        first = 0
        while first < width:
            rest = width - first
            step = wide if rest > 2 * narrow and fits(first + wide) else narrow
            if not fits(first + step):
                step = min(step, rest)
            columns = mx.minimum(begins + mx.arange(first, first + step), width - 1)
            yield Piece(
                mx.take_along_axis(tokens, columns, axis=1),
                [min(max(n - first, 0), step) for n in self._begun],
            )
            first += step

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        before = self.width
        self.counts = [self.counts[i] for i in rows]
        self._idle = {new for new, i in enumerate(rows) if i in self._idle}
        if before:
            tokens = self._compact()[mx.array(list(rows), mx.int32)]
            self._hold(tokens[:, before - self.width :])

    def extend(self, other: Backlog) -> None:
        """Append the rows of ``other``."""
        parts = [self._compact(), other._compact()]
        self._idle |= {len(self.counts) + i for i in other._idle}
        self.counts += other.counts
        width = self.width
        self._hold(
            mx.concatenate(
                [mx.pad(p, [(0, 0), (width - p.shape[1], 0)]) for p in parts]
            )
        )

    def reset(self, rows: Sequence[int]) -> None:
        """The given rows have ended: nobody needs what they miss."""
        self._idle |= set(rows)
        if self.width:
            counts = [0 if i in rows else n for i, n in enumerate(self.counts)]
            self._aligned(self._compact(), counts)

    def place(self, rows: Sequence[int], other: Backlog) -> None:
        """Put the rows of ``other`` into the given ones."""
        self._idle -= set(rows)
        self._idle |= {row for i, row in enumerate(rows) if i in other._idle}
        counts = list(self.counts)
        for row, n in zip(rows, other.counts, strict=True):
            counts[row] = n
        if self.width or other.width:
            width = max(self.width, other.width)
            tokens, new = (
                mx.pad(p, [(0, 0), (width - p.shape[1], 0)])
                for p in (self._compact(), other._compact())
            )
            at = mx.broadcast_to(mx.array(list(rows), mx.int32)[:, None], new.shape)
            self._aligned(mx.put_along_axis(tokens, at, new, axis=0), counts)

    def _aligned(self, tokens: mx.array, counts: list[int]) -> None:
        """Hold ``tokens``, right-aligned, of which ``counts`` are each row's own."""
        self.counts = counts
        self._hold(tokens[:, tokens.shape[1] - self.width :])

    def _hold(self, tokens: mx.array) -> None:
        self._tokens = [tokens] if self.width else []
        self._compacted = tokens if self.width else None
