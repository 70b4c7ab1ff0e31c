"""Decides which requests decode together: first come, first served. No mlx here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from ..memory import largest_fitting
from ..request import Request

# Prompts prefilled together are padded to at most this many times their tokens.
MOST_PADDING = 2


def _free(requests: Sequence[Request]) -> int:
    return 0


class Scheduler:
    """The queue of requests that wait for a row.

    No request overtakes another: one that does not fit holds back those after it.

    On some devices a join takes as long for one request as for several. If more
    requests could join together than rows are free, the free rows then wait: until they
    have been idle for as long as a join takes, or half of the batch is free. This costs
    at most twice as much as joining at the best times, which are not known in advance
    (ski rental).

    Args:
        batch_size: the most rows that decode together.
        join_rounds: the cost of a join, in rounds of the whole batch; 0: nothing.
        budget: bytes that the rows of a batch may need together; ``None``: any number.
        cost: gives the bytes that requests need when they have rows together.
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
        # Idle rounds, summed over free rows: the most allowed, and the number so far.
        self._may_idle, self._idle = join_rounds * batch_size, 0
        self._waiting: deque[Request] = deque()
        # The requests that last did not fit together. While they are the same, they
        # need not be checked again.
        self._too_many: list[Request] = []

    @property
    def waiting(self) -> int:
        """How many requests have no row yet."""
        return len(self._waiting)

    @property
    def expected(self) -> int:
        """How many requests wait only for a row; 0 while the first one lacks memory."""
        lacks = self._too_many and self._waiting and self._too_many[-1]
        return 0 if lacks and lacks is self._waiting[0] else len(self._waiting)

    @property
    def first(self) -> Request:
        """The request that gets the next row."""
        return self._waiting[0]

    def add(self, request: Request) -> None:
        """Queue a request after all that wait."""
        self._waiting.append(request)

    def ended(self) -> list[Request]:
        """Take waiting requests that have ended (cancelled, say) off the queue."""
        gone = [s for s in self._waiting if s.finish_reason is not None]
        if gone:
            self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        return gone

    def admit(self, running: Sequence[Request]) -> list[Request]:
        """Take the requests that get a row now off the queue, in the order they came.

        Args:
            running: requests that have a row. If there are none, the first waiting
                request gets one whatever it needs: it will not fit better later.
        """
        places = max(0, self.batch_size - len(running))
        # One more than could join now: it shows whether waiting helps.
        first = list(islice(self._waiting, places + 1))
        alike = first[: _number_alike(first)]
        if running and self._is_early(places, len(alike)):
            return []
        alike = alike[:places]
        admitted = alike[: self._number_fitting(running, alike)]
        for _ in admitted:
            self._waiting.popleft()
            self._idle = 0
        return admitted

    def _is_early(self, places: int, alike: int) -> bool:
        """Whether to wait another round, so that more requests join together.

        Args:
            places: free rows.
            alike: how many requests could join together if one more row were free.
        """
        if 2 * places >= self.batch_size or alike <= places:
            return False
        # In large batches no row waits for more than 16 times ``join_rounds``.
        self._idle += max(places, self.batch_size // 16)
        return self._idle < self._may_idle

    def affords(self, rows: Sequence[Request], num_slots: int) -> bool:
        """Whether memory has room for ``num_slots``, each for the longest row."""
        if self.budget is None:
            return True
        more = max(0, num_slots - len(rows))
        return self._cost([*rows, *[rows[0]] * more]) <= self.budget

    def together(self) -> int:
        """How many of the first waiting requests could decode together if none ran."""
        return self._number_fitting([], list(islice(self._waiting, self.batch_size)))

    def _number_fitting(
        self, running: Sequence[Request], rows: Sequence[Request]
    ) -> int:
        """How many of ``rows``, from the first on, fit in memory with running rows."""
        if self.budget is None or not rows:
            return len(rows)
        if _same([*running, *rows[:1]], self._too_many):
            return 0
        budget = self.budget

        def fits(number: int) -> bool:
            batch = [*running, *rows[:number]]
            return len(batch) == 1 or self._cost(batch) <= budget

        # Usually all of them fit.
        number = len(rows)
        if not fits(number):
            number = largest_fitting(fits, number - 1)
        self._too_many = [*running, *rows[: number + 1]] if rows[number:] else []
        return number


def _same(some: Sequence[Request], others: Sequence[Request]) -> bool:
    return list(map(id, some)) == list(map(id, others))


def _number_alike(rows: Sequence[Request]) -> int:
    """How many prompts, from the first on, are prefilled together.

    They are padded to the longest of them, which may at most double the work. Prompts
    after them join later.
    """
    longest = tokens = 0
    for i, row in enumerate(rows):
        length = len(row.prompt_tokens)
        longest, tokens = max(longest, length), tokens + length
        if longest * (i + 1) > MOST_PADDING * tokens:
            return i
    return len(rows)
