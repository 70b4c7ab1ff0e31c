"""What tells rows apart: how much of a draft each accepts, and when the last ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Expected tokens of drafts that what is known of all rows is worth for one of them;
# observations after which one weighs 1/e; rows that are remembered, those that have
# ended among them.
PRIOR_TOKENS, MEMORY, MOST_ROWS = 6.0, 64.0, 1024


class RowAcceptance:
    """Draft tokens that rows accepted, over what is expected of all alike.

    A factor, drawn to 1 by ``PRIOR_TOKENS``: as for a Poisson count whose mean is the
    expected number times a factor with a gamma prior around 1.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def observe(
        self,
        rows: Sequence[int],
        accepted: Iterable[tuple[int, int]],
        survival: Sequence[float],
    ) -> None:
        """One more round: each row's number, (tokens it could accept, accepted).

        Args:
            survival: chances that at least 1, 2, ... tokens are accepted, of all rows.
        """
        if len(self._seen) > MOST_ROWS:
            self._seen = {row: self._seen[row] for row in rows if row in self._seen}
        for row, (limit, count) in zip(rows, accepted, strict=False):
            kept, expected = self._seen.get(row, (0.0, 0.0))
            fading = 1 - 1 / MEMORY
            self._seen[row] = (
                kept * fading + count,
                expected * fading + sum(survival[:limit]),
            )

    def factor(self, row: int) -> float:
        """How many times as much as others the row accepts."""
        kept, expected = self._seen.get(row, (0.0, 0.0))
        return (kept + PRIOR_TOKENS) / (expected + PRIOR_TOKENS)


def rounds_left(
    rows: Iterable[tuple[int, float]], k: int, tokens: float
) -> list[float]:
    """Rounds of k until each row has ended.

    Args:
        rows: of each, tokens that it may still emit, and its factor.
        tokens: expected of a round, of all rows.
    """
    more = tokens - 1
    return [n / (1 + min(k, factor * more)) for n, factor in rows]
