"""Any history of any cache attends to exactly what it should, and the check bites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.cache import capacity, positions
from specdec.cache.batch import BatchCache
from specdec.cache.core import CacheCore
from specdec.cache.positions import ChunkedRule, RingLayout, SlidingRule
from specdec.cache.recurrent import BatchRecurrentCache
from specdec.cache.ring import Ring
from specdec.cache.storage import Storage
from specdec.cache.tail import Tail

from .histories import (
    BY_NAME,
    KINDS,
    History,
    Kind,
    Seeded,
    run,
)

CASES = 80  # per kind, of 20 steps; every fault below shows in 70
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _small_first_capacity(monkeypatch: Patch) -> None:
    """Let linear caches grow within a few tokens."""
    monkeypatch.setattr(capacity, "FIRST_CAPACITY", 4)


def run_many(kind: Kind) -> None:
    for seed in range(CASES):
        run(kind, Seeded(seed), 20)


def kind_name(kind: Kind) -> str:
    return kind.name


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_seeded_histories(kind: Kind) -> None:
    run_many(kind)


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_long_histories(kind: Kind) -> None:
    """Rings wrap a dozen times and more."""
    ends = [run(kind, Seeded(-seed), 200) for seed in range(1, 6)]
    assert max(len(row) for end in ends for row in end.rows) > 60


def test_a_tail_is_written_within_the_base(monkeypatch: Patch) -> None:
    """Past the end would be memory of others; with rows that are trimmed apart."""
    most, write = [0], Storage.write

    def within(self: Storage, updates: Any, slots: mx.array) -> None:
        assert int(slots.max()) < self.capacity
        most[0] = max(most[0], slots.shape[1])
        write(self, updates, slots)

    monkeypatch.setattr(Storage, "write", within)
    run_many(BY_NAME[TAIL])
    assert most[0] == 7  # what a tail of 6 does not take


class Drawn:
    """Choices that hypothesis makes, and makes smaller when they fail."""

    def __init__(self, draw: Callable[[Any], Any]):
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
@settings(max_examples=25)
@given(data=st.data())
def test_drawn_histories(kind: Kind, data: st.DataObject) -> None:
    choices = Drawn(data.draw)
    run(kind, choices, choices.integer(1, 12))


# Faults: each is what a plausible mistake would do.


def trim_one_too_few(patch: Patch) -> None:
    right = CacheCore.trim_per_sequence

    def wrong(self: CacheCore, n: Any, at_most: int | None = None) -> None:
        before = self.offset
        right(self, n, at_most)
        self.offset = self.offset + (self.offset < before)
        # Else what grows too long is written after the end, into other memory.
        self._longest += 1

    patch.setattr(CacheCore, "trim_per_sequence", wrong)


def trim_one_too_many(patch: Patch) -> None:
    right = CacheCore.trim_per_sequence

    def wrong(self: CacheCore, n: Any, at_most: int | None = None) -> None:
        before = self.offset
        right(self, n, at_most)
        self.offset = mx.maximum(self.offset - (self.offset < before), 0)

    patch.setattr(CacheCore, "trim_per_sequence", wrong)


def stale_key_visible(patch: Patch) -> None:
    """A query sees the slot after its own too: a rejected token, or padding."""
    right = positions.visible_slots

    def wrong(
        layout: Any, rules: Any, offset: Any, n: int, slots: int, **how: Any
    ) -> mx.array:
        return right(layout, rules, offset, n + 1, slots, **how)[:, :, 1:]

    patch.setattr("specdec.cache.core.visible_slots", wrong)


def own_key_hidden(patch: Patch) -> None:
    right = positions.visible_slots

    def wrong(
        layout: Any, rules: Any, offset: Any, n: int, slots: int, **how: Any
    ) -> mx.array:
        return right(layout, rules, mx.maximum(offset - 1, 0), n, slots, **how)

    patch.setattr("specdec.cache.core.visible_slots", wrong)


def write_modulus(patch: Patch) -> None:
    def wrong(self: RingLayout, p: mx.array) -> mx.array:
        ring = max(1, self.ring - 1)
        return mx.where(p < self.keep, p, (p - self.keep) % ring + self.keep)

    patch.setattr(RingLayout, "slots", wrong)


def mask_modulus(patch: Patch) -> None:
    right = RingLayout.held

    def wrong(self: RingLayout, slots: int, last: mx.array) -> mx.array:
        return right(RingLayout(self.ring + 1, self.keep), slots, last)

    patch.setattr(RingLayout, "held", wrong)


def ring_one_slot_short(patch: Patch) -> None:
    patch.setattr(
        "specdec.cache.ring.RingLayout",
        lambda ring, keep=0: RingLayout(max(1, ring - 1), keep),
    )


def window_edge(by: int) -> Callable[[Patch], None]:
    right = SlidingRule.visible

    def plant(patch: Patch) -> None:
        def wrong(self: SlidingRule, keys: mx.array, queries: mx.array) -> mx.array:
            return right(SlidingRule(self.window + by, self.keep), keys, queries)

        patch.setattr(SlidingRule, "visible", wrong)

    return plant


def window_forgotten_early(patch: Patch) -> None:
    """Rows of one more than the window are taken to fit."""
    patch.setattr(SlidingRule, "span", property(lambda self: self.window + 1))


def sinks_dropped(patch: Patch) -> None:
    right = SlidingRule.visible

    def wrong(self: SlidingRule, keys: mx.array, queries: mx.array) -> mx.array:
        return right(SlidingRule(self.window, 0), keys, queries)

    patch.setattr(SlidingRule, "visible", wrong)


def chunk_edge(patch: Patch) -> None:
    def wrong(self: ChunkedRule, keys: mx.array, queries: mx.array) -> mx.array:
        return (keys + 1) // self.chunk == (queries + 1) // self.chunk

    patch.setattr(ChunkedRule, "visible", wrong)


def padding_kept(patch: Patch) -> None:
    patch.setattr(BatchCache, "prepare", lambda self, **kwargs: None)


def budget_one_too_many(patch: Patch) -> None:
    right: Any = Ring.budget

    def wrong(self: Ring) -> int | None:
        budget = right.fget(self)
        return None if budget is None else budget + 1

    patch.setattr(Ring, "budget", property(wrong))


def resize_forgets_what_is_gone(patch: Patch) -> None:
    right = Ring.resize

    def wrong(self: Ring, max_write: int, longest: int) -> None:
        undone = self.undone
        right(self, max_write, longest)
        self.undone = min(undone, self.undone)

    patch.setattr(Ring, "resize", wrong)


def merge_forgets_what_is_gone(patch: Patch) -> None:
    right = Ring.fill

    def wrong(self: Ring, positions: Any, length: int) -> None:
        right(self, positions, length)
        self.undone = 0

    patch.setattr(Ring, "fill", wrong)


def write_alters_what_was_handed_out(patch: Patch) -> None:
    def wrong(self: Storage, updates: Any, slots: mx.array) -> None:
        rows = mx.arange(slots.shape[0])[:, None]
        for array, update in zip(self.arrays or (), updates, strict=True):
            array[rows, :, slots] = update.transpose(0, 2, 1, 3)

    patch.setattr(Storage, "write", wrong)


def rows_swapped(patch: Patch) -> None:
    right = Storage.take_rows
    patch.setattr(Storage, "take_rows", lambda self, rows: right(self, rows[::-1]))


def placed_beside(patch: Patch) -> None:
    """The contents of one row in the next, its length where it belongs."""
    right = Storage.place

    def wrong(self: Storage, index: Any, other: Storage, capacity: int) -> None:
        last = len(self.arrays[0]) - 1 if self.arrays else 0
        right(self, lambda a: mx.minimum(index(a) + 1, last), other, capacity)

    patch.setattr(Storage, "place", wrong)


def last_rows_placed(patch: Patch) -> None:
    """The last rows of the other batch, their lengths those of the first."""
    right = Storage.place

    def wrong(self: Storage, index: Any, other: Storage, capacity: int) -> None:
        if other.arrays and self.arrays:
            left = len(other.arrays[0]) - len(index(self.arrays[0]))
            other = Storage(other.codec, tuple(a[left:] for a in other.arrays))
        right(self, index, other, capacity)

    patch.setattr(Storage, "place", wrong)


def placed_rows_undo_as_before(patch: Patch) -> None:
    right = BatchCache.place

    def wrong(self: BatchCache, rows: Any, other: Any) -> None:
        with patch.context() as place:
            place.setattr(Ring, "join", lambda self, rings: None)
            right(self, rows, other)

    patch.setattr(BatchCache, "place", wrong)


def reset_of_nobody(patch: Patch) -> None:
    patch.setattr(BatchCache, "reset", lambda self, rows: None)


def base_shown_beyond_its_tokens(patch: Patch) -> None:
    """What the base held before the tokens in the tail is seen beside them."""

    def wrong(self: Tail, slots: int, last: mx.array) -> mx.array:
        tail = self.starts[:, None] + mx.arange(self.width)
        shape = len(tail), slots - self.width
        base = mx.broadcast_to(mx.arange(shape[1]), shape)
        return mx.concatenate([base, tail], axis=1)

    patch.setattr(Tail, "held", wrong)


def last_of_a_tail_lost(patch: Patch) -> None:
    right = Tail.flushed

    def wrong(self: Tail) -> Any:
        arrays, slots = right(self)
        return tuple(a[:, :, :-1] for a in arrays), slots[:, :-1]

    patch.setattr(Tail, "flushed", wrong)


def trims_stay_in_the_tail(patch: Patch) -> None:
    # Columns below 0 would be memory of others.
    slots, right = Tail.slots, Tail.trimmed
    patch.setattr(Tail, "slots", lambda self, at: mx.maximum(slots(self, at), 0))
    patch.setattr(Tail, "trimmed", lambda self, most, fewest: right(self, 0, 0) or self)


TAIL = "linear-tail"
LINEAR, RING, KEEP, CHUNKED = "linear", "ring", "ring-keep", "chunked"
FAULTS = [
    (trim_one_too_few, LINEAR),
    (trim_one_too_few, RING),
    (trim_one_too_many, LINEAR),
    (trim_one_too_many, CHUNKED),
    (stale_key_visible, LINEAR),
    (stale_key_visible, RING),
    (stale_key_visible, "linear-8bit"),
    (own_key_hidden, LINEAR),
    (write_modulus, RING),
    (mask_modulus, RING),
    (mask_modulus, CHUNKED),
    (ring_one_slot_short, RING),
    (ring_one_slot_short, "ring-4bit"),
    (window_edge(+1), RING),
    (window_edge(-1), RING),
    (window_edge(+1), "ring-4bit"),
    (window_forgotten_early, RING),
    (sinks_dropped, KEEP),
    (chunk_edge, CHUNKED),
    (padding_kept, LINEAR),
    (padding_kept, RING),
    (budget_one_too_many, RING),
    (resize_forgets_what_is_gone, RING),
    (merge_forgets_what_is_gone, RING),
    (write_alters_what_was_handed_out, LINEAR),
    (rows_swapped, LINEAR),
    (placed_beside, LINEAR),
    (placed_beside, RING),
    (placed_beside, "linear-8bit"),
    (last_rows_placed, LINEAR),
    (last_rows_placed, RING),
    (placed_rows_undo_as_before, RING),
    (reset_of_nobody, LINEAR),
    (reset_of_nobody, CHUNKED),
    (base_shown_beyond_its_tokens, TAIL),
    (last_of_a_tail_lost, TAIL),
    (trims_stay_in_the_tail, TAIL),
    (stale_key_visible, TAIL),
]


def fault_name(fault: Any) -> str:
    return fault if isinstance(fault, str) else fault.__qualname__.partition(".")[0]


@pytest.mark.parametrize(("plant", "name"), FAULTS, ids=fault_name)
def test_planted_faults_are_found(
    plant: Callable[[Patch], None], name: str, monkeypatch: Patch
) -> None:
    """By what queries attend to: offsets and sizes are not looked at here."""
    monkeypatch.setattr(History, "check_sizes", lambda self: None)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"attends to|Not equal"):
        run_many(BY_NAME[name])


def sums(tokens: mx.array) -> Any:
    return Sums(tokens)


class Sums:
    """A layer with one state, the sum of its tokens; notes where it is called again."""

    logged = False
    form = None

    def __init__(self, tokens: mx.array):
        self.layer, self.tokens, self.width = Sums, tokens, tokens.shape[1]
        self.offsets: list[Any] = []

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self.tokens,)

    def holding(self, arrays: tuple[mx.array, ...]) -> Sums:
        return self

    def takes_in(self, before: Any, lengths: Any) -> bool:
        return False

    def run(self, slots: Any, offset: mx.array, lengths: Any) -> Any:
        return None, self._after(slots, self.width)

    def again(self, slots: Any, offset: mx.array, kept: Any) -> Any:
        self.offsets.append(offset.tolist())
        return self._after(slots, mx.array(kept))

    def _after(self, slots: Any, kept: Any) -> list[mx.array]:
        used = mx.arange(self.width) < mx.broadcast_to(kept, (2,))[:, None]
        before = mx.zeros((2,)) if slots[0] is None else slots[0]
        return [before + mx.where(used, self.tokens, 0).sum(axis=1)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_repeats_tokens_at_the_positions_they_had(compiled: bool) -> None:
    """With the offset after the trim, layers that read positions compute others."""
    cache = BatchRecurrentCache(2, size=1)
    cache.write(sums(mx.array([[1.0, 2.0], [3.0, 4.0]])))
    cache.trim_per_sequence([0, 1])
    cache.write(sums(mx.array([[5.0], [6.0]])))
    assert cache.offset.tolist() == [3, 2]
    again = sums(mx.array([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]]))
    if compiled:
        states = (*cache.arrays, *cache.arrays)
        states = (states[0] + mx.array([111.0, 222.0]), states[1])
        cache.take((3, [(0, again)]), (*states, again.tokens), cache.offset + 3, 3)
    else:
        cache.write(again)
    cache.trim_per_sequence([1, 2])
    assert cache.arrays[0].tolist() == [8.0 + 11.0, 9.0 + 2.0]
    assert again.offsets == [[3, 2]]


def test_writes_after_a_checkpoint_are_repeated_each_at_its_own_position() -> None:
    """Several forwards are taken back together: a draft's proposals."""
    cache = BatchRecurrentCache(2, size=1)
    cache.write(sums(mx.array([[1.0, 2.0], [3.0, 4.0]])))
    cache.checkpoint()
    writes = [sums(mx.array([[1.0, 10.0], [2.0, 20.0]])) for _ in range(2)]
    for write in writes:
        cache.write(write)
    cache.trim_per_sequence([3, 1])
    assert cache.arrays[0].tolist() == [3.0 + 1.0, 7.0 + 22.0 + 2.0]
    assert [write.offsets for write in writes] == [[[2, 2]], [[4, 4]]]


def test_a_slot_begins_with_no_state() -> None:
    """A row goes on from the states of another, whose slot or place it takes."""
    cache, empty = (BatchRecurrentCache(2, size=1) for _ in range(2))
    cache.write(sums(mx.array([[1.0, 2.0], [3.0, 4.0]])))
    cache.reset([1])
    cache.write(sums(mx.array([[5.0], [6.0]])))
    assert cache.arrays[0].tolist() == [8.0, 6.0]
    cache.place([0], empty)
    cache.write(sums(mx.array([[7.0], [8.0]])))
    assert cache.arrays[0].tolist() == [7.0, 14.0]


def test_states_before_a_write_are_remembered_until_the_rows_change() -> None:
    """An answer is stored with states of other tokens than its own."""
    cache = BatchRecurrentCache(2, size=1)
    assert not cache.remembers
    cache.write(sums(mx.array([[1.0, 2.0], [3.0, 4.0]])))
    cache.write(sums(mx.array([[5.0], [6.0]])))
    assert cache.remembers
    assert cache.states_before(1)[0].tolist() == [7.0]
    cache.reset([0])
    assert not cache.remembers
