"""Proofs of kernels: each computes what its reference does, on this device.

A kernel is tried when it is first asked for, and not again by a process that is given
what earlier ones found.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

logger = logging.getLogger(__name__)


class Verdicts(Protocol):
    """What was found out about kernels on this device, by name."""

    def get(self, name: str, /) -> bool | None:
        """What this process or one before it found; ``None``: nothing."""

    def put(self, name: str, found: bool, /) -> None:
        """Keep what was found."""


_kept: Verdicts | None = None


@contextmanager
def kept_in(verdicts: Verdicts | None) -> Iterator[None]:
    """Let proofs look into ``verdicts`` first, and add to them; ``None``: try all.

    A kernel that failed is not kept: the next process tries it again.
    """
    global _kept
    before, _kept = _kept, verdicts
    try:
        yield
    finally:
        _kept = before


def holds(name: str, check: Callable[[], bool]) -> bool:
    """Whether a kernel runs on this device, and computes what it should.

    Args:
        name: of the kernel and of all that it was compiled for.
        check: runs it beside its reference.
    """
    if kept(name):
        return True
    try:
        right = check()
    except (RuntimeError, ValueError) as error:
        logger.debug("no kernel %s: %s", name, error)
        return False
    if right:
        keep(name, right)
    return right


def kept(name: str) -> bool | None:
    """What was found of a name before; ``None``: nothing."""
    return None if _kept is None else _kept.get(name)


def keep(name: str, found: bool) -> None:
    """Keep what was found, where that is asked for."""
    if _kept is not None:
        _kept.put(name, found)


@cache
def sources() -> str:
    """A digest of all kernels, references and proofs of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
