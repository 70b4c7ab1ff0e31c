"""What a round that was read shows: its time, and what its rows accepted. No mlx here.

A round without a draft may peek: it compares what a drafter would have proposed with
what rows then emit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# A peek takes time, and rounds beside it cannot be timed: half of the rounds peek, or
# one of REST if the last REST / 2 peeks were wrong.
REST = 8


@dataclass(frozen=True)
class RoundTiming:
    """A round that was read: its time, and what its rows accepted.

    Args:
        num_rows: rows that were computed.
        num_draft_tokens: k.
        accepted: (draft tokens that it could accept, accepted) for each running row.
        seconds: the round's time; ``None`` if it is unknown.
        fair: whether another round of the same shapes would take as long. If not,
            the seconds include a new shape, a peek, a prompt, or a round of another k.
        backlog: tokens of a row that the drafter took in first.
        rows: numbers of the rows in ``accepted``.
        shadow: for a round that drafted nothing: (tokens compared, right) at each
            position of what would have been proposed.
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
    shadow: Sequence[tuple[int, int]] = ()
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


@dataclass(frozen=True)
class Peek:
    """A row in a round without a draft.

    Args:
        row: its number.
        token: the token that it emitted.
        proposed: what would have been proposed; ``None`` if the round did not peek.
    """

    row: int
    token: int
    proposed: Sequence[int] | None


class ShadowAcceptance:
    """Compares what a drafter would have proposed with what rows then emit.

    A proposal that was right so far is compared at its next position with the row's
    next token. For drafters that do not sample, a token is right as often as it would
    have been accepted.
    """

    def __init__(self) -> None:
        # By row: proposals that were right so far, and up to which position.
        self._live: dict[int, list[tuple[Sequence[int], int]]] = {}
        self._vain = self._asked = 0

    def due(self) -> bool:
        """Whether the next round peeks."""
        turn = self._asked % REST
        self._asked += 1
        return turn < (1 if self._vain >= REST // 2 else REST // 2)

    @property
    def awaiting(self) -> bool:
        """Whether some proposal was right so far."""
        return bool(self._live)

    def forget(self) -> None:
        """Drop all proposals: a round drafted."""
        self._live.clear()

    def compare(self, peeks: Iterable[Peek]) -> list[tuple[int, int]]:
        """Compare a round that was read.

        To propose nothing counts as wrong, as it does in a round with a draft. Rows
        that are not among the peeks are forgotten.

        Returns:
            (tokens compared, right) at each position.
        """
        positions: list[list[int]] = []
        live: dict[int, list[tuple[Sequence[int], int]]] = {}
        looked = hit = False
        for peek in peeks:
            proposals = list(self._live.get(peek.row, ()))
            if peek.proposed is not None:
                looked = True
                proposals.append((peek.proposed, 0))
            for tokens, at in proposals:
                right = at < len(tokens) and tokens[at] == peek.token
                positions += [[0, 0] for _ in range(at + 1 - len(positions))]
                positions[at][0] += 1
                positions[at][1] += right
                hit |= right and at == 0
                if right and at + 1 < len(tokens):
                    live.setdefault(peek.row, []).append((tokens, at + 1))
        self._live = live
        if looked:
            self._vain = 0 if hit else self._vain + 1
        return [(tried, right) for tried, right in positions]
