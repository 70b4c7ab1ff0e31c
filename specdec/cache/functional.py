"""A cache's write as a pure function of arrays, so that a forward can be compiled.

A forward changes the arrays of a cache, and what the host knows (bounds on lengths,
what a ring can undo). A compiled forward replays the change of the arrays without
running any Python, so the host's knowledge is updated by hand::

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
    """A cache whose next write can be planned beforehand and made elsewhere."""

    def fits(self, num_tokens: int) -> bool:
        """Whether every row has room for ``num_tokens`` more within ``max_length``.

        Waits for the device only if the host's bounds on lengths are not enough.
        """
        limit = self.max_length
        if limit is None or self._longest + num_tokens <= limit:
            return True
        return self._measure_longest() + num_tokens <= limit

    def reserve(self, num_tokens: int) -> Hashable:
        """Make room for a write of ``num_tokens`` tokens per row.

        Returns:
            A key of all that the graph of the write, its mask and attention's reads
            depends on, besides the arrays' heads and types. ``None`` when it cannot be
            known (nothing is stored yet, or padding is announced), or differs for every
            length.

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
        # A mask, or one of its rules, may be left out only where attention reads no
        # more than the rows hold.
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
        """The stored keys and values, (B, kv_heads, capacity, features) each."""
        assert self._storage.arrays is not None
        return self._storage.arrays

    def given(self) -> tuple[Hashable, Arrays]:
        """The inputs of a graph of the next write: their form, and the arrays."""
        return None, self.arrays

    def left(self) -> tuple[Any, Arrays]:
        """The outputs of that graph for :meth:`take`: their form, and the arrays."""
        return None, self.arrays

    def without_arrays(self) -> Self:
        """A copy of this cache that holds no arrays, only what the host knows."""
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
        """Hold the result of a write of ``num_tokens`` tokens, after :meth:`reserve`.

        Args:
            form, arrays: what :meth:`left` returned for the cache that was written.
            offset: tokens kept by every row now, shape (B,).
            taken_back: how many of those tokens every row has lost again.

        Raises:
            CacheError: that is more than a ring can take back.
        """
        self._storage.arrays = arrays
        self.offset = offset
        self._count(num_tokens, self._longest + num_tokens)
        if taken_back:
            self._note_trim(taken_back)
            self._longest -= taken_back
