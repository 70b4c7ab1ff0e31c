"""Products with experts that read each expert few times, for any number of tokens.

MLX's product with packed experts reads an expert for each of its tokens. The kernel of
:mod:`.packed_matmul` reads it once for eight of them. For dense experts, MLX's product
with sorted pairs is for many tokens. For few, its product with pairs in any order is
faster, and neighbours of the same expert share the device's cache.

MLX launches a block for each pair of a token and an expert, along a dimension of the
grid that ends at 65,535 (lablup/mlxcel#648, ml-explore/mlx#3929). A prefill chunk of 32
rows and 256 tokens has 65,536 pairs if a token uses 8 experts. So longer inputs are
computed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from . import expert_block, packed_matmul
from .modules import change_kinds, leaves_of

#: The most pairs of a token and an expert in one product by MLX.
MOST_PAIRS = 65535
#: Dense experts: the most pairs for each expert for which MLX is not told that they are
#: sorted (one H100, 128 experts of 768: a third of the time at 2, as long at 9).
FEW_PAIRS = 8
# Bytes of the largest expert's matrix that neighbours may share in the device's cache.
LARGEST_SHARED = 2**24


class _Pieces:
    """A layer of experts that computes inputs that are too long in pieces.

    A piece has at least one element of the first dimension. mlx-lm's models flatten and
    sort their pairs from 64 on, so an element is one pair, or a token of few.
    """

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        shape = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        most = self._most_pairs(x, indices)
        if prod(shape) <= most:
            return self._compute(x, indices, sorted_indices)
        rows, each = shape[0], prod(shape[1:])
        if each > most:  # such a piece is MLX's
            most = MOST_PAIRS
        rows_per_piece = max(1, most // each)

        def piece(array: mx.array, dimensions: int, begin: int) -> mx.array:
            if dimensions < len(shape) or array.shape[0] != rows:
                return array  # the same for all rows
            return array[begin : begin + rows_per_piece]

        return mx.concatenate(
            [
                self._compute(
                    piece(x, x.ndim - 2, begin),
                    piece(indices, indices.ndim, begin),
                    sorted_indices,
                )
                for begin in range(0, rows, rows_per_piece)
            ]
        )

    def _most_pairs(self, x: mx.array, indices: mx.array) -> int:
        """The most pairs in a piece."""
        return MOST_PAIRS

    def _compute(
        self, x: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        """A piece's product."""
        usual: Any = super()
        computed: mx.array = usual.__call__(x, indices, sorted_indices)
        return computed


class PiecewiseSwitchLinear(_Pieces, SwitchLinear):
    """Dense experts."""

    plain = SwitchLinear

    def _compute(
        self, x: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        experts, weight = self.num_experts, self["weight"]
        few = indices.size <= FEW_PAIRS * experts
        few = few and weight.nbytes <= LARGEST_SHARED * experts
        return super()._compute(x, indices, sorted_indices and not few)


class PiecewiseQuantizedSwitchLinear(_Pieces, QuantizedSwitchLinear):
    """Packed experts."""

    plain = QuantizedSwitchLinear

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        # What all tokens share is written out, so that one token is computed as many.
        shape = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        if indices.shape != shape:
            indices = mx.broadcast_to(indices, shape)
        return super().__call__(x, indices, sorted_indices)

    def _most_pairs(self, x: mx.array, indices: mx.array) -> int:
        ours = packed_matmul.computes_experts(self, x, indices)
        return packed_matmul.MOST_PAIRS if ours else MOST_PAIRS

    def _compute(
        self, x: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        ours = packed_matmul.computes_experts(self, x, indices)
        if not ours or indices.size > packed_matmul.MOST_PAIRS:
            return super()._compute(x, indices, sorted_indices)
        packed = self["weight"], self["scales"], self["biases"]
        computed = packed_matmul.expert_product(
            x, packed, indices, bits=self.bits, group_size=self.group_size
        )
        if "bias" in self:
            computed = computed + mx.expand_dims(self["bias"][indices], -2)
        return computed


class UnsortedSwitchGLU(SwitchGLU):
    """An MLP of experts that does not sort pairs for a kernel that takes any order."""

    plain = SwitchGLU

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        each = mx.expand_dims(x, (-2, -3))
        # Layers may have been unpacked since, or wrapped by an adapter.
        ours = all(
            isinstance(layer, PiecewiseQuantizedSwitchLinear)
            and packed_matmul.known(layer)
            for layer in (self.up_proj, self.gate_proj, self.down_proj)
        )
        ours = ours and packed_matmul.computes_experts(self.up_proj, each, indices)
        if not ours or indices.size > packed_matmul.MOST_PAIRS:
            sorting: mx.array = super().__call__(x, indices)
            return sorting
        up, gate = self.up_proj(each, indices), self.gate_proj(each, indices)
        down: mx.array = self.down_proj(self.activation(up, gate), indices)
        return down.squeeze(-2)


_PIECEWISE: dict[type, type] = {
    SwitchLinear: PiecewiseSwitchLinear,
    QuantizedSwitchLinear: PiecewiseQuantizedSwitchLinear,
}


def take_many_tokens(model: nn.Module) -> None:
    """Let the model's layers of experts take inputs of any length, in place.

    This tries the kernel for the layers that the model has.
    """
    for layer in _packed(model):
        packed_matmul.tried(layer)
    change_kinds(model, _PIECEWISE)
    change_kinds(
        model,
        {SwitchGLU: UnsortedSwitchGLU},
        lambda mlp: isinstance(mlp.up_proj, PiecewiseQuantizedSwitchLinear),
    )


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_many_tokens` asks for."""
    return packed_matmul.proofs_of(_packed(model))


def _packed(model: nn.Module) -> Iterator[Any]:
    """The model's layers of packed experts, without those that need no other kernel."""
    others = set(map(id, expert_block.layers_within(model)))
    return (
        layer
        for _, layer in leaves_of(model)
        if type(layer) is QuantizedSwitchLinear and id(layer) not in others
    )
