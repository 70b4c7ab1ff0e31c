"""What followed each n-gram in any row, finished ones included: a bounded table."""

from __future__ import annotations

import mlx.core as mx

_MULTIPLIER = 1_000_003
# Sequence numbers are int32: begin again long before they overflow.
_LAST_SEQUENCE = 2**30


class NgramTable:
    """Remembers the newest n-grams, and finds what followed one.

    A log holds the n-grams in the order in which they came, each with the token
    behind it; heads hold the newest entry of every hash. Both have a fixed size,
    and looking up or adding an n-gram costs the same whatever they hold. A lookup
    compares the whole n-gram, so that two of one hash are never taken for
    each other; the older one is forgotten.

    Args:
        context_size: tokens of an n-gram.
        log_size: n-grams remembered.
        num_heads: hashes, a power of two.
    """

    def __init__(
        self, *, context_size: int = 3, log_size: int = 65536, num_heads: int = 131072
    ):
        self.context_size = context_size
        self._log = mx.full((log_size, context_size + 1), -1, mx.int32)
        self._heads = mx.full((num_heads,), -1, mx.int32)
        self._next = 0
        # Else they belong to the thread that made them, and servers have another.
        mx.eval(self._log, self._heads)

    def _hash(self, contexts: mx.array) -> mx.array:
        hashed = mx.zeros(contexts.shape[:-1], mx.uint32)
        for j in range(self.context_size):
            hashed = hashed * _MULTIPLIER + contexts[..., j].astype(mx.uint32)
        hashed = hashed ^ (hashed >> 15)
        return hashed % self._heads.shape[0]

    def add(self, tokens: mx.array, count: mx.array) -> None:
        """Remember what row ``i`` has just committed.

        Args:
            tokens: the ``context_size`` tokens before, then the new ones, shape
                (B, context_size + S); less than 0 where there is none.
            count: new tokens of each row, shape (B,).
        """
        num_new = tokens.shape[1] - self.context_size
        starts = mx.arange(num_new)
        ngrams = tokens[:, starts[:, None] + mx.arange(self.context_size + 1)]
        known = (starts < count[:, None]) & (ngrams >= 0).all(axis=-1)
        # The end of a long prompt is what is remembered.
        ngrams = ngrams.reshape(-1, self.context_size + 1)[-self._log.shape[0] :]
        known = known.reshape(-1)[-self._log.shape[0] :]
        if self._next > _LAST_SEQUENCE:
            self._heads, self._next = mx.full_like(self._heads, -1), 0
        number = mx.arange(self._next, self._next + len(ngrams), dtype=mx.int32)
        self._next += len(ngrams)
        self._log[number % self._log.shape[0]] = mx.where(known[:, None], ngrams, -1)
        hashed = self._hash(ngrams[:, :-1])
        # The largest number wins, in whatever order the device writes.
        self._heads = self._heads.at[hashed].maximum(mx.where(known, number, -1))
        mx.async_eval(self._log, self._heads)

    def follow(self, context: mx.array, k: int) -> tuple[mx.array, mx.array]:
        """What followed, and followed that, up to ``k`` tokens.

        Args:
            context: each row's newest tokens, shape (B, context_size).

        Returns:
            Tokens, shape (B, k), and how many of them were found, shape (B,).
        """
        tokens, found = [], [mx.ones((context.shape[0],), mx.bool_)]
        for _ in range(k):
            number = self._heads[self._hash(context)]
            entry = self._log[number % self._log.shape[0]]
            same = (entry[:, :-1] == context).all(axis=1) & (number >= 0)
            found.append(found[-1] & same)
            tokens.append(entry[:, -1])
            context = mx.concatenate([context[:, 1:], entry[:, -1:]], axis=1)
        length = mx.stack(found[1:], axis=1).astype(mx.int32).sum(axis=1)
        return mx.stack(tokens, axis=1), length
