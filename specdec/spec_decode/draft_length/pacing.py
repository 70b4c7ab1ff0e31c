"""Between a batch and the choice of its draft length: clocks and counts. No mlx."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, replace

from . import BatchState, DraftLength, Peek, Peeks, RoundOutcome
from .peeks import NOTHING


@dataclass(frozen=True)
class _Pending:
    """A round that was handed out: k, the rows' limits, when, behind what, of whom.

    ``forced``: k was not chosen, as nothing could be drafted; ``looks``: the drafter
    told what it would have brought.
    """

    num_draft_tokens: int
    limits: tuple[int, ...]
    begun: float
    undrafted: int
    rows: AbstractSequence[int]
    forced: bool
    looks: bool = False


class Pacer:
    """Tells a draft length what rounds took and what became of them.

    A round's time runs from when it was begun until it is read, if nothing else ran
    in between. Where the host reads one round behind, it is the time between two
    reads; in that time the next round is built, which may take longest. So it is
    told only of a round between two others, the next one of the same k.

    Args:
        length: chooses k.
        clock: seconds.
        peek_rows: rows up to which rounds look what a draft would bring; ``None``: any.
    """

    def __init__(
        self,
        length: DraftLength,
        clock: Callable[[], float] = time.perf_counter,
        *,
        peek_rows: int | None = None,
    ):
        self._length = length
        self._clock = clock
        self._pending: deque[_Pending] = deque()
        self._last_read = float("-inf")
        # When work came between rounds: any, and other than drafting.
        self._interrupted = self._foreign = float("-inf")
        self._forced = False
        self._fresh = True
        self._peeks, self._peek_rows = Peeks(), peek_rows
        #: Rounds since the last one that drafted, or since rows came that may draft.
        self.idle = 0

    def may_look(self, num_rows: int) -> bool:
        """Whether the round just begun is to look what a draft would bring.

        Not where k was not chosen: nothing could be drafted.
        """
        few = self._peek_rows is None or num_rows <= self._peek_rows
        return few and not self._forced and self._peeks.due()

    def look(self) -> None:
        """The round just begun does.

        It is not timed, nor is what ran while it was built: plain rounds are what
        drafting is measured by.
        """
        self._pending[-1] = replace(self._pending[-1], looks=True)

    def held(self, num_rows: int) -> int | None:
        """k of the next round of so many rows, if nothing is to be asked.

        For a round that drafts one of them needs room: else it is to be chosen.
        """
        held = None if self._fresh else self._length.held(num_rows)
        if held is None or any(p.num_draft_tokens != held for p in self._pending):
            return None
        self._forced = False
        return held

    def choose(
        self,
        num_rows: int,
        room: AbstractSequence[int],
        remaining: float,
        left: Mapping[int, int] | None = None,
        *,
        backlog: int = 0,
    ) -> int:
        """k of the next round; see :class:`~specdec.spec_decode.draft_length.BatchState`.

        0 without asking where no row has room.

        Args:
            backlog: tokens of a row that the drafter has to catch up with.
        """
        self._forced = not any(room)
        if self._forced:
            return 0
        in_flight = [p.num_draft_tokens for p in self._pending]
        return self._length.choose(
            BatchState(
                num_rows,
                room,
                remaining,
                backlog,
                in_flight,
                left or {},
                self._fresh,
            )
        )

    def defer(self) -> int:
        """k of a round in which nothing can be drafted yet: 0."""
        self._forced = True
        return 0

    def begin(
        self,
        num_draft_tokens: int,
        limits: tuple[int, ...],
        rows: AbstractSequence[int] = (),
        *,
        backlog: int = 0,
    ) -> None:
        """A round is about to be built.

        Args:
            num_draft_tokens: k.
            limits: of its rows; -1 for one that has ended.
            rows: their numbers.
            backlog: tokens of a row that the drafter catches up with where k is not 0.
        """
        k, caught_up = num_draft_tokens, backlog if num_draft_tokens else 0
        self.idle = 0 if k else self.idle + 1
        self._fresh = False
        now = self._clock()
        self._pending.append(_Pending(k, limits, now, caught_up, rows, self._forced))

    def read(
        self,
        kept: AbstractSequence[int | None],
        peeks: Callable[[], AbstractSequence[Peek]] = tuple,
    ) -> None:
        """The oldest round was read.

        Args:
            kept: tokens that each row kept; ``None``: it had ended.
            peeks: tells what rows emitted in a round without a draft, and what one
                would have proposed.
        """
        round_, now = self._pending.popleft(), self._clock()
        peeked = NOTHING
        if round_.num_draft_tokens:
            self._peeks.forget()
        elif round_.looks or self._peeks.awaiting:
            peeked = self._peeks.compare(peeks())
        began = max(round_.begun, self._last_read)
        behind_another = began > round_.begun
        self._last_read = now
        k, looks = round_.num_draft_tokens, round_.looks
        alike = all(p.num_draft_tokens == k for p in self._pending)
        looks = looks or any(p.looks for p in self._pending)
        timed = alike and behind_another == bool(self._pending)
        told = [
            (i, limit, min(n - 1, limit))
            for i, (limit, n) in enumerate(zip(round_.limits, kept, strict=True))
            if n and limit > 0
        ]
        took = now - began
        held_up = self._foreign < began <= self._interrupted
        self._length.observe(
            RoundOutcome(
                len(round_.limits),
                round_.num_draft_tokens,
                [(limit, accepted) for _, limit, accepted in told],
                took if timed and began > self._interrupted and not looks else None,
                round_.undrafted,
                [round_.rows[i] for i, *_ in told] if round_.rows else (),
                round_.forced,
                took if held_up or round_.looks else None,
                peeked,
            )
        )

    def interrupt(self, *, drafting: bool = False) -> None:
        """Work came between rounds: those in flight are not timed.

        Args:
            drafting: a round that drafts had new shapes.
        """
        self._interrupted = self._clock()
        if not drafting:
            self._foreign = self._interrupted
