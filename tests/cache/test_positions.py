"""The invariant itself, against its definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.cache import BatchKVCache, Memo
from specdec.cache.positions import (
    ChunkedRule,
    LinearLayout,
    RingLayout,
    SlidingRule,
    additive_mask,
    visible_slots,
)


@given(
    ring=st.integers(1, 9), keep=st.integers(0, 4), last=st.integers(-1, 60)
)  # fmt: skip
def test_a_slot_holds_the_newest_position_written_to_it(
    ring: int, keep: int, last: int
) -> None:
    layout = RingLayout(ring, keep)
    slots = layout.slots(mx.arange(last + 1)).tolist() if last >= 0 else []
    written: dict[Any, int] = {slot: p for p, slot in enumerate(slots)}  # type: ignore[arg-type]
    held: Any = layout.held(keep + ring, mx.array([last]))[0].tolist()
    for slot in range(keep + ring):
        if slot in written:
            assert held[slot] == written[slot]
        else:  # negative, or a pinned position after the last
            assert held[slot] < 0 or held[slot] > last


@given(
    num_slots=st.integers(1, 40),
    offset=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    queries=st.integers(1, 4),
    window=st.integers(1, 9),
    keep=st.integers(0, 3),
    chunk=st.integers(1, 9),
)
def test_linear_masks(
    num_slots: int,
    offset: list[int],
    queries: int,
    window: int,
    keep: int,
    chunk: int,
) -> None:
    rules: dict[tuple[Any, ...], Callable[[int, int], bool]] = {
        (): lambda p, q: True,
        (SlidingRule(window, keep),): lambda p, q: p > q - window or p < keep,
        (ChunkedRule(chunk),): lambda p, q: p // chunk == q // chunk,
        (SlidingRule(window), ChunkedRule(chunk)): lambda p, q: (
            p > q - window and p // chunk == q // chunk
        ),
    }
    for rule, allows in rules.items():
        mask = visible_slots(LinearLayout(), rule, mx.array(offset), queries, num_slots)
        wanted = [
            [[[p <= q and allows(p, q) for p in range(num_slots)]
              for q in range(n, n + queries)]]
            for n in offset
        ]  # fmt: skip
        full = np.broadcast_to(np.array(mask), (len(offset), 1, queries, num_slots))
        assert full.tolist() == wanted


@pytest.mark.parametrize("rule", [SlidingRule(5, 2), SlidingRule(7), ChunkedRule(6)])
def test_a_rule_hides_nothing_within_its_span(rule: Any) -> None:
    q = rule.span - 1
    assert all(rule.visible(mx.arange(q + 1), mx.array(q)).tolist())


def test_additive_masks_keep_softmax_finite() -> None:
    mask = additive_mask(mx.array([[True, False]]), mx.float16)
    assert mask.dtype == mx.float16
    assert mx.softmax(mask, axis=-1).tolist() == [[1, 0]]


@pytest.mark.parametrize("both_ways", [False, True])
def test_a_mask_needs_no_kernel_of_its_own(both_ways: bool, tmp_path: Path) -> None:
    """MLX takes seconds to compile one on CUDA, and one more for each number in it."""
    cache = BatchKVCache(2, read_bucket=16, additive_mask=True)
    cache.update_and_fetch(mx.ones((2, 1, 5, 4)), mx.ones((2, 1, 5, 4)))
    cache.trim_per_sequence([0, 2])

    @mx.compile
    def mask_of(offset: mx.array) -> Any:
        twin = cache.without_arrays().holding(cache.arrays, offset, Memo())
        return twin.make_mask(3, both_ways=both_ways)

    file = tmp_path / "graph.dot"
    mx.export_to_dot(str(file), mask_of(cache.offset))
    assert "Compiled" not in file.read_text("utf-8")
