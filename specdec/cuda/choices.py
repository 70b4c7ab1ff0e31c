"""Which of two kernels computes a matrix's products sooner: timed once, and kept.

Rules of thumb that were found on one GPU say which is usual. On the machine at hand
both are timed for the model's own matrices, and the other one is taken where it is
clearly faster. A choice holds for a matrix, not for a number of rows: a row's product
then has the same bits whatever is computed beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx

from . import proofs

logger = logging.getLogger(__name__)

# What is faster than the usual by less than this factor is not worth a change.
MARGIN = 1.1
# Matrices of one kind that are multiplied one after the other, as layers are: one
# alone would stay in the device's cache. Then how often each kernel is timed.
MATRICES, TIMES = 8, 4

Run = Callable[[], Sequence[mx.array]]
Kind = tuple[Hashable, ...]

_ours: dict[Kind, bool] = {}


def chosen(kind: Kind) -> bool | None:
    """Whether our kernel was faster for a kind of matrix; ``None``: not timed."""
    return _ours.get(kind)


def choose(
    kind: Kind,
    runs: Sequence[tuple[Run, Run]],
    *,
    usual: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Time our kernel and MLX's, unless an earlier process has.

    Args:
        kind: all that the times depend on, besides device and versions.
        runs: products by our kernel, and the same ones by MLX's: those of a few
            numbers of rows, whose times are added up.
        usual: whether ours is taken where both are about as fast.
    """
    if kind in _ours:
        return
    name = " ".join(map(str, kind))
    found = proofs.kept(name)
    if found is None:
        try:
            ours = sum(_seconds(run, clock) for run, _ in runs)
            theirs = sum(_seconds(run, clock) for _, run in runs)
        except (RuntimeError, ValueError) as error:
            logger.debug("%s cannot be timed: %s", name, error)
            return
        found = ours < theirs * (MARGIN if usual else 1 / MARGIN)
        proofs.keep(name, found)
    _ours[kind] = found


def _seconds(run: Run, clock: Callable[[], float]) -> float:
    mx.eval(run())  # compiled now
    times = []
    for _ in range(TIMES):
        begun = clock()
        mx.eval(run())
        times.append(clock() - begun)
    return min(times)
