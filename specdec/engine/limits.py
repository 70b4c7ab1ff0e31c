"""How many draft tokens each row of a batch may accept in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import mlx.core as mx

from ..request import Request
from ..spec_decode import Drafter

#: The least and the most tokens that a row can have in the target's cache.
LengthRange = tuple[int, int]
#: How many rounds in flight a row takes part in.
Pending = Callable[[Request], int]


class DraftLimits:
    """How many draft tokens rows can use, and the drafter can propose.

    Args:
        drafter: its context may be too short for a row; ``None`` drafts nothing.
        most: the largest k of any round.
        exact: do not draft more than a row may still emit. This is known only if
            rounds are read at once.
    """

    def __init__(self, drafter: Drafter | None, most: int, *, exact: bool):
        self.most = most if drafter else 0
        self._exact = exact
        context = drafter.context_length if drafter else None
        # The draft's cache takes all of its proposals but the last.
        self._longest = inf if context is None else context - self.most + 1
        self._last: tuple[tuple[int, ...], mx.array] | None = None

    def at(self, request: Request, length: int) -> int:
        """The most draft tokens that a row of ``length`` committed ones may accept."""
        if length > self._longest or not request.drafts:
            return 0
        own = request.params.num_draft_tokens
        return self.most if own is None else min(own, self.most)

    def of_use(self, request: Request, pending: Pending) -> int:
        """The most draft tokens that a running row can use in the next round.

        Tokens after the row's end are useless. The answer must depend on the row alone:
        with the ratio rules, the number of tokens that a row may accept decides what it
        emits.
        """
        if not self._exact:
            return self.most
        return min(self.most, max(request.remaining - pending(request) - 1, 0))

    def of(
        self,
        k: int,
        rows: Sequence[Request | None],
        bounds: Callable[[], Sequence[LengthRange]],
        pending: Pending,
    ) -> tuple[int, ...]:
        """The limit of each row for accepted draft tokens in a round of k; -1: ended.

        Some limits may be too high, as the host does not know how many tokens rounds in
        flight add; :meth:`array` corrects them.
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
        """The limits as an exact array; most rounds reuse the previous round's array.

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
