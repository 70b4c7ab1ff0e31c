"""A model's layers, and the same model with others in their place."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import mlx.nn as nn

from ..errors import UnsupportedModelError

# Where the module that calls the layers is, by the model's code. Their layers are
# called as layer(h, mask, cache), nothing else, and return h.
_TRUNKS = {
    "mlx_lm.models.gemma3": ("language_model", "model"),
    "mlx_lm.models.gemma3_text": ("model",),
    "mlx_lm.models.llama": ("model",),
    "mlx_lm.models.qwen2": ("model",),
    "mlx_lm.models.qwen3": ("model",),
}


def has_trunk(model: nn.Module) -> bool:
    """Whether the model's layers can be exchanged, see :func:`check_trunk`."""
    return type(model).__module__ in _TRUNKS


def check_trunk(model: nn.Module, name: str, what: str) -> None:
    """Refuse a model whose layers cannot be exchanged.

    Args:
        name: of the model.
        what: what needs it, for the message.

    Raises:
        UnsupportedModelError: its architecture is not among those that are known
            to call their layers one after the other.
    """
    if not has_trunk(model):
        known = ", ".join(sorted(m.rpartition(".")[2] for m in _TRUNKS))
        architecture = type(model).__module__.rpartition(".")[2]
        raise UnsupportedModelError(
            f"{name}: {what} of {architecture} models is not supported ({known} are)"
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that passed :func:`check_trunk`."""
    for part in _TRUNKS[type(model).__module__]:
        model = model[part]
    layers: list[nn.Module] = model["layers"]
    return list(layers)


def with_layers(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """A second model object with other layers, as many as ``model`` has.

    Everything else is shared with ``model``, which does not change.
    """
    whole = part = copy.copy(model)
    for name in _TRUNKS[type(model).__module__]:
        part[name] = copy.copy(part[name])
        part = part[name]
    part["layers"] = list(layers)
    return whole
