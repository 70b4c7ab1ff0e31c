"""How many draft tokens rows accept: by position, and row against row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

# An observation weighs 1/e after so many rounds that drafted.
MEMORY = 48.0
# The newest rounds replace the estimate where they differ by so many deviations.
SHORT_MEMORY, CHANGE = 8.0, 3.0
# Each round that did not draft adds this to 1 / weight: the estimate grows doubtful.
IDLE_DOUBT = 0.01
# The chance at a position that was never reached, and the observations it is worth.
PRIOR_MEAN, PRIOR_WEIGHT = 0.6, 2.0
# A position counts as measured from so many observations on.
MEASURED = 3.0
# How much rows differ before it is known (the variance of their factors), the squared
# expected tokens that this is worth, and what it is held within.
SPREAD, SPREAD_WEIGHT, LEAST_SPREAD, MOST_SPREAD = 1 / 8, 144.0, 1 / 32, 1.0
# Rows that are remembered.
MOST_ROWS = 1024


@dataclass
class _Position:
    """The chance at one position: its mean, of how many observations, lately too."""

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
    """The chance of a draft token at each position, given that those before it held.

    A row that accepts n of at most m tokens shows the first min(m, n + 1)
    positions. The product of the chances is the share of rounds that accept so many
    tokens (Kaplan and Meier 1958), so that rounds of different k share what they saw.
    """

    def __init__(self) -> None:
        self._positions: list[_Position] = []

    def observe(self, rows: Iterable[tuple[int, int]]) -> None:
        """Learn from a round: of each row, (tokens that it could accept, accepted).

        A round that did not draft has none.
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
        """Mean and weight of a position; one never reached is like the last one."""
        if j < len(self._positions):
            return self._positions[j].mean, self._positions[j].weight
        if not self._positions:
            return PRIOR_MEAN, PRIOR_WEIGHT
        last = self._positions[-1]
        return last.mean, min(PRIOR_WEIGHT, last.weight)

    @property
    def measured(self) -> int:
        """Positions that were tried often enough of late."""
        known = PRIOR_WEIGHT + MEASURED
        weights = [p.weight for p in self._positions]
        return next((j for j, w in enumerate(weights) if w < known), len(weights))

    def survival(self, k: int, *, doubt: float = 0.0) -> list[float]:
        """Chances that at least 1, 2, ... ``k`` draft tokens are accepted.

        Args:
            doubt: standard deviations by which each position is taken to be better.
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
    """How many draft tokens each row accepts, as a factor of what all rows do.

    A factor is drawn to 1, the more the less rows differ: accepted tokens are taken for
    Poisson counts whose means differ by gamma factors.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}
        # Expected tokens that "this row is like the others" is worth.
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
            accepted: of each, (tokens that it could accept, accepted).
            survival: chances that at least 1, 2, ... tokens are accepted, of all rows.
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
        # What counts vary more than Poisson's is how much rows differ.
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
    """Expected tokens of a row in a round of k = 0, 1, ...: 1 + the sum up to k."""
    expected = [1.0]
    for s in survival:
        expected.append(expected[-1] + s)
    return expected
