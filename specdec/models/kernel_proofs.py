"""Keeps proofs and choices of kernels on disk, by device and versions."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from .. import backend
from ..cuda import proofs
from ..utils.user_cache import CachedEntries, cache_path

VERSION = 1
# Devices and versions that are remembered; with more, the oldest are forgotten.
MOST_ENTRIES = 16


def cached_proofs() -> AbstractContextManager[None]:
    """A context in which proofs and choices are read from disk and kept there."""
    path = cache_path("kernels.json")
    kept = CachedEntries(path, "found", version=VERSION, most=MOST_ENTRIES)
    return proofs.kept_in(KeptProofs(kept, proof_key()))


@cache
def proof_key() -> str:
    """A hash of what proofs depend on: device, versions and the kernels' sources."""
    described = backend.describe()
    names = ["specdec", "mlx", "backend", "device"]
    if described["backend"] == "metal":
        names.append("platform")  # each system has its own compiler of kernels
    facts = [described[name] for name in names]
    return hashlib.sha256(repr([*facts, proofs.sources()]).encode()).hexdigest()[:32]


class KeptProofs:
    """Proofs and choices of kernels in a file.

    Args:
        file: the file, which has entries for several devices and versions.
        key: the key of the current device and versions.
    """

    def __init__(self, file: CachedEntries, key: str):
        self._file, self._key = file, key

    def get(self, name: str) -> bool | None:
        """What was found for this name; ``None``: nothing is kept."""
        verdict = self._entry().get(name)
        return verdict if isinstance(verdict, bool) else None

    def put(self, name: str, verdict: bool | None) -> None:
        """Keep what was found for this name; ``None``: forget it."""
        self._file.save(self._key, self._entry() | {name: verdict})

    def _entry(self) -> dict[str, Any]:
        entry = self._file.load().get(self._key)
        return entry if isinstance(entry, dict) else {}
