"""Batch caches in place of those that a model asks for, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from ..errors import UnsupportedModelError
from .batch import BatchCache
from .kinds import BatchKVCache, BatchRotatingKVCache
from .memo import Memo


@dataclass(frozen=True)
class CacheOptions:
    """What the engine knows when it makes caches.

    Args:
        max_write: most tokens written in one call (prefill chunk or k + 1).
        read_bucket, max_length: see :class:`~specdec.cache.batch.BatchCache`.
    """

    max_write: int
    read_bucket: int = 1
    max_length: int | None = None


Adopter = Callable[[Any, int, CacheOptions, Memo], BatchCache]


def _adopt_full(
    cache: Any, batch_size: int, options: CacheOptions, memo: Memo
) -> BatchCache:
    return BatchKVCache(
        batch_size,
        max_length=options.max_length,
        read_bucket=options.read_bucket,
        memo=memo,
    )


def _adopt_rotating(
    cache: Any, batch_size: int, options: CacheOptions, memo: Memo
) -> BatchCache:
    return BatchRotatingKVCache(
        batch_size,
        max_size=cache.max_size,
        keep=cache.keep,
        max_write=options.max_write,
        max_length=options.max_length,
        read_bucket=options.read_bucket,
        memo=memo,
    )


# Exact types: a subclass may well behave differently.
_ADOPTERS: dict[type[Any], Adopter] = {
    mlx_lm_cache.KVCache: _adopt_full,
    mlx_lm_cache.RotatingKVCache: _adopt_rotating,
}


def check_caches(model: Any, name: str) -> None:
    """Refuse a model that asks for a cache without a batch counterpart.

    Raises:
        UnsupportedModelError: names the model, the layer and the cache class.
    """
    for layer, cache in enumerate(mlx_lm_cache.make_prompt_cache(model)):
        if type(cache) not in _ADOPTERS:
            supported = ", ".join(t.__name__ for t in _ADOPTERS)
            raise UnsupportedModelError(
                f"{name}: layer {layer} asks for a {type(cache).__name__}, which "
                f"has no batch counterpart yet (supported: {supported})"
            )


def adopt_caches(
    model: Any, batch_size: int, options: CacheOptions, name: str = "model"
) -> list[BatchCache]:
    """One batch cache for each that ``model`` asks for, empty, sharing one memo.

    Raises:
        UnsupportedModelError: see :func:`check_caches`.
    """
    check_caches(model, name)
    memo = Memo()
    return [
        _ADOPTERS[type(c)](c, batch_size, options, memo)
        for c in mlx_lm_cache.make_prompt_cache(model)
    ]
