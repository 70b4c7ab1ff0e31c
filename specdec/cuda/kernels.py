"""CUDA kernels of ours that MLX compiles when they are first used."""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx

#: PTX names of the types that our kernels multiply on tensor cores.
TYPES = {mx.bfloat16: "bf16", mx.float16: "f16"}
_MMA = """
#define SPECDEC_MMA(d, a0, a1, a2, a3, b0, b1)                              \\
  asm volatile(                                                             \\
      "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "                  \\
      "{{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"       \\
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                      \\
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
"""

#: The most arrays that a product with stacked matrices can be written to. One kernel
#: serves any number of them, because each kernel takes MLX seconds to compile.
MOST_PARTS = 3
#: Writes ``sum``, of row m and column at of N, to the array that has the column; the
#: i-th array ends before ends[i].
WRITE = """
        if (bias_ndim == 1) sum += static_cast<float>(bias[at]);
        const size_t row = m;
        *(at < ends[0] ? out0 + row * ends[0] + at
          : at < ends[1] ? out1 + row * (ends[1] - ends[0]) + (at - ends[0])
                         : out2 + row * (N - ends[1]) + (at - ends[1])) =
            static_cast<T>(sum);
"""
#: The names of these arrays.
PARTS = tuple(f"out{i}" for i in range(MOST_PARTS))


@cache
def first_ends(ends: tuple[int, ...]) -> mx.array:
    """Where the first and the second matrix end, for the kernel."""
    return mx.array((*ends, ends[-1])[:2], mx.int32)


def shapes_of_parts(
    shape: tuple[int, ...], ends: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Shapes of the arrays for x of shape (..., K); unused arrays are small."""
    sizes = [b - a for a, b in pairwise((0, *ends))]
    shapes = [(*shape[:-1], size) for size in sizes]
    return shapes + [(1,)] * (MOST_PARTS - len(sizes))


def tensor_cores(dtype: mx.Dtype) -> str:
    """The header of kernels that call SPECDEC_MMA: a tensor core's product."""
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
    # MLX finds compiled kernels by name.
    version = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"specdec_{name}_{version}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        ensure_row_contiguous=copies_views,
    )


def _shortened(code: str) -> str:
    """The code without comment lines and indentation.

    At every launch MLX hashes the whole source, to find the compiled kernel. It appends
    a line of its own to a header, which must not become part of a macro.
    """
    lines = (line.strip() for line in code.splitlines())
    kept = (line for line in lines if line and not line.startswith("//"))
    return "".join(f"{line}\n" for line in kept)
