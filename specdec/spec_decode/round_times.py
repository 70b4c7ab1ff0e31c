"""What a round that was read shows: its time and what its rows accepted. No mlx."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundTiming:
    """A round that was read: its time, and what its rows accepted.

    Args:
        num_rows: rows that were computed.
        num_draft_tokens: k.
        accepted: (draft tokens that it could accept, accepted) for each running row.
        seconds: the round's time; ``None`` if it is unknown.
        fair: whether another round of the same shapes would take as long. If not,
            the seconds include a new shape, a prompt, or a round of another k.
        backlog: tokens of a row that the drafter took in first.
        rows: numbers of the rows in ``accepted``.
        forced: k was not chosen, since no row could use a draft token.
        joining: prompts were prefilled beside the round.
    """

    num_rows: int
    num_draft_tokens: int
    accepted: Sequence[tuple[int, int]]
    seconds: float | None = None
    fair: bool = True
    backlog: int = 0
    rows: Sequence[int] = ()
    forced: bool = False
    joining: bool = False


class StepTimer:
    """Measures how long rounds take.

    A round's time is from its beginning until it is read. If the host reads one round
    late, it is from one read to the next, and the next round is built in that time. So
    the time is fair only if the next round has the same k and no other work ran.

    Args:
        clock: seconds, more than 0.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        # When a round was last built and last read, when other work last ran, and when
        # a round of new shapes was last built.
        self._built = self._read = float("-inf")
        self._interrupted = self._new_shape = float("-inf")

    def begin(self) -> float:
        """Note that a round is about to be built; return when that is."""
        self._built = self._clock()
        return self._built

    def interrupt(self, *, new_shape: bool = False) -> None:
        """Note that other work was dispatched, or that a round had new shapes."""
        if new_shape:
            self._new_shape = self._clock()
        else:
            self._interrupted = self._clock()

    def read(self, began: float, alike: Sequence[bool]) -> tuple[float, bool, bool]:
        """Note that a round was read.

        Args:
            began: when it began to be built.
            alike: for each round that is in flight, whether it does the same.

        Returns:
            Its seconds; whether another round like it would take as long; and whether
            other work ran beside it.
        """
        now, since = self._clock(), max(began, self._read)
        overlapped, joining = since > began, since <= self._interrupted
        self._read = now
        # A round that overlaps the one before must overlap the next one, too.
        fair = overlapped == bool(alike) and all(alike) and since > self._new_shape
        return now - since, fair and not joining, joining
