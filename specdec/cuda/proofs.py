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
    """Kernels that were proven on this device, by name."""

    def __contains__(self, name: object, /) -> bool:
        """Whether a kernel was proven by this process or one before it."""

    def add(self, name: str, /) -> None:
        """Keep that a kernel was proven."""


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
    if _kept is not None and name in _kept:
        return True
    try:
        right = check()
    except (RuntimeError, ValueError) as error:
        logger.debug("no kernel %s: %s", name, error)
        return False
    if right and _kept is not None:
        _kept.add(name)
    return right


@cache
def sources() -> str:
    """A digest of all kernels, references and proofs of this package."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
