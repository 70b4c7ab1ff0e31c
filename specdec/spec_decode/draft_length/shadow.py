"""Estimates what would have been accepted in rounds without a draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A peek takes time, and rounds beside it cannot be timed. Of SELDOM rounds, OFTEN peek
# in a row; only one does if the last VAIN peeks found nothing.
SELDOM, OFTEN, VAIN = 8, 4, 4


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
        turn = self._asked % SELDOM
        self._asked += 1
        return turn < (1 if self._vain >= VAIN else OFTEN)

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
