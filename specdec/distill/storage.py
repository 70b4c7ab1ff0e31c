"""Files that are there whole, or not at all, whenever the process ends."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import ModelError

SUFFIX = ".specdec-tmp"


def write_file(path: Path, data: bytes) -> None:
    """Replace a file; what stood there stays until the new one is on the disk.

    Raises:
        ModelError: it cannot be written (a full disk, say); the old one is whole.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise ModelError(
            f"cannot write {path} ({error.strerror or error}): make room or name "
            "another folder; the same command then goes on"
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill has left half written. Nobody else may be writing there."""
    for path in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError):
            path.unlink()


def write_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]
) -> None:
    """Write arrays and texts as a safetensors file (see :func:`write_file`).

    Raises:
        ModelError: it cannot be written.
    """
    # By way of memory: MLX itself does not say when a disk is full.
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, dict(arrays), dict(metadata))
    write_file(path, buffer.getvalue())


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What :func:`write_arrays` wrote.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            data = io.BytesIO(file.read())
        found: Any = mx.load(data, format="safetensors", return_metadata=True)
        arrays, metadata = found
        mx.eval(arrays)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{path} cannot be read ({reason}): remove it, or name another folder"
        ) from error
    return arrays, metadata
