"""Has other processes compile those of MLX's kernels that every model needs.

MLX compiles what gathers and scatters when it is first launched: three to six seconds
for each kernel, one after the other, since it holds a lock. It keeps the results in the
folder of :mod:`.kernel_files`. Processes that launch one each compile them side by
side, while this process compiles ours.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import mlx.nn as nn

from ..utils.child import module_process
from . import kernel_files

logger = logging.getLogger(__name__)

#: Bytes of the GPU that must be free: each process takes some 0.5 GB until it ends.
_FREE = 8 << 30
#: Seconds that are waited for all of them. MLX compiles by itself what is missing.
_MOST_SECONDS = 60
_NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}


def _scattered(dtype: mx.Dtype) -> mx.array:
    """Write into caches, of keys or of tokens."""
    at, written = mx.zeros((1, 1), mx.int32), mx.ones((1, 1), dtype)
    return mx.put_along_axis(mx.zeros((1, 2), dtype), at, written, axis=1)


def _gathered(dtype: mx.Dtype) -> mx.array:
    """Look up an embedding, or what a packed one consists of."""
    return mx.take(mx.zeros((2, 2), dtype), mx.zeros((1, 1), mx.int32), axis=0)


def _picked(dtype: mx.Dtype) -> mx.array:
    """Look up a position of each row, as draft heads do."""
    at = mx.zeros((1, 1), mx.int32)
    return mx.take_along_axis(mx.zeros((1, 2), dtype), at, axis=1)


def _gathered_packed(_: mx.Dtype) -> mx.array:
    at = mx.zeros((1,), mx.int32)
    part = mx.slice(mx.zeros((2, 2)), at, axes=(1,), slice_size=(2, 1))
    return _gathered(mx.uint32) + part.astype(mx.uint32)


def _gated(dtype: mx.Dtype) -> mx.array:
    """The gate of attention's output, as ``mx.compile`` fuses it."""

    @mx.compile
    def gated(x: mx.array, gate: mx.array) -> mx.array:
        return x * mx.sigmoid(gate)

    result: mx.array = gated(mx.ones((2, 2), dtype), mx.ones((2, 2), dtype))
    return result


def _activated(shapeless: bool, dtype: mx.Dtype) -> mx.array:
    """The activation of a block, in a forward that is compiled, and in others."""

    @partial(mx.compile, shapeless=shapeless)
    def activated(gate: mx.array, x: mx.array) -> mx.array:
        product: mx.array = nn.silu(gate) * x
        return product

    result: mx.array = activated(mx.ones((2, 2), dtype), mx.ones((2, 2), dtype))
    return result


#: What is launched, by name; each takes a process.
LAUNCHES: dict[str, Callable[[mx.Dtype], mx.array]] = {
    "scatter": _scattered,
    "scatter-tokens": lambda _: _scattered(mx.int32),
    "gather": _gathered,
    "gather-tokens": lambda _: _gathered(mx.int32),
    "gather-packed": _gathered_packed,
    "gather-each": _picked,
    "gather-each-token": lambda _: _picked(mx.int32),
    "gate": _gated,
    "activation": partial(_activated, False),
    "activation-alone": partial(_activated, True),
}


@contextmanager
def compiled_beside(dtype: mx.Dtype | None) -> Iterator[list[Callable[[], None]]]:
    """Let processes compile MLX's kernels for a model's type, once on a machine.

    Args:
        dtype: ``None``: none are compiled.

    Yields:
        Steps that wait for a process each. Those that are not waited for are ended.
    """
    folder = kernel_files.kernel_folder()
    name = None if dtype is None else _NAMES.get(dtype)
    free = mx.device_info().get("free_memory")
    if folder is None or name is None or not isinstance(free, int) or free < _FREE:
        yield []
        return
    # Where a process fails, MLX compiles in this one what is missing. So it is marked
    # too, and no later one tries again.
    marks = {each: folder / f"launched_{each}_{name}" for each in LAUNCHES}
    waits: list[Callable[[], None]] = []
    end = time.monotonic() + _MOST_SECONDS
    with ExitStack() as ends:
        try:
            for each, mark in marks.items():
                if mark.exists():
                    continue
                part = Path(ends.enter_context(TemporaryDirectory(dir=folder)))
                program, environment = module_process(__name__, (each, name))
                environment["MLX_PTX_CACHE_DIR"] = str(part)
                process = subprocess.Popen(
                    program,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                ends.callback(_end, process)
                waits.append(partial(_take, process, end, part, mark))
        except OSError as error:
            logger.debug("MLX's kernels are not compiled beside: %r", error)
        yield waits


def _take(process: subprocess.Popen[bytes], end: float, part: Path, mark: Path) -> None:
    """Wait for a process, and move what it has compiled to where MLX looks."""
    try:
        if process.wait(max(0, end - time.monotonic())) == 0:
            # MLX reads the code first, so the names are there before it.
            for file in sorted(part.iterdir(), key=lambda f: f.suffix == ".ptx"):
                os.replace(file, mark.parent / file.name)
        mark.touch()
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s was not compiled beside: %r", mark.name, error)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


if __name__ == "__main__":
    mx.eval(LAUNCHES[sys.argv[1]](getattr(mx, sys.argv[2])))
    mx.synchronize()
