"""Records the outputs of some layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModelError
from .layers import Called, calling, layers_of, path_to_trunk, with_layers


class HiddenStates:
    """The outputs of the recorded layers in a model's last forward.

    Args:
        layers: in the order in which they were asked for.
    """

    def __init__(self, layers: Sequence[int]):
        self._layers = tuple(layers)
        self._outputs: dict[int, mx.array] = {}

    def record(self, layer: int) -> Called:
        """A replacement for a layer's call that also records its output."""

        def called(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = usual(*args, **kwargs)
            first = output[0] if isinstance(output, tuple) else output
            self._outputs[layer] = first
            return output

        return called

    def check(self, name: str) -> None:
        """Check what a forward of one token has recorded, and drop it.

        Raises:
            UnsupportedModelError: a layer has not put out one state for the token.
        """
        outputs = [self._outputs.get(i) for i in self._layers]
        self._outputs.clear()
        for layer, output in zip(self._layers, outputs, strict=True):
            if output is None or output.shape[:-1] != (1, 1):
                raise UnsupportedModelError(
                    f"{name}: layer {layer} does not put out one state for each token"
                )

    def take(self) -> mx.array:
        """Return the last forward's hidden states, shape (B, S, D), and drop them.

        D is the hidden size times the number of layers.
        """
        states = mx.concatenate([self._outputs[i] for i in self._layers], axis=-1)
        self._outputs.clear()
        return states


def record_layers(
    model: nn.Module, layers: Sequence[int], name: str
) -> tuple[nn.Module, HiddenStates]:
    """A second model object that shares all weights, and a record of its layers.

    Args:
        model: an mlx-lm model; it does not change.
        layers: counted from 0, or from the last with -1, -2, ...
        name: the model's name, for messages.

    Raises:
        UnsupportedModelError: the model is not built of layers that can be recorded,
            or it has no such layer.
    """
    path_to_trunk(model, name, "reading hidden states")
    every = layers_of(model)
    if any(not -len(every) <= i < len(every) for i in layers):
        raise UnsupportedModelError(
            f"{name} has {len(every)} layers: the drafter asks for layers "
            f"{', '.join(map(str, layers))}"
        )
    wanted = [i % len(every) for i in layers]
    states = HiddenStates(wanted)
    for i in set(wanted):
        every[i] = calling(every[i], states.record(i))
    return with_layers(model, every), states
