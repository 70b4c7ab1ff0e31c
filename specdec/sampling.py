"""Choosing tokens: greedy, or by Gumbel noise keyed by request seed and position.

The noise of a token depends on its request's seed and its position alone, never
on batch slot, round, draft or draft length. Target and draft choose with the
same noise, so that sampled output is a function of the request (drafter-invariant
sampling: Daliri, Musco and Suresh, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from .config import SamplingParams


@dataclass(frozen=True)
class Filter:
    """Which tokens may be drawn; see :class:`~specdec.config.SamplingParams`."""

    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    def apply(self, logits: mx.array) -> mx.array:
        """Log-probabilities of ``logits`` (..., V), minus infinity where refused."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p)
        if 0 < self.top_k < logits.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs


@dataclass(frozen=True)
class RowSampling:
    """How each row of a batch samples.

    Args:
        temperature: shape (B,), float32; 0 is greedy.
        seed: shape (B,), uint32.
        greedy: no row samples, so that no noise is needed.
        filters: each filter in use, with the rows that it is for.
    """

    temperature: mx.array
    seed: mx.array
    greedy: bool
    filters: tuple[tuple[Filter, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> RowSampling:
        """The settings of several requests, in row order."""
        rows: dict[Filter, list[int]] = {}
        for row, p in enumerate(params):
            if p.temperature > 0:
                rows.setdefault(Filter(p.top_p, p.min_p, p.top_k), []).append(row)
        rows.pop(Filter(), None)
        return cls(
            temperature=mx.array([p.temperature for p in params], mx.float32),
            seed=mx.array([p.seed % 2**32 for p in params], mx.uint32),
            greedy=all(p.temperature == 0 for p in params),
            filters=tuple((f, tuple(r)) for f, r in rows.items()),
        )

    def filtered(self, logits: mx.array) -> mx.array:
        """``logits`` (B, S, V) with what each row refuses at minus infinity."""
        rows = mx.arange(logits.shape[0])[:, None, None]
        for which, chosen in self.filters:
            its_own = (rows == mx.array(chosen)).any(axis=-1, keepdims=True)
            logits = mx.where(its_own, which.apply(logits), logits)
        return logits

    def noise(
        self, first: mx.array, num_tokens: int, vocab_size: int
    ) -> mx.array | None:
        """The noise of every row's next tokens, or ``None`` when no row samples.

        Args:
            first: position of each row's first token to choose, shape (B,).

        Returns:
            Standard Gumbel noise, shape (B, num_tokens, vocab_size), float32.
        """
        if self.greedy:
            return None
        return gumbel_noise(self.seed, first, num_tokens, vocab_size)


def gumbel_noise(
    seed: mx.array, first: mx.array, num_tokens: int, vocab_size: int
) -> mx.array:
    """Gumbel noise keyed by (seed, position), shape (B, num_tokens, vocab_size).

    Args:
        seed: shape (B,), uint32.
        first: position of each row's first token, shape (B,).
    """
    positions = (first[:, None] + mx.arange(num_tokens)).astype(mx.uint32)
    seeds = mx.broadcast_to(seed[:, None], positions.shape)
    keys = mx.stack([seeds, positions], axis=-1).reshape(-1, 2)
    draw = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))
    return draw(keys).reshape(*positions.shape, vocab_size)


def choose(logits: mx.array, sampling: RowSampling, noise: mx.array | None) -> mx.array:
    """One token for each position: the arg-max, or a draw at the row's temperature.

    ``argmax(logits / temperature + noise)`` is a draw from
    ``softmax(logits / temperature)`` (the Gumbel-max trick). It is computed as
    ``argmax(logits + temperature * noise)``, the same for every temperature above
    0, and at 0 the arg-max of the logits. Tokens that a row's filter refuses are
    never drawn.

    Args:
        logits: shape (B, S, V).
        noise: from :meth:`RowSampling.noise`, shape (B, S, V' >= V).

    Returns:
        Token ids, shape (B, S), int32.
    """
    if noise is not None:
        scaled = sampling.temperature[:, None, None] * noise[..., : logits.shape[-1]]
        logits = sampling.filtered(logits.astype(mx.float32)) + scaled
    return mx.argmax(logits, axis=-1).astype(mx.int32)
