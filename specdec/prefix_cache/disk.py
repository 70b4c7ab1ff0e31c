"""The disk tier: an index of a folder's entries, reading, writing, a byte budget.

The folder is the source of truth, and processes may share it. The index is updated from
its file names before each look-up and after each write. This module needs no mlx.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import threading
import weakref
from collections.abc import Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..utils.files import is_temporary, remove_leftover
from .entries import KINDS, Kind, reached
from .files import (
    DamagedError,
    File,
    is_entry,
    read_header,
    read_verified,
    write_entry,
)
from .radix import Node, RadixTree

log = logging.getLogger("specdec.prefix_cache")

# Files of a 27B-like model have about 16 MB.
QUEUE_LENGTH = 16

Files = dict[Kind, File]


@dataclass(frozen=True)
class Job:
    """An entry to write: a whole file. ``parent`` is ``None`` for a first entry."""

    kind: Kind
    place: str
    parent: str | None
    data: bytes


class DiskTier:
    """Entries in a folder.

    A fault of the folder or its files raises no error: it is logged as a warning, and
    the prompt is prefilled as usual.

    Args:
        folder: created if it is missing.
        budget: bytes of all entries; the least recently used are removed.
    """

    def __init__(self, folder: Path, budget: int):
        self.folder: Final = folder
        self.budget: Final = budget
        self._tree: Final[RadixTree[Files]] = RadixTree()
        self._nodes: Final[dict[str, Node[Files]]] = {}  # by place
        self._known: Final[dict[str, File]] = {}  # by name
        self._orphans: Final[dict[str, int]] = {}  # bytes by name
        self._left: Final[set[str]] = set()  # damaged, and could not be removed
        self._queued: Final[set[tuple[Kind, str]]] = set()
        self._lock: Final = threading.RLock()
        self._warned: Final[set[str]] = set()
        self._given_up: Final = threading.Event()
        self._made: Final = self._make_folder()
        # The thread outlives a tier that is dropped while files are queued. It still
        # keeps to the budget, with a copy of the tier that shares all state above.
        self._writer: Final = _Writer(copy.copy(self))
        weakref.finalize(self, self._writer.close)  # at exit, too
        self.refresh()

    def _make_folder(self) -> bool:
        """Create the folder; return whether it exists. If not, it is not used."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._warn(f"cannot be made ({error.strerror}): nothing is stored there")
            return False
        with suppress(OSError):
            # The mode of a folder that also holds other files is left as it is.
            names = os.listdir(self.folder)
            if all(is_entry(name) or is_temporary(name) for name in names):
                _make_private(self.folder, 0o700)
        return True

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
        """Update the index: this or another process may have added or removed files."""
        if not self._made:
            return
        with self._lock:
            try:
                names = sorted(os.listdir(self.folder))
            except OSError as error:
                self._warn_once(f"cannot be read ({error.strerror})")
                names = []
            for name in names:
                if is_temporary(name):
                    remove_leftover(self.folder / name)
            present = set(filter(is_entry, names))
            for name in self._known.keys() - present:
                self._forget(self._known[name])
            self._left.intersection_update(present)
            self._add(present - self._known.keys() - self._left)
            room = max(0, self.budget - sum(self._orphans.values()))
            for files in self._tree.shrink(room):
                for file in files.values():
                    self._unlink(file.name)
                    self._drop_name(file)

    def _add(self, names: Iterable[str]) -> None:
        files: list[tuple[float, File]] = []
        for name in names:
            path = self.folder / name
            try:
                file = read_header(path)
                if file.nbytes > self.budget:  # else it would evict all others
                    self._unlink(name)
                    continue
                files.append((path.stat().st_mtime, file))
                _make_private(path, 0o600)
            except DamagedError as error:
                self._remove_damaged(name, error)
            except FileNotFoundError:
                pass  # another process removed it
            except OSError as error:
                self._warn_once(f"{name} cannot be read ({error.strerror})")
        waiting = {}
        for _, file in sorted(files, key=lambda f: f[1].start):
            if not self._attach(file):
                waiting[file.name] = file.nbytes
        before = set(self._orphans)
        self._orphans.clear()
        for name, nbytes in waiting.items():
            if name in before:  # its parent was missing last time, too
                self._unlink(name)
            else:
                self._orphans[name] = nbytes
        for _, file in sorted(files, key=lambda f: f[0]):
            if file.name in self._known:
                self._tree.touch(self._nodes[file.place])

    def _attach(self, file: File) -> bool:
        """Put a file into the tree; return false if its parent is missing."""
        path: tuple[Hashable, ...] = (file.signature,)
        if not file.is_first:
            parent = self._nodes.get(file.parent)
            if parent is None or parent.end != 1 + file.start:
                return False
            # A client's answer stands on a prompt that others share.
            path = (file.signature, *parent.path()[1:])
        node = self._nodes.get(file.place)
        files = dict(node.value or {}) if node is not None else {}
        if file.kind in files:  # two processes wrote the same at once
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
        """Look up the path (signature, token, token, ...).

        Returns:
            The number of tokens shared with a stored path, and the entries of
            :func:`~specdec.prefix_cache.entries.reached`.
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
                os.utime(path)  # other processes see the use, too
            with self._lock:
                if file.name in self._known:
                    self._tree.touch(self._nodes[file.place])
            return data
        self._lose(file)
        return None

    def reject(self, file: File, error: DamagedError) -> None:
        """Remove an entry whose contents turned out to be unusable."""
        with self._lock:
            self._remove_damaged(file.name, error)
        self._lose(file)

    def _lose(self, file: File) -> None:
        with self._lock:
            if file.name in self._known:
                self._forget(file)

    # -- writing -------------------------------------------------------------

    def has(self, kind: Kind, place: str) -> bool:
        """Whether there is such an entry, or one is queued."""
        with self._lock:
            node = self._nodes.get(place)
            there = node is not None and kind in (node.value or {})
            return there or (kind, place) in self._queued

    def takes(self, kind: Kind, place: str, parent: str | None) -> bool:
        """Whether an entry is wanted: it is missing, but its parent is not.

        Args:
            parent: the place where it begins; ``None`` for a first entry.
        """
        if not self._made or self._given_up.is_set():
            return False
        with self._lock:
            below = parent is None or any(self.has(k, parent) for k in KINDS)
            return below and not self.has(kind, place)

    def write(self, job: Job) -> None:
        """Queue a whole file to be written in the background."""
        if len(job.data) > self.budget:
            return
        with self._lock:
            if self._given_up.is_set():
                return
            self._queued.add((job.kind, job.place))
        self._writer.put(job)

    def flush(self) -> None:
        """Wait until all queued files are written."""
        self._writer.flush()

    def close(self) -> None:
        """Write all queued files and end the writer's thread."""
        self._writer.close()

    def store(self, job: Job) -> None:
        """Write a file, in the writer's thread; after an error no more are written."""
        if self._given_up.is_set():
            return
        try:
            with self._lock:
                there = job.parent is None or job.parent in self._nodes
            if there:  # else the parent was evicted again
                write_entry(self.folder, job.kind, job.place, job.data)
            with self._lock:
                if there:
                    self.refresh()
                if there and self._orphans:  # they fill the budget: remove them
                    self.refresh()
                self._queued.discard((job.kind, job.place))
        except Exception as error:  # of any kind: no run may hang on this thread
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with self._lock:  # later entries may need the missing one
            self._given_up.set()
            self._queued.clear()
        reason = (isinstance(error, OSError) and error.strerror) or repr(error)
        self._warn_once(
            f"cannot be written ({reason}): nothing more is stored there now"
        )

    # -- trouble -------------------------------------------------------------

    def _remove_damaged(self, name: str, error: DamagedError) -> None:
        if self._unlink(name):
            self._warn(f"{name} was removed: {error}")
        else:
            self._left.add(name)
            self._warn(f"{name} is not used: {error}")

    def _unlink(self, name: str) -> bool:
        """Remove a file; return whether that was possible."""
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)
            return True
        return False

    def _warn(self, text: str) -> None:
        log.warning("prefix cache %s: %s", self.folder, text)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


class _Writer:
    """Writes entries in the background, in the order in which they were queued.

    :meth:`put` waits while the queue is full: nothing is dropped, and memory stays
    bounded.

    Args:
        tier: does the writing; the thread keeps it alive.
    """

    def __init__(self, tier: DiskTier):
        self._tier = tier
        self._jobs: queue.Queue[Job | None] = queue.Queue(QUEUE_LENGTH)
        self._thread: threading.Thread | None = None

    def put(self, job: Job) -> None:
        """Queue a job; waits while the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="specdec-prefix-writer", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def flush(self) -> None:
        """Wait until every queued entry is written or given up."""
        self._jobs.join()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._tier.store(job)
            job = None  # holds a whole file: free it before waiting
            self._jobs.task_done()
        self._jobs.task_done()


def _make_private(path: Path, mode: int) -> None:
    """Let nobody else read ``path``: entries reveal their tokens."""
    with suppress(OSError):  # another user owns it
        if path.stat().st_mode & 0o077:
            path.chmod(mode)
