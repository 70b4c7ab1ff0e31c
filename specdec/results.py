"""What comes out: results of requests, and events while they run. No mlx here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from .request import (
    FinishReason,
    Sequence,
    TokenLogprobs,
    acceptance_by_position,
    acceptance_length,
    acceptance_rate,
)


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What one request produced.

    ``token_ids`` and ``text`` hold what was generated, without the prompt and
    without what ended it. Where a stop text begins inside a token, ``text`` is cut
    there and ``token_ids`` keeps that token.

    Args:
        finish_reason: ``stop`` (a token or a text that ends it), ``length``
            (``max_tokens``, or the model's context is full), ``cancelled`` or
            ``error``. Whatever it is, what was generated until then is there.
        stop_reason: the text or the token id that ended it, else ``None``.
        error: one line, where ``finish_reason`` is ``error``.
        seed: of its random draws, given or drawn; ``None``: it draws nothing.
        kv_bits: bits in which keys and values were kept; ``None``: as they are.
        prefix_tokens: of the ``prompt_tokens``, those that were found in the prefix
            store and not computed.
        rounds: decode rounds that the row took part in (its first token comes from
            prefill, not from a round).
        drafted, accepted: draft tokens up to the row's end.
        drafted_at, accepted_at: rounds that drafted, and that accepted, at least 1,
            2, ... tokens.
        time_to_first_token: seconds since the request was added; ``None`` when
            there is none.
        tokens_per_second: tokens behind the first over the time since it; 0 when
            there are none.
        logprobs: one entry per token, where it was asked for.
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
    kv_bits: int | None = None
    prefix_tokens: int = 0
    stop_reason: str | int | None = None
    error: str | None = None
    seed: int | None = None
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    time_to_first_token: float | None = field(default=None, compare=False)
    tokens_per_second: float = field(default=0.0, compare=False)
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Self:
        """The result of a sequence that has ended."""
        request, reason = sequence.request, sequence.finish_reason
        assert reason is not None
        params, began = request.params, sequence.began
        asked = params.logprobs or params.top_logprobs > 0
        rate = 0.0
        if began is not None and sequence.ended is not None:
            seconds = sequence.ended - began
            behind_first = max(len(sequence.tokens) - 1, 0)
            rate = behind_first / seconds if seconds > 0 else 0.0
        return cls(
            index=request.index,
            prompt=request.prompt,
            text="" if sequence.output is None else sequence.output.text,
            token_ids=sequence.tokens,
            finish_reason=reason,
            prompt_tokens=len(request.prompt_tokens),
            kv_bits=sequence.kv_bits,
            prefix_tokens=sequence.prefix_tokens,
            rounds=sequence.rounds,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            seed=params.seed if params.draws else None,
            drafted_at=sequence.drafted_at,
            accepted_at=sequence.accepted_at,
            time_to_first_token=None if began is None else began - sequence.queued,
            tokens_per_second=rate,
            logprobs=sequence.logprobs if asked else None,
        )

    @property
    def generated_tokens(self) -> int:
        """Tokens generated, the one that ended it not counted."""
        return len(self.token_ids)

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 when nothing was drafted."""
        return acceptance_rate(self.drafted, self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, the round's extra token included."""
        return acceptance_length(self.rounds, self.accepted)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of rounds that drafted 1, 2, ... tokens, the share that accepted them all."""
        return acceptance_by_position(self.drafted_at, self.accepted_at)

    def to_dict(self) -> dict[str, object]:
        """The fields of one line of ``specdec run --output``."""
        line: dict[str, object] = {
            "index": self.index,
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "seed": self.seed,
            "prompt_tokens": self.prompt_tokens,
            "kv_bits": self.kv_bits,
            "prefix_tokens": self.prefix_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "time_to_first_token": self.time_to_first_token,
            "tokens_per_second": self.tokens_per_second,
        }
        if self.logprobs is not None:
            line["logprobs"] = [
                {"logprob": t.logprob, "top": [list(pair) for pair in t.top]}
                for t in self.logprobs
            ]
        return line


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """New output of one request: what a round added to it.

    ``text`` never splits a character or a stop text; it may be empty while one is
    incomplete, as may ``token_ids``. ``result`` is set on the last event of a
    request.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
