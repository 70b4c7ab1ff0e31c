"""Decodings of Markov chains: the first tokens of many rows, and how they fit."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np


class FirstTokens:
    """The first tokens of every row, gathered from rounds, for all rows at once.

    Args:
        rows: how many.
        length: tokens that are kept of each.
    """

    def __init__(self, rows: int, length: int = 3):
        self.tokens = np.zeros((rows, length), int)
        self._counts = np.zeros(rows, int)

    @property
    def complete(self) -> bool:
        return int(self._counts.min()) >= self.tokens.shape[1]

    def add(self, chosen: mx.array, kept: mx.array) -> None:
        """The first ``kept`` of the tokens of shape (rows, k + 1) follow."""
        tokens, num_kept = np.array(chosen), np.array(kept)
        for i in range(tokens.shape[1]):
            at = self._counts + i
            (rows,) = np.nonzero((i < num_kept) & (at < self.tokens.shape[1]))
            self.tokens[rows, at[rows]] = tokens[rows, i]
        self._counts += num_kept

    def histogram(self, vocab_size: int) -> np.ndarray:
        """How often every sequence came, in the order of ``itertools.product``."""
        length = self.tokens.shape[1]
        place = vocab_size ** np.arange(length)[::-1]
        index = (self.tokens * place).sum(-1)
        return np.bincount(index, minlength=vocab_size**length)


def three_tokens(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Probability of every sequence of three tokens of a chain that begins with 0."""
    p = np.exp(logits / temperature)
    p /= p.sum(-1, keepdims=True)
    v = range(len(p))
    return np.array([p[0, a] * p[a, b] * p[b, c] for a in v for b in v for c in v])


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The statistic, and what it passes for 1 in 10^6 right implementations.

    Rare cells are taken together, so that every cell expects 5 or more.
    """
    rare = expected < 5
    cells = [*zip(counts[~rare], expected[~rare], strict=True)]
    if rare.any():
        cells.append((counts[rare].sum(), max(expected[rare].sum(), 1e-9)))
    statistic = sum((c - e) ** 2 / e for c, e in cells)
    df = len(cells) - 1
    # Wilson and Hilferty's approximation of the quantile at 1 - 1e-6.
    bound = df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3
    return float(statistic), float(bound)
