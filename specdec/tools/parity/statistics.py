"""Test whether counts follow given probabilities. Numpy alone: no mlx, no models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# With fewer expected draws the chi-square distribution is not a good approximation.
MIN_EXPECTED = 10.0


@dataclass(frozen=True)
class Fit:
    """How counts of tokens fit their probabilities.

    Args:
        draws: number of draws.
        statistic, df: Pearson's chi-square over cells with ``MIN_EXPECTED`` or more
            expected draws, and its degrees of freedom. A cell is a single token; all
            other tokens form one more cell if that is large enough.
        rare, rare_expected: actual and expected draws of the other tokens if their cell
            is too small; else 0.
    """

    draws: int
    statistic: float
    df: int
    rare: int
    rare_expected: float

    @property
    def p_value(self) -> float:
        """The smaller p-value of the two tests, doubled since there are two."""
        common = chi_square_tail(self.statistic, self.df)
        return min(1.0, 2 * min(common, rare_tail(self.rare, self.rare_expected)))


def fit(counts: Mapping[int, int], probabilities: np.ndarray) -> Fit:
    """Compare counts of tokens with the probabilities of all tokens, shape (V,)."""
    draws = sum(counts.values())
    p = probabilities.astype(np.float64)
    p = p / p.sum()
    common = [int(t) for t in np.nonzero(p * draws >= MIN_EXPECTED)[0]]
    observed = [counts.get(t, 0) for t in common]
    share = [float(p[t]) for t in common]
    rare, rare_share = draws - sum(observed), max(0.0, 1.0 - sum(share))
    rare_expected = rare_share * draws
    if rare_expected >= MIN_EXPECTED:
        observed.append(rare)
        share.append(rare_share)
        rare, rare_expected = 0, 0.0
    # Given the number of rare draws, the others are multinomial among themselves.
    within, total = sum(observed), sum(share)
    statistic = 0.0
    for count, each in zip(observed, share, strict=True):
        expected = within * each / total
        if expected > 0:
            statistic += (count - expected) ** 2 / expected
    return Fit(draws, statistic, max(len(observed) - 1, 0), rare, rare_expected)


def rare_tail(count: int, expected: float) -> float:
    """Bound on the chance of ``count`` or more events if few were expected.

    Chernoff's bound for any sum of independent trials: ``exp(c - e) (e / c)**c``.
    """
    if count <= expected:
        return 1.0
    if expected == 0:
        return 0.0
    return math.exp(count - expected + count * math.log(expected / count))


def chi_square_tail(statistic: float, df: int) -> float:
    """Chance that a chi-square variable of ``df`` degrees is at least ``statistic``.

    This is the regularised upper incomplete gamma function Q(df / 2, statistic / 2).
    Below the mean it is computed as 1 minus the power series of P (DLMF 8.11.4), above
    the mean by a continued fraction (DLMF 8.9.2). With no degrees of freedom it is 1.
    """
    if df == 0 or statistic <= 0:
        return 1.0
    a, x = df / 2, statistic / 2
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1.0 - scale * total)
    # The fraction is evaluated from its tail; it converges quickly for x above a + 1.
    fraction = 0.0
    for i in range(1000, 0, -1):
        fraction = i * (i - a) / (x + 2 * i + 1 - a - fraction)
    return scale / (x + 1 - a - fraction)
