"""The tensors of a GGUF file as MLX arrays, packed or as floats.

MLX packs matrices in groups of 32 columns (or more), each with a scale and a bias. Some
GGUF types store the same and keep their number of bits. Types whose groups are smaller
than 32, or whose steps differ in size, are repacked in more bits. Everything else
becomes floats, through the ``gguf`` package, some rows at a time.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...errors import UnsupportedModelError
from ...utils.extras import install
from .header import GGUFFile, TensorInfo

GROUP_SIZE = 32
# Type -> bits. A group of 32 is already affine in the file: its numbers stay the same,
# except that scale and bias are rounded to the model's float type.
SAME_BITS = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q8_0": 8,
    "Q4_K": 4,
    "Q5_K": 5,
    "MXFP4": 5,
}
# Type -> the bits with which the error of the file grows by at most 4%; measured in
# docs/gguf.md.
REPACKED_BITS = {
    "Q2_K": 4,
    "Q3_K": 5,
    "Q6_K": 8,
    "IQ4_NL": 6,
    "IQ4_XS": 6,
    "IQ1_S": 4,
    "IQ1_M": 4,
    "IQ2_XXS": 4,
    "IQ2_XS": 4,
    "IQ2_S": 4,
    "IQ3_XXS": 5,
    "IQ3_S": 5,
}
PACKED_BITS = SAME_BITS | REPACKED_BITS
# Elements that are held in float32 at one time while a tensor is read.
CHUNK = 1 << 24
# Bits of a code -> number of codes that fill whole bytes together.
_CODES = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 8: 1}
# Twice the values of MXFP4's codes.
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)

_Array = npt.NDArray[Any]


#: Matrices as MLX packs them, in affine groups of 32: ``weight``, uint32 (..., rows,
#: columns * bits / 32), ``scales`` and ``biases``, (..., rows, columns / 32).
Packed = tuple[mx.array, mx.array, mx.array]


def is_packed(info: TensorInfo) -> bool:
    """Whether the tensor can stay quantized in MLX."""
    whole = info.shape[-1] % GROUP_SIZE == 0
    return info.type_name in PACKED_BITS and len(info.shape) in (2, 3) and whole


def _chunks(info: TensorInfo) -> range:
    return range(0, info.rows, max(1, CHUNK // info.shape[-1]))


def _join(parts: list[mx.array]) -> mx.array:
    joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    mx.eval(joined)
    return joined


def read_packed(file: GGUFFile, info: TensorInfo, dtype: mx.Dtype) -> Packed:
    """Read matrices of a type in :data:`PACKED_BITS`, with scales in ``dtype``.

    Raises:
        UnsupportedModelError: see :func:`read_float_rows`.
    """
    bits = PACKED_BITS[info.type_name]
    chunks = _chunks(info)
    parts: list[tuple[mx.array, mx.array, mx.array]] = []
    for start in chunks:
        stop = min(start + chunks.step, info.rows)
        if info.type_name in SAME_BITS:
            codes, scales, biases = _codes(info, file.raw_rows(info, start, stop))
            scale, bias = (mx.array(each).astype(dtype) for each in (scales, biases))
        else:
            values = read_float_rows(file, info, start, stop)
            codes, scale, bias = repack(values, bits, dtype)
        part = mx.array(_words(codes, bits)), scale, bias
        mx.eval(*part)
        parts.append(part)
    joined = (_join(list(column)) for column in zip(*parts, strict=True))
    lead = info.shape[:-1]
    weight, scale, bias = (each.reshape(*lead, each.shape[-1]) for each in joined)
    return weight, scale, bias


def packed_zeros(file: GGUFFile, info: TensorInfo, dtype: mx.Dtype) -> Packed:
    """Zeros with the shapes and types that :func:`read_packed` returns."""
    *lead, columns = info.shape
    words = columns * PACKED_BITS[info.type_name] // 32
    groups = mx.zeros((*lead, columns // GROUP_SIZE), dtype)
    return mx.zeros((*lead, words), mx.uint32), groups, groups


def repack(
    values: _Array, bits: int, dtype: mx.Dtype
) -> tuple[_Array, mx.array, mx.array]:
    """Float32 rows in ``bits`` bits: codes, scales and biases of groups of 32.

    The codes make up for the rounding of scale and bias.
    """
    groups = values.reshape(values.shape[0], -1, GROUP_SIZE)
    most = (1 << bits) - 1
    with np.errstate(all="ignore"):  # a damaged file holds anything
        low = mx.array(groups.min(axis=-1)).astype(dtype)
        first = np.array(low.astype(mx.float32))
        # Rounded up, so that codes can reach the largest value of a group.
        step = (groups.max(axis=-1) - first) * ((1 + 2**-8) / most)
        step = np.where(step > 0, step, 1)
        scale = mx.array(step.astype(np.float32)).astype(dtype)
        each = np.array(scale.astype(mx.float32))
        codes = np.rint((groups - first[..., None]) / each[..., None])
        codes = np.nan_to_num(np.clip(codes, 0, most)).astype(np.uint8)
    return codes, scale, low


def _words(codes: _Array, bits: int) -> _Array:
    """Codes (rows, groups, 32) joined in words, the first in the lowest bits."""
    count = _CODES[bits]
    if count == 1:
        packed = codes
    else:
        several = codes.reshape(codes.shape[0], -1, count).astype(np.uint64)
        whole = several[..., 0].copy()
        for i in range(1, count):
            whole |= several[..., i] << np.uint64(bits * i)
        packed = whole[..., None].view(np.uint8)[..., : bits * count // 8]
    return np.ascontiguousarray(packed).reshape(codes.shape[0], -1).view(np.uint32)


def _codes(info: TensorInfo, raw: _Array) -> tuple[_Array, _Array, _Array]:
    """Codes, scales and biases of rows of a type in :data:`SAME_BITS`.

    Codes are uint8 (rows, groups, 32), scales and biases (rows, groups).
    """
    rows, groups = raw.shape[0], info.shape[-1] // GROUP_SIZE
    if info.type_name in ("Q4_K", "Q5_K"):
        return _k_codes(info, raw)
    blocks = raw.reshape(rows, groups, -1)
    if info.type_name == "MXFP4":
        # Powers of two, halved because the codes count halves.
        powers = blocks[..., 0].astype(np.int32) - 128
        scales = np.ldexp(np.float32(1), powers)
        codes = _MXFP4[_nibbles(blocks[..., 1:])] + np.int8(12)
        return codes.astype(np.uint8), scales, scales * np.float32(-12)
    scales = _halves(blocks[..., :2])
    if info.type_name == "Q8_0":
        # int8 to uint8 with the offset moved into the bias, which is exact.
        return blocks[..., 2:] ^ np.uint8(0x80), scales, scales * np.float16(-128)
    at = 2
    if info.type_name in ("Q4_1", "Q5_1"):
        biases, at = _halves(blocks[..., 2:4]), 4
    else:
        biases = scales * np.float16(-8 if info.type_name == "Q4_0" else -16)
    if info.type_name in ("Q5_0", "Q5_1"):
        high = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
        codes = _nibbles(blocks[..., at + 4 :]) | (high << np.uint8(4))
    else:
        codes = _nibbles(blocks[..., at:])
    return codes, scales, biases


def _k_codes(info: TensorInfo, raw: _Array) -> tuple[_Array, _Array, _Array]:
    """:func:`_codes` of Q4_K and Q5_K: 8 groups of a block of 256 share two scales."""
    rows = raw.shape[0]
    blocks = raw.reshape(rows, info.shape[-1] // 256, -1)
    scale, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    # 6 bits for each group's scale, 6 for its minimum, in 12 bytes.
    a, b, c = (blocks[..., at : at + 4] for at in (4, 8, 12))
    low, high = np.uint8(15), np.uint8(63)
    steps = np.concatenate([a & high, (c & low) | (a >> 6 << 4)], axis=-1)
    mins = np.concatenate([b & high, (c >> 4) | (b >> 6 << 4)], axis=-1)
    # 32 bytes hold the low halves of one group and the high ones of the next.
    at = 16 if info.type_name == "Q4_K" else 48
    pairs = blocks[..., at:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([pairs & low, pairs >> 4], axis=-2)
    codes = codes.reshape(*blocks.shape[:2], 8, 32)
    if info.type_name == "Q5_K":
        # A bit of each byte for each group.
        fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
        codes = codes | ((fifth & np.uint8(1)) << np.uint8(4))
    scales = scale[..., None].astype(np.float32) * steps
    biases = -(least[..., None].astype(np.float32) * mins)
    return (
        codes.reshape(rows, -1, GROUP_SIZE),
        scales.reshape(rows, -1),
        biases.reshape(rows, -1),
    )


def _halves(pairs: _Array) -> _Array:
    """Pairs of bytes as float16."""
    return pairs.copy().view(np.float16)[..., 0]


def _nibbles(data: _Array) -> _Array:
    """The elements of blocks: 0-15 from the low nibbles, 16-31 from the high ones."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def read_float_rows(
    file: GGUFFile, info: TensorInfo, start: int, stop: int
) -> npt.NDArray[Any]:
    """Rows ``start .. stop - 1`` in float32, whatever their quantization.

    Raises:
        UnsupportedModelError: the quantization needs the ``gguf`` package, and that is
            not installed or does not know the quantization.
    """
    raw = file.raw_rows(info, start, stop)
    rows = stop - start
    if info.type_name == "F32":
        return raw.view(np.float32)
    if info.type_name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if info.type_name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if info.type_name in SAME_BITS:
        codes, scales, biases = _codes(info, raw)
        values = codes.astype(np.float32)
        values *= scales[..., None].astype(np.float32)
        values += biases[..., None].astype(np.float32)
        return values.reshape(rows, -1)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file.path} has {info.type_name} weights, which need the gguf "
            f"package: {install('gguf')}"
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
    """A whole tensor in ``dtype``, after ``add`` is added to it in float32.

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
