"""Quantized caches: size, memory while attending, and coming from dense ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from specdec.cache import (
    BatchChunkedKVCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheOptions,
    maybe_quantize,
)
from specdec.errors import CacheError

HEADS, DIM = 2, 64


def tokens(rows: int, n: int, dim: int = DIM, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((rows, HEADS, n, dim), key=mx.random.key(n)).astype(dtype)


def attend(cache: Any, x: mx.array, queries: mx.array) -> mx.array:
    """Write ``x`` as keys and values; what ``queries`` get."""
    mask: Any = cache.make_mask(x.shape[2])
    k, v = cache.update_and_fetch(x, x)
    # A handle of their own: mlx-lm scales the queries it is given in place.
    output: mx.array = scaled_dot_product_attention(
        queries[...], k, v, cache=cache, scale=0.1, mask=mask
    )
    return output


def dense(kind: str, rows: int = 2, *, unpacks: bool = False) -> Any:
    if kind == "linear":
        return BatchKVCache(rows, unpacks=unpacks)
    if kind == "ring":
        return BatchRotatingKVCache(
            rows, max_size=16, keep=2, max_write=4, unpacks=unpacks
        )
    return BatchChunkedKVCache(rows, chunk_size=16, max_write=4, unpacks=unpacks)


@pytest.mark.parametrize(
    ("bits", "group_size", "times_smaller"),
    # Per element: bits, and 32 more (scale and bias) per group.
    [(4, 32, 16 / 5), (4, 64, 16 / 4.5), (4, 128, 16 / 4.25), (8, 64, 16 / 8.5)],
)
def test_size(bits: int, group_size: int, times_smaller: float) -> None:
    x = tokens(2, 256, dim=128, dtype=mx.bfloat16)
    small = BatchKVCache(2, bits=bits, group_size=group_size)
    small.update_and_fetch(x, x)
    large = BatchKVCache(2)
    large.update_and_fetch(x, x)
    assert large.nbytes / small.nbytes == pytest.approx(times_smaller)


@pytest.mark.parametrize("kind", ["linear", "ring", "chunked"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("switch", [0, 3, 30])
def test_quantizing_later_stores_the_same(kind: str, bits: int, switch: int) -> None:
    """As if quantized from the first token, and with the same way back."""
    late, early = dense(kind), dense(kind).to_quantized(group_size=32, bits=bits)
    x = tokens(2, 40)
    for i in range(40):
        if i == switch:
            late = late.to_quantized(group_size=32, bits=bits)
        token = x[:, :, i : i + 1]
        outputs = [attend(c, token, token) for c in (late, early)]
        if i >= switch:
            assert mx.array_equal(outputs[0], outputs[1])
        for c in (late, early):
            c.trim_per_sequence([1, 0] if i % 7 == 6 else [0, 0])
    assert late.offset.tolist() == early.offset.tolist()
    assert late.nbytes == early.nbytes


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_makes_no_dequantized_copy(queries: int) -> None:
    """Peak memory while attending: packed columns at most (the CPU copies them)."""
    columns, heads, dim = 4096, 8, 128
    x = mx.random.normal((1, heads, columns, dim)).astype(mx.bfloat16)
    cache = BatchKVCache(1, bits=4, group_size=64, unpacks=False)
    cache.update_and_fetch(x, x)
    cache.trim_per_sequence([queries + 3])
    new = x[:, :, :queries]
    mx.eval(cache.state, new)
    q = mx.random.normal((1, heads, queries, dim)).astype(mx.bfloat16)
    mask: Any = cache.make_mask(queries)
    mx.eval(q, mask)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    k, v = cache.update_and_fetch(new, new)
    out = scaled_dot_product_attention(q, k, v, cache=cache, scale=0.1, mask=mask)
    mx.eval(out)
    one_side = columns * heads * dim * 2  # keys or values, in bfloat16
    scores = columns * heads * queries * 4
    packed = 2 * one_side * 4.5 / 16
    assert packed + 4 * scores < one_side or queries > 1
    assert mx.get_peak_memory() - before < 1.05 * packed + 4 * scores


def test_bits_groups_and_head_sizes_that_cannot_be() -> None:
    for bits in (0, 2, 3, 6, 16):
        with pytest.raises(CacheError, match="4 or 8"):
            BatchKVCache(1, bits=bits)
    for group_size in (0, 16, 48, 256):
        with pytest.raises(CacheError, match="32, 64 or 128"):
            BatchKVCache(1, bits=8, group_size=group_size)
    x = tokens(1, 2, dim=80)
    with pytest.raises(CacheError, match="its head size 80 cannot be quantized in gr"):
        BatchKVCache(1, bits=8).update_and_fetch(x, x)


class TestMaybeQuantize:
    def caches(self) -> list[Any]:
        caches = [dense("linear"), dense("ring")]
        x = tokens(2, 10)
        for c in caches:
            c.update_and_fetch(x, x)
            c.trim_per_sequence([0, 4])
        return caches

    @pytest.mark.parametrize("longest", [None, 10])
    def test_when_the_longest_row_is_there(self, longest: int | None) -> None:
        for start, now in ((0, True), (10, True), (11, False)):
            caches = self.caches()
            options = CacheOptions(
                max_write=4, kv_bits=4, kv_group_size=32, quantized_kv_start=start
            )
            assert maybe_quantize(caches, options, longest) is now
            assert [hasattr(c, "bits") for c in caches] == [now, now]
            assert caches[0].offset.tolist() == [10, 6]
            assert maybe_quantize(caches, options, longest) is False

    def test_without_kv_bits_nothing_changes(self) -> None:
        assert not maybe_quantize(self.caches(), CacheOptions(max_write=4))


@pytest.mark.parametrize("kind", ["ring", "chunked"])
def test_a_ring_quantized_later_undoes_no_more_than_before(kind: str) -> None:
    """A trim that reaches tokens that were overwritten."""
    cache, x = dense(kind), tokens(2, 1)
    for _ in range(30):
        cache.update_and_fetch(x, x)
    cache.trim_per_sequence([3, 0])
    packed = cache.to_quantized(group_size=32, bits=8)
    with pytest.raises(CacheError, match="can undo 1;"):
        packed.trim_per_sequence([2, 0])
