"""mlx-lm's own generators, driven token by token and timed like this engine."""

from __future__ import annotations

from collections.abc import Callable
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

from .waves import Options, Prompts, Run, Wave


def sampler_of(options: Options, first: int) -> Callable[[mx.array], mx.array] | None:
    """mlx-lm's sampler for the temperature; ``None`` where it is greedy."""
    if not options.temperature:
        return None
    mx.random.seed(options.seed + first)
    sampler: Callable[[mx.array], mx.array] = make_sampler(temp=options.temperature)
    return sampler


def mlx_lm_plain(model: nn.Module, options: Options) -> Run:
    """``generate_step``, one prompt at a time."""

    def run(prompts: Prompts, first: int = 0) -> Wave:
        (prompt,) = prompts
        wave = Wave(1, options.clock)
        # Annotated by mlx-lm as arrays; the tokens are numbers.
        generated: Any = generate_step(
            mx.array(list(prompt)),
            model,
            max_tokens=options.max_tokens,
            prefill_step_size=options.prefill_step_size,
            sampler=sampler_of(options, first),
        )
        for token, _ in generated:
            if token in options.eos_token_ids:
                break
            wave.begin_step()
            wave.add(0, [token])
        generated.close()
        mx.synchronize(generation_stream)
        wave.finish()
        return wave

    return run


def mlx_lm_batch(model: nn.Module, options: Options) -> Run:
    """What ``batch_generate`` does, with its ``BatchGenerator`` driven from here."""

    def run(prompts: Prompts, first: int = 0) -> Wave:
        wave = Wave(len(prompts), options.clock)
        generator = BatchGenerator(
            model,
            max_tokens=options.max_tokens,
            stop_tokens=[[t] for t in sorted(options.eos_token_ids)],
            sampler=sampler_of(options, first),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
            prefill_step_size=options.prefill_step_size,
        )
        uids = generator.insert([list(p) for p in prompts])
        row = {uid: i for i, uid in enumerate(uids)}
        while responses := generator.next_generated():
            wave.begin_step()
            for response in responses:
                if response.finish_reason != "stop":
                    wave.add(row[response.uid], [response.token])
                if response.finish_reason is not None:
                    wave.row_ended(row[response.uid])
        mx.synchronize(generator.stream)
        wave.finish()
        generator.close()
        return wave

    return run


def mlx_lm_speculative(
    model: nn.Module, draft: nn.Module, k: int, options: Options
) -> Run:
    """``speculative_generate_step``, one prompt at a time."""

    def run(prompts: Prompts, first: int = 0) -> Wave:
        (prompt,) = prompts
        wave = Wave(1, options.clock)
        generated: Any = speculative_generate_step(
            mx.array(list(prompt)),
            model,
            draft,
            num_draft_tokens=k,
            max_tokens=options.max_tokens,
            prefill_step_size=options.prefill_step_size,
            sampler=sampler_of(options, first),
        )
        left, begins = options.max_tokens, True
        for token, _, from_draft in generated:
            if begins:
                # All tokens of a round are there with its first.
                wave.begin_step()
                wave.count(0, rounds=1, drafted=min(k, left), accepted=0)
            begins = not from_draft
            if token in options.eos_token_ids:
                break
            left -= 1
            wave.count(0, rounds=0, drafted=0, accepted=int(from_draft))
            wave.add(0, [token])
        generated.close()
        mx.synchronize(generation_stream)
        wave.finish()
        return wave

    return run
