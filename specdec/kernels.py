"""CUDA kernels of ours that MLX compiles when they are first used."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import mlx.core as mx


@cache
def cuda_kernel(
    name: str, source: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Any:
    """What launches ``source``: see :func:`mx.fast.cuda_kernel`."""
    # MLX keeps what it compiled on disk by name.
    version = hashlib.sha256(source.encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"specdec_{name}_{version}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
    )
