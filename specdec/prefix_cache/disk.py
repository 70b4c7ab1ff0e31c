"""The disk tier: an index of a folder's entries, reading, writing, a byte budget.

The folder is the truth, and may be shared by processes: the index is brought up
to date from its names before each look-up and behind each write. No mlx here.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from pathlib import Path

from ..utils.files import is_temporary, remove_leftover
from .entries import KINDS, Kind, reached
from .files import DamagedError, File, is_entry, read_header, read_verified
from .radix import Node, RadixTree
from .writer import Job, Writer

log = logging.getLogger("specdec.prefix_cache")

Files = dict[Kind, File]


class DiskTier:
    """Entries in a folder.

    Nothing here raises for what is wrong with the folder or its files: it is
    logged as a warning, and the prompt is prefilled as usual.

    Args:
        folder: made if it is not there.
        budget: bytes of all entries; the least recently used are removed.
    """

    def __init__(self, folder: Path, budget: int):
        self.folder = folder
        self.budget = budget
        self._tree: RadixTree[Files] = RadixTree()
        self._nodes: dict[str, Node[Files]] = {}  # by place
        self._known: dict[str, File] = {}  # by name
        self._orphans: set[str] = set()
        self._queued: set[tuple[Kind, str]] = set()
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self._writer = Writer(folder, self)
        weakref.finalize(self, self._writer.close)  # at exit, too
        self._made = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._made = False  # said once: it is neither read nor written then
            self._warn(f"cannot be made ({error.strerror}): nothing is stored there")
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries that can be used."""
        return self._tree.nbytes

    @property
    def files(self) -> list[File]:
        """All entries that can be used, the least recently used first."""
        with self._lock:
            return [file for node in self._tree for file in (node.value or {}).values()]

    # -- the index -----------------------------------------------------------

    def refresh(self) -> None:
        """Learn what was added and removed, here or by another process."""
        if not self._made:
            return
        with self._lock:
            try:
                names = sorted(entry.name for entry in os.scandir(self.folder))
            except OSError as error:
                self._warn_once(f"cannot be read ({error.strerror})")
                names = []
            for name in names:
                if is_temporary(name):
                    remove_leftover(self.folder / name)
            present = set(filter(is_entry, names))
            for name in self._known.keys() - present:
                self._forget(self._known[name])
            self._add(present - self._known.keys())
            for files in self._tree.shrink(self.budget):
                for file in files.values():
                    self._unlink(file.name)
                    self._drop_name(file)

    def _add(self, names: Iterable[str]) -> None:
        found: list[tuple[float, File]] = []
        for name in names:
            path = self.folder / name
            try:
                found.append((path.stat().st_mtime, read_header(path)))
            except DamagedError as error:
                self._remove_damaged(name, error)
            except FileNotFoundError:
                pass  # somebody was quicker
            except OSError as error:
                self._warn_once(f"{name} cannot be read ({error.strerror})")
        waiting = set()
        for _, file in sorted(found, key=lambda f: f[1].start):
            if not self._attach(file):
                waiting.add(file.name)
        for name in waiting & self._orphans:  # not there the last time, either
            self._unlink(name)
        self._orphans = waiting - self._orphans
        for _, file in sorted(found, key=lambda f: f[0]):
            if file.name in self._known:
                self._tree.touch(self._nodes[file.place])

    def _attach(self, file: File) -> bool:
        """Put a file into the tree; not without what it stands on."""
        path: tuple[Hashable, ...] = (file.signature,)
        if not file.is_first:
            parent = self._nodes.get(file.parent)
            if parent is None or parent.end != 1 + file.start:
                return False
            path = parent.path()
        node = self._nodes.get(file.place)
        files = dict(node.value or {}) if node is not None else {}
        if file.kind in files:  # the same, written by two processes at once
            self._unlink(file.name)
            return True
        files[file.kind] = file
        path = (*path, *file.tokens)
        self._tree.put(path, files, sum(f.nbytes for f in files.values()))
        if node is None:
            node = self._tree.get(path)
            assert node is not None
            self._nodes[file.place] = node
        self._known[file.name] = file
        return True

    def _forget(self, file: File) -> None:
        """Take a file out of the tree."""
        node = self._nodes[file.place]
        files = dict(node.value or {})
        self._drop_name(file)
        del files[file.kind]
        if files:
            nbytes = sum(f.nbytes for f in files.values())
            self._tree.put(node.path(), files, nbytes)
            self._nodes[file.place] = node
        else:
            self._tree.remove(node)

    def _drop_name(self, file: File) -> None:
        self._known.pop(file.name, None)
        self._nodes.pop(file.place, None)

    # -- reading -------------------------------------------------------------

    def find(self, path: tuple[Hashable, ...]) -> tuple[int, list[tuple[File, int]]]:
        """Follow (signature, token, token, ...).

        Returns:
            The tokens shared with some stored path, and what
            :func:`~specdec.prefix_cache.entries.reached` gives.
        """
        with self._lock:
            match = self._tree.match(path)
            return max(match.length - 1, 0), list(reached(match))

    def path(self, file: File) -> tuple[Hashable, ...] | None:
        """(signature, token, ...) up to the end of ``file``, if it is still known."""
        with self._lock:
            known = file.name in self._known
            return self._nodes[file.place].path() if known else None

    def read(self, file: File) -> bytes | None:
        """The verified contents, or ``None`` with a warning."""
        path = self.folder / file.name
        try:
            data = read_verified(path)
        except DamagedError as error:
            with self._lock:
                self._remove_damaged(file.name, error)
        except OSError as error:
            self._warn(f"{file.name} cannot be read ({error.strerror})")
        else:
            with suppress(OSError):
                os.utime(path)  # others see what was used, too
            with self._lock:
                if file.name in self._known:
                    self._tree.touch(self._nodes[file.place])
            return data
        with self._lock:
            if file.name in self._known:
                self._forget(file)
        return None

    # -- writing -------------------------------------------------------------

    def has(self, kind: Kind, place: str) -> bool:
        """Whether there is such an entry, or will be."""
        with self._lock:
            node = self._nodes.get(place)
            there = node is not None and kind in (node.value or {})
            return there or (kind, place) in self._queued

    def takes(self, kind: Kind, place: str, parent: str | None) -> bool:
        """Whether an entry is wanted: it is not there, and what it stands on is.

        Args:
            parent: the place where it begins; ``None`` for the first one.
        """
        if not self._made:
            return False
        with self._lock:
            below = parent is None or any(self.has(k, parent) for k in KINDS)
            return below and not self.has(kind, place)

    def write(self, job: Job) -> None:
        """Have a whole file written in the background."""
        if len(job.data) > self.budget:
            return
        with self._lock:
            self._queued.add((job.kind, job.place))
        self._writer.put(job)

    def flush(self) -> None:
        """Wait for what is being written."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is queued; nothing more after that."""
        self._writer.close()

    # What the writer asks and tells.

    def wanted(self, job: Job) -> bool:
        with self._lock:
            there = job.parent is None or job.parent in self._nodes
            if not there:  # it had to leave again
                self._queued.discard((job.kind, job.place))
            return there

    def written(self, job: Job) -> None:
        with self._lock:
            self.refresh()
            self._queued.discard((job.kind, job.place))

    def failed(self, error: Exception) -> None:
        reason = (isinstance(error, OSError) and error.strerror) or repr(error)
        self._warn_once(
            f"cannot be written ({reason}): nothing more is stored there now"
        )

    # -- trouble -------------------------------------------------------------

    def _remove_damaged(self, name: str, error: DamagedError) -> None:
        self._unlink(name)
        self._warn(f"{name} was removed: {error}")

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        log.warning("prefix cache %s: %s", self.folder, text)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
