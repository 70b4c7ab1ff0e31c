"""A model's layers, and the same model with others in their place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import UnsupportedModelError

# By the model's code: the part that reads and writes text is a "language_model", or
# the model itself, and has "embed_tokens", "layers" and "norm" in its "model". Layers
# are of attention and a gated MLP, or of recurrence.
_TEXT_MODELS = (
    "gemma3",
    "gemma3_text",
    "granitemoehybrid",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_5",
)


def has_text_model(model: nn.Module) -> bool:
    """Whether :func:`text_model` knows the model."""
    return _architecture(model) in _TEXT_MODELS


def text_model(model: nn.Module, name: str, what: str) -> nn.Module:
    """The part that reads and writes text, of a model whose parts are known.

    Args:
        name: of the model.
        what: what needs it, for the message.

    Raises:
        UnsupportedModelError: its architecture is not known.
    """
    if not has_text_model(model):
        raise UnsupportedModelError(
            f"{name}: {what} of {_architecture(model)} models is not supported "
            f"({', '.join(_TEXT_MODELS)} are)"
        )
    part: nn.Module = model.get("language_model", model)
    return part


def _architecture(model: nn.Module) -> str:
    return type(model).__module__.rpartition(".")[2]


class InPlace(nn.Module):
    """In the place of a layer, and like it to a model that looks at its layers.

    Args:
        layer: whose place it takes; its weights are not this module's.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        vars(self)["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_layer":  # a copy that is being made
                raise
            return getattr(self._layer, name)

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The hidden states among a call's arguments: the first one."""
        if args:
            return args[0]
        names = list(inspect.signature(type(self._layer).__call__).parameters)
        return kwargs[names[1]]


class _Watched(InPlace):
    """A layer, and a list of its calls: its place, whether it fits, its cache."""

    def __init__(self, layer: nn.Module, place: int, calls: list[_Call]):
        super().__init__(layer)
        vars(self)["_place"], vars(self)["_calls"] = place, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._layer(*args, **kwargs)
        states = self.given(args, kwargs)
        both = isinstance(states, mx.array) and isinstance(output, mx.array)
        fits = both and states.shape == output.shape
        self._calls.append((self._place, fits, [*args, *kwargs.values()]))
        return output


_Call = tuple[int, bool, list[Any]]


def caches_of_layers(model: nn.Module) -> tuple[int | None, ...] | None:
    """For each layer, the place of the cache that the model gives it.

    A forward is built, not computed.

    Returns:
        ``None`` in the place of a layer that is given none; ``None`` altogether for
        a model that does not call its layers one after the other, each with the
        hidden states that it changes, or where two share a cache.
    """
    if path_to_layers(model) is None:
        return None
    calls: list[_Call] = []
    watched = [_Watched(e, i, calls) for i, e in enumerate(layers_of(model))]
    caches = make_prompt_cache(model)
    with_layers(model, watched)(mx.zeros((1, 2), mx.int32), cache=caches)
    if [place for place, _, _ in calls] != list(range(len(watched))):
        return None
    if not all(fits for _, fits, _ in calls):
        return None
    places = [
        next((i for i, c in enumerate(caches) if any(c is v for v in given)), None)
        for _, _, given in calls
    ]
    known = [place for place in places if place is not None]
    return tuple(places) if len(set(known)) == len(known) else None


def check_layers(model: nn.Module, name: str, what: str) -> tuple[int | None, ...]:
    """Refuse a model whose layers cannot be exchanged.

    Args:
        name: of the model.
        what: what needs it, for the message.

    Returns:
        As :func:`caches_of_layers`.

    Raises:
        UnsupportedModelError: its layers hand on more than hidden states.
    """
    places = caches_of_layers(model)
    if places is None:
        raise UnsupportedModelError(
            f"{name}: {what} of {_architecture(model)} models is not supported: their "
            "layers hand on more than hidden states"
        )
    return places


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that has some, in the order of their calls."""
    layers: Any = model
    for part in path_to_layers(model) or ():
        layers = layers[part]
    return list(layers)


def path_to_layers(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the modules on the way to the list of the model's layers.

    Of a model that wraps another one as its ``model``, through that.
    """
    wanted: Any = getattr(model, "layers", None)
    if wanted:
        return _way_to([*wanted], model)
    inside = model.get("model")
    path = None if inside is None else path_to_layers(inside)
    return None if path is None else ("model", *path)


def _way_to(layers: list[Any], part: nn.Module) -> tuple[str, ...] | None:
    for name, value in part.items():
        if isinstance(value, list) and len(value) == len(layers):
            if all(a is b for a, b in zip(value, layers, strict=True)):
                return (name,)
        elif isinstance(value, nn.Module):
            rest = _way_to(layers, value)
            if rest is not None:
                return (name, *rest)
    return None


def with_layers(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """A second model object with other layers, as many as ``model`` has.

    Everything else is shared with ``model``, which does not change.
    """
    *modules, last = path_to_layers(model) or ()
    whole = part = copy.copy(model)
    for name in modules:
        part[name] = copy.copy(part[name])
        part = part[name]
    part[last] = list(layers)
    return whole
