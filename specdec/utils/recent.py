"""The values that were used last. No mlx here."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values that were used last, by their keys; for several threads.

    Args:
        limit: the most that they may take together. The newest is always kept.
        size: what a value takes.
    """

    def __init__(self, limit: int, size: Callable[[V], int]):
        self._limit, self._size = limit, size
        self._lock = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of a key, which is the newest now; ``None``: it is not kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value as the newest, and drop the oldest beyond the limit."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > 1 and self._taken() > self._limit:
                self._values.popitem(last=False)

    def pop(self, key: K) -> None:
        """Drop a value, if it is kept."""
        with self._lock:
            self._values.pop(key, None)

    def _taken(self) -> int:
        return sum(map(self._size, self._values.values()))
