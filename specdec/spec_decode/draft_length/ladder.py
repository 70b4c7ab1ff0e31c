"""The draft lengths that are considered. No mlx here."""

from __future__ import annotations

from collections.abc import Sequence

# Few values, and fewer where each is a shape to get ready for: 3 and 6 are within a few
# per cent of their neighbours.
LADDER = (0, 1, 2, 3, 4, 6, 8)
DEAR_LADDER = (0, 1, 2, 4, 8)


class Ladder:
    """Values of k, from 0 up.

    Args:
        most: the largest k; those of the ladder that are smaller come before it.
        dear: take as few as where every new shape costs.
    """

    def __init__(self, most: int, *, dear: bool):
        ladder = DEAR_LADDER if dear else LADDER
        self._most = min(most, ladder[-1])
        self._ks = (*(k for k in ladder if k < self._most), self._most)

    def up_to(self, room: Sequence[int], measured: int) -> list[int]:
        """What there is room for; of positions never measured, a few at a time.

        Args:
            room: of each row, the most draft tokens that are of use to it.
            measured: positions whose acceptance is known.
        """
        widest = max(room, default=0)
        most = min(widest, 2 * measured + 1)
        ks = [k for k in self._ks if k <= most]
        # Between two steps of the ladder, when the room is what limits it.
        if widest < self._most and widest == most and widest not in ks:
            ks.append(widest)
        return ks
