"""A job as it runs: its requests, the times of their tokens, and its record.

A job lasts from the call to the last token: prompts are encoded, rows join as others
end, text is made. Every compared system writes into the same :class:`Job`, so that
rates have the same meaning for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from ...prompts import Prompt
from ...utils.tables import percentile
from ...utils.validation import Count
from .recipe import Recipe

Clock = Callable[[], float]
#: k, the most tokens that a row may draft in the round, and the numbers of tokens that
#: each running row drafted and accepted in it.
TracedRound = tuple[Count, list[tuple[Count, Count]]]

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request that has ended.

    Args:
        tokens: generated tokens.
        rounds, drafted, accepted: rounds of its row, and draft tokens in them.
        first, ended: seconds from the job's start to the request's first token and
            end; without a token, ``first`` is the end.
        digest: hash of the tokens.
        prefix_tokens: prompt tokens that a prefix cache had.
    """

    prompt_tokens: Count
    tokens: Count
    rounds: Count
    drafted: Count
    accepted: Count
    first: float
    ended: float
    digest: str
    prefix_tokens: Count = 0


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """Milliseconds of a job's rounds of one k, either near a join or away from one.

    Args:
        number: number of rounds.
        p50: their median.
    """

    k: Count
    near_join: Count
    number: Count
    p50: float


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The measurements of one pass of a system.

    Args:
        seconds: time from the call to the last token.
        traced: every round of k above 0, kept only of a first pass of this engine.
    """

    seconds: float
    requests: list[RequestRecord]
    rounds: list[RoundTimes]
    peak_memory_bytes: Count
    memory_before_bytes: Count
    traced: list[TracedRound] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(r.tokens for r in self.requests) / self.seconds


@dataclass(frozen=True)
class JobRequest:
    """A prompt of a job.

    Args:
        prompt: the prompt as it was read; encoding it is part of the job.
        max_tokens: most new tokens of this prompt.
    """

    prompt: Prompt
    max_tokens: int


def requests_of(
    prompts: Sequence[Prompt], recipe: Recipe, batch: int
) -> list[JobRequest]:
    """The requests of a job, which are the same for every system and in every run."""
    run, n = recipe.run, len(prompts)
    most = n if run.prompts_per_row is None else run.prompts_per_row * batch
    chosen = [i * n // min(n, most) for i in range(min(n, most))]
    least = run.max_tokens if run.least_tokens is None else run.least_tokens
    span = run.max_tokens - least + 1
    # Multiples of the golden ratio, modulo 1, are evenly spread but not sorted.
    return [
        JobRequest(prompts[i], least + int((i * _GOLDEN + 0.5) % 1 * span))
        for i in chosen
    ]


@dataclass
class Received:
    """The tokens and counts of a request so far."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0
    ended: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class Job:
    """A job on its own clock: its requests, and the tokens received so far.

    Args:
        requests: the requests, all there from the beginning.
        clock: returns a time in seconds.
    """

    def __init__(self, requests: Sequence[JobRequest], clock: Clock):
        self.requests = requests
        self.received = [Received() for _ in requests]
        self.rounds = Rounds(lambda: self.now)
        self._clock, self._start = clock, clock()

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return self._clock() - self._start

    def take(self, i: int, tokens: Sequence[int], now: float) -> None:
        """Add new tokens of a request."""
        received = self.received[i]
        if tokens and not received.tokens:
            received.first = now
        received.tokens += tokens

    def end(self, i: int, now: float) -> None:
        """Note that a request has ended and its text is complete."""
        received = self.received[i]
        received.ended = now
        received.first = received.first if received.tokens else now

    def record(self, *, peak: int, before: int) -> JobRecord:
        """The record of the job, once all requests have ended.

        Args:
            peak, before: peak bytes of memory, and bytes before the job began.
        """
        seconds = self.now
        return JobRecord(
            seconds=seconds,
            requests=[
                RequestRecord(
                    **{
                        **vars(p),
                        "tokens": len(p.tokens),
                        "first": round(p.first, 6),
                        "ended": round(p.ended, 6),
                        "digest": sha256(repr(p.tokens).encode()).hexdigest()[:12],
                    }
                )
                for p in self.received
            ],
            rounds=self.rounds.times(),
            peak_memory_bytes=peak,
            memory_before_bytes=before,
            traced=self.rounds.traced,
        )


class Rounds:
    """Times of rounds by k, and whether a row joined near them.

    A round is near a join if a row joined in it, in the round before or in the round
    after: prefilling the row's prompt may delay any of them.

    Args:
        now: returns a time in seconds.
    """

    def __init__(self, now: Clock):
        self.traced: list[TracedRound] = []
        self._now = now
        # Each run is a list of rounds that followed each other without a break: k,
        # milliseconds, and whether a row joined.
        self._runs: list[list[tuple[int, float, bool]]] = [[]]
        self._last: float | None = None
        self._joins = False

    def begin(self) -> None:
        """Note that the first rows begin: the next round is timed from now."""
        self._runs.append([])
        self._last, self._joins = self._now(), False

    def join(self) -> None:
        """Note that a row joins others, in the round that ends next."""
        self._joins = True

    def end(self, k: int) -> None:
        """Note that a round of k has ended."""
        now = self._now()
        if self._last is not None:
            self._runs[-1].append((k, (now - self._last) * 1e3, self._joins))
        self._last, self._joins = now, False

    def times(self) -> list[RoundTimes]:
        """Times of the rounds so far, by k and by whether a join was near."""
        groups: dict[tuple[int, int], list[float]] = defaultdict(list)
        for run in self._runs:
            for i, (k, milliseconds, _) in enumerate(run):
                near = any(joined for *_, joined in run[max(i - 1, 0) : i + 2])
                groups[k, int(near)].append(milliseconds)
        return [
            RoundTimes(
                k=k, near_join=near, number=len(ms), p50=round(percentile(ms, 50), 3)
            )
            for (k, near), ms in sorted(groups.items())
        ]


def untraced(record: JobRecord) -> JobRecord:
    """The record without its traced rounds, which are alike in every pass."""
    return replace(record, traced=[])
