"""The prefix store: a memory tier over a disk tier, for all models of a run.

Each tier is a radix tree of paths (signature, token, token, ...). The node where
entries end holds a dict of them by kind. A look-up searches both tiers and uses the
best entries of both.
"""

from __future__ import annotations

import threading
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
    """

    plan: Plan[Piece]
    shared: int
    covered: int


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
    """Keeps keys and values of prompts for later prompts with the same prefix.

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
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Write all queued entries and end the disk tier's thread."""
        if self.disk is not None:
            self.disk.close()

    def lookup(self, signature: str, tokens: Tokens, form: Form) -> Found:
        """The longest prefix of ``tokens`` that can be restored, read into memory.

        Args:
            form: the form of the model's caches.
        """
        path = (signature, *tokens)
        with self._lock:
            return self._lookup(path, form)

    def _lookup(self, path: _Path, form: Form) -> Found:
        while True:
            match = self._memory.match(path)
            shared = max(match.length - 1, 0)
            found: list[tuple[Piece | File, int]] = [*reached(match)]
            files: list[tuple[File, int]] = []
            if self.disk is not None:
                on_disk, files = self.disk.find(path)
                shared = max(shared, on_disk)
                found += files
            covered, _ = chained(found if self.disk is None else files)
            best = plan(found, linear=bool(form.linear), rings=form.has_ends)
            if best.length < self.min_length:
                return Found(Plan(0), shared, covered)
            loaded = self._load(best, form)
            if loaded is not None:
                for node in [*match.passed, *islice(match.beneath(), 1)][-1:]:
                    self._memory.touch(node)
                return Found(loaded, shared, covered)
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

    def insert(self, place: Place, kind: Kind, cut: Callable[[], Piece]) -> None:
        """Store an entry in each tier that lacks it at ``place`` and can take it.

        ``cut`` makes its piece; it is not called if the memory tier holds the entry.
        """
        with self._lock:
            self._insert(place, kind, cut)

    def _insert(self, place: Place, kind: Kind, cut: Callable[[], Piece]) -> None:
        node = self._memory.get(place.path)
        piece = None if node is None else (node.value or {}).get(kind)
        parent = place.parent if place.start else None
        to_disk = self.disk is not None and self.disk.takes(kind, place.key, parent)
        if node is not None and piece is not None:
            self._memory.touch(node)
        elif to_disk or self._memory.budget:
            piece = cut()
            self._keep(place.path, piece)
        if to_disk and self.disk is not None and piece is not None:
            data = pack(piece, place.fields(piece.slack))
            self.disk.write(Job(kind, place.key, parent, data))

    def _keep(self, path: _Path, piece: Piece) -> None:
        """Put a piece into the memory tier; the other kind at its place stays."""
        node = self._memory.get(path)
        held = {} if node is None else dict(node.value or {})
        held[piece.kind] = piece
        self._memory.put(path, held, sum(p.nbytes for p in held.values()))
