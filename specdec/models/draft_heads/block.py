"""DFlash and DSpark: a block of tokens in one forward, from the target's features.

    context    fc + norm of the target's hidden states, tokens 0 .. p - 1
    block      [ x_p  mask  mask  mask ]   at positions p, p + 1, ...

In each layer, the same projections make keys and values of the context and the block.
A slot of the block sees the whole context and the whole block. Keys and values of the
context stay in the caches; the block's are written after them and taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_not
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...cache.positions import unfused
from ...cuda.fused_linear import stacked
from ...errors import UnsupportedModelError
from ...sampling import largest
from ...utils.data_files import DataError
from ...utils.printable import quoted
from .config import HeadConfig, LayerSizes, Published, spread_layers
from .head import DraftHead
from .layers import HeadAttention, HeadLayer
from .markov import MARKOV_HEADS, MarkovHead

#: Gives the logits (B, 1, V) of the slot after some proposals, each of shape (B, 1).
Walk = Callable[[Sequence[mx.array]], mx.array]


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """A head that proposes a block of tokens in one forward: DFlash, DSpark.

    Args:
        block_size: tokens of a block, the newest committed one (the anchor) included.
        from_anchor: whether each slot, from the anchor's on, predicts the token after
            it; otherwise each slot predicts the token in its own place.
        windows: tokens of each layer's sliding window; ``None``: it sees everything.
        causal: for each layer, whether later slots of the block are hidden from a slot.
        markov_rank: rank of the bias from the previous token; 0: there is no bias.
        markov_kind: a name in :data:`.markov.MARKOV_HEADS`.
        owns_mask: whether the embedding of masks is stored with the head; otherwise
            it is the embedding of ``mask_token``.
        raw_embedding: whether it reads rows of the target's embedding as they are
            stored; otherwise as the target's first layer gets them.
        embedding_scale, logit_scale: factors of embeddings and of logits.
        logit_cap: cap of logits; 0: there is no cap.
    """

    mask_token: int
    block_size: int
    from_anchor: bool = False
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    owns_mask: bool = False
    raw_embedding: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that it can propose in one block."""
        return self.block_size - (not self.from_anchor)


class BlockHead(DraftHead):
    """A DFlash or DSpark head."""

    args: BlockConfig
    at_once = True
    attends_alone = False  # entries are written without, and a block has several tokens

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        self.max_proposals = config.max_draft_tokens
        sizes = config.sizes
        wide = config.target_size * len(config.target_layers)
        self.fc = nn.Linear(wide, sizes.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.layers = [self._layer(config) for _ in range(sizes.num_layers)]
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        if config.owns_mask:
            self.mask_embedding = mx.zeros((sizes.hidden_size,))
        if config.markov_rank:
            kind = MARKOV_HEADS[config.markov_kind]
            self.markov_head: MarkovHead = kind(
                config.vocab_size,
                config.draft_vocab_size,
                config.markov_rank,
                sizes.hidden_size,
            )

    def _layer(self, config: Any) -> HeadLayer:
        """A layer of the head."""
        return HeadLayer(config.sizes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens of each layer's sliding window; ``None``: it sees everything."""
        return self.args.windows

    def context(self, hidden: mx.array) -> mx.array:
        """The input of the context's keys and values, (B, S, D)."""
        context: mx.array = self.hidden_norm(self.fc(hidden))
        return context

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write context entries, see :meth:`DraftHead.absorb`."""
        context = self.context(hidden)
        pairs = self._keys_values(context, caches[0].offset)
        for pair, cache in zip(pairs, caches, strict=True):
            cache.update_and_fetch(*pair)
        return None

    @property
    def of_one_input(self) -> list[tuple[nn.Module, nn.Module]]:
        """Projections of the context: those of keys and of values of each layer."""
        each = [layer.self_attn for layer in self.layers]
        if any(type(a).keys_values is not HeadAttention.keys_values for a in each):
            return []
        return [(a.k_proj, a.v_proj) for a in each]

    def _keys_values(
        self, context: mx.array, offset: mx.array
    ) -> Iterable[tuple[mx.array, mx.array]]:
        """Each layer's keys and values of a context (B, S, D), with few launches."""
        attentions = [layer.self_attn for layer in self.layers]
        every, first, count = stacked(self, context), attentions[0], len(attentions)
        if every is None:
            return [each.keys_values(context, offset) for each in attentions]
        every = every.reshape(*context.shape[:2], count, 2, first.n_kv_heads, -1)
        keys = every[:, :, :, 0]
        if "k_norm" in first:
            # Values are normed in vain: of keys alone, the norm would make a copy.
            ones, weights = self._key_norms()
            normed = mx.fast.rms_norm(every, ones, first.k_norm.eps)
            keys = unfused(mx.multiply, normed[:, :, :, 0], weights)
        keys = keys.flatten(2, 3).transpose(0, 2, 1, 3)
        of_layers = first.rope(keys, offset=offset).reshape(
            keys.shape[0], count, first.n_kv_heads, *keys.shape[2:]
        )
        values = every[:, :, :, 1].transpose(0, 2, 3, 1, 4)
        return [(of_layers[:, i], values[:, i]) for i in range(count)]

    def _key_norms(self) -> tuple[mx.array, mx.array]:
        """A norm's weights that change nothing, (d,); the layers' own, (n, 1, d)."""
        own = [layer.self_attn.k_norm.weight for layer in self.layers]
        known: Any = vars(self).get("_known_norms", ([], None))
        if len(known[0]) != len(own) or any(map(is_not, known[0], own)):
            both = mx.ones_like(own[0]), mx.stack(own)[:, None]
            mx.eval(both)  # a graph is given them; it does not compute them
            known = vars(self)["_known_norms"] = own, both
        weights: tuple[mx.array, mx.array] = known[1]
        return weights

    def inputs(self, anchor: mx.array, width: int) -> mx.array:
        """A block (B, width) that begins with the anchors (B, 1)."""
        is_anchor, masks = _masks(self.args.mask_token, width.bit_length())
        return mx.where(is_anchor[:, :width], anchor, masks[:, :width])

    def slots(self, tokens: mx.array) -> mx.array:
        """What the layers are given for a block (B, b), shape (B, b, D)."""
        scale = self.args.embedding_scale
        x = self.embed(tokens, raw=self.args.raw_embedding)
        if "mask_embedding" in self:
            masked = (tokens == self.args.mask_token)[..., None]
            x = mx.where(masked, self.mask_embedding.astype(x.dtype), x)
        return x if scale == 1 else x * scale

    def states(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Normed states (B, b, D) of a block (B, b), which is written to the caches."""
        x = self.slots(tokens)
        width = tokens.shape[1]
        for layer, cache, causal in zip(
            self.layers, caches, self.args.causal, strict=True
        ):
            mask = cache.make_mask(width, both_ways=not causal)
            x = layer(x, mask, cache)
        normed: mx.array = self.norm(x)
        return normed

    def logits(self, h: mx.array) -> mx.array:
        """Logits of the head's own tokens, without the Markov head's bias."""
        logits = super().logits(h)
        if self.args.logit_scale != 1:
            logits = logits * self.args.logit_scale
        if cap := self.args.logit_cap:
            logits = mx.tanh(logits / cap) * cap
        return logits

    def predict(self, h: mx.array) -> mx.array:
        """Logits of the head's own tokens from normed states."""
        return self.logits(h)

    @property
    def in_order(self) -> bool:
        """Whether a slot's logits depend on the tokens chosen before it."""
        return "markov_head" in self

    @property
    def bias_matrix(self) -> mx.array | None:
        """The matrix (V, r) of a bias by the token before; ``None``: there is none."""
        if "markov_head" not in self:
            return None
        weight: mx.array = self.markov_head.markov_w2.weight
        return weight

    def bias_input(self, before: mx.array, states: mx.array) -> mx.array:
        """What :attr:`bias_matrix` multiplies, (N, r), in float32, to train it.

        A token's gradient is a sum over all its occurrences.

        Args:
            before: the tokens before, shape (N,).
            states: of the slots, shape (N, D).
        """
        embedding: mx.array = self.markov_head.markov_w1.weight
        return embedding.astype(mx.float32)[before]

    def walk(self, states: mx.array, anchor: mx.array) -> Walk:
        """Logits of the target's tokens, slot after slot.

        Args:
            states: normed states of the slots that predict, shape (B, k, D).
            anchor: the token before the first, shape (B, 1).

        Returns:
            A function to call once for each slot, in order.
        """
        logits, carried = self.logits(states), None

        def after(proposed: Sequence[mx.array]) -> mx.array:
            nonlocal carried
            j = len(proposed)
            before, here = proposed[-1] if proposed else anchor, slice(j, j + 1)
            biased = logits[:, here]
            if "markov_head" in self:
                bias, carried = self.markov_head(before, states[:, here], carried)
                biased = biased + bias
            return self.as_target(biased)

        return after

    def greedy(
        self, tokens: mx.array, caches: list[Any], k: int, vocab_size: int
    ) -> mx.array:
        """The anchors and the likeliest ``k`` tokens after them, (B, k + 1), int32.

        Args:
            tokens: a block (B, b), which is written to the caches.
            vocab_size: the target's number of logits.
        """
        first, anchor = int(not self.args.from_anchor), tokens[:, :1]
        states = self.states(tokens, caches)[:, first : first + k]
        if not self.in_order:
            logits = self.as_target(self.predict(states))[..., :vocab_size]
            return mx.concatenate([anchor, largest(logits)], axis=1)
        every = self._places is None and self.args.vocab_size == vocab_size
        if every and "markov_head" in self:
            walked = self.markov_head.walk(self.logits(states), anchor)
            if walked is not None:
                return walked
        after, proposed = self.walk(states, anchor), list[mx.array]()
        for _ in range(k):
            proposed.append(largest(after(proposed)[..., :vocab_size]))
        return mx.concatenate([anchor, *proposed], axis=1)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (B, S, V) of a block, to plan and check it like a model."""
        states, width = self.states(inputs, cache), inputs.shape[1]
        each = [inputs[:, i : i + 1] for i in range(width)]
        after = self.walk(states, each[0])
        return mx.concatenate([after(each[1 : i + 1]) for i in range(width)], axis=1)


@lru_cache
def _masks(mask_token: int, bits: int) -> tuple[mx.array, mx.array]:
    """Which slot of a block is the anchor's, and masks; at least ``2**bits`` slots."""
    slots = mx.arange(2 ** max(bits, 6))[None]  # small arrays stay in the host's memory
    both = slots == 0, mx.full(slots.shape, mask_token, mx.int32)
    mx.eval(both)
    return both


def block_config(published: Published) -> BlockConfig:
    """The configuration of a DFlash or DSpark head."""
    return BlockConfig(**block_values(published, published.sizes()))


def block_values(published: Published, sizes: LayerSizes) -> dict[str, Any]:
    """The arguments of :class:`BlockConfig`."""
    value = published.value
    if value("log_snr_conditioning"):
        raise UnsupportedModelError(
            f"{published.source} adds an embedding of noise to its slots "
            "(log_snr_conditioning), which is not supported: take another draft"
        )
    block_size: int = published.required("block_size")
    if block_size < 2:
        raise DataError(f"block_size is {block_size}: it must be 2 or more")
    rank, kind = _markov(published)
    windows = published.windows(sizes.num_layers)
    return {
        **published.common(sizes),
        "kind": "DSpark" if rank else "DFlash",
        "target_layers": _target_layers(published, sizes.num_layers),
        "block_size": block_size,
        "mask_token": published.required("mask_token_id"),
        "from_anchor": _from_anchor(published, block_size),
        "windows": windows,
        "causal": _causal(published, windows),
        "markov_rank": rank,
        "markov_kind": kind,
        "owns_mask": "mask_embedding" in published.names,
        "embedding_scale": float(value("input_embedding_scale") or 1.0),
        "logit_scale": float(value("output_multiplier") or 1.0),
        "logit_cap": float(value("final_logit_softcapping") or 0.0),
    }


def _target_layers(published: Published, num_layers: int) -> tuple[int, ...]:
    value = published.value
    if published.speculators and value("aux_hidden_state_layer_ids"):
        # These numbers count the inputs of layers, not their outputs.
        return tuple(i - 1 for i in value("aux_hidden_state_layer_ids"))
    if value("target_layer_ids") is None and value("num_target_layers"):
        return spread_layers(value("num_target_layers"), num_layers)
    return tuple(published.required("target_layer_ids"))


def _from_anchor(published: Published, block_size: int) -> bool:
    """Whether the anchor's slot predicts the first token.

    What the configuration says decides. Speculators' older ones say how many tokens a
    block proposes instead. All heads of DSpark's own format predict from the anchor,
    also those whose rank is 0.
    """
    setting = published.value("sample_from_anchor", "query_zero_predicts_next")
    if setting is not None:
        return bool(setting)
    if not published.speculators:
        return "DSpark" in published.architecture
    methods = (published.config.get("speculators_config") or {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    width = first.get("speculative_tokens") if isinstance(first, dict) else None
    return bool(width == block_size)


def _markov(published: Published) -> tuple[int, str]:
    """Rank and kind of the Markov head; the rank is 0 if there is none."""
    if "markov_head.markov_w1.weight" not in published.names:
        return 0, "vanilla"
    kind = str(published.value("markov_head_type") or "vanilla").lower()
    if kind not in MARKOV_HEADS:
        raise UnsupportedModelError(
            f"{published.source} has a Markov head of kind {quoted(kind)}: "
            f"{', '.join(MARKOV_HEADS)} are supported"
        )
    rank = published.value("markov_rank")
    if not rank:
        raise DataError("markov_rank is missing")
    return int(rank), kind


def _causal(published: Published, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    setting = published.value("is_causal", "causal", "dflash_query_causal")
    if published.speculators and setting is None:
        setting = not published.config.get("sliding_window_non_causal", True)
        # Layers without a window are never causal.
        return tuple(setting and window is not None for window in windows)
    if setting is None:
        return tuple(window is not None for window in windows)
    return (bool(setting),) * len(windows)
