"""Whole jobs: from the call to the last token, text included, with rows that join."""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    BatchGenerator,
    generate_step,
    generation_stream,
    speculative_generate_step,
)

from ...decoder import SpecDecoder, wired_memory
from ...engine.observer import RoundObserver
from ...prompts import EncodedPrompt, Prompt, encode_all
from ...request import Request
from ...sampling_params import SamplingParams
from .peers import sampler_of
from .recipe import Recipe
from .tables import percentile
from .waves import Clock, Options, Record

#: mlx-lm takes so many prompts in at a time, unless set otherwise.
_PREFILL_BATCH = 8
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class JobRequest:
    """A prompt of a job.

    Args:
        prompt: as it was read; encoding it is part of the job.
        max_tokens: of this prompt.
        arrives: seconds after the job began.
    """

    prompt: Prompt
    max_tokens: int
    arrives: float = 0.0


def requests_of(
    prompts: Sequence[Prompt], recipe: Recipe, batch: int, rate: float = 0.0
) -> list[JobRequest]:
    """The requests of a job; the same for every system and in every run.

    Args:
        rate: requests that arrive in a second; 0: all are there at once.
    """
    run, n = recipe.run, len(prompts)
    most = n if run.prompts_per_row is None else run.prompts_per_row * batch
    chosen = [i * n // min(n, most) for i in range(min(n, most))]
    least = run.max_tokens if run.least_tokens is None else run.least_tokens
    span = run.max_tokens - least + 1
    draw, at, requests = random.Random(run.seed), 0.0, []
    for i in chosen:
        # Multiples of the golden ratio lie as evenly as can be, in no order.
        tokens = least + int((i * _GOLDEN + 0.5) % 1 * span)
        requests.append(JobRequest(prompts[i], tokens, at))
        at += draw.expovariate(rate) if rate else 0.0
    return requests


@dataclass
class _Done:
    """What became of a request; times are seconds since the job began."""

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first: float = 0.0
    ended: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def take(self, tokens: Sequence[int], now: float) -> None:
        """Add tokens that have come."""
        if tokens and not self.tokens:
            self.first = now
        self.tokens += tokens

    def end(self, now: float) -> None:
        """Note that it has ended; without a token, its first is the end."""
        self.first, self.ended = self.first if self.tokens else now, now


class Job:
    """A job as it runs, on its own clock: what has arrived, what has come of it.

    Args:
        requests: in the order in which they arrive.
        clock: seconds.
    """

    def __init__(self, requests: Sequence[JobRequest], clock: Clock):
        self.requests = requests
        self.done = [_Done() for _ in requests]
        self.seconds = 0.0
        #: (k, whether a row joined near it) to milliseconds of rounds.
        self.rounds: dict[tuple[int, bool], list[float]] = defaultdict(list)
        #: Where the engine's time went, in seconds.
        self.phases = {"calibration": 0.0, "prefill": 0.0, "decode": 0.0}
        self._clock, self._start, self._taken = clock, clock(), 0

    @property
    def now(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._start

    @property
    def all_taken(self) -> bool:
        """Whether every request has been handed out."""
        return self._taken == len(self.requests)

    def arrived(self, *, wait: bool = False) -> list[int]:
        """The requests that have arrived since it was last asked.

        Args:
            wait: sleep until one arrives, if none has.
        """
        if wait and not self.all_taken:
            due = self.requests[self._taken].arrives
            while (left := due - self.now) > 0:
                time.sleep(left)
        first, now = self._taken, self.now
        while not self.all_taken and self.requests[self._taken].arrives <= now:
            self._taken += 1
        return list(range(first, self._taken))

    def record(self) -> Record:
        """Plain numbers, for the raw result."""
        return {
            "seconds": self.seconds,
            "requests": [
                {
                    "prompt_tokens": done.prompt_tokens,
                    "tokens": len(done.tokens),
                    "rounds": done.rounds,
                    "drafted": done.drafted,
                    "accepted": done.accepted,
                    "arrived": round(request.arrives, 6),
                    "first": round(done.first, 6),
                    "ended": round(done.ended, 6),
                    "digest": hashlib.sha256(repr(done.tokens).encode()).hexdigest()[
                        :12
                    ],
                }
                for request, done in zip(self.requests, self.done, strict=True)
            ],
            "rounds": [
                {
                    "k": k,
                    "near_join": int(near),
                    "number": len(ms),
                    **{f"p{p}": round(percentile(ms, p), 3) for p in (10, 50, 90)},
                    "mean": round(sum(ms) / len(ms), 3),
                }
                for (k, near), ms in sorted(self.rounds.items())
            ],
            "phases": {k: round(v, 4) for k, v in self.phases.items()},
        }


class RoundTimes:
    """When rounds ended, by k, and whether a row joined near them.

    A round is near a join when a row joined in it, in the one before or in the one
    after: taking its prompt in may hold any of them up.
    """

    def __init__(self, job: Job):
        self._job = job
        # Rounds that follow each other: k, whether a row joined, milliseconds.
        self._runs: list[list[tuple[int, bool, float]]] = [[]]
        self._last: float | None = None
        self._joins = False

    def begin(self) -> None:
        """Rows begin where none ran: time counts from now."""
        self._runs.append([])
        self._last, self._joins = self._job.now, False

    def join(self) -> None:
        """A row joins others: the round that ends next had it taken in."""
        self._joins = True

    def round(self, k: int) -> None:
        """A round of k has ended."""
        now = self._job.now
        if self._last is not None:
            self._runs[-1].append((k, self._joins, (now - self._last) * 1e3))
        self._last, self._joins = now, False

    def finish(self) -> None:
        """Give the job its rounds."""
        for run in self._runs:
            for i, (k, _, ms) in enumerate(run):
                near = any(joined for _, joined, _ in run[max(i - 1, 0) : i + 2])
                self._job.rounds[k, near].append(ms)


System = Callable[[Job], None]


def run_job(
    system: System, requests: Sequence[JobRequest], clock: Clock = time.perf_counter
) -> Record:
    """One job on one system, with what it held in memory."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with wired_memory():
        job = Job(requests, clock)
        system(job)
        job.seconds = job.now
    return {
        "peak_memory_bytes": mx.get_peak_memory(),
        "memory_before_bytes": before,
        **job.record(),
    }


# -- systems -----------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizing:
    """How texts become tokens, the same for all systems.

    Args:
        tokenizer: the target's, or one that stands in for it.
        chat_template: put prompts into its chat template.
    """

    tokenizer: Any
    chat_template: bool

    def encode(self, job: Job, indices: Iterable[int]) -> list[EncodedPrompt]:
        """Encode prompts of a job."""
        chosen = list(indices)
        encoded = encode_all(
            self.tokenizer,
            [job.requests[i].prompt for i in chosen],
            ignore_chat_template=not self.chat_template,
        )
        for i, prompt in zip(chosen, encoded, strict=True):
            job.done[i].prompt_tokens = len(prompt.token_ids)
        return encoded


class _Watch(RoundObserver):
    """Takes the times of this engine's rounds."""

    def __init__(self, times: RoundTimes):
        self._times = times
        self._rounds: dict[int, int] = {}
        self._running = False

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """A round was read; a prompt's last step adds to no row's rounds."""
        now = {row.index: row.rounds for row in rows}
        is_round = any(n > self._rounds.get(i, 0) for i, n in now.items())
        self._rounds |= now
        if is_round:
            self._times.round(num_draft_tokens)
        elif self._running:
            self._times.join()
            return
        else:
            self._times.begin()
        self._running = any(row.finish_reason is None for row in rows)


def specdec_jobs(
    make: Callable[[], SpecDecoder], tokenizing: Tokenizing, options: Options
) -> System:
    """This engine, by its Python API."""

    def run(job: Job) -> None:
        times = RoundTimes(job)
        session = make().session(observer=_Watch(times))
        while session.busy or not job.all_taken:
            indices = job.arrived(wait=not session.busy)
            for i, prompt in zip(indices, tokenizing.encode(job, indices), strict=True):
                params = SamplingParams(
                    max_tokens=job.requests[i].max_tokens,
                    temperature=options.temperature,
                    seed=options.seed + i,
                )
                added = session.add_encoded(prompt, params)
                assert added == i
            events, now = session.step(), job.now
            for event in events:
                done, result = job.done[event.index], event.result
                done.take(event.token_ids, now)
                if result is not None:
                    done.end(now)
                    done.text = result.text
                    done.rounds, done.drafted = result.rounds, result.drafted
                    done.accepted = result.accepted
        mx.synchronize()
        stats = session.stats
        stats.check_draft()
        times.finish()
        job.phases = {
            "calibration": stats.calibration_seconds,
            "prefill": stats.prefill_seconds,
            "decode": stats.decode_seconds,
        }

    return run


def mlx_lm_step_jobs(
    model: nn.Module,
    tokenizing: Tokenizing,
    options: Options,
    draft: nn.Module | None = None,
    k: int = 0,
) -> System:
    """What ``stream_generate`` does, with a draft or without: one prompt at a time."""

    def generate(prompt: EncodedPrompt, i: int, max_tokens: int) -> Any:
        shared: dict[str, Any] = {
            "max_tokens": max_tokens,
            "prefill_step_size": options.prefill_step_size,
            "sampler": sampler_of(options, i),
        }
        tokens = mx.array(list(prompt.token_ids))
        if draft is None:
            return generate_step(tokens, model, **shared)
        return speculative_generate_step(
            tokens, model, draft, num_draft_tokens=k, **shared
        )

    def run(job: Job) -> None:
        times = RoundTimes(job)
        while not job.all_taken:
            for i in job.arrived(wait=True):
                (prompt,) = tokenizing.encode(job, [i])
                _one(job, i, prompt, times)
        mx.synchronize(generation_stream)
        times.finish()

    def _one(job: Job, i: int, prompt: EncodedPrompt, times: RoundTimes) -> None:
        done, text = job.done[i], tokenizing.tokenizer.detokenizer
        max_tokens = job.requests[i].max_tokens
        generated = generate(prompt, i, max_tokens)
        begins = True
        for found in generated:
            token, from_draft = found[0], draft is not None and found[2]
            if not done.tokens:
                times.begin()
            elif begins:
                times.round(k)
            if begins and draft is not None:
                done.rounds += 1
                done.drafted += min(k, max_tokens - len(done.tokens))
            begins = not from_draft
            if token in options.eos_token_ids:
                break
            done.accepted += int(from_draft)
            text.add_token(token)
            done.take([token], job.now)
        generated.close()
        text.finalize()
        done.text = text.text
        done.end(job.now)

    return run


def mlx_lm_batch_jobs(
    model: nn.Module, tokenizing: Tokenizing, options: Options, batch_size: int
) -> System:
    """What ``batch_generate`` does, with its ``BatchGenerator`` driven from here."""

    def run(job: Job) -> None:
        times = RoundTimes(job)
        generator = BatchGenerator(
            model,
            stop_tokens=[[t] for t in sorted(options.eos_token_ids)],
            sampler=sampler_of(options, 0),
            completion_batch_size=batch_size,
            prefill_batch_size=min(batch_size, _PREFILL_BATCH),
            prefill_step_size=options.prefill_step_size,
        )
        index: dict[int, int] = {}
        running = 0
        while running or not job.all_taken:
            indices = job.arrived(wait=not running)
            if indices:
                encoded = tokenizing.encode(job, indices)
                uids = generator.insert(
                    [list(p.token_ids) for p in encoded],
                    [job.requests[i].max_tokens for i in indices],
                )
                index |= dict(zip(uids, indices, strict=True))
                running += len(indices)
            responses = generator.next_generated()
            now = job.now
            new = [r for r in responses if not job.done[index[r.uid]].tokens]
            if len(new) == len(responses):
                times.begin()
            else:
                if new:
                    times.join()
                times.round(0)
            for response in responses:
                done = job.done[index[response.uid]]
                if response.finish_reason != "stop":
                    done.take([response.token], now)
                if response.finish_reason is not None:
                    done.end(now)
                    done.text = tokenizing.tokenizer.decode(done.tokens)
                    running -= 1
        mx.synchronize(generator.stream)
        generator.close()
        times.finish()

    return run
