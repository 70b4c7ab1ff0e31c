"""The public cache classes: a layout, a mask rule, and mlx-lm's counterpart of each.

| class                    | layout | sees           |
|--------------------------|--------|----------------|
| ``BatchKVCache``         | linear | everything     |
| ``BatchRotatingKVCache`` | ring   | sliding window |
| ``BatchChunkedKVCache``  | ring   | its own chunk  |

Each of them stores keys and values as they are, or quantized (``bits``).
"""

from __future__ import annotations

from typing import Any, Self, Unpack

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import CacheError
from .batch import BatchCache
from .core import Settings
from .positions import ChunkedRule, SlidingRule, whole
from .ring import Ring
from .storage import Arrays

DEFAULT_MAX_WRITE = 512


class BatchKVCache(BatchCache):
    """Full attention: for mlx-lm's ``KVCache``, ``BatchKVCache``, ``QuantizedKVCache``.

    Args:
        batch_size: number of rows.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    def __init__(self, batch_size: int = 1, **settings: Unpack[Settings]):
        super().__init__(batch_size, **settings)

    @property
    def single(self) -> Any:
        return mlx_lm_cache.QuantizedKVCache if self.packing else mlx_lm_cache.KVCache

    @classmethod
    def _from_single(cls, cache: Any) -> Self:
        if isinstance(cache, mlx_lm_cache.QuantizedKVCache):
            made = cls(1, bits=cache.bits, group_size=cache.group_size)
        elif isinstance(cache, mlx_lm_cache.KVCache):
            made = cls(1)
        else:
            return super()._from_single(cache)
        if cache.offset:
            arrays = made._storage.codec.collect(*cache.keys_and_values())
            made._fill_row(arrays, range(cache.offset), cache.offset)
        return made

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single(**self.packing)
        if arrays is not None:
            packing = self.packing and (self.group_size, self.packing["bits"])
            made.state = (*self._storage.codec.present(arrays), length, *packing)
        return made


class BatchRotatingKVCache(BatchCache):
    """A sliding window: for mlx-lm's ``RotatingKVCache`` and ``BatchRotatingKVCache``.

    Args:
        batch_size: number of rows.
        max_size: tokens that a query sees, as mlx-lm counts: ``keep`` first ones
            and the newest ``max_size - keep``.
        keep: first tokens that are never dropped (attention sinks).
        max_write: most tokens written in one call once a row may have wrapped,
            and most that can then be taken back.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        max_size: int,
        keep: int = 0,
        max_write: int = DEFAULT_MAX_WRITE,
        **settings: Unpack[Settings],
    ):
        window = whole("max_size", max_size) - whole("keep", keep)
        super().__init__(
            batch_size,
            ring=Ring(window, keep, max_write),
            rules=(SlidingRule(window, keep),),
            options={"max_size": max_size, "keep": keep, "max_write": max_write},
            **settings,
        )

    @property
    def single(self) -> Any:
        return None if self.packing else mlx_lm_cache.RotatingKVCache

    @classmethod
    def _from_single(cls, cache: Any) -> Self:
        if not isinstance(cache, mlx_lm_cache.RotatingKVCache):
            return super()._from_single(cache)
        made = cls(1, max_size=cache.max_size, keep=cache.keep)
        if cache.empty() or not cache.offset:
            return made
        keys, values, length, keep, _, newest = cache.state
        # Slots from the oldest position to the newest, sinks first.
        order = list(range(keys.shape[2]))
        if newest < min(len(order), length):  # rotated
            order = order[:keep] + order[newest:] + order[keep:newest]
        else:
            order = order[:newest]
        first = length - (len(order) - keep)
        positions = (
            [*range(keep), *range(first, length)]
            if len(order) < length
            else list(range(length))
        )
        slots = mx.array(order)
        made._fill_row((keys[:, :, slots], values[:, :, slots]), positions, length)
        return made

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        max_size, keep = self._options["max_size"], self._options["keep"]
        made = self.single(max_size, keep=keep)
        if arrays is not None:
            held = arrays[0].shape[2]
            made.state = (*arrays, length, keep, max_size, held)
        return made


class BatchChunkedKVCache(BatchCache):
    """Attention within chunks of positions: for mlx-lm's ``ChunkedKVCache``.

    Args:
        batch_size: number of rows.
        chunk_size: positions ``p`` and ``q`` see each other iff
            ``p // chunk_size == q // chunk_size`` (and ``p <= q``).
        max_write: as for :class:`BatchRotatingKVCache`.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        chunk_size: int,
        max_write: int = DEFAULT_MAX_WRITE,
        **settings: Unpack[Settings],
    ):
        super().__init__(
            batch_size,
            ring=Ring(whole("chunk_size", chunk_size), 0, max_write),
            rules=(ChunkedRule(chunk_size),),
            options={"chunk_size": chunk_size, "max_write": max_write},
            **settings,
        )

    def maybe_trim_front(self) -> None:
        """Do nothing: mlx-lm's cache needs this before a write, a ring does not."""

    @property
    def start_position(self) -> int:
        """Refused: code that asks for it wants one number for all rows."""
        raise CacheError(
            "it builds its own chunk mask from start_position and offset as whole "
            "numbers, and the rows of a batch each have their own"
        )

    @property
    def single(self) -> Any:
        return None if self.packing else mlx_lm_cache.ChunkedKVCache

    @classmethod
    def _from_single(cls, cache: Any) -> Self:
        if not isinstance(cache, mlx_lm_cache.ChunkedKVCache):
            return super()._from_single(cache)
        made = cls(1, chunk_size=cache.chunk_size)
        if cache.offset:
            held = range(cache.start_position, cache.offset)
            made._fill_row(cache.keys_and_values(), held, cache.offset)
        return made

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single(self._options["chunk_size"])
        if arrays is not None:
            held = arrays[0].shape[2]
            made.state = (*arrays, length, self._options["chunk_size"], length - held)
        return made
