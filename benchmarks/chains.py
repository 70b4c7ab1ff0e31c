"""What an operation takes among others that follow it, as a forward's layers do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx


def chain_seconds(
    chain: Callable[[mx.array], mx.array], x: mx.array, repeat: int
) -> float:
    """Median time of a compiled chain, each built while the one before runs."""
    compiled = mx.compile(chain)
    for _ in range(2):
        mx.eval(compiled(x))
    waiting = compiled(x)
    mx.async_eval(waiting)
    ends = []
    for _ in range(repeat):
        following = compiled(x)
        mx.async_eval(following)
        mx.eval(waiting)
        ends.append(time.perf_counter())
        waiting = following
    mx.eval(waiting)
    return statistics.median(b - a for a, b in pairwise(ends))
