"""Which requests decode together: first come, first served. No mlx here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from ..memory import largest_fitting
from ..request import Request

# Tokens that prefill computes, over those that prompts have.
MOST_PADDING = 2


def _free(requests: Sequence[Request]) -> int:
    return 0


class Scheduler:
    """Rows that wait for a place, and whether there is one.

    Nobody overtakes: a row that does not fit holds back those after it.

    Where a join costs as much for one row as for several, and more requests wait than
    places are free, rows join several at a time: as soon as the free places have been
    idle for what a join costs, or half of the batch is free. That is never more than
    twice the cost of the best times, which nobody knows before (ski rental).

    Args:
        batch_size: rows that decode together at most.
        join_rounds: what a join costs, in rounds of the whole batch; 0: nothing.
        budget: what the rows of a batch may cost together, in bytes; ``None``:
            anything.
        cost: what requests cost while they have rows together, in bytes: more for
            more of them.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        join_rounds: int = 0,
        budget: int | None = None,
        cost: Callable[[Sequence[Request]], int] | None = None,
    ):
        self.batch_size = batch_size
        self.budget = budget
        self._cost = cost or _free
        # Rounds that free places may be idle for, and have been, added up over them.
        self._may_idle, self._idle = join_rounds * batch_size, 0
        self._waiting: deque[Request] = deque()
        # Rows last found to be too many together: while they are the same, nothing
        # needs to be asked again.
        self._too_many: list[Request] = []

    @property
    def waiting(self) -> int:
        """Rows that have no place yet."""
        return len(self._waiting)

    @property
    def expected(self) -> int:
        """Rows that wait for nothing but a place; none while the first lacks memory."""
        lacks = self._too_many and self._waiting and self._too_many[-1]
        return 0 if lacks and lacks is self._waiting[0] else len(self._waiting)

    @property
    def first(self) -> Request:
        """The row that gets the next place."""
        return self._waiting[0]

    def add(self, sequence: Request) -> None:
        """Queue a row after those that wait."""
        self._waiting.append(sequence)

    def ended(self) -> list[Request]:
        """Take the waiting rows that have ended (cancelled, say) off the queue."""
        gone = [s for s in self._waiting if s.finish_reason is not None]
        if gone:
            self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        return gone

    def admit(self, running: Sequence[Request]) -> list[Request]:
        """Take the rows that get a place now, in the order that they came.

        Args:
            running: the rows that have one. Where there are none, the first that
                waits gets one whatever it costs: it will not fit better later.
        """
        places = self.batch_size - len(running)
        if running and self._is_early(places):
            return []
        first = list(islice(self._waiting, max(0, places)))
        alike = first[: _number_alike(first)]
        admitted = alike[: self._number_fitting(running, alike)]
        for _ in admitted:
            self._waiting.popleft()
            self._idle = 0
        return admitted

    def _is_early(self, places: int) -> bool:
        """Whether rows wait another round, for more to join with them."""
        if self.waiting <= places or 2 * places >= self.batch_size:
            return False
        self._idle += places
        return self._idle < self._may_idle

    def affords(self, rows: Sequence[Request], num_slots: int) -> bool:
        """Whether memory has so many slots, each for the longest of ``rows``."""
        if self.budget is None:
            return True
        more = max(0, num_slots - len(rows))
        return self._cost([*rows, *[rows[0]] * more]) <= self.budget

    def together(self) -> int:
        """Rows at the head of the queue that may decode together, if none runs."""
        return self._number_fitting([], list(islice(self._waiting, self.batch_size)))

    def _number_fitting(
        self, running: Sequence[Request], rows: Sequence[Request]
    ) -> int:
        """How many of ``rows``, the first ones, memory has beside those that run."""
        if self.budget is None or not rows:
            return len(rows)
        if _same([*running, *rows[:1]], self._too_many):
            return 0
        budget = self.budget

        def fits(number: int) -> bool:
            batch = [*running, *rows[:number]]
            return len(batch) == 1 or self._cost(batch) <= budget

        # Most often all of them fit.
        number = len(rows)
        if not fits(number):
            number = largest_fitting(fits, number - 1)
        self._too_many = [*running, *rows[: number + 1]] if rows[number:] else []
        return number


def _same(some: Sequence[Request], others: Sequence[Request]) -> bool:
    return list(map(id, some)) == list(map(id, others))


def _number_alike(rows: Sequence[Request]) -> int:
    """How many prompts, the first ones, are read together at a fair price.

    They are padded to the longest of them; that may double the work, not more. Those
    after them get their places when these have begun.
    """
    longest = tokens = 0
    for i, row in enumerate(rows):
        length = len(row.prompt_tokens)
        longest, tokens = max(longest, length), tokens + length
        if longest * (i + 1) > MOST_PADDING * tokens:
            return i
    return len(rows)
