"""Estimates how many draft tokens rows accept: by position, and by row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

# An observation weighs 1/e after this many rounds with a draft.
MEMORY = 48.0
# The newest rounds replace an estimate if they differ by this many deviations.
SHORT_MEMORY, CHANGE = 8.0, 3.0
# Each round without a draft adds this to 1 / weight: the estimate grows doubtful.
IDLE_DOUBT = 0.01
# The chance at positions that were never reached, and how many observations it is
# worth.
PRIOR_MEAN, PRIOR_WEIGHT = 0.6, 2.0
# A position counts as measured after this many observations.
MEASURED = 3.0
# How much rows differ (the variance of their factors) before it is known, the squared
# expected tokens that this assumption is worth, and the limits of the variance.
SPREAD, SPREAD_WEIGHT, LEAST_SPREAD, MOST_SPREAD = 1 / 8, 144.0, 1 / 32, 1.0
# Rows that are remembered.
MOST_ROWS = 1024


@dataclass
class _Position:
    """The chance at one position: mean and weight, over all and over new rounds."""

    mean: float
    weight: float
    new_mean: float = 0.0
    new_weight: float = 0.0

    def fade(self) -> None:
        self.weight *= 1 - 1 / MEMORY
        self.new_weight *= 1 - 1 / SHORT_MEMORY

    def idle(self) -> None:
        self.weight /= 1 + IDLE_DOUBT * self.weight
        self.new_weight = 0.0

    def add(self, trials: int, right: int) -> None:
        self.weight += trials
        self.mean += (right - trials * self.mean) / self.weight
        self.new_weight += trials
        self.new_mean += (right - trials * self.new_mean) / self.new_weight
        deviation = sqrt((self.mean * (1 - self.mean) + 0.02) / self.new_weight)
        enough = self.new_weight >= 2 * MEASURED
        if enough and abs(self.new_mean - self.mean) > CHANGE * deviation:
            self.mean, self.weight = self.new_mean, self.new_weight


class Acceptance:
    """The chance of a draft token at each position, if all before it were accepted.

    A row that accepts n of at most m tokens says something about the first
    min(m, n + 1) positions. The product of the chances up to j is the share of rounds
    that accept j tokens or more (Kaplan and Meier 1958). So rounds of every k add to
    one estimate.
    """

    def __init__(self) -> None:
        self._positions: list[_Position] = []

    def observe(self, rows: Iterable[tuple[int, int]]) -> None:
        """Learn from a round.

        Args:
            rows: (tokens that it could accept, accepted) for each row; none for a
                round without a draft.
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
        """Learn from a round: at each position, (tokens tried, right)."""
        for position in self._positions:
            position.fade() if found else position.idle()
        for j, (trials, right) in enumerate(found):
            if j == len(self._positions):
                self._positions.append(_Position(*self._at(j)))
            if trials:
                self._positions[j].add(trials, right)

    def _at(self, j: int) -> tuple[float, float]:
        """Mean and weight at a position; one never reached is like the last one."""
        if j < len(self._positions):
            return self._positions[j].mean, self._positions[j].weight
        if not self._positions:
            return PRIOR_MEAN, PRIOR_WEIGHT
        last = self._positions[-1]
        return last.mean, min(PRIOR_WEIGHT, last.weight)

    @property
    def measured(self) -> int:
        """How many positions were tried often enough, lately."""
        known = PRIOR_WEIGHT + MEASURED
        weights = [p.weight for p in self._positions]
        return next((j for j, w in enumerate(weights) if w < known), len(weights))

    def survival(self, k: int, *, doubt: float = 0.0) -> list[float]:
        """Chances that at least 1, 2, ... ``k`` draft tokens are accepted.

        Args:
            doubt: assume each position to be better by this many standard deviations.
        """
        survival, reached = [], 1.0
        for j in range(k):
            mean, weight = self._at(j)
            if doubt:
                mean += doubt * sqrt((mean * (1 - mean) + 0.1) / weight)
            reached *= min(1.0, mean)
            survival.append(reached)
        return survival


class RowFactors:
    """How many draft tokens each row accepts, relative to all rows.

    Accepted tokens are modelled as Poisson counts whose means differ by gamma factors.
    So a row's factor stays near 1 while little is known of it, and while rows hardly
    differ.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}
        # The expected tokens that "this row is like the others" is worth.
        self._alike = 1 / SPREAD

    def observe(
        self,
        rows: Sequence[int],
        accepted: Iterable[tuple[int, int]],
        survival: Sequence[float],
    ) -> None:
        """Learn from a round.

        Args:
            rows: the rows' numbers.
            accepted: (tokens that it could accept, accepted) for each row.
            survival: chances that at least 1, 2, ... tokens are accepted, over all
                rows.
        """
        if len(self._seen) > MOST_ROWS:
            self._seen = {row: self._seen[row] for row in rows if row in self._seen}
        fade = 1 - 1 / MEMORY
        for row, (limit, count) in zip(rows, accepted, strict=False):
            seen, expected = self._seen.get(row, (0.0, 0.0))
            self._seen[row] = (
                seen * fade + count,
                expected * fade + sum(survival[:limit]),
            )
        # Rows differ as much as their counts vary more than Poisson counts would.
        weight, found = SPREAD_WEIGHT, SPREAD_WEIGHT * SPREAD
        for row in rows:
            seen, expected = self._seen[row]
            weight += expected**2
            found += (seen - expected) ** 2 - expected
        self._alike = 1 / min(MOST_SPREAD, max(LEAST_SPREAD, found / weight))

    def of(self, row: int) -> float:
        """The row's factor; 1 until enough is known."""
        seen, expected = self._seen.get(row, (0.0, 0.0))
        return (seen + self._alike) / (expected + self._alike)


def tokens_per_round(survival: Iterable[float]) -> list[float]:
    """Expected tokens of a row in a round of k = 0, 1, ...: 1 + survival up to k."""
    expected = [1.0]
    for s in survival:
        expected.append(expected[-1] + s)
    return expected
