"""The draft: some of the target's layers, under the target's own embedding and head."""

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
from ...models.layers import layers_of
from ...models.loaded import Described
from ...models.loading import QUANTIZATION_KEYS
from .blocks import Block

Parameters = Any  # a tree of arrays, as MLX has them


@dataclass(frozen=True, eq=False)
class Lesson:
    """What is learnt of a block in one step.

    Args:
        states: computes the draft's states where it predicts a token, shape (N, C),
            with the weights that it has then.
        target: the target's states after the last norm that predict the same tokens,
            shape (N, D).
        weights: of these N places, shape (N,).
    """

    states: Callable[[], mx.array]
    target: mx.array
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Student(ABC):
    """A draft in the making.

    Args:
        model: the draft.
        config: as in ``config.json``.
        layers: of the target, that it began with.
        name: for messages.
        source: the target's text model.
        prefix: what the names of its weights begin with in files.
    """

    model: nn.Module
    config: dict[str, Any]
    layers: tuple[int, ...]
    name: str
    source: nn.Module
    prefix: str

    @property
    def slots(self) -> int | None:
        """Places in a row that one anchor predicts; ``None``: each stands alone."""
        return None

    @property
    def bias_head(self) -> mx.array | None:
        """What the last C - D numbers of a state are multiplied by, (V, C - D)."""
        return None

    @property
    def seen_width(self) -> int:
        """Numbers of the target's that are wanted for a token."""
        width: int = self.source["model"]["norm"]["weight"].size
        return width

    @property
    def parameters(self) -> Parameters:
        """What is learnt, in float32."""
        return tree_map(lambda array: array.astype(mx.float32), self._learnt())

    @abstractmethod
    def _learnt(self) -> Parameters:
        """The arrays that are learnt, as they are."""

    @abstractmethod
    def load(self, parameters: Parameters) -> None:
        """Put what was learnt in the model, in whatever type it comes."""

    @abstractmethod
    def see(self, block: Block) -> mx.array:
        """What the target makes of a block, as far as it is wanted."""

    @abstractmethod
    def lesson(self, block: Block, seen: mx.array, rng: np.random.Generator) -> Lesson:
        """What is learnt of a block.

        Args:
            seen: what :meth:`see` returned.
            rng: draws what is a matter of chance.
        """


@dataclass(frozen=True, eq=False)
class LayerStudent(Student):
    """A draft of layers: an mlx-lm model of the target's family.

    Its embedding and head are the target's own arrays.
    """

    def _learnt(self) -> Parameters:
        trunk = self.model["model"]
        return {
            "layers": [layer.parameters() for layer in trunk["layers"]],
            "norm": trunk["norm"].parameters(),
        }

    def load(self, parameters: Parameters) -> None:
        """Put what was learnt in the model."""
        self.model["model"].update(parameters)

    def hidden(self, tokens: mx.array) -> mx.array:
        """Hidden states after the last norm, shape (B, L, D)."""
        states: mx.array = self.model["model"](tokens)
        return states

    def see(self, block: Block) -> mx.array:
        """States after the last norm at the block's positions, shape (N, D)."""
        return at_positions(self.source["model"](mx.array(block.tokens)), block)

    def lesson(self, block: Block, seen: mx.array, rng: np.random.Generator) -> Lesson:
        """Every position of the block."""

        def states() -> mx.array:
            return at_positions(self.hidden(mx.array(block.tokens)), block)

        return Lesson(states, seen, block.weights)


def at_positions(states: mx.array, block: Block) -> mx.array:
    """Those of states (B, L, D) that are at a block's positions, (N, D)."""
    return states.reshape(-1, states.shape[-1])[mx.array(block.positions)]


def text_model(target: Described) -> nn.Module:
    """The part of a target that reads and writes text, an mlx-lm model too."""
    what = "distilling a draft"
    model = models_layers.text_model(target.model, target.name, what)
    if any("gate_proj" not in layer["mlp"] for layer in model["model"]["layers"]):
        raise UnsupportedModelError(
            f"{target.name}: {what} of models with experts is not supported"
        )
    return model


def head_of(model: nn.Module) -> mx.array:
    """The matrix of a text model's head, shape (V, D)."""
    layer = model["lm_head"] if "lm_head" in model else model["model"]["embed_tokens"]
    if "scales" in layer:
        raise UnsupportedModelError(
            "the target's head is packed: load it in a floating type"
        )
    weight: mx.array = layer["weight"]
    return weight


def choose_layers(text: str, layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """The layers of ``4`` (that many, spread evenly) or of ``0,10,20,29``.

    Of a hybrid target they are layers of attention: a scan over the tokens of a text
    would keep the states of every position for its gradient.

    Args:
        layers: the target's.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise ConfigError(
            f"layers is {text!r}: write a number of layers, or 0,10,20,29"
        )
    numbers = [int(part) for part in parts]
    usable = [i for i, layer in enumerate(layers) if "self_attn" in layer]
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
    """A draft of these layers of the target, in the order given.

    Args:
        widen: MLPs of the target that each layer joins side by side: its own, and
            those of layers between it and the next one. A step of a small batch is
            bound by launches on a GPU, which a wider matrix does not add to.

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
        if "full_attention" not in changes["layer_types"]:
            # mlx-lm looks for one.
            changes["layer_types"][-1] = "full_attention"
    prefix = ""
    if "full_attention_interval" in names:
        # Every layer is of attention. mlx-lm loads it as a part of another model.
        changes |= {"full_attention_interval": 1, "model_type": "qwen3_5"}
        prefix = "language_model."
    if "sliding_window_pattern" in names:
        # The last layer sees everything.
        changes["sliding_window_pattern"] = len(layers)
    made: Any = type(source)
    model: nn.Module = made(replace(known, **changes))
    trunk = model["model"]
    trunk["embed_tokens"] = source["model"]["embed_tokens"]
    if "lm_head" in source:
        model["lm_head"] = source["lm_head"]
    elif "lm_head" in model:  # Gemma 3 has one until it finds that nothing is stored
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
    """The arrays of one of these layers, other MLPs joined to its own.

    Args:
        every: all layers of the target.
        layers: those of the draft.
        place: which of them.
        widen: see :func:`make_student`.
    """
    own: dict[str, Any] = every[layers[place]].parameters()
    beside = [every[i]["mlp"] for i in _beside(layers, place, widen, len(every))]
    return own | {"mlp": _joined([own["mlp"], *beside])}


def _beside(layers: Sequence[int], place: int, widen: int, count: int) -> list[int]:
    """Layers whose MLPs join the one of a place, spread up to the next place."""
    first = layers[place]
    last = layers[place + 1] if place + 1 < len(layers) else count
    if last <= first + 1:  # nothing in between: those before
        last = layers[place - 1] if place else 0
    found = (first + round(i * (last - first) / widen) for i in range(1, widen))
    return [min(max(i, 0), count - 1) for i in found]


def _joined(mlps: Sequence[Any]) -> dict[str, Any]:
    """One MLP that computes the sum of several.

    ``down(act(gate x) * up x)``: the rows of ``gate`` and ``up`` stand one below the
    other, the columns of ``down`` one beside the other.
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
    """The configuration of a target's text model alone, and of none that is packed."""
    inner = config.get("text_config")
    outer = {
        key: value
        for key, value in config.items()
        if key not in (*QUANTIZATION_KEYS, "text_config", "vision_config")
    }
    if not isinstance(inner, dict):
        return outer
    kept = {k: v for k, v in inner.items() if k not in QUANTIZATION_KEYS}
    above = ("eos_token_id", "vocab_size")
    return kept | {key: outer[key] for key in above if key in outer}
