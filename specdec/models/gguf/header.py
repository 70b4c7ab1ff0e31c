"""The table of contents of a GGUF file: metadata and where each tensor lies.

This module reads it in well under a second. It does without the ``gguf`` package, which
is optional and takes ten seconds for a vocabulary of 262,144 tokens.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import (
    ModelError,
    ModelNameError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from ...utils.files import open_plain
from ...utils.printable import shorten

# Type number -> (name, elements in a block, bytes of a block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# Metadata value type -> struct format, for the types of a fixed size.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)

# Several times the size of the largest vocabularies. A sparse file can claim any size
# without taking up that space on disk.
_MOST_HEADER_BYTES = 1 << 27
_MOST_ARRAY_VALUES = 1 << 23
_MOST_AXIS = 2**31 - 1  # MLX's limit

# The errors in which reading nonsense as a header ends.
_CORRUPT = (ArithmeticError, MemoryError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    ``shape`` is in row-major order, as MLX has it (the file stores it reversed);
    ``offset`` is in bytes from the start of the file.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int

    @property
    def type_name(self) -> str:
        """The quantization's name, such as ``Q4_K``."""
        return TENSOR_TYPES[self.type_id][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last axis)."""
        _, block, size = TENSOR_TYPES[self.type_id]
        return self.shape[-1] // block * size

    @property
    def rows(self) -> int:
        """Number of rows: the product of all axes but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file. ``data`` maps its bytes; no tensor is read yet."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def raw_rows(self, info: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``start .. stop - 1`` of a tensor, as stored: uint8 (rows, bytes)."""
        width = info.row_bytes
        flat = np.frombuffer(
            self.data, np.uint8, (stop - start) * width, info.offset + start * width
        )
        return flat.reshape(stop - start, width)


class _Cursor:
    """Reads the header's values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.array_values = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        end = self.at + length
        if end > len(self.data):
            raise ValueError("a string runs past the end")
        if end > _MOST_HEADER_BYTES:
            raise ValueError(f"its header has more than {_MOST_HEADER_BYTES} bytes")
        text = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind} is not known")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if count > len(self.data) - self.at:
            raise ValueError("an array runs past the end")
        self.array_values += count
        if self.array_values > _MOST_ARRAY_VALUES:
            raise ValueError(f"arrays of more than {_MOST_ARRAY_VALUES} values")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind][1]}"
            values = struct.unpack_from(form, self.data, self.at)
            self.at += struct.calcsize(form)
            return list(values)
        return [self.value(kind) for _ in range(count)]


def _read_tensor_table(
    cursor: _Cursor, count: int, path: Path
) -> list[tuple[str, int, tuple[int, ...], int]]:
    entries = []
    names = set()
    for _ in range(count):
        name = cursor.string()
        if name in names:
            raise ValueError(f"tensor {shorten(name)} is there twice")
        names.add(name)
        if not name.isprintable():
            raise ValueError(f"tensor name {name!r}")
        axes = cursor.scalar("<I")
        if not 1 <= axes <= 4:
            raise ValueError(f"tensor {name} has {axes} axes")
        shape = tuple(cursor.scalar("<Q") for _ in range(axes))[::-1]
        if not all(1 <= axis <= _MOST_AXIS for axis in shape):
            raise ValueError(f"tensor {name} has the shape {shape}")
        type_id = cursor.scalar("<I")
        if type_id not in TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{path}: tensor {shorten(name)} has GGUF type {type_id}, which is not "
                "supported: use a file with another quantization"
            )
        entries.append((name, type_id, shape, cursor.scalar("<Q")))
    return entries


def read_header(path: str | Path) -> GGUFFile:
    """Open a GGUF file and read its metadata and tensor table.

    Raises:
        ModelNameError: there is no such file.
        ModelNotFoundError: it cannot be opened.
        UnsupportedModelError: the file is a part of a sharded file, is of an old
            version, or has a tensor of an unknown type.
        ModelError: the file is not GGUF, or it is cut short.
    """
    path = Path(path)
    try:
        with open_plain(path) as file:
            if file.read(4) != b"GGUF":
                raise ModelError(
                    f"{path} is not a GGUF file: it does not start with 'GGUF'; "
                    "download it again"
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # the latter: not a path at all
        reason = getattr(error, "strerror", None) or error
        misnamed = isinstance(error, FileNotFoundError | IsADirectoryError)
        kind = ModelNameError if misnamed else ModelNotFoundError
        raise kind(f"cannot open {path}: {reason}; check the path") from error
    try:
        return _parse(path, data)
    except (struct.error, *_CORRUPT) as error:
        ends = isinstance(error, struct.error)
        reason = "it ends in its header" if ends else shorten(error)
        raise ModelError(
            f"{path} is cut short or corrupt ({reason}): download it again"
        ) from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path} is GGUF version {version}: only versions 2 and 3, little "
            "endian, are supported; convert it with a current llama.cpp"
        )
    tensor_count, pair_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata {shorten(key)} is there twice")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {metadata['split.count']} parts of a sharded GGUF: "
            "join them with llama.cpp's `llama-gguf-split --merge`"
        )
    entries = _read_tensor_table(cursor, tensor_count, path)
    alignment = metadata.get("general.alignment", 32)
    if alignment <= 0:
        raise ValueError(f"its alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, type_id, shape, offset in entries:
        info = TensorInfo(name, type_id, shape, start + offset)
        if shape[-1] % TENSOR_TYPES[type_id][1]:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} elements")
        if info.offset + info.rows * info.row_bytes > len(data):
            raise ValueError(f"tensor {name} runs past the end")
        tensors[name] = info
    return GGUFFile(path, metadata, tensors, data)
