"""Prompt lookup on the device: where a row's newest tokens occurred before.

Rows keep their tokens in a ring: the token of position ``p`` lies in slot
``p % capacity``, so that the newest ``capacity`` tokens are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

#: In slots that hold no token.
EMPTY = -1
# Equal to no token and to no empty slot.
_NOTHING = -2


@dataclass(frozen=True)
class Match:
    """Earlier occurrences of the newest tokens.

    Args:
        size: tokens that agree, 0 where nothing was found, shape (B,), int32.
        last: position of the last of them, shape (B,), int32; means nothing where
            nothing was found.
    """

    size: mx.array
    last: mx.array


def ring_of(prompts: Sequence[Sequence[int]], capacity: int) -> mx.array:
    """The newest tokens of each prompt in a ring, shape (B, capacity), int32."""
    rows = []
    for prompt in prompts:
        row = [EMPTY] * capacity
        first = max(len(prompt) - capacity, 0)
        for position, token in enumerate(prompt[first:], start=first):
            row[position % capacity] = token
        rows.append(row)
    return mx.array(rows, mx.int32)


def read(ring: mx.array, positions: mx.array) -> mx.array:
    """The tokens at ``positions``, shape (B, S); those before 0 equal no token."""
    tokens = mx.take_along_axis(ring, positions % ring.shape[1], axis=1)
    return mx.where(positions < 0, _NOTHING, tokens)


def write(
    ring: mx.array, first: mx.array, tokens: mx.array, count: mx.array | int
) -> mx.array:
    """``ring`` with the first ``count[i]`` of row ``i``'s ``tokens`` in it.

    Args:
        first: position of each row's first token, shape (B,).
        tokens: shape (B, S), S at most the capacity.
        count: how many of them to write, shape (B,), or a number for all.
    """
    index = mx.arange(tokens.shape[1])
    slots = (first[:, None] + index) % ring.shape[1]
    wanted = index < mx.array(count).reshape(-1, 1)
    held = mx.take_along_axis(ring, slots, axis=1)
    return mx.put_along_axis(ring, slots, mx.where(wanted, tokens, held), axis=1)


def longest_match(
    ring: mx.array, lengths: mx.array, *, max_ngram: int, min_ngram: int
) -> Match:
    """Where the longest suffix of each row occurred before, most recently.

    Compares whole rows with the ring rolled by 0, 1, ... ``max_ngram - 1``: work in
    proportion to ``max_ngram * capacity``, whatever the tokens are.

    Args:
        ring: shape (B, capacity), capacity at least ``max_ngram``.
        lengths: tokens of each row, shape (B,).
        max_ngram, min_ngram: most and fewest tokens of a match.
    """
    capacity = ring.shape[1]
    last = (lengths - 1)[:, None]
    # The newest position in each slot; before 0 where none was written.
    position = last - (last - mx.arange(capacity)) % capacity
    oldest = mx.maximum(last - (capacity - 1), 0)
    suffix = read(ring, last - mx.arange(max_ngram))
    agree = mx.ones(ring.shape, mx.bool_)
    size = mx.zeros(ring.shape, mx.int32)
    for j in range(max_ngram):
        agree = agree & (mx.roll(ring, j, 1) == suffix[:, j : j + 1])
        size = size + agree
    # What was rolled across the ring's end is no neighbour.
    size = mx.minimum(size, position - oldest + 1)
    matches = (size >= min_ngram) & (position < last)
    # Longest first, then newest. The key has both, so that nothing has to pick them: on
    # CUDA, MLX takes five seconds to compile what does.
    key = mx.where(matches, size * capacity + (position - oldest), 0)
    best = key.max(axis=1)
    return Match(best // capacity, best % capacity + oldest[:, 0])


def continuation(ring: mx.array, lengths: mx.array, match: Match, k: int) -> mx.array:
    """The ``k`` tokens that follow each match, shape (B, k).

    A match near the end of its row has fewer after it: then they repeat, as what
    was matched does. Means nothing where nothing was found.
    """
    period = mx.maximum(lengths - 1 - match.last, 1)[:, None]
    return read(ring, match.last[:, None] + 1 + mx.arange(k) % period)


def search(
    ring: mx.array,
    lengths: mx.array,
    recent: mx.array,
    k: int,
    *,
    max_ngram: int,
    min_ngram: int,
) -> tuple[mx.array, mx.array]:
    """What followed each row's longest match, the newest one of those.

    Args:
        ring: of the rows, shape (B, capacity); the newest token may be missing there.
        lengths: tokens of each row, shape (B,).
        recent: the newest tokens of each row, shape (B, R).
        k: how many tokens.
        max_ngram, min_ngram: most and fewest tokens of a match.

    Returns:
        The newest token of each row, then the ``k`` tokens, shape (B, k + 1), 0 where
        there is no match; and how many were found, k or 0, shape (B,).
    """
    ring = write(ring, lengths - 1, recent[:, -1:], 1)
    match = longest_match(ring, lengths, max_ngram=max_ngram, min_ngram=min_ngram)
    matches = match.size > 0
    # What stands in empty slots is no token, and a model may have to embed it.
    tokens = mx.maximum(continuation(ring, lengths, match, k), 0)
    tokens = mx.where(matches[:, None], tokens, 0)
    inputs = mx.concatenate([recent[:, -1:], tokens], axis=1)
    return inputs, mx.where(matches, k, 0)


def keep(
    ring: mx.array,
    lengths: mx.array,
    recent: mx.array,
    chosen: mx.array,
    kept: mx.array,
) -> mx.array:
    """``ring`` with the newest token, and those kept after it, in it.

    Args:
        ring, lengths, recent: as for :func:`search`, before the round.
        chosen: tokens of the round, shape (B, S).
        kept: how many of them, shape (B,).
    """
    tokens = mx.concatenate([recent[:, -1:], chosen], axis=1)
    return write(ring, lengths - 1, tokens, kept + 1)
