"""A draft length that does what a test says, and notes what it is told."""

from __future__ import annotations

from collections.abc import Callable

from specdec.spec_decode.draft_length import BatchState, RoundOutcome


class Script:
    """Chooses by a function of the round's number; notes what it is told."""

    max_draft_tokens = 4

    def __init__(
        self,
        choose: Callable[[int], int],
        *,
        may_pay: bool = True,
        held: Callable[[int], int | None] = lambda number: None,
    ):
        self._choose, self._may_pay, self._held = choose, may_pay, held
        self.outcomes: list[RoundOutcome] = []
        self.states: list[BatchState] = []
        self.asked: list[BatchState] = []

    def prepare(self, num_rows: int) -> None:
        pass

    def may_pay(self, state: BatchState) -> bool:
        self.asked.append(state)
        return self._may_pay

    def held(self, num_rows: int) -> int | None:
        return self._held(len(self.outcomes))

    def choose(self, state: BatchState) -> int:
        self.states.append(state)
        return self._choose(len(self.outcomes) + len(state.in_flight))

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)
