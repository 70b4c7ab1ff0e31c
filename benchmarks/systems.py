"""The systems that decode.py compares, driven token by token and timed alike.

Each takes the prompts of one wave and records, for every step, when its tokens
reached the host. What a rate counts is then the same for all (see ``Wave``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    BatchGenerator,
    generate_step,
    generation_stream,
    speculative_generate_step,
)

from benchmarks.common import token_level
from specdec import EngineConfig, SamplingParams, backend
from specdec.decoder import SpecDecoder

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Options:
    """What all systems are given alike."""

    max_tokens: int
    prefill_step_size: int
    eos_token_ids: frozenset[int] = frozenset()
    read_bucket: int | None = None
    lookahead: int | None = None


@dataclass
class Wave:
    """One wave of rows: when what arrived on the host.

    The decode phase begins when every row has its first token and ends with the
    last token; tokens that arrive in it count. A system that brings its first
    token together with others (a first round) gets none of them for free.
    """

    rows: int
    start: float = field(default_factory=time.perf_counter)
    end: float = 0.0
    # (time, tokens of each row, rows still running before it)
    steps: list[tuple[float, list[int], int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    row_rounds: int = 0

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.rows)]
        self._ended = [False] * self.rows

    def begin_step(self) -> None:
        """Note that a step has reached the host, now."""
        running = self._ended.count(False)
        self.steps.append((time.perf_counter(), [0] * self.rows, running))

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Note tokens that the step brought."""
        self.tokens[row] += tokens
        self.steps[-1][1][row] += len(tokens)

    def row_ended(self, row: int) -> None:
        """Note that the step was a row's last."""
        self._ended[row] = True

    def finish(self) -> None:
        """Note that the device is idle."""
        self.end = time.perf_counter()
        # Steps behind the last token are rounds that nobody needed.
        while self.steps and not any(self.steps[-1][1]):
            self.steps.pop()

    def _first(self) -> int:
        """Index of the step with which the last row got its first token."""
        last = 0
        for row in range(self.rows):
            arrived = (i for i, (_, n, _) in enumerate(self.steps) if n[row])
            last = max(last, next(arrived, 0))
        return last

    def record(self) -> dict[str, object]:
        """Plain numbers, for the raw result."""
        first = self._first()
        times = [t for t, _, _ in self.steps] or [self.end]
        decode = self.steps[first + 1 :]
        return {
            "rows": self.rows,
            "wall_seconds": self.end - self.start,
            "first_token_seconds": times[first] - self.start,
            "decode_seconds": times[-1] - times[first],
            "decode_tokens": sum(sum(n) for _, n, _ in decode),
            "generated_tokens": sum(map(len, self.tokens)),
            "steps": len(decode),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "row_rounds": self.row_rounds,
            "step_ms": [
                round((b - a) * 1e3, 3)
                for a, b in zip(times[first:], times[first + 1 :], strict=False)
            ],
            "step_rows": [running for _, _, running in decode],
        }


Run = Callable[[Prompts], Wave]


def mlx_lm_plain(model: nn.Module, options: Options) -> Run:
    """``generate_step``, one prompt at a time."""

    def run(prompts: Prompts) -> Wave:
        (prompt,) = prompts
        wave = Wave(1)
        # Annotated by mlx-lm as arrays; the tokens are numbers.
        generated: Any = generate_step(
            mx.array(list(prompt)),
            model,
            max_tokens=options.max_tokens,
            prefill_step_size=options.prefill_step_size,
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

    def run(prompts: Prompts) -> Wave:
        wave = Wave(len(prompts))
        generator = BatchGenerator(
            model,
            max_tokens=options.max_tokens,
            stop_tokens=[[t] for t in sorted(options.eos_token_ids)],
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

    def run(prompts: Prompts) -> Wave:
        (prompt,) = prompts
        wave = Wave(1)
        generated: Any = speculative_generate_step(
            mx.array(list(prompt)),
            model,
            draft,
            num_draft_tokens=k,
            max_tokens=options.max_tokens,
            prefill_step_size=options.prefill_step_size,
        )
        left, begins = options.max_tokens, True
        for token, _, from_draft in generated:
            if begins:
                # All tokens of a round are there with its first.
                wave.begin_step()
                wave.row_rounds += 1
                wave.drafted += min(k, left)
            begins = not from_draft
            if token in options.eos_token_ids:
                break
            left -= 1
            wave.accepted += from_draft
            wave.add(0, [token])
        generated.close()
        mx.synchronize(generation_stream)
        wave.finish()
        return wave

    return run


def engine(
    model: nn.Module, draft: nn.Module | None, k: int, batch_size: int, options: Options
) -> Run:
    """This engine, by its Python API; text is left out."""
    config = EngineConfig(
        batch_size=batch_size,
        num_draft_tokens=k,
        prefill_step_size=options.prefill_step_size,
        read_bucket=options.read_bucket,
    )
    defaults = backend.defaults()
    if options.lookahead is not None:
        defaults = replace(defaults, lookahead=options.lookahead)
    params = SamplingParams(max_tokens=options.max_tokens)

    def run(prompts: Prompts) -> Wave:
        # Made anew, so that nothing of an earlier run is in memory.
        with patch.object(backend, "defaults", lambda: defaults):
            decoder = SpecDecoder(
                token_level(model, options.eos_token_ids),
                None if draft is None else token_level(draft),
                config=config,
            )
        wave = Wave(len(prompts))
        rounds = None
        for event in decoder.stream(prompts, params):
            # The events of one step follow each other.
            if decoder.stats.rounds != rounds:
                rounds = decoder.stats.rounds
                wave.begin_step()
            wave.add(event.index, event.token_ids)
            if event.result is not None:
                wave.row_ended(event.index)
                wave.drafted += event.result.drafted
                wave.accepted += event.result.accepted
                wave.row_rounds += event.result.rounds
        mx.synchronize()
        wave.finish()
        return wave

    return run
