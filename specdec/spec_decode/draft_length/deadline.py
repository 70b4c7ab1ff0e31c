"""When a batch that nobody joins would have ended without a draft. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

# How much later than without a draft such a batch may end, as far as is known.
LATE = 1.02


class Deadline:
    """What rounds have cost since rows were first seen, and what plain ones would have.

    What was lost stays lost: a look at what is left alone would allow a little more of
    it in every round. Rows that ended count with the tokens that they had by then: with
    what they did not need the others could be late, and without what they took, which
    is spent, they would seem to be.
    """

    def __init__(self) -> None:
        # Tokens that each row had left when it was first seen, and when it was last.
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._running: frozenset[int] = frozenset()
        self._spent = 0.0
        self._end = 0.0

    def look_at(
        self, left: Mapping[int, int], plain: Callable[[Sequence[int]], float]
    ) -> None:
        """Rows run that have so many tokens left; where one is new, all begin anew.

        Args:
            plain: what plain decoding takes for rows that emit so many tokens.
        """
        if not self._first.keys() >= left.keys():
            self._first, self._running, self._spent = dict(left), frozenset(), 0.0
            self._last = {}
        self._last.update(left)
        if left.keys() != self._running:
            self._running = frozenset(left)
            self._end = LATE * plain(
                [
                    n if row in left else n - self._last[row]
                    for row, n in self._first.items()
                ]
            )

    def spend(self, seconds: float) -> None:
        """A round was read, which took so long."""
        self._spent += seconds

    def is_met(self, seconds: float) -> bool:
        """Whether rows that go on for so long end in time."""
        return self._spent + seconds <= self._end
