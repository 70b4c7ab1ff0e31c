"""Asks the draft-length policy for k, and reports the rounds' results to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..spec_decode.draft_length import (
    BatchState,
    DraftLength,
    ShadowAcceptance,
    StepTimer,
)
from .in_flight import InFlight

# After this many rounds without a draft, the policy decides anew for joining rows.
IDLE = 64


class Pacing:
    """Tells a draft-length policy the state of a batch, and the times of its rounds.

    Args:
        length: chooses k.
        peek_rows: the most rows with which a round that does not draft may peek at
            what the drafter would propose; ``None``: any number.
    """

    def __init__(self, length: DraftLength, peek_rows: int | None):
        self._length, self._peek_rows = length, peek_rows
        self._timer, self._shadow = StepTimer(), ShadowAcceptance()
        self._has_room = False  # whether any row can use a draft token
        self._idle = 0  # rounds since the last one that drafted

    @property
    def drafts(self) -> bool:
        """Whether one of the last rounds drafted."""
        return self._idle < IDLE

    def restart(self) -> None:
        """Note that rows have joined that are drafted for."""
        self._idle = 0

    def choose(
        self,
        num_rows: int,
        room: Sequence[int],
        left: Mapping[int, int],
        *,
        backlog: int,
        alone: bool,
    ) -> int:
        """k of the next round; asking changes nothing.

        Args:
            num_rows: number of rows that are computed, idle slots included.
            room: the most draft tokens that each running row can use.
            left: tokens that each running row may still emit, by the row's number.
            backlog: mean number of a row's tokens that the drafter has to read first.
            alone: whether no request waits for a free row.
        """
        self._has_room = any(room)
        if not self._has_room:
            return 0
        mean = sum(left.values()) / len(room)
        flying = self._timer.in_flight
        known = left if alone else {}
        return self._length.choose(
            BatchState(num_rows, room, mean, backlog, flying, known)
        )

    def begin(
        self, k: int, limits: Sequence[int], rows: Sequence[int], backlog: int
    ) -> bool:
        """Note that a round is about to be built.

        Args:
            limits: how many draft tokens each slot may accept; -1 for an idle slot.
            rows: numbers of the rows in the slots.

        Returns:
            Whether the round is to peek at what the drafter would propose.
        """
        self._idle = 0 if k else self._idle + 1
        forced = not self._has_room
        self._timer.begin(k, limits, rows, backlog=backlog, forced=forced)
        few = self._peek_rows is None or len(limits) <= self._peek_rows
        return not k and few and self._has_room and self._shadow.due()

    def look(self) -> None:
        """Note that the round just begun peeks."""
        self._timer.look()

    def interrupt(self, *, new_shape: bool = False) -> None:
        """Note that other work was dispatched, or that a round had new shapes."""
        self._timer.interrupt(new_shape=new_shape)

    def read(self, in_flight: InFlight, kept: Sequence[int | None]) -> None:
        """Report the oldest round in flight, once it was read.

        Args:
            kept: tokens that each slot kept; ``None`` where no row was running.
        """
        shadow: list[tuple[int, int]] = []
        if in_flight.num_draft_tokens:
            self._shadow.forget()
        elif in_flight.peeked is not None or self._shadow.awaiting:
            shadow = self._shadow.compare(in_flight.peeks())
        self._length.observe(self._timer.read(kept, shadow))
