"""A draft-length policy that follows a test's script, and records its input."""

from __future__ import annotations

from collections.abc import Callable

from specdec.spec_decode.draft_length import BatchState, RoundTiming


class Script:
    """Chooses k by a function of the round's number; records its input."""

    max_draft_tokens = 4

    def __init__(self, choose: Callable[[int], int], *, may_pay: bool = True):
        self._choose, self._may_pay = choose, may_pay
        self.outcomes: list[RoundTiming] = []
        self.states: list[BatchState] = []
        self.asked: list[BatchState] = []

    def unmeasured(self, num_rows: int, context: int = 0) -> int:
        return 0

    def measure(self, num_rows: int, context: int = 0) -> None:
        raise AssertionError(num_rows)

    def may_pay(self, state: BatchState) -> bool:
        self.asked.append(state)
        return self._may_pay

    def choose(self, state: BatchState) -> int:
        self.states.append(state)
        return self._choose(len(self.outcomes) + len(state.in_flight))

    def stands(self, state: BatchState) -> int:
        return 0

    def observe(self, timing: RoundTiming) -> None:
        self.outcomes.append(timing)
