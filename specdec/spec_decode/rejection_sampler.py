"""What a round accepts: pure functions of proposals and the target's choices.

There are three rules. All keep the target's distribution:

coupled
    A draft token is accepted if it equals the target's own choice. Target and draft
    share the noise of each position, so they agree often (Daliri, Musco and
    Suresh 2024). The output does not depend on the draft. See :mod:`.commit`.
rejection
    The ratio test of Leviathan, Kalman and Matias (2023).
block
    Block verification (Sun et al. 2024): the ratio test of whole prefixes, which
    keeps no fewer tokens in expectation.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .commit import Accepted


@dataclass(frozen=True)
class Proposed:
    """The inputs of the ratio rules.

    Args:
        tokens: draft tokens, shape (B, k).
        draft: what each was drawn from, shape (B, k, V).
        target: what the target draws from at each position, and after the last,
            shape (B, k + 1, V).
        limit: see :func:`~specdec.spec_decode.commit.count_kept`.
    """

    tokens: mx.array
    draft: mx.array
    target: mx.array
    limit: mx.array

    def ratios(self) -> mx.array:
        """P(x_i) / Q(x_i) of every draft token, shape (B, k)."""
        index = self.tokens[..., None]
        p = mx.take_along_axis(self.target[:, :-1], index, axis=-1)[..., 0]
        q = mx.take_along_axis(self.draft, index, axis=-1)[..., 0]
        # A token to which the draft gave no probability cannot be its draw: refuse it.
        return mx.where(q > 0, p / mx.maximum(q, 1e-38), 0.0)


@dataclass(frozen=True)
class AcceptedPrefix:
    """What a ratio rule accepts.

    Args:
        count: accepted draft tokens, shape (B,), int32; less than 0 for rows that
            have ended.
        scale: the share of the target's mass that is left after ``count`` tokens,
            shape (B,): p_i of block verification, 1 for the ratio test.
    """

    count: mx.array
    scale: mx.array


def rejection(proposed: Proposed, uniform: mx.array) -> AcceptedPrefix:
    """The ratio test: keep token ``i`` with probability min(1, P / Q), then stop.

    Args:
        uniform: independent draws in [0, 1), shape (B, k).
    """
    passes = (uniform < proposed.ratios()).astype(mx.int32)
    count = mx.minimum(mx.cumprod(passes, axis=1).sum(axis=1), proposed.limit)
    return AcceptedPrefix(count, mx.ones(count.shape))


def block(proposed: Proposed, uniform: mx.array) -> AcceptedPrefix:
    """Block verification: keep the longest prefix that passes its own test.

    With p_0 = 1 and p_i = min(1, p_{i-1} P(x_i) / Q(x_i)), prefix ``i`` passes with
    probability h_i = S_i / (S_i + 1 - p_i), where S_i is the mass of
    max(p_i P - Q, 0) after it, and the longest with p_k.

    Args:
        uniform: as for :func:`rejection`.
    """
    ratios, draft, limit = proposed.ratios(), proposed.draft, proposed.limit
    k = ratios.shape[1]
    p = scale = mx.ones(limit.shape)
    count = mx.minimum(limit, 0)
    for i in range(1, k + 1):
        p = mx.minimum(1.0, p * ratios[:, i - 1])
        h = p
        if i < k:
            left = p[:, None] * proposed.target[:, i] - draft[:, i]
            mass = mx.maximum(left, 0.0).sum(axis=-1)
            rest = mass + 1.0 - p
            # Nothing left and p = 1: both agree on everything after it as well.
            inner = mx.where(rest > 0, mass / mx.maximum(rest, 1e-38), 1.0)
            h = mx.where(limit == i, p, inner)
        passes = (uniform[:, i - 1] < h) & (i <= limit)
        count = mx.where(passes, i, count)
        scale = mx.where(passes, p, scale)
    return AcceptedPrefix(count, scale)


def with_extra_token(
    proposed: Proposed, prefix: AcceptedPrefix, gumbel: mx.array
) -> Accepted:
    """Draw the token after the accepted ones from what the draft left of P.

    From P itself where all that a row may accept was accepted; elsewhere from
    max(scale * P - Q, 0), normalised.

    Args:
        gumbel: independent noise of that position, shape (B, V).
    """
    k = proposed.tokens.shape[1]
    at = mx.clip(prefix.count, 0, k)[:, None]
    here = mx.take_along_axis(proposed.target, at[..., None], axis=1)[:, 0]
    inside = mx.minimum(at, k - 1)[..., None]
    drafted = mx.take_along_axis(proposed.draft, inside, axis=1)[:, 0]
    left = mx.maximum(prefix.scale[:, None] * here - drafted, 0.0)
    whole = at >= proposed.limit[:, None]
    # No mass left: target and draft are equal but for rounding.
    spent = left.sum(axis=-1, keepdims=True) <= 0
    drawn_from = mx.where(whole | spent, here, left)
    extra = mx.argmax(mx.log(drawn_from) + gumbel, axis=-1)
    tokens = mx.pad(proposed.tokens, [(0, 0), (0, 1)])
    chosen = mx.where(mx.arange(k + 1) == at, extra[:, None], tokens)
    return Accepted(chosen.astype(mx.int32), (prefix.count + 1).astype(mx.int32))
