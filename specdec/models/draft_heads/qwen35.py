"""DSpark heads of layers like Qwen3.5's: gated attention, partly rotated heads.

Gains of norms are stored as w - 1, and each head's query beside its gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from .block import BlockConfig, BlockHead, block_values
from .config import Published


@dataclass(frozen=True, kw_only=True)
class Qwen35BlockConfig(BlockConfig):
    """A DSpark head of Qwen3.5 layers."""


class Qwen35BlockHead(BlockHead):
    """A DSpark head of Qwen3.5 layers."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Add 1 to gains, and take queries and gates apart."""
        arrays, sizes = dict(weights), self.args.sizes
        for name, array in weights.items():
            if name.endswith("norm.weight"):
                arrays[name] = array + 1
            if ".q_proj." in name and sizes.gated:
                # Rows of a packed matrix are rows of the matrix, too.
                parts = array.reshape(sizes.num_heads, 2, sizes.head_dim, -1)
                shape = (sizes.num_heads * sizes.head_dim, *array.shape[1:])
                arrays[name] = parts[:, 0].reshape(shape)
                arrays[name.replace("q_proj", "g_proj")] = parts[:, 1].reshape(shape)
        return arrays


def qwen35_block_config(published: Published) -> Qwen35BlockConfig:
    """The configuration of a DSpark head of Qwen3.5 layers."""
    sizes = published.sizes()
    rope = published.layers.get("rope_parameters") or {}
    # Other heads for Qwen3.5 copied this number from the target, and rotate all.
    share = float(rope.get("partial_rotary_factor") or 1.0)
    sizes = replace(
        sizes,
        rope_dims=int(sizes.head_dim * share),
        gated=bool(published.config.get("enable_qwen35_gated_q_proj", True)),
    )
    return Qwen35BlockConfig(**block_values(published, sizes))
