"""MTP heads: a layer in the target's checkpoint that predicts the token after next.

mlx-lm's models drop these weights when they are loaded. The layer is of the target's
own kind; mlx-lm's code builds it and renames its weights. Like EAGLE-3, it reads pairs
of a hidden state and the token after it. The hidden state is the target's last one,
normed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ModelError, UnsupportedModelError
from ...utils.printable import shorten
from ..folder import explained
from ..layers import architecture_of
from ..loaded import Described
from ..trunk import TargetEnds
from .config import HeadConfig, LayerSizes
from .head import DraftHead
from .loading import rehearse
from .weights import fill

# The target's architectures (mlx-lm's module names), by how their MTP arrays are named.
_QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_NEXTN = ("glm4_moe", "glm4_moe_lite")
_QWEN_ARRAY = re.compile(r"(?:^|\.)mtp\.(.+)$")
_NEXTN_ARRAY = re.compile(r"^(?:language_model\.)?model\.layers\.(\d+)\.(.+)$")
# Both kinds' array names -> names in the head. Embedding and output head are the
# target's.
_RENAMED = {
    "fc.weight": "fc.weight",
    "pre_fc_norm_embedding.weight": "token_norm.weight",
    "pre_fc_norm_hidden.weight": "state_norm.weight",
    "norm.weight": "norm.weight",
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "token_norm.weight",
    "hnorm.weight": "state_norm.weight",
    "shared_head.norm.weight": "norm.weight",
}
_SHARED = re.compile(r"^(embed_tokens|shared_head\.head|lm_head)\.")


@dataclass(frozen=True, kw_only=True)
class MTPConfig(HeadConfig):
    """An MTP head.

    Args:
        norm_output: whether the output is normed before it is fed back.
        latent: whether its attention is latent; such attention needs an array as mask.
    """

    norm_output: bool
    latent: bool


class MTPHead(DraftHead):
    """A target's own MTP head.

    Args:
        config: the head's configuration.
        layer: a layer of the target's kind, with weights of any values.
        like: the target and a place in its caches; the layer's cache is made like the
            one at this place.
    """

    args: MTPConfig
    reads_following = True

    def __init__(self, config: MTPConfig, layer: nn.Module, like: tuple[Any, int]):
        super().__init__(config)
        size, eps = config.sizes.hidden_size, config.sizes.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.token_norm = nn.RMSNorm(size, eps=eps)
        self.state_norm = nn.RMSNorm(size, eps=eps)
        self.layers = [layer]
        self.norm = nn.RMSNorm(size, eps=eps)
        vars(self)["_like"] = like

    def make_cache(self) -> list[Any]:
        """The cache of its layer."""
        model, place = vars(self)["_like"]
        return [make_prompt_cache(model)[place]]

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write pairs of the target's states and the tokens after them."""
        return self.step(following, self.ends.trunk["norm"](hidden), caches)

    def step(self, tokens: mx.array, feature: mx.array, caches: list[Any]) -> mx.array:
        """Write pairs and return the features of the next pairs, (B, S, D)."""
        pair = [self.token_norm(self.embed(tokens)), self.state_norm(feature)]
        x = self.fc(mx.concatenate(pair, axis=-1))
        mask = create_attention_mask(x, caches[0], return_array=self.args.latent)
        h: mx.array = self.layers[0](x, mask, caches[0])
        return self.norm(h) if self.args.norm_output else h

    def predict(self, h: mx.array) -> mx.array:
        """Logits from the output of :meth:`step`."""
        return self.logits(h if self.args.norm_output else self.norm(h))

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (B, S, V) with zero features, to plan and check it like a model."""
        size = self.args.sizes.hidden_size
        feature = mx.zeros((*inputs.shape, size), self.norm.weight.dtype)
        return self.predict(self.step(inputs, feature, cache))


def open_mtp(folder: Path, target: Described) -> DraftHead:
    """The MTP head of a target's checkpoint, with weights that are not computed yet.

    Args:
        folder: the target's folder.

    Raises:
        UnsupportedModelError: MTP heads of the target's architecture are not supported.
        ModelError: the checkpoint holds no MTP head, or a damaged one.
    """
    with explained(f"the MTP head of {target.name}"):
        return _opened(folder, target)


def _opened(folder: Path, target: Described) -> DraftHead:
    model, name = target.model, target.name
    architecture = architecture_of(model)
    if architecture not in (*_QWEN, *_NEXTN):
        raise UnsupportedModelError(
            f"{name}: MTP heads of {architecture} models are not supported "
            f"({', '.join((*_QWEN, *_NEXTN))} are)"
        )
    ends = TargetEnds(model, name)
    owner: Any = ends.owner
    args, depth = owner.args, ends.num_layers
    ours = architecture in _QWEN
    arrays, shifted = _arrays(folder, depth, name, ours=ours)
    # A layer of the same kind: full attention, and experts if the target has some.
    place = args.full_attention_interval - 1 if ours else depth - 1
    layer = type(ends.trunk["layers"][place])(args, place)
    heads = args.num_attention_heads
    sizes = LayerSizes(
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=args.num_key_value_heads,
        head_dim=getattr(args, "head_dim", None) or args.hidden_size // heads,
        rms_norm_eps=args.rms_norm_eps,
    )
    config = MTPConfig(
        kind="MTP",
        sizes=sizes,
        target_layers=(depth - 1,),
        target_size=args.hidden_size,
        vocab_size=args.vocab_size,
        draft_vocab_size=args.vocab_size,
        norm_output=ours,
        latent=hasattr(args, "kv_lora_rank"),
    )
    head = MTPHead(config, layer, (model, place))
    head.bind(ends)
    weights = _named(arrays, model, place, shifted=shifted)
    fill(head, weights, f"the MTP head of {name}")
    head.eval()
    rehearse(head)
    return head


def _arrays(
    folder: Path, depth: int, name: str, *, ours: bool
) -> tuple[dict[str, mx.array], bool]:
    """The head's arrays by their names, and whether norms are stored as w - 1."""
    found: dict[str, mx.array] = {}
    shifted = False
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            loaded: Mapping[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
            for key, array in loaded.items():
                # mlx-lm recognizes an unconverted checkpoint by this.
                if ours and key.endswith("conv1d.weight") and array.shape[-1] != 1:
                    shifted = True
                if ours and (match := _QWEN_ARRAY.search(key)):
                    found[match[1]] = array
                match = None if ours else _NEXTN_ARRAY.match(key)
                if match and int(match[1]) == depth:
                    found[match[2]] = array
    except RuntimeError as error:
        raise ModelError(
            f"{name} cannot be loaded ({shorten(error)}): download it again"
        ) from error
    if not found:
        raise ModelError(
            f"{name} has no MTP head (mlx-lm's conversions leave it out): take the "
            "original checkpoint as the target, or another draft"
        )
    return found, shifted


def _named(
    arrays: Mapping[str, mx.array], model: Any, place: int, *, shifted: bool
) -> dict[str, mx.array]:
    """Arrays under their names here; mlx-lm's own code renames the layer's arrays."""
    weights: dict[str, mx.array] = {}
    inside: dict[str, mx.array] = {}
    for key, array in arrays.items():
        if key in _RENAMED:
            weights[_RENAMED[key]] = array
        elif not _SHARED.match(key) and not re.match(r"layers\.[1-9]", key):
            inside[f"model.layers.{place}.{key.removeprefix('layers.0.')}"] = array
    given = {id(array) for array in arrays.values()}
    for key, array in model.sanitize(inside).items():
        weights["layers.0." + key.rpartition(f"layers.{place}.")[2]] = array
    _stack_experts(weights)
    if shifted:
        for key, array in weights.items():
            # If mlx-lm's code has shifted a norm, it is a new array.
            if array.ndim == 1 and "norm" in key and id(array) in given:
                weights[key] = array + 1.0
    return weights


def _stack_experts(weights: dict[str, mx.array]) -> None:
    """Join experts that are stored one by one and that mlx-lm's code did not join."""
    at = "layers.0.mlp."
    for name in ("gate_proj", "up_proj", "down_proj"):
        each = list[mx.array]()
        while (key := f"{at}experts.{len(each)}.{name}.weight") in weights:
            each.append(weights.pop(key))
        if each:
            weights[f"{at}switch_mlp.{name}.weight"] = mx.stack(each)
