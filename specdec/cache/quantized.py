"""Conversion from dense to quantized storage, for any layout."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from ..errors import CacheError
from .batch import BatchCache
from .storage import QuantizedCodec


class Dense(BatchCache):
    """Stores keys and values as they are."""

    quantized: ClassVar[type[Quantized]]

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """This cache with its contents quantized; this one should be dropped.

        Raises:
            CacheError: bits or group size are not supported, or do not fit.
        """
        make: Any = self.quantized
        options = {**self._options, "bits": bits, "group_size": group_size}
        made = make(self.batch_size, memo=self._memo, **options)
        made._convert(self)
        return made


class Quantized(BatchCache):
    """Stores packed keys and values, with the attributes that mlx-lm's attention reads.

    Args:
        bits: 4 or 8.
        group_size: 32, 64 or 128 elements share a scale and a bias.
        settings: settings of the other base class, which says where tokens lie.
    """

    def __init__(
        self,
        batch_size: int = 1,
        *,
        bits: int = 8,
        group_size: int = 64,
        **settings: Any,
    ):
        codec = QuantizedCodec(bits, group_size)
        super().__init__(batch_size, codec=codec, **settings)

    def _codec(self) -> QuantizedCodec:
        codec = self._storage.codec
        assert isinstance(codec, QuantizedCodec)
        return codec

    @property
    def packing(self) -> dict[str, int]:
        """How keys and values are packed: ``bits`` and ``group_size``."""
        return self._codec().options

    @property
    def bits(self) -> int:
        """Bits per stored key or value element.

        mlx-lm's attention recognises a cache with packed elements by this attribute.

        Raises:
            AttributeError: this cache hands out dense ones; see :attr:`packing`.
        """
        if self.unpacks:
            raise AttributeError(f"this {type(self).__name__} returns dense keys")
        return self._codec().bits

    @property
    def group_size(self) -> int:
        """Elements that share one scale and bias."""
        return self._codec().group_size

    @property
    def unpacked_nbytes(self) -> int:
        """Bytes of dense keys and values of all slots, where they are unpacked."""
        if not self.unpacks or self._storage.arrays is None:
            return 0
        keys, values = self._storage.codec.present(self._storage.arrays)
        elements = (keys[0].nbytes + values[0].nbytes) * 8 // self._codec().bits
        return int(elements * keys[1].itemsize)

    def _read(self, extent: int) -> tuple[Any, Any]:
        keys, values = super()._read(extent)
        if not self.unpacks:
            return keys, values
        codec = self._codec()
        return codec.unpack(keys), codec.unpack(values)

    def _matching(self, other: BatchCache) -> Self:
        if isinstance(other, Dense) and isinstance(self, other.quantized):
            converted: Self = other.to_quantized(**self.packing)
            return converted
        return super()._matching(other)


class QuantizedRing(Quantized):
    """A quantized ring: mlx-lm has no cache of one sequence to exchange with."""

    @classmethod
    def _from_single(cls, cache: Any) -> Self:
        raise CacheError(
            f"mlx-lm has no cache of one sequence for {cls.__name__}: merge into "
            "the dense class and call to_quantized()"
        )

    def extract(self, idx: int) -> Any:
        """Refused: mlx-lm has no class that could hold it."""
        raise CacheError(
            f"a row of {type(self).__name__} cannot be extracted: mlx-lm has no "
            "class for it"
        )
