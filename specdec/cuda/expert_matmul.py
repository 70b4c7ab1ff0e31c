"""Products with experts for more tokens than a CUDA grid has blocks.

MLX's product with packed experts launches a block for each pair of a token and an
expert, along a dimension of the grid that ends at 65,535 (lablup/mlxcel#648). A prefill
chunk of 32 rows and 256 tokens has 65,536 pairs if a token uses 8 experts. So longer
inputs are computed in pieces; those of dense experts too, whose product had the same
limit (ml-explore/mlx#3929).
"""

from __future__ import annotations

from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .modules import change_kinds

#: The most pairs of a token and an expert in one product.
MOST_PAIRS = 65535


class _Pieces:
    """A layer of experts that computes inputs that are too long in pieces.

    A piece has at least one element of the first dimension. mlx-lm's models flatten and
    sort their pairs from 64 on, so an element is one pair, or a token of few.
    """

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        usual: Any = super().__call__  # type: ignore[misc]
        shape = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        if prod(shape) <= MOST_PAIRS:
            whole: mx.array = usual(x, indices, sorted_indices)
            return whole
        rows = shape[0]
        rows_per_piece = max(1, MOST_PAIRS // prod(shape[1:]))

        def piece(array: mx.array, dimensions: int, begin: int) -> mx.array:
            if dimensions < len(shape) or array.shape[0] != rows:
                return array  # the same for all rows
            return array[begin : begin + rows_per_piece]

        return mx.concatenate(
            [
                usual(
                    piece(x, x.ndim - 2, begin),
                    piece(indices, indices.ndim, begin),
                    sorted_indices,
                )
                for begin in range(0, rows, rows_per_piece)
            ]
        )


class PiecewiseSwitchLinear(_Pieces, SwitchLinear):
    """Dense experts."""


class PiecewiseQuantizedSwitchLinear(_Pieces, QuantizedSwitchLinear):
    """Packed experts."""


_PIECEWISE: dict[type, type] = {
    SwitchLinear: PiecewiseSwitchLinear,
    QuantizedSwitchLinear: PiecewiseQuantizedSwitchLinear,
}


def take_many_tokens(model: nn.Module) -> None:
    """Let the model's layers of experts take inputs of any length, in place."""
    change_kinds(model, _PIECEWISE)
