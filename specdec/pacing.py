"""Between a batch and the choice of its draft length: clocks and counts. No mlx."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from .lengths import BatchState, DraftLength, RoundOutcome


@dataclass(frozen=True)
class _Pending:
    """A round that was handed out: k, the rows' limits, when, behind what, of whom.

    ``forced``: k was not chosen, as nothing could be drafted. ``timed``: whether its
    time says what such a round costs.
    """

    num_draft_tokens: int
    limits: tuple[int, ...]
    begun: float
    undrafted: int
    rows: AbstractSequence[int]
    forced: bool
    timed: bool


class Pacer:
    """Tells a draft length what rounds took and what became of them.

    A round's time runs from when it was begun until it is read, if nothing else ran
    in between. Where the host reads one round behind, it is the time between two
    reads; in that time the next round is built, which may take longest. So it is
    told only of a round between two others, the next one of the same k.

    Args:
        length: chooses k.
        clock: seconds.
        undrafted: tokens that the drafter has to catch up with from the beginning.
    """

    def __init__(
        self,
        length: DraftLength,
        clock: Callable[[], float] = time.perf_counter,
        *,
        undrafted: float = 0.0,
    ):
        self._length = length
        self._clock = clock
        self._pending: deque[_Pending] = deque()
        self._last_read = self._interrupted = float("-inf")
        # Tokens that the drafter has to catch up with, per row on average, and whether
        # it did that between rounds: then a round pays for it, but has not done it.
        self._undrafted = undrafted
        self._taken_in = False
        self._forced = False

    @property
    def undrafted(self) -> int:
        """Tokens of a row that the drafter has to catch up with."""
        return round(self._undrafted)

    def choose(
        self,
        num_rows: int,
        room: AbstractSequence[int],
        remaining: float,
        left: Mapping[int, int] | None = None,
    ) -> int:
        """k of the next round; see :class:`~specdec.lengths.BatchState`.

        0 without asking where no row has room.
        """
        self._forced = not any(room)
        if self._forced:
            return 0
        in_flight = [p.num_draft_tokens for p in self._pending]
        undrafted = self.undrafted
        return self._length.choose(
            BatchState(num_rows, room, remaining, undrafted, in_flight, left or {})
        )

    def defer(self) -> int:
        """k of a round in which nothing can be drafted yet: 0."""
        self._forced = True
        return 0

    def note_taken_in(self) -> None:
        """The drafter has caught up, between rounds."""
        self._taken_in = True

    def begin(
        self,
        num_draft_tokens: int,
        limits: tuple[int, ...],
        rows: AbstractSequence[int] = (),
    ) -> None:
        """A round is about to be built; ``limits`` are -1 for rows that have ended."""
        k, undrafted = num_draft_tokens, self.undrafted
        self._undrafted = 0.0 if k else self._undrafted + 1
        timed = not (k and self._taken_in)
        self._taken_in = self._taken_in and not k
        now = self._clock()
        self._pending.append(
            _Pending(k, limits, now, undrafted if k else 0, rows, self._forced, timed)
        )

    def read(self, kept: AbstractSequence[int | None]) -> None:
        """The oldest round was read: what each row kept; ``None``: it had ended."""
        round_, now = self._pending.popleft(), self._clock()
        began = max(round_.begun, self._last_read)
        behind_another = began > round_.begun
        self._last_read = now
        alike = all(
            p.num_draft_tokens == round_.num_draft_tokens for p in self._pending
        )
        timed = round_.timed and alike and behind_another == bool(self._pending)
        told = [
            (i, limit, min(n - 1, limit))
            for i, (limit, n) in enumerate(zip(round_.limits, kept, strict=True))
            if n and limit > 0
        ]
        self._length.observe(
            RoundOutcome(
                len(round_.limits),
                round_.num_draft_tokens,
                [(limit, accepted) for _, limit, accepted in told],
                now - began if timed and began > self._interrupted else None,
                round_.undrafted,
                [round_.rows[i] for i, *_ in told] if round_.rows else (),
                round_.forced,
            )
        )

    def interrupt(self) -> None:
        """Other work came between rounds: those in flight are not timed."""
        self._interrupted = self._clock()

    def join(self, before: int, joined: int, missed: float = 0.0) -> None:
        """Rows have joined, of each of which the drafter missed so much."""
        all_missed = self._undrafted * before + missed * joined
        self._undrafted = all_missed / (before + joined)
