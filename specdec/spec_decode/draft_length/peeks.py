"""What would have been accepted in rounds that did not draft. No mlx here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A look takes time of its own, so that some rounds have to go without, to be timed. Of
# SELDOM rounds OFTEN look, or one, where nothing was right in the last VAIN looks.
VAIN, OFTEN, SELDOM = 4, 4, 8


@dataclass(frozen=True)
class Peek:
    """What a round that did not draft tells of a row.

    Args:
        row: its number.
        token: what it emitted.
        proposed: what had been proposed for it, none where there was nothing to
            propose; ``None``: that was not looked at.
    """

    row: int
    token: int
    proposed: Sequence[int] | None


@dataclass(frozen=True)
class Peeked:
    """What comparing them tells.

    Args:
        positions: by position, (tokens compared, right).
        rows: the numbers of rows whose first position was looked at.
        accepted: of each of these (1, whether its token was right).
    """

    positions: Sequence[tuple[int, int]]
    rows: Sequence[int]
    accepted: Sequence[tuple[int, int]]

    @property
    def promising(self) -> bool:
        """Whether of most rows the token was right."""
        return 2 * sum(right for _, right in self.accepted) > len(self.rows)


NOTHING = Peeked((), (), ())


class Peeks:
    """Compares proposals that were not verified with what their rows emit.

    One that has been right so far is tried at its next position by every token that
    follows: given the tokens before it, a token of the target's is the one proposed
    with the chance that a verification would have accepted it, as long as drafts are
    certain of what they propose.
    """

    def __init__(self) -> None:
        # By row: proposals that were right so far, and how far that is.
        self._live: dict[int, list[tuple[Sequence[int], int]]] = {}
        # Looks since a token was right; rounds that were asked about.
        self._vain = self._asked = 0

    def due(self) -> bool:
        """Whether to look in the next round: more often where that is of use."""
        looks = self._asked % SELDOM < (1 if self._vain >= VAIN else OFTEN)
        self._asked += 1
        return looks

    def compare(self, peeks: Iterable[Peek]) -> Peeked:
        """A plain round was read. Rows that are not among them are forgotten.

        Where nothing was proposed, that counts as a wrong token, as it does in a round
        that drafts.
        """
        positions: list[list[int]] = []
        rows: list[int] = []
        accepted: list[tuple[int, int]] = []
        live: dict[int, list[tuple[Sequence[int], int]]] = {}
        for peek in peeks:
            proposals = list(self._live.get(peek.row, ()))
            if peek.proposed is not None:
                proposals.append((peek.proposed, 0))
                rows.append(peek.row)
                accepted.append((1, list(peek.proposed[:1]) == [peek.token]))
            going = []
            for tokens, at in proposals:
                positions += [[0, 0] for _ in range(at + 1 - len(positions))]
                right = at < len(tokens) and tokens[at] == peek.token
                positions[at][0] += 1
                positions[at][1] += right
                if right and at + 1 < len(tokens):
                    going.append((tokens, at + 1))
            if going:
                live[peek.row] = going
        self._live = live
        if rows:
            self._vain = 0 if any(n for _, n in accepted) else self._vain + 1
        return Peeked([(n, kept) for n, kept in positions], rows, accepted)

    @property
    def awaiting(self) -> bool:
        """Whether what rows emit next is compared, looked at or not."""
        return bool(self._live)

    def forget(self) -> None:
        """Rows went on in another way."""
        self._live.clear()
