"""The front: a memory tier over a disk tier, for all models of a run.

A tier is a radix tree of paths (signature, token, token, ...); where entries end
stands a dict of them by kind. Both tiers are asked, and the best of both answers
is used.
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
from .files import DamagedError, File, header_fields
from .radix import RadixTree
from .snapshot import Form, Piece, pack, unpack

BLOCK_SIZE = 256
_READERS = 4

Tokens = tuple[int, ...]
_Path = tuple[Hashable, ...]


@dataclass(frozen=True)
class Place:
    """Where an entry lies on its prompt.

    Args:
        path: (signature, token, ...) up to its end.
        key, parent: names of its end and of its begin (``place_key``).
        start: tokens before it.
        model: the name that the user gave, for ``specdec cache list``.
    """

    path: _Path
    key: str
    parent: str
    start: int
    model: str

    def fields(self, slack: int) -> dict[str, str]:
        """The header of its file."""
        signature, *tokens = self.path
        return header_fields(
            signature=str(signature),
            model=self.model,
            parent=self.parent,
            start=self.start,
            slack=slack,
            tokens=tokens[self.start :],  # type: ignore[arg-type]
        )


@dataclass(frozen=True)
class Found:
    """What the store has of a prompt.

    Args:
        plan: pieces, in memory now, that restore its first ``plan.length`` tokens.
        shared: tokens that it has in common with some stored prompt.
        covered: tokens that stored blocks hold without a gap: those on disk, where
            there is a disk tier.
    """

    plan: Plan[Piece]
    shared: int
    covered: int


def open_store(config: EngineConfig) -> PrefixStore | None:
    """The store that ``config`` asks for, if it does."""
    folder = config.prefix_cache
    if folder is None and config.prefix_memory == 0:
        return None
    return PrefixStore(
        memory=config.prefix_memory,
        folder=None if folder is None else Path(folder).expanduser(),
        disk=config.prefix_cache_size,
    )


class PrefixStore:
    """Keys and values of prompts, kept for prompts that begin alike.

    Args:
        memory: bytes that the memory tier may hold.
        folder: of the disk tier; ``None`` for none.
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
        # Less is not worth a read: it rides along in a chunk of prefill.
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
        """Write what waits to be written; the disk tier takes no more."""
        if self.disk is not None:
            self.disk.close()

    def lookup(self, signature: str, tokens: Tokens, form: Form) -> Found:
        """The longest prefix of ``tokens`` that can be restored, read into memory.

        Args:
            form: of the model's caches.
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
            # A file could not be read and is known no more: what else is there?

    def _load(self, best: Plan[Piece | File], form: Form) -> Plan[Piece] | None:
        """The same plan with every file read, or ``None`` when one cannot be."""
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
        # Longest first: what stands above was used last.
        for path, piece in reversed(keep):
            self._keep(path, piece)
        pieces = [read[e.name] if isinstance(e, File) else e for e in wanted]
        ring = pieces.pop() if best.ring else None
        return Plan(best.length, tuple(pieces), ring)

    def _read(self, files: list[File], form: Form) -> list[Piece | None]:
        disk = self.disk
        if disk is None or not files:
            return []
        # Reading and hashing leave the interpreter to others; arrays are made here,
        # a few files at a time, so that little is held twice.
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
        """Keep what ``cut`` makes, in each tier that has no such entry there.

        ``cut`` is called only then.
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
        """Put a piece into the memory tier, beside the other kind at its place."""
        node = self._memory.get(path)
        held = {} if node is None else dict(node.value or {})
        held[piece.kind] = piece
        self._memory.put(path, held, sum(p.nbytes for p in held.values()))
