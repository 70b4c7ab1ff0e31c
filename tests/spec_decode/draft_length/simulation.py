"""Rounds without models: known acceptance, known costs, a clock that adds them up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp

from specdec.spec_decode.draft_length import (
    AutoLength,
    BatchState,
    DraftLength,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)

# Round number and row: the chance that a draft token is accepted.
Accept = Callable[[int, int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds of forwards.

    ``step`` for a plain one of one row, in which every further token adds
    ``token``; a draft step costs ``draft`` times a plain one.
    """

    step: float
    draft: float
    token: float

    def verify(self, num_rows: int, num_tokens: int) -> float:
        return self.step + self.token * (num_rows * num_tokens - 1)

    def draft_step(self, num_rows: int) -> float:
        return self.draft * self.verify(num_rows, 1)

    def __call__(self, num_rows: int, k: int) -> float:
        return k * self.draft_step(num_rows) + self.verify(num_rows, k + 1)

    def catch_up(self, num_rows: int, num_tokens: int) -> float:
        more = self.verify(num_rows, num_tokens + 1) - self.verify(num_rows, 1)
        return self.draft * more

    def measured(
        self,
        num_rows: int,
        *,
        draft: float = 1.0,
        verify: float = 1.0,
        context: int = 0,
    ) -> Forwards:
        """Forwards as they would be measured, or wrongly by a factor."""
        plain = self.verify(num_rows, 1)
        more = {s: (self.verify(num_rows, s) - plain) * verify for s in (1, 2, 5)}
        return Forwards(
            num_rows,
            {s: plain + n for s, n in more.items()},
            self.draft_step(num_rows) * draft,
        )


@dataclass
class Simulation:
    """Rows that decode for ``rounds`` rounds.

    Args:
        cost: true seconds.
        accept: true chance of each draft token, given that those before were kept.
        num_rows: as many rows run all the time.
        noise: standard deviation of a round's time, as a share.
        lag: rounds that are in flight when the next is chosen.
        new_shape: seconds that a k takes longer when it is met first.
        pace: times this factor, by the round's number.
        slowed: rounds that draft take this times as long, by the round's number.
    """

    cost: Costs
    accept: Accept
    num_rows: int = 1
    rounds: int = 1500
    noise: float = 0.05
    lag: int = 0
    new_shape: float = 0.0
    pace: Callable[[int], float] = lambda number: 1.0
    slowed: Callable[[int], float] = lambda number: 1.0

    def run(self, length: DraftLength, seed: int = 0) -> Result:
        rng = random.Random(seed)
        pending: list[RoundTiming] = []
        met = {0}
        seconds, tokens, backlog = 0.0, 0, 0
        chosen: list[int] = []
        for number in range(self.rounds):
            state = BatchState(
                self.num_rows,
                [100] * self.num_rows,
                self.rounds - number,
                backlog,
                [p.num_draft_tokens for p in pending],
            )
            k = length.choose(state)
            rows = []
            for row in range(self.num_rows):
                n = 0
                while n < k and rng.random() < self.accept(number, row):
                    n += 1
                rows.append((k, n))
                tokens += n + 1
            took = self.cost(self.num_rows, k) * exp(rng.gauss(0, self.noise))
            if k:
                took += self.cost.catch_up(self.num_rows, backlog)
            if k not in met:
                met.add(k)
                took += self.new_shape
            took *= self.pace(number) * (self.slowed(number) if k else 1.0)
            outcome = RoundTiming(
                self.num_rows, k, rows, took, backlog=backlog if k else 0
            )
            pending.append(outcome)
            backlog = 0 if k else backlog + 1
            seconds += took
            chosen.append(k)
            if len(pending) > self.lag:
                length.observe(pending.pop(0))
        return Result(tokens / seconds, chosen)

    def auto(
        self, *, draft: float = 1.0, verify: float = 1.0, seed: int = 0
    ) -> tuple[Result, AutoLength]:
        """What ``auto`` does, with measurements wrong by factors."""
        forwards = self.cost.measured(self.num_rows, draft=draft, verify=verify)
        costs = RoundCosts(ForwardCosts(), new_shape=self.new_shape)
        costs.add(forwards)
        length = AutoLength(costs)
        return self.run(length, seed), length

    def fixed(self, k: int) -> float:
        """Expected tokens per second with a fixed k, nothing drawn."""
        expected = 0.0
        shown = max(1, self.rounds // 200)
        numbers = range(0, self.rounds, shown)
        seconds = sum(self.cost(self.num_rows, k) * self.pace(n) for n in numbers)
        for number in numbers:
            for row in range(self.num_rows):
                a = self.accept(number, row)
                expected += sum(a**j for j in range(k + 1))
        return expected / seconds

    def best(self, ks: Sequence[int] = range(9)) -> tuple[float, int]:
        """The best fixed k's rate, and that k."""
        return max((self.fixed(k), k) for k in ks)


@dataclass(frozen=True)
class Result:
    """Tokens per second, and the k of each round."""

    rate: float
    chosen: list[int]


__all__ = ["Costs", "Result", "Simulation", "replace"]
