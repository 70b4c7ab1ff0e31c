"""Logits to tokens, for rows that each have settings of their own."""

from .noise import Draws, gumbel_noise
from .rows import RowSampling

__all__ = ["Draws", "RowSampling", "gumbel_noise"]
