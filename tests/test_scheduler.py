"""First come, first served, without a model."""

from __future__ import annotations

from specdec.config import SamplingParams
from specdec.scheduler import Scheduler
from specdec.sequence import Request


def request(index: int) -> Request:
    return Request(index, "", (1,), SamplingParams())


def test_requests_get_rows_in_the_order_they_came() -> None:
    scheduler = Scheduler(3)
    for index in range(5):
        scheduler.add(request(index))
    assert [r.index for r in scheduler.admit(0)] == [0, 1, 2]
    assert scheduler.admit(3) == []
    assert scheduler.waiting == 2
    assert [r.index for r in scheduler.admit(2)] == [3]
    scheduler.add(request(9))
    assert [r.index for r in scheduler.admit(1)] == [4, 9]
    assert scheduler.waiting == 0
    assert scheduler.admit(0) == []
