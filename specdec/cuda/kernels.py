"""CUDA kernels of ours that MLX compiles when they are first used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import mlx.core as mx

from . import kernel_files
from .kernel_files import Kernel

# Ends of parts that a kernel gets at least: 16 bytes, see last_columns.
_FEWEST_ENDS = 4
#: PTX names of the types that our kernels multiply on tensor cores.
TYPES = {mx.bfloat16: "bf16", mx.float16: "f16"}
_MMA = """
#define SPECDEC_MMA(d, a0, a1, a2, a3, b0, b1)                              \\
  asm volatile(                                                             \\
      "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "                  \\
      "{{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"       \\
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                      \\
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
#define SPECDEC_FMA(d, a, b, c)                                             \\
  asm("fma.rn.{0}x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c))
"""

#: Writes ``sum``, of row m of M and column at of N. The parts of a product lie in
#: ``out`` one after the other, each as (M, size); the i-th has the columns before
#: ends[i]. So one kernel serves any number of parts, and has one output: each output
#: takes MLX time to launch. First comes what is the same for all rows of a column.
COLUMN = """
        const float added = bias_ndim == 1 ? static_cast<float>(bias[at]) : 0.0f;
        int left = 0, right = ends[0];
        for (int i = 1; at >= right; ++i) left = right, right = ends[i];
"""
CELL = """
        const size_t rows = M, row = m;
        out[rows * left + row * (right - left) + (at - left)] =
            static_cast<T>(sum + added);
"""
WRITE = COLUMN + CELL


@cache
def last_columns(ends: tuple[int, ...]) -> mx.array:
    """Where the parts of a product end, for the kernel; the last end is repeated.

    MLX keeps arrays of up to 8 bytes, and those that the host makes, in managed memory.
    A GPU may read that from the host, and each of a kernel's blocks waits for it. So
    the array is longer, and a copy that the device has made.
    """
    ends += ends[-1:] * (_FEWEST_ENDS - len(ends))
    # If nothing held the host's array, the sum would take its memory.
    by_host = mx.array(ends, mx.int32)
    by_device = by_host + mx.zeros(len(ends), mx.int32)
    mx.eval(by_device)
    return by_device


def whole_shape(shape: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of ``out`` for x of shape (..., K); several parts are a flat array."""
    whole = *shape[:-1], ends[-1]
    return whole if len(ends) == 1 else (prod(whole),)


def parts_of(
    out: mx.array, shape: tuple[int, ...], ends: tuple[int, ...]
) -> list[mx.array]:
    """The parts of a product with x of shape (..., K), as views of ``out``."""
    if len(ends) == 1:
        return [out]
    rows, parts = prod(shape[:-1]), []
    for begin, end in pairwise((0, *ends)):
        part = *shape[:-1], end - begin
        strides = [prod(part[i + 1 :]) for i in range(len(part))]
        parts.append(mx.as_strided(out, part, strides, rows * begin))
    return parts


def tensor_cores(dtype: mx.Dtype) -> str:
    """The header of kernels that call SPECDEC_MMA or SPECDEC_FMA.

    The first is a tensor core's product, the second a * b + c for two pairs of numbers.
    """
    return _MMA.format(TYPES[dtype])


@cache
def cuda_kernel(
    name: str,
    source: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    header: str = "",
    copies_views: bool = True,
) -> Any:
    """The function that launches ``source``, see :func:`mx.fast.cuda_kernel`.

    Args:
        copies_views: whether inputs with gaps are copied first; if false, the source
            reads them by their strides.
    """
    source, header = _shortened(source), _shortened(header)
    architecture = kernel_files.architecture()
    kernel = Kernel.of(name, header, source, inputs, outputs, architecture)
    launch = kernel.launched_by(mx.fast.cuda_kernel, copies_views=copies_views)
    placed: set[tuple[Any, ...]] = set()

    def run(
        *, inputs: Any, output_dtypes: Any, template: Sequence[Any] = (), **call: Any
    ) -> Any:
        # A template says the types of all inputs.
        if (form := tuple(template)) not in placed:
            kernel_files.place(kernel, inputs, output_dtypes, template)
            placed.add(form)
        call |= {"inputs": inputs, "output_dtypes": output_dtypes}
        return launch(template=list(template), **call)

    return run


# Spaces beside these separate no two tokens.
_SPACES = re.compile(r"\s*([][(){};,=?])\s*")


def _shortened(code: str) -> str:
    """The code without comments, and without spaces that it does not need.

    At every launch MLX hashes the whole source, to find the compiled kernel. It appends
    a line of its own to a header, which must not become part of a macro.
    """
    lines: list[str] = []
    for line in code.splitlines():
        short = re.sub(r"\s+", " ", line.partition("//")[0]).strip()
        if short:
            in_macro = short.startswith("#") or (lines and lines[-1].endswith("\\"))
            lines.append(short if in_macro else _SPACES.sub(r"\1", short))
    return "".join(f"{line}\n" for line in lines)
