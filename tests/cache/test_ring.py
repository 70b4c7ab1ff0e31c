"""Rings: what they hold, what they give back, and what they refuse."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from specdec.cache import BatchChunkedKVCache, BatchRotatingKVCache
from specdec.errors import CacheError

from .histories import (
    BY_NAME,
    KINDS,
    History,
    Seeded,
)

HEADS, DIM = 2, 8
RINGS = [kind for kind in KINDS if kind.window is not None]


def numbered(rows: int, first: int, n: int) -> mx.array:
    """Tokens whose every element is their position."""
    x = mx.arange(first, first + n).astype(mx.float32)[None, None, :, None]
    return mx.broadcast_to(x, (rows, HEADS, n, DIM))


def write(cache: Any, n: int, first: int | None = None) -> Any:
    first = cache.size() if first is None else first
    x = numbered(cache.batch_size, first, n)
    return cache.update_and_fetch(x, x)


def by_hand(kind: Any, rows: int, max_write: int) -> History:
    """One to be driven by hand."""
    history = History.begin(kind, Seeded(0), 0)
    history.max_write = max_write
    history.cache = kind.make(rows, max_write=max_write)
    history.rows = [[] for _ in range(rows)]
    return history


def extend_by(history: History, size: int) -> None:
    new = [
        list(range(history.next_token + i * size, history.next_token + (i + 1) * size))
        for i in range(len(history.rows))
    ]
    history.next_token += size * len(history.rows)
    history.write_tokens(new, [size] * len(history.rows))


def cut(history: History, counts: list[int]) -> None:
    history.cache.trim_per_sequence(counts)
    pairs = zip(history.rows, counts, strict=True)
    history.rows = [row[: len(row) - n] for row, n in pairs]


@pytest.mark.parametrize("kind", RINGS, ids=lambda k: k.name)
@pytest.mark.parametrize("max_write", [1, 2, 5])
class TestBound:
    def test_max_write_tokens_come_back_and_no_more(
        self, kind: Any, max_write: int
    ) -> None:
        for extra in range(3 * max_write):
            history = by_hand(kind, 2, max_write)
            for _ in range(12 + extra):
                extend_by(history, 1)
            before = history.cache.offset.tolist()
            with pytest.raises(CacheError, match=f"can undo {max_write};"):
                history.cache.trim_per_sequence([max_write + 1, 0])
            assert history.cache.offset.tolist() == before
            assert history.cache.is_trimmable()
            cut(history, [max_write, 0])
            assert not history.cache.is_trimmable()
            with pytest.raises(CacheError, match="can undo 0;"):
                history.cache.trim_per_sequence([0, 1])
            for _ in range(2 * max_write):
                extend_by(history, 1)  # checks what is attended to
            assert history.cache.is_trimmable()

    def test_the_count_is_read_where_the_host_does_not_know_it(
        self, kind: Any, max_write: int
    ) -> None:
        history = by_hand(kind, 2, max_write)
        for _ in range(15):
            extend_by(history, 1)
        with pytest.raises(CacheError, match="cannot be taken back"):
            history.cache.trim_per_sequence(mx.array([0, max_write + 1]))
        history.cache.trim_per_sequence(mx.array([0, max_write]))

    def test_one_write_takes_max_write_and_no_more(
        self, kind: Any, max_write: int
    ) -> None:
        history = by_hand(kind, 2, max_write)
        slots = kind.keep + kind.window + max_write - 1
        extend_by(history, slots)  # an empty ring takes all that it has
        extend_by(history, max_write)
        with pytest.raises(CacheError, match=rf"takes {max_write} at a time"):
            extend_by(history, max_write + 1)
        history = by_hand(kind, 2, max_write)
        with pytest.raises(CacheError, match="one write"):
            extend_by(history, slots + 1)

    def test_all_comes_back_before_it_wraps(self, kind: Any, max_write: int) -> None:
        history = by_hand(kind, 2, max_write)
        slots = kind.keep + kind.window + max_write - 1
        extend_by(history, slots)
        cut(history, [slots, slots - 1])
        extend_by(history, max_write)


@pytest.mark.parametrize("kind", RINGS, ids=lambda k: k.name)
class TestPadding:
    def test_chunks_of_padding_evict_nothing(self, kind: Any) -> None:
        """A short row sits through many chunks of a long row's prompt."""
        history = by_hand(kind, 3, 4)
        lengths = [40, 3, 11]
        history.cache.prepare(lengths=lengths, right_padding=[0, 37, 29])
        for start in range(0, 40, 4):
            valid = [min(max(n - start, 0), 4) for n in lengths]
            new = [
                list(range(history.next_token + 4 * i, history.next_token + 4 * i + 4))
                for i in range(3)
            ]
            history.next_token += 12
            history.write_tokens(new, valid)
        history.cache.finalize()
        assert history.cache.offset.tolist() == lengths
        for _ in range(10):
            extend_by(history, 1)


def test_shrinking_after_prefill_returns_the_bytes() -> None:
    """Window 512, chunks of 512, rounds of 5: from 1023 slots to 516."""
    cache = BatchRotatingKVCache(2, max_size=512, max_write=512)
    for first in range(0, 2048, 512):
        write(cache, 512, first)
    per_slot = 2 * 2 * HEADS * DIM * 4
    mx.eval(cache.state)
    assert cache.nbytes == 1023 * per_slot
    gc.collect()  # what other tests left is not freed by this
    active = mx.get_active_memory()
    cache.resize(5)
    mx.eval(cache.state)
    assert cache.nbytes == 516 * per_slot
    freed = active - mx.get_active_memory()  # less the indices of the gather
    assert 0.9 < freed / ((1023 - 516) * per_slot) <= 1
    mask: Any = cache.make_mask(5)
    keys, _ = write(cache, 5, 2048)
    for query in range(5):
        seen = np.array(keys)[0, 0, np.array(mask)[0, 0, query], 0]
        assert sorted(seen) == list(range(2048 + query - 511, 2048 + query + 1))


def test_a_ring_grows_to_its_size_only() -> None:
    cache = BatchRotatingKVCache(1, max_size=512, max_write=89)
    capacities = set()
    for first in range(0, 2000, 50):
        write(cache, 50, first)
        capacities.add(cache.capacity)
    assert capacities == {256, 512, 600}
    short = BatchRotatingKVCache(1, max_size=512, max_write=89, max_length=300)
    write(short, 89)
    assert short.capacity == 256
    for first in (89, 178):
        write(short, 89, first)
    assert short.capacity == 300


def test_what_rings_cannot_be_made_or_joined_of() -> None:
    """Contents that survive resizing and joining are looked at in random histories."""
    one = BatchRotatingKVCache(1, max_size=4)
    for other, match in (
        (BatchRotatingKVCache(1, max_size=5), "window"),
        (BatchRotatingKVCache(1, max_size=5, keep=1), "window"),
        (BatchChunkedKVCache(1, chunk_size=4), "cannot join"),
    ):
        with pytest.raises(CacheError, match=match):
            one.extend(other)  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="max_write is 0"):
        one.resize(0)


class TestExchange:
    @pytest.mark.parametrize("keep", [0, 2])
    @pytest.mark.parametrize("writes", [[3], [8], [5, 1, 1], [1] * 21, [30], [30, 1]])
    def test_merge_of_mlx_lm_caches(self, writes: list[int], keep: int) -> None:
        """Whatever order its columns have; the sinks stay."""
        singles = []
        for _ in range(2):
            single = mlx_lm_cache.RotatingKVCache(8, keep=keep)
            first = 0
            for n in writes:
                single.update_and_fetch(numbered(1, first, n), numbered(1, first, n))
                first += n
            singles.append(single)
        merged = BatchRotatingKVCache.merge(singles)
        length = sum(writes)
        assert merged.offset.tolist() == [length, length]
        assert merged.ring is not None
        assert merged.ring.keep == keep
        keys, _ = write(merged, 1, length)
        merged.trim(1)
        mask: Any = merged.make_mask(1, return_array=True)
        seen = np.array(keys)[0, 0, np.array(mask)[0, 0, 0], 0]
        near = range(max(keep, length + 1 - (8 - keep)), length + 1)
        assert sorted(seen) == [*range(min(keep, length)), *near]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_size": 0}, "window 0"),
        ({"max_size": 4, "keep": 4}, "window 0"),
        ({"max_size": 4, "keep": -1}, "keep -1"),
        ({"max_size": 4, "max_write": 0}, "max_write is 0"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        BatchRotatingKVCache(1, **settings)


@pytest.mark.parametrize("kind", RINGS, ids=lambda k: k.name)
def test_state_carries_what_can_be_undone(kind: Any) -> None:
    cache = kind.make(1, max_write=3)
    heads: Callable[[int], mx.array] = lambda n: mx.ones((1, 2, n, 64))  # noqa: E731
    for _ in range(20):
        cache.update_and_fetch(heads(1), heads(1))
    cache.trim(2)
    again = type(cache).from_state(cache.state)
    assert again.ring.max_write == 3
    with pytest.raises(CacheError, match="can undo 1;"):
        again.trim(2)
    again.trim(1)


def test_quantized_rings_have_no_single_form() -> None:
    cache = BY_NAME["ring-4bit"].make(1)
    with pytest.raises(CacheError, match="cannot be extracted"):
        cache.extract(0)
