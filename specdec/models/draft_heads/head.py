"""What all draft heads share: where embedding, output head and tokens are from."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ..trunk import TargetEnds
from .config import HeadConfig


class DraftHead(nn.Module):
    """A network that drafts from the target's hidden states.

    It keeps keys and values of a *context*: one entry for each committed token of a
    row but the last, made of the target's hidden states there. As mlx-lm's models do,
    it asks for a cache for each layer.

    Args:
        config: of the head.
    """

    #: Whether a context entry reads the token after its own, too.
    reads_following = False

    def __init__(self, config: HeadConfig):
        super().__init__()  # type: ignore[no-untyped-call]
        size = config.sizes.hidden_size
        if config.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.owns_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        #: As mlx-lm's models have it.
        self.args = config
        self._ends: TargetEnds | None = None
        # For each token of the target the draft's logit; one after the last for none.
        self._places: mx.array | None = None

    def bind(self, ends: TargetEnds) -> None:
        """Take from the target what is not stored with the head."""
        vars(self)["_ends"] = ends

    def take_offsets(self, offsets: mx.array, vocab_size: int) -> None:
        """Note which tokens of the target the head can propose.

        Args:
            offsets: what the target's id of each of the head's tokens is more than
                its own, shape (draft_vocab_size,): ``d2t``.
            vocab_size: V, the target's number of logits.
        """
        own = mx.arange(offsets.shape[0], dtype=mx.int32)
        places = mx.full((vocab_size,), offsets.shape[0], mx.int32)
        places[own + offsets.astype(mx.int32)] = own
        self._places = places

    @property
    def lenders(self) -> list[nn.Module]:
        """Models whose weights it computes with, beside its own."""
        return [] if self._ends is None else [self._ends.model]

    @property
    def ends(self) -> TargetEnds:
        """The target's embedding and output head."""
        ends = self._ends
        assert ends is not None
        return ends

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, the tokens of a sliding window; ``None``: everything."""
        return (None,) * self.args.sizes.num_layers

    def make_cache(self) -> list[Any]:
        """One of mlx-lm's caches for each layer."""
        return [KVCache() if w is None else RotatingKVCache(w) for w in self.windows]

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings (B, S, D) of the target's tokens (B, S)."""
        if "embed_tokens" not in self:
            return self.ends.embed(tokens)
        embedded: mx.array = self.embed_tokens(tokens)
        return embedded

    def logits(self, h: mx.array) -> mx.array:
        """Logits of the head's own tokens, of normed states (B, S, D)."""
        if "lm_head" not in self:
            return self.ends.logits(h)
        found: mx.array = self.lm_head(h)
        return found

    def as_target(self, logits: mx.array) -> mx.array:
        """Logits of the head's own tokens as logits of the target's.

        Minus infinity for those that it cannot propose.
        """
        if self._places is None:
            return logits
        none = mx.full((*logits.shape[:-1], 1), -mx.inf, logits.dtype)
        return mx.take(mx.concatenate([logits, none], axis=-1), self._places, axis=-1)

    def absorb(
        self, hidden: mx.array, following: mx.array, caches: list[Any]
    ) -> mx.array | None:
        """Write context entries.

        Args:
            hidden: the target's hidden states, shape (B, S, F): of each layer that the
                head reads, one after the other.
            following: the token after each, shape (B, S).
            caches: one for each layer.

        Returns:
            What proposing begins with where an entry is a row's last, shape (B, S, D);
            ``None``: nothing.
        """
        raise NotImplementedError
