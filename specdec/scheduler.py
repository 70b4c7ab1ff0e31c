"""Which requests decode together. No mlx here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .sequence import Request


def waves(requests: Sequence[Request], batch_size: int) -> Iterator[list[Request]]:
    """Requests in the order given, ``batch_size`` at a time."""
    for first in range(0, len(requests), batch_size):
        yield list(requests[first : first + batch_size])
