"""Plain rounds in a row that nobody has to think about. No mlx here."""

from __future__ import annotations

from .base import RoundOutcome


class Rest:
    """Some rounds that are plain whatever their rows do, and what was read meanwhile.

    To think about a round, and to learn from it, takes the host longer than there is to
    gain where one plain round follows another.
    """

    def __init__(self) -> None:
        self._left, self._num_rows = 0, 0
        self._read: list[RoundOutcome] = []

    def begin(self, rounds: int, num_rows: int) -> None:
        """The next ``rounds`` of ``num_rows`` are plain."""
        self._left, self._num_rows = rounds, num_rows

    def covers(self, num_rows: int) -> bool:
        """Whether the next round is, if it has so many rows."""
        return self._left > 0 and num_rows == self._num_rows

    def add(self, outcome: RoundOutcome) -> bool:
        """Note a round that was read; it ends with the last, or with another kind.

        It ends early, too, where a draft would have been right.

        Returns:
            Whether it goes on.
        """
        if not self._left:
            return False
        plain = not outcome.num_draft_tokens and outcome.num_rows == self._num_rows
        goes_on = plain and not outcome.peeked.promising
        self._left = self._left - 1 if goes_on else 0
        if plain:
            self._read.append(outcome)
        return self._left > 0

    def take(self) -> list[RoundOutcome]:
        """End it: what was read, all of it plain rounds."""
        read, self._read, self._left = self._read, [], 0
        return read
