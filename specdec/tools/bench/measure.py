"""One pass of one system over the prompts."""

from __future__ import annotations

import gc

import mlx.core as mx

from .waves import Prompts, Record, Run


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
