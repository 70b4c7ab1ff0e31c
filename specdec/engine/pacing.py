"""Chooses k for the rounds of a batch, and shows the policy what they brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..spec_decode.draft_length import (
    BatchState,
    DraftLength,
    ShadowAcceptance,
    StepTimer,
)
from .in_flight import InFlight

# Rounds without a draft after which it is asked again whether rows that join get one.
IDLE = 64


class Pacing:
    """One batch's view of a draft length: asks it for k, times rounds, reports them.

    Args:
        length: chooses k.
        peek_rows: rows up to which a round that does not draft may look at what a
            draft would have brought; ``None``: any number.
    """

    def __init__(self, length: DraftLength, peek_rows: int | None):
        self._length, self._peek_rows = length, peek_rows
        self._timer, self._shadow = StepTimer(), ShadowAcceptance()
        self._has_room = False  # for draft tokens in the next round, in any row
        self._idle = 0  # rounds since one drafted, or since rows came that may draft

    @property
    def drafts(self) -> bool:
        """Whether one of the last rounds drafted."""
        return self._idle < IDLE

    def restart(self) -> None:
        """Rows came for which is drafted."""
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
        """k of the next round; to ask twice is as to ask once.

        Args:
            num_rows: rows that are computed.
            room: of each running row, the most draft tokens that it can use.
            left: tokens that each running row may still emit, by its number.
            backlog: tokens of a row that the drafter has to take in first.
            alone: whether no other request waits for a place.
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
            limits: tokens that each row may accept; -1 for an idle slot.
            rows: their numbers.

        Returns:
            Whether the round is to look at what a draft would have brought.
        """
        self._idle = 0 if k else self._idle + 1
        forced = not self._has_room
        self._timer.begin(k, limits, rows, backlog=backlog, forced=forced)
        few = self._peek_rows is None or len(limits) <= self._peek_rows
        return not k and few and self._has_room and self._shadow.due()

    def look(self) -> None:
        """Note that the round just begun does look."""
        self._timer.look()

    def interrupt(self, *, new_shape: bool = False) -> None:
        """Note that other work ran, or that a round of new shapes was built."""
        self._timer.interrupt(new_shape=new_shape)

    def read(self, in_flight: InFlight, kept: Sequence[int | None]) -> None:
        """Report a round, which was the oldest in flight.

        Args:
            kept: tokens of each slot; ``None`` where no row was running.
        """
        shadow: list[tuple[int, int]] = []
        if in_flight.num_draft_tokens:
            self._shadow.forget()
        elif in_flight.peeked is not None or self._shadow.awaiting:
            shadow = self._shadow.compare(in_flight.peeks())
        self._length.observe(self._timer.read(kept, shadow))
