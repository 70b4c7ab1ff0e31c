"""The base of all draft heads: embedding, output head, and tokens to propose."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..layers import TargetEnds
from .config import HeadConfig


class DraftHead(nn.Module):
    """A network that drafts from the target's hidden states.

    It keeps keys and values of a *context*: one entry for each committed token of a
    row but the last, made from the target's hidden states there. Like mlx-lm's models,
    it asks for a cache for each layer.

    Args:
        config: the head's configuration.
    """

    #: Whether a context entry also reads the token after its own.
    reads_following = False
    #: Whether it reads the target's states of whole prompts; otherwise only those of
    #: each prompt's last token, and it attends to the target's keys and values.
    reads_prompts = True
    #: Whether one forward gives all proposals; otherwise each takes a step.
    at_once = False
    #: Whether a single token of one row ever attends.
    attends_alone = True
    #: The most tokens that it can propose in a round; ``None``: any number.
    max_proposals: int | None = None
    #: How many of the first tokens are frequent, and the target's ends with an output
    #: head of these alone, which rows use that mostly have such tokens; 0: no row does.
    num_frequent = 0
    frequent: TargetEnds | None = None

    def __init__(self, config: HeadConfig):
        super().__init__()  # type: ignore[no-untyped-call]
        size = config.sizes.hidden_size
        if config.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.owns_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        #: Under the name that mlx-lm's models use.
        self.args = config
        self._ends: TargetEnds | None = None
        # The index of the head's logit for each token of the target; one past the last
        # if the head cannot propose the token.
        self._places: mx.array | None = None

    def bind(self, ends: TargetEnds) -> None:
        """Use the target's embedding and output head where the head has none."""
        vars(self)["_ends"] = ends

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Published arrays, in the form that the head computes with."""
        return weights

    def take_offsets(self, offsets: mx.array, vocab_size: int) -> None:
        """Note which tokens of the target the head can propose.

        Args:
            offsets: the target's id less the head's id of each of the head's tokens,
                shape (draft_vocab_size,): ``d2t``.
            vocab_size: V, the target's number of logits.
        """
        ids = mx.arange(offsets.shape[0], dtype=mx.int32)
        places = mx.full((vocab_size,), offsets.shape[0], mx.int32)
        places[ids + offsets.astype(mx.int32)] = ids
        self._places = places

    @property
    def lenders(self) -> list[nn.Module]:
        """Other models whose weights it computes with."""
        return [] if self._ends is None else [self._ends.model]

    @property
    def ends(self) -> TargetEnds:
        """The target's embedding and output head."""
        ends = self._ends
        assert ends is not None
        return ends

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens of each layer's sliding window; ``None``: it sees everything."""
        return (None,) * self.args.sizes.num_layers

    def make_cache(self) -> list[Any]:
        """One of mlx-lm's caches for each layer."""
        return [KVCache() if w is None else RotatingKVCache(w) for w in self.windows]

    def embed(self, tokens: mx.array, *, raw: bool = False) -> mx.array:
        """Embeddings (B, S, D) of the target's tokens (B, S).

        Args:
            raw: without what the target does to a row of its embedding before its
                first layer, such as Gemma's factor.
        """
        if "embed_tokens" not in self:
            return self.ends.rows(tokens) if raw else self.ends.embed(tokens)
        embedded: mx.array = self.embed_tokens(tokens)
        return embedded

    def logits(self, h: mx.array) -> mx.array:
        """Logits of the head's own tokens from normed states (B, S, D)."""
        if "lm_head" not in self:
            return self.ends.logits(h)
        logits: mx.array = self.lm_head(h)
        return logits

    def as_target(self, logits: mx.array) -> mx.array:
        """Logits of the target's tokens from logits of the head's own tokens.

        Tokens that the head cannot propose have minus infinity.
        """
        if self._places is None:
            return logits
        none = mx.full((*logits.shape[:-1], 1), -mx.inf, logits.dtype)
        return mx.take(mx.concatenate([logits, none], axis=-1), self._places, axis=-1)

    def step_name(self, number: int) -> str:
        """The method that takes step ``number`` of a round, counted from 0."""
        return "step"

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write context entries.

        Args:
            hidden: the target's hidden states, shape (B, S, F): the outputs of the
                layers that the head reads, concatenated.
            following: the token after each, shape (B, S).
            caches: one for each layer.

        Returns:
            A state for each entry, shape (B, S, D): proposing begins with that of a
            row's last entry. ``None``: it begins without one.
        """
        raise NotImplementedError
