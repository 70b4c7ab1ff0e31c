"""The public cache classes: each a storage, a layout and mask rules.

| class                          | layout | storage   | sees           |
|--------------------------------|--------|-----------|----------------|
| ``BatchKVCache``               | linear | dense     | everything     |
| ``BatchRotatingKVCache``       | ring   | dense     | sliding window |
| ``BatchQuantizedKVCache``      | linear | quantized | everything     |
| ``BatchQuantizedRotatingKVCache`` | ring | quantized | sliding window |
| ``BatchChunkedKVCache``        | ring   | dense     | its own chunk  |
"""

from __future__ import annotations

from typing import Any, Self, TypeVar, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import CacheError
from .batch import BatchCache
from .memo import Memo
from .positions import ChunkedRule, LinearLayout, SlidingRule
from .ring import RingCache
from .storage import Arrays, DenseCodec, QuantizedCodec

DEFAULT_MAX_WRITE = 512

Q = TypeVar("Q", bound=BatchCache)


def _quantized(cache: BatchCache, kind: type[Q], group_size: int, bits: int) -> Q:
    options = {**cache._options, "bits": bits, "group_size": group_size}
    made = kind(cache.batch_size, memo=cache._memo, **options)  # type: ignore[arg-type]
    made._convert(cache)
    return made


class _Quantized(BatchCache):
    """What mlx-lm's attention asks of a quantized cache."""

    @property
    def bits(self) -> int:
        """Bits per stored key or value element."""
        return cast(int, self._options["bits"])

    @property
    def group_size(self) -> int:
        """Elements that share one scale and bias."""
        return cast(int, self._options["group_size"])


class _Linear(BatchCache):
    """Exchange with mlx-lm's linear caches of one sequence."""

    def _insert_single(self, cache: Any) -> None:
        arrays = self._storage.codec.collect(*cache.keys_and_values())
        self._fill_row(arrays, range(cache.offset), cache.offset)


class BatchKVCache(_Linear):
    """Full attention, dense: stands in for mlx-lm's ``KVCache`` and ``BatchKVCache``.

    Args:
        batch_size: number of rows.
        max_length, read_bucket, memo: see :class:`~specdec.cache.batch.BatchCache`.
    """

    single = mlx_lm_cache.KVCache

    def __init__(
        self,
        batch_size: int = 1,
        *,
        max_length: int | None = None,
        read_bucket: int = 1,
        memo: Memo | None = None,
    ):
        super().__init__(
            batch_size,
            codec=DenseCodec(),
            layout=LinearLayout(),
            max_length=max_length,
            read_bucket=read_bucket,
            memo=memo,
        )

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single()
        if arrays is not None:
            made.state = (*arrays, length)
        return made

    def to_quantized(
        self, group_size: int = 64, bits: int = 4
    ) -> BatchQuantizedKVCache:
        """This cache with its contents quantized; this one should be dropped.

        Raises:
            CacheError: bits or group size are not supported, or do not fit.
        """
        return _quantized(self, BatchQuantizedKVCache, group_size, bits)


class BatchQuantizedKVCache(_Quantized, _Linear):
    """Full attention on quantized keys and values: for ``QuantizedKVCache``.

    Tokens are quantized as they are written, and attention runs on the packed
    form; nothing is dequantized.

    Args:
        batch_size: number of rows.
        bits: 4 or 8.
        group_size: 32, 64 or 128; must divide the head size.
        max_length, read_bucket, memo: see :class:`~specdec.cache.batch.BatchCache`.
    """

    single = mlx_lm_cache.QuantizedKVCache

    def __init__(
        self,
        batch_size: int = 1,
        *,
        bits: int = 8,
        group_size: int = 64,
        max_length: int | None = None,
        read_bucket: int = 1,
        memo: Memo | None = None,
    ):
        super().__init__(
            batch_size,
            codec=QuantizedCodec(bits, group_size),
            layout=LinearLayout(),
            max_length=max_length,
            read_bucket=read_bucket,
            memo=memo,
            options={"bits": bits, "group_size": group_size},
        )

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1, bits=cache.bits, group_size=cache.group_size)

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single(group_size=self.group_size, bits=self.bits)
        if arrays is not None:
            keys, values = self._storage.codec.present(arrays)
            made.state = (keys, values, length, self.group_size, self.bits)
        return made


class _Rotating(RingCache):
    """Exchange with mlx-lm's rotating cache of one sequence."""

    single = mlx_lm_cache.RotatingKVCache

    def _insert_single(self, cache: Any) -> None:
        keys, values, length, keep, _, newest = cache.state
        held = keys.shape[2]
        order = list(range(held))
        if newest < min(held, length):
            order = order[:keep] + order[newest:] + order[keep:newest]
        elif newest < held:
            order = order[:newest]
        first = length - (len(order) - keep)
        positions = (
            list(range(length))
            if len(order) >= length
            else [*range(keep), *range(first, length)]
        )
        # Sinks and the window are all that a query can still see.
        wanted = set(self._row_positions(length))
        chosen = [(s, p) for s, p in zip(order, positions, strict=True) if p in wanted]
        slots = mx.array([s for s, _ in chosen])
        arrays = tuple(a[:, :, slots] for a in (keys, values))
        self._fill_row(arrays, [p for _, p in chosen], length)


class BatchRotatingKVCache(_Rotating):
    """A sliding window, dense: for ``RotatingKVCache`` and ``BatchRotatingKVCache``.

    Args:
        batch_size: number of rows.
        max_size: tokens that a query sees, as mlx-lm counts: ``keep`` first ones
            and the newest ``max_size - keep``.
        keep: first tokens that are never dropped (attention sinks).
        max_write: most tokens written in one call once a row may have wrapped.
        max_length, read_bucket, memo: see :class:`~specdec.cache.batch.BatchCache`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        max_size: int,
        keep: int = 0,
        max_write: int = DEFAULT_MAX_WRITE,
        max_length: int | None = None,
        read_bucket: int = 1,
        memo: Memo | None = None,
    ):
        super().__init__(
            batch_size,
            codec=DenseCodec(),
            window=max_size - keep,
            keep=keep,
            max_write=max_write,
            rules=(SlidingRule(max_size - keep, keep),),
            max_length=max_length,
            read_bucket=read_bucket,
            memo=memo,
            options={"max_size": max_size, "keep": keep},
        )

    @classmethod
    def _blank(cls) -> Self:
        return cls(0, max_size=1)

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1, max_size=cache.max_size, keep=cache.keep)

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        max_size = self.keep + self.window
        made = self.single(max_size, keep=self.keep)
        if arrays is not None:
            held = arrays[0].shape[2]
            made.state = (*arrays, length, self.keep, max_size, held)
        return made

    def to_quantized(
        self, group_size: int = 64, bits: int = 4
    ) -> BatchQuantizedRotatingKVCache:
        """This cache with its contents quantized; this one should be dropped.

        Raises:
            CacheError: bits or group size are not supported, or do not fit.
        """
        return _quantized(self, BatchQuantizedRotatingKVCache, group_size, bits)


class BatchQuantizedRotatingKVCache(_Quantized, _Rotating):
    """A sliding window on quantized keys and values; mlx-lm has no such cache.

    Args:
        batch_size, max_size, keep, max_write: as for :class:`BatchRotatingKVCache`.
        bits, group_size: as for :class:`BatchQuantizedKVCache`.
        max_length, read_bucket, memo: see :class:`~specdec.cache.batch.BatchCache`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        max_size: int,
        keep: int = 0,
        bits: int = 8,
        group_size: int = 64,
        max_write: int = DEFAULT_MAX_WRITE,
        max_length: int | None = None,
        read_bucket: int = 1,
        memo: Memo | None = None,
    ):
        super().__init__(
            batch_size,
            codec=QuantizedCodec(bits, group_size),
            window=max_size - keep,
            keep=keep,
            max_write=max_write,
            rules=(SlidingRule(max_size - keep, keep),),
            max_length=max_length,
            read_bucket=read_bucket,
            memo=memo,
            options={
                "max_size": max_size,
                "keep": keep,
                "bits": bits,
                "group_size": group_size,
            },
        )

    @classmethod
    def _blank(cls) -> Self:
        return cls(0, max_size=1)

    @classmethod
    def _from_single(cls, cache: Any) -> Self:
        raise CacheError(
            "mlx-lm has no quantized rotating cache to merge: merge into a "
            "BatchRotatingKVCache and call to_quantized()"
        )

    def extract(self, idx: int) -> Any:
        """Refused: mlx-lm has no class that could hold it."""
        raise CacheError(
            "a quantized ring cannot be extracted: mlx-lm has no class for it"
        )


class _Chunked(RingCache):
    """Exchange with mlx-lm's chunked cache of one sequence."""

    single = mlx_lm_cache.ChunkedKVCache

    def _insert_single(self, cache: Any) -> None:
        keys, values = cache.keys_and_values()
        first = cache.start_position
        wanted = [p for p in self._row_positions(cache.offset) if p >= first]
        slots = mx.array([p - first for p in wanted])
        arrays = self._storage.codec.collect(keys[:, :, slots], values[:, :, slots])
        self._fill_row(arrays, wanted, cache.offset)


class BatchChunkedKVCache(_Chunked):
    """Attention within chunks of positions, dense: for ``ChunkedKVCache``.

    Args:
        batch_size: number of rows.
        chunk_size: positions ``p`` and ``q`` see each other iff
            ``p // chunk_size == q // chunk_size`` (and ``p <= q``).
        max_write: most tokens written in one call once a row may have wrapped.
        max_length, read_bucket, memo: see :class:`~specdec.cache.batch.BatchCache`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        chunk_size: int,
        max_write: int = DEFAULT_MAX_WRITE,
        max_length: int | None = None,
        read_bucket: int = 1,
        memo: Memo | None = None,
    ):
        super().__init__(
            batch_size,
            codec=DenseCodec(),
            window=chunk_size,
            keep=0,
            max_write=max_write,
            rules=(ChunkedRule(chunk_size),),
            max_length=max_length,
            read_bucket=read_bucket,
            memo=memo,
            options={"chunk_size": chunk_size},
        )

    @classmethod
    def _blank(cls) -> Self:
        return cls(0, chunk_size=1)

    @classmethod
    def _like_single(cls, cache: Any) -> Self:
        return cls(1, chunk_size=cache.chunk_size)

    def _make_single(self, arrays: Arrays | None, length: int) -> Any:
        made = self.single(self.window)
        if arrays is not None:
            held = arrays[0].shape[2]
            made.state = (*arrays, length, self.window, length - held)
        return made
