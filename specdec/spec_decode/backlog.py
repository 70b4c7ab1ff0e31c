"""The tokens of rounds without a draft, for a draft's cache to catch up with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from ..cache import put_rows

# After so many rounds, their tokens are joined to one array.
_COMPACT = 64


@dataclass(frozen=True)
class Piece:
    """What one forward writes.

    Args:
        tokens: shape (B, S).
        valid: how many tokens of each row are its own. They come first; the rest is
            padding, which has to be taken back.
    """

    tokens: mx.array
    valid: Sequence[int]

    @property
    def width(self) -> int:
        """S: tokens of every row, padding included."""
        return int(self.tokens.shape[1])


class Backlog:
    """The missed tokens: one per row and round. Rows that joined later missed fewer.

    Nothing is computed while it grows: it refers to arrays that the rounds have anyway.

    Args:
        num_rows: number of rows.
    """

    def __init__(self, num_rows: int):
        #: Rounds that each row missed; 0 for rows that have ended (:meth:`reset`).
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
        """The counts, where idle rows count as the longest: theirs is taken back."""
        width = self.width
        return [width if i in self._idle else n for i, n in enumerate(self.counts)]

    def add(self, tail: mx.array) -> None:
        """Note a round without a draft.

        Args:
            tail: each row's last two tokens before the round, shape (B, 2). The next
                round's tail begins with the second, so the first is noted.
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
        """Columns (first, last + 1) of each piece, where every column costs time.

        No row's tokens begin within a piece. While some rows' tokens have not begun,
        pieces are ``narrow``, since those rows get padding and have little room for it.
        After that they are ``wide``.
        """
        width, counts = self.width, self._begun
        begins = sorted({width - n for n in counts} | {0, width})
        for begin, end in pairwise(begins):
            step = wide if begin == width - min(counts) else narrow
            for first in range(begin, end, step):
                yield first, min(first + step, end)

    def exact(self, narrow: int, wide: int) -> Iterator[Piece]:
        """All tokens, cut as :meth:`pieces` says: a row has all of a piece or none."""
        tokens, width = self._compact(), self.width
        for first, end in self.pieces(narrow, wide):
            came = [first >= width - n for n in self._begun]
            yield Piece(tokens[:, first:end], [(end - first) * c for c in came])

    def padded(
        self, narrow: int, wide: int, fits: Callable[[int], bool]
    ) -> Iterator[Piece]:
        """All tokens in pieces of two widths, since new widths take time.

        All rows begin with the first piece, and are padded at their end.

        Args:
            fits: whether every row's cache has room for so many more tokens. Without
                room for a wide piece, pieces are narrow; without room for a narrow
                one, there is no padding.
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
        """Keep only the given rows."""
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
        """The given rows have ended: what they missed is not needed."""
        self._idle |= set(rows)
        if self.width:
            counts = [0 if i in rows else n for i, n in enumerate(self.counts)]
            self._aligned(self._compact(), counts)

    def place(self, rows: Sequence[int], other: Backlog) -> None:
        """Put the first rows of ``other`` in the place of the given ones."""
        self._idle -= set(rows)
        self._idle |= {row for i, row in enumerate(rows) if i in other._idle}
        counts = list(self.counts)
        for i, row in enumerate(rows):
            counts[row] = other.counts[i]
        if self.width or other.width:
            width = max(self.width, other.width)
            tokens, new = (
                mx.pad(p, [(0, 0), (width - p.shape[1], 0)])
                for p in (self._compact(), other._compact())
            )
            self._aligned(put_rows(tokens, rows, new), counts)

    def _aligned(self, tokens: mx.array, counts: list[int]) -> None:
        """Hold right-aligned ``tokens``; ``counts`` are each row's own."""
        self.counts = counts
        self._hold(tokens[:, tokens.shape[1] - self.width :])

    def _hold(self, tokens: mx.array) -> None:
        self._tokens = [tokens] if self.width else []
        self._compacted = tokens if self.width else None
