"""Rounds that were handed to the device and are not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

import mlx.core as mx

from ..request import Request, TokenLogprobs
from ..spec_decode import Proposals
from ..spec_decode.draft_length import Peek
from ..spec_decode.verifier import Decision


@dataclass(frozen=True)
class StepOutput:
    """What a row emitted in one step; ``ended`` by the last of it."""

    request: Request
    token_ids: list[int]
    text: str
    ended: bool
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(cls, request: Request) -> StepOutput:
        """What ``request`` has to show and has not shown yet."""
        token_ids, text, logprobs = request.take()
        ended = request.finish_reason is not None
        return cls(request, token_ids, text, ended, logprobs)


@dataclass(frozen=True)
class InFlight:
    """A round that was handed to the device and not read yet.

    Args:
        rows: those of its slots; ``None`` where there was none.
        first: it is the prompts' last step, which counts as no round.
        decision: what it decided, to be read.
        peeked: what would have been proposed, where the round did not draft.
    """

    rows: tuple[Request | None, ...]
    first: bool
    decision: Decision
    peeked: Proposals | None = None

    @classmethod
    def of(
        cls,
        rows: tuple[Request | None, ...],
        decision: Decision,
        offset: mx.array,
        *,
        first: bool,
        peeked: Proposals | None = None,
    ) -> InFlight:
        """Hand what the host will read to the device, and what the next round needs.

        All at once: every hand-over costs time of its own.

        Args:
            offset: of the target's cache after the round.
        """
        result = decision.result
        after = [result.committed.recent, result.committed.lengths, offset]
        looked_up = [] if peeked is None else [peeked.tokens, peeked.lengths]
        mx.async_eval(result.packed, decision.peaks, after, looked_up)
        return cls(rows, first, decision, peeked)

    @property
    def num_draft_tokens(self) -> int:
        """k of the round."""
        return int(self.decision.result.packed.shape[1]) - 3

    @property
    def running(self) -> list[Request]:
        """Rows that take part and have not ended, as far as the host knows."""
        return [s for s in self.rows if s is not None and s.finish_reason is None]

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.rows))

    def has(self, sequence: Request) -> bool:
        """Whether the row takes part."""
        return id(sequence) in self._ids

    def read(self) -> list[int | None]:
        """Wait for the round and commit it.

        Returns:
            How many tokens each row kept; ``None`` where none was running.
        """
        packed: list[list[int]] = self.decision.result.packed.tolist()  # type: ignore[assignment]
        peaks: list[list[float]] = self.decision.peaks.tolist()  # type: ignore[assignment]
        logprobs = self.decision.logprobs
        reported = [()] * len(packed) if logprobs is None else logprobs.read(self.rows)
        read: list[int | None] = []
        for i, sequence in enumerate(self.rows):
            if sequence is None or sequence.finish_reason is not None:
                read.append(None)
                continue
            kept, limit, *chosen = packed[i]
            read.append(kept)
            valid = next((j for j in range(kept) if not isfinite(peaks[i][j])), kept)
            if self.first:
                sequence.commit(chosen[:valid], reported[i][:valid])
            elif valid:
                drafted = max(limit, 0)
                sequence.commit_round(chosen[:valid], drafted, reported[i][:valid])
            at = len(sequence.tokens)
            if valid < kept:
                what = _COMPLAINTS[str(peaks[i][valid])]
                what = f"its logits {what} at token {at}"
                sequence.fail(self.decision.errors.get(i, what))
            elif i in self.decision.errors:
                sequence.fail(self.decision.errors[i])
        return read

    def peeks(self) -> list[Peek]:
        """Of every drafted row that goes on, its token, and what it could have been."""
        tokens: list[Any] = [None] * len(self.rows)
        if self.peeked is not None:
            tokens = self.peeked.tokens.tolist()  # type: ignore[assignment]
            if self.peeked.lengths is not None:
                lengths: Any = self.peeked.lengths.tolist()
                tokens = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        return [
            Peek(s.number, s.tokens[-1], row)
            for s, row in zip(self.rows, tokens, strict=True)
            if s and s.finish_reason is None and s.tokens and s.drafts
        ]


# By what str() makes of the largest logit.
_COMPLAINTS = {"nan": "hold NaN", "inf": "hold infinity", "-inf": "leave no token"}
