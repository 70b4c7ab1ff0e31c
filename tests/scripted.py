"""A draft length that does what a test says, and notes what it is told."""

from __future__ import annotations

from collections.abc import Callable

from specdec.lengths import BatchState, RoundOutcome


class Script:
    """Chooses by a function of the round's number; notes what it is told."""

    max_draft_tokens = 4

    def __init__(
        self,
        choose: Callable[[int], int],
        *,
        may_pay: bool = True,
        rests: Callable[[int], bool] = lambda number: False,
    ):
        self._choose, self._may_pay, self._rests = choose, may_pay, rests
        self.outcomes: list[RoundOutcome] = []
        self.states: list[BatchState] = []
        self.asked: list[BatchState] = []

    def prepare(self, num_rows: int) -> None:
        pass

    def may_pay(self, state: BatchState) -> bool:
        self.asked.append(state)
        return self._may_pay

    def rests(self, num_rows: int) -> bool:
        return self._rests(len(self.outcomes))

    def choose(self, state: BatchState) -> int:
        self.states.append(state)
        return self._choose(len(self.outcomes) + len(state.in_flight))

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)
