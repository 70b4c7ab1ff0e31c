"""The store's tiers: which entry makes place, and what waits for the disk."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from specdec.prefix_cache.entries import place_key
from specdec.prefix_cache.snapshot import Form, Piece, _Array
from specdec.prefix_cache.store import Place, PrefixStore

from .entries import SIGNATURE, SIZE

FORM = Form(linear=((_Array(1, 1, mx.float32),),), rings=())
PROMPTS = [tuple(range(10 * i, 10 * i + SIZE)) for i in range(3)]


def hold(store: PrefixStore, tokens: tuple[int, ...], *, computed: bool = True) -> None:
    """Have a block of a prompt stored."""
    key = place_key(SIGNATURE, tokens)
    place = Place((SIGNATURE, *tokens), key, SIGNATURE, 0, "m")
    array = mx.ones((1, 1, SIZE, 1))
    store.insert(
        place, "block", lambda: Piece("block", 0, SIZE, 0, ((array,),)),
        computed=computed,
    )  # fmt: skip


def reused(store: PrefixStore) -> list[int]:
    """The tokens that each prompt finds; a look-up is a use, so the store is done."""
    return [store.lookup(SIGNATURE, each, FORM).plan.length for each in PROMPTS]


@pytest.mark.parametrize("use", ["looked up", "stored again"])
def test_the_least_recently_used_leaves_memory(use: str) -> None:
    """A prefix that every request uses, evicted since it was stored first."""
    store = PrefixStore(memory=2 * 4 * SIZE, block_size=SIZE)
    first, second, third = PROMPTS
    hold(store, first)
    hold(store, second)
    if use == "looked up":
        store.lookup(SIGNATURE, first, FORM)
    else:
        hold(store, first)
    hold(store, third)
    assert reused(store) == [SIZE, 0, SIZE]


def test_what_others_stand_on_leaves_last() -> None:
    """A shared prefix, evicted before an answer that is useless without it."""
    store = PrefixStore(memory=2 * 4 * SIZE, block_size=SIZE)
    shared, other, _ = PROMPTS
    hold(store, shared)
    answers, end = "a" * 32, 2 * SIZE
    key = place_key(SIGNATURE, (*shared, *other))
    path = (answers, *shared, *other)
    place = Place(path, key, SIGNATURE, SIZE, "m")
    array = mx.ones((1, 1, SIZE, 1))
    store.insert(place, "block", lambda: Piece("block", SIZE, end, 0, ((array,),)))
    found = store.lookup(SIGNATURE, (*shared, *other), FORM, answers)
    assert (found.plan.length, found.private) == (end, SIZE)
    hold(store, other)
    assert reused(store) == [SIZE, SIZE, 0]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_what_was_being_computed_is_written(end: str, tmp_path: Path) -> None:
    """The last answers of a run, missing on disk though it has ended in order."""
    store = PrefixStore(memory=0, folder=tmp_path, disk=1 << 20, block_size=SIZE)
    hold(store, PROMPTS[1], computed=False)
    assert not [*tmp_path.iterdir()]
    getattr(store, end)()
    later = PrefixStore(memory=0, folder=tmp_path, disk=1 << 20, block_size=SIZE)
    assert reused(later) == [0, SIZE, 0]
    store.close()
    later.close()
