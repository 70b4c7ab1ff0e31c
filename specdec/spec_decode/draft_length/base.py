"""How many tokens a round drafts: the protocol, and a fixed number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .peeks import NOTHING, Peeked


@dataclass(frozen=True)
class BatchState:
    """What is known of a batch when a round is about to be built.

    Args:
        num_rows: rows that are computed, those that have ended and were not
            dropped yet included.
        room: for each running row the most draft tokens that could be of use to it.
        remaining: tokens that the running rows may still emit, on average.
        undrafted: tokens of a row that the drafter has to catch up with first: those of
            the rounds since the last one that drafted, or those of prompts.
        in_flight: k of the rounds that were handed out and not read yet.
        left: tokens that each running row may still emit, by its number, where no
            others take the places of rows that end; else empty.
        fresh: whether no round of the batch was handed out before.
    """

    num_rows: int
    room: Sequence[int]
    remaining: float
    undrafted: int = 0
    in_flight: Sequence[int] = ()
    left: Mapping[int, int] = field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True)
class RoundOutcome:
    """What became of a round.

    Args:
        num_rows: rows that were computed.
        num_draft_tokens: k.
        accepted: for each running row (most draft tokens that it could accept,
            how many it accepted).
        seconds: how long the round took; ``None`` where that is not known, as
            other work came between.
        undrafted: tokens of a row that the drafter caught up with first.
        rows: the numbers of the rows of ``accepted``, where they are known.
        forced: nothing could be drafted, so k was not chosen.
        spent: seconds until it was read, where drafting held it up: shapes of a round
            that drafts were got ready for, or the round looked what a draft would
            bring; such rounds have no ``seconds``.
        peeked: of a round without a draft, what one would have brought, as far as that
            was looked at.
    """

    num_rows: int
    num_draft_tokens: int
    accepted: Sequence[tuple[int, int]]
    seconds: float | None = None
    undrafted: int = 0
    rows: Sequence[int] = ()
    forced: bool = False
    spent: float | None = None
    peeked: Peeked = NOTHING


class DraftLength(Protocol):
    """Chooses k for each round. Whatever it chooses, the output is the same."""

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that it ever chooses."""

    def prepare(self, num_rows: int) -> None:
        """Get ready for batches of ``num_rows``, before the first of them begins."""

    def may_pay(self, state: BatchState) -> bool:
        """Whether drafting may pay for rows that begin.

        Args:
            state: of those rows and the ones that they join; of a row that is not
                drafted for, the room is 0. The drafter missed the prompts.
        """

    def held(self, num_rows: int) -> int | None:
        """k of a round of so many rows where nothing is to be asked; else ``None``.

        It is not for a batch's first round, nor for one behind a round of another k
        that is not read, nor for rows without room for it.
        """

    def choose(self, state: BatchState) -> int:
        """k of the next round, held or not; to ask twice is as to ask once."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn from a round that was read."""


@dataclass(frozen=True)
class FixedLength:
    """The same k in every round.

    Args:
        max_draft_tokens: k.
    """

    max_draft_tokens: int

    def prepare(self, num_rows: int) -> None:
        """Nothing."""

    def may_pay(self, state: BatchState) -> bool:
        """It is what was asked for."""
        return True

    def held(self, num_rows: int) -> int | None:
        """Nothing: to ask takes no time."""
        return None

    def choose(self, state: BatchState) -> int:
        """k."""
        return self.max_draft_tokens

    def observe(self, outcome: RoundOutcome) -> None:
        """Nothing."""
