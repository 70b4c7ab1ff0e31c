"""The compared systems: each decodes a job, and all are timed in the same way."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    BatchGenerator,
    generate_step,
    generation_stream,
    speculative_generate_step,
)
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...decoder import SpecDecoder, wired_memory
from ...engine.round import RoundObserver
from ...prompts import EncodedPrompt, encode_all
from ...request import Request
from ...sampling_params import SamplingParams
from .job import Clock, Job, JobRecord, JobRequest, Rounds

#: mlx-lm's default number of prompts that are prefilled together.
_PREFILL_BATCH = 8

#: Decodes a job.
System = Callable[[Job], None]


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """Options that are the same for all systems.

    Args:
        tokenizer: the target's tokenizer, or a stand-in for it.
        chat_template: put prompts into the tokenizer's chat template.
        prefill_step_size: prompt tokens per row in one forward.
        eos_token_ids: tokens that end a row; without them rows run to ``max_tokens``.
        temperature: 0 is greedy.
        seed: the first prompt's seed; it grows by one with each prompt.
    """

    tokenizer: TokenizerWrapper
    chat_template: bool
    prefill_step_size: int
    eos_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0

    def encode(self, job: Job, indices: Iterable[int]) -> list[EncodedPrompt]:
        """Encode the prompts at ``indices`` of a job."""
        chosen = list(indices)
        encoded = encode_all(
            self.tokenizer,
            [job.requests[i].prompt for i in chosen],
            ignore_chat_template=not self.chat_template,
        )
        for i, prompt in zip(chosen, encoded, strict=True):
            job.received[i].prompt_tokens = len(prompt.token_ids)
        return encoded

    def sampler(self, first: int) -> Callable[[mx.array], mx.array] | None:
        """Seed and make mlx-lm's sampler; ``None`` for greedy decoding.

        Args:
            first: index of the first prompt that it samples for.
        """
        if not self.temperature:
            return None
        mx.random.seed(self.seed + first)
        sampler: Callable[[mx.array], mx.array] = make_sampler(temp=self.temperature)
        return sampler


def run_job(
    system: System, requests: Sequence[JobRequest], clock: Clock = time.perf_counter
) -> JobRecord:
    """Run one job on one system, and measure its times and its memory."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with wired_memory():
        job = Job(requests, clock)
        system(job)
        return job.record(peak=mx.get_peak_memory(), before=before)


class _Watch(RoundObserver):
    """Notes the times of this engine's rounds and each row's draft tokens."""

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._running = False

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """Note a round that was read.

        Reading a prompt's last step is not a round: no row's count of rounds grows.
        """
        drafted = []
        for row in rows:
            rounds, before, accepted = self._seen.get(row.index, (0, 0, 0))
            self._seen[row.index] = (row.rounds, row.drafted, row.accepted)
            if row.rounds > rounds:
                drafted.append((row.drafted - before, row.accepted - accepted))
        if drafted:
            self._rounds.end(num_draft_tokens)
            if num_draft_tokens:
                self._rounds.traced.append((num_draft_tokens, drafted))
        elif self._running:
            self._rounds.join()
            return
        else:
            self._rounds.begin()
        self._running = any(row.finish_reason is None for row in rows)


def specdec(decoder: SpecDecoder, options: SystemOptions) -> System:
    """This engine, through its Python API."""

    def run(job: Job) -> None:
        session = decoder.session(observer=_Watch(job.rounds))
        for i, prompt in enumerate(options.encode(job, range(len(job.requests)))):
            params = SamplingParams(
                max_tokens=job.requests[i].max_tokens,
                temperature=options.temperature,
                seed=options.seed + i,
            )
            assert session.add_encoded(prompt, params) == i
        while session.busy:
            events, now = session.step(), job.now
            for event in events:
                job.take(event.index, event.token_ids, now)
                if event.result is not None:
                    result, done = event.result, job.received[event.index]
                    job.end(event.index, now)
                    done.rounds, done.drafted = result.rounds, result.drafted
                    done.accepted = result.accepted
                    done.prefix_tokens = result.prefix_tokens
        mx.synchronize()
        session.stats.check_draft()

    return run


def mlx_lm_step(
    model: nn.Module, options: SystemOptions, draft: nn.Module | None = None, k: int = 0
) -> System:
    """Decoding as in ``stream_generate``: one prompt at a time, a draft or none."""

    def generate(prompt: EncodedPrompt, i: int, max_tokens: int) -> Any:
        shared: dict[str, Any] = {
            "max_tokens": max_tokens,
            "prefill_step_size": options.prefill_step_size,
            "sampler": options.sampler(i),
        }
        tokens = mx.array(list(prompt.token_ids))
        if draft is None:
            return generate_step(tokens, model, **shared)
        return speculative_generate_step(
            tokens, model, draft, num_draft_tokens=k, **shared
        )

    def run(job: Job) -> None:
        for i in range(len(job.requests)):
            (prompt,) = options.encode(job, [i])
            one(job, i, prompt)
        mx.synchronize(generation_stream)

    def one(job: Job, i: int, prompt: EncodedPrompt) -> None:
        done, text = job.received[i], options.tokenizer.detokenizer
        max_tokens = job.requests[i].max_tokens
        generated = generate(prompt, i, max_tokens)
        begins = True
        for output in generated:
            token, from_draft = output[0], draft is not None and output[2]
            if not done.tokens:
                job.rounds.begin()
            elif begins:
                job.rounds.end(k)
            # All tokens of a round exist when its first one is yielded.
            if begins and draft is not None:
                done.rounds += 1
                done.drafted += min(k, max_tokens - len(done.tokens))
            begins = not from_draft
            if token in options.eos_token_ids:
                break
            done.accepted += int(from_draft)
            text.add_token(token)
            job.take(i, [token], job.now)
        generated.close()
        text.finalize()
        _ = text.text  # the detokenizer makes the text on access
        job.end(i, job.now)

    return run


def mlx_lm_batch(model: nn.Module, options: SystemOptions, batch_size: int) -> System:
    """Decoding as in ``batch_generate``, with its ``BatchGenerator``."""

    def run(job: Job) -> None:
        generator = BatchGenerator(
            model,
            stop_tokens=[[t] for t in sorted(options.eos_token_ids)],
            sampler=options.sampler(0),
            completion_batch_size=batch_size,
            prefill_batch_size=min(batch_size, _PREFILL_BATCH),
            prefill_step_size=options.prefill_step_size,
        )
        encoded = options.encode(job, range(len(job.requests)))
        uids = generator.insert(
            [list(p.token_ids) for p in encoded],
            [request.max_tokens for request in job.requests],
        )
        index = {uid: i for i, uid in enumerate(uids)}
        running = len(index)
        while running:
            responses = generator.next_generated()
            now = job.now
            new = [r for r in responses if not job.received[index[r.uid]].tokens]
            if len(new) == len(responses):
                job.rounds.begin()
            else:
                if new:
                    job.rounds.join()
                job.rounds.end(0)
            for response in responses:
                i = index[response.uid]
                if response.finish_reason != "stop":
                    job.take(i, [response.token], now)
                if response.finish_reason is not None:
                    options.tokenizer.decode(job.received[i].tokens)
                    job.end(i, now)
                    running -= 1
        mx.synchronize(generator.stream)
        generator.close()

    return run
