"""What rounds that do not draft show of a draft, and rests between thoughts."""

from __future__ import annotations

import random

import pytest

from specdec.spec_decode.draft_length import (
    AutoLength,
    BatchState,
    ForwardCosts,
    Peek,
    RoundCosts,
    RoundTiming,
    ShadowAcceptance,
)
from specdec.spec_decode.round_times import REST
from tests.spec_decode.draft_length.simulation import Costs

SELDOM, OFTEN, VAIN = REST, REST // 2, REST // 2
K = 4


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_compared_with_every_proposal_that_was_right(
    seed: int, every: int
) -> None:
    """Against the whole texts, looked at position by position."""
    rng = random.Random(seed)
    texts = {row: [rng.randrange(2) for _ in range(30)] for row in (3, 5)}
    made = {
        row: [[rng.randrange(2) for _ in range(rng.choice((0, 1, K)))] for _ in text]
        for row, text in texts.items()
    }
    ends = {3: 30, 5: 12}
    peeks, found = ShadowAcceptance(), [[0, 0] for _ in range(K)]
    for number in range(30):
        rows = [row for row in texts if number < ends[row]]
        compared = peeks.compare(
            Peek(r, texts[r][number], made[r][number] if number % every == 0 else None)
            for r in rows
        )
        for position, (trials, kept) in enumerate(compared):
            found[position][0] += trials
            found[position][1] += kept
    expected = [[0, 0] for _ in range(K)]
    for row, text in texts.items():
        for begin in range(0, ends[row], every):
            proposed = made[row][begin] or [-1]
            for position, token in enumerate(proposed[: ends[row] - begin]):
                right = text[begin + position] == token
                expected[position][0] += 1
                expected[position][1] += right
                if not right:
                    break
    assert found == expected


def test_a_round_between_them_breaks_off_what_was_right() -> None:
    peeks = ShadowAcceptance()
    assert not peeks.awaiting
    assert peeks.compare([Peek(0, 7, [7, 8])]) == [(1, 1)]
    assert peeks.awaiting
    peeks.forget()
    assert not peeks.awaiting
    assert peeks.compare([Peek(0, 8, [8])]) == [(1, 1)]
    assert not peeks.awaiting


def test_it_looks_seldom_where_that_is_in_vain() -> None:
    """And more often again as soon as a token was right, but never in every round."""
    peeks, looked = ShadowAcceptance(), []
    right_from = 4 * SELDOM
    for number in range(9 * SELDOM):
        looked.append(peeks.due())
        if looked[-1]:
            right = right_from <= number < 6 * SELDOM
            peeks.compare([Peek(0, 7, [7] if right else []), Peek(1, 7, [8])])
    counts = [sum(looked[n : n + SELDOM]) for n in range(0, len(looked), SELDOM)]
    # It begins with as many as it takes to see that they are in vain.
    assert counts == [VAIN, 1, 1, 1, OFTEN, OFTEN, VAIN, 1, 1]


def test_peeks_show_acceptance_what_rounds_would() -> None:
    """One token is compared at each position; of nothing proposed, one is wrong."""
    length = AutoLength(RoundCosts(ForwardCosts([Costs(1.0, 0.01, 0.01).measured(1)])))
    for _ in range(20):
        shadow = [(1, 1), (1, 1), (1, 0)]
        length.observe(RoundTiming(1, 0, [], 1.0, shadow=shadow))
    one, two, three = length.acceptance.survival(3)
    assert one > 0.9
    assert two > 0.8
    assert three < 0.15


LONG, SHORT = (150, 60), (9, 4)


def rate(
    *,
    peeking: bool,
    length: AutoLength | None,
    bursts: tuple[int, int] = LONG,
    tokens: int = 4000,
) -> float:
    """Tokens per second of a row that an n-gram foretells in bursts, and else never.

    Args:
        length: chooses; ``None``: 4 in every round.
        bursts: tokens between two of them, and of one.
    """

    def in_a_burst(token: int) -> bool:
        return token % sum(bursts) >= bursts[0]

    # A round with a draft costs an eighth more: what is proposed has to be waited for.
    cost, peeks = Costs(1.0, 0.005, 0.03), ShadowAcceptance()
    at, seconds, idle = 0, 0.0, 0
    while at < tokens:
        k = 4
        if length is not None:
            # It runs alone, and nobody waits for its place.
            left = {0: tokens - at}
            state = BatchState(1, [8], tokens - at, idle, left=left)
            k = length.choose(state)
        right = 0
        while right < 8 and in_a_burst(at + right):
            right += 1
        # What it proposes is the text, up to where it is wrong.
        proposed = [*range(at, at + right), *([-1] * (8 - right))]
        accepted = min(k, right)
        took = cost(1, k) + (0.08 if k else 0)
        seen: list[tuple[int, int]] = []
        if k:
            peeks.forget()
        elif peeking:
            seen = peeks.compare([Peek(0, at, proposed if peeks.due() else None)])
        if length is not None:
            taken = [(k, accepted)] if k else []
            missed, rows = (idle, [0]) if k else (0, [])
            timing = RoundTiming(1, k, taken, took, True, missed, rows, seen)
            length.observe(timing)
        idle = 0 if k else idle + 1
        seconds += took
        at += 1 + accepted
    return tokens / seconds


def auto() -> AutoLength:
    cost = Costs(1.0, 0.005, 0.03)
    return AutoLength(RoundCosts(ForwardCosts([cost.measured(1)]), new_shape=2.0))


def test_drafting_resumes_as_a_burst_begins() -> None:
    """Tries alone come upon few of them: they cost, and are seldom."""
    looking, without = (rate(peeking=p, length=auto()) for p in (True, False))
    assert looking > 1.12
    assert looking > without
    assert looking > 1.03 * rate(peeking=True, length=None)


def test_a_row_alone_is_drafted_for_through_short_bursts() -> None:
    """None is noticed in time, and all of them pay for what lies between."""
    fixed = rate(peeking=True, length=None, bursts=SHORT)
    assert fixed > 1.15
    assert rate(peeking=True, length=auto(), bursts=SHORT) > 0.95 * fixed
