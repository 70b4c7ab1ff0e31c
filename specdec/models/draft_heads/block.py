"""DFlash and DSpark: a block of tokens in one forward, from the target's features.

    context    fc + norm of the target's hidden states, tokens 0 .. p - 1
    block      [ x_p  mask  mask  mask ]   at positions p, p + 1, ...

In each layer, the same projections make keys and values of the context and the block.
A slot of the block sees the whole context and the whole block. Keys and values of the
context stay in the caches; the block's are written after them and taken back.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .config import BlockConfig
from .head import DraftHead
from .layers import HeadLayer


class MarkovHead(nn.Module):
    """A low-rank bias on logits that depends on the previous token."""

    def __init__(self, config: BlockConfig):
        super().__init__()  # type: ignore[no-untyped-call]
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)


class BlockHead(DraftHead):
    """A DFlash or DSpark head."""

    args: BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        sizes = config.sizes
        wide = config.target_size * len(config.target_layers)
        self.fc = nn.Linear(wide, sizes.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.layers = [HeadLayer(sizes) for _ in range(sizes.num_layers)]
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        if config.owns_mask:
            self.mask_embedding = mx.zeros((sizes.hidden_size,))
        if config.markov_rank:
            self.markov_head = MarkovHead(config)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens of each layer's sliding window; ``None``: it sees everything."""
        return self.args.windows

    def context(self, hidden: mx.array) -> mx.array:
        """The input of the context's keys and values, (B, S, D)."""
        made: mx.array = self.hidden_norm(self.fc(hidden))
        return made

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write context entries, see :meth:`DraftHead.absorb`."""
        context = self.context(hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            made = layer.self_attn.keys_values(context, cache.offset)
            cache.update_and_fetch(*made)
        return None

    def inputs(self, anchor: mx.array, width: int) -> mx.array:
        """A block (B, width) that begins with the anchors (B, 1)."""
        masks = mx.full((anchor.shape[0], width - 1), self.args.mask_token, mx.int32)
        return mx.concatenate([anchor, masks], axis=1)

    def states(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Normed states (B, b, D) of a block (B, b), which is written to the caches."""
        scale = self.args.embedding_scale
        x = self.embed(tokens)
        if "mask_embedding" in self:
            masked = (tokens == self.args.mask_token)[..., None]
            x = mx.where(masked, self.mask_embedding.astype(x.dtype), x)
        if scale != 1:
            x = x * scale
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
        found = super().logits(h)
        if self.args.logit_scale != 1:
            found = found * self.args.logit_scale
        if cap := self.args.logit_cap:
            found = mx.tanh(found / cap) * cap
        return found

    def before(self, tokens: mx.array) -> mx.array:
        """The Markov head's embedding of the previous token, (B, S, rank)."""
        found: mx.array = self.markov_head.markov_w1(tokens)
        return found

    def bias(self, before: mx.array) -> mx.array:
        """The Markov head's bias on logits of the head's own tokens."""
        found: mx.array = self.markov_head.markov_w2(before)
        return found

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """Logits (B, S, V) of a block, to plan and check it like a model."""
        logits = self.logits(self.states(inputs, cache))
        if "markov_head" in self:
            logits = logits + self.bias(self.before(inputs))
        return self.as_target(logits)
