"""The interface of a draft-length policy, its two records, and a fixed length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class BatchState:
    """A batch before its next round.

    Args:
        num_rows: rows that are computed, idle slots included.
        room: the most draft tokens that each running row can use.
        remaining: tokens that a running row may still emit, on average.
        backlog: tokens of a row that the drafter has to take in before it drafts.
        in_flight: k of each round that was dispatched and not read yet.
        left: tokens that each running row may still emit, by the row's number; empty
            if requests wait for a row.
    """

    num_rows: int
    room: Sequence[int]
    remaining: float
    backlog: int = 0
    in_flight: Sequence[int] = ()
    left: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundTiming:
    """A round that was read: its time, and what its rows accepted.

    Args:
        num_rows: rows that were computed.
        num_draft_tokens: k.
        accepted: (draft tokens that it could accept, accepted) for each running row.
        seconds: the round's time; ``None`` if other work ran meanwhile.
        fair: whether another round of the same shapes would take as long. If not,
            the seconds include a new shape, a peek, or a round of another k.
        backlog: tokens of a row that the drafter took in first.
        rows: numbers of the rows in ``accepted``.
        shadow: for a round that drafted nothing: (tokens compared, right) at each
            position of what would have been proposed.
        forced: k was not chosen, since no row could use a draft token.
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
    """Chooses k for each round. The output does not depend on its choice."""

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that it ever chooses."""

    def prepare(self, num_rows: int) -> None:
        """Get ready, before a batch of ``num_rows`` begins."""

    def may_pay(self, state: BatchState) -> bool:
        """Whether joining rows are worth the drafter's prefill.

        Args:
            state: the joining rows and the running ones. Rows that are not drafted
                for have no room; the backlog is the joining rows' prompts.
        """

    def choose(self, state: BatchState) -> int:
        """k of the next round; asking changes nothing."""

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
