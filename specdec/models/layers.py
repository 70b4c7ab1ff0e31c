"""A model's layers, and what their calls are given."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import UnsupportedModelError
from .trunk import Called, calling, find_trunk, states_given

# By the model's code: the part that reads and writes text is a "language_model", or
# the model itself, and has "embed_tokens", "layers" and "norm" in its "model". Layers
# are of attention and a gated MLP, or of recurrence.
_TEXT_MODELS = ("gemma3", "gemma3_text", "llama", "qwen2", "qwen3", "qwen3_5")


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


_Call = tuple[int, bool, list[Any]]


def _watched(place: int, calls: list[_Call]) -> Called:
    """What a layer's calls become: its place, whether it fits, its cache are noted."""

    def called(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = usual(*args, **kwargs)
        states = states_given(args, kwargs)
        both = isinstance(states, mx.array) and isinstance(output, mx.array)
        fits = both and states.shape == output.shape
        calls.append((place, fits, [*args, *kwargs.values()]))
        return output

    return called


def caches_of_layers(model: nn.Module) -> tuple[int | None, ...] | None:
    """For each layer, the place of the cache that the model gives it.

    A forward is built, not computed.

    Returns:
        ``None`` in the place of a layer that is given none; ``None`` altogether for
        a model that does not call its layers one after the other, each with the
        hidden states that it changes, or where two share a cache.
    """
    trunk = find_trunk(model)
    if trunk is None:
        return None
    calls: list[_Call] = []
    watched = [calling(e, _watched(i, calls)) for i, e in enumerate(trunk.layers)]
    caches = make_prompt_cache(model)
    twin: Any = trunk.with_layers(model, watched)
    twin(mx.zeros((1, 2), mx.int32), cache=caches)
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
    trunk = find_trunk(model)
    return [] if trunk is None else list(trunk.layers)
