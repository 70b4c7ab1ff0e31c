"""How far training is, and what learning rate that means. No mlx here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """What training may take: minutes, or tokens of text.

    Raises:
        ConfigError: neither or both are given, or one is not above 0.
    """

    minutes: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.tokens is None):
            raise ConfigError("give a budget for training: minutes or tokens, not both")
        if not (self.minutes or self.tokens or 0) > 0:
            raise ConfigError(
                "there is no budget for training: give minutes or tokens above 0"
            )

    def share(self, *, seconds: float, tokens: int) -> float:
        """The share of it that is used up, at most 1."""
        if self.minutes is not None:
            return min(seconds / (60 * self.minutes), 1.0)
        assert self.tokens is not None
        return min(tokens / self.tokens, 1.0)


def learning_rate(peak: float, share: float, *, warmup: float) -> float:
    """A linear warm-up over the first ``warmup`` of the budget, then a cosine to 0."""
    if share < warmup:
        return peak * max(share, 0.02 * warmup) / warmup
    done = (share - warmup) / (1 - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
