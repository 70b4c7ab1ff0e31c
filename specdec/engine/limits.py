"""How many draft tokens each row of a batch may accept in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import mlx.core as mx

from ..request import Request
from ..spec_decode import Drafter

#: Least and most tokens of a row that are committed but for the last.
LengthRange = tuple[int, int]
#: Rounds in flight that a row takes part in.
Pending = Callable[[Request], int]


class DraftLimits:
    """What draft tokens are of use to rows, and what the drafter can serve.

    Args:
        drafter: may have a context that rows outgrow; ``None`` drafts nothing.
        most: the largest k of any round.
        exact: look at what is left of a row; where rounds are read late that is not
            known.
    """

    def __init__(self, drafter: Drafter | None, most: int, *, exact: bool):
        self.most = most if drafter else 0
        self._exact = exact
        context = drafter.context_length if drafter else None
        # The draft writes all but the last of what it proposes.
        self._longest = inf if context is None else context - self.most + 1
        self._last: tuple[tuple[int, ...], mx.array] | None = None

    def at(self, sequence: Request, length: int) -> int:
        """Draft tokens that a row of ``length`` committed tokens may accept."""
        if length > self._longest or not sequence.drafts:
            return 0
        own = sequence.params.num_draft_tokens
        return self.most if own is None else min(own, self.most)

    def of_use(self, sequence: Request, pending: Pending) -> int:
        """Most draft tokens that a running row can use in the next round.

        Nothing after the last token that it may emit is of use, where that is looked
        at. It depends on the row alone: with the ratio rules, how many tokens a row may
        accept decides what it emits.

        Args:
            pending: in how many rounds in flight a row takes part.
        """
        if not self._exact:
            return self.most
        return min(self.most, max(sequence.remaining - pending(sequence) - 1, 0))

    def of(
        self,
        k: int,
        rows: Sequence[Request | None],
        bounds: Callable[[], Sequence[LengthRange]],
        pending: Pending,
    ) -> tuple[int, ...]:
        """Draft tokens that each row may accept in a round of k; -1: it has ended.

        Too many, perhaps, where a row's length in flight is not known.
        """
        if not k:
            return tuple([0 if s and s.finish_reason is None else -1 for s in rows])
        lengths = [0] * len(rows)
        if self._longest < inf:
            lengths = [least + 1 for least, _ in bounds()]
        return tuple(
            -1
            if s is None or s.finish_reason is not None
            else min(k, self.of_use(s, pending), self.at(s, length))
            for s, length in zip(rows, lengths, strict=True)
        )

    def array(
        self,
        limits: tuple[int, ...],
        bounds: Callable[[], Sequence[LengthRange]],
        lengths: mx.array,
    ) -> mx.array:
        """The limits on the device, exact; most rounds have those of the one before.

        Args:
            lengths: committed tokens of every row, shape (B,).
        """
        if self._last is None or self._last[0] != limits:
            self._last = limits, mx.array(limits, mx.int32)
        limit = self._last[1]
        if self._longest < inf and max(m for _, m in bounds()) + 1 > self._longest:
            fits = lengths <= self._longest
            limit = mx.where(fits, limit, mx.minimum(limit, 0))
        return limit
