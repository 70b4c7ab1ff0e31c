"""Several caches of one layer, for models that ask for a ``CacheList``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from .batch import BatchCache


def _each(name: str) -> Callable[..., None]:
    """A method that calls ``name`` of each member; lists among arguments are parted."""

    def call(self: BatchCacheList, *args: Any, **kwargs: Any) -> None:
        for i, cache in enumerate(self.caches):
            parts = [a.caches[i] if isinstance(a, BatchCacheList) else a for a in args]
            getattr(cache, name)(*parts, **kwargs)

    return call


class BatchCacheList:
    """Batch caches of one layer that move together: for mlx-lm's ``CacheList``.

    Models index it; the engine treats it as one cache.
    """

    def __init__(self, *caches: BatchCache):
        self.caches = list(caches)

    def __getitem__(self, idx: int) -> BatchCache:
        return self.caches[idx]

    note_lengths = _each("note_lengths")
    trim_per_sequence = _each("trim_per_sequence")
    resize, checkpoint, skip = _each("resize"), _each("checkpoint"), _each("skip")
    prepare, finalize = _each("prepare"), _each("finalize")
    filter, reset = _each("filter"), _each("reset")
    clean, make_finite = _each("clean"), _each("make_finite")
    begin_like, place, extend = _each("begin_like"), _each("place"), _each("extend")

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

    @property
    def written(self) -> list[Any]:
        """What is computed once all writes are."""
        return [c.written for c in self.caches]

    def size(self) -> int:
        return max(c.size() for c in self.caches)

    def empty(self) -> bool:
        return all(c.empty() for c in self.caches)

    def is_trimmable(self) -> bool:
        return all(c.is_trimmable() for c in self.caches)

    def trim(self, n: int) -> int:
        return max(c.trim(n) for c in self.caches)

    def fits(self, num_tokens: int) -> bool:
        # Ask all of them, because each may learn its rows' lengths by looking.
        answers = [c.fits(num_tokens) for c in self.caches]
        return all(answers)

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
    """The caches of a model's layers, with lists flattened."""
    flat: list[BatchCache] = []
    for cache in caches:
        flat += cache.caches if isinstance(cache, BatchCacheList) else [cache]
    return flat
