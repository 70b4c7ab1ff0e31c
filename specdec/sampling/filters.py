"""Filters tokens before sampling: top-p, min-p, XTC and top-k, as mlx-lm does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..sampling_params import SamplingParams


@dataclass(frozen=True)
class Filter:
    """Which tokens may be drawn; :class:`~specdec.SamplingParams` explains it."""

    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()
    top_k: int = 0

    @classmethod
    def of(cls, params: SamplingParams) -> Filter:
        """The filter of a request; ``Filter()`` keeps everything."""
        xtc: dict[str, Any] = {}
        if params.xtc_probability > 0:
            xtc = {
                "xtc_probability": params.xtc_probability,
                "xtc_threshold": params.xtc_threshold,
                "xtc_special_tokens": params.xtc_special_tokens or (),
            }
        return cls(top_p=params.top_p, min_p=params.min_p, top_k=params.top_k, **xtc)

    def apply(self, logits: mx.array, xtc: mx.array | None = None) -> mx.array:
        """Log-probabilities of ``logits`` (..., V), minus infinity for filtered tokens.

        Args:
            xtc: uniform draws, shape (...), that decide where XTC is applied.
        """
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p)
        if self.xtc_probability > 0 and xtc is not None:
            logprobs = self._apply_xtc(logprobs, xtc)
        if 0 < self.top_k < logits.shape[-1]:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs

    def _apply_xtc(self, logprobs: mx.array, draws: mx.array) -> mx.array:
        # mlx-lm's apply_xtc draws from the global random state, once for all rows.
        probabilities = mx.softmax(logprobs, axis=-1)
        above = mx.where(
            probabilities > self.xtc_threshold, probabilities, float("inf")
        )
        top = probabilities > above.min(axis=-1, keepdims=True)
        if self.xtc_special_tokens:
            token = mx.arange(logprobs.shape[-1])
            special = token[:, None] == mx.array(self.xtc_special_tokens)
            top = top & ~special.any(axis=-1)
        here = (draws <= self.xtc_probability)[..., None]
        return mx.where(top & here, -float("inf"), logprobs)
