"""What would have been accepted in rounds that did not draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A look takes time, and a round beside a look is not timed fairly. Of SELDOM rounds
# OFTEN look in a row; one does where the last VAIN looks found nothing.
SELDOM, OFTEN, VAIN = 8, 4, 4


@dataclass(frozen=True)
class Peek:
    """A row in a round that did not draft.

    Args:
        row: its number.
        token: what it emitted.
        proposed: what would have been proposed; ``None`` where the round did not look.
    """

    row: int
    token: int
    proposed: Sequence[int] | None


class ShadowAcceptance:
    """Compares what a drafter would have proposed with what rows then emit.

    A proposal that has been right so far is compared at its next position with the
    next token of its row. Where a drafter is certain of its proposals, a token is
    right as often as it would have been accepted.
    """

    def __init__(self) -> None:
        # By row: proposals that were right so far, and how far.
        self._live: dict[int, list[tuple[Sequence[int], int]]] = {}
        self._vain = self._asked = 0

    def due(self) -> bool:
        """Whether the next round looks."""
        turn = self._asked % SELDOM
        self._asked += 1
        return turn < (1 if self._vain >= VAIN else OFTEN)

    @property
    def awaiting(self) -> bool:
        """Whether a proposal is still right."""
        return bool(self._live)

    def forget(self) -> None:
        """Drop all proposals: a round drafted."""
        self._live.clear()

    def compare(self, peeks: Iterable[Peek]) -> list[tuple[int, int]]:
        """Compare a round that was read; (tokens compared, right) at each position.

        No proposal counts as a wrong one, as it does in a round that drafts. Rows
        that are not among the peeks are forgotten.
        """
        positions: list[list[int]] = []
        live: dict[int, list[tuple[Sequence[int], int]]] = {}
        looked = found = False
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
                found |= right and at == 0
                if right and at + 1 < len(tokens):
                    live.setdefault(peek.row, []).append((tokens, at + 1))
        self._live = live
        if looked:
            self._vain = 0 if found else self._vain + 1
        return [(tried, right) for tried, right in positions]
