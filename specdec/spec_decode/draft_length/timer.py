"""Times rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import RoundTiming


@dataclass
class _Begun:
    """A round that was dispatched; ``looks``: it peeks at what would be proposed."""

    num_draft_tokens: int
    limits: Sequence[int]
    rows: Sequence[int]
    backlog: int
    forced: bool
    at: float
    looks: bool = False


class StepTimer:
    """Measures how long rounds take.

    A round's time is from its beginning until it is read. If the host reads one round
    late, it is from one read to the next, and the next round is built in that time. So
    the time is fair only if the next round has the same k and no other work ran.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._begun: deque[_Begun] = deque()
        self._last_read = float("-inf")
        # When other work last ran, and when a round of new shapes was last built.
        self._interrupted = self._new_shape = float("-inf")

    @property
    def in_flight(self) -> list[int]:
        """k of each round that was not read yet."""
        return [b.num_draft_tokens for b in self._begun]

    def begin(
        self,
        k: int,
        limits: Sequence[int],
        rows: Sequence[int] = (),
        *,
        backlog: int = 0,
        forced: bool = False,
    ) -> None:
        """Note that a round is about to be built.

        Args:
            k: tokens that it drafts.
            limits: draft tokens that each slot may accept; -1 if no row runs there.
            rows: the rows' numbers.
            backlog: tokens of a row that the drafter lacks.
            forced: k was not chosen.
        """
        lag, now = backlog if k else 0, self._clock()
        self._begun.append(_Begun(k, limits, rows, lag, forced, now))

    def look(self) -> None:
        """Note that the round just begun peeks."""
        self._begun[-1].looks = True

    def interrupt(self, *, new_shape: bool = False) -> None:
        """Note that other work was dispatched, or that a round had new shapes."""
        if new_shape:
            self._new_shape = self._clock()
        else:
            self._interrupted = self._clock()

    def read(
        self, kept: Sequence[int | None], shadow: Sequence[tuple[int, int]] = ()
    ) -> RoundTiming:
        """Note that the oldest round was read.

        Args:
            kept: tokens that each slot kept; ``None`` if no row ran there.
            shadow: see :class:`~specdec.spec_decode.draft_length.RoundTiming`.
        """
        round_, now = self._begun.popleft(), self._clock()
        k, since = round_.num_draft_tokens, max(round_.at, self._last_read)
        overlapped = since > round_.at
        self._last_read = now
        meanwhile = self._begun
        # A round that overlaps the one before must overlap the next one, too.
        alike = overlapped == bool(meanwhile) and all(
            b.num_draft_tokens == k for b in meanwhile
        )
        looks = round_.looks or any(b.looks for b in meanwhile)
        running = [
            (i, limit, min(n - 1, limit))
            for i, (limit, n) in enumerate(zip(round_.limits, kept, strict=True))
            if n and limit > 0
        ]
        return RoundTiming(
            len(round_.limits),
            k,
            [(limit, accepted) for _, limit, accepted in running],
            now - since if since > self._interrupted else None,
            alike and not looks and since > self._new_shape,
            round_.backlog,
            [round_.rows[i] for i, *_ in running] if round_.rows else (),
            shadow,
            round_.forced,
        )
