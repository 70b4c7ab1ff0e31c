"""Caches with a tail hold what caches without one hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from specdec.cache import BatchKVCache


def filled(tail: int, rows: int = 3) -> BatchKVCache:
    """A cache whose rows have 4 to 7 tokens in the base, and 1 to 3 after them."""
    cache = BatchKVCache(rows, tail=tail)
    for seed, trims in ((7, [3, 0, 1]), (2, [0, 0, 1]), (1, [0, 1, 0])):
        write(cache, seed)
        cache.trim_per_sequence(mx.array(trims[:rows]), max(trims), min(trims))
        if seed == 7:
            mx.eval(cache.state)  # a tail begins empty
    return cache


def write(cache: BatchKVCache, num_tokens: int) -> None:
    shape = cache.batch_size, 2, num_tokens, 8
    keys = mx.random.normal(shape, key=mx.random.key(num_tokens))
    cache.make_mask(num_tokens)
    cache.update_and_fetch(keys, keys + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache, other: cache.reset([0, 2]),
        lambda cache, other: cache.place([1], BatchKVCache(1)),
        lambda cache, other: cache.place([2, 0], other),
        lambda cache, other: cache.filter([2, 0]),
        lambda cache, other: cache.extend(other),
        lambda cache, other: cache.trim_per_sequence([4, 0, 2]),
        lambda cache, other: cache.trim_per_sequence(mx.array([4, 0, 2])),
        lambda cache, other: cache.make_finite([1]),
        lambda cache, other: cache.clean([1], 2),
        lambda cache, other: write(cache, 300),
        lambda cache, other: cache.checkpoint(),
    ],
)
def test_rows_are_the_same_after_any_change(change: Callable[..., Any]) -> None:
    """A tail that a change forgets holds tokens of rows that are gone, or moved."""
    caches = [filled(0), filled(16)]
    assert caches[0]._storage.tail is None
    tail = caches[1]._storage.tail
    assert tail is not None
    assert (tail.most, tail.fewest) == (3, 1)
    for cache in caches:
        other = filled(16, rows=2)
        if cache is caches[0]:
            mx.eval(other.state)
        change(cache, other)
        for width in (2, 1, 2):
            write(cache, width)
            cache.trim_per_sequence([1, 0, 0, 1, 0][: cache.batch_size])
    usual, ours = caches
    assert ours.offset.tolist() == usual.offset.tolist()
    assert ours.nbytes > usual.nbytes or ours._storage.tail is None
    for row in range(usual.batch_size):
        for name in ("keys", "values"):
            rows = [getattr(cache.extract(row), name) for cache in caches]
            assert mx.array_equal(*rows), row
