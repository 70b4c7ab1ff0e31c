"""How wide prefill chunks are while other rows decode."""

from __future__ import annotations

from ..cache.capacity import NARROWEST_CHUNK

# Rows that decode wait for a chunk of a prompt that joins. A chunk that takes longer
# than the second is followed by narrower ones, after less than the first by wider ones.
PAUSES = 0.05, 0.1


class Pace:
    """The width of prefill chunks, by the time that they take.

    Args:
        most: the widest.

    Attributes:
        step: the most tokens of a row in the next chunk.
    """

    def __init__(self, most: int):
        self.step = self.most = most
        self._shapes: set[tuple[int, int]] = set()

    def take(self, num_rows: int, width: int, seconds: float) -> None:
        """Learn from a chunk of ``width`` tokens a row.

        Its first chunk says nothing of a shape: MLX may have compiled for it. A narrow
        one says nothing of wider ones, if it was fast.
        """
        if (num_rows, width) not in self._shapes:
            self._shapes.add((num_rows, width))
        elif seconds > PAUSES[1]:
            narrower = min(self.step, width) // 2
            self.step = max(min(NARROWEST_CHUNK, self.most), narrower)
        elif seconds < PAUSES[0] and width >= self.step:
            self.step = min(self.most, self.step * 2)
