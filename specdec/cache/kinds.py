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
    def _from_single(cls, single: Any) -> Self:
        if isinstance(single, mlx_lm_cache.QuantizedKVCache):
            row = cls(1, bits=single.bits, group_size=single.group_size)
        elif isinstance(single, mlx_lm_cache.KVCache):
            row = cls(1)
        else:
            return super()._from_single(single)
        if single.offset:
            arrays = row._storage.codec.collect(*single.keys_and_values())
            row._fill_row(arrays, range(single.offset), single.offset)
        return row

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        single = self.single(**self.packing)
        if arrays is not None:
            # Its group size, then its bits.
            packing = list(self.packing.values())[::-1]
            single.state = (*self._storage.codec.present(arrays), length, *packing)
        return single


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
    def _from_single(cls, single: Any) -> Self:
        if not isinstance(single, mlx_lm_cache.RotatingKVCache):
            return super()._from_single(single)
        row = cls(1, max_size=single.max_size, keep=single.keep)
        if single.empty() or not single.offset:
            return row
        keys, values, length, keep, _, newest = single.state
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
        row._fill_row((keys[:, :, slots], values[:, :, slots]), positions, length)
        return row

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        max_size, keep = self._options["max_size"], self._options["keep"]
        single = self.single(max_size, keep=keep)
        if arrays is not None:
            held = arrays[0].shape[2]
            single.state = (*arrays, length, keep, max_size, held)
        return single


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
    def _from_single(cls, single: Any) -> Self:
        if not isinstance(single, mlx_lm_cache.ChunkedKVCache):
            return super()._from_single(single)
        row = cls(1, chunk_size=single.chunk_size)
        if single.offset:
            held = range(single.start_position, single.offset)
            row._fill_row(single.keys_and_values(), held, single.offset)
        return row

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        single = self.single(self._options["chunk_size"])
        if arrays is not None:
            held = arrays[0].shape[2]
            single.state = (*arrays, length, self._options["chunk_size"], length - held)
        return single
