"""Which entries serve a prompt: the rule, on entries made by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from specdec.prefix_cache.entries import Kind, block_start, plan


@dataclass(frozen=True)
class ByHand:
    kind: Kind
    start: int
    end: int
    slack: int = 0


def block(start: int, end: int) -> ByHand:
    return ByHand("block", start, end)


def ring(end: int, slack: int = 0) -> ByHand:
    return ByHand("ring", block_start(end, 4), end, slack)


@pytest.mark.parametrize(
    ("found", "linear", "both"),
    [
        ([], 0, 0),
        ([(block(0, 4), 4), (block(4, 8), 8)], 8, 0),
        ([(block(0, 4), 4), (block(4, 8), 6)], 6, 0),
        ([(block(4, 8), 8)], 0, 0),  # nothing before it
        ([(block(0, 4), 4), (block(8, 12), 12)], 4, 0),  # a gap
        ([(block(0, 3), 3), (block(0, 4), 4), (block(4, 5), 5)], 5, 0),
        ([(block(0, 4), 4), (block(4, 8), 8), (ring(8), 8)], 8, 8),
        # A ring is of no use without the blocks up to its end.
        ([(block(0, 4), 4), (ring(8), 8)], 4, 0),
        ([(block(0, 4), 4), (ring(8, 4), 8)], 4, 4),
        ([(block(0, 4), 4), (block(4, 8), 8), (ring(8), 8), (ring(6), 6)], 8, 8),
        # The prompt parts from the ring's before its end.
        ([(block(0, 4), 4), (block(4, 8), 6), (ring(8, 2), 6)], 6, 6),
        ([(block(0, 4), 4), (block(4, 8), 6), (ring(8, 1), 6), (ring(5), 5)], 6, 5),
    ],
)
def test_the_longest_prefix_that_can_be_restored(
    found: list[tuple[ByHand, int]], linear: int, both: int
) -> None:
    assert plan(found, linear=True, rings=False).length == linear
    best = plan(found, linear=True, rings=True)
    assert best.length == both
    assert all(entry.start < both for entry in best.blocks)
    assert (best.ring is not None) == (both > 0)


def test_rings_alone_need_no_blocks() -> None:
    best = plan([(ring(8, 3), 6), (ring(5), 5)], linear=False, rings=True)
    assert (best.length, best.blocks, best.ring) == (6, (), ring(8, 3))
