"""When a batch that nobody joins would have ended without a draft. No mlx here."""

from __future__ import annotations

from collections.abc import Collection

# How much later than without a draft such a batch may end, as far as is known.
LATE = 1.02


class Deadline:
    """What rounds have cost since rows were first seen, and what plain ones would have.

    What was lost stays lost: a look at what is left alone would allow a little more of
    it in every round.
    """

    def __init__(self) -> None:
        self._rows: frozenset[int] = frozenset()
        self._spent = 0.0
        self._end = 0.0

    def begin(self, rows: Collection[int], plain: float) -> None:
        """Rows run; where one of them is new, plain decoding would take so long now."""
        if not self._rows.issuperset(rows):
            self._rows = frozenset(rows)
            self._spent, self._end = 0.0, plain * LATE

    def spend(self, seconds: float) -> None:
        """A round was read."""
        self._spent += seconds

    def is_met(self, seconds: float) -> bool:
        """Whether rows that go on for so long end in time."""
        return self._spent + seconds <= self._end
