"""A target's embedding and output head, for drafts that have none."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UnsupportedModelError
from .layers import (
    calling,
    first_of,
    layers_of,
    path_to_trunk,
    with_layers,
    with_part,
)


class _ReachedError(Exception):
    """The first layer was called."""

    def __init__(self, h: mx.array):
        self.h = h


class TargetEnds:
    """A target's embedding and output head, computed by its own code.

    Its code applies the scales, caps and padding of its architecture.

    Args:
        model: an mlx-lm model; it does not change.
        name: for messages.

    Attributes:
        model: the given model.
        num_layers: number of the target's layers.
        path: names of the modules on the way to the trunk.

    Raises:
        UnsupportedModelError: the model is not built of a trunk and a head.
    """

    def __init__(self, model: nn.Module, name: str):
        self.model, self._name = model, name
        self.path = path_to_trunk(model, name, "lending the embedding")
        if not self.path:
            raise UnsupportedModelError(
                f"{name}: its output head cannot be used alone; take another draft"
            )
        layers = layers_of(model)
        self.num_layers = len(layers)
        layers[0] = calling(layers[0], _stop)
        self._embedding = with_layers(model, layers)

    @property
    def trunk(self) -> nn.Module:
        """The module that embeds, calls the layers, and norms."""
        trunk: nn.Module = self.owner[self.path[-1]]
        return trunk

    @property
    def owner(self) -> nn.Module:
        """The module that has the trunk, and multiplies by the output head."""
        part = self.model
        for name in self.path[:-1]:
            part = part[name]
        return part

    @property
    def args(self) -> Any:
        """The arguments that its text part was made from."""
        owner: Any = self.owner
        return owner.args

    @property
    def norm(self) -> nn.Module:
        """The norm after the last layer."""
        norm: nn.Module = self.trunk.get("norm") or self.trunk["norm_f"]
        return norm

    def embed(self, tokens: mx.array) -> mx.array:
        """The first layer's input (B, S, D) for ``tokens`` (B, S)."""
        try:
            self._embedding(tokens)
        except _ReachedError as reached:
            return reached.h
        raise UnsupportedModelError(
            f"{self._name}: its embedding cannot be used alone; take another draft"
        )

    def rows(self, tokens: mx.array) -> mx.array:
        """Rows of the embedding (B, S, D) for ``tokens`` (B, S), as they are stored."""
        stored: mx.array = self.trunk[self._embedding_name](tokens)
        return stored

    @property
    def _embedding_name(self) -> str:
        for name, part in self.trunk.children().items():
            if hasattr(part, "as_linear"):
                return str(name)
        raise UnsupportedModelError(
            f"{self._name}: its embedding cannot be read alone; take another draft"
        )

    def of_first(self, count: int) -> TargetEnds:
        """The same ends with an output head of the first ``count`` tokens.

        It reads the target's weights; nothing is copied.
        """
        at = (*self.path[:-1], "lm_head")
        if "lm_head" not in self.owner:
            at = (*self.path, self._embedding_name)
        head: Any = self.model
        for name in at:
            head = head[name]
        first = copy.copy(head)
        for name, array in head.items():
            if isinstance(array, mx.array):
                first[name] = array[:count]
        ends = copy.copy(self)
        ends.model = with_part(self.model, at, first)
        return ends

    def logits(self, h: mx.array) -> mx.array:
        """Logits (B, S, V) of normed hidden states (B, S, D)."""
        returns_h = calling(self.trunk, lambda usual, args, kwargs: h)
        whole = with_part(self.model, self.path, returns_h)
        logits: mx.array = whole(mx.zeros(h.shape[:2], mx.int32))
        return logits


def _stop(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _ReachedError(first_of(args, kwargs))
