"""One pass of one system over the prompts, and what it comes to."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import mlx.core as mx

from .waves import Prompts, Run

Record = dict[str, Any]


def measure(run: Run, prompts: Prompts, batch_size: int) -> Record:
    """One pass of one system over all prompts, in waves of its batch size."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    waves, tokens = [], []
    for first in range(0, len(prompts), batch_size):
        wave = run(prompts[first : first + batch_size], first)
        waves.append(wave.record())
        tokens += wave.tokens
    return {
        "peak_memory_bytes": mx.get_peak_memory(),
        "memory_before_bytes": before,
        "tokens": tokens,
        "waves": waves,
    }


def total(record: Record, name: str) -> float:
    """The sum of one number over the waves of a pass."""
    return float(sum(wave[name] for wave in record["waves"]))


def rate(record: Record) -> float:
    """Decode tokens per second."""
    seconds = total(record, "decode_seconds")
    return total(record, "decode_tokens") / seconds if seconds else 0.0


def full_steps(record: Record) -> list[float]:
    """Milliseconds of the steps in which every row of the wave was running."""
    return [
        ms
        for wave in record["waves"]
        for ms, rows in zip(wave["step_ms"], wave["step_rows"], strict=True)
        if rows == wave["rows"]
    ]


def step_ms(record: Record) -> float:
    """Median milliseconds of a step with all rows running; 0 without any."""
    return statistics.median(full_steps(record) or [0.0])
