"""Rounds that were dispatched but not read yet, and the output of rows once read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Any

import mlx.core as mx

from ..request import Request, TokenLogprobs
from ..spec_decode import Proposals
from ..spec_decode.draft_length import Peek
from ..spec_decode.verifier import Decision


@dataclass(frozen=True)
class StepOutput:
    """A row's output in one step; ``ended`` is set if these were its last tokens."""

    request: Request
    token_ids: list[int]
    text: str
    ended: bool
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(cls, request: Request) -> StepOutput:
        """The output that ``request`` has generated and not emitted yet."""
        token_ids, text, logprobs = request.take()
        ended = request.finish_reason is not None
        return cls(request, token_ids, text, ended, logprobs)


@dataclass(frozen=True)
class InFlight:
    """A round that was dispatched and not read yet.

    Args:
        rows: the request in each slot; ``None`` where the slot was idle.
        first: the round is the last step of the prompts, and is not counted as a round.
        decision: the round's decision, on the device.
        peeked: the tokens that a draft would have proposed, if the round did not draft
            and peeked.

        checks: a row whose logits are not finite keeps nothing.

    Attributes:
        spoiled: once read, the slots of such rows, and what is wrong.
    """

    rows: tuple[Request | None, ...]
    first: bool
    decision: Decision
    peeked: Proposals | None = None
    checks: bool = False
    spoiled: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: tuple[Request | None, ...],
        decision: Decision,
        offset: mx.array,
        *,
        first: bool,
        checks: bool = False,
        peeked: Proposals | None = None,
    ) -> InFlight:
        """Start computing the arrays that the host will read or the next round needs.

        One call starts all of them, since each call takes time.

        Args:
            offset: the offset of the target's cache after the round.
        """
        committed = decision.committed
        after = [committed.recent, committed.lengths, offset]
        looked_up = [] if peeked is None else [peeked.tokens, peeked.lengths]
        mx.async_eval(decision.packed, decision.peaks, after, looked_up)
        return cls(rows, first, decision, peeked, checks)

    @property
    def num_draft_tokens(self) -> int:
        """k of the round."""
        return int(self.decision.packed.shape[1]) - 3

    @property
    def running(self) -> list[Request]:
        """The round's rows that have not ended, as far as the host knows."""
        return [s for s in self.rows if s is not None and s.finish_reason is None]

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.rows))

    def has(self, request: Request) -> bool:
        """Whether the row takes part."""
        return id(request) in self._ids

    def read(self) -> list[int | None]:
        """Wait for the round and give each request its tokens.

        Returns:
            How many tokens each slot kept; ``None`` where no row was running, or where
            a row kept nothing since its logits are not finite.
        """
        packed: list[list[int]] = self.decision.packed.tolist()  # type: ignore[assignment]
        peaks: list[list[float]] = self.decision.peaks.tolist()  # type: ignore[assignment]
        logprobs = self.decision.logprobs
        reported = [()] * len(packed) if logprobs is None else logprobs.read(self.rows)
        read: list[int | None] = []
        for i, request in enumerate(self.rows):
            if request is None or request.finish_reason is not None:
                read.append(None)
                continue
            kept, limit, *chosen = packed[i]
            if limit < 0:
                worst = next(p for p in peaks[i] if not p < inf)
                self.spoiled[i] = self._complaint(worst, len(request.tokens))
                read.append(None)
                continue
            read.append(kept)
            valid = next((j for j in range(kept) if not isfinite(peaks[i][j])), kept)
            if self.first:
                request.commit(chosen[:valid], reported[i][:valid])
            elif valid:
                drafted = max(limit, 0)
                request.commit_round(chosen[:valid], drafted, reported[i][:valid])
            at = len(request.tokens)
            if valid < kept:
                what = self._complaint(peaks[i][valid], at)
                request.fail(self.decision.errors.get(i, what))
            elif i in self.decision.errors:
                request.fail(self.decision.errors[i])
        return read

    def _complaint(self, peak: float, at: int) -> str:
        return f"its logits {_COMPLAINTS[str(peak)]} at token {at}"

    def peeks(self) -> list[Peek]:
        """For each drafted row that goes on: its token, and the tokens peeked at."""
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


# Messages by str() of the largest logit.
_COMPLAINTS = {"nan": "hold NaN", "inf": "hold infinity", "-inf": "leave no token"}
