"""The engine's output: results, events while requests run, totals. No mlx here."""

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

# Fields that a result copies from its request.
_AS_REQUESTED = (
    "index", "prompt", "kv_bits", "prefix_tokens", "rounds", "drafted", "accepted",
    "stop_reason", "stop_token", "stop_logprob", "error",
    "num_draft_tokens_per_pos", "num_accepted_tokens_per_pos",
)  # fmt: skip
# Fields of a line of ``specdec run --output``, in order.
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

    ``token_ids`` and ``text`` hold what was generated, without the prompt and without
    the token or text that ended it. If a stop text begins inside a token, ``text`` is
    cut there and ``token_ids`` keeps that token.

    Args:
        finish_reason: ``stop`` (by a token or a stop text), ``length`` (``max_tokens``
            reached, or the model's context full), ``cancelled`` or ``error``. In every
            case the result has what was generated until then.
        stop_reason: the stop text that ended it, else ``None``.
        stop_token: the token id that ended it, else ``None``.
        stop_logprob: the log-probability of that token, if asked for.
        error: one line, if ``finish_reason`` is ``error``.
        seed: the seed of the request's random draws; ``None`` if it does not sample.
        kv_bits: bits in which keys and values were stored; ``None``: unquantized.
        prefix_tokens: how many of the ``prompt_tokens`` were found in the prefix store
            and not computed.
        rounds: decode rounds that the row took part in. The first token comes from
            prefill, not from a round.
        drafted, accepted: draft tokens proposed and accepted, up to the row's end.
        num_draft_tokens_per_pos, num_accepted_tokens_per_pos: how many rounds
            drafted, and how many accepted, at least 1, 2, ... tokens.
        time_to_first_token: seconds from adding the request to its first token;
            ``None`` if it has no token.
        tokens_per_second: the tokens after the first, over the time since the first;
            0 if there are none.
        logprobs: one entry per token, if asked for.
        prompt_logprobs: one entry per token of the prompt, ``None`` for the first, if
            asked for.
        prompt_token_ids: the prompt's tokens, if their log-probabilities were asked
            for.
        turn: which answer of its conversation this is, from 0.
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
    stop_logprob: TokenLogprobs | None = None
    error: str | None = None
    seed: int | None = None
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    time_to_first_token: float | None = field(default=None, compare=False)
    tokens_per_second: float = field(default=0.0, compare=False)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_token_ids: list[int] | None = None
    turn: int = 0

    @classmethod
    def of(cls, request: Request, text_of: Callable[[int], str] | None = None) -> Self:
        """The result of a request that has ended.

        Args:
            text_of: decodes one token, for the texts in log-probabilities.
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
        of_prompt, prompt = None, request.prompt_tokens
        if params.prompt_logprobs is not None and request.prompt_logprobs:
            of_prompt = [
                entry and (entry if text_of is None else entry.with_texts(t, text_of))
                for t, entry in zip(prompt, request.prompt_logprobs, strict=True)
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
            prompt_logprobs=of_prompt,
            prompt_token_ids=None if of_prompt is None else list(prompt),
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
        """How many tokens were generated, without the token that ended the request."""
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
        """By position, the share of draft tokens there that were accepted."""
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
        if self.prompt_logprobs is not None and self.prompt_token_ids is not None:
            pairs = zip(self.prompt_token_ids, self.prompt_logprobs, strict=True)
            line["prompt_logprobs"] = [
                entry and entry.to_dict(token) for token, entry in pairs
            ]
        return line


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """New output of one request: what a round added to it.

    ``text`` never splits a character or a stop text. While one is incomplete, ``text``
    and ``token_ids`` may be empty. ``logprobs`` has one entry for each token, if asked
    for. ``result`` is set on the last event of a request. ``turn`` counts the answers
    of a conversation, from 0.
    """

    index: int
    text: str
    token_ids: list[int]
    result: GenerationResult | None = None
    logprobs: list[TokenLogprobs] | None = None
    turn: int = 0

    def renumbered(self, index: int, turn: int = 0) -> Self:
        """The same event under another index and turn."""
        result = self.result and replace(self.result, index=index, turn=turn)
        return replace(self, index=index, turn=turn, result=result)


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What an engine is working on.

    Args:
        running: rows that decode, or whose prompts are being prefilled.
        waiting: requests that have no row yet.
        cache_bytes: bytes of the running rows' caches, the target's and the draft's.
    """

    running: int = 0
    waiting: int = 0
    cache_bytes: int = 0


@dataclass(kw_only=True)
class RunStats:
    """Totals of one ``generate`` or ``stream`` call, or of a session, up to now.

    Times are seconds of wall clock. They add up to the time between the first step and
    the last in which there were requests:

    - ``warmup_seconds``: compiling kernels before the first request. A server does it
      before its first step. Kernels compiled while a model is loaded are not included.
    - ``calibration_seconds``: measuring what rounds with a draft cost.
    - ``prefill_seconds``: prompts, up to the first token of each row.
    - ``decode_seconds``: rounds, for the ``decode_tokens`` after the first tokens. A
      prefill chunk may wait for a round, so the last two mix a little.
    - ``other_seconds``: the caller's code between steps.

    ``rounds`` counts rounds of the batch. ``prefilled`` counts prompts,
    ``prompt_tokens`` their tokens, and ``prefix_tokens`` those found in the prefix
    store. ``prefill_tokens`` also counts prompts that have been prefilled in part, but
    not a prompt's last token, which the row's first round takes. ``prompts``,
    ``row_rounds``, ``drafted``, ``accepted`` and the counts by position (see
    :class:`~specdec.outputs.GenerationResult`) cover the requests that have ended.
    ``vocabulary_share`` is the share of the target's tokens that a draft with another
    vocabulary can propose, else ``None``. ``draft_error`` is one line, if drafting was
    ended by an error. ``peak_memory_bytes`` is MLX's peak in this process
    so far, weights included.
    """

    prompts: int = 0
    prefilled: int = 0
    prefill_tokens: int = 0
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

    def take_prefilled(self, requests: Collection[Request]) -> None:
        """Count requests that have their first tokens."""
        self.prefilled += len(requests)
        for s in requests:
            self.prompt_tokens += len(s.prompt_tokens)
            self.prefix_tokens += s.prefix_tokens

    def take_ended(self, request: Request | GenerationResult) -> None:
        """Count a request that has ended."""
        self.prompts += 1
        self.row_rounds += request.rounds
        self.drafted += request.drafted
        self.accepted += request.accepted
        self.num_draft_tokens_per_pos = _added(
            self.num_draft_tokens_per_pos, request.num_draft_tokens_per_pos
        )
        self.num_accepted_tokens_per_pos = _added(
            self.num_accepted_tokens_per_pos, request.num_accepted_tokens_per_pos
        )

    def check_draft(self) -> None:
        """Raise an error if the draft failed: the run's figures then mean little.

        Raises:
            DrafterError: drafting was ended by an error.
        """
        if self.draft_error is not None:
            raise DrafterError(self.draft_error)

    @property
    def acceptance_by_position(self) -> list[float]:
        """By position, the share of draft tokens there that were accepted."""
        return acceptance_by_position(
            self.num_draft_tokens_per_pos, self.num_accepted_tokens_per_pos
        )

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens, reused ones included, over prefill time."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows after their first ones, over decode time."""
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
