"""Acceptance by position: from rounds of different k, and from changing drafts."""

from __future__ import annotations

import math
import random

import pytest

from specdec.spec_decode.draft_length import (
    Acceptance,
    RoundTiming,
    emissions,
    lateness,
    tokens_per_round,
)


def observe(acceptance: Acceptance, rows: list[tuple[int, int]]) -> None:
    k = max((limit for limit, _ in rows), default=0)
    acceptance.observe(RoundTiming(len(rows), k, rows))


def observed(accept: float, ks: list[int], rounds: int, seed: int = 0) -> Acceptance:
    rng = random.Random(seed)
    acceptance = Acceptance()
    for _ in range(rounds):
        rows = []
        for k in ks:
            n = 0
            while n < k and rng.random() < accept:
                n += 1
            rows.append((k, n))
        observe(acceptance, rows)
    return acceptance


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.8, 1.0])
def test_survival_is_found(accept: float) -> None:
    """40 rows of each k over 48 rounds' memory: within 4 standard errors."""
    acceptance = observed(accept, [4] * 40, 100)
    for j, s in enumerate(acceptance.survival(4), 1):
        assert s == pytest.approx(accept**j, abs=0.05)


def test_rounds_of_different_k_share_what_they_saw() -> None:
    """Rows that could accept fewer say nothing of the positions after."""
    acceptance = observed(0.8, [1] * 30 + [4] * 30, 100)
    for j, s in enumerate(acceptance.survival(4), 1):
        assert s == pytest.approx(0.8**j, abs=0.05)


def test_rows_that_differ_are_averaged_as_rows() -> None:
    """Half accept all and half nothing: s_j is 0.5 at every j, not 0.5**j."""
    acceptance = Acceptance()
    for _ in range(50):
        observe(acceptance, [(3, 3), (3, 0)])
    assert acceptance.survival(3) == pytest.approx([0.5] * 3, abs=0.03)


def test_positions_never_reached_continue_the_last() -> None:
    acceptance = observed(0.8, [2] * 40, 100)
    one, two, three, four = acceptance.survival(4)
    assert three / two == pytest.approx(two / one)
    assert four / three == pytest.approx(two / one)
    assert acceptance.measured == 2


def test_a_change_is_followed() -> None:
    acceptance = Acceptance()
    for accepted in (2, 0):
        for _ in range(150):
            observe(acceptance, [(2, accepted)])
    assert acceptance.survival(1)[0] < 0.1


def test_what_grows_old_is_doubted_not_changed() -> None:
    acceptance = observed(0.0, [1], 40)
    before, doubted = acceptance.survival(1)[0], acceptance.survival(1, doubt=1.5)[0]
    for _ in range(2000):
        observe(acceptance, [])
    assert acceptance.survival(1)[0] == before < 0.1
    assert doubted < 0.4 < acceptance.survival(1, doubt=1.5)[0]


def test_tokens_per_round() -> None:
    """The closed form (1 - a^(k+1)) / (1 - a) where all positions are alike."""
    a = 0.75
    expected = tokens_per_round([a**j for j in range(1, 5)])
    assert expected == pytest.approx([(1 - a ** (k + 1)) / (1 - a) for k in range(5)])


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("num_tokens", [16, 32, 128])
@pytest.mark.parametrize(
    "chances", [(0.72, 0.66, 0.67, 0.69, 0.63, 0.62), (0.5, 0.55, 0.6, 0.6), (0.2,) * 4]
)
def test_the_last_of_many_rows(
    num_rows: int, num_tokens: int, chances: tuple[float, ...]
) -> None:
    """Catches rounds that are counted as if all rows ended with the mean one."""
    rng, times, rounds = random.Random(1), max(20, 1000 // num_rows), 0
    for _ in range(times):
        last = 0
        for _ in range(num_rows):
            left, taken = num_tokens, 0
            while left > 0:
                wrong = (j for j, c in enumerate(chances) if rng.random() >= c)
                left -= 1 + next(wrong, len(chances))
                taken += 1
            last = max(last, taken)
        rounds += last
    survival = [math.prod(chances[:j]) for j in range(1, len(chances) + 1)]
    expected = emissions(survival)[-1].rounds(num_tokens, lateness(num_rows))
    assert expected == pytest.approx(rounds / times, rel=0.07)
