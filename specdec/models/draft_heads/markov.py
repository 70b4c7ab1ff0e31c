"""Markov heads of DSpark: a low-rank bias on logits that depends on the tokens before.

With h the state of a slot, e = W1[p] for the token p before it, and rank r:

    vanilla    W2 e
    gated      W2 (sigmoid(gate_proj [h; e]) * e)
    rnn        W2 tanh(o)
               g, c, o = joint_proj [s; e; h], s = 0 before the first slot, and then
               s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ...cuda import markov_walk


class MarkovHead(nn.Module):
    """A bias that depends on the previous token alone.

    Args:
        vocab_size: tokens that may come before.
        draft_vocab_size: tokens that get a bias.
        rank: r.
        size: width of states.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, size: int):
        super().__init__()  # type: ignore[no-untyped-call]
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def __call__(
        self, before: mx.array, h: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """The bias (B, 1, V) of a slot, and what the next slot is given.

        Args:
            before: the token before it, shape (B, 1).
            h: its state, shape (B, 1, D).
            carried: what the slot before it left; ``None``: it is the first.
        """
        mixed, carried = self._mixed(self.markov_w1(before), h, carried)
        bias: mx.array = self.markov_w2(mixed)
        return bias, carried

    @property
    def walk_form(self) -> markov_walk.Form | None:
        """The form of the kernel that walks by this bias; ``None``: there is none."""
        if type(self) is not MarkovHead:
            return None
        return markov_walk.form_of(self.markov_w1, self.markov_w2)

    def walk(self, logits: mx.array, anchor: mx.array) -> mx.array | None:
        """The anchors (B, 1) and the likeliest tokens after them, (B, k + 1), int32.

        Args:
            logits: of slots, without the bias, shape (B, k, V).

        Returns:
            ``None``: the kernel is not used for these.
        """
        form, rows = self.walk_form, logits.shape[0]
        if form is None or rows > markov_walk.MOST_ROWS or logits.dtype != form.dtype:
            return None
        if not markov_walk.proven.reached(form):
            return None
        embedding, weights = self.markov_w1.weight, self.markov_w2.weight
        return markov_walk.walk(logits, embedding, weights, anchor)

    def _mixed(
        self, e: mx.array, h: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        return e, None


class GatedMarkovHead(MarkovHead):
    """A bias from the previous token that the slot's state gates."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, size: int):
        super().__init__(vocab_size, draft_vocab_size, rank, size)
        self.gate_proj = nn.Linear(size + rank, rank)

    def _mixed(
        self, e: mx.array, h: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([h, e], axis=-1)))
        return gate.astype(e.dtype) * e, None


class RecurrentMarkovHead(MarkovHead):
    """A bias from all tokens of the block so far."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, size: int):
        super().__init__(vocab_size, draft_vocab_size, rank, size)
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank)

    def _mixed(
        self, e: mx.array, h: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        state = mx.zeros_like(e) if carried is None else carried
        joint = self.joint_proj(mx.concatenate([state, e, h], axis=-1))
        gate, candidate, out = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(out), gate * state + (1 - gate) * mx.tanh(candidate)


#: By the name in a configuration.
MARKOV_HEADS = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
