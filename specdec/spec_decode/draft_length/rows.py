"""What tells rows apart: how much of a draft each accepts, and when the last ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import sqrt
from statistics import NormalDist

# Observations after which one weighs 1/e; rows that are remembered, those that have
# ended among them.
MEMORY, MOST_ROWS = 64.0, 1024
# How much rows differ before it is known: the variance of their factors, and the square
# of the expected tokens that this is worth; what it is held within; rounds between two
# estimates.
PRIOR_VARIANCE, PRIOR_WEIGHT = 1 / 8, 144.0
VARIANCES, ESTIMATED_EVERY = (1 / 32, 1.0), 8


class RowAcceptance:
    """Draft tokens that rows accepted, over what is expected of all alike.

    A factor, drawn to 1: as for a Poisson count whose mean is the expected number times
    a factor with a gamma prior around 1, whose variance is estimated from all rows by
    its moments (what counts vary more than Poisson's).
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}
        self._prior = 1 / PRIOR_VARIANCE
        self._rounds = 0

    def observe(
        self,
        rows: Sequence[int],
        accepted: Iterable[tuple[int, int]],
        survival: Sequence[float],
    ) -> None:
        """One more round: each row's number, (tokens it could accept, accepted).

        Args:
            survival: chances that at least 1, 2, ... tokens are accepted, of all rows.
        """
        if len(self._seen) > MOST_ROWS:
            self._seen = {row: self._seen[row] for row in rows if row in self._seen}
        for row, (limit, count) in zip(rows, accepted, strict=False):
            kept, expected = self._seen.get(row, (0.0, 0.0))
            fading = 1 - 1 / MEMORY
            self._seen[row] = (
                kept * fading + count,
                expected * fading + sum(survival[:limit]),
            )
        self._rounds += 1
        if self._rounds % ESTIMATED_EVERY == 0:
            self._estimate()

    def _estimate(self) -> None:
        """How much rows differ: the gamma prior's shape, which is 1 / variance."""
        weight, found = PRIOR_WEIGHT, PRIOR_WEIGHT * PRIOR_VARIANCE
        for kept, expected in self._seen.values():
            weight += expected**2
            found += (kept - expected) ** 2 - expected
        least, most = VARIANCES
        self._prior = 1 / min(most, max(least, found / weight))

    def factor(self, row: int) -> float:
        """How many times as much as others the row accepts."""
        kept, expected = self._seen.get(row, (0.0, 0.0))
        return (kept + self._prior) / (expected + self._prior)

    def least(self, row: int, num_rows: int) -> float:
        """A factor as low as it may be where the lowest of ``num_rows`` counts.

        The quantile 1 / (sqrt(num_rows) + 1) of the gamma posterior, by the cube root's
        normal approximation (Wilson and Hilferty 1931): of one row its median; of many
        not as low as the lowest is, since that one need not have the most left.
        """
        kept, expected = self._seen.get(row, (0.0, 0.0))
        shape = kept + self._prior
        root = 1 - 1 / (9 * shape) - _deviations(num_rows) / (3 * sqrt(shape))
        return shape / (expected + self._prior) * max(0.0, root) ** 3


@cache
def _deviations(num_rows: int) -> float:
    """Standard deviations of that quantile below the mean."""
    among = sqrt(num_rows)
    return NormalDist().inv_cdf(among / (among + 1))


def rounds_left(
    rows: Iterable[tuple[int, float]], k: int, tokens: float
) -> list[float]:
    """Rounds of k until each row has ended.

    Args:
        rows: of each, tokens that it may still emit, and its factor.
        tokens: expected of a round, of all rows.
    """
    more = tokens - 1
    return [n / (1 + min(k, factor * more)) for n, factor in rows]
