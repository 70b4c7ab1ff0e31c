"""Batch KV caches with per-sequence trim, on one invariant (docs/caches.md)."""

from .batch import BatchCache
from .core import Memo
from .factory import (
    CacheOptions,
    check_caches,
    extend_caches,
    make_batch_caches,
    maybe_quantize,
    place_caches,
    reads_boolean_masks,
)
from .kinds import BatchChunkedKVCache, BatchKVCache, BatchRotatingKVCache
from .members import BatchCacheList, members
from .recurrent import BatchRecurrentCache
from .storage import put_rows

__all__ = [
    "BatchCache",
    "BatchCacheList",
    "BatchChunkedKVCache",
    "BatchKVCache",
    "BatchRecurrentCache",
    "BatchRotatingKVCache",
    "CacheOptions",
    "Memo",
    "check_caches",
    "extend_caches",
    "make_batch_caches",
    "maybe_quantize",
    "members",
    "place_caches",
    "put_rows",
    "reads_boolean_masks",
]
