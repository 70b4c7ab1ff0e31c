"""The part of an mlx-lm model that calls its layers, found by where the layers are.

mlx-lm's models embed tokens, call their layers one after the other, norm the result and
multiply it by an output head. The module that does all but the last is the trunk. A
twin of the model shares its weights and has another trunk, or other layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cuda.flattened_matmul import as_kind
from ..errors import UnsupportedModelError
from .layers import layers_of, path_to_layers, with_layers

Called = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Trunk:
    """Where a model's trunk is.

    Args:
        path: names of the modules on the way to it, from the model on.
    """

    path: tuple[str, ...]

    def of(self, model: nn.Module) -> nn.Module:
        """The trunk itself."""
        for name in self.path:
            model = model[name]
        return model

    def replaced(self, model: nn.Module, trunk: nn.Module) -> nn.Module:
        """A twin of the model with another trunk."""
        if not self.path:
            return trunk
        whole = part = copy.copy(model)
        for name in self.path[:-1]:
            part[name] = copy.copy(part[name])
            part = part[name]
        part[self.path[-1]] = trunk
        return whole


def trunk_of(model: nn.Module, name: str, what: str) -> Trunk:
    """The trunk of an mlx-lm model.

    Args:
        name: of the model, for messages.
        what: needs it, for messages.

    Raises:
        UnsupportedModelError: the model is built in another way.
    """
    path = path_to_layers(model)
    if path is None:
        architecture = type(model).__module__.rpartition(".")[2]
        raise UnsupportedModelError(
            f"{name}: {what} of {architecture} models is not supported: they do not "
            "call a list of layers"
        )
    return Trunk(path[:-1])


def calling(module: nn.Module, called: Called) -> nn.Module:
    """A twin of a module that shares its weights, and does something else when called.

    Args:
        called: is given what the module's own ``__call__`` is, as a function, and the
            arguments of the call.
    """
    twin: Any = as_kind(module, _calling(type(module)))
    vars(twin)["_called"] = called
    made: nn.Module = twin
    return made


@cache
def _calling(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        usual: Any = super(twin, self).__call__
        return vars(self)["_called"](usual, args, kwargs)

    twin: Any = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )
    return twin


class _ReachedError(Exception):
    """The first layer was called."""

    def __init__(self, h: mx.array):
        self.h = h


class TargetEnds:
    """A target's embedding and output head, computed by its own code.

    So scales, caps and padding of its architecture are right.

    Args:
        model: an mlx-lm model; it does not change.
        name: for messages.

    Attributes:
        model: the same.

    Raises:
        UnsupportedModelError: it is not built of a trunk and a head.
    """

    def __init__(self, model: nn.Module, name: str):
        self.model, self._name = model, name
        self._trunk = trunk_of(model, name, "lending the embedding")
        if not self._trunk.path:
            raise UnsupportedModelError(
                f"{name}: its output head cannot be used alone; take another draft"
            )
        layers = layers_of(model)
        self._num_layers = len(layers)
        layers[0] = calling(layers[0], _stop)
        self._embedding = with_layers(model, layers)

    @property
    def num_layers(self) -> int:
        """Layers of the target."""
        return self._num_layers

    @property
    def trunk(self) -> nn.Module:
        """The module that embeds, calls the layers, and norms."""
        return self._trunk.of(self.model)

    @property
    def owner(self) -> nn.Module:
        """The module that has the trunk, and multiplies by the output head."""
        part = self.model
        for name in self._trunk.path[:-1]:
            part = part[name]
        return part

    def embed(self, tokens: mx.array) -> mx.array:
        """What the first layer is given for ``tokens`` (B, S): (B, S, D)."""
        try:
            self._embedding(tokens)
        except _ReachedError as reached:
            return reached.h
        raise UnsupportedModelError(
            f"{self._name}: its embedding cannot be used alone; take another draft"
        )

    def logits(self, h: mx.array) -> mx.array:
        """Logits (B, S, V) of normed hidden states (B, S, D)."""
        given = calling(self.trunk, lambda usual, args, kwargs: h)
        whole = self._trunk.replaced(self.model, given)
        found: mx.array = whole(mx.zeros(h.shape[:2], mx.int32))
        return found


def _stop(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _ReachedError(args[0] if args else next(iter(kwargs.values())))
