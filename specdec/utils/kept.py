"""What was found out on this machine, kept in files of the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .data_files import DataError, check_shape, read_json
from .files import read_plain, replace_file


def kept_path(name: str) -> Path:
    """A file in the user's cache folder: ``$XDG_CACHE_HOME/specdec``."""
    home = os.environ.get("XDG_CACHE_HOME", "").strip()
    return Path(home or Path.home() / ".cache") / "specdec" / name


class KeptEntries:
    """A JSON file of entries by key; what cannot be read or written is done without.

    Args:
        path: of the file; it and its folder are made when something is saved.
        name: of the table of entries in it.
        version: of the entries; those of another version are none.
        most: entries that are kept; beyond, the oldest are forgotten.
    """

    def __init__(self, path: Path, name: str, *, version: int, most: int):
        self.path = path
        self._name, self._version, self._most = name, version, most

    def load(self) -> dict[str, Any]:
        """All entries, as the file has them: anything may be in one."""
        try:
            found = check_shape(
                read_json(self.path), {"version": int, self._name: dict}
            )
        except (OSError, DataError):
            return {}
        return dict(found[self._name]) if found["version"] == self._version else {}

    def save(self, key: str, entry: Any) -> None:
        """Write the file with the entry added as the newest, in one step."""
        entries = self.load()
        entries.pop(key, None)
        entries[key] = entry
        kept = dict(list(entries.items())[-self._most :])
        text = json.dumps({"version": self._version, self._name: kept})
        # A cache: without it, the next process finds out again.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, text.encode())


class KeptFiles:
    """A folder of files by name; what cannot be read or written is done without.

    Args:
        folder: it is made when something is put.
        most: files that are kept; beyond, those that were used longest ago go.
    """

    def __init__(self, folder: Path, *, most: int):
        self.folder = folder
        self._most = most

    def get(self, name: str) -> bytes | None:
        """What was put; ``None``: nothing, or the file is damaged."""
        path = self.folder / name
        try:
            found = read_plain(path)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        digest, data = found[:32], found[32:]
        return data if digest == hashlib.sha256(data).digest() else None

    def put(self, name: str, data: bytes) -> None:
        """Write a file, in one step."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / name, hashlib.sha256(data).digest() + data)
            used = {path: path.stat().st_mtime for path in self.folder.iterdir()}
            for path in sorted(used, key=used.__getitem__)[: -self._most]:
                path.unlink(missing_ok=True)
