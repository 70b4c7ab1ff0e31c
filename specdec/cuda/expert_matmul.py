"""Products with experts for more tokens than a CUDA grid has blocks.

MLX's products with experts launch a block for each pair of a token and an expert, along
a dimension of the grid that ends at 65,535 (ml-explore/mlx#3858 is the same limit of
another product). A prefill chunk of 32 rows and 256 tokens has 65,536 pairs if a token
uses 8 experts. So longer inputs are computed in pieces.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .flattened_matmul import as_kind

#: The most pairs of a token and an expert in one product.
MOST_PAIRS = 65535


class _Pieces:
    """A layer of experts that computes its input in pieces, if it is too long."""

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        usual: Any = super().__call__  # type: ignore[misc]
        rows = indices.shape[0]
        if indices.size <= MOST_PAIRS or x.shape[0] != rows:
            whole: mx.array = usual(x, indices, sorted_indices)
            return whole
        at_once = max(1, MOST_PAIRS // (indices.size // rows))
        pieces = [
            usual(x[i : i + at_once], indices[i : i + at_once], sorted_indices)
            for i in range(0, rows, at_once)
        ]
        return mx.concatenate(pieces)


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
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    for path, layer in leaves:
        if (kind := _PIECEWISE.get(type(layer))) is not None:
            model.update_modules(tree_unflatten([(path, as_kind(layer, kind))]))
