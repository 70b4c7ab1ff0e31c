"""The tensors of a GGUF file as MLX arrays, packed or as floats.

Q4_0, Q4_1 and Q8_0 have MLX's own layout (groups of 32, one scale and one bias
each), so they can stay packed without loss. Every other quantization becomes
floats, through the ``gguf`` package, some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...errors import UnsupportedModelError
from .header import GGUFFile, TensorInfo

GROUP_SIZE = 32
PACKED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
# Elements that are in float32 at one time while a tensor is read.
CHUNK = 1 << 24


@dataclass(frozen=True)
class Packed:
    """A quantized matrix as MLX stores it, ``group_size`` 32, affine mode.

    ``weight`` is uint32 (rows, columns * bits / 32), ``scales`` and ``biases``
    are (rows, columns / 32): value = scale * stored + bias.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def is_packed(info: TensorInfo) -> bool:
    """Whether the tensor can stay quantized in MLX."""
    return info.type_name in PACKED_BITS and len(info.shape) == 2


def _chunks(info: TensorInfo) -> range:
    return range(0, info.rows, max(1, CHUNK // info.shape[-1]))


def _join(parts: list[mx.array]) -> mx.array:
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    mx.eval(joined)
    return joined


def read_packed(file: GGUFFile, info: TensorInfo, dtype: mx.Dtype) -> Packed:
    """Read a Q4_0, Q4_1 or Q8_0 matrix as it is, scales in ``dtype``."""
    bits = PACKED_BITS[info.type_name]
    chunks = _chunks(info)
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    for start in chunks:
        stop = min(start + chunks.step, info.rows)
        quants, scales, biases = _unpack_blocks(info, file.raw_rows(info, start, stop))
        part = (
            mx.array(quants),
            mx.array(scales).astype(dtype),
            mx.array(biases).astype(dtype),
        )
        mx.eval(*part)
        parts.append(part)
    weight, scale, bias = (_join(list(column)) for column in zip(*parts, strict=True))
    return Packed(weight, scale, bias, bits)


def _unpack_blocks(
    info: TensorInfo, raw: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Packed words, scales and biases of some rows of Q4_0, Q4_1 or Q8_0 blocks."""
    rows, columns = raw.shape[0], info.shape[-1]
    blocks = raw.reshape(rows, columns // GROUP_SIZE, -1)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0]
    if info.type_name == "Q8_0":
        # int8 to uint8 with the offset moved into the bias: exact.
        quants = blocks[..., 2:] ^ np.uint8(0x80)
        biases = scales * np.float16(-128)
    else:
        if info.type_name == "Q4_0":
            nibbles, biases = blocks[..., 2:], scales * np.float16(-8)
        else:
            nibbles = blocks[..., 4:]
            biases = blocks[..., 2:4].copy().view(np.float16)[..., 0]
        # A block keeps elements 0-15 in its low nibbles and 16-31 in its high
        # ones; MLX wants neighbours side by side.
        low, high = nibbles & np.uint8(15), nibbles >> np.uint8(4)
        ordered = np.concatenate([low, high], axis=-1)
        quants = ordered[..., 0::2] | (ordered[..., 1::2] << np.uint8(4))
    words = np.ascontiguousarray(quants).reshape(rows, -1).view(np.uint32)
    return words, scales, biases


def read_float_rows(
    file: GGUFFile, info: TensorInfo, start: int, stop: int
) -> npt.NDArray[Any]:
    """Rows ``start .. stop - 1`` in float32, whatever their quantization.

    Raises:
        UnsupportedModelError: the quantization needs the ``gguf`` package, which
            is not installed, or which does not know it either.
    """
    raw = file.raw_rows(info, start, stop)
    rows = stop - start
    if info.type_name == "F32":
        return raw.view(np.float32)
    if info.type_name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if info.type_name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if info.type_name in PACKED_BITS:
        words, scales, biases = _unpack_blocks(info, raw)
        stored = words.view(np.uint8)
        if PACKED_BITS[info.type_name] == 4:
            stored = np.stack([stored & 15, stored >> 4], axis=-1)
        groups = stored.reshape(rows, -1, GROUP_SIZE).astype(np.float32)
        values = groups * scales[..., None].astype(np.float32)
        values += biases[..., None].astype(np.float32)
        return values.reshape(rows, -1)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file.path} has {info.type_name} weights, which need the gguf "
            "package: pip install gguf"
        ) from error
    try:
        return dequantize(raw, GGMLQuantizationType(info.type_id))
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(
            f"{file.path}: {info.type_name} weights are not supported by the "
            "installed gguf package: use a file with another quantization"
        ) from error


def read_float(
    file: GGUFFile, info: TensorInfo, dtype: mx.Dtype, *, add: float = 0.0
) -> mx.array:
    """A whole tensor in ``dtype``, ``add`` added to it in float32.

    Raises:
        UnsupportedModelError: see :func:`read_float_rows`.
    """
    chunks = _chunks(info)
    parts = []
    for start in chunks:
        stop = min(start + chunks.step, info.rows)
        values = read_float_rows(file, info, start, stop)
        part = mx.array(values + np.float32(add) if add else values).astype(dtype)
        mx.eval(part)
        parts.append(part)
    return _join(parts).reshape(info.shape)
