"""What a draft length is asked, what it is shown, and a fixed one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class BatchState:
    """A batch whose next round is about to be built.

    Args:
        num_rows: rows that are computed; idle slots count.
        room: of each running row, the most draft tokens that it can use.
        remaining: tokens that the running rows may still emit, on average.
        backlog: tokens of a row that the drafter has to take in before it drafts.
        in_flight: k of the rounds that were dispatched and not read yet.
        left: tokens that each running row may still emit, by the row's number; empty
            where other requests wait for a place.
    """

    num_rows: int
    room: Sequence[int]
    remaining: float
    backlog: int = 0
    in_flight: Sequence[int] = ()
    left: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundTiming:
    """A round that was read: what it took, and what its rows accepted.

    Args:
        num_rows: rows that were computed.
        num_draft_tokens: k.
        accepted: of each running row, (draft tokens that it could accept, accepted).
        seconds: what it took; ``None`` where other work ran meanwhile.
        fair: whether another round of the same shapes would take as long. If not,
            the seconds hold a new shape, a look, or another k's round.
        backlog: tokens of a row that the drafter took in first.
        rows: numbers of the rows of ``accepted``.
        shadow: of a round that drafted nothing, (tokens compared, right) at each
            position of what would have been proposed.
        forced: k was not chosen, as no row had room for a draft token.
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


class DraftLength(Protocol):
    """Chooses k for each round. Whatever it chooses, the output is the same."""

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that it ever chooses."""

    def prepare(self, num_rows: int) -> None:
        """Get ready for batches of ``num_rows``, before the first of them begins."""

    def may_pay(self, state: BatchState) -> bool:
        """Whether rows that begin are worth giving to the drafter.

        Args:
            state: of those rows and the ones that they join. A row that is not
                drafted for has no room; the backlog is the new rows' prompts.
        """

    def choose(self, state: BatchState) -> int:
        """k of the next round; to ask twice is as to ask once."""

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a round that was read."""


@dataclass(frozen=True)
class FixedLength:
    """The same k in every round.

    Args:
        max_draft_tokens: k.
    """

    max_draft_tokens: int

    def prepare(self, num_rows: int) -> None:
        """Do nothing."""

    def may_pay(self, state: BatchState) -> bool:
        """Say yes: k was asked for."""
        return True

    def choose(self, state: BatchState) -> int:
        return self.max_draft_tokens

    def observe(self, timing: RoundTiming) -> None:
        """Do nothing."""
