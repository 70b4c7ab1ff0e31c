"""Decides which requests decode together: first come, first served. No mlx here."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from ..memory import largest_fitting
from ..request import Request

# Prompts prefilled together are padded to at most this many times their tokens.
MOST_PADDING = 2


def _free(requests: Sequence[Request]) -> int:
    return 0


class Scheduler:
    """The queue of requests that wait for a row.

    First come, first served: a request that does not fit holds back those after it.
    Of those that get a row, prompts of like length are prefilled together, the first
    one's among them; the others follow at once.

    On some devices a join takes as long for one request as for several. If more
    requests could join together than rows are free, the free rows then wait: until they
    have been idle for as long as a join takes, or half of the batch is free and most
    other rows are not about to reach their ``max_tokens``. This costs at most twice as
    much as joining at the best times, which are not known in advance (ski rental).

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
        # Those passed over when the last ones were admitted: they do not wait again.
        self._passed_over: list[Request] = []
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

    def part(self, requests: Sequence[Request]) -> None:
        """Put requests that were admitted back on the queue, to be admitted one by one.

        Args:
            requests: in the order in which they were admitted.
        """
        for request in requests:
            request.joins_alone = True
        self._waiting.extendleft(reversed(requests))
        self._passed_over = list(requests)

    def ended(self) -> list[Request]:
        """Take waiting requests that have ended (cancelled, say) off the queue."""
        gone = [s for s in self._waiting if s.finish_reason is not None]
        if gone:
            self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        return gone

    def admit(self, running: Sequence[Request]) -> list[Request]:
        """Take requests that are prefilled together off the queue.

        They are in the order they came. The first waiting request is one of them.

        Args:
            running: requests that have a row. If there are none, the first waiting
                request gets one whatever it needs: it will not fit better later.
        """
        places = max(0, self.batch_size - len(running))
        # One more than could join now: it shows whether waiting helps.
        first = list(islice(self._waiting, places + 1))
        if running and places and self._is_early(places, first, running):
            return []
        alone = bool(first) and first[0].joins_alone
        first = first[: min(places, 1) if alone else places]
        admitted = _alike(first[: self._number_fitting(running, first)])
        if admitted:
            self._idle = 0
            taken = set(map(id, admitted))
            window = [self._waiting.popleft() for _ in first]
            self._passed_over = [s for s in window if id(s) not in taken]
            self._waiting.extendleft(reversed(self._passed_over))
        return admitted

    def _is_early(
        self, places: int, first: Sequence[Request], running: Sequence[Request]
    ) -> bool:
        """Whether to wait another round, so that more requests join together.

        Args:
            places: free rows, one or more.
            first: the requests that could join if one more row were free.
            running: requests that have a row.
        """
        if len(first) <= places:
            return False
        rounds = sorted(s.remaining for s in running)[len(running) // 2]
        late = rounds * places > self._may_idle - self._idle
        if late and 2 * places >= self.batch_size:
            return False
        if any(first[0] is s for s in self._passed_over):
            return False
        if len(_alike(first)) <= places:
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

    def next_batch(self) -> tuple[int, int]:
        """:meth:`together`, and the tokens of these prompts, on average."""
        count = self.together()
        prompts = [len(r.prompt_tokens) for r in islice(self._waiting, count)]
        return count, sum(prompts) // max(1, count)

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


def _alike(rows: Sequence[Request]) -> list[Request]:
    """The most of ``rows`` next to each other in length, the first one included.

    They are padded to the longest of them, which at most doubles the work.
    """
    if len(rows) < 2:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt_tokens))
    lengths = [len(rows[i].prompt_tokens) for i in order]
    before = list(accumulate(lengths, initial=0))
    first = order.index(0)

    def too_padded(begin: int, end: int) -> bool:
        tokens = before[end] - before[begin]
        return lengths[end - 1] * (end - begin) > MOST_PADDING * tokens

    best = range(first, first + 1)
    for end in range(first + 1, len(rows) + 1):
        # Rows that are shorter than half of the longest add to the padding: where a
        # range is padded too much, so is each that begins earlier.
        begin = bisect_left(range(first), True, key=lambda i: not too_padded(i, end))
        if end - begin > len(best) and not too_padded(begin, end):
            best = range(begin, end)
    return [rows[i] for i in sorted(order[i] for i in best)]
