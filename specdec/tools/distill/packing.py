"""Store a draft's matrices in few bits, and train them for it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...errors import ConfigError

BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (64, 32)


def group_size(columns: int) -> int | None:
    """The number of columns that share a scale, or ``None``.

    It is ``None`` if none of MLX's group sizes divides the number of columns.
    """
    return next((size for size in _GROUP_SIZES if columns % size == 0), None)


@dataclass(frozen=True)
class Packing:
    """The number of bits in which matrices are stored."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            known = ", ".join(map(str, BITS))
            raise ConfigError(f"bits is {self.bits}: it must be one of {known}")

    def rounded(self, matrix: mx.array) -> mx.array:
        """The matrix as packing rounds it, with the gradient of the matrix itself.

        This is the straight-through estimator (Bengio et al. 2013): the backward pass
        treats rounding as the identity.
        """
        size = group_size(matrix.shape[-1])
        if size is None:
            return matrix
        packed = mx.quantize(mx.stop_gradient(matrix), group_size=size, bits=self.bits)
        read = mx.dequantize(*packed, group_size=size, bits=self.bits)
        return matrix + (read - mx.stop_gradient(matrix))
