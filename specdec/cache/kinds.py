"""The public cache classes: each a storage, a layout and mask rules.

| class                             | layout | storage   | sees           |
|-----------------------------------|--------|-----------|----------------|
| ``BatchKVCache``                  | linear | dense     | everything     |
| ``BatchRotatingKVCache``          | ring   | dense     | sliding window |
| ``BatchChunkedKVCache``           | ring   | dense     | its own chunk  |
| ``BatchQuantizedKVCache``         | linear | quantized | everything     |
| ``BatchQuantizedRotatingKVCache`` | ring   | quantized | sliding window |
| ``BatchQuantizedChunkedKVCache``  | ring   | quantized | its own chunk  |
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, Unpack

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import CacheError
from .batch import BatchCache
from .core import Settings
from .positions import ChunkedRule, LinearLayout, SlidingRule, whole
from .quantized import Dense, Quantized, QuantizedRing
from .ring import RingCache
from .storage import Arrays, Codec, DenseCodec

DEFAULT_MAX_WRITE = 512
DENSE = DenseCodec()


class _Linear(BatchCache):
    """Every position has its own slot."""

    def __init__(
        self,
        batch_size: int = 1,
        *,
        codec: Codec = DENSE,
        **settings: Unpack[Settings],
    ):
        super().__init__(
            batch_size,
            codec=codec,
            layout=LinearLayout(),
            options=codec.options,
            **settings,
        )

    @classmethod
    def _blank(cls) -> Self:
        return cls(0)

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1)

    def _insert_single(self, cache: Any) -> None:
        arrays = self._storage.codec.collect(*cache.keys_and_values())
        self._fill_row(arrays, range(cache.offset), cache.offset)


class _Rotating(RingCache):
    """The newest positions, and the first ``keep``."""

    single: ClassVar[Any] = mlx_lm_cache.RotatingKVCache

    def __init__(
        self,
        batch_size: int = 1,
        *,
        max_size: int,
        keep: int = 0,
        max_write: int = DEFAULT_MAX_WRITE,
        codec: Codec = DENSE,
        **settings: Unpack[Settings],
    ):
        max_size, keep = whole("max_size", max_size), whole("keep", keep)
        super().__init__(
            batch_size,
            codec=codec,
            window=max_size - keep,
            keep=keep,
            max_write=max_write,
            rules=(SlidingRule(max_size - keep, keep),),
            options={"max_size": max_size, "keep": keep, **codec.options},
            **settings,
        )

    @classmethod
    def _blank(cls) -> Self:
        return cls(0, max_size=1)

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1, max_size=cache.max_size, keep=cache.keep)

    def _insert_single(self, cache: Any) -> None:
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
        self._fill_row((keys[:, :, slots], values[:, :, slots]), positions, length)

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        max_size = self.keep + self.window
        made = self.single(max_size, keep=self.keep)
        if arrays is not None:
            held = arrays[0].shape[2]
            made.state = (*arrays, length, self.keep, max_size, held)
        return made


class _Chunked(RingCache):
    """The positions of one attention chunk."""

    single: ClassVar[Any] = mlx_lm_cache.ChunkedKVCache

    def __init__(
        self,
        batch_size: int = 1,
        *,
        chunk_size: int,
        max_write: int = DEFAULT_MAX_WRITE,
        codec: Codec = DENSE,
        **settings: Unpack[Settings],
    ):
        super().__init__(
            batch_size,
            codec=codec,
            window=whole("chunk_size", chunk_size),
            keep=0,
            max_write=max_write,
            rules=(ChunkedRule(chunk_size),),
            options={"chunk_size": chunk_size, **codec.options},
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

    @classmethod
    def _blank(cls) -> Self:
        return cls(0, chunk_size=1)

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1, chunk_size=cache.chunk_size)

    def _insert_single(self, cache: Any) -> None:
        held = range(cache.start_position, cache.offset)
        self._fill_row(cache.keys_and_values(), held, cache.offset)

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single(self.window)
        if arrays is not None:
            held = arrays[0].shape[2]
            made.state = (*arrays, length, self.window, length - held)
        return made


# The public classes. The first base says how keys and values are stored.


class BatchQuantizedKVCache(Quantized, _Linear):
    """Full attention on quantized keys and values: for ``QuantizedKVCache``.

    Tokens are quantized as they are written. Attention runs on the packed form, or on
    columns that are unpacked for it (``unpacks``).

    Args:
        batch_size: number of rows.
        bits: 4 or 8.
        group_size: 32, 64 or 128; must divide the head size.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    single: ClassVar[Any] = mlx_lm_cache.QuantizedKVCache

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1, bits=cache.bits, group_size=cache.group_size)

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        codec = self._codec()
        made = self.single(group_size=codec.group_size, bits=codec.bits)
        if arrays is not None:
            keys, values = codec.present(arrays)
            made.state = (keys, values, length, codec.group_size, codec.bits)
        return made


class BatchKVCache(Dense, _Linear):
    """Full attention, dense: stands in for mlx-lm's ``KVCache`` and ``BatchKVCache``.

    Args:
        batch_size: number of rows.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    single: ClassVar[Any] = mlx_lm_cache.KVCache
    quantized = BatchQuantizedKVCache

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single()
        if arrays is not None:
            made.state = (*arrays, length)
        return made


class BatchQuantizedRotatingKVCache(QuantizedRing, _Rotating):
    """A sliding window on quantized keys and values; mlx-lm has no such cache.

    Args:
        batch_size, max_size, keep, max_write: as for :class:`BatchRotatingKVCache`.
        bits, group_size: as for :class:`BatchQuantizedKVCache`.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """


class BatchRotatingKVCache(Dense, _Rotating):
    """A sliding window, dense: for ``RotatingKVCache`` and ``BatchRotatingKVCache``.

    Args:
        batch_size: number of rows.
        max_size: tokens that a query sees, as mlx-lm counts: ``keep`` first ones
            and the newest ``max_size - keep``.
        keep: first tokens that are never dropped (attention sinks).
        max_write: most tokens written in one call once a row may have wrapped,
            and most that can then be taken back.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    quantized = BatchQuantizedRotatingKVCache


class BatchQuantizedChunkedKVCache(QuantizedRing, _Chunked):
    """Attention within chunks of positions, on quantized keys and values.

    Args:
        batch_size, chunk_size, max_write: as for :class:`BatchChunkedKVCache`.
        bits, group_size: as for :class:`BatchQuantizedKVCache`.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """


class BatchChunkedKVCache(Dense, _Chunked):
    """Attention within chunks of positions, dense: for ``ChunkedKVCache``.

    Args:
        batch_size: number of rows.
        chunk_size: positions ``p`` and ``q`` see each other iff
            ``p // chunk_size == q // chunk_size`` (and ``p <= q``).
        max_write: as for :class:`BatchRotatingKVCache`.
        settings: see :class:`~specdec.cache.core.CacheCore`.
    """

    quantized = BatchQuantizedChunkedKVCache
