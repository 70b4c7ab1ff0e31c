"""What comes out: results of requests, events while they run, totals. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Self

from .errors import DrafterError
from .request import (
    FinishReason,
    Request,
    TokenLogprobs,
    acceptance_by_position,
    acceptance_length,
    acceptance_rate,
)

# Fields that a result has from its request.
_AS_REQUESTED = (
    "index", "prompt", "kv_bits", "prefix_tokens", "rounds", "drafted", "accepted",
    "stop_reason", "stop_token", "error", "num_draft_tokens_per_pos",
    "num_accepted_tokens_per_pos",
)  # fmt: skip
# Fields of a line of ``specdec run --output``, in their order.
_LINE = (
    "index", "prompt", "text", "token_ids", "finish_reason", "stop_reason",
    "stop_token", "error", "seed", "prompt_tokens", "kv_bits", "prefix_tokens",
    "generated_tokens", "rounds", "drafted", "accepted", "acceptance_rate",
    "acceptance_length", "acceptance_by_position", "time_to_first_token",
    "tokens_per_second",
)  # fmt: skip


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
        stop_reason: the stop text that ended it, else ``None``.
        stop_token: the token id that ended it, else ``None``.
        error: one line, where ``finish_reason`` is ``error``.
        seed: of its random draws, given or drawn; ``None``: it draws nothing.
        kv_bits: bits in which keys and values were kept; ``None``: as they are.
        prefix_tokens: of the ``prompt_tokens``, those that were found in the prefix
            store and not computed.
        rounds: decode rounds that the row took part in (its first token comes from
            prefill, not from a round).
        drafted, accepted: draft tokens up to the row's end.
        num_draft_tokens_per_pos, num_accepted_tokens_per_pos: rounds that drafted,
            and that accepted, at least 1, 2, ... tokens.
        time_to_first_token: seconds since the request was added; ``None`` when
            there is none.
        tokens_per_second: tokens after the first over the time since it; 0 when
            there are none.
        logprobs: one entry per token, where it was asked for.
        turn: which answer of a conversation it is, from 0.
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
    stop_reason: str | None = None
    stop_token: int | None = None
    error: str | None = None
    seed: int | None = None
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    time_to_first_token: float | None = field(default=None, compare=False)
    tokens_per_second: float = field(default=0.0, compare=False)
    logprobs: list[TokenLogprobs] | None = None
    turn: int = 0

    @classmethod
    def of(cls, request: Request, text_of: Callable[[int], str] | None = None) -> Self:
        """The result of a request that has ended.

        Args:
            text_of: decodes a token, for log-probabilities.
        """
        reason = request.finish_reason
        assert reason is not None
        params, began = request.params, request.began
        logprobs = request.logprobs if request.reports_logprobs else None
        if logprobs is not None and text_of is not None:
            logprobs = [
                entry.with_texts(token, text_of)
                for token, entry in zip(request.tokens, logprobs, strict=False)
            ]
        rate = 0.0
        if began is not None and request.ended is not None:
            seconds = request.ended - began
            after_first = max(len(request.tokens) - 1, 0)
            rate = after_first / seconds if seconds > 0 else 0.0
        return cls(
            text="" if request.output is None else request.output.text,
            token_ids=request.tokens,
            finish_reason=reason,
            prompt_tokens=len(request.prompt_tokens),
            seed=params.seed if params.draws else None,
            time_to_first_token=None if began is None else began - request.queued,
            tokens_per_second=rate,
            logprobs=logprobs,
            **{name: getattr(request, name) for name in _AS_REQUESTED},
        )

    @classmethod
    def refused(cls, index: int, prompt: str, error: str) -> Self:
        """The result of a request that could not be served."""
        return cls(
            index=index,
            prompt=prompt,
            text="",
            token_ids=[],
            finish_reason="error",
            prompt_tokens=0,
            rounds=0,
            drafted=0,
            accepted=0,
            error=error,
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
        return acceptance_by_position(
            self.num_draft_tokens_per_pos, self.num_accepted_tokens_per_pos
        )

    def to_dict(self) -> dict[str, object]:
        """The fields of one line of ``specdec run --output``."""
        line: dict[str, object] = {name: getattr(self, name) for name in _LINE}
        if self.logprobs is not None:
            line["logprobs"] = [
                entry.to_dict(token)
                for token, entry in zip(self.token_ids, self.logprobs, strict=False)
            ]
        return line


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """New output of one request: what a round added to it.

    ``text`` never splits a character or a stop text; it may be empty while one is
    incomplete, as may ``token_ids``. ``logprobs`` has one entry for each of these,
    where it was asked for. ``result`` is set on the last event of a request. ``turn``
    counts the answers of a conversation.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
    logprobs: list[TokenLogprobs] | None = None
    turn: int = 0

    def renumbered(self, index: int, turn: int = 0) -> Self:
        """The same, of a request that is called otherwise."""
        result = self.result and replace(self.result, index=index, turn=turn)
        return replace(self, index=index, turn=turn, result=result)


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What an engine is busy with.

    Args:
        running: rows that decode, or whose prompts are being taken in.
        waiting: requests that have no row yet.
        cache_bytes: of keys and values, the target's and the draft's, of rows that
            decode.
    """

    running: int = 0
    waiting: int = 0
    cache_bytes: int = 0


@dataclass(kw_only=True)
class RunStats:
    """Totals over the prompts of one ``generate`` or ``stream`` call, as it goes.

    Times are seconds of wall clock, and add up to what passed from the first step to
    the last, while there were requests: ``warmup_seconds`` to compile kernels before
    the first one, ``calibration_seconds`` to measure what rounds of a draft cost,
    ``prefill_seconds`` on prompts, for the first token of each row, ``decode_seconds``
    on rounds, for the ``decode_tokens`` after it, and ``other_seconds`` between steps,
    on what their caller does. A server compiles before the first step, which
    ``warmup_seconds`` counts too; kernels that are compiled when a model is loaded are
    in none of them. A prefill chunk that finds a round still running waits for it, so
    that with rows that join the two mix a little.

    ``rounds`` counts rounds of the batch, ``prefilled`` and ``prompt_tokens`` prompts
    that have been taken in, ``prefix_tokens`` what of them was found in the prefix
    store; ``prompts``, ``row_rounds``, ``drafted``, ``accepted`` and what they are by
    position (:class:`~specdec.outputs.GenerationResult`) add up the rows that have
    ended. ``vocabulary_share`` is the share of the target's tokens that a draft with
    another vocabulary can propose, ``None`` where there is no such draft.
    ``draft_error`` is what ended drafting before its time, in a line.
    ``peak_memory_bytes`` is MLX's peak in this process so far, weights included.
    """

    prompts: int = 0
    prefilled: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    generated_tokens: int = 0
    decode_tokens: int = 0
    warmup_seconds: float = 0.0
    calibration_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    other_seconds: float = 0.0
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    vocabulary_share: float | None = None
    draft_error: str | None = None
    peak_memory_bytes: int = 0

    def take_prefilled(self, sequences: Collection[Request]) -> None:
        """Count rows that have their first tokens."""
        self.prefilled += len(sequences)
        for s in sequences:
            self.prompt_tokens += len(s.prompt_tokens)
            self.prefix_tokens += s.prefix_tokens

    def take_ended(self, sequence: Request | GenerationResult) -> None:
        """Count a row that has ended."""
        self.prompts += 1
        self.row_rounds += sequence.rounds
        self.drafted += sequence.drafted
        self.accepted += sequence.accepted
        self.num_draft_tokens_per_pos = _added(
            self.num_draft_tokens_per_pos, sequence.num_draft_tokens_per_pos
        )
        self.num_accepted_tokens_per_pos = _added(
            self.num_accepted_tokens_per_pos, sequence.num_accepted_tokens_per_pos
        )

    def check_draft(self) -> None:
        """Refuse figures of a run whose draft failed before the end.

        Raises:
            DrafterError: drafting ended before its time.
        """
        if self.draft_error is not None:
            raise DrafterError(self.draft_error)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of rounds that drafted 1, 2, ... tokens, the share that accepted them all."""
        return acceptance_by_position(
            self.num_draft_tokens_per_pos, self.num_accepted_tokens_per_pos
        )

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens, reused ones too, over the time until the first tokens."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows after their first, over decode time."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 when nothing was drafted."""
        return acceptance_rate(self.drafted, self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per row and round, the round's extra token included."""
        return acceptance_length(self.row_rounds, self.accepted)


def _added(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
