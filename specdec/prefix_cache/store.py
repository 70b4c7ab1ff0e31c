"""The prefix store: a memory tier over a disk tier, for all models of a run.

Each tier is a radix tree of paths (signature, token, token, ...). The node where
entries end holds a dict of them by kind. A look-up searches both tiers and uses the
best entries of both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..config import EngineConfig
from .disk import DiskTier, Job
from .entries import Kind, Plan, chained, plan, reached
from .files import DamagedError, File, Header
from .radix import RadixTree
from .snapshot import Form, Piece, pack, unpack

BLOCK_SIZE = 256
_READERS = 4

Tokens = tuple[int, ...]
_Path = tuple[Hashable, ...]


@dataclass(frozen=True)
class Place:
    """The place of an entry in its prompt.

    Args:
        path: (signature, token, ...) up to the entry's end.
        key, parent: hashes that name the entry's end and its start (``place_key``).
        start: tokens before the entry.
        model: the name that the user gave, for ``specdec cache list``.
    """

    path: _Path
    key: str
    parent: str
    start: int
    model: str

    @property
    def below(self) -> str | None:
        """The place of the entry that it stands on; ``None``: it begins a prompt."""
        return self.parent if self.start else None

    def fields(self, slack: int) -> dict[str, str]:
        """The header of the entry's file."""
        signature, *tokens = self.path
        return Header(
            signature=str(signature),
            model=self.model,
            parent=self.parent,
            tokens=tuple(tokens[self.start :]),  # type: ignore[arg-type]
            start=self.start,
            slack=slack,
        ).fields()


@dataclass(frozen=True)
class Found:
    """What a look-up found for a prompt.

    Args:
        plan: pieces, now in memory, that restore the prompt's first ``plan.length``
            tokens.
        shared: tokens of the longest prefix that it shares with a stored prompt.
        covered: first tokens that stored blocks hold without a gap. With a disk tier,
            only blocks on disk count.
        private: where the first piece of the client's own begins; ``None``: all are
            shared.
    """

    plan: Plan[Piece]
    shared: int
    covered: int
    private: int | None = None


def open_store(config: EngineConfig) -> PrefixStore | None:
    """The store that ``config`` asks for, or ``None`` if it asks for no tier."""
    folder = config.prefix_cache
    if folder is None and config.prefix_memory == 0:
        return None
    return PrefixStore(
        memory=config.prefix_memory,
        folder=None if folder is None else Path(folder).expanduser(),
        disk=config.prefix_cache_size,
    )


class PrefixStore:
    """Keeps keys and values for later prompts with the same prefix.

    Args:
        memory: bytes that the memory tier may hold.
        folder: the disk tier's folder; ``None``: no disk tier.
        disk: bytes that the disk tier may hold.
        block_size: tokens in a block.
    """

    def __init__(
        self,
        *,
        memory: int,
        folder: Path | None = None,
        disk: int = 0,
        block_size: int = BLOCK_SIZE,
    ):
        self.block_size = block_size
        # A shorter prefix is not worth a read: a chunk of prefill takes it along.
        self.min_length = max(1, block_size // 8)
        self.disk = None if folder is None else DiskTier(folder, disk)
        self._memory: RadixTree[dict[Kind, Piece]] = RadixTree(memory)
        # Entries that are being computed, and are to be written to disk then.
        self._unwritten: deque[tuple[Place, Piece]] = deque()
        # Sessions in several threads may share a store.
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that the memory tier holds."""
        return self._memory.nbytes

    def refresh(self) -> None:
        """Learn what other processes have stored and removed."""
        if self.disk is not None:
            self.disk.refresh()

    def flush(self) -> None:
        """Wait until everything is on disk."""
        self.write_computed()
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Write all queued entries and end the disk tier's thread."""
        self.write_computed()
        if self.disk is not None:
            self.disk.close()

    def lookup(
        self, signature: str, tokens: Tokens, form: Form, answers: str | None = None
    ) -> Found:
        """The longest prefix of ``tokens`` that can be restored, read into memory.

        Args:
            form: the form of the model's caches.
            answers: the signature of the client's own entries, if they have another.
        """
        roots = dict.fromkeys([signature, answers or signature])
        with self._lock:
            return self._lookup([(root, *tokens) for root in roots], form)

    def _lookup(self, paths: list[_Path], form: Form) -> Found:
        while True:
            matches = [self._memory.match(path) for path in paths]
            shared = max(max(match.length - 1, 0) for match in matches)
            matched: list[tuple[Piece | File, int]] = []
            files: list[tuple[File, int]] = []
            private: set[int] = set()
            for path, match in zip(paths, matches, strict=True):
                entries: list[tuple[Piece | File, int]] = [*reached(match)]
                if self.disk is not None:
                    on_disk, there = self.disk.find(path)
                    shared = max(shared, on_disk)
                    entries += there
                    files += there
                matched += entries
                if path is not paths[0]:
                    private = {id(entry) for entry, _ in entries}
            covered, _ = chained(matched if self.disk is None else files)
            best = plan(matched, linear=bool(form.linear), rings=form.has_ends)
            if best.length < self.min_length:
                return Found(Plan(0), shared, covered)
            used = [*best.blocks, *([best.ring] if best.ring else [])]
            starts = [entry.start for entry in used if id(entry) in private]
            loaded = self._load(best, form)
            if loaded is not None:
                # The client's own entries stand on shared ones, which go last.
                for match in reversed(matches):
                    for node in [*match.passed, *islice(match.beneath(), 1)][-1:]:
                        self._memory.touch(node)
                return Found(loaded, shared, covered, min(starts, default=None))
            # A file could not be read and has left the index: plan again without it.

    def _load(self, best: Plan[Piece | File], form: Form) -> Plan[Piece] | None:
        """``best`` with every file read, or ``None`` if one cannot be read."""
        wanted = [*best.blocks, *([best.ring] if best.ring else [])]
        files = [entry for entry in wanted if isinstance(entry, File)]
        paths = [self.disk.path(file) for file in files] if self.disk else []
        read: dict[str, Piece] = {}
        keep: list[tuple[_Path, Piece]] = []
        for file, path, piece in zip(
            files, paths, self._read(files, form), strict=True
        ):
            if path is None or piece is None:
                return None
            read[file.name] = piece
            keep.append((path, piece))
        # Longest first, so that the shorter ones, above it, count as used last.
        for path, piece in reversed(keep):
            self._keep(path, piece)
        pieces = [read[e.name] if isinstance(e, File) else e for e in wanted]
        ring = pieces.pop() if best.ring else None
        return Plan(best.length, tuple(pieces), ring)

    def _read(self, files: list[File], form: Form) -> list[Piece | None]:
        disk = self.disk
        if disk is None or not files:
            return []
        # Reading and hashing release the GIL. Arrays are made in this thread, a few
        # files at a time, so that little is held twice.
        pieces: list[Piece | None] = []
        with ThreadPoolExecutor(_READERS) as pool:
            for first in range(0, len(files), 2 * _READERS):
                some = files[first : first + 2 * _READERS]
                for f, data in zip(some, pool.map(disk.read, some), strict=True):
                    piece = None
                    try:
                        if data is not None:
                            piece = unpack(data, f.kind, f.start, f.end, f.slack, form)
                    except DamagedError as error:
                        disk.reject(f, error)
                    pieces.append(piece)
        return pieces

    def insert(
        self,
        place: Place,
        kind: Kind,
        cut: Callable[[], Piece],
        *,
        computed: bool = True,
    ) -> None:
        """Store an entry in each tier that lacks it at ``place`` and can take it.

        Args:
            cut: makes its piece; not called if the memory tier holds the entry.
            computed: whether its arrays are computed. If not, the entry is written to
                disk by :meth:`write_computed`.
        """
        with self._lock:
            node = self._memory.get(place.path)
            piece = None if node is None else (node.value or {}).get(kind)
            disk = self.disk
            if computed:
                to_disk = disk is not None and disk.takes(kind, place.key, place.below)
            else:  # what it stands on may not be written yet
                to_disk = disk is not None and not disk.has(kind, place.key)
            if node is not None and piece is not None:
                self._memory.touch(node)
            elif to_disk or self._memory.budget:
                piece = cut()
                self._keep(place.path, piece)
            if to_disk and piece is not None:
                if computed:
                    self._write(place, piece)
                else:
                    self._unwritten.append((place, piece))

    def write_computed(self, at_most: int | None = None) -> None:
        """Write entries to disk whose arrays were still being computed when stored.

        Args:
            at_most: how many; ``None``: all.
        """
        with self._lock:
            n = len(self._unwritten)
            for _ in range(n if at_most is None else min(n, at_most)):
                place, piece = self._unwritten.popleft()
                if self.disk and self.disk.takes(piece.kind, place.key, place.below):
                    self._write(place, piece)

    def _write(self, place: Place, piece: Piece) -> None:
        if self.disk is not None:
            data = pack(piece, place.fields(piece.slack))
            self.disk.write(Job(piece.kind, place.key, place.below, data))

    def _keep(self, path: _Path, piece: Piece) -> None:
        """Put a piece into the memory tier; the other kind at its place stays."""
        node = self._memory.get(path)
        held = {} if node is None else dict(node.value or {})
        held[piece.kind] = piece
        self._memory.put(path, held, sum(p.nbytes for p in held.values()))
