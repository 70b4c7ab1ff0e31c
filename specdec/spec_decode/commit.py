"""What a round accepts if equality decides, and what follows from any decision.

Each row's newest tokens follow, and what the host reads. MLX's operations compute it,
or one CUDA kernel in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import mlx.core as mx

from ..backend import defaults
from ..cache import put_rows
from ..cuda import commit_kernel
from ..models.kernel_proofs import cached_proofs


@dataclass(frozen=True)
class Accepted:
    """What a round keeps: row ``i`` commits ``chosen[i, :kept[i]]``.

    Args:
        chosen: shape (B, k + 1), int32. What follows a row's kept tokens means
            nothing.
        kept: the number of accepted draft tokens plus 1 for the extra token; 0 for
            rows that have ended; shape (B,), int32.
        hidden: the target's hidden states at the round's inputs (the last committed
            token, then the proposals), shape (B, k + 1, D): the outputs of the layers
            that the drafter asked for, before any norm, joined along the last axis.
            ``None`` if it asked for none.
        rejected: how many of the round's inputs are taken back, shape (B,), int32;
            ``None`` computes it.
    """

    chosen: mx.array
    kept: mx.array
    hidden: mx.array | None = None
    rejected: mx.array = field(default=None, kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.rejected is None:
            object.__setattr__(self, "rejected", self.chosen.shape[1] - self.kept)


@dataclass(frozen=True)
class Committed:
    """Each row's newest tokens, and how many it has; on the device.

    Args:
        recent: the newest tokens, the last one last, shape (B, W), int32; -1 in
            front of a row that has fewer. For rows that have ended they mean nothing.
        lengths: tokens of every row, the prompt included, shape (B,), int32.
    """

    recent: mx.array
    lengths: mx.array

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], width: int) -> Committed:
        """Prompts as committed tokens, with the newest ``width`` of each."""
        newest = [list(p[-width:]) for p in prompts]
        recent = [[-1] * (width - len(p)) + p for p in newest]
        return cls(
            mx.array(recent, mx.int32), mx.array([len(p) for p in prompts], mx.int32)
        )

    def placed(self, rows: Sequence[int], other: Committed) -> Committed:
        """A copy with the first rows of ``other`` in the given rows."""
        width = max(self.recent.shape[1], other.recent.shape[1])
        return Committed(
            put_rows(self.within(width).recent, rows, other.within(width).recent),
            put_rows(self.lengths, rows, other.lengths),
        )

    def joined(self, other: Committed) -> Committed:
        """These rows, then those of ``other``."""
        width = max(self.recent.shape[1], other.recent.shape[1])
        return Committed(
            mx.concatenate([self.within(width).recent, other.within(width).recent]),
            mx.concatenate([self.lengths, other.lengths]),
        )

    def only(self, rows: Sequence[int]) -> Committed:
        """The given rows, in that order."""
        which = mx.array(list(rows), mx.int32)
        return Committed(self.recent[which], self.lengths[which])

    def within(self, width: int) -> Committed:
        """A copy with the newest ``width`` tokens of each row."""
        missing = width - self.recent.shape[1]
        if not missing:
            return self
        recent = self.recent[:, -width:]
        if missing > 0:
            recent = mx.pad(recent, [(0, 0), (missing, 0)], constant_values=-1)
        return Committed(recent, self.lengths)


def count_kept(proposed: mx.array, chosen: mx.array, limit: mx.array) -> mx.array:
    """How many of the target's choices each row keeps, when equality decides.

    The target chose ``chosen[:, j]`` for the position of ``proposed[:, j]``, and
    one more after the last. Proposals count up to the first that differs; the
    choice after them is kept as the round's extra token.

    Args:
        proposed: draft tokens, shape (B, k), k may be 0.
        chosen: the target's tokens, shape (B, k + 1).
        limit: the most draft tokens that each row may accept, shape (B,), int32;
            negative for rows that have ended, which keep nothing.

    Returns:
        Shape (B,), int32: accepted draft tokens + 1, or 0.
    """
    if not proposed.shape[1]:
        return limit + 1
    agree = (proposed == chosen[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(agree, axis=1).sum(axis=1)
    return (mx.minimum(accepted, limit) + 1).astype(mx.int32)


def next_recent(recent: mx.array, chosen: mx.array, kept: mx.array) -> mx.array:
    """The newest committed tokens of every row after a round, shape (B, W).

    Args:
        recent: the newest tokens before the round, shape (B, W).
        chosen, kept: what the round commits, see :class:`Accepted`.
    """
    row = mx.concatenate([recent, chosen], axis=1)
    index = kept[:, None] + mx.arange(recent.shape[1])
    return mx.take_along_axis(row, index, axis=1)


#: :func:`commit`, or a kernel that takes and returns the same arrays.
Compute = Callable[
    [
        mx.array,
        mx.array,
        mx.array,
        mx.array | None,
        mx.array,
        mx.array,
        mx.array | None,
    ],
    tuple[mx.array, ...],
]


def committer() -> Compute:
    """The kernel if the backend uses it and it is proven; else :func:`commit`."""
    if not defaults().kernels:
        return commit
    with cached_proofs():
        proven = commit_kernel.proven(commit)
    return commit_kernel.commit if proven else commit


def commit(
    inputs: mx.array,
    chosen: mx.array,
    limit: mx.array,
    meant: mx.array | None,
    recent: mx.array,
    lengths: mx.array,
    peaks: mx.array | None = None,
) -> tuple[mx.array, ...]:
    """Compute what follows from a round, by MLX's operations.

    Args:
        inputs: the target's inputs: the newest token, then the draft tokens, shape
            (B, k + 1).
        chosen: the target's tokens, shape (B, k + 1), int32.
        limit: see :func:`count_kept`.
        meant: how many draft tokens are real proposals, shape (B,); ``None``: all.
        recent, lengths: of :class:`Committed`, before the round.
        peaks: a number for each of ``chosen``; a row in which one is NaN or infinity
            keeps nothing. ``None``: all are sound.

    Returns:
        How many tokens each row keeps, shape (B,), int32; then what :func:`after`
        returns.
    """
    if meant is not None:
        limit = mx.minimum(limit, meant)
    if peaks is not None:
        limit = mx.where((peaks < inf).all(axis=-1), limit, -1)
    kept = count_kept(inputs[:, 1:], chosen, limit)
    return kept, *after(chosen, kept, limit, recent, lengths)


def after(
    chosen: mx.array,
    kept: mx.array,
    limit: mx.array,
    recent: mx.array,
    lengths: mx.array,
) -> tuple[mx.array, ...]:
    """What follows from what a round accepts.

    Args:
        chosen, kept: see :class:`Accepted`.
        limit: the most draft tokens that each row could accept, of those proposed for
            it; -1 if it had ended; shape (B,), int32.
        recent, lengths: of :class:`Committed`, before the round.

    Returns:
        ``limit``; how many of the round's inputs are taken back, shape (B,), int32; for
        the host, shape (B, k + 3), int32: ``kept``, ``limit`` and ``chosen``; and
        ``recent`` and ``lengths`` after the round.
    """
    rejected = chosen.shape[1] - kept
    packed = mx.concatenate([kept[:, None], limit[:, None], chosen], axis=1)
    if chosen.shape[1] > 1:
        recent = next_recent(recent, chosen, kept)
    else:
        # Plain rounds: tokens of rows that have ended are never read, and keeping them
        # would make what follows a third slower.
        recent = mx.concatenate([recent[:, 1:], chosen], axis=1)
    return limit, rejected, packed, recent, lengths + kept
