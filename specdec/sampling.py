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

from .config import SamplingParams


@dataclass(frozen=True)
class RowSampling:
    """How each row of a batch samples.

    Args:
        temperature: shape (B,), float32; 0 is greedy.
        seed: shape (B,), uint32.
        greedy: no row samples, so that no noise is needed.
    """

    temperature: mx.array
    seed: mx.array
    greedy: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> RowSampling:
        """The settings of several requests, in row order."""
        return cls(
            temperature=mx.array([p.temperature for p in params], mx.float32),
            seed=mx.array([p.seed % 2**32 for p in params], mx.uint32),
            greedy=all(p.temperature == 0 for p in params),
        )

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
    0, and at 0 the arg-max of the logits.

    Args:
        logits: shape (B, S, V).
        noise: from :meth:`RowSampling.noise`, shape (B, S, V' >= V).

    Returns:
        Token ids, shape (B, S), int32.
    """
    if noise is not None:
        scaled = sampling.temperature[:, None, None] * noise[..., : logits.shape[-1]]
        logits = logits.astype(mx.float32) + scaled
    return mx.argmax(logits, axis=-1).astype(mx.int32)
