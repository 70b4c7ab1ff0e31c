"""When a batch that nobody joins would have ended without a draft. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# How much later than without a draft such a batch may end, as far as is known.
LATE = 1.02


class Deadline:
    """What rounds have cost since rows were first seen, and what plain ones would have.

    What was lost stays lost: a look at what is left alone would allow a little more of
    it in every round. Rows that ended do not count any more, since with what they did
    not need the others could be late.
    """

    def __init__(self) -> None:
        # Tokens that each row had left when it was first seen, and the rows that run.
        self._first: dict[int, int] = {}
        self._running: frozenset[int] = frozenset()
        self._spent = 0.0
        self._end = 0.0

    def begin(
        self, left: Mapping[int, int], plain: Callable[[Sequence[int]], float]
    ) -> None:
        """Rows run that have so many tokens left; where one is new, all begin anew.

        Args:
            plain: what plain decoding takes for rows that have so many left.
        """
        if not self._first.keys() >= left.keys():
            self._first, self._running, self._spent = dict(left), frozenset(), 0.0
        if left.keys() != self._running:
            self._running = frozenset(left)
            self._end = LATE * plain([self._first[row] for row in left])

    def spend(self, seconds: float) -> None:
        """A round was read."""
        self._spent += seconds

    def is_met(self, seconds: float) -> bool:
        """Whether rows that go on for so long end in time."""
        return self._spent + seconds <= self._end
