"""Turns logits into tokens, for rows with settings of their own."""

from .grammar_masks import GrammarMasks
from .noise import Draws, gumbel_noise
from .rows import RowSampling, largest

__all__ = ["Draws", "GrammarMasks", "RowSampling", "gumbel_noise", "largest"]
