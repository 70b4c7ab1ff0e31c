"""Proofs of kernels on disk: a kernel is tried once for a device and its versions."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from functools import cache

from .. import backend
from ..cuda import proofs
from ..utils.kept import KeptEntries, kept_path

VERSION = 1
# Devices and versions that are remembered; beyond, the oldest are forgotten.
MOST_ENTRIES = 16


def kept_proofs() -> AbstractContextManager[None]:
    """Proofs of kernels are looked for on disk, and kept there, within this."""
    path = kept_path("kernels.json")
    kept = KeptEntries(path, "proven", version=VERSION, most=MOST_ENTRIES)
    return proofs.kept_in(KeptProofs(kept, signature()))


@cache
def signature() -> str:
    """What a proof depends on: the device, versions, and the kernels' sources."""
    described = backend.describe()
    facts = [described[name] for name in ("specdec", "mlx", "backend", "device")]
    return hashlib.sha256(repr([*facts, proofs.sources()]).encode()).hexdigest()[:32]


class KeptProofs:
    """Names of the kernels that were proven, in a file.

    Args:
        file: of all devices and versions.
        key: of these.
    """

    def __init__(self, file: KeptEntries, key: str):
        self._file, self._key = file, key

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def add(self, name: str) -> None:
        """Keep that a kernel was proven."""
        if name not in (names := self._names()):
            self._file.save(self._key, [*names, name])

    def _names(self) -> list[str]:
        found = self._file.load().get(self._key)
        return found if isinstance(found, list) else []
