"""``BatchKVCache``: growth, extents, masks, rows and exchange with mlx-lm."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from specdec.cache import BatchKVCache, BatchRotatingKVCache
from specdec.errors import CacheError

HEADS, DIM = 2, 8


def tokens(rows: int, n: int, seed: int = 0) -> mx.array:
    key = mx.random.key(seed)
    return mx.random.normal((rows, HEADS, n, DIM), key=key)


def write(cache: Any, n: int, seed: int = 0) -> Any:
    x = tokens(cache.batch_size, n, seed)
    return cache.update_and_fetch(x, -x)


def filled(lengths: list[int], **settings: Any) -> BatchKVCache:
    """Row ``i`` holds the first ``lengths[i]`` of the same tokens."""
    cache = BatchKVCache(len(lengths), **settings)
    write(cache, max(lengths))
    cache.trim_per_sequence([max(lengths) - n for n in lengths])
    return cache


def equal(a: Any, b: Any) -> bool:
    return bool(mx.array_equal(a, b))


class TestGrowth:
    @pytest.mark.parametrize(
        ("writes", "capacity"),
        [
            ([1], 256),
            ([256], 256),
            ([257], 512),
            ([256, 1], 512),
            ([2048], 2048),
            ([2048, 2048, 1], 8192),
            ([1, 2048], 4096),
            ([300, 5000], 8192),
        ],
    )
    def test_capacity_after(self, writes: list[int], capacity: int) -> None:
        cache = BatchKVCache(2)
        for n in writes:
            write(cache, n)
        assert cache.capacity == capacity
        assert cache.nbytes == 2 * 2 * HEADS * capacity * DIM * 4

    @pytest.mark.parametrize("max_length", [1, 100, 256, 300, 1000])
    def test_never_passes_max_length(self, max_length: int) -> None:
        cache = BatchKVCache(1, max_length=max_length, read_bucket=64)
        for _ in range(max_length):
            keys, _ = write(cache, 1)
            assert cache.capacity <= max_length
            assert keys.shape[2] <= max_length
        with pytest.raises(CacheError, match=r"^[^\n]*max_length$") as caught:
            write(cache, 1)
        assert str(max_length + 1) in str(caught.value)
        assert cache.size() == max_length

    def test_a_loose_bound_does_not_grow_it(self) -> None:
        """What per-sequence trims took back is looked up before growing."""
        cache = BatchKVCache(2)
        for _ in range(300):
            write(cache, 5)
            cache.trim_per_sequence(mx.array([4, 5]))
        assert cache.offset.tolist() == [300, 0]
        assert cache.capacity == 512

    def test_needs_no_host_length_until_the_bound_is_reached(self) -> None:
        cache = BatchKVCache(2, max_length=10)
        write(cache, 8)
        cache.trim_per_sequence(mx.array([8, 8]))
        write(cache, 10)
        assert cache.offset.tolist() == [10, 10]


class TestReading:
    @pytest.mark.parametrize("bucket", [1, 3, 64, 256])
    def test_extent_is_bucketed(self, bucket: int) -> None:
        cache = BatchKVCache(2, read_bucket=bucket)
        for n in range(1, 300, 13):
            mask = cache.make_mask(13, return_array=True)
            keys, _ = write(cache, 13)
            longest = 13 * (n // 13 + 1)
            extent = min(-(-longest // bucket) * bucket, cache.capacity)
            assert keys.shape[2] == extent
            assert mask is not None
            assert mask.shape[-1] == extent  # type: ignore[union-attr]

    def test_noted_lengths_shrink_it(self) -> None:
        cache = filled([90, 20])
        cache.filter([1])
        assert write(cache, 1)[0].shape[2] == 91
        cache.note_lengths(longest=21, shortest=21)
        assert cache.make_mask(1) is None
        assert write(cache, 1)[0].shape[2] == 22

    def test_mask_forms(self) -> None:
        """What mlx-lm's caches return, wherever no array is needed."""
        cache = BatchKVCache(2)
        assert cache.make_mask(1) is None
        assert cache.make_mask(5) == "causal"
        assert cache.make_mask(5, return_array=True).dtype == mx.bool_  # type: ignore[union-attr]
        write(cache, 4)
        assert cache.make_mask(1) is None
        assert cache.make_mask(3) == "causal"
        assert cache.make_mask(3, window_size=7) == "causal"
        narrow = cache.make_mask(3, window_size=6)
        assert np.array(narrow)[0, 0].tolist() == [
            [True] * 5 + [False] * 2,
            [True] * 6 + [False],
            [False] + [True] * 6,
        ]
        cache.trim_per_sequence([0, 0])
        assert cache.make_mask(1) is None
        cache.trim_per_sequence([0, 1])
        ragged = cache.make_mask(1)
        assert np.array(ragged)[:, 0, 0].tolist() == [[True] * 5, [True] * 4 + [False]]

    def test_additive_masks_have_the_caches_type(self) -> None:
        cache = BatchKVCache(1, additive_mask=True)
        x = tokens(1, 3).astype(mx.bfloat16)
        assert cache.make_mask(2, return_array=True).dtype == mx.bool_  # type: ignore[union-attr]
        cache.update_and_fetch(x, x)
        mask: Any = cache.make_mask(2, return_array=True)
        assert mask.dtype == mx.bfloat16
        infinite = float("-inf")
        assert mask[0, 0].tolist() == [[0, 0, 0, 0, infinite], [0, 0, 0, 0, 0]]

    def test_writes_are_in_place(self) -> None:
        """No second copy of the cache while nobody holds the first."""
        cache = BatchKVCache(1)
        x = mx.zeros((1, 8, 4096, 64))
        cache.update_and_fetch(x, x)
        del x
        mx.eval(cache.state)
        one = mx.zeros((1, 8, 1, 64))
        cache.trim(10)
        mx.eval(cache.state, one)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(3):
            mx.eval(cache.update_and_fetch(one, one))
        assert mx.get_peak_memory() - before < cache.nbytes / 100


class TestPadding:
    def test_refusals(self) -> None:
        cache = BatchKVCache(2)
        with pytest.raises(CacheError, match="left padding"):
            cache.prepare(left_padding=[0, 1])
        with pytest.raises(CacheError, match="2 rows"):
            cache.prepare(lengths=[1])
        cache.prepare(lengths=[1, 2], right_padding=[1, 0])
        with pytest.raises(CacheError, match="between prepare and finalize"):
            cache.filter([0])


class TestRows:
    def test_extend_after_filter_to_none_starts_afresh(self) -> None:
        cache = filled([5000])
        cache.filter([])
        cache.extend(filled([3]))
        assert cache.capacity == 256

    def test_extend_refuses_other_kinds(self) -> None:
        with pytest.raises(CacheError, match="cannot join"):
            filled([3]).extend(BatchRotatingKVCache(1, max_size=4))  # type: ignore[arg-type]
        with pytest.raises(CacheError, match="cannot join"):
            filled([3]).extend(BatchKVCache(1, bits=8))

    def test_rows_must_match(self) -> None:
        x = tokens(3, 1)
        with pytest.raises(CacheError, match="3 rows were written to a cache of 2"):
            BatchKVCache(2).update_and_fetch(x, x)


class TestExchange:
    def test_merge_refuses(self) -> None:
        with pytest.raises(CacheError, match="at least one"):
            BatchKVCache.merge([])
        with pytest.raises(CacheError, match="RotatingKVCache cannot become"):
            BatchKVCache.merge([mlx_lm_cache.RotatingKVCache(4)])

    def test_state_round_trip(self) -> None:
        cache = filled([5, 2], max_length=700, read_bucket=4)
        again = BatchKVCache.from_state(cache.state)
        assert again.offset.tolist() == [5, 2]
        assert (again.max_length, again.read_bucket) == (700, 4)
        write(again, 300)
        write(again, 300)
        assert again.capacity == 700
        assert cache.capacity == 256


def test_layers_share_what_they_compute() -> None:
    from specdec.cache import Memo

    memo = Memo()
    caches = [BatchKVCache(2, memo=memo) for _ in range(3)]
    n = mx.array([1, 2])
    for cache in caches:
        write(cache, 3)
        cache.trim_per_sequence(n, at_most=2)
        cache.filter([1, 0])
    assert len({id(c.offset) for c in caches}) == 1
    assert len({id(c.make_mask(2)) for c in caches}) == 1


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64])
def test_a_trim_on_the_device_takes_back_between_nothing_and_everything(
    dtype: mx.Dtype,
) -> None:
    """Less than 0 would lengthen a row by tokens that were never written to it."""
    cache = filled([3, 5, 4])
    cache.trim_per_sequence(mx.array([-2, 9, 1], dtype), at_most=9)
    assert cache.offset.tolist() == [3, 0, 3]
