"""Noise keyed by (seed, position), and tokens chosen with it."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from specdec.config import SamplingParams
from specdec.sampling import RowSampling, choose, gumbel_noise


def noise(seed: int, first: int, n: int = 1, vocab: int = 50) -> np.ndarray:
    drawn = gumbel_noise(mx.array([seed], mx.uint32), mx.array([first]), n, vocab)
    return np.array(drawn[0])


def test_noise_is_that_of_mlx_under_the_key_seed_and_position() -> None:
    key = mx.array([7, 12], mx.uint32)
    expected = np.array(mx.random.gumbel((50,), key=key))
    assert (noise(7, 12)[0] == expected).all()


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds = mx.array([3, 9, 3], mx.uint32)
    together = np.array(gumbel_noise(seeds, mx.array([5, 5, 6]), 4, 50))
    assert (together[0] == noise(3, 5, 4)).all()
    assert (together[1] == noise(9, 5, 4)).all()
    assert (together[0, 1:] == together[2, :-1]).all()
    assert not (together[0] == together[1]).any()


def test_greedy_rows_need_no_noise() -> None:
    sampling = RowSampling.of([SamplingParams(), SamplingParams(seed=4)])
    assert sampling.noise(mx.array([1, 1]), 3, 50) is None
    logits = mx.random.normal((2, 3, 50))
    chosen = choose(logits, sampling, None)
    assert (chosen == mx.argmax(logits, axis=-1)).all()


def test_a_greedy_row_among_sampling_ones_stays_greedy() -> None:
    sampling = RowSampling.of(
        [SamplingParams(temperature=0), SamplingParams(temperature=50.0)]
    )
    logits = mx.random.normal((2, 1, 50), key=mx.random.key(0))
    best = mx.argmax(logits, -1)
    agree = np.zeros(2, int)
    for position in range(40):
        drawn = sampling.noise(mx.array([position, position]), 1, 50)
        agree += np.array(choose(logits, sampling, drawn) == best)[:, 0]
    assert agree[0] == 40
    assert agree[1] < 20


def test_seeds_are_taken_modulo_two_to_the_32() -> None:
    seeds = RowSampling.of([SamplingParams(seed=2**32 + 5), SamplingParams(seed=-1)])
    assert seeds.seed.tolist() == [5, 2**32 - 1]


def test_frequencies_follow_the_softmax() -> None:
    """10^5 draws; a false alarm has a probability of about 1 in 10^6."""
    draws, logits = 100_000, np.array([2.0, 1.0, 0.0, -1.0, -3.0], np.float32)
    sampling = RowSampling.of([SamplingParams(temperature=0.8, seed=11)])
    rows = RowSampling(
        mx.broadcast_to(sampling.temperature, (draws,)),
        mx.arange(draws).astype(mx.uint32),
        greedy=False,
    )
    drawn = rows.noise(mx.zeros((draws,), mx.int32), 1, 5)
    chosen = choose(mx.broadcast_to(mx.array(logits), (draws, 1, 5)), rows, drawn)
    counts = np.bincount(np.array(chosen)[:, 0], minlength=5)
    p = np.exp(logits / 0.8)
    p /= p.sum()
    chi2 = ((counts - p * draws) ** 2 / (p * draws)).sum()
    df = 4
    assert chi2 < df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3
