"""Several caches of one layer, for models that ask for a ``CacheList``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from .batch import BatchCache
from .core import RowCounts


class BatchCacheList:
    """Batch caches of one layer that move together: for mlx-lm's ``CacheList``.

    Models index it; the engine treats it as one cache.
    """

    def __init__(self, *caches: BatchCache):
        self.caches = list(caches)

    def __getitem__(self, idx: int) -> BatchCache:
        return self.caches[idx]

    @property
    def offset(self) -> mx.array:
        """Tokens kept by every row, shape (B,); equal in all members."""
        return self.caches[0].offset

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.caches[0].batch_size

    @property
    def capacity(self) -> int:
        """Slots allocated per row in the largest member."""
        return max(c.capacity for c in self.caches)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(c.nbytes for c in self.caches)

    def size(self) -> int:
        """Tokens kept for the longest row."""
        return max(c.size() for c in self.caches)

    def empty(self) -> bool:
        """Whether nothing is allocated."""
        return all(c.empty() for c in self.caches)

    def note_lengths(self, *, longest: int, shortest: int = 0) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c in self.caches:
            c.note_lengths(longest=longest, shortest=shortest)

    def is_trimmable(self) -> bool:
        """Whether kept tokens can be taken back now, by every member."""
        return all(c.is_trimmable() for c in self.caches)

    def trim(self, n: int) -> int:
        """Take the last ``n`` tokens of every row back."""
        return max(c.trim(n) for c in self.caches)

    def trim_per_sequence(
        self, n: RowCounts, at_most: int | None = None, fewest: int = 0
    ) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c in self.caches:
            c.trim_per_sequence(n, at_most, fewest)

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens have room after every row, in every member."""
        found = [c.fits(num_tokens) for c in self.caches]
        return all(found)

    def resize(self, max_write: int) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c in self.caches:
            c.resize(max_write)

    def checkpoint(self) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c in self.caches:
            c.checkpoint()

    def prepare(self, **kwargs: Any) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c in self.caches:
            c.prepare(**kwargs)

    def finalize(self) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c in self.caches:
            c.finalize()

    def filter(self, batch_indices: RowCounts) -> None:
        """Keep just the given rows, in that order."""
        for c in self.caches:
            c.filter(batch_indices)

    def begin_like(self, other: BatchCacheList) -> None:
        """As for :class:`~specdec.cache.core.CacheCore`."""
        for c, o in zip(self.caches, other.caches, strict=True):
            c.begin_like(o)

    def place(self, rows: Sequence[int], other: BatchCacheList) -> None:
        """As for :class:`~specdec.cache.batch.BatchCache`."""
        for c, o in zip(self.caches, other.caches, strict=True):
            c.place(rows, o)

    def reset(self, rows: Sequence[int]) -> None:
        """As for :class:`~specdec.cache.batch.BatchCache`."""
        for c in self.caches:
            c.reset(rows)

    def extend(self, other: BatchCacheList) -> None:
        """Append the rows of ``other``."""
        for c, o in zip(self.caches, other.caches, strict=True):
            c.extend(o)

    def extract(self, idx: int) -> Any:
        """Row ``idx`` as mlx-lm's ``CacheList``."""
        return mlx_lm_cache.CacheList(*(c.extract(idx) for c in self.caches))

    @classmethod
    def merge(cls, caches: Sequence[BatchCacheList]) -> Self:
        """One batch from several lists of one sequence each."""
        members = zip(*(c.caches for c in caches), strict=True)
        return cls(*(type(m[0]).merge(m) for m in members))

    @property
    def state(self) -> list[Any]:
        """The states of the members."""
        return [c.state for c in self.caches]

    @state.setter
    def state(self, v: Sequence[Any]) -> None:
        for c, s in zip(self.caches, v, strict=True):
            c.state = s


def members(caches: Sequence[Any]) -> list[BatchCache]:
    """The caches of a model's layers, lists taken apart."""
    found: list[BatchCache] = []
    for cache in caches:
        found += cache.caches if isinstance(cache, BatchCacheList) else [cache]
    return found
