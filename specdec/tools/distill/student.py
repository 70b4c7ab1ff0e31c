"""The draft to be trained: some of the target's layers with its embedding and head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map

from ...errors import ConfigError, UnsupportedModelError
from ...models import layers as models_layers
from ...models.layers import TargetEnds, layers_of
from ...models.loaded import Described
from ...models.loading import QUANTIZATION_KEYS
from .blocks import Block

_INSTEAD = "make a block head (kind block)"

Parameters = Any  # one of MLX's trees of arrays


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a training step learns from a block.

    Args:
        states: computes the draft's states that predict tokens, shape (N, C), with
            the draft's weights at the time of the call.
        target: the target's states after the last norm that predict the same tokens,
            shape (N, D).
        weights: weights of these N tokens, shape (N,).
    """

    states: Callable[[], mx.array]
    target: mx.array
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Student(ABC):
    """A draft that is being trained.

    Args:
        model: the draft.
        config: the contents of its ``config.json``.
        layers: the target's layers that it began with.
        name: its name in messages.
        source: the target's text model.
        prefix: prefix of the names of its weights in files.
    """

    model: nn.Module
    config: dict[str, Any]
    layers: tuple[int, ...]
    name: str
    source: nn.Module
    prefix: str

    @property
    def slots(self) -> int | None:
        """Number of tokens predicted after an anchor; ``None`` without anchors."""
        return None

    @property
    def bias_head(self) -> mx.array | None:
        """The matrix for the last C - D numbers of a state, (V, C - D), if any."""
        return None

    @property
    def stored_prefix(self) -> str:
        """What comes before the names of learnt arrays in a draft's file."""
        return f"{self.prefix}model."

    @property
    def seen_width(self) -> int:
        """How many of the target's numbers are needed for a token."""
        width: int = self.source["model"]["norm"]["weight"].size
        return width

    @property
    def parameters(self) -> Parameters:
        """The learnt arrays in float32."""
        return tree_map(lambda array: array.astype(mx.float32), self._learnt())

    @abstractmethod
    def _learnt(self) -> Parameters:
        """The learnt arrays in their own types."""

    @abstractmethod
    def load(self, parameters: Parameters) -> None:
        """Put learnt arrays, of any type, into the model."""

    @abstractmethod
    def see(self, block: Block) -> mx.array:
        """The target's states that the student needs for a block."""

    @abstractmethod
    def lesson(
        self, block: Block, target_states: mx.array, rng: np.random.Generator
    ) -> Lesson:
        """What to learn from a block.

        Args:
            target_states: the result of :meth:`see`.
            rng: makes all random choices.
        """


@dataclass(frozen=True, eq=False)
class LayerStudent(Student):
    """A draft of layers: an mlx-lm model of the target's family.

    It shares the arrays of its embedding and head with the target.
    """

    def _learnt(self) -> Parameters:
        trunk = self.model["model"]
        return {
            "layers": [layer.parameters() for layer in trunk["layers"]],
            "norm": trunk["norm"].parameters(),
        }

    def load(self, parameters: Parameters) -> None:
        """Put learnt arrays into the model."""
        self.model["model"].update(parameters)

    def hidden(self, tokens: mx.array) -> mx.array:
        """Hidden states after the last norm, shape (B, L, D)."""
        states: mx.array = self.model["model"](tokens)
        return states

    def see(self, block: Block) -> mx.array:
        """States after the last norm at the block's positions, shape (N, D)."""
        return at_positions(self.source["model"](mx.array(block.tokens)), block)

    def lesson(
        self, block: Block, target_states: mx.array, rng: np.random.Generator
    ) -> Lesson:
        """A lesson from every position of the block."""

        def states() -> mx.array:
            return at_positions(self.hidden(mx.array(block.tokens)), block)

        return Lesson(states, target_states, block.weights)


def at_positions(states: mx.array, block: Block) -> mx.array:
    """The states (N, D) at a block's positions, taken from states (B, L, D)."""
    return states.reshape(-1, states.shape[-1])[mx.array(block.positions)]


def text_model(target: Described) -> nn.Module:
    """The part of a target that reads and writes text, which is an mlx-lm model, too.

    Raises:
        UnsupportedModelError: the target's architecture is not supported.
    """
    try:
        model = models_layers.text_model(
            target.model, target.name, "distilling a draft of layers"
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}: {_INSTEAD}") from None
    layers = model["model"]["layers"]
    if any("gate_proj" not in layer.get("mlp", ()) for layer in layers):
        raise UnsupportedModelError(
            f"{target.name}: distilling a draft of layers of models with experts is "
            f"not supported: {_INSTEAD}"
        )
    return model


def ends_of(target: Described) -> TargetEnds:
    """A target's embedding and output head.

    Raises:
        UnsupportedModelError: the target is not built of layers, a norm and a head.
    """
    ends = TargetEnds(target.model, target.name)
    parts = [p for p in ends.owner.values() if isinstance(p, nn.Module)]
    for part in parts:
        kinds = [] if part is ends.trunk else [type(m) for m in part.modules()]
        if any("Norm" in kind.__name__ for kind in kinds):
            raise UnsupportedModelError(
                f"{target.name}: distilling a draft of its architecture is not "
                "supported: its last norm belongs to the output head"
            )
    return ends


def head_of(target: Described) -> mx.array:
    """The matrix of a target's head, shape (V, D), without a soft cap on logits.

    Raises:
        UnsupportedModelError: the head is packed, or see :func:`ends_of`.
    """
    scaled = getattr(target.model, "logits_scaling", 1) != 1
    if scaled or not models_layers.has_text_model(target.model):
        ends = ends_of(target)
        embedded = ends.embed(mx.zeros((1, 1), mx.int32))
        # The logits of unit vectors include the scale that the model's code applies.
        units = mx.eye(embedded.shape[-1], dtype=embedded.dtype)[None]
        return (ends.logits(units) - ends.logits(mx.zeros_like(units[:, :1])))[0].T
    model: Any = target.model.get("language_model", target.model)
    layer = model["lm_head"] if "lm_head" in model else model["model"]["embed_tokens"]
    if "scales" in layer:
        raise UnsupportedModelError(
            "the target's head is packed: load it in a floating type"
        )
    weight: mx.array = layer["weight"]
    return weight


def choose_layers(text: str, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Parse ``4`` (that many layers, spread evenly) or ``0,10,20,29``.

    Of a hybrid target only attention layers are chosen: for its gradient, a scan over
    the tokens of a text would keep the states of every position.

    Args:
        layers: the target's layers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise ConfigError(
            f"layers is {text!r}: write a number of layers, or 0,10,20,29"
        )
    numbers = [int(part) for part in parts]
    usable = [i for i, layer in enumerate(layers) if "self_attn" in layer]
    usable = usable or list(range(len(layers)))
    if len(numbers) > 1:
        if max(numbers) >= len(layers) or len(set(numbers)) != len(numbers):
            raise ConfigError(
                f"layers is {text!r}: the target has layers 0 to {len(layers) - 1}, "
                "name each once at most"
            )
        if not set(numbers) <= set(usable):
            raise ConfigError(
                f"layers is {text!r}: a draft takes layers of attention, which are "
                f"{', '.join(map(str, usable))} of the target's"
            )
        return tuple(numbers)
    (count,) = numbers
    most = min(len(usable), len(layers) - 1)
    if not 1 <= count <= most:
        of_attention = " of attention" if len(usable) < len(layers) else ""
        raise ConfigError(
            f"layers is {count}: the target has {len(usable)}{of_attention}, take "
            f"{'fewer' if most < len(usable) else 'so many at most'}, at least 1"
        )
    if count == 1:
        return (usable[0],)
    last = len(usable) - 1
    return tuple(usable[round(i * last / (count - 1))] for i in range(count))


def make_student(
    target: Described, layers: Sequence[int], *, widen: int = 1
) -> LayerStudent:
    """A draft of the given layers of the target, in the given order.

    Args:
        widen: number of the target's MLPs that each layer joins side by side: its own,
            and those of layers between it and the next one. On a GPU a step of a small
            batch is bound by launches, which wider matrices do not add to.

    Raises:
        UnsupportedModelError: the target's architecture is not supported.
    """
    source = text_model(target)
    every: list[Any] = layers_of(target.model)
    known: Any = source.args
    changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
    names = {field.name for field in fields(known)}
    if widen > 1:
        changes["intermediate_size"] = widen * known.intermediate_size
    kinds = getattr(known, "layer_types", None)
    if kinds:
        changes["layer_types"] = [kinds[i] for i in layers]
        if "full_attention" not in changes["layer_types"] and "mamba" not in kinds:
            # mlx-lm needs one full-attention layer.
            changes["layer_types"][-1] = "full_attention"
    prefix = ""
    if "full_attention_interval" in names:
        # Every layer is an attention layer. mlx-lm loads the draft as a part of another
        # model.
        changes |= {"full_attention_interval": 1, "model_type": "qwen3_5"}
        prefix = "language_model."
    if "sliding_window_pattern" in names:
        # The last layer attends to everything.
        changes["sliding_window_pattern"] = len(layers)
    args_class: Any = type(source)
    model: nn.Module = args_class(replace(known, **changes))
    trunk = model["model"]
    trunk["embed_tokens"] = source["model"]["embed_tokens"]
    if "lm_head" in source:
        model["lm_head"] = source["lm_head"]
    elif "lm_head" in model:  # Gemma 3 drops its head once it finds no stored weight
        model.sanitize({})
    for place, new in enumerate(trunk["layers"]):
        new.update(widened(every, layers, place, widen))
    trunk["norm"].update(source["model"]["norm"].parameters())
    config = text_config(target.config) | changes
    model.eval()
    name = f"{len(layers)} layers"
    return LayerStudent(model, config, tuple(layers), name, source, prefix)


def widened(
    every: Sequence[nn.Module], layers: Sequence[int], place: int, widen: int
) -> dict[str, Any]:
    """The arrays of a draft's layer, with other MLPs joined to its own.

    Args:
        every: all layers of the target.
        layers: indices of the target's layers that the draft takes.
        place: index of the layer in ``layers``.
        widen: see :func:`make_student`.
    """
    parameters: dict[str, Any] = every[layers[place]].parameters()
    beside = [every[i]["mlp"] for i in _beside(layers, place, widen, len(every))]
    return parameters | {"mlp": _joined([parameters["mlp"], *beside])}


def _beside(layers: Sequence[int], place: int, widen: int, count: int) -> list[int]:
    """Layers whose MLPs join that of a draft's layer, spread up to its next layer."""
    first = layers[place]
    last = layers[place + 1] if place + 1 < len(layers) else count
    if last <= first + 1:  # no layers in between, so take layers before
        last = layers[place - 1] if place else 0
    indices = (first + round(i * (last - first) / widen) for i in range(1, widen))
    return [min(max(i, 0), count - 1) for i in indices]


def _joined(mlps: Sequence[Any]) -> dict[str, Any]:
    """One MLP that computes the sum of several.

    An MLP is ``down(act(gate x) * up x)``. The rows of all ``gate`` and ``up`` matrices
    are concatenated, and so are the columns of all ``down`` matrices.
    """
    joined: dict[str, Any] = {}
    for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weights = [mlp[name]["weight"] for mlp in mlps]
        joined[name] = {"weight": mx.concatenate(weights, axis=axis)}
        if "bias" in mlps[0][name]:
            biases = [mlp[name]["bias"] for mlp in mlps]
            whole = mx.concatenate(biases) if axis == 0 else sum(biases[1:], biases[0])
            joined[name]["bias"] = whole
    return joined


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a target's text model alone, without its quantization."""
    inner = config.get("text_config")
    outer = {
        key: value
        for key, value in config.items()
        if key not in (*QUANTIZATION_KEYS, "text_config", "vision_config")
    }
    if not isinstance(inner, dict):
        return outer
    unpacked = {k: v for k, v in inner.items() if k not in QUANTIZATION_KEYS}
    above = ("eos_token_id", "vocab_size")
    return unpacked | {key: outer[key] for key in above if key in outer}
