"""A request on its way through the engine, and what comes out. No mlx here."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal, Self

from .config import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt as token ids, with how to decode it.

    ``index`` is its place in the caller's list; results come back in that order.
    """

    index: int
    prompt: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams


@dataclass
class Sequence:
    """A request and the tokens generated for it so far."""

    request: Request
    eos_token_ids: AbstractSet[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def remaining(self) -> int:
        """Tokens that ``max_tokens`` still allows."""
        return self.request.params.max_tokens - len(self.tokens)

    def commit(self, tokens: AbstractSequence[int]) -> list[int]:
        """Append ``tokens`` up to the end of the sequence; return those emitted.

        Stops behind ``max_tokens`` and before an end-of-sequence token, which
        ends the sequence and is not emitted. A finished sequence takes nothing.
        """
        emitted: list[int] = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            if token in self.eos_token_ids:
                self.finish_reason = "stop"
                break
            emitted.append(token)
            self.tokens.append(token)
            if self.remaining == 0:
                self.finish_reason = "length"
        return emitted

    def commit_round(
        self, tokens: AbstractSequence[int], num_draft_tokens: int
    ) -> list[int]:
        """Commit what one round kept: accepted draft tokens, then the extra token.

        Counts what was used: a draft token behind the end of the sequence is
        neither drafted nor accepted, one that proposed the end counts as both.
        """
        if self.finish_reason is not None:
            return []
        emitted = self.commit(tokens)
        used = len(emitted) + (self.finish_reason == "stop")
        ended = self.finish_reason is not None
        self.rounds += 1
        self.accepted += min(used, len(tokens) - 1)
        self.drafted += min(used, num_draft_tokens) if ended else num_draft_tokens
        return emitted


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What one request produced.

    ``token_ids`` and ``text`` hold what was generated, without the prompt and
    without the end-of-sequence token. ``rounds`` are the decode rounds that the
    row took part in (the first token comes from prefill, not from a round);
    ``drafted`` and ``accepted`` count draft tokens up to the row's end.
    """

    index: int
    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    rounds: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, sequence: Sequence, text: str) -> Self:
        """The result of a sequence that has ended."""
        request, reason = sequence.request, sequence.finish_reason
        assert reason is not None
        return cls(
            index=request.index,
            prompt=request.prompt,
            text=text,
            token_ids=sequence.tokens,
            finish_reason=reason,
            prompt_tokens=len(request.prompt_tokens),
            rounds=sequence.rounds,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens generated, the end-of-sequence token not counted."""
        return len(self.token_ids)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, the round's extra token included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    def to_dict(self) -> dict[str, object]:
        """The fields of one line of ``specdec run --output``."""
        return {
            "index": self.index,
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
        }


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """New output of one request: what a round added to it.

    ``text`` never splits a character; it may be empty while one is incomplete.
    ``result`` is set on the last event of a request.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
