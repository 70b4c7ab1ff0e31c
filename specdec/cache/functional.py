"""A cache's write as a pure function of arrays, so that a forward can be compiled.

What a forward does to a cache has two sides: arrays change, and so does what the
host knows (bounds on lengths, what a ring can undo). A compiled forward replays
the first without running any Python, so the second is done by hand::

    key = cache.reserve(n)            # room for n tokens; what the graph depends on
    bare = cache.without_arrays()     # when the graph is traced:
    twin = bare.holding(arrays, offset, memo)    #   the model writes into this one
    cache.take(arrays, offset, n)     # what the graph computed; the host counts
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, Self

import mlx.core as mx

from .capacity import round_up
from .core import CacheCore
from .memo import Memo
from .storage import Arrays, Storage


class FunctionalCache(CacheCore):
    """A cache whose next write can be planned beforehand, and done elsewhere."""

    def fits(self, num_tokens: int) -> bool:
        """Whether ``max_length`` has room for so many tokens after every row.

        Waits for the device only where what the host knows of lengths is not enough.
        """
        limit = self.max_length
        if limit is None or self._longest + num_tokens <= limit:
            return True
        return self._measure_longest() + num_tokens <= limit

    def reserve(self, num_tokens: int) -> Hashable:
        """Make room for a write of ``num_tokens`` tokens per row.

        Returns:
            All that the graph of that write, its mask and what attention reads
            depends on beside the arrays' heads and types. ``None`` when it cannot be
            known (nothing is stored yet, or padding is announced), or is another
            for every length.

        Raises:
            CacheError: the rows do not fit ``max_length`` or the ring.
        """
        if self.empty() or self._lengths is not None or self._exact(num_tokens):
            return None
        longest = self._longest_after(num_tokens)
        self._check_write(num_tokens, longest)
        capacity = self._capacity_for(longest)
        self._storage.grow(capacity)
        extent = min(capacity, round_up(longest, self.read_bucket))
        # Only where attention reads no more than the rows hold may a mask, or one
        # of its rules, be left out.
        bound = longest if extent == longest else None
        return (
            type(self),
            self._storage.codec,
            self.layout,
            capacity,
            extent,
            bound,
            self._uniform,
        )

    @property
    def arrays(self) -> Arrays:
        """What is stored: keys and values, (B, kv_heads, capacity, features) each."""
        assert self._storage.arrays is not None
        return self._storage.arrays

    def given(self) -> tuple[Hashable, Arrays]:
        """What a graph of the next write takes in: its form, and the arrays."""
        return None, self.arrays

    def left(self) -> tuple[Any, Arrays]:
        """What that write has left, for :meth:`take`."""
        return None, self.arrays

    def without_arrays(self) -> Self:
        """What the host knows of this cache, holding nothing."""
        bare = copy.copy(self)
        bare._storage = Storage(self._storage.codec)
        bare._memo = Memo()
        del bare.offset
        return bare

    def holding(self, arrays: Arrays, offset: mx.array, memo: Memo) -> Self:
        """A cache like this one that holds the given arrays."""
        twin = copy.copy(self)
        twin._storage = Storage(self._storage.codec, arrays)
        twin._memo = memo
        twin.offset = offset
        return twin

    def take(
        self,
        form: Any,
        arrays: Arrays,
        offset: mx.array,
        num_tokens: int,
        taken_back: int = 0,
    ) -> None:
        """Hold what a write of ``num_tokens`` tokens made, room for which was reserved.

        Args:
            form, arrays: what :meth:`left` gave of the cache that was written.
            offset: tokens kept by every row now, shape (B,).
            taken_back: of those tokens, how many every row has lost again.

        Raises:
            CacheError: that is more than a ring can take back.
        """
        self._storage.arrays = arrays
        self.offset = offset
        self._count(num_tokens, self._longest + num_tokens)
        if taken_back:
            self._note_trim(taken_back)
            self._longest -= taken_back
