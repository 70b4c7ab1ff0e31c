"""What a round keeps: pure functions of proposals and the target's choices."""

from __future__ import annotations

import mlx.core as mx


def count_kept(proposed: mx.array, chosen: mx.array, active: mx.array) -> mx.array:
    """How many of the target's choices each row keeps.

    The target chose ``chosen[:, j]`` for the position of ``proposed[:, j]``, and
    one more behind the last. Proposals count up to the first that differs; the
    choice behind them is kept as the round's extra token.

    Args:
        proposed: draft tokens, shape (B, k), k may be 0.
        chosen: the target's tokens, shape (B, k + 1).
        active: rows that are still being decoded, shape (B,), boolean.

    Returns:
        Shape (B,), int32: accepted draft tokens + 1, or 0 for inactive rows. Row
        ``i`` keeps ``chosen[i, :kept[i]]``.
    """
    agree = (proposed == chosen[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(agree, axis=1).sum(axis=1)
    return mx.where(active, accepted + 1, 0).astype(mx.int32)


def next_tail(tail: mx.array, chosen: mx.array, kept: mx.array) -> mx.array:
    """The last two committed tokens of every row after a round, shape (B, 2).

    Args:
        tail: the last two before it, shape (B, 2).
        chosen, kept: what the round chose and keeps, see :func:`count_kept`.
    """
    row = mx.concatenate([tail, chosen], axis=1)
    return mx.take_along_axis(row, kept[:, None] + mx.arange(2), axis=1)
