"""Predictions against the closed form, and verdicts with their reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.outputs import GenerationResult
from specdec.spec_decode.draft_length import ForwardCosts, Forwards
from specdec.tools.advice import Sureness, advice_of, advise, survival_of
from tests.spec_decode.draft_length.simulation import Costs

GPU = Costs(0.01, 0.2, 0.0001)


def test_the_closed_form() -> None:
    """(1 - a^(k+1)) / ((1 - a)(k c + v)) for acceptance alike at all positions."""
    a = 0.8
    costs = ForwardCosts([GPU.measured(1)])
    advice = advise([a**j for j in range(1, 5)], costs, [1], 8)
    (prediction,) = advice.predictions
    assert prediction.speedup[0] == 1
    for k in range(9):
        tokens = (1 - a ** (k + 1)) / (1 - a)
        seconds = GPU(1, k) / GPU(1, 0)
        assert prediction.speedup[k] == pytest.approx(tokens / seconds)
    assert prediction.best == 4
    assert advice.measured == 4
    assert advice.worth_it
    assert "--num-draft-tokens 4 at --batch 1: 1.8" in advice.verdict


def test_a_head_that_proposes_a_block_takes_its_forward() -> None:
    """Its tokens cost next to nothing one by one: drafting would look free."""
    forwards = Forwards(1, {1: 0.01, 2: 0.01, 5: 0.01}, 0.0, draft_once=0.005)
    advice = advise([0.5, 0.25], ForwardCosts([forwards]), [1], 2)
    (prediction,) = advice.predictions
    assert prediction.speedup == pytest.approx((1, 1.5 / 1.5, 1.75 / 1.5))
    assert prediction.draft_once == pytest.approx(0.5)
    slow = ForwardCosts([replace(forwards, draft_once=0.02)])
    assert "a draft step costs too much" in advise([1.0], slow, [1], 1).verdict


@pytest.mark.parametrize(
    ("costs", "accept", "reason"),
    [
        (GPU, 0.05, "too little is accepted at batch 1: the first draft token 0.05"),
        (Costs(0.01, 1.2, 0.0001), 1.0, "(a draft step costs too much at batch 1"),
        (Costs(0.01, 0.1, 0.012), 1.0, "verifying a second token costs too much"),
    ],
)
def test_reasons_not_to(costs: Costs, accept: float, reason: str) -> None:
    survival = [accept**j for j in range(1, 5)]
    advice = advise(survival, ForwardCosts([costs.measured(1)]), [1], 8)
    assert not advice.worth_it
    assert advice.verdict.startswith("this pair does not pay here: use --draft none (")
    assert reason in advice.verdict


def test_it_may_pay_at_some_batch_sizes_only() -> None:
    cpu = Costs(0.1, 0.15, 0.036)
    costs = ForwardCosts([cpu.measured(1), cpu.measured(32)])
    advice = advise([0.9, 0.8, 0.7], costs, [1, 32], 8)
    assert "drafting pays at batch 1 (" in advice.verdict


def test_rounds_without_proposals_accepted_nothing() -> None:
    survival = survival_of([50, 40], [25, 10], rounds=102, rows=2)
    assert survival == pytest.approx([0.25, 10 / 90])
    cut_short = survival_of([10, 10, 8], [8, 6, 5], rounds=10, rows=2)
    assert cut_short == pytest.approx([0.8, 0.6, 0.6])
    assert survival_of([], [], rounds=10, rows=1) == []
    assert survival_of([4, 4], [2], rounds=4, rows=1) == [0.5, 0.0]


def result(drafted: int, accepted: int) -> GenerationResult:
    return GenerationResult(
        index=0, prompt="", text="", token_ids=[], finish_reason="length",
        prompt_tokens=1, rounds=drafted, drafted=drafted, accepted=accepted,
        num_draft_tokens_per_pos=[drafted], num_accepted_tokens_per_pos=[accepted],
    )  # fmt: skip


def test_how_sure_a_verdict_is() -> None:
    """A verdict from prompts that say opposite things, given without a doubt."""
    costs = ForwardCosts()
    verify = {k + 1: 1e-3 * (1 + 0.05 * k) for k in range(9)}
    costs.add(Forwards(1, verify, 0.35e-3))
    advice, sure = advice_of([result(50, 45)] * 20, costs, [1], 8)
    assert advice.worth_it
    assert sure.same_verdict == 1
    low, high = sure.speedup_range
    assert low == high == max(advice.predictions[0].speedup)
    assert sure.sure
    assert "(sure)" in sure.words
    mixed = [result(50, 45)] * 4 + [result(50, 5)] * 4
    advice, unsure = advice_of(mixed, costs, [1], 8)
    low, high = unsure.speedup_range
    assert low < advice.predictions[0].speedup[advice.predictions[0].best] < high
    assert 0 < unsure.same_verdict < 0.9
    assert not unsure.sure
    assert "(unsure: give more prompts)" in unsure.words
    advice, against = advice_of([result(50, 5), result(50, 9)] * 6, costs, [1], 8)
    assert not advice.worth_it
    assert against.speedup_range[1] < 1, "that of drafting, not of leaving it out"
    # A verdict on which all sets agree, from too few rounds.
    advice, few = advice_of([result(4, 3)] * 10, costs, [1], 8)
    assert advice.worth_it
    assert few.same_verdict == 1
    assert not few.sure
    assert "too few to say how sure that is: 40 rounds of 50" in few.words
    # Nine of ten sets agree that it hardly pays; some would lose by it.
    around = replace(unsure, speedup_range=(0.96, 1.1), same_verdict=0.95)
    assert not around.sure
    assert "(unsure: give more prompts)" in around.words
    assert replace(around, speedup_range=(1.01, 1.1)).sure


def test_nothing_is_sure_on_a_disturbed_machine() -> None:
    """A verdict is called sure while other load decides it."""
    rows = [result(50, 45)] * 20
    verify = {1: 1e-3, 2: 1.05e-3, 5: 1.2e-3}
    quiet = Forwards(1, verify, 0.35e-3)

    def sureness(forwards: Forwards, *, busy: bool = False) -> Sureness:
        return advice_of(rows, ForwardCosts([forwards]), [1], 8, busy=busy)[1]

    assert sureness(quiet).sure
    assert "(unsure: the machine is busy)" in sureness(quiet, busy=True).words
    assert not sureness(replace(quiet, busy=True)).sure
    noisy = sureness(replace(quiet, fall=1.1))
    assert not noisy.sure
    assert "took less time than one of fewer)" in noisy.words
    # A difference that a repetition has, too.
    assert sureness(replace(quiet, fall=1.001)).sure
