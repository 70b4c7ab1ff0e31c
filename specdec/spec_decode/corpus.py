"""Finished answers of a client, and where in them a row's newest tokens occurred.

Answers lie one after the other in a ring of tokens. A table has, for each hash of three
tokens, a few of the places where these end. Both are on the host, where an answer is
added in time proportional to its length; a look-up is gathers of fixed shapes on the
device. A place that was overwritten, or whose hash is shared, does not agree with the
row's tokens, and so is no match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .ngram_search import EMPTY

#: Tokens of the shortest match.
SHORTEST = 3
# Tokens of the longest match that is measured.
DEPTH = 16
# Places of one hash: of the newest answers that have it, one of each. Of equal hashes
# in an answer, the last one counts.
_WAYS = 4
_MULTIPLIER = 0x9E3779B1
# With more answers since the last look-up, all is copied to the device.
_MOST_CHANGES = 16

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Continuation:
    """What followed a row's newest tokens in an answer.

    Args:
        tokens: shape (B, k), int32, 0 where there are none.
        count: how many there are, shape (B,).
        size: newest tokens that agree, up to ``DEPTH``; 0 without a match, shape (B,).
    """

    tokens: mx.array
    count: mx.array
    size: mx.array


class Corpus:
    """The newest answers of one client.

    Args:
        capacity: N, tokens of the ring, a power of two.
    """

    def __init__(self, capacity: int):
        self.tokens: Int32s = np.full(capacity, EMPTY, np.int32)
        self.places: Int32s = np.full((capacity // 2, _WAYS), -1, np.int32)
        #: The place of the next token, and how many answers were added.
        self.end, self.count = 0, 0
        # Both arrays on the device, and what was changed since: tokens, and elements of
        # the table. Without look-ups there is nothing on the device, nor to tell it.
        self._arrays: tuple[mx.array, mx.array] | None = None
        self._changes: list[tuple[slice, Int32s]] = []

    @staticmethod
    def nbytes(capacity: int) -> int:
        """Bytes of one corpus."""
        return capacity * 4 * (1 + _WAYS // 2)

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer; of a long one, the last tokens that half of the ring holds."""
        capacity = len(self.tokens)
        tokens = np.array(answer[-(capacity // 2) :], np.int32)
        if len(tokens) <= SHORTEST:
            return
        width = len(tokens) + 1  # and a separator
        first = self.end
        if first + width > capacity:  # no answer goes on at the ring's beginning
            first = 0
        self.tokens[first : first + width - 1] = tokens
        self.tokens[first + width - 1] = EMPTY
        at = np.arange(SHORTEST - 1, len(tokens) - 1, dtype=np.int32)
        newest = [tokens[at - j].astype(np.uint32) for j in range(SHORTEST)]
        way = self.count % _WAYS
        elements = _bucket(newest, len(self.places)) * _WAYS + way
        self.places.reshape(-1)[elements] = first + at
        self._changed(slice(first, first + width), elements)
        self.end = (first + width) % capacity
        self.count += 1

    def _changed(self, part: slice, elements: Int32s) -> None:
        if len(self._changes) == _MOST_CHANGES:
            self._arrays = None
            self._changes.clear()
        if self._arrays is not None:
            self._changes.append((part, elements))

    def arrays(self) -> tuple[mx.array, mx.array]:
        """Tokens and places on the device, which gets what has changed alone."""
        if self._arrays is None:
            self._arrays = mx.array(self.tokens), mx.array(self.places)
        tokens, places = self._arrays
        whole = self.places.reshape(-1)
        for part, elements in self._changes:
            new, first = mx.array(self.tokens[part]), mx.array([part.start])
            tokens = mx.slice_update(tokens, new, first, axes=(0,))
            at, put = mx.array(elements), mx.array(whole[elements])
            flat = mx.put_along_axis(places.flatten(), at, put, axis=0)
            places = flat.reshape(places.shape)
        if self._changes:  # an array belongs to its thread until it is computed
            mx.async_eval(tokens, places)
            self._changes.clear()
        self._arrays = tokens, places
        return self._arrays


def _bucket(newest: Sequence[npt.NDArray[np.uint32]], buckets: int) -> Int32s:
    """The table's row for tokens, the newest first."""
    mixed = np.zeros_like(newest[0])
    for tokens in newest:
        mixed = (mixed ^ tokens) * np.uint32(_MULTIPLIER)
    bits = buckets.bit_length() - 1
    return (mixed >> np.uint32(32 - bits)).astype(np.int32)


class Corpora:
    """A corpus for each client; those that were used last are kept.

    Args:
        capacity: tokens of each corpus, a power of two; 0 keeps none.
        most: corpora that are kept.
    """

    def __init__(self, capacity: int, most: int):
        self.capacity, self.most = capacity, most
        self._corpora: OrderedDict[str, Corpus] = OrderedDict()
        # Arrays on the device, and what they were made from.
        self._arrays: tuple[object, tuple[mx.array, mx.array, mx.array, mx.array]]
        self._arrays = (None, (mx.array(0),) * 4)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return len(self._corpora) * Corpus.nbytes(self.capacity)

    def add(self, client: str, answer: Sequence[int]) -> None:
        """Add a client's finished answer."""
        if not self.capacity:
            return
        if client not in self._corpora:
            self._corpora[client] = Corpus(self.capacity)
        self._corpora.move_to_end(client)
        self._corpora[client].add(answer)
        if len(self._corpora) > self.most:
            self._corpora.popitem(last=False)

    def owners(self, clients: Sequence[str | None]) -> list[str]:
        """The clients among these that have answers, each once, in order."""
        return sorted({c for c in clients if c is not None and c in self._corpora})

    def find(
        self, clients: Sequence[str | None], tail: mx.array, k: int
    ) -> Continuation | None:
        """What followed each row's newest tokens in its client's answers.

        Args:
            clients: of each row; ``None``: its corpus is empty.
            tail: each row's newest tokens, the newest first, shape (B, ``DEPTH``); what
                equals no token where a row has fewer.
            k: how many tokens.

        Returns:
            ``None`` if no row's client has an answer.
        """
        owners = self.owners(clients)
        if not owners:
            return None
        rows = tuple(owners.index(c) if c in owners else -1 for c in clients)
        used = [self._corpora[c] for c in owners]
        key = (rows, tuple(owners), tuple(corpus.count for corpus in used))
        if self._arrays[0] != key:
            tokens, places = zip(*(corpus.arrays() for corpus in used), strict=True)
            arrays = (
                tokens[0] if len(tokens) == 1 else mx.concatenate(list(tokens)),
                places[0] if len(places) == 1 else mx.concatenate(list(places)),
                mx.array([used[i].end if i >= 0 else 0 for i in rows], mx.int32),
                mx.array(rows, mx.int32),
            )
            self._arrays = (key, arrays)
        return _look_up(*self._arrays[1], self.capacity, tail, k)


def _look_up(
    tokens: mx.array,
    places: mx.array,
    ends: mx.array,
    rows: mx.array,
    capacity: int,
    tail: mx.array,
    k: int,
) -> Continuation:
    """See :meth:`Corpora.find`.

    Args:
        tokens, places: of all corpora, one after the other.
        ends: where each row's corpus ends, shape (B,).
        rows: the number of each row's corpus, or -1, shape (B,).
    """
    buckets = capacity // 2
    mixed = mx.zeros(rows.shape, mx.uint32)
    for j in range(SHORTEST):
        mixed = (mixed ^ tail[:, j].astype(mx.uint32)) * mx.array(
            _MULTIPLIER, mx.uint32
        )
    bits = buckets.bit_length() - 1
    bucket = (mixed >> (32 - bits)).astype(mx.int32)
    row = mx.maximum(rows, 0)
    ways = places[row * buckets + bucket]

    def at(where: mx.array) -> mx.array:
        """Tokens at places of each row's corpus; ``EMPTY`` outside of it."""
        inside = (where >= 0) & (where < capacity)
        shape = (-1, *[1] * (where.ndim - 1))
        index = row.reshape(shape) * capacity + mx.where(inside, where, 0)
        return mx.where(inside, tokens[index], EMPTY)

    agree = at(ways[..., None] - mx.arange(DEPTH)) == tail[:, None, :]
    size = mx.cumprod(agree.astype(mx.int32), axis=-1).sum(axis=-1)
    size = mx.where((rows >= 0)[:, None], size, 0)
    size = mx.where(size >= SHORTEST, size, 0)
    # The longest, and of these the newest.
    age = (ends[:, None] - ways - 1) % capacity
    # The best one's size and place are in its key: on CUDA, MLX takes five seconds to
    # compile what picks them.
    best = (size * capacity - age).max(axis=1)
    size = (best + capacity - 1) // capacity
    last = ((ends - 1 - size * capacity + best) % capacity)[:, None]
    following = at(last + 1 + mx.arange(k))
    there = mx.cumprod((following >= 0).astype(mx.int32), axis=1)
    count = mx.where(size > 0, there.sum(axis=1), 0)
    following = mx.where(mx.arange(k) < count[:, None], following, 0)
    return Continuation(following.astype(mx.int32), count, size)
