"""Adjusts logits before a token is chosen: bias, penalties, min_tokens.

Definitions and order are those of ``mlx_lm.sample_utils.make_logits_processors``. They
are computed for all rows at once, from tokens that never leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import mlx.core as mx

from ..sampling_params import SamplingParams


@dataclass(frozen=True)
class Penalty:
    """One kind of penalty, for all rows.

    Args:
        strength: shape (B,).
        context_size: how many of the newest tokens count, shape (B,).
    """

    strength: mx.array
    context_size: mx.array

    @classmethod
    def of(
        cls, rows: Sequence[tuple[float | None, int]], none: float
    ) -> Penalty | None:
        """The penalty of each row; ``None`` if no row has one."""
        # MLX takes no whole numbers beyond 64 bits.
        strengths = [none if s is None else float(s) for s, _ in rows]
        if all(s == none for s in strengths):
            return None
        return cls(mx.array(strengths, mx.float32), mx.array([n for _, n in rows]))

    def counts(self, windows: mx.array, vocab_size: int) -> mx.array:
        """How often each token occurs in each window, shape (B, S, V).

        Args:
            windows: the newest tokens before each position, shape (B, S, W); negative
                where there is none.
        """
        num_rows, num_tokens, width = windows.shape
        newest = mx.arange(width) >= width - self.context_size[:, None, None]
        counted = newest & (windows >= 0) & (windows < vocab_size)
        # Tokens that do not count go to an extra column after the last.
        tokens = mx.where(counted, windows, vocab_size)
        row = mx.arange(num_rows)[:, None, None]
        position = mx.arange(num_tokens)[:, None]
        zeros = mx.zeros((num_rows, num_tokens, vocab_size + 1))
        return zeros.at[row, position, tokens].add(1)[..., :vocab_size]

    def per_row(self, dtype: mx.Dtype) -> mx.array:
        """The strengths, shape (B, 1, 1)."""
        return self.strength[:, None, None].astype(dtype)


@dataclass(frozen=True)
class Adjustments:
    """How the logits of each row are changed.

    Args:
        bias: shape (B, 1, V), or ``None``.
        early: tokens that must not end a row yet, shape (B, 1, V), boolean.
        first_end: the first position at which these tokens may end a row, shape (B, 1).
    """

    bias: mx.array | None
    early: mx.array | None
    first_end: mx.array
    repetition: Penalty | None
    presence: Penalty | None
    frequency: Penalty | None

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        prompt_lengths: Sequence[int],
        end_tokens: Sequence[AbstractSet[int]],
        vocab_size: int,
    ) -> Adjustments | None:
        """The adjustments of several requests; ``None`` if none has any."""
        biases = [p.logit_bias or {} for p in params]
        ends = [
            e if p.min_tokens else frozenset[int]()
            for p, e in zip(params, end_tokens, strict=True)
        ]
        first_end = [
            n + p.min_tokens for p, n in zip(params, prompt_lengths, strict=True)
        ]
        adjustments = cls(
            bias=_scattered(biases, vocab_size) if any(biases) else None,
            early=(
                _scattered([dict.fromkeys(e, 1.0) for e in ends], vocab_size) > 0
                if any(ends)
                else None
            ),
            first_end=mx.array(first_end)[:, None],
            repetition=Penalty.of(
                [(p.repetition_penalty, p.repetition_context_size) for p in params], 1.0
            ),
            presence=Penalty.of(
                [(p.presence_penalty, p.presence_context_size) for p in params], 0.0
            ),
            frequency=Penalty.of(
                [(p.frequency_penalty, p.frequency_context_size) for p in params], 0.0
            ),
        )
        used = (
            adjustments.bias,
            adjustments.early,
            adjustments.repetition,
            adjustments.presence,
            adjustments.frequency,
        )
        return None if all(part is None for part in used) else adjustments

    def apply(
        self, logits: mx.array, windows: mx.array, positions: mx.array
    ) -> mx.array:
        """The adjusted logits, shape (B, S, V), in the type of ``logits``.

        Args:
            logits: shape (B, S, V).
            windows: the newest tokens before each position, shape (B, S, W).
            positions: shape (B, S).
        """
        vocab_size, dtype = logits.shape[-1], logits.dtype
        if self.bias is not None:
            logits = logits + self.bias[..., :vocab_size].astype(dtype)
        if (penalty := self.repetition) is not None:
            strength = penalty.per_row(dtype)
            scaled = mx.where(logits < 0, logits * strength, logits / strength)
            occurs = penalty.counts(windows, vocab_size) > 0
            logits = mx.where(occurs, scaled, logits)
        if (penalty := self.presence) is not None:
            occurs = penalty.counts(windows, vocab_size) > 0
            logits = mx.where(occurs, logits - penalty.per_row(dtype), logits)
        if (penalty := self.frequency) is not None:
            counts = penalty.counts(windows, vocab_size).astype(dtype)
            logits = logits - counts * penalty.per_row(dtype)
        if self.early is not None:
            too_early = (positions < self.first_end)[..., None]
            refused = too_early & self.early[..., :vocab_size]
            logits = mx.where(refused, -float("inf"), logits)
        return logits


def _scattered(rows: Sequence[Mapping[int, float]], vocab_size: int) -> mx.array:
    """A (B, 1, V) array that holds each row's values, 0 elsewhere."""
    dense = mx.zeros((len(rows), 1, vocab_size))
    at = [
        (i, token, value)
        for i, row in enumerate(rows)
        for token, value in row.items()
        if token < vocab_size  # a tokenizer may know more than the model
    ]
    if not at:
        return dense
    index = mx.array([i for i, _, _ in at]), 0, mx.array([t for _, t, _ in at])
    dense[index] = mx.array([float(v) for _, _, v in at])
    return dense
