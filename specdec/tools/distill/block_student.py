"""The draft as a block head: DSpark's or DFlash's network, to be trained.

In training many anchors of a text are learnt from at once. The context is the whole
text, and the mask has each block see what is before its anchor, and itself:

    keys       c_0 c_1 c_2 c_3 c_4 c_5 ...   x_2 mask mask   x_5 mask mask
    block of 2  +   +                         +   +    +
    block of 5  +   +   +   +   +                             +   +    +
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from ...models.draft_heads import BlockConfig, BlockHead
from ...models.draft_heads.config import head_config, spread_layers
from ...models.draft_heads.loading import make_head
from ...models.hidden_states import HiddenStates, record_layers
from ...models.layers import layers_of
from ...models.loaded import Described
from ...models.trunk import TargetEnds
from .blocks import Block
from .student import (
    Lesson,
    Parameters,
    Student,
    head_of,
    text_config,
    text_model,
    widened,
)

# The head reads as many layers of the target as it has itself, and these at least.
_FEWEST_FEATURES = 3
# Of the Markov head: this part of the width, up to the published ones' rank.
_WIDTH_OF_RANK, _LARGEST_RANK = 8, 256


@dataclass(frozen=True, eq=False)
class BlockStudent(Student):
    """A draft that is a block head.

    Args:
        model: the head, bound to no target.
        recorded: the target's text model, whose layers are listened to.
        heard: what they put out.
        ends: the target's embedding.
    """

    recorded: nn.Module
    heard: HiddenStates
    ends: TargetEnds

    @property
    def head(self) -> BlockHead:
        """The network."""
        return cast(BlockHead, self.model)

    @property
    def slots(self) -> int:
        """Tokens that a block predicts."""
        return self.head.args.max_draft_tokens

    @property
    def bias_head(self) -> mx.array | None:
        """The Markov head's second matrix."""
        if not self.head.args.markov_rank:
            return None
        weight: mx.array = self.head.markov_head.markov_w2.weight
        return weight

    @property
    def seen_width(self) -> int:
        """Features, and the state after the last norm."""
        config = self.head.args
        return config.target_size * (1 + len(config.target_layers))

    def _learnt(self) -> Parameters:
        return self.model.parameters()

    def load(self, parameters: Parameters) -> None:
        """Put what was learnt in the model."""
        self.model.update(parameters)

    def see(self, block: Block) -> mx.array:
        """Features of all tokens, and after them states after the last norm."""
        states = self.recorded["model"](mx.array(block.tokens))
        return mx.concatenate([self.heard.take(), states], axis=-1)

    def lesson(self, block: Block, seen: mx.array, rng: np.random.Generator) -> Lesson:
        """Blocks after some anchors that are drawn, about a slot for each token."""
        size, width = self.head.args.block_size, block.tokens.shape[1]
        drawn = draw_anchors(block, max(width // size, 1), self.slots, rng)
        anchors, positions, weights = drawn
        at = mx.array(positions)
        context = seen.shape[-1] - self.head.args.target_size
        features, after = seen[..., :context], seen[..., context:]
        tokens = mx.array(block.tokens)
        states = partial(self._predicting, tokens, features, mx.array(anchors), at)
        return Lesson(states, after.reshape(-1, after.shape[-1])[at], weights)

    def _predicting(
        self, tokens: mx.array, features: mx.array, anchors: mx.array, at: mx.array
    ) -> mx.array:
        """States that predict tokens, (N, D), with the Markov head's input beside them.

        Args:
            at: where the token before each is, in the flattened rows, (N,).
        """
        head = self.head
        first = mx.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
        block = self.ends.embed(head.inputs(first, head.args.block_size))
        states = block_states(head, features, block, anchors)
        states = states[:, head.args.block_size - self.slots :]
        flat = states.reshape(-1, states.shape[-1])
        if not head.args.markov_rank:
            return flat
        # In float32, since the gradient of a token is a sum over all its places.
        known = head.markov_head.markov_w1.weight.astype(mx.float32)
        before = known[tokens.reshape(-1)[at]].astype(flat.dtype)
        return mx.concatenate([flat, before], axis=-1)


def block_states(
    head: BlockHead, features: mx.array, block: mx.array, anchors: mx.array
) -> mx.array:
    """Normed states (B A, b, D) of blocks after many anchors of a text.

    Args:
        head: layers that see everything before a block, and the whole block.
        features: of all tokens, (B, L, F).
        block: the embedded blocks, (B A, b, D), those of a row one after the other.
        anchors: position of each block's first token, (B, A).
    """
    (rows, count), width = anchors.shape, block.shape[1]

    def side_by_side(x: mx.array) -> mx.array:
        """Heads of all blocks (B A, H, b, d) as those of one row, (B, H, A b, d)."""
        x = x.reshape(rows, count, *x.shape[1:]).transpose(0, 2, 1, 3, 4)
        return x.reshape(rows, x.shape[1], count * width, -1)

    offsets = anchors.reshape(-1)
    mask = seen_by_blocks(anchors, width, features.shape[1])
    context, x = head.context(features), block
    for layer in head.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        queries = side_by_side(attention.queries(normed, offsets))
        own = map(side_by_side, attention.keys_values(normed, offsets))
        keys, values = (
            mx.concatenate(list(pair), axis=2)
            for pair in zip(attention.keys_values(context, 0), own, strict=True)
        )
        found = attention.attend(queries, keys, values, mask)
        x = layer.after_attention(x, found.reshape(x.shape))
    states: mx.array = head.norm(x)
    return states


def seen_by_blocks(anchors: mx.array, width: int, length: int) -> mx.array:
    """Which keys each slot sees, boolean, (B, 1, A b, L + A b).

    Args:
        anchors: positions, (B, A).
        width: b, slots of a block.
        length: L, tokens of the context.
    """
    rows, count = anchors.shape
    before = mx.arange(length) < mx.repeat(anchors, width, axis=1)[..., None]
    number = mx.arange(count * width) // width
    same = mx.broadcast_to(
        number[:, None] == number, (rows, count * width, count * width)
    )
    return mx.concatenate([before, same], axis=-1)[:, None]


def draw_anchors(
    block: Block, count: int, slots: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Draw the tokens after which blocks begin, and find what their slots predict.

    A position is drawn as often as its weight says. Where a row has too few, others are
    taken, whose slots weigh nothing; so do slots that are beyond the end of a row.

    Args:
        count: A, anchors of a row.
        slots: S, that predict.

    Returns:
        Anchors (B, A), in ascending order; for each slot the position, in the flattened
        rows, whose next token it predicts, (B A S,); their weights, (B A S,).
    """
    rows, width = block.tokens.shape
    chances = np.zeros(rows * width)
    np.add.at(chances, block.positions, block.weights)  # padding adds nothing
    chances = chances.reshape(rows, width)
    # The largest of these are a draw without replacement (Efraimidis, Spirakis 2006).
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

    Its layers begin as those of the target, where they have no other arrays.

    Args:
        layers: of the target.
        widen: see :func:`.student.make_student`.
        form: one of :data:`.options.FORMS`.
        block_size: tokens of a block, the anchor included.
        seed: of the arrays that begin at random.

    Raises:
        UnsupportedModelError: the target's architecture is not supported.
    """
    source = text_model(target)
    every = layers_of(target.model)
    config = _config(target, layers, widen, form, block_size)
    names = {"layers.0.self_attn.q_norm.weight"}
    if form == "dspark":
        names.add("markov_head.markov_w1.weight")
    args = head_config(config, names, target.name)
    assert isinstance(args, BlockConfig)
    head = cast(BlockHead, make_head(args))
    _begin(head, seed)
    for place, layer in enumerate(head.layers):
        arrays: Any = layer.parameters()  # type: ignore[no-untyped-call]
        own = dict(_leaves(arrays))
        theirs = dict(_leaves(widened(every, layers, place, widen)))
        # Published heads have no biases.
        theirs = {n: a for n, a in theirs.items() if not n.endswith(".bias")}
        if all(n in own and a.shape == own[n].shape for n, a in theirs.items()):
            layer.update(tree_unflatten(list(theirs.items())))
    head.eval()
    recorded, heard = record_layers(source, args.target_layers, target.name)
    return BlockStudent(
        head,
        config,
        tuple(layers),
        f"a block of {block_size}",
        source,
        "",
        recorded,
        heard,
        TargetEnds(source, target.name),
    )


def _config(
    target: Described, layers: Sequence[int], widen: int, form: str, block_size: int
) -> dict[str, Any]:
    """As published heads of this form have it."""
    source = text_model(target)
    args: Any = source.args
    known = text_config(target.config)
    num_target_layers = len(layers_of(target.model))
    vocab_size, width = head_of(source).shape
    count, heads = len(layers), args.num_attention_heads
    spread = spread_layers(num_target_layers, max(count, _FEWEST_FEATURES))
    reads = sorted({min(max(i, 0), num_target_layers - 1) for i in spread})
    theta = getattr(args, "rope_theta", None)
    if theta is None:
        theta = args.rope_parameters["rope_theta"]
    # A token that has an embedding, and that no answer goes on after.
    ends = known.get("eos_token_id")
    mask = ends[0] if isinstance(ends, list) and ends else ends
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        mask = vocab_size - 1
    of_block = {"mask_token_id": mask, "target_layer_ids": reads}
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": widen * args.intermediate_size,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": args.num_key_value_heads,
        "head_dim": getattr(args, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": args.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": getattr(args, "rope_scaling", None),
        "rope_is_neox_style": not getattr(args, "rope_traditional", False),
        "max_position_embeddings": getattr(args, "max_position_embeddings", None),
        "vocab_size": vocab_size,
        "layer_types": ["full_attention"] * count,
        "num_target_layers": num_target_layers,
        "block_size": block_size,
    }
    if form == "dflash":
        config["architectures"] = ["DFlashDraftModel"]
        return config | {"dflash_config": of_block}
    rank = max(width // _WIDTH_OF_RANK, 1)
    return {
        "architectures": ["Qwen3DSparkModel"],
        **config,
        **of_block,
        "markov_rank": min(1 << rank.bit_length() - 1, _LARGEST_RANK),
        "markov_head_type": "vanilla",
    }


def _begin(head: BlockHead, seed: int) -> None:
    """Draw all matrices; features begin as their mean, biases as zero."""
    leaves = sorted(_leaves(head.parameters()))  # type: ignore[no-untyped-call]
    keys = mx.random.split(mx.random.key(seed), len(leaves))
    begun = []
    for (name, array), key in zip(leaves, keys, strict=True):
        if array.ndim == 2:
            begun.append(
                (name, mx.random.normal(array.shape, key=key) * array.shape[1] ** -0.5)
            )
    head.update(tree_unflatten(begun))
    size, count = head.args.sizes.hidden_size, len(head.args.target_layers)
    head.fc.weight = mx.concatenate([mx.eye(size) / count] * count, axis=1)
    if head.args.markov_rank:
        second = head.markov_head.markov_w2
        second.weight = mx.zeros_like(second.weight)


def _leaves(tree: Any) -> list[tuple[str, mx.array]]:
    found: Any = tree_flatten(tree)
    return list(found)
