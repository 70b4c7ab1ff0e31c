"""P-EAGLE: EAGLE-3 that proposes all tokens in one forward (arXiv 2602.01469).

After the pairs of a row come pairs that are learned: a hidden state and a token for
what is not known yet. The last real pair and these give one proposal each.

    pairs      (g_0, x_1) (g_1, x_2) (mask) (mask)
    proposes                  x_3      x_4    x_5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .config import Published
from .eagle import EagleConfig, EagleHead, eagle_values


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(EagleConfig):
    """A P-EAGLE head."""

    mask_token: int


class PEagleHead(EagleHead):
    """A P-EAGLE head."""

    args: PEagleConfig
    at_once = True
    #: Whether a proposal depends on those before it.
    in_order = False

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        wide = config.target_size * len(config.target_layers)
        self.mask_hidden = mx.zeros((wide,))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The learned hidden state is stored with axes of size 1."""
        stored = weights.get("mask_hidden")
        if stored is None:
            return weights
        return weights | {"mask_hidden": stored.reshape(-1)}

    def masks(self, rows: int, count: int) -> mx.array:
        """The tokens (B, S) of learned pairs."""
        return mx.full((rows, count), self.args.mask_token, mx.int32)

    def states(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Outputs (B, S, D) for learned pairs of tokens (B, S), which are written."""
        feature = self.feature(self.mask_hidden[None, None])
        shape = (*tokens.shape, feature.shape[-1])
        return self.step(tokens, mx.broadcast_to(feature, shape), caches)


def peagle_config(published: Published) -> PEagleConfig:
    """The configuration of a P-EAGLE head."""
    mask = published.required("mask_token_id", "pard_token", "ptd_token_id")
    return PEagleConfig(
        **eagle_values(published) | {"kind": "P-EAGLE"}, mask_token=mask
    )
