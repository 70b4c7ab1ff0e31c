"""Batch KV caches with per-sequence trim, one invariant for all (see docs/caches.md)."""

from .adopt import adopt_caches
from .batch import BatchCache
from .kinds import (
    BatchChunkedKVCache,
    BatchKVCache,
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    BatchRotatingKVCache,
)
from .memo import Memo

__all__ = [
    "BatchCache",
    "BatchChunkedKVCache",
    "BatchKVCache",
    "BatchQuantizedKVCache",
    "BatchQuantizedRotatingKVCache",
    "BatchRotatingKVCache",
    "Memo",
    "adopt_caches",
]
