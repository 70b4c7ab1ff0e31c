"""What may be lost to trying what is thought to be worse. No mlx here."""

from __future__ import annotations

# Share of the time that may be lost to it.
EXPLORE = 0.01
# What may be lost, in plain rounds: to begin with, saved up, and by one try that goes
# beyond what is there. What a round of a try is charged with at most where it took
# longer than was thought, and the debt beyond which nothing is.
FIRST_CREDIT, MOST_CREDIT, MOST_DEBT = 0.2, 8.0, 4.0
MOST_CHARGE, DEEPEST_DEBT = 20.0, 30.0


class Credit:
    """Plain rounds that may be lost; it grows by ``EXPLORE`` of the time.

    What a try takes once is estimated, and charged, beforehand; what it took in the
    end is charged as far as it was not estimated. Which of the two is known first
    depends on which round was being read.
    """

    def __init__(self) -> None:
        self.left = FIRST_CREDIT
        # Of the try that is under way: what was charged and has not been taken yet;
        # less than 0 is what was taken, and not estimated for yet.
        self._foreseen = 0.0

    @property
    def reach(self) -> float:
        """What one try may lose now; nothing where none is left."""
        return max(self.left, MOST_DEBT) if self.left > 0 else 0.0

    def earn(self, rounds: float) -> None:
        """Time has passed: so many plain rounds'."""
        self.left = min(MOST_CREDIT, self.left + EXPLORE * rounds)

    def lose(self, rounds: float) -> None:
        """A round of a try was so much worse than the best one."""
        self.left -= rounds

    def foresee(self, rounds: float) -> None:
        """A try is estimated to take so much once."""
        self.left -= max(0.0, rounds + min(0.0, self._foreseen))
        self._foreseen += rounds

    def spend(self, rounds: float) -> None:
        """A try held a round up by so much."""
        rounds = min(MOST_CHARGE, max(0.0, rounds))
        unforeseen = max(0.0, rounds - max(0.0, self._foreseen))
        self.left -= max(0.0, min(unforeseen, self.left + DEEPEST_DEBT))
        self._foreseen -= rounds

    def settle(self) -> None:
        """What a try takes once has been taken."""
        self._foreseen = 0.0


class Hope:
    """That drafting pays for rows whose prompts a drafter takes in beforehand."""

    def __init__(self) -> None:
        self._cost, self._fulfilled = 0.0, False
        #: Whether the last one came to nothing.
        self.was_vain = False

    def begin(self, rounds: float) -> None:
        """Prompts take the drafter as long as so many plain rounds."""
        self._cost, self._fulfilled = rounds, False

    def fulfil(self) -> None:
        """A round that drafts was the best known."""
        self._fulfilled = True

    def end(self) -> float:
        """Other rows begin: plain rounds that it lost."""
        if not self._cost:
            return 0.0
        self.was_vain = not self._fulfilled
        lost = min(self._cost, MOST_CHARGE) if self.was_vain else 0.0
        self._cost = 0.0
        return lost
