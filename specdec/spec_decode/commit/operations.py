"""What follows from a round, by MLX's operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..rejection_sampler import Verdict, count_kept, next_recent
from .committed import Committed


@dataclass(frozen=True)
class Settled:
    """A round's verdict, and what follows from it; on the device.

    Args:
        verdict: what every row commits.
        limit: most draft tokens that each row could accept, of those that were meant;
            -1 where it had ended, shape (B,), int32.
        rejected: inputs of the round that do not stand, shape (B,), int32.
        packed: for the host, shape (B, k + 3), int32: how many tokens each row keeps,
            ``limit``, and the k + 1 that were chosen.
        committed: what is committed behind the round.
    """

    verdict: Verdict
    limit: mx.array
    rejected: mx.array
    packed: mx.array
    committed: Committed

    @classmethod
    def of(cls, verdict: Verdict, limit: mx.array, committed: Committed) -> Settled:
        """What follows from ``verdict``.

        Args:
            limit: as above.
            committed: before the round.
        """
        chosen, kept = verdict.chosen, verdict.kept
        return cls(
            verdict,
            limit,
            rejected=chosen.shape[1] - kept,
            packed=mx.concatenate([kept[:, None], limit[:, None], chosen], axis=1),
            committed=Committed(
                _recent(committed.recent, chosen, kept), committed.lengths + kept
            ),
        )


def _recent(recent: mx.array, chosen: mx.array, kept: mx.array) -> mx.array:
    """The newest tokens of every row behind a round."""
    if chosen.shape[1] > 1:
        return next_recent(recent, chosen, kept)
    # Plain rounds: those of a row that has ended are never read, and to leave them as
    # they were takes a third more of the time of everything that follows.
    return mx.concatenate([recent[:, 1:], chosen], axis=1)


class Settler(Protocol):
    """A module that settles rounds, by operations or by a kernel."""

    def settle(
        self,
        inputs: mx.array,
        chosen: mx.array,
        limit: mx.array,
        meant: mx.array | None,
        committed: Committed,
    ) -> Settled:
        """See :func:`settle`."""


def settle(
    inputs: mx.array,
    chosen: mx.array,
    limit: mx.array,
    meant: mx.array | None,
    committed: Committed,
) -> Settled:
    """What follows from a round where equality decides.

    Args:
        inputs: what the target was given: the newest token, then the draft tokens,
            shape (B, k + 1).
        chosen: the target's tokens, shape (B, k + 1), int32.
        limit: see :func:`~specdec.spec_decode.rejection_sampler.count_kept`.
        meant: draft tokens that each row's drafter means, shape (B,); ``None``: all.
        committed: before the round.
    """
    if meant is not None:
        limit = mx.minimum(limit, meant)
    kept = count_kept(inputs[:, 1:], chosen, limit)
    return Settled.of(Verdict(chosen, kept), limit, committed)
