"""Findings about this machine, kept in files of the user's cache folder."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from .data_files import DataError, read_table
from .files import replace_file


def cache_path(name: str) -> Path:
    """Path of a file in the user's cache folder, ``$XDG_CACHE_HOME/specdec``.

    Without a home folder no such file exists, and none can be written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", "").strip() or os.devnull)
    if folder == Path(os.devnull):
        with suppress(RuntimeError):
            folder = Path.home() / ".cache"
    return folder / "specdec" / name


def private_folder(name: str) -> Path:
    """A folder in the user's cache folder for code that is run; nobody else writes it.

    Raises:
        OSError: it cannot be made, or others can write to it.
    """
    path = cache_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Links above it are followed here, and not later, when they may have changed.
    path = path.parent.resolve() / path.name
    path.mkdir(mode=0o700, exist_ok=True)
    entry = path.lstat()
    safe = stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid()
    if not safe or entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "it is not this user's alone", str(path))
    for folder in path.parents:
        if _others_write(folder.lstat()):
            raise PermissionError(errno.EPERM, "others can write to it", str(folder))
    return path


def _others_write(entry: os.stat_result) -> bool:
    """Whether others can replace what is in a folder, its owner among them."""
    if entry.st_uid not in (0, os.geteuid()):
        return True
    # Many systems give each user a group of their own.
    group = 0 if entry.st_gid == os.getegid() else stat.S_IWGRP
    writers = entry.st_mode & (stat.S_IWOTH | group)
    return bool(writers) and not entry.st_mode & stat.S_ISVTX


class CachedEntries:
    """A JSON file of entries by key. Failures to read or write it are ignored.

    Args:
        path: the file's path; file and folder are made when something is saved.
        name: the name of the table of entries in it.
        version: the version of the entries; entries of other versions are ignored.
        most: the most entries to keep; beyond that, the oldest are dropped.
    """

    def __init__(self, path: Path, name: str, *, version: int, most: int):
        self.path = path
        self._name, self._version, self._most = name, version, most

    def load(self) -> dict[str, Any]:
        """All entries, unchecked: an entry may be any JSON value."""
        try:
            contents = read_table(self.path)
        except (OSError, DataError):
            return {}
        entries = contents.get(self._name)
        if not isinstance(entries, dict) or contents.get("version") != self._version:
            return {}
        return entries

    def save(self, key: str, entry: Any) -> None:
        """Add the entry as the newest, and replace the file in one step."""
        entries = self.load()
        entries.pop(key, None)
        entries[key] = entry
        latest = dict(list(entries.items())[-self._most :])
        text = json.dumps({"version": self._version, self._name: latest})
        # It is a cache: without it, the next process finds the entry again.
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, text.encode())
