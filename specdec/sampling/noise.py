"""Random draws keyed by request seed and position, never by batch slot or round.

Target and draft choose with the same draws, so that sampled output is a function
of the request (drafter-invariant sampling: Daliri, Musco and Suresh, 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

# A position's draws for different uses have different keys: the position's own key, or
# keys split off it.
NUM_KEYS = 4
_ROUND, XTC, ACCEPT, RESIDUAL = range(NUM_KEYS)
# Far below -3.1, the noise of the smallest uniform draw above 0 in float32.
LOWEST_GUMBEL = -100.0


@dataclass(frozen=True)
class Draws:
    """The random draws of a round's positions.

    Args:
        positions: positions of the tokens to choose, shape (B, S), int32.
        gumbel: standard Gumbel noise, shape (B, S, V), float32; ``None`` when no
            row samples.
        xtc: uniform draws in [0, 1), shape (B, S), that decide where XTC is
            applied; ``None`` when no row uses it.
    """

    positions: mx.array
    gumbel: mx.array | None = None
    xtc: mx.array | None = None

    def at(self, j: int) -> Draws:
        """The draws of the ``j``-th position alone."""
        return self._part((slice(None), slice(j, j + 1)))

    def first(self, k: int) -> Draws:
        """The draws of the first ``k`` positions."""
        return self._part((slice(None), slice(k)))

    def row(self, i: int) -> Draws:
        """The draws of row ``i`` alone."""
        return self._part((slice(i, i + 1),))

    def _part(self, which: tuple[slice, ...]) -> Draws:
        return Draws(
            self.positions[which],
            None if self.gumbel is None else self.gumbel[which],
            None if self.xtc is None else self.xtc[which],
        )


def _keyed(
    seed: mx.array, positions: mx.array, draw: Callable[[mx.array], mx.array]
) -> mx.array:
    """``draw(key)`` for every (seed, position): shape (B, S, ...)."""
    seeds = mx.broadcast_to(seed[:, None], positions.shape)
    keys = mx.stack([seeds, positions.astype(mx.uint32)], axis=-1).reshape(-1, 2)
    drawn: mx.array = mx.vmap(draw)(keys)
    return drawn.reshape(*positions.shape, *drawn.shape[1:])


def gumbel_noise(
    seed: mx.array, positions: mx.array, vocab_size: int, *, use: int = 0
) -> mx.array:
    """Gumbel noise keyed by (seed, position), shape (B, S, vocab_size), float32.

    Args:
        seed: shape (B,), uint32.
        positions: shape (B, S).
        use: 0 for the noise that target and draft share, or one of this module's
            constants for noise that is independent of it.
    """

    def draw(key: mx.array) -> mx.array:
        if use:
            key = mx.random.split(key, NUM_KEYS)[use]
        return mx.random.gumbel((vocab_size,), key=key)

    # A uniform draw of exactly 0 (one in 2**32) gives minus infinity, which is NaN
    # times a temperature of 0.
    return mx.maximum(_keyed(seed, positions, draw), LOWEST_GUMBEL)


def uniform_draws(seed: mx.array, positions: mx.array, *, use: int) -> mx.array:
    """Uniform draws in [0, 1) keyed by (seed, position) and use, shape (B, S)."""

    def draw(key: mx.array) -> mx.array:
        return mx.random.uniform(key=mx.random.split(key, NUM_KEYS)[use])

    return _keyed(seed, positions, draw)


def round_draws(
    seed: mx.array, first: mx.array, num_tokens: int, vocab_size: int
) -> tuple[mx.array, mx.array]:
    """Draws that no other round uses, for decisions about whole prefixes.

    Such a decision depends on the draws of all of a round's positions, also of those
    after its last kept token. If the next round had the same draws at these positions,
    they would be biased.

    Args:
        seed: shape (B,), uint32.
        first: position of the round's first token, which differs from round to round,
            shape (B,).

    Returns:
        Gumbel noise, shape (B, num_tokens, vocab_size), and uniform draws, shape
        (B, num_tokens): functions of seed, ``first`` and the column.
    """

    def keys(use: int) -> mx.array:
        base = _keyed(seed, first[:, None], lambda k: mx.random.split(k, NUM_KEYS)[use])
        column = mx.arange(num_tokens, dtype=mx.uint32)[:, None]
        return (base + mx.pad(column, [(0, 0), (1, 0)])).reshape(-1, 2)

    shape = (len(seed), num_tokens)
    gumbel = mx.vmap(lambda k: mx.random.gumbel((vocab_size,), key=k))(keys(_ROUND))
    uniform = mx.vmap(lambda k: mx.random.uniform(key=k))(keys(ACCEPT))
    gumbel = mx.maximum(gumbel, LOWEST_GUMBEL)
    return gumbel.reshape(*shape, vocab_size), uniform.reshape(shape)
