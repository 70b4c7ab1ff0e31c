"""The protocol that every drafter follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import mlx.core as mx

from ..sampling import RowSampling


@dataclass(frozen=True)
class Round:
    """What a drafter is told when a round begins.

    Args:
        num_draft_tokens: k, how many tokens to propose for every row.
        tail: the last two committed tokens of every row, shape (B, 2).
        active: rows still being decoded, shape (B,), boolean; what is proposed
            for the others is ignored.
        sampling, noise: how the target will choose. A drafter that samples with
            this noise is accepted most often; ``noise`` is ``None`` when every
            row is greedy, else of shape (B, k + 1, V).
    """

    num_draft_tokens: int
    tail: mx.array
    active: mx.array
    sampling: RowSampling
    noise: mx.array | None


class DraftRows(Protocol):
    """What a drafter knows of some rows that decode together.

    Once :meth:`prefill` is through, every round calls :meth:`propose` (unless k
    is 0) and :meth:`commit`. Neither may wait for the device.
    """

    def prefill(self) -> Iterator[None]:
        """Take the prompts, yielding behind each chunk of work."""

    def propose(self, round_: Round) -> mx.array:
        """``round_.num_draft_tokens`` tokens for every row, shape (B, k), int32."""

    def commit(self, round_: Round, chosen: mx.array, kept: mx.array) -> None:
        """Learn what the round kept: ``chosen[i, :kept[i]]`` of row ``i``.

        Called for rounds without proposals too (k = 0).
        """

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Committed tokens of the longest and shortest row, as the host knows."""

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows, in that order."""

    def extend(self, other: Self) -> None:
        """Append the rows of ``other``, made by the same drafter and prefilled."""


class Drafter(Protocol):
    """Proposes tokens; whatever it proposes, the output is the target's."""

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        """Begin rows for ``prompts``, each of up to ``max_length`` tokens."""
