"""How a draft's matrices are stored in few bits, and trained for it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ...errors import ConfigError

BITS = (2, 3, 4, 5, 6, 8)
_GROUP_SIZES = (64, 32)


def group_size(columns: int) -> int | None:
    """Columns that share a scale; ``None`` where none of MLX's sizes divides them."""
    return next((size for size in _GROUP_SIZES if columns % size == 0), None)


@dataclass(frozen=True)
class Packing:
    """A number of bits."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            known = ", ".join(map(str, BITS))
            raise ConfigError(f"bits is {self.bits}: it must be one of {known}")

    def rounded(self, matrix: mx.array) -> mx.array:
        """The matrix as it will be read, with the gradient of the one that is learnt.

        The straight-through estimator (Bengio et al. 2013): rounding is taken for the
        identity on the way back.
        """
        size = group_size(matrix.shape[-1])
        if size is None:
            return matrix
        packed = mx.quantize(mx.stop_gradient(matrix), group_size=size, bits=self.bits)
        read = mx.dequantize(*packed, group_size=size, bits=self.bits)
        return matrix + (read - mx.stop_gradient(matrix))
