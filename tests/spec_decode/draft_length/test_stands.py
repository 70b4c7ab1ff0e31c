"""A choice of 0 that stands is the one that would be made in every round."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specdec.spec_decode import draft_length
from specdec.spec_decode.draft_length import (
    Acceptance,
    AutoLength,
    BatchState,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)

PLAIN = 3e-3


def policy(seed: int, rows: int, most: int, step: float, once: float) -> AutoLength:
    rng = random.Random(seed)
    costs = RoundCosts(
        ForwardCosts(),
        new_shape=rng.choice((0.0, 0.01)),
        join_rounds=rng.choice((0, 4)),
    )
    verify = {s: PLAIN * (1 + 0.06 * (s - 1)) for s in (1, 2, 5, 9)}
    longer = {s: t + PLAIN * rng.choice((0, 1, 2)) for s, t in verify.items()}
    forwards = Forwards(
        rows, verify, PLAIN * step, PLAIN * once, context=2048, longer=longer
    )
    stored = rng.random() < 0.3
    (costs.forwards.add if stored else costs.add)(forwards)
    return AutoLength(costs, Acceptance([0.6] * 3 * stored), max_draft_tokens=most)


def job(seed: int) -> tuple[int, int]:
    """Rounds of a batch, and in how many of them the choice stood.

    One policy is asked in every round, another while its choice does not stand. Both
    are shown the same.
    """
    rng = random.Random(seed)
    rows, most = rng.choice((1, 2, 8, 32)), rng.choice((4, 6, 8))
    step, head = rng.choice((0.01, 0.1, 0.3, 0.8)), rng.random() < 0.5
    once = rng.choice((0.0, 0.3, 1.0)) * head
    always, rarely = (policy(seed, rows, most, step, once) for _ in range(2))
    chance, waiting = rng.choice((0.0, 0.3, 0.5, 0.7, 0.8)), rng.random() < 0.5
    left, flying = dict[int, int](), list[RoundTiming]()
    number = stands = stood = plain = 0
    context = rng.choice((0, 500, 2040))
    for _ in range(800):
        if rng.random() < 0.003:
            chance = rng.choice((0.0, 0.4, 0.6, 0.9))
        context += 1
        changes = rng.random() < 0.01
        waiting ^= changes
        while len(left) < rows and (not left or rng.random() < 0.1):
            left[number] = rng.choice((20, 128, 128, 400))
            number, changes = number + 1, True
        state = BatchState(
            rows,
            [most] * len(left),
            sum(left.values()) / len(left),
            0 if head else plain,
            [f.num_draft_tokens for f in flying],
            {} if waiting else dict(left),
            context=context,
        )
        k, stands = always.choose(state), 0 if changes else stands
        if stands:
            stands, stood = stands - 1, stood + 1
            assert k == 0
        else:
            assert rarely.choose(state) == k
            if k == 0 and plain % 8 == 0:
                stands = rarely.stands(state)
        accepted = []
        for row in list(left):
            n = 0
            while n < k and rng.random() < chance:
                n += 1
            accepted += [(row, n)] * (k > 0)
            left[row] -= n + 1
            if left[row] <= 0:
                del left[row]
                stands = 0
        cost = 1 + (k > 0) * once + k * (step + 0.06)
        timing = RoundTiming(
            rows,
            k,
            [(k, n) for _, n in accepted],
            PLAIN * cost * rng.uniform(0.9, 1.1) * (3 if rng.random() < 0.01 else 1),
            rng.random() < 0.9,
            state.backlog if k else 0,
            [row for row, _ in accepted],
        )
        plain = 0 if k else plain + 1
        flying.append(timing)
        if len(flying) > 1:
            timing = flying.pop(0)
            fair = timing.fair and timing.num_draft_tokens == k
            for length in (always, rarely):
                length.observe(replace(timing, fair=fair))
    return 800, stood


def all_jobs() -> tuple[int, int]:
    rounds, stood = zip(*map(job, range(50, 110)), strict=True)
    return sum(rounds), sum(stood)


def test_a_choice_that_stands_is_that_of_every_round() -> None:
    """Also of rows that end, drafts that get better, budgets that fill, contexts."""
    rounds, stood = all_jobs()
    assert stood > rounds / 8


@pytest.mark.parametrize("fault", ["later", "budget"])
def test_a_choice_does_not_stand_by_what_is_known_now(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above sees doubt and budgets that are taken to stay as they are."""

    def skip(self: AutoLength, rounds: int) -> None:
        if fault != "later":
            self.acceptance.unseen += rounds
            self.costs.rounds += rounds
        if fault != "budget":
            explored = draft_length.EXPLORE * (rounds + 2)
            self._budget = min(draft_length.MOST_SAVED, self._budget + explored)

    monkeypatch.setattr(AutoLength, "_skip", skip)
    with pytest.raises(AssertionError, match="== 0"):
        all_jobs()
