"""Accuracy and memory of GGUF types, packed in MLX's groups of 32.

    python scripts/gguf_table.py    # prints the table of docs/gguf.md

Normally distributed weights are rounded as each type does, with its groups and its
number of steps, but without its 6-bit scales. No public code writes codebook types, so
their blocks are random. For these only the error that packing adds is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf.quants import dequantize

from specdec.models.gguf.header import TENSOR_TYPES
from specdec.models.gguf.tensors import PACKED_BITS, SAME_BITS, repack

ROWS, COLUMNS = 1024, 1024
_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
)
_SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}


def symmetric(values: Any, group: int, low: int) -> Any:
    """Values rounded to steps from ``low`` to ``-low - 1``.

    The value of the largest magnitude becomes the step ``low``.
    """
    groups = values.reshape(-1, group)
    largest = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)]
    step = (largest / low)[:, None]
    return (np.clip(np.rint(groups / step), low, -low - 1) * step).reshape(values.shape)


def affine(values: Any, group: int, most: int) -> Any:
    """Values rounded to steps from 0 to ``most`` above the least value or 0."""
    groups = values.reshape(-1, group)
    least = np.minimum(groups.min(axis=1, keepdims=True), 0)
    step = (groups.max(axis=1, keepdims=True) - least) / most
    found = np.clip(np.rint((groups - least) / step), 0, most) * step + least
    return found.reshape(values.shape)


def levels(values: Any, group: int) -> Any:
    """Values rounded to the nearest of 16 levels, which are unevenly spaced."""
    groups = values.reshape(-1, group)
    largest = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)]
    step = (largest / _LEVELS[0])[:, None]
    middles = (_LEVELS[1:] + _LEVELS[:-1]) / 2
    return (_LEVELS[np.searchsorted(middles, groups / step)] * step).reshape(
        values.shape
    )


KINDS: dict[str, Callable[[Any], Any]] = {
    "Q2_K": lambda x: affine(x, 16, 3),
    "Q3_K": lambda x: symmetric(x, 16, -4),
    "Q6_K": lambda x: symmetric(x, 16, -32),
    "IQ4_NL": lambda x: levels(x, 32),
    "IQ4_XS": lambda x: levels(x, 32),
}


def random_blocks(name: str, rng: np.random.Generator) -> Any:
    """Values of blocks with random codes and the same scale."""
    elements, size = _SIZES[name]
    blocks = rng.integers(0, 256, (256, 4, size), dtype=np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    if name == "IQ1_M":  # its scale lies in the high four bits of four words
        bits = int(scale.view(np.uint16)[0])
        for i in range(4):
            blocks[..., 49 + 2 * i] &= 15
            blocks[..., 49 + 2 * i] |= ((bits >> (4 * i)) & 15) << 4
    else:
        blocks[..., :2] = scale
    kind = {kind.name: kind for kind in gguf.GGMLQuantizationType}[name]
    return dequantize(blocks.reshape(256, 4 * size), kind).reshape(256, 4 * elements)


def root_mean_square(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def packed(values: Any, bits: int) -> Any:
    """The values after packing, with scales in float16."""
    codes, scale, low = repack(values.astype(np.float32), bits, mx.float16)
    scales, least = (np.array(a.astype(mx.float32))[..., None] for a in (scale, low))
    return (codes * scales + least).reshape(values.shape)


def table() -> list[str]:
    """The rows of the table in docs/gguf.md."""
    weights = np.random.default_rng(0).normal(0, 0.02, (ROWS, COLUMNS))
    rows = [
        "| type | bits of a weight, in the file | packed | the file's own error | "
        "added | together |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, bits in PACKED_BITS.items():
        elements, size = _SIZES[name]
        row = f"| {name} | {8 * size / elements:.2f} | {bits + 1} |"
        if name in SAME_BITS:
            rows.append(f"{row} | none | |")
            continue
        if name not in KINDS:
            values = random_blocks(name, np.random.default_rng(1))
            added = root_mean_square(packed(values, bits) - values)
            rows.append(f"{row} | {added / root_mean_square(values):.1%} | |")
            continue
        values, size_of = KINDS[name](weights), root_mean_square(weights)
        after = packed(values, bits)
        own, added, both = (
            root_mean_square(difference) / size_of
            for difference in (values - weights, after - values, after - weights)
        )
        rows.append(f"{row} {own:.1%} | {added:.1%} | {both:.1%} |")
    return rows


if __name__ == "__main__":
    print("\n".join(table()))
