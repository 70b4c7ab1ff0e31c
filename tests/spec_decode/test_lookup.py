"""N-gram lookup against a plain search over lists."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.spec_decode.ngram_search import continuation, longest_match, ring_of, write


def search(
    tokens: list[int], *, held: int, max_ngram: int, min_ngram: int
) -> tuple[int, int]:
    """Size and last position of the longest, then newest earlier occurrence."""
    oldest = max(len(tokens) - held, 0)
    for size in range(max_ngram, min_ngram - 1, -1):
        suffix = tokens[len(tokens) - size :]
        if size > len(tokens):
            continue
        for last in range(len(tokens) - 2, oldest + size - 2, -1):
            if tokens[last - size + 1 : last + 1] == suffix:
                return size, last
    return 0, 0


ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4
)


@given(
    ROWS,
    st.integers(8, 48),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_matches_are_those_of_a_plain_search(
    rows: list[list[int]], capacity: int, min_ngram: int, more: int, seed: int
) -> None:
    """Also where the ring has wrapped, be it by the prompt or by what came after."""
    max_ngram = min_ngram + more
    cut = [1 + seed % len(row) for row in rows]
    ring = ring_of([row[:n] for row, n in zip(rows, cut, strict=True)], capacity)
    length = mx.array(cut)
    # The rest is written some tokens at a time, another number for each row.
    while (length < mx.array([len(r) for r in rows])).any().item():
        done: list[int] = length.tolist()  # type: ignore[assignment]
        new = [row[n : n + 5] for row, n in zip(rows, done, strict=True)]
        count = mx.array([len(tokens) for tokens in new])
        padded = [[*tokens, *([7] * (6 - len(tokens)))] for tokens in new]
        ring = write(ring, length, mx.array(padded), count)
        length = length + count
    match = longest_match(ring, length, max_ngram=max_ngram, min_ngram=min_ngram)
    follows: Any = continuation(ring, length, match, 7).tolist()
    for i, row in enumerate(rows):
        size, last = search(
            row, held=capacity, max_ngram=max_ngram, min_ngram=min_ngram
        )
        assert match.size[i].item() == size
        if size:
            assert match.last[i].item() == last
            repeated = list(row)
            while len(repeated) < last + 8:  # copying while the copy grows
                repeated.append(repeated[len(repeated) - (len(row) - 1 - last)])
            assert follows[i] == repeated[last + 1 : last + 8]


@pytest.mark.parametrize("tokens", [[5, 6, 7], [5, 5, 6, 5]])
def test_the_newest_of_equally_long_matches_wins(tokens: list[int]) -> None:
    row = [*tokens, 1, *tokens, 2, *tokens]
    match = longest_match(
        ring_of([row], 32), mx.array([len(row)]), max_ngram=3, min_ngram=2
    )
    first_after = continuation(ring_of([row], 32), mx.array([len(row)]), match, 1)
    assert first_after.item() == 2


def test_no_match_reaches_across_the_rings_end() -> None:
    """The token before the oldest that is held was overwritten by the newest."""
    row = [1, 2, 5, 3, 4, 6, 7, 8, 5, 5]
    match = longest_match(
        ring_of([row], 8), mx.array([len(row)]), max_ngram=2, min_ngram=1
    )
    assert (match.size.item(), match.last.item()) == (1, 8)
