"""A draft that is a block head to be trained: DSpark's or DFlash's network.

A training step learns from many anchors of a text at once. The context is the whole
text. The mask lets each block see the tokens before its anchor, and itself:

    keys       c_0 c_1 c_2 c_3 c_4 c_5 ...   x_2 mask mask   x_5 mask mask
    block of 2  +   +                         +   +    +
    block of 5  +   +   +   +   +                             +   +    +
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_unflatten

from ...models.draft_heads import BlockConfig, BlockHead
from ...models.draft_heads.config import spread_layers
from ...models.draft_heads.dflash2 import DFlash2Head
from ...models.draft_heads.kinds import head_config
from ...models.draft_heads.layers import HeadAttention
from ...models.draft_heads.loading import make_head
from ...models.layers import (
    HiddenStates,
    TargetEnds,
    arrays_of,
    calling,
    has_text_model,
    layers_of,
    leaves_of,
    path_to_trunk,
    record_layers,
    with_part,
)
from ...models.loaded import Described
from .blocks import Block
from .student import Lesson, Parameters, Student, ends_of, text_config, widened

# The head reads as many of the target's layers as it has itself, or this many if more.
_FEWEST_FEATURES = 3
# Rank of the Markov head: the width over the first number, at most the second, which is
# the published heads' rank.
_WIDTH_OF_RANK, _LARGEST_RANK = 8, 256
# Channels of a group and candidates of DFlash 2, as in published heads.
_LARGEST_GROUP, _CANDIDATES = 16, 16


@dataclass(frozen=True, eq=False)
class BlockStudent(Student):
    """A draft that is a block head.

    Args:
        model: the head, bound to no target.
        recorded: the target, with the outputs of its layers and last norm recorded.
        heard: the recorded outputs of layers.
        normed: the output of the last norm in the last forward.
        ends: gives the target's embedding.
    """

    recorded: nn.Module
    heard: HiddenStates
    normed: list[mx.array]
    ends: TargetEnds

    @property
    def head(self) -> BlockHead:
        """The network."""
        return cast(BlockHead, self.model)

    @property
    def slots(self) -> int:
        """The number of tokens that a block predicts."""
        return self.head.args.max_draft_tokens

    @property
    def bias_head(self) -> mx.array | None:
        """The matrix of the bias by the token before."""
        return self.head.bias_matrix

    @property
    def stored_prefix(self) -> str:
        """What comes before the names of learnt arrays in a head's file: nothing."""
        return ""

    @property
    def seen_width(self) -> int:
        """The width of a token's features and of its state after the last norm."""
        config = self.head.args
        return config.target_size * (1 + len(config.target_layers))

    def _learnt(self) -> Parameters:
        return self.model.parameters()

    def load(self, parameters: Parameters) -> None:
        """Put learnt arrays into the model."""
        self.model.update(parameters)

    def see(self, block: Block) -> mx.array:
        """Features of all tokens, joined with their states after the last norm."""
        self.recorded(mx.array(block.tokens))  # its logits are never computed
        return mx.concatenate([self.heard.take(), self.normed.pop()], axis=-1)

    def lesson(
        self, block: Block, target_states: mx.array, rng: np.random.Generator
    ) -> Lesson:
        """A lesson from blocks after random anchors, about one slot for each token."""
        size, width = self.head.args.block_size, block.tokens.shape[1]
        drawn = draw_anchors(block, max(width // size, 1), self.slots, rng)
        anchors, positions, weights = drawn
        at = mx.array(positions)
        context = target_states.shape[-1] - self.head.args.target_size
        features, after = target_states[..., :context], target_states[..., context:]
        tokens = mx.array(block.tokens)
        states = partial(self._predicting, tokens, features, mx.array(anchors), at)
        return Lesson(states, after.reshape(-1, after.shape[-1])[at], weights)

    def _predicting(
        self, tokens: mx.array, features: mx.array, anchors: mx.array, at: mx.array
    ) -> mx.array:
        """States that predict tokens, (N, D), or (N, D + r) with a Markov head's input.

        Args:
            at: index, in the flattened rows, of the token before each predicted one,
                (N,).
        """
        head = self.head
        first = mx.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
        embed = self.ends.rows if head.args.raw_embedding else self.ends.embed
        block = embed(head.inputs(first, head.args.block_size))
        states = block_states(head, features, block, anchors)
        states = states[:, head.args.block_size - self.slots :]
        flat = states.reshape(-1, states.shape[-1])
        if head.bias_matrix is None:
            return flat
        before = head.bias_input(tokens.reshape(-1)[at], flat)
        return mx.concatenate([flat, before.astype(flat.dtype)], axis=-1)


def block_states(
    head: BlockHead, features: mx.array, block: mx.array, anchors: mx.array
) -> mx.array:
    """Normed states (B A, b, D) of blocks after many anchors of a text.

    Args:
        head: the head.
        features: features of all tokens, (B, L, F).
        block: the embedded blocks, (B A, b, D), sorted by row.
        anchors: position of each block's first token, (B, A).
    """
    (rows, count), width = anchors.shape, block.shape[1]
    causal, windows = head.args.causal, head.args.windows

    def side_by_side(x: mx.array) -> mx.array:
        """Join the blocks of each row: from (B A, H, b, d) to (B, H, A b, d)."""
        x = x.reshape(rows, count, *x.shape[1:]).transpose(0, 2, 1, 3, 4)
        return x.reshape(rows, x.shape[1], count * width, -1)

    offsets = anchors.reshape(-1)
    context, x = head.context(features), block

    def attend(place: int, normed: mx.array) -> mx.array:
        attention: HeadAttention = head.layers[place].self_attn
        mask = seen_by_blocks(
            anchors, width, features.shape[1], causal[place], windows[place]
        )
        queries = side_by_side(attention.queries(normed, offsets))
        block_pairs = map(side_by_side, attention.keys_values(normed, offsets))
        keys, values = (
            mx.concatenate(list(pair), axis=2)
            for pair in zip(attention.keys_values(context, 0), block_pairs, strict=True)
        )
        mixed = attention.attend(normed, queries, keys, values, mask)
        return mixed.reshape(normed.shape)

    for place, layer in enumerate(head.layers):
        x = layer.around(x, partial(attend, place))
    states: mx.array = head.norm(x)
    return states


def seen_by_blocks(
    anchors: mx.array,
    width: int,
    length: int,
    causal: bool = False,
    window: int | None = None,
) -> mx.array:
    """Which keys each slot sees, boolean, (B, 1, A b, L + A b).

    Args:
        anchors: positions of the anchors, (B, A).
        width: b, the number of slots of a block.
        length: L, the number of tokens of the context.
        causal: whether later slots of the block are hidden from a slot.
        window: tokens of a sliding window; ``None``: everything is seen.
    """
    rows, count = anchors.shape
    before = mx.arange(length) < mx.repeat(anchors, width, axis=1)[..., None]
    if window is not None:
        slots = mx.repeat(anchors, width, axis=1) + mx.tile(mx.arange(width), count)
        before = before & (mx.arange(length) > slots[..., None] - window)
    number = mx.arange(count * width) // width
    same = number[:, None] == number
    if causal:
        same = same & (mx.arange(count * width)[:, None] >= mx.arange(count * width))
    same = mx.broadcast_to(same, (rows, count * width, count * width))
    return mx.concatenate([before, same], axis=-1)[:, None]


def draw_anchors(
    block: Block, count: int, slots: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Draw the anchors of blocks, and find the tokens that their slots predict.

    Positions are drawn in proportion to their weights. If a row has too few positions
    with a weight, others are added; their slots have weight 0. Slots beyond the end of
    a row have weight 0, too.

    Args:
        count: A, the number of anchors of a row.
        slots: S, the number of slots of a block that predict.

    Returns:
        Anchors (B, A), in ascending order; for each slot the position, in the flattened
        rows, whose next token it predicts, (B A S,); the slots' weights, (B A S,).
    """
    rows, width = block.tokens.shape
    chances = np.zeros(rows * width)
    np.add.at(chances, block.positions, block.weights)  # padding adds nothing
    chances = chances.reshape(rows, width)
    # The positions of the largest keys are a weighted draw without replacement
    # (Efraimidis, Spirakis 2006).
    keys = np.where(chances > 0, rng.random(chances.shape), 0.0)
    keys **= 1 / np.maximum(chances, 1e-9)
    anchors = np.sort(np.argsort(-keys, axis=1, kind="stable")[:, :count], axis=1)
    drawn = np.take_along_axis(chances, anchors, axis=1) > 0
    ends = width - (chances[:, ::-1] > 0).argmax(axis=1)
    at = anchors[:, :, None] + np.arange(slots)
    weights = drawn[:, :, None] & (at < ends[:, None, None])
    flat = np.minimum(at, width - 1) + width * np.arange(rows)[:, None, None]
    return (
        anchors.astype(np.int32),
        flat.reshape(-1).astype(np.int32),
        weights.reshape(-1).astype(np.float32),
    )


def make_block_student(
    target: Described,
    layers: Sequence[int],
    *,
    widen: int = 1,
    form: str = "dspark",
    block_size: int = 8,
    seed: int = 0,
) -> BlockStudent:
    """A block head for a target.

    A layer begins as the target's layer if that has the same arrays, else at random.

    Args:
        layers: the target's layers to begin with; their number is the head's number of
            layers in any case.
        widen: see :func:`.student.make_student`.
        form: one of :data:`.options.FORMS`.
        block_size: tokens of a block, including the anchor.
        seed: seed of the arrays that begin at random.

    Raises:
        UnsupportedModelError: the target's architecture is not supported.
    """
    ends = ends_of(target)
    every = layers_of(target.model)
    config = _config(target, ends, len(layers), widen, form, block_size)
    names = {"layers.0.self_attn.q_norm.weight"}
    if form == "dspark":
        names.add("markov_head.markov_w1.weight")
    args = head_config(config, names, target.name)
    assert isinstance(args, BlockConfig)
    head = cast(BlockHead, make_head(args))
    _begin(head, seed)
    dense = all("gate_proj" in layer.get("mlp", ()) for layer in every)
    copied = [
        dense and _begin_layer(layer, widened(every, layers, place, widen))
        for place, layer in enumerate(head.layers)
    ]
    head.eval()
    recorded, heard = record_layers(target.model, args.target_layers, target.name)
    path = path_to_trunk(recorded, target.name, "distilling a draft")
    normed: list[mx.array] = []

    def called(usual: Any, args: Any, kwargs: Any) -> Any:
        normed[:] = [usual(*args, **kwargs)]
        return normed[0]

    trunk = reduce(lambda part, name: part[name], path, recorded)
    recorded = with_part(recorded, path, calling(trunk, called))
    return BlockStudent(
        head,
        config,
        tuple(layers) if any(copied) else (),
        f"a block of {block_size}",
        target.model,
        "",
        recorded,
        heard,
        normed,
        ends,
    )


def _begin_layer(layer: nn.Module, arrays: dict[str, Any]) -> bool:
    """Copy the arrays of a target's layer, if this layer has the same ones.

    Returns:
        Whether they were copied.
    """
    initial = dict(arrays_of(layer))
    # Published heads have no biases.
    theirs = {n: a for n, a in leaves_of(arrays) if not n.endswith(".bias")}
    if not all(n in initial and a.shape == initial[n].shape for n, a in theirs.items()):
        return False
    layer.update(tree_unflatten(list(theirs.items())))
    return True


def _config(
    target: Described,
    ends: TargetEnds,
    count: int,
    widen: int,
    form: str,
    block_size: int,
) -> dict[str, Any]:
    """A configuration like published heads of this form, with the target's sizes."""
    num_target_layers = ends.num_layers
    embedded = ends.embed(mx.zeros((1, 1), mx.int32))
    width, vocab_size = embedded.shape[-1], ends.logits(embedded).shape[-1]
    known = text_config(target.config)
    args = vars(getattr(ends.owner, "args", None) or SimpleNamespace())
    settings = known | {
        name: value for name, value in args.items() if value is not None
    }

    def number(*names: str) -> Any:
        values = [settings.get(name) for name in names]
        return next((n for n in values if isinstance(n, int | float) and n > 0), 0)

    known_layers = has_text_model(target.model)
    heads = number("num_attention_heads", "n_heads", "num_heads", "n_head")
    heads = heads or max(width // 64, 1)
    kv_heads = number("num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    head_dim = number("head_dim") or width // heads
    between = number("intermediate_size", "block_ff_dim", "ffn_hidden_size", "n_inner")
    rope = settings.get("rope_parameters") or {}
    theta = number("rope_theta") or rope.get("rope_theta") or 10000.0
    spread = spread_layers(num_target_layers, max(count, _FEWEST_FEATURES))
    reads = sorted({min(max(i, 0), num_target_layers - 1) for i in spread})
    # The mask token must have an embedding, and no answer should go on after it.
    eos = known.get("eos_token_id")
    mask = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        mask = vocab_size - 1
    of_block = {"mask_token_id": mask, "target_layer_ids": reads}
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": width,
        # The width of an expert's MLP would be too small.
        "intermediate_size": widen * (between if between >= width else 3 * width),
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": head_dim + head_dim % 2,
        "hidden_act": "silu",
        "rms_norm_eps": number("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        or 1e-6,
        "rope_theta": theta,
        "rope_scaling": settings.get("rope_scaling") if known_layers else None,
        "rope_is_neox_style": not settings.get("rope_traditional", False),
        "max_position_embeddings": number("max_position_embeddings") or None,
        "vocab_size": vocab_size,
        "layer_types": ["full_attention"] * count,
        "num_target_layers": num_target_layers,
        "block_size": block_size,
    }
    if form == "dflash":
        config["architectures"] = ["DFlashDraftModel"]
        return config | {"dflash_config": of_block}
    rank = max(width // _WIDTH_OF_RANK, 1)
    rank = min(1 << rank.bit_length() - 1, _LARGEST_RANK)
    if form == "dflash2":
        selects = {
            "conv_kernel_size": 2,
            "conv_group_size": math.gcd(width, _LARGEST_GROUP),
            "selector_rank": rank,
            "selector_top_k": min(_CANDIDATES, vocab_size),
        }
        return {
            "architectures": ["DFlash2DraftModel"],
            **config,
            "is_causal": False,
            "dflash_config": of_block | selects,
        }
    return {
        "architectures": ["Qwen3DSparkModel"],
        **config,
        **of_block,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
    }


def _begin(head: BlockHead, seed: int) -> None:
    """Draw all matrices; begin with the features' mean and without a bias."""
    leaves = sorted(arrays_of(head))
    keys = mx.random.split(mx.random.key(seed), len(leaves))
    matrices = []
    for (name, array), key in zip(leaves, keys, strict=True):
        if array.ndim == 2:
            matrices.append(
                (name, mx.random.normal(array.shape, key=key) * array.shape[1] ** -0.5)
            )
    head.update(tree_unflatten(matrices))
    size, count = head.args.sizes.hidden_size, len(head.args.target_layers)
    head.fc.weight = mx.concatenate([mx.eye(size) / count] * count, axis=1)
    if head.args.markov_rank:
        second = head.markov_head.markov_w2
        second.weight = mx.zeros_like(second.weight)
    if isinstance(head, DFlash2Head):
        head.begin_as_dflash()
