"""The tests of a distribution, against closed forms and simulated counts."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from specdec.tools.parity.statistics import chi_square_tail, fit, rare_tail


@pytest.mark.parametrize("x", [1e-3, 0.5, 1.0, 3.0, 7.9, 8.1, 30.0, 300.0])
def test_the_chi_square_tail_is_the_closed_form(x: float) -> None:
    """For 1, 2, 4 and 10 degrees of freedom there is one."""
    half = x / 2
    poisson = sum(half**i / math.factorial(i) for i in range(5))
    for df, expected in (
        (1, math.erfc(math.sqrt(half))),
        (2, math.exp(-half)),
        (4, math.exp(-half) * (1 + half)),
        (10, math.exp(-half) * poisson),
    ):
        assert chi_square_tail(x, df) == pytest.approx(expected, rel=1e-9)


def test_the_chi_square_tail_of_many_degrees() -> None:
    for df, x in ((50, 113.0), (500, 660.0), (500, 400.0), (1000, 1500.0)):
        terms = (
            i * math.log(x / 2) - x / 2 - math.lgamma(i + 1) for i in range(df // 2)
        )
        expected = math.fsum(map(math.exp, terms))
        assert chi_square_tail(x, df) == pytest.approx(expected, rel=1e-9)
    assert chi_square_tail(5.0, 0) == 1.0
    assert chi_square_tail(0.0, 3) == 1.0


def test_the_rare_tail_bounds_poissons() -> None:
    for expected in (0.01, 0.5, 3.0, 9.0):
        for count in range(1, 40):
            below = sum(
                math.exp(-expected) * expected**i / math.factorial(i)
                for i in range(count)
            )
            assert rare_tail(count, expected) >= 1 - below - 1e-12
    assert rare_tail(0, 0.0) == rare_tail(3, 3.0) == 1.0
    assert rare_tail(1, 0.0) == 0.0
    assert rare_tail(256, 0.1) < 1e-100


def test_cells() -> None:
    p = np.array([0.5, 0.3, 0.17, 0.02, 0.01])
    result = fit({0: 50, 1: 30, 2: 17, 3: 2, 4: 1}, p)
    assert (result.draws, result.df, result.rare) == (100, 2, 3)
    assert result.statistic == pytest.approx(0.0)
    assert result.rare_expected == pytest.approx(3.0)
    # With enough draws the rare ones are a cell of their own.
    result = fit({0: 500, 1: 300, 2: 170, 3: 20, 4: 10}, p)
    assert (result.df, result.rare, result.rare_expected) == (4, 0, 0.0)
    p = np.array([0.5, *[0.005] * 100])
    result = fit({0: 100, 7: 100}, p)
    assert (result.df, result.rare) == (1, 0)
    assert result.statistic == pytest.approx(0.0)


def test_p_values_are_not_too_small() -> None:
    """Of 2000 fits of right draws, p is below 0.01 in no more than 1% (5 sigma)."""
    rng = np.random.default_rng(0)
    small = 0
    for _ in range(2000):
        p = rng.dirichlet(np.full(30, 0.3))
        result = fit(Counter(rng.choice(30, size=100, p=p).tolist()), p)
        small += result.p_value < 0.01
    assert small <= 20 + 5 * math.sqrt(20)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5], [0.2, 0.8]),
        ([0.4, 0.3, 0.3], [0.3, 0.3, 0.4]),
        # One likely token: there is a single cell, and what is beside it.
        ([0.99, 0.01], [0.9, 0.1]),
        ([1 - 1e-9, 1e-9], [0.97, 0.03]),
    ],
)
def test_other_distributions_are_found(p: list[float], q: list[float]) -> None:
    rng = np.random.default_rng(1)
    draws = 1000
    wrong = Counter(rng.choice(len(q), size=draws, p=q).tolist())
    assert fit(wrong, np.array(p)).p_value < 1e-6
    right = Counter(rng.choice(len(p), size=draws, p=p).tolist())
    assert fit(right, np.array(p)).p_value > 1e-3
