"""Noise keyed by (seed, position), and tokens chosen with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.sampling import RowSampling, gumbel_noise
from specdec.sampling.filters import Filter
from specdec.sampling.noise import LOWEST_GUMBEL, round_draws
from specdec.sampling_params import SamplingParams


def noise(seed: int, first: int, n: int = 1, vocab: int = 50) -> np.ndarray:
    positions = mx.array([[first + i for i in range(n)]])
    return np.array(gumbel_noise(mx.array([seed], mx.uint32), positions, vocab)[0])


def test_noise_is_that_of_mlx_under_the_key_seed_and_position() -> None:
    key = mx.array([7, 12], mx.uint32)
    expected = np.array(mx.random.gumbel((50,), key=key))
    assert (noise(7, 12)[0] == expected).all()


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds = mx.array([3, 9, 3], mx.uint32)
    positions = mx.array([[5], [5], [6]]) + mx.arange(4)
    together = np.array(gumbel_noise(seeds, positions, 50))
    assert (together[0] == noise(3, 5, 4)).all()
    assert (together[1] == noise(9, 5, 4)).all()
    assert (together[0, 1:] == together[2, :-1]).all()
    assert not (together[0] == together[1]).any()


def test_greedy_rows_need_no_noise() -> None:
    params = [SamplingParams(), SamplingParams(seed=4)]
    sampling = RowSampling.of(params, vocab_size=50)
    draws = sampling.draws(mx.array([1, 1]), 3)
    assert draws.gumbel is None
    logits = mx.random.normal((2, 3, 50))
    chosen = sampling.choose(logits, draws)
    assert (chosen == mx.argmax(logits, axis=-1)).all()


def test_a_greedy_row_among_sampling_ones_stays_greedy() -> None:
    params = [SamplingParams(temperature=0), SamplingParams(temperature=50.0)]
    sampling = RowSampling.of(params, vocab_size=50)
    logits = mx.random.normal((2, 1, 50), key=mx.random.key(0))
    best = mx.argmax(logits, -1)
    agree = np.zeros(2, int)
    for position in range(40):
        draws = sampling.draws(mx.array([position, position]), 1)
        agree += np.array(sampling.choose(logits, draws) == best)[:, 0]
    assert agree[0] == 40
    assert agree[1] < 20


def test_seeds_are_taken_modulo_two_to_the_32() -> None:
    params = [SamplingParams(seed=2**32 + 5), SamplingParams(seed=-1)]
    seeds = RowSampling.of(params, vocab_size=3)
    assert seeds.seed.tolist() == [5, 2**32 - 1]


# Softmax of LOGITS: 0.62, 0.23, 0.08, 0.03, 0.03, 0.004.
LOGITS = np.array([2.0, 1.0, 0.0, -1.0, -1.1, -3.0], np.float32)


@pytest.mark.parametrize(
    ("options", "drawn_from"),
    [
        ({}, 6),
        ({"top_k": 4}, 4),
        ({"top_k": 1}, 1),
        ({"top_p": 0.6}, 1),  # reached by the first alone
        ({"top_p": 0.9}, 3),
        ({"top_p": 0.999}, 6),
        ({"min_p": 0.1}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_p": 0.9, "top_k": 2}, 2),
        ({"top_p": 0.97, "min_p": 0.05}, 3),
    ],
)
def test_frequencies_follow_the_filtered_softmax(
    options: dict[str, Any], drawn_from: int
) -> None:
    """10^5 draws at temperature 0.8; a false alarm: about 1 in 10^6 (seeds fixed)."""
    draws = 100_000
    params = SamplingParams(temperature=0.8, **options)
    one = RowSampling.of([params], vocab_size=6)
    rows = replace(
        one,
        temperature=mx.broadcast_to(one.temperature, (draws,)),
        seed=mx.arange(draws).astype(mx.uint32),
    )
    logits = mx.broadcast_to(mx.array(LOGITS), (draws, 1, 6))
    logits = Filter.of(params).apply(logits)
    noise = replace(rows, filters=()).draws(mx.zeros((draws,), mx.int32), 1)
    chosen = replace(rows, filters=()).choose(logits, noise)
    counts = np.bincount(np.array(chosen)[:, 0], minlength=6)
    p = np.exp(LOGITS / 0.8) * (np.arange(6) < drawn_from)
    p /= p.sum()
    assert counts[drawn_from:].sum() == 0
    expected = p[:drawn_from] * draws
    chi2 = ((counts[:drawn_from] - expected) ** 2 / expected).sum()
    df = drawn_from - 1
    if df == 0:
        assert counts[0] == draws
        return
    assert chi2 < df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3


def test_noise_of_a_draw_of_zero_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in 2**32 draws is 0, and its noise minus infinity: at temperature 0, NaN.

    A row of those would be chosen the NaN's token in place of the best.
    """
    usual = mx.random.gumbel

    def with_a_zero(shape: Any, *, key: mx.array) -> mx.array:
        place = mx.arange(shape[0])
        return mx.where(place == 3, -mx.inf, usual(shape, key=key))

    monkeypatch.setattr(mx.random, "gumbel", with_a_zero)
    seeds, first = mx.array([3, 9], mx.uint32), mx.array([5, 6])
    of_round, _ = round_draws(seeds, first, 2, 50)
    for found in (gumbel_noise(seeds, first[:, None], 50), of_round):
        assert mx.all(found[..., 3] == LOWEST_GUMBEL).item()
        assert mx.all(mx.isfinite(found)).item()
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1.0)]
    sampling = RowSampling.of(params, vocab_size=50)
    logits = mx.random.normal((2, 1, 50), key=mx.random.key(0))
    for best in (0, 49):
        logits[0, 0, best] = 30.0 + best
        chosen = sampling.choose(logits, sampling.draws(first, 1))
        assert chosen[0, 0].item() == best
        assert chosen[1, 0].item() != 3


def test_numbers_may_be_long_and_whole() -> None:
    """MLX takes none beyond 64 bits: rows that join with such a one fail with it."""
    long = 10**30
    params = SamplingParams(
        temperature=1, repetition_penalty=long, presence_penalty=-long,
        frequency_penalty=long, logit_bias={1: long, 2: -long},
    )  # fmt: skip
    mx.eval(RowSampling.of([params, SamplingParams()], vocab_size=5).temperature)
