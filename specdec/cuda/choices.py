"""Times once which of two kernels is faster for a matrix, and keeps the choice.

Rules of thumb from one GPU say which kernel is usual. On the current machine both are
timed for the model's own matrices, and the other kernel is taken where it is clearly
faster. A choice holds for a matrix, not for a number of rows: a row's product then has
the same bits in every batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import cycle, islice

import mlx.core as mx

from . import proofs

logger = logging.getLogger(__name__)

# A kernel that is faster than the usual one by less than this factor is not taken.
MARGIN = 1.15
# Matrices of one kind that are multiplied in turn: one alone would stay in the device's
# cache. Products of a chain, and how often each chain is timed.
MATRICES, PRODUCTS, TIMES = 32, 64, 6

Run = Callable[[], Sequence[mx.array]]
Kind = tuple[Hashable, ...]

# By the name of a kind of matrix: whether our kernel was faster.
_ours: dict[str, bool] = {}


@cache
def _name(kind: Kind) -> str:
    return " ".join(map(str, kind))


def chosen(kind: Kind) -> bool | None:
    """Whether our kernel was faster for a kind of matrix; ``None``: not timed."""
    return _ours.get(_name(kind))


def all_chosen() -> Mapping[str, bool]:
    """All choices of this process; plain data."""
    return dict(_ours)


def take(verdicts: Mapping[str, bool]) -> None:
    """Replace all choices by those of another process, from :func:`all_chosen`."""
    _ours.clear()
    _ours.update(verdicts)


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
        runs: products by our kernel, and the same products by MLX's, for each of a few
            numbers of rows; their times are added up.
        usual: whether our kernel is taken where both are about as fast.
    """
    name = _name(kind)
    if name in _ours:
        return
    faster = proofs.kept(name)
    if faster is None:
        try:
            ours = sum(_seconds(run, clock) for run, _ in runs)
            theirs = sum(_seconds(run, clock) for _, run in runs)
        except (RuntimeError, ValueError) as error:
            logger.debug("%s cannot be timed: %s", name, error)
            return
        faster = ours < theirs * (MARGIN if usual else 1 / MARGIN)
        proofs.keep(name, faster)
    _ours[name] = faster


def chained(
    products: Sequence[Callable[[mx.array], mx.array]],
    x: mx.array,
    count: int = PRODUCTS,
) -> Run:
    """A chain of ``count`` products, like those of layers, in one compiled graph.

    Timing products one by one would measure how long the host takes to launch them.

    Args:
        products: each takes an array shaped as ``x``, and returns (..., N).
    """

    def chain(x: mx.array) -> mx.array:
        for product in islice(cycle(products), count):
            # An operation between broadcast and sum, or MLX compiles a kernel of both.
            first = mx.broadcast_to(product(x)[..., :1], x.shape)
            x = mx.squeeze(mx.expand_dims(x, 0) + mx.expand_dims(first, 0), 0)
        return x

    compiled = mx.compile(chain)
    return lambda: [compiled(x)]


def _seconds(run: Run, clock: Callable[[], float]) -> float:
    """The least seconds of a run, built while the run before it is computed."""
    mx.eval(*run())  # compiled now
    waiting, times, start = run(), [], clock()
    mx.async_eval(*waiting)
    for _ in range(TIMES):
        following = run()
        mx.async_eval(*following)
        mx.eval(*waiting)
        end = clock()
        times.append(end - start)
        waiting, start = following, end
    mx.eval(*waiting)
    return min(times[1:])
