"""The order of writes in place and of reads, of which MLX knows nothing.

A stand-in for the kernel writes as soon as it is called. So a read that was built
before the write, and is computed after it, sees it, as it would on a GPU.
"""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec.cache import BatchKVCache, BatchRotatingKVCache
from specdec.cache.storage import Storage
from specdec.cuda import cache_write
from specdec.cuda.attention_patch import attend

HEADS, SIZE, TYPE = 2, 8, mx.float16
SEEDS = range(24)


def flat(tree: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(list(tree))
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def memory(array: mx.array) -> Any:
    """The array's own memory, as numbers of 16 bits."""
    mx.eval(array)
    return np.array(array.view(mx.uint16), copy=False)


def write_at_once(
    queries: mx.array, cache: Any, new: Any, slots: mx.array, after: Any = None
) -> Any:
    """What the kernel does, at once, and after what it has to come after."""
    mx.eval(() if after is None else after)
    out = mx.contiguous(queries) + 0
    rows = np.arange(len(slots))[:, None]
    for array, update in zip(cache, new, strict=True):
        moved = memory(mx.contiguous(update)).swapaxes(1, 2)
        memory(array)[rows, :, np.array(slots)] = moved
    return out, tuple(mx.depends(list(cache), [out]))


def mlx_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each write from now on that MLX does."""
    widths, usual = list[int](), Storage.write

    def write(self: Any, updates: Any, slots: mx.array) -> None:
        widths.append(slots.shape[1])
        usual(self, updates, slots)

    monkeypatch.setattr(Storage, "write", write)
    return widths


class Device:
    """Writes at once, and knows which writes were not handed over yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.writes = 0
        self._waiting: dict[int, mx.array] = {}
        hand_over: Any = mx.async_eval

        def begin(*arrays: Any) -> None:
            for array in flat(arrays):
                self._waiting.pop(id(array), None)
            hand_over(*arrays)

        monkeypatch.setattr(mx, "async_eval", begin)
        monkeypatch.setattr(cache_write, "write", self._write)
        monkeypatch.setattr(cache_write, "writes_in_place", lambda arrays: True)

    def _write(self, queries: Any, cache: Any, *rest: Any) -> Any:
        self.writes += 1
        for array in cache:  # a later write in place has to come after
            self._waiting.pop(id(array), None)
        result = write_at_once(queries, cache, *rest)
        self._waiting |= {id(array): array for array in result[1]}
        return result

    def waits(self, arrays: Any) -> bool:
        """Whether writes to the arrays wait."""
        return any(id(array) in self._waiting for array in arrays)


def made(ring: bool, in_place: bool, rows: int = 3) -> Any:
    if ring:
        return BatchRotatingKVCache(
            rows, max_size=12, keep=2, max_write=20, in_place=in_place
        )
    return BatchKVCache(rows, in_place=in_place)


class History:
    """Random writes, reads and moves of rows; what was read is computed at the end."""

    def __init__(self, seed: int, ring: bool, in_place: bool, device: Device | None):
        self._random, self._ring = random.Random(seed), ring
        self._in_place, self._device = in_place, device
        self.cache, self.found = made(ring, in_place), list[Any]()
        self._put(20 if ring else 250)
        mx.async_eval(self.found)

    def _new(self, rows: int, tokens: int) -> mx.array:
        key = mx.random.key(self._random.randrange(10**6))
        return mx.random.normal((rows, HEADS, tokens, SIZE), key=key).astype(TYPE)

    def _put(self, tokens: int, *, attends: bool = True, cache: Any = None) -> None:
        cache = self.cache if cache is None else cache
        new = self._new(cache.batch_size, tokens)
        mask = cache.make_mask(tokens, return_array=True)
        keys, values = cache.update_and_fetch(new, 2 * new)
        if attends:
            self.found.append(attend(new, keys, values, cache, 0.3, mask))

    def _other(self, rows: int) -> Any:
        other = made(self._ring, self._in_place, rows)
        for tokens in (9, 2):
            self._put(tokens, cache=other)
        return other

    def few(self) -> None:
        self._put(self._random.randint(1, 4))

    def context(self) -> None:
        self._put(self._random.randint(1, 4), attends=False)

    def trim(self) -> None:
        self._put(4)
        rows = range(self.cache.batch_size)
        self.cache.trim_per_sequence([self._random.randint(0, 4) for _ in rows])

    def wide(self) -> None:
        self._put(18)
        mx.async_eval(self.found)  # as every forward of so many tokens

    def read(self) -> None:
        name = self._random.choice(["keys", "values", "arrays"])
        self.found.append(getattr(self.cache, name))
        self.found.append(self.cache.state[:2])

    def columns(self) -> None:
        length = self.cache.offset.tolist()[0]
        copies = self.cache.columns(0, range(max(0, length - 3), length))
        mx.async_eval(copies)
        self.found.append(copies)

    def single(self) -> None:
        self.found.append(self.cache.extract(1).state[:2])

    def packed(self) -> None:
        if not self._ring:
            self.found.append(self.cache.to_quantized(32, 8).keys)

    def merged(self) -> None:
        self.found.append(type(self.cache).merge([self.cache]).keys)

    def restored(self) -> None:
        self.cache = type(self.cache).from_state(self.cache.state)

    def assigned(self) -> None:
        keys = self.cache.keys
        self.found.append(keys)
        self.cache.keys = mx.depends(keys, [mx.zeros(1)])

    def filtered(self) -> None:
        self.cache.filter(self._random.sample(range(self.cache.batch_size), 2))

    def extend(self) -> None:
        self.cache.extend(self._other(2))

    def place(self) -> None:
        self.cache.place([1], self._other(1))

    def placed(self) -> None:
        batch = self._other(self.cache.batch_size + 1)
        batch.place(range(1, batch.batch_size), self.cache)
        self.cache = batch

    def clean(self) -> None:
        self.cache.clean([0], 2)

    def make_finite(self) -> None:
        self.cache.make_finite([1])

    def resize(self) -> None:
        self.cache.resize(self._random.choice([18, 20, 22]))

    WRITES = 6 * (few, context, trim)

    def late(self) -> None:
        """Something else has it written before attention asks for it."""
        new = self._new(self.cache.batch_size, 2)
        mask = self.cache.make_mask(2, return_array=True)
        keys, values = self.cache.update_and_fetch(new, new)
        assert self.cache.written
        self.found.append(attend(new, keys, values, self.cache, 0.3, mask))

    MOVES = filtered, extend, place, placed, clean, make_finite, resize
    READS = wide, read, columns, single, merged, restored, assigned, *MOVES, late

    def run(self, steps: int = 40) -> list[mx.array]:
        """Take ``steps`` steps; all that was read."""
        for _ in range(steps):
            step = self._random.choice(self.WRITES + self.READS)
            if self._device is None or step not in self.READS:
                step(self)
                continue
            cache, (arrays, _) = self.cache, self.cache.written
            step(self)
            same = cache is self.cache and cache.written[0] is arrays
            if step is History.late:
                arrays, same = cache.written[0], False
            if step is not History.resize or not same:
                assert not self._device.waits(arrays), step.__name__
        found = flat(self.found)
        mx.eval(found)
        return found


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_reads_see_what_was_written_before_and_nothing_later(
    monkeypatch: pytest.MonkeyPatch, seed: int, ring: bool
) -> None:
    """Whatever copies a cache: when it grows, when rows move, for a prefix.

    A read that is handed over together with a write before it could miss it.
    """
    wanted = History(seed, ring, in_place=False, device=None).run()
    device = Device(monkeypatch)
    found = History(seed, ring, in_place=True, device=device).run()
    assert device.writes
    assert len(found) == len(wanted)
    assert all(map(mx.array_equal, found, wanted))


def test_finite_rows_are_looked_at_and_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft that accepts nothing is looked at again and again."""
    history = History(0, ring=False, in_place=True, device=Device(monkeypatch))
    places = []
    for _ in range(3):  # the cache grows in the first
        history.few()
        mx.eval(history.found)
        places.append(memory(history.cache._storage.held[0]).ctypes.data)
        history.make_finite()
    assert places[1] == places[2]


@pytest.mark.parametrize("attends", [True, False])
def test_memory_is_free_once_a_cache_is_dropped(
    monkeypatch: pytest.MonkeyPatch, attends: bool
) -> None:
    """Catches what refers to itself: the garbage collector sees no bytes of a GPU."""
    history = History(0, ring=False, in_place=True, device=Device(monkeypatch))
    history.few() if attends else history.context()
    storage = weakref.ref(history.cache._storage)
    gc.disable()
    try:
        del history
        assert storage() is None
    finally:
        gc.enable()
