"""Writes files atomically: a file is whole or missing. No mlx here.

A file is written in its folder under a name that is never used again, flushed to the
disk, then renamed. Then the folder is flushed, so that the new name lasts, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".specdec-tmp"
#: The error text of :func:`open_plain` for a FIFO, a device or a socket.
NOT_PLAIN = "it is not a plain file"
#: Far larger than any configuration, tokenizer or report.
MOST_BYTES = 1 << 28

_TEMPORARY = re.compile(rf"\.[0-9a-f]{{32}}{re.escape(_SUFFIX)}")


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading; anything else is refused.

    A FIFO would wait for a writer, and a device may never end.

    Raises:
        OSError: the file does not exist, is not plain, or cannot be opened.
    """
    # Without O_NONBLOCK, opening a FIFO would wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, NOT_PLAIN, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file of moderate size.

    Raises:
        OSError: see :func:`open_plain`; or the file has more than ``most`` bytes.
    """
    with open_plain(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", path)
    return data


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file; the old one stays until the new one is on the disk.

    Args:
        private: only the file's owner may read it.

    Raises:
        OSError: the file could not be written; nothing is left of the new one.
    """
    with Staged(path.parent, {path.name: data}, private=private) as staged:
        staged.put(path.name)


class Staged:
    """New files of a folder, on the disk under temporary names until they are put.

    A lack of disk space shows at the beginning. Each temporary file is locked while it
    exists, so that others can tell it from one that a crash has left
    (:func:`remove_leftover`). After the ``with``, none is left.

    Args:
        folder: the folder; it must exist, and so must folders within it.
        files: the content of each file, by path in the folder.
        private: only the files' owner may read them.

    Raises:
        OSError: a file could not be written; nothing is left of any.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, bytes], *, private: bool = False
    ):
        self._folder = folder
        self._open: dict[str, BinaryIO] = {}
        with ExitStack() as undo:
            undo.callback(self._remove)
            for name, data in files.items():
                file = _locked_temporary((folder / name).parent, private=private)
                self._open[name] = file
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            undo.pop_all()

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def put(self, *names: str) -> None:
        """Give files their names, then flush their folders.

        Raises:
            OSError: a file could not be renamed; the files before it were.
        """
        for name in names:
            os.replace(self._open[name].name, self._folder / name)
            self._open.pop(name).close()
        for folder in {(self._folder / name).parent for name in names}:
            sync_folder(folder)

    def _remove(self) -> None:
        for file in self._open.values():
            with suppress(OSError):
                os.unlink(file.name)
            file.close()
        self._open.clear()


def is_temporary(name: str) -> bool:
    """Whether ``name`` is the name of a temporary file."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_leftover(path: Path) -> bool:
    """Remove a temporary file unless a process is writing it."""
    with suppress(OSError), open_plain(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    return False


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if is_temporary(entry.name):
                remove_leftover(folder / entry.name)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable, if the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked_temporary(folder: Path, *, private: bool = False) -> BinaryIO:
    opener = partial(os.open, mode=0o600 if private else 0o666)
    while True:
        # A name that is never used again: removing it can only remove this file.
        path = folder / f".{secrets.token_hex(16)}{_SUFFIX}"
        file = open(path, "xb", opener=opener)  # noqa: SIM115
        with suppress(OSError):  # without locks, leftovers stay
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process removed it before it was locked
