"""Rounds alike, in a row, that nobody has to think about. No mlx here."""

from __future__ import annotations

from .base import RoundOutcome

# Behind CALM plain rounds in a row the next REST ones are left be. Of rounds that
# draft, behind SAME the next HOLD, and only where a plain round is so SHORT (seconds)
# that a thought is more than a hundredth of it: what rows accept changes.
CALM, REST = 16, 8
SAME, HOLD, SHORT = 3, 4, 0.02
# One without an accepted token ends the hold where that had this chance at most.
UNLIKELY = 0.2


def worth_resting(k: int, run: int, plain_seconds: float | None) -> int:
    """Rounds to leave be, behind a run of so many with the same k, the best one."""
    if not k:
        return REST if run >= CALM else 0
    short = plain_seconds is not None and plain_seconds < SHORT
    return HOLD if short and run >= SAME else 0


class Rest:
    """Some rounds of one k whatever their rows do, and what was read meanwhile.

    To think about a round, and to learn from it, takes the host longer than there is to
    gain where one follows another that was alike.
    """

    def __init__(self) -> None:
        self._left, self._num_rows, self._k = 0, 0, 0
        self._sure = False
        self._read: list[RoundOutcome] = []

    def begin(
        self, rounds: int, num_rows: int, k: int = 0, accepted: float = 0.0
    ) -> None:
        """The next ``rounds`` of ``num_rows`` have this k.

        Args:
            accepted: the chance that a row's first draft token is.
        """
        self._left, self._num_rows, self._k = rounds, num_rows, k
        self._sure = (1 - accepted) ** num_rows <= UNLIKELY

    def held(self, num_rows: int) -> int | None:
        """k of the next round, if it has so many rows; ``None``: nothing says it."""
        resting = self._left > 0 and num_rows == self._num_rows
        return self._k if resting else None

    def add(self, outcome: RoundOutcome) -> bool:
        """Note a round that was read; it ends with the last, or with another kind.

        It ends early, too, where a draft would have been right, or surprisingly was
        wrong in all rows.

        Returns:
            Whether it goes on.
        """
        if not self._left:
            return False
        k, num_rows = outcome.num_draft_tokens, outcome.num_rows
        alike = k == self._k and num_rows == self._num_rows and not outcome.undrafted
        vain = k > 0 and self._sure and not any(n for _, n in outcome.accepted)
        goes_on = alike and not vain and not outcome.peeked.promising
        self._left = self._left - 1 if goes_on else 0
        if alike:
            self._read.append(outcome)
        return self._left > 0

    def take(self) -> list[RoundOutcome]:
        """End it: what was read, all of it alike."""
        read, self._read, self._left = self._read, [], 0
        return read
