"""CUDA kernels of ours that MLX compiles when they are first used."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import mlx.core as mx

#: Types that our kernels have tensor cores multiply, as PTX calls them.
TYPES = {mx.bfloat16: "bf16", mx.float16: "f16"}
_MMA = """
#define SPECDEC_MMA(d, a0, a1, a2, a3, b0, b1)                              \\
  asm volatile(                                                             \\
      "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "                  \\
      "{{%0,%1,%2,%3}}, {{%4,%5,%6,%7}}, {{%8,%9}}, {{%0,%1,%2,%3}};"       \\
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                      \\
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
"""


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
    """What launches ``source``: see :func:`mx.fast.cuda_kernel`.

    Args:
        copies_views: whether inputs with gaps are copied first; else the source reads
            them by their strides.
    """
    # MLX keeps what it compiled on disk by name.
    version = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"specdec_{name}_{version}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        ensure_row_contiguous=copies_views,
    )
