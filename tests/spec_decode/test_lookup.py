"""N-gram lookup against a plain search over lists."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.spec_decode.ngram_search import (
    continuation,
    longest_match,
    ring_of,
    write,
)
from specdec.spec_decode.ngram_shared import NgramTable


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
    """Also where the ring has wrapped, be it by the prompt or by what came behind."""
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
    first_behind = continuation(ring_of([row], 32), mx.array([len(row)]), match, 1)
    assert first_behind.item() == 2


class Table:
    """The reference: a dictionary from n-gram to what followed it last."""

    def __init__(self, n: int):
        self.n = n
        self.followed: dict[tuple[int, ...], int] = {}

    def add(self, before: list[int], new: list[int]) -> None:
        tokens = [*before, *new]
        for i in range(self.n, len(tokens)):
            self.followed[tuple(tokens[i - self.n : i])] = tokens[i]

    def follow(self, context: list[int], k: int) -> list[int]:
        tokens = list(context)
        while len(tokens) < self.n + k:
            behind = self.followed.get(tuple(tokens[-self.n :]))
            if behind is None:
                break
            tokens.append(behind)
        return tokens[self.n :]


@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=9), max_size=8))
def test_a_table_remembers_what_followed_last(rows: list[list[int]]) -> None:
    """Rows one after the other; many heads and a long log, so that none is lost."""
    table = NgramTable(context_size=2, log_size=512, num_heads=2**16)
    plain = Table(2)
    for row in rows:
        # Columns behind the row's own are not remembered.
        padded = [*row, *([9] * (9 - len(row)))]
        table.add(mx.array([padded]), mx.array([len(row) - 2]))
        plain.add(row[:2], row[2:])
    contexts = [[a, b] for a in range(4) for b in range(4)]
    tokens, length = table.follow(mx.array(contexts), 5)
    found: Any = tokens.tolist()
    known: Any = length.tolist()
    for i, context in enumerate(contexts):
        assert found[i][: known[i]] == plain.follow(context, 5)


def test_a_table_forgets_and_never_lies() -> None:
    """With hardly any room, what is found is still what followed once."""
    table = NgramTable(context_size=1, log_size=8, num_heads=4)
    followed: dict[int, set[int]] = {}
    row = [(i * i) % 23 for i in range(200)]
    for a, b in pairwise(row):
        followed.setdefault(a, set()).add(b)
    for i in range(0, 200, 5):
        table.add(mx.array([row[max(i - 1, 0) : i + 5]]), mx.array([5]))
        assert table._log.shape == (8, 2)
        assert table._heads.shape == (4,)
    tokens, length = table.follow(mx.arange(23)[:, None], 1)
    kept = [i for i in range(23) if length[i].item()]
    assert 0 < len(kept) <= 4
    for i in kept:
        assert tokens[i, 0].item() in followed[i]


def test_numbers_begin_again_before_they_overflow() -> None:
    table = NgramTable(context_size=1, log_size=16, num_heads=16)
    table.add(mx.array([[1, 2, 3]]), mx.array([2]))
    table._next = 2**30 + 1
    table.add(mx.array([[4, 5, 6]]), mx.array([2]))
    assert table._next == 2
    tokens, length = table.follow(mx.array([[4]]), 2)
    assert tokens.tolist() == [[5, 6]]
    assert length.tolist() == [2]
    assert table.follow(mx.array([[1]]), 1)[1].tolist() == [0]


def test_no_match_reaches_across_the_rings_end() -> None:
    """The token before the oldest that is held was overwritten by the newest."""
    row = [1, 2, 5, 3, 4, 6, 7, 8, 5, 5]
    match = longest_match(
        ring_of([row], 8), mx.array([len(row)]), max_ngram=2, min_ngram=1
    )
    assert (match.size.item(), match.last.item()) == (1, 8)
