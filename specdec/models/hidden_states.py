"""What some layers of a model put out, beside its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModelError
from .layers import InPlace, check_layers, layers_of, with_layers


class HiddenStates:
    """The outputs of the layers that are listened to, in a model's last forward.

    Args:
        layers: in the order in which they were asked for.
    """

    def __init__(self, layers: Sequence[int]):
        self._layers = tuple(layers)
        self._outputs: dict[int, mx.array] = {}

    def put(self, layer: int, output: mx.array) -> None:
        """Take what a layer puts out."""
        self._outputs[layer] = output

    def take(self) -> mx.array:
        """Those of the last forward, shape (B, S, D), and forget them.

        D is the hidden size, times the number of layers.
        """
        states = mx.concatenate([self._outputs[i] for i in self._layers], axis=-1)
        self._outputs.clear()
        return states


class Listened(InPlace):
    """A layer, and who hears what it puts out."""

    def __init__(self, layer: nn.Module, place: int, states: HiddenStates):
        super().__init__(layer)
        self.layer = layer
        self._place = place
        vars(self)["_states"] = states

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        output: mx.array = self.layer(*args, **kwargs)
        self._states.put(self._place, output)
        return output


def record_layers(
    model: nn.Module, layers: Sequence[int], name: str
) -> tuple[nn.Module, HiddenStates]:
    """A second model object that shares all weights, and what its layers put out.

    Args:
        model: an mlx-lm model; it does not change.
        layers: counted from 0, or from the last with -1, -2, ...
        name: of the model, for messages.

    Raises:
        UnsupportedModelError: of its architecture layers cannot be listened to, or
            it has no such layer.
    """
    check_layers(model, name, "reading hidden states")
    every = layers_of(model)
    if any(not -len(every) <= i < len(every) for i in layers):
        raise UnsupportedModelError(
            f"{name} has {len(every)} layers: the drafter asks for layers "
            f"{', '.join(map(str, layers))}"
        )
    wanted = [i % len(every) for i in layers]
    states = HiddenStates(wanted)
    listened = [
        Listened(e, i, states) if i in wanted else e for i, e in enumerate(every)
    ]
    return with_layers(model, listened), states
