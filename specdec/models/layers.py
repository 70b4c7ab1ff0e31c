"""Finds a model's layers and replaces them.

mlx-lm's models embed tokens, call their layers one after the other, norm the result and
multiply it by an output head. The module that does all but the last is the trunk. A
twin of a model or of a module shares its weights, and differs in a part or in its call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..cuda.modules import as_kind, modules_of
from ..errors import UnsupportedModelError

# mlx-lm's modules in whose code the part that reads and writes text is a
# "language_model", or the model itself, and has "embed_tokens", "layers" and "norm" in
# its "model". Layers are of attention and a gated MLP, or of recurrence.
_TEXT_MODELS = (
    "gemma3",
    "gemma3_text",
    "granitemoehybrid",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_5",
)


def query_heads(model: nn.Module) -> int:
    """Query heads of the model's first attention layer; 1: none is known."""
    names = "n_heads", "num_heads", "num_attention_heads"
    numbers = (
        vars(module).get(name) for _, module in modules_of(model) for name in names
    )
    return next((n for n in numbers if isinstance(n, int) and n > 1), 1)


def has_text_model(model: nn.Module) -> bool:
    """Whether :func:`text_model` knows the model."""
    return architecture_of(model) in _TEXT_MODELS


def arrays_of(model: nn.Module) -> list[tuple[str, mx.array]]:
    """A model's arrays and their paths."""
    return leaves_of(model.parameters())


def leaves_of(tree: Any) -> list[tuple[str, mx.array]]:
    """The arrays of a tree and their paths."""
    leaves: Any = tree_flatten(tree)
    return list(leaves)


def text_model(model: nn.Module, name: str, what: str) -> nn.Module:
    """The part of a known model that reads and writes text.

    Args:
        name: the model's name.
        what: the feature that needs this part, for the message.

    Raises:
        UnsupportedModelError: the model's architecture is not known.
    """
    if not has_text_model(model):
        raise UnsupportedModelError(
            f"{name}: {what} of {architecture_of(model)} models is not supported "
            f"({', '.join(_TEXT_MODELS)} are)"
        )
    part: nn.Module = model.get("language_model", model)
    return part


def architecture_of(model: nn.Module) -> str:
    """The model's architecture, by mlx-lm's name."""
    return type(model).__module__.rpartition(".")[2]


def mixed(module: nn.Module, kind: type) -> Any:
    """A twin of a module that shares its weights; ``kind`` comes before its class."""
    return as_kind(module, _mixed(kind, type(module)))


@cache
def _mixed(kind: type, of: type) -> type:
    # Whoever reads the code of a model's classes reads that of ``kind``.
    return type(of.__name__, (kind, of), {"__module__": kind.__module__})


Called = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def calling(module: nn.Module, called: Called) -> nn.Module:
    """A twin of a module that shares its weights, with another call.

    Args:
        called: gets the module's own ``__call__`` as a function, and the arguments of
            the call. The module may be such a twin itself.
    """
    kind = _calling(type(module))
    twin: nn.Module = as_kind(module, kind)
    vars(twin)[_call_of(kind)] = called
    return twin


def _call_of(kind: type) -> str:
    """The attribute with the call of a twin's class; each twin of a twin has one."""
    return f"_called_{len(kind.__mro__)}"


@cache
def _calling(kind: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        usual: Any = super(twin, self).__call__
        return vars(self)[name](usual, args, kwargs)

    twin: Any = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )
    name = _call_of(twin)
    return twin


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hidden states among the arguments of a layer's call: the first one."""
    return args[0] if args else next(iter(kwargs.values()))


def caches_of_layers(model: nn.Module) -> tuple[int | None, ...] | None:
    """For each layer, the place of the cache that the model gives it.

    A forward is built, not computed.

    Returns:
        One place for each layer; ``None`` for a layer without a cache. ``None`` instead
        of the tuple if two layers share a cache, or if the model does not call its
        layers one after the other, each with the hidden states that it changes.
    """
    if path_to_layers(model) is None:
        return None
    # For each call, the layer's place, whether its output fits, and its arguments.
    calls: list[tuple[int, bool, list[Any]]] = []

    def watch(place: int) -> Called:
        def called(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output, states = usual(*args, **kwargs), first_of(args, kwargs)
            both = isinstance(states, mx.array) and isinstance(output, mx.array)
            fits = both and states.shape == output.shape
            calls.append((place, fits, [*args, *kwargs.values()]))
            return output

        return called

    watched = [calling(e, watch(i)) for i, e in enumerate(layers_of(model))]
    caches = make_prompt_cache(model)
    with_layers(model, watched)(mx.zeros((1, 2), mx.int32), cache=caches)
    if [place for place, _, _ in calls] != list(range(len(watched))):
        return None
    if not all(fits for _, fits, _ in calls):
        return None
    places = [
        next((i for i, c in enumerate(caches) if any(c is v for v in arguments)), None)
        for _, _, arguments in calls
    ]
    known = [place for place in places if place is not None]
    return tuple(places) if len(set(known)) == len(known) else None


def check_layers(model: nn.Module, name: str, what: str) -> tuple[int | None, ...]:
    """Refuse a model whose layers cannot be replaced.

    Args:
        name, what: as for :func:`text_model`.

    Returns:
        The places that :func:`caches_of_layers` returns.

    Raises:
        UnsupportedModelError: its layers hand on more than hidden states.
    """
    places = caches_of_layers(model)
    if places is None:
        why = "their layers hand on more than hidden states"
        raise unsupported(model, name, what, why)
    return places


def unsupported(
    model: nn.Module, name: str, what: str, why: str
) -> UnsupportedModelError:
    """The error for a feature that an architecture does not allow."""
    return UnsupportedModelError(
        f"{name}: {what} of {architecture_of(model)} models is not supported: {why}"
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that has some, in the order of their calls."""
    layers: Any = model
    for part in path_to_layers(model) or ():
        layers = layers[part]
    return list(layers)


def path_to_layers(model: nn.Module) -> tuple[str, ...] | None:
    """Names of the modules on the way to the list of the model's layers.

    If a model wraps another one as its ``model``, the way leads through that.
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


def path_to_trunk(model: nn.Module, name: str, what: str) -> tuple[str, ...]:
    """Names of the modules on the way to the trunk, which calls the layers.

    Args:
        name, what: as for :func:`text_model`.

    Raises:
        UnsupportedModelError: the model is built in another way.
    """
    path = path_to_layers(model)
    if path is None:
        raise unsupported(model, name, what, "they do not call a list of layers")
    return path[:-1]


def with_layers(model: nn.Module, layers: Sequence[nn.Module]) -> nn.Module:
    """A second model object with other layers, as many as ``model`` has.

    Everything else is shared with ``model``, which does not change.
    """
    return with_part(model, path_to_layers(model) or (), list(layers))


def with_part(model: nn.Module, path: Sequence[str], part: Any) -> nn.Module:
    """A second model object with another part at the end of ``path``."""
    whole = here = copy.copy(model)
    for name in path[:-1]:
        here[name] = copy.copy(here[name])
        here = here[name]
    here[path[-1]] = part
    return whole
