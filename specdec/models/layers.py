"""Finds a model's layers, replaces them, records their outputs, and uses its ends.

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
        sizes = [output.shape[-1] for output in outputs if output is not None]
        dtype = next(output.dtype for output in outputs if output is not None)
        self._shape = sum(sizes), dtype

    def of_padding(self, num_rows: int) -> mx.array:
        """States of a token of padding in each row, shape (B, 1, D)."""
        size, dtype = self._shape
        return mx.zeros((num_rows, 1, size), dtype)

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
        # A model whose trunk returns these states.
        self._states: list[mx.array] = []
        self._head = self._of_states()

    def _of_states(self) -> nn.Module:
        returns = calling(self.trunk, lambda usual, args, kwargs: self._states[-1])
        return with_part(self.model, self.path, returns)

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
        ends._head = ends._of_states()
        return ends

    def logits(self, h: mx.array) -> mx.array:
        """Logits (B, S, V) of normed hidden states (B, S, D)."""
        self._states.append(h)
        try:
            logits: mx.array = self._head(mx.zeros(h.shape[:2], mx.int32))
        finally:
            self._states.pop()
        return logits


def _stop(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _ReachedError(first_of(args, kwargs))
