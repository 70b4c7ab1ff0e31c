"""Lists and checks the entries of a folder. This module needs no mlx."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..utils.files import is_temporary, remove_leftover
from .files import DamagedError, File, is_entry, read_header, read_verified


@dataclass
class Holdings:
    """The entries of one model and one kind of cache (one signature)."""

    signature: str
    model: str
    entries: int = 0
    nbytes: int = 0
    longest: int = 0
    last_used: float = 0.0


@dataclass
class Audit:
    """What a folder holds.

    ``damaged`` says for each unusable file, by name, what is wrong.
    """

    sound: list[File] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the sound entries."""
        return sum(file.nbytes for file in self.sound)

    def holdings(self, folder: Path) -> list[Holdings]:
        """The sound entries by signature, the most recently used first."""
        by_signature: dict[str, Holdings] = {}
        for file in self.sound:
            each = by_signature.setdefault(
                file.signature, Holdings(file.signature, file.model)
            )
            each.entries += 1
            each.nbytes += file.nbytes
            each.longest = max(each.longest, file.end)
            with suppress(OSError):  # removed meanwhile
                used = (folder / file.name).stat().st_mtime
                each.last_used = max(each.last_used, used)
        return sorted(by_signature.values(), key=lambda each: -each.last_used)


def audit(folder: Path, *, contents: bool = False) -> Audit:
    """Look at every entry of ``folder``.

    Args:
        contents: read each file whole and compare it with its digest.

    Raises:
        OSError: the folder cannot be read.
    """
    result, files = Audit(), []
    for path in _entries(folder):
        try:
            files.append(read_header(path))
            if contents:
                read_verified(path)
        except DamagedError as error:
            result.damaged[path.name] = str(error)
        except OSError as error:
            result.damaged[path.name] = f"it cannot be read ({error.strerror})"
    reachable: set[str] = set()
    for file in sorted(files, key=lambda file: file.start):
        if file.name in result.damaged:
            continue
        if file.is_first or file.parent in reachable:
            reachable.add(file.place)
            result.sound.append(file)
        else:
            result.damaged[file.name] = "what it stands on is not there"
    return result


def remove(folder: Path, names: list[str]) -> dict[str, str]:
    """Remove entries, and temporary files that crashes have left.

    Returns:
        Names that could not be removed, and why.
    """
    failures: dict[str, str] = {}
    for name in names:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            failures[name] = error.strerror or repr(error)
    for path in folder.iterdir():
        if is_temporary(path.name):
            remove_leftover(path)
    return failures


def _entries(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if is_entry(path.name))
