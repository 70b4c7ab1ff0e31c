"""Compare token for token: greedy rows, and coupled sampling with the same draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeVar

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...decoder import SpecDecoder
from ...outputs import GenerationResult
from ..decoding import Task, decode, with_end
from .compare import Divergence, Evidence, Scores, Token, first_difference
from .plain import PlainTarget, PlainTokens, scores

#: Called with what is being done, how many units of it are done, the total, and the
#: share of the work that is done.
Progress = Callable[[str, int, int, float], None]
T = TypeVar("T")
Verdict = Literal["exact", "ties", "incomplete", "failure"]


@dataclass(frozen=True, kw_only=True)
class TokenCertificate:
    """The result of comparing token for token.

    Args:
        prompts: number of prompts.
        tokens: tokens that plain decoding generated, including ends of rows.
        compared: how many of these tokens the engine was compared with.
        restarts: how often a row was decoded again after a tie.
        drafted, accepted: draft tokens of all rows.
        divergences: the divergences, in the order in which they were found.
        errors: (prompt, message) of rows that the engine ended with an error.
        logprob_difference: the largest difference of a token's log-probability
            between the engine and plain decoding, over all tokens that agree.
    """

    prompts: int
    tokens: int
    compared: int
    restarts: int
    drafted: int
    accepted: int
    divergences: tuple[Divergence, ...]
    errors: tuple[tuple[int, str], ...]
    logprob_difference: float

    @property
    def ties(self) -> int:
        """Divergences that rounding explains."""
        return sum(d.kind == "tie" for d in self.divergences)

    @property
    def failures(self) -> int:
        """Divergences that rounding does not explain, and rows that failed."""
        return len(self.divergences) - self.ties + len(self.errors)

    @property
    def verdict(self) -> Verdict:
        """The verdict; ``incomplete`` if tokens were left when restarts ran out."""
        if self.failures:
            return "failure"
        if self.compared < self.tokens:
            return "incomplete"
        return "ties" if self.ties else "exact"

    @property
    def passed(self) -> bool:
        """Whether all tokens were compared, and all are equal or ties."""
        return self.verdict in ("exact", "ties")

    def to_dict(self) -> dict[str, object]:
        """All fields and derived values, for JSON."""
        return {
            **asdict(self),
            "ties": self.ties,
            "failures": self.failures,
            "divergences": [d.to_dict() for d in self.divergences],
            "errors": [{"prompt": i, "error": e} for i, e in self.errors],
        }


def counted(progress: Progress, what: str, total: int) -> Callable[[int, float], None]:
    """A function that shows how much of ``what`` is done, for :func:`decode`."""
    return lambda done, share: progress(what, done, total, share)


def each_shown(progress: Progress, what: str, items: Collection[T]) -> Iterator[T]:
    """Yield the items, and show how many are done."""
    for done, item in enumerate(items):
        progress(what, done, len(items), done / len(items))
        yield item
    progress(what, len(items), len(items), 1.0)


def certify_tokens(
    decoder: SpecDecoder,
    plain: PlainTarget,
    tasks: Sequence[Task],
    *,
    max_restarts: int,
    progress: Progress,
) -> TokenCertificate:
    """Compare the engine's tokens with plain decoding's.

    After a tie the two rows may differ without a fault. So the engine decodes the rest
    again from the plain tokens, up to ``max_restarts`` times for each prompt.
    """
    results = decode(decoder, tasks, counted(progress, "speculative", len(tasks)))
    expected = [
        _plainly(plain, task, decoder.tokenizer)
        for task in each_shown(progress, "plain", tasks)
    ]
    comparison = _Comparison(decoder, plain, tasks, expected)
    starts = dict.fromkeys(range(len(tasks)), 0)
    restarts = 0
    for restart in range(max_restarts + 1):
        positions = [
            comparison.take(i, starts[i], result)
            for i, result in each_shown(
                progress, "comparing", list(zip(starts, results, strict=True))
            )
        ]
        pairs = zip(starts, positions, strict=True)
        starts = {i: position for i, position in pairs if position is not None}
        if not starts or restart == max_restarts:
            break
        restarts += len(starts)
        again = [comparison.rest(i, position) for i, position in starts.items()]
        results = decode(decoder, again, counted(progress, "after ties", len(again)))
    return comparison.certificate(restarts)


def _plainly(
    plain: PlainTarget, task: Task, tokenizer: TokenizerWrapper
) -> PlainTokens:
    params = task.params
    return plain.decode(
        task.prompt.token_ids,
        max_tokens=params.max_tokens,
        ends=frozenset(tokenizer.eos_token_ids),
        temperature=params.temperature,
        seed=params.seed_key,
    )


class _Comparison:
    """Compares the engine's rows one by one, and collects the findings."""

    def __init__(
        self,
        decoder: SpecDecoder,
        plain: PlainTarget,
        tasks: Sequence[Task],
        expected: Sequence[PlainTokens],
    ):
        self._decoder = decoder
        self._plain = plain
        self._tasks = tasks
        self._expected = expected
        self._compared = [0] * len(tasks)
        self._divergences: list[Divergence] = []
        self._errors: list[tuple[int, str]] = []
        self._drafted = self._accepted = 0
        self._logprob_difference = 0.0

    def take(self, i: int, start: int, result: GenerationResult) -> int | None:
        """Compare row ``i``, which the engine began at generated token ``start``.

        Returns:
            After a tie, the generated token at which to begin again; ``None`` if
            nothing is left to compare.
        """
        self._drafted += result.drafted
        self._accepted += result.accepted
        if result.finish_reason == "error":
            self._errors.append((i, result.error or ""))
            return None
        tokens, expected = with_end(result), self._expected[i].tokens
        at = first_difference(tokens, expected[start:])
        agreed = len(tokens) if at is None else at
        reported = [t.logprob for t in result.logprobs or ()]
        self._compare_logprobs(reported[:agreed], self._expected[i].logprobs[start:])
        if at is None:
            self._compared[i] = len(expected)
            return None
        divergence = self._divergence(
            i,
            start + at,
            tokens[at] if at < len(tokens) else None,
            reported[at] if at < len(reported) else None,
        )
        self._divergences.append(divergence)
        if divergence.kind == "failure":
            self._compared[i] = start + at
            return None
        self._compared[i] = start + at + 1
        return self._compared[i] if self._compared[i] < len(expected) else None

    def _compare_logprobs(self, a: Sequence[float], b: Sequence[float]) -> None:
        for x, y in zip(a, b, strict=False):
            self._logprob_difference = max(self._logprob_difference, abs(x - y))

    def rest(self, i: int, position: int) -> Task:
        """The task of decoding row ``i`` from generated token ``position`` on."""
        task, expected = self._tasks[i], self._expected[i].tokens
        ids = (*task.prompt.token_ids, *expected[:position])
        left = len(expected) - position
        return Task.of(ids, replace(task.params, max_tokens=left))

    def _divergence(
        self, i: int, position: int, token: int | None, logprob: float | None
    ) -> Divergence:
        expected, prompt = self._expected[i].tokens, self._tasks[i].prompt.token_ids
        wanted = expected[position] if position < len(expected) else None
        evidence = None
        if wanted is not None and token is not None:
            evidence = self._evidence(i, position, wanted, token, logprob)
        return Divergence(
            prompt=i,
            position=position,
            prefix_tokens=len(prompt) + position,
            plain=self._token(wanted),
            engine=self._token(token),
            evidence=evidence,
        )

    def _token(self, token: int | None) -> Token | None:
        if token is None:
            return None
        return Token(token, self._decoder.tokenizer.decode([token]))

    def _evidence(
        self, i: int, position: int, wanted: int, token: int, logprob: float | None
    ) -> Evidence:
        """Score the prefix in both shapes, by the target alone."""
        task, config = self._tasks[i], self._decoder.config
        prompt, prefix = task.prompt.token_ids, self._expected[i].tokens[:position]
        k = config.max_draft_tokens if self._decoder.draft_name else 0
        batch_size = min(config.batch_size, len(self._tasks))
        # One row without a draft has only width 1; a width of 2 then gives the noise.
        width = max(k + 1, 2)
        step = self._plain.logits(prompt, prefix)
        verify = self._plain.logits(
            prompt,
            prefix,
            batch_size=batch_size,
            width=width,
            prefill_step_size=config.prefill_step_size,
        )
        if logprob is not None:
            logprob -= float(step[token] - mx.logsumexp(step))

        def scored(logits: mx.array, rows: int, columns: int) -> Scores:
            params = task.params
            adjusted = scores(
                logits,
                temperature=params.temperature,
                seed=params.seed_key,
                position=len(prompt) + position,
            )
            best = mx.sort(adjusted)[-2:]
            return Scores(
                batch_size=rows,
                width=columns,
                top2_gap=float(best[1] - best[0]),
                gap=float(adjusted[wanted] - adjusted[token]),
            )

        return Evidence(
            step=scored(step, 1, 1),
            verify=scored(verify, batch_size, width),
            noise=float(mx.abs(step - verify).max()),
            logprob_difference=logprob,
        )

    def certificate(self, restarts: int) -> TokenCertificate:
        """The certificate of all rows taken so far."""
        return TokenCertificate(
            prompts=len(self._tasks),
            tokens=sum(len(e.tokens) for e in self._expected),
            compared=sum(self._compared),
            restarts=restarts,
            drafted=self._drafted,
            accepted=self._accepted,
            divergences=tuple(self._divergences),
            errors=tuple(self._errors),
            logprob_difference=self._logprob_difference,
        )
