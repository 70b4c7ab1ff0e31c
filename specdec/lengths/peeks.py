"""What would have been accepted in rounds that did not draft. No mlx here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Of one position: how often a token was compared there, and how often it was right.
Trials = tuple[int, int]
#: A row's number, the token that it emitted, and what had been proposed for it.
Peeked = tuple[int, int, Sequence[int]]


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

    def compare(self, peeked: Iterable[Peeked]) -> list[Trials]:
        """A plain round was read; by position, what its tokens tell.

        Rows that are not among them are forgotten. Where nothing was proposed, that
        counts as a wrong token, as it does in a round that drafts.
        """
        found: list[list[int]] = []
        live: dict[int, list[tuple[Sequence[int], int]]] = {}
        for row, token, proposed in peeked:
            going = []
            for tokens, at in (*self._live.get(row, ()), (proposed, 0)):
                while len(found) <= at:
                    found.append([0, 0])
                right = at < len(tokens) and tokens[at] == token
                found[at][0] += 1
                found[at][1] += right
                if right and at + 1 < len(tokens):
                    going.append((tokens, at + 1))
            if going:
                live[row] = going
        self._live = live
        return [(n, kept) for n, kept in found]

    def forget(self) -> None:
        """Rows went on in another way."""
        self._live.clear()
