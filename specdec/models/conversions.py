"""The memory that converting weights takes while a model is loaded.

Weights are read, cast and widened one after the other. While one is converted, both of
its forms and the conversion's own buffers are held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cuda.fused_linear import joining_bytes
from ..cuda.modules import leaves_of
from .gguf.header import GGUFFile
from .gguf.tensors import CHUNK
from .gguf.weights import WeightFormat, read_weights
from .layers import arrays_of

# Bytes of an element while it is converted.
_FLOAT32 = 4


def weights_of(model: nn.Module) -> Weights:
    """The sizes of ``model`` that decide how much memory its conversion holds."""
    packed = {
        path: layer.weight.size * 32 // layer.bits + layer.scales.size
        for path, layer in leaves_of(model)
        if hasattr(layer, "bits") and "scales" in layer
    }
    return Weights({path: array.nbytes for path, array in arrays_of(model)}, packed)


@dataclass(frozen=True)
class Weights:
    """Sizes of a model's arrays, and of its packed layers, in the model's order.

    Args:
        arrays: bytes by path.
        packed: elements of each packed layer's matrix and scales, by its path.
    """

    arrays: dict[str, int]
    packed: dict[str, int]

    @property
    def layers(self) -> dict[str, int]:
        """Bytes by layer."""
        sizes: dict[str, int] = {}
        for path, size in self.arrays.items():
            layer = path.rpartition(".")[0]
            sizes[layer] = sizes.get(layer, 0) + size
        return sizes

    def unpacking(self, layer: str) -> int:
        """Bytes that unpacking a layer holds besides source and result; 0: not packed.

        They are two matrices, and scales and biases, all in float32 (measured on MLX's
        CPU backend).
        """
        return 2 * _FLOAT32 * self.packed.get(layer, 0)


class Conversions:
    """The peak memory of the noted conversions, in bytes.

    The weight that holds most besides its result is assumed to be converted last, when
    all other results are held.
    """

    def __init__(self) -> None:
        self._most = 0

    def peak(self, model: nn.Module) -> int:
        """The most bytes held at any moment; at least the model itself."""
        return max(self._most, sum(weights_of(model).arrays.values()))

    def _note(self, results: Iterable[int], beside: Iterable[int]) -> None:
        self._most = max(self._most, sum(results) + max(beside, default=0))

    def reading(
        self, file: GGUFFile, config: dict[str, Any], form: WeightFormat
    ) -> None:
        """Note tensors of a GGUF file: converted in parts through float32, joined."""
        arrays, packed = read_weights(file, config, form, lazy=True)

        def beside(name: str, array: mx.array) -> int:
            through = 0 if name.rpartition(".")[0] in packed else _FLOAT32
            parts = array.nbytes if array.size > CHUNK else 0
            return parts + min(array.size, CHUNK) * through

        results = (array.nbytes for array in arrays.values())
        self._note(results, (beside(*each) for each in arrays.items()))

    def casting(self, before: Weights, after: Weights, dtype: mx.Dtype) -> None:
        """Note layers of a folder, which are read while they are cast."""
        old, new = before.layers, after.layers

        def beside(layer: str) -> int:
            work, source = before.unpacking(layer), old[layer]
            if work and dtype == mx.float32:
                work //= 2  # one of the two matrices is the result
            if not work and source == new[layer]:
                source = 0  # nothing to cast
            return source + work

        self._note(new.values(), map(beside, new))

    def widening(self, before: Weights, after: Weights) -> None:
        """Note arrays that change: each is replaced in turn, with all layers loaded."""
        changed = (n for p, n in before.arrays.items() if n != after.arrays[p])
        self._note(after.arrays.values(), changed)

    def joining(self, model: nn.Module) -> None:
        """Note layers that share an input: joined group by group, with all loaded."""
        self._note(weights_of(model).arrays.values(), [joining_bytes(model)])

    def quantizing(self, target: Weights, draft: Weights) -> None:
        """Note the target's layers, which go through floats if they are packed."""
        layers = draft.layers
        self._note(layers.values(), map(target.unpacking, layers))
