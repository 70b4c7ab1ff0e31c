"""Products with packed weights over rows and positions at once.

MLX's CUDA backend computes the product of x (B, S, D) with packed weights as B
products of (S, D): every row reads all weights again. Flattened to (B * S, D) it is
one product that reads them once: by :mod:`.packed_matmul` where that is proven, by MLX
otherwise (``benchmarks.kernels packed`` times both).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import packed_matmul
from .modules import change_kinds, leaves_of, modules_of


class FlattenedLinear(nn.QuantizedLinear):
    """A quantized layer that takes x of any shape (..., D) as (N, D)."""

    plain = nn.QuantizedLinear

    def __call__(self, x: mx.array) -> mx.array:
        if packed_matmul.computes(self, x):
            return packed_matmul.of_layer(self, x)[0]
        linear: Any = super().__call__
        flat: mx.array = linear(x.reshape(-1, x.shape[-1]))
        return flat.reshape(*x.shape[:-1], -1)

    def split(self, x: mx.array, ends: tuple[int, ...]) -> list[mx.array]:
        """The product in parts, for stacked matrices that end at columns ``ends``."""
        if packed_matmul.computes(self, x):
            return packed_matmul.of_layer(self, x, ends)
        usual: Any = mx.split(self(x), list(ends[:-1]), axis=-1)
        return list(usual)


class FlattenedEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding whose product as an output layer is flattened."""

    plain = nn.QuantizedEmbedding

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits (..., V) of x (..., D)."""
        if packed_matmul.computes(self, x):
            return packed_matmul.of_layer(self, x)[0]
        linear: Any = super().as_linear
        flat: mx.array = linear(x.reshape(-1, x.shape[-1]))
        return flat.reshape(*x.shape[:-1], -1)


_FLATTENED: dict[type, Any] = {
    nn.QuantizedLinear: FlattenedLinear,
    nn.QuantizedEmbedding: FlattenedEmbedding,
}


def flatten_products(model: nn.Module) -> None:
    """Let the model's packed layers flatten their products, in place; weights stay.

    This tries the kernel for the layers that the model has.
    """
    for layer in _layers(model):
        packed_matmul.tried(layer)
    change_kinds(model, _FLATTENED)


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`flatten_products` asks for."""
    return packed_matmul.proofs_of(_layers(model))


def _layers(model: nn.Module) -> Iterator[Any]:
    """The model's layers with packed weights."""
    return (layer for _, layer in leaves_of(model) if type(layer) in _FLATTENED)


def slow_pairs(model: nn.Module) -> bool:
    """Whether two tokens take longer than one, as MLX's packed products do."""
    return any(
        isinstance(layer, FlattenedLinear | FlattenedEmbedding)
        and not packed_matmul.tried(layer)
        for _, layer in modules_of(model)
    )
