"""Files that are whole or absent, whenever the process ends."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import ModelError
from ...utils.files import Staged, open_plain, sync_folder

_CONFIG = "config.json"


def write_file(path: Path, data: bytes, *, before: Path | None = None) -> None:
    """Replace a file; the old one stays until the new one is on the disk.

    Args:
        before: path in the same folder to which the old file is renamed. A kill between
            the two renames leaves the old file there, and no file at ``path``.

    Raises:
        ModelError: the file cannot be written (a full disk, say); the old one is whole.
    """
    with _reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with Staged(path.parent, {path.name: data}) as staged:
            if before is not None and path.exists():
                path.replace(before)
            staged.put(path.name)


def write_model(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace the model of a folder.

    Whenever the process ends, the folder holds the old files, the new ones, or no
    ``config.json``, without which no program loads it. So ``config.json`` is removed
    first and written last.

    Args:
        files: contents by path in the folder; they include ``config.json``.

    Raises:
        ModelError: the files cannot be written. If the disk is full, the old model is
            whole.
    """
    with _reported(folder):
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with Staged(folder, files) as staged:
            (folder / _CONFIG).unlink(missing_ok=True)
            sync_folder(folder)
            staged.put(*(name for name in files if name != _CONFIG))
            staged.put(_CONFIG)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write {path} ({error.strerror or error}): make room or name "
            "another folder; the same command then goes on"
        ) from error


def write_arrays(
    path: Path,
    arrays: Mapping[str, mx.array],
    metadata: Mapping[str, str],
    *,
    before: Path | None = None,
) -> None:
    """Write arrays and texts as a safetensors file (see :func:`write_file`).

    Raises:
        ModelError: the file cannot be written.
    """
    # Through memory, since MLX's own writing does not report a full disk.
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, dict(arrays), dict(metadata))
    write_file(path, buffer.getvalue(), before=before)


def read_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Read the arrays and texts that :func:`write_arrays` wrote."""
    try:
        with open_plain(path) as file:
            data = io.BytesIO(file.read())
        contents: Any = mx.load(data, format="safetensors", return_metadata=True)
        arrays, metadata = contents
        mx.eval(arrays)
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{path} cannot be read ({reason}): remove it, or name another folder"
        ) from error
    return arrays, metadata
