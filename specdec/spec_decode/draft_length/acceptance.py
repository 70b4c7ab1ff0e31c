"""How many draft tokens rows accept: an estimate by position that follows changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

# Rounds that drafted after which an observation weighs 1/e: in the estimate, and in
# the short view that tells when the estimate is out of date.
MEMORY, SHORT_MEMORY = 48.0, 8.0
# Every round that did not draft adds this to 1 / weight.
IDLE_DOUBT = 0.01
# What is thought of a draft before anything is known, and of how many
# observations that is worth.
PRIOR_MEAN, PRIOR_WEIGHT = 0.6, 2.0
# Observations that make a position a measured one, or a short view worth a look;
# standard deviations between the two views that are a change.
MEASURED, CHANGE = 3.0, 3.0


@dataclass
class _Position:
    """The chance at one position: its mean, of how many observations, lately too."""

    mean: float
    weight: float
    short_mean: float = 0.0
    short_weight: float = 0.0

    def fade(self) -> None:
        self.weight *= 1 - 1 / MEMORY
        self.short_weight *= 1 - 1 / SHORT_MEMORY

    def idle(self) -> None:
        self.weight /= 1 + IDLE_DOUBT * self.weight
        self.short_weight = 0.0

    def add(self, trials: int, kept: int) -> None:
        weight = self.weight + trials
        self.mean = (self.mean * self.weight + kept) / weight
        self.weight = weight
        short = self.short_weight + trials
        self.short_mean = (self.short_mean * self.short_weight + kept) / short
        self.short_weight = short
        if short < 2 * MEASURED:
            return
        variance = self.mean * (1 - self.mean) + 0.02
        if abs(self.short_mean - self.mean) > CHANGE * sqrt(variance / short):
            self.mean, self.weight = self.short_mean, short

    def spread(self) -> float:
        """Standard deviation; never 0, even when all or none were accepted."""
        return sqrt((self.mean * (1 - self.mean) + 0.1) / self.weight)


class Acceptance:
    """The chance that a draft token is accepted, given that those before it were.

    A round tells, for each row, how many of at most ``limit`` tokens it accepted:
    a lifetime, censored at ``limit``. The product of the conditional chances is
    then the product-limit estimate of the survival function (Kaplan and Meier
    1958), which rounds of different k share. Old rounds are forgotten
    exponentially, and at once where the newest say something else. While nothing
    is drafted the estimate stays, and becomes less sure.
    """

    def __init__(self) -> None:
        self._positions: list[_Position] = []

    def observe(self, rows: Iterable[tuple[int, int]]) -> None:
        """One more round: for each row (tokens it could accept, accepted).

        There are none in a round that did not draft.
        """
        found: list[list[int]] = []
        for limit, accepted in rows:
            reached = min(limit, accepted + 1)
            found += [[0, 0] for _ in range(reached - len(found))]
            for j in range(reached):
                found[j][0] += 1
                found[j][1] += j < accepted
        self.observe_positions(found)

    def observe_positions(self, found: Sequence[Sequence[int]]) -> None:
        """One more round: at each position (tokens tried, right), the first one first.

        A position that no token was tried at has (0, 0).
        """
        for position in self._positions:
            position.fade() if found else position.idle()
        for j, (trials, kept) in enumerate(found):
            if j == len(self._positions):
                self._positions.append(self._guess())
            if trials:
                self._positions[j].add(trials, kept)

    def _guess(self) -> _Position:
        """A position that was never reached: as the last one is."""
        if not self._positions:
            return _Position(PRIOR_MEAN, PRIOR_WEIGHT)
        last = self._positions[-1]
        return _Position(last.mean, min(PRIOR_WEIGHT, last.weight))

    @property
    def measured(self) -> int:
        """Positions of which enough has been seen lately."""
        known = PRIOR_WEIGHT + MEASURED
        weights = [p.weight for p in self._positions]
        return next((j for j, w in enumerate(weights) if w < known), len(weights))

    def survival(self, k: int, *, doubt: float = 0.0) -> list[float]:
        """Chances that at least 1, 2, ... ``k`` draft tokens are accepted.

        Args:
            doubt: standard deviations by which each conditional chance is taken
                to be better than its estimate.
        """
        positions = self._positions[:k]
        positions += [self._guess()] * (k - len(positions))
        survival, reached = [], 1.0
        for position in positions:
            mean = position.mean
            if doubt:
                mean = min(1.0, mean + doubt * position.spread())
            reached *= mean
            survival.append(reached)
        return survival


def tokens_per_round(survival: Iterable[float]) -> list[float]:
    """Expected tokens of a row in a round of k = 0, 1, ...: 1 + the sum up to k."""
    expected = [1.0]
    for s in survival:
        expected.append(expected[-1] + s)
    return expected
