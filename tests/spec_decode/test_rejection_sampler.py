"""The rule of a round: what is kept, checked by hand, by brute force, by chance."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from specdec.spec_decode.commit import count_kept, next_recent
from tests.chains import chi_square, three_tokens
from tests.spec_decode.test_ratio_rules import DRAWS, decodings, markov_chains


def kept_by_hand(proposed: list[int], chosen: list[int], limit: int) -> int:
    if limit < 0:
        return 0
    kept = 1
    for draft, target in zip(proposed[:limit], chosen, strict=False):
        if draft != target:
            break
        kept += 1
    return kept


def test_count_kept_all_cases_of_three_tokens() -> None:
    rows = [
        (proposed, chosen, limit)
        for proposed in itertools.product(range(3), repeat=2)
        for chosen in itertools.product(range(3), repeat=3)
        for limit in (-1, 0, 1, 2)
    ]
    kept = count_kept(
        mx.array([r[0] for r in rows]),
        mx.array([r[1] for r in rows]),
        mx.array([r[2] for r in rows]),
    )
    expected = [kept_by_hand(list(p), list(c), n) for p, c, n in rows]
    assert kept.tolist() == expected
    assert set(expected) == {0, 1, 2, 3}


def test_count_kept_without_proposals() -> None:
    proposed = mx.zeros((3, 0), mx.int32)
    chosen = mx.array([[4], [5], [6]])
    limit = mx.array([0, -1, 0])
    assert count_kept(proposed, chosen, limit).tolist() == [1, 0, 1]


def test_agreement_after_the_first_difference_is_not_kept() -> None:
    kept = count_kept(
        mx.array([[1, 9, 3, 4]]), mx.array([[1, 2, 3, 4, 5]]), mx.array([4])
    )
    assert kept.tolist() == [2]


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [[7, 8], [-1, 6, 7, 8], [8]])
def test_next_recent_is_the_newest_committed(kept: int, before: list[int]) -> None:
    committed = [*before, *[1, 2, 3][:kept]]
    recent = next_recent(mx.array([before]), mx.array([[1, 2, 3]]), mx.array([kept]))
    assert recent.tolist() == [committed[-len(before) :]]


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (2, 0.7), (4, 1.0)])
def test_coupled_sampling_keeps_the_targets_distribution(
    k: int, temperature: float
) -> None:
    """Chi-square of whole sequences; a wrong rule fails, a right one in 1 of 10^6.

    Fixed seeds: the outcome never changes.
    """
    target, draft = markov_chains()
    decoded = decodings("coupled", target, draft, k, DRAWS, temperature)
    wanted = three_tokens(target, temperature) * DRAWS
    statistic, bound = chi_square(decoded.histogram(4), wanted)
    assert statistic < bound


def test_output_does_not_depend_on_draft_or_draft_length() -> None:
    rng = np.random.default_rng(4)
    target = rng.normal(size=(5, 5)).astype(np.float32)
    reference = decodings("coupled", target, target, 1, 200, 1.0).tokens
    for k in (1, 3):
        draft = rng.normal(size=(5, 5)).astype(np.float32)
        assert (
            decodings("coupled", target, draft, k, 200, 1.0).tokens == reference
        ).all()
