"""Which requests decode together: first come, first served. No mlx here."""

from __future__ import annotations

from collections import deque

from .sequence import Request


class Scheduler:
    """Requests that wait for a row.

    Args:
        batch_size: rows that decode together at most.
    """

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self._waiting: deque[Request] = deque()

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue ``request`` behind those that wait."""
        self._waiting.append(request)

    def admit(self, occupied: int) -> list[Request]:
        """Take the requests that get a row now, in the order that they came.

        Args:
            occupied: rows that are running or being prefilled.
        """
        free = max(0, self.batch_size - occupied)
        return [self._waiting.popleft() for _ in range(min(free, self.waiting))]
