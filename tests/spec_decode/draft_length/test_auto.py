"""Simulated rounds: auto against the best fixed k and against plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from specdec.spec_decode.draft_length import (
    AutoLength,
    BatchState,
    FixedLength,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundOutcome,
    rest,
)
from specdec.spec_decode.draft_length.auto import BURST, TIMED
from specdec.spec_decode.draft_length.credit import EXPLORE, Credit
from specdec.spec_decode.draft_length.rest import HOLD, REST
from tests.spec_decode.draft_length.simulation import Costs, Simulation, ask


def gpu(draft: float) -> Costs:
    """Verifying is nearly free; a draft step costs ``draft`` plain steps."""
    return Costs(1.0, draft, 0.005)


def cpu(draft: float) -> Costs:
    """Every token verified costs a third of a plain step."""
    return Costs(1.0, draft, 0.36)


def _always(accept: float) -> Callable[[int, int], float]:
    return lambda number, row: accept


MIXED = (0.95, 0.0, 0.5, 0.7)

SCENARIOS = {
    "perfect draft": Simulation(gpu(0.2), lambda n, row: 1.0),
    "perfect, as dear as the target": Simulation(gpu(1.0), lambda n, row: 1.0),
    "always wrong": Simulation(gpu(0.2), lambda n, row: 0.0),
    "always wrong, as dear": Simulation(gpu(1.0), lambda n, row: 0.0),
    "always wrong, read one behind": Simulation(gpu(0.2), lambda n, row: 0.0, lag=1),
    "always wrong, cheap": Simulation(gpu(0.01), lambda n, row: 0.0),
    "always wrong, many rows": Simulation(cpu(0.2), lambda n, row: 0.0, num_rows=8),
    "n-gram like": Simulation(gpu(0.005), lambda n, row: 0.4),
    "n-gram like, 8 rows": Simulation(gpu(0.005), lambda n, row: 0.4, num_rows=8),
    "good": Simulation(gpu(0.2), lambda n, row: 0.8),
    "good, read one behind": Simulation(gpu(0.2), lambda n, row: 0.8, lag=1),
    "good, 32 rows": Simulation(gpu(0.2), lambda n, row: 0.8, num_rows=32),
    "expensive, pays a little": Simulation(gpu(0.5), lambda n, row: 0.7),
    "on a CPU, alone": Simulation(cpu(0.15), lambda n, row: 0.9),
    "on a CPU, 8 rows": Simulation(cpu(0.15), lambda n, row: 0.9, num_rows=8),
    "mixed rows": Simulation(gpu(0.2), lambda n, row: MIXED[row], num_rows=4),
    "every shape costs": Simulation(gpu(0.2), lambda n, row: 0.8, lag=1, new_shape=8.0),
    "other load comes and goes": Simulation(
        gpu(0.2),
        lambda n, row: 0.8,
        noise=0.1,
        pace=lambda n: 2.0 if n // 100 % 2 else 1.0,
    ),
}
# What was measured beforehand, as a factor of the truth: draft step, verify.
MEASURED = {"right": (1.0, 1.0), "too low": (0.5, 0.5), "too high": (2.0, 2.0)}


@pytest.fixture(params=[False, True], ids=["long rounds", "short rounds"])
def short(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rounds are short ones, which are not all thought about."""
    if request.param:
        monkeypatch.setattr(rest, "SHORT", 1e9)
    return bool(request.param)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("measured", MEASURED)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_never_slower(scenario: str, measured: str) -> None:
    """At least 0.97 of plain decoding and 0.95 of the best fixed k, on average."""
    simulation = SCENARIOS[scenario]
    draft, verify = MEASURED[measured]
    rates = [
        simulation.auto(draft=draft, verify=verify, seed=seed)[0].rate
        for seed in range(2)
    ]
    mean = sum(rates) / len(rates)
    best, k = simulation.best()
    assert mean >= 0.97 * simulation.fixed(0), simulation.fixed(0)
    assert mean >= 0.95 * best, f"best fixed k is {k}"


@pytest.mark.parametrize("scenario", ["always wrong", "always wrong, as dear"])
def test_a_short_run_loses_little(scenario: str) -> None:
    """Nothing is known of the draft: what finding out costs, in 100 rounds."""
    simulation = replace(SCENARIOS[scenario], rounds=100)
    rates = [simulation.auto(seed=seed)[0].rate for seed in range(10)]
    assert sum(rates) / len(rates) >= 0.95 * simulation.fixed(0)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("before", "after"), [(0.9, 0.0), (0.0, 0.9), (0.9, 0.3), (0.3, 0.9)]
)
@pytest.mark.parametrize("num_rows", [1, 8])
def test_acceptance_that_changes_midway(
    before: float, after: float, num_rows: int
) -> None:
    """Each half for itself is near its own best: drafting stops, and resumes."""
    simulation = Simulation(
        gpu(0.2),
        lambda n, row: before if n < 1500 else after,
        num_rows=num_rows,
        rounds=3000,
    )
    result, _ = simulation.auto()
    for accept, chosen in (
        (before, result.chosen[:1500]),
        (after, result.chosen[1500:]),
    ):
        half = Simulation(gpu(0.2), _always(accept), num_rows=num_rows)
        tokens = sum(sum(accept**j for j in range(k + 1)) for k in chosen)
        seconds = sum(gpu(0.2)(num_rows, k) for k in chosen)
        rate = num_rows * tokens / seconds
        assert rate >= 0.94 * half.best()[0]
        assert rate >= 0.97 * half.fixed(0)


def test_drafting_stops_where_it_cannot_pay() -> None:
    """When even a perfect draft would be slower, it is never tried."""
    simulation = Simulation(gpu(3.0), lambda n, row: 1.0, rounds=200)
    result, _ = simulation.auto()
    assert set(result.chosen) == {0}


def test_what_was_learnt_outlives_a_batch() -> None:
    """A second run of the same length begins with what the first found."""
    simulation = replace(SCENARIOS["always wrong"], rounds=300)
    _, length = simulation.auto()
    chosen = simulation.run(length, seed=1).chosen
    assert sum(k > 0 for k in chosen[:20]) <= 3


def length_of(cost: Costs, num_rows: int = 1) -> AutoLength:
    forwards = ForwardCosts([cost.measured(num_rows)])
    return AutoLength(RoundCosts(forwards))


def observe(length: AutoLength, cost: Costs, k: int, accepted: int, n: int) -> None:
    for _ in range(n):
        length.observe(RoundOutcome(1, k, [(k, accepted)] if k else [], cost(1, k)))


def test_there_is_no_draft_behind_the_last_token() -> None:
    cost = gpu(0.05)
    length = length_of(cost)
    for k in (0, 1, 2, 4, 8):
        observe(length, cost, k, k, 8)
    assert length.choose(BatchState(1, [100], 100)) == 8
    assert length.choose(BatchState(1, [5], 6)) == 5
    assert length.choose(BatchState(1, [0], 1)) == 0
    assert length.choose(BatchState(2, [0, 3], 4)) <= 3


def test_rows_without_room_count_for_nothing() -> None:
    """A row that may not be drafted for gains nothing from a longer round."""
    cost = Costs(1.0, 0.2, 0.1)
    length = length_of(cost, 4)
    for k in (0, 1, 2, 4):
        rows = [(k, k)] * 4 if k else []
        for _ in range(8):
            length.observe(RoundOutcome(4, k, rows, cost(4, k)))
    assert length.choose(BatchState(4, [8] * 4, 100)) >= 4
    assert length.choose(BatchState(4, [8, 0, 0, 0], 100)) < 4


def test_catching_up_is_weighed_against_what_is_left() -> None:
    """Drafting resumes where the gain repays it, not for the last few tokens."""
    cost = cpu(0.3)
    length = length_of(cost)
    for k in (0, 1, 2, 0):
        observe(length, cost, k, k, 8)
    assert length.choose(BatchState(1, [8], 200, undrafted=0)) > 0
    assert length.choose(BatchState(1, [8], 2000, undrafted=300)) > 0
    assert length.choose(BatchState(1, [8], 30, undrafted=300)) == 0


def test_asking_changes_nothing() -> None:
    cost = gpu(0.2)
    length = length_of(cost)
    observe(length, cost, 0, 0, 2)
    state = BatchState(1, [8], 100)
    assert len({length.choose(state) for _ in range(50)}) == 1


def test_a_try_takes_some_rounds_and_is_awaited_before_the_next() -> None:
    cost = gpu(0.5)
    length = length_of(cost)
    observe(length, cost, 0, 0, 2)
    observe(length, cost, 1, 0, 1)
    state = BatchState(1, [8], 100)
    tried = length.choose(state)
    assert tried > 0
    # Another round of it was read already.
    for rounds in range(BURST - 1):
        assert length.choose(replace(state, in_flight=[tried] * rounds)) == tried
    assert length.choose(replace(state, in_flight=[tried] * (BURST - 1))) == 0


def test_a_try_goes_on_until_rounds_of_it_were_timed() -> None:
    """Those that got new shapes ready tell nothing of the cost."""
    cost = gpu(0.5)

    def rounds_of_a_try(untimed: int) -> int:
        length = length_of(cost)
        observe(length, cost, 0, 0, 2)
        state = BatchState(1, [8], 100)
        tried = length.choose(state)
        assert tried > 0
        for number in range(20):
            if length.choose(state) != tried:
                return number
            seconds = cost(1, tried) if number >= untimed else None
            length.observe(RoundOutcome(1, tried, [(tried, 0)], seconds))
        return 20

    assert [rounds_of_a_try(n) for n in (0, 1, 3)] == [TIMED, TIMED + 1, TIMED + 3]
    assert rounds_of_a_try(20) == BURST


def test_plain_rounds_are_taken_in_several_at_a_time_where_nothing_can_be_tried() -> (
    None
):
    """What was read meanwhile is not lost; rows that leave are looked at at once."""
    cost = gpu(0.5)
    length = length_of(cost)
    state = BatchState(1, [8], 1000)
    for _ in range(200):
        if length.held(1) is not None:
            break
        observe(length, cost, length.choose(state), 0, 1)
    assert length._credit.left < -3 * REST * EXPLORE
    thoughts = 0
    think = length._think

    def counted(state: BatchState) -> int:
        nonlocal thoughts
        thoughts += 1
        return think(state)

    length._think = counted  # type: ignore[method-assign]
    before, rounds = length._credit.left, length.costs.rounds
    for _ in range(3 * REST):
        assert ask(length, state) == 0
        observe(length, cost, 0, 0, 1)
    assert 2 <= thoughts <= 3
    taken_in = 3 * REST - len(length._rest.take())
    assert taken_in >= 2 * REST
    assert length.costs.rounds == rounds + taken_in
    assert length._credit.left == pytest.approx(before + EXPLORE * taken_in)
    thoughts = 0
    length.choose(replace(state, num_rows=2, room=[8, 8]))
    assert thoughts == 1


def thoughts_of(length: AutoLength) -> list[int]:
    """What it comes to from now on, one number for each thought."""
    found: list[int] = []
    think = length._think

    def noted(state: BatchState) -> int:
        found.append(think(state))
        return found[-1]

    length._think = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("step", "least", "most"), [(0.003, 300, 700), (0.1, 1500, 1500)]
)
def test_short_rounds_that_draft_are_thought_about_now_and_then(
    step: float, least: int, most: int
) -> None:
    """A thought takes as long, however short the round is; nothing is lost by it."""
    cost = Costs(step, 0.05, 0.01 * step)
    simulation = Simulation(cost, lambda number, row: 0.9, lag=1, new_shape=step)
    forwards = ForwardCosts([cost.measured(1)])
    length = AutoLength(RoundCosts(forwards, new_shape=step))
    thoughts = thoughts_of(length)
    result = simulation.run(length)
    assert least <= len(thoughts) <= most
    assert result.rate > 0.95 * simulation.best()[0]
    # What was read meanwhile is learnt from, each round of it.
    assert length.acceptance.survival(1)[0] == pytest.approx(0.9, abs=0.15)
    assert length.costs.rounds > 1480


def test_a_draft_that_fails_all_at_once_is_dropped_within_few_rounds() -> None:
    """Though short rounds are not thought about one by one."""
    cost = Costs(0.003, 0.2, 0.0001)
    simulation = Simulation(
        cost, lambda number, row: 0.9 if number < 500 else 0.0, rounds=600, lag=1
    )
    chosen = simulation.auto()[0].chosen
    assert min(chosen[450:500]) > 0
    assert chosen[500:].index(0) <= 3 * HOLD


def test_a_batch_with_a_deadline_is_thought_about_in_every_round_that_drafts() -> None:
    cost = Costs(0.003, 0.05, 0.0001)
    for left, holds in (({}, True), ({0: 900}, True), ({0: 900, 1: 900}, False)):
        rows = max(1, len(left))
        length = AutoLength(RoundCosts(ForwardCosts([cost.measured(rows)])))
        state = BatchState(rows, [8] * rows, 900, left=left)
        held = set()
        for _ in range(40):
            k = ask(length, state)
            length.observe(RoundOutcome(rows, k, [(k, k)] * rows, cost(rows, k)))
            held.add(length.held(rows))
        assert any(held) is holds


def test_rounds_at_what_is_thought_best_use_up_no_credit() -> None:
    """Though a longer k seems better, whose new shape short requests do not repay."""
    cost = gpu(0.2)
    costs = RoundCosts(ForwardCosts([cost.measured(10)]), new_shape=30.0)
    length = AutoLength(costs)
    state = BatchState(10, [8] * 10, 30)
    chosen: list[int] = []
    for number in range(1600):
        k = length.choose(state) if number > 10 else int(number > 2)
        rows = [(k, k * (row < 8)) for row in range(10)] if k else []
        length.observe(RoundOutcome(10, k, rows, cost(10, k)))
        chosen.append(k)
    assert set(chosen[20:400]) == {1}
    assert max(chosen) > 1


@pytest.mark.parametrize("held_up", ["the round before", "its own"])
def test_what_a_try_really_took_is_charged(held_up: str) -> None:
    """To the round that was read while it was built, or to its own."""
    cost = gpu(0.7)

    def tries(longer: float) -> int:
        length, before, begun = length_of(cost), 0, 0
        for _ in range(1000):
            k = length.choose(BatchState(1, [8], 1000))
            rows = [(k, 0)] if k else []
            if before or not k:
                length.observe(RoundOutcome(1, k, rows, cost(1, k)))
            elif held_up == "its own":
                spent = cost(1, k) + longer
                length.observe(RoundOutcome(1, k, rows, spent=spent))
            else:
                spent = cost(1, 0) + longer
                length.observe(RoundOutcome(1, 0, [], spent=spent))
                length.observe(RoundOutcome(1, k, rows, cost(1, k)))
            begun += before == 0 < k
            before = k
        return begun

    assert tries(0.0) > 3
    assert tries(15.0) == 1


@pytest.mark.parametrize("read_first", [True, False])
def test_what_was_foreseen_is_charged_once(read_first: bool) -> None:
    credit = Credit()
    before = credit.left
    for taken in [read_first, not read_first]:
        if taken:
            credit.spend(3.0)
        else:
            credit.foresee(3.0)
    assert credit.left == pytest.approx(before - 3.0)
    credit.settle()
    credit.spend(2.0)
    assert credit.left == pytest.approx(before - 5.0)
    for _ in range(10):
        credit.spend(100.0)
    assert credit.left == pytest.approx(-30.0)


@pytest.mark.parametrize(
    ("most", "expected"), [(1, 1), (3, 3), (5, 5), (6, 6), (8, 8), (20, 8)]
)
def test_the_largest_that_was_asked_for_is_one_of_them(
    most: int, expected: int
) -> None:
    for new_shape in (0.0, 0.04):
        costs = RoundCosts(ForwardCosts(), new_shape=new_shape)
        length = AutoLength(costs, max_draft_tokens=most)
        ladder = length._ladder.up_to([100], 100)
        assert ladder[-1] == expected
        assert ladder == sorted(set(ladder))


def test_what_the_best_took_is_not_charged() -> None:
    """It is no try: what getting it ready takes, later rounds bring back."""
    cost = gpu(0.2)
    left = []
    for spent in (None, 50.0):
        length = length_of(cost)
        for k in (0, 1, 2, 4):
            observe(length, cost, k, k, 8)
        best = length.choose(BatchState(1, [8], 1000))
        assert best > 0
        length.observe(RoundOutcome(1, best, [(best, best)], spent=spent))
        length.observe(RoundOutcome(1, 0, [], spent=spent))
        left.append(length._credit.left)
    assert left[0] == left[1]


def test_what_is_thought_better_is_tried_first() -> None:
    """Though its new shape is not repaid by one request, and others are cheaper."""
    measured = Forwards(32, {1: 3.5, 2: 3.6, 5: 3.8, 9: 3.9}, 0.6)

    def chosen(seed: int) -> list[int]:
        rng = random.Random(seed)
        costs = RoundCosts(ForwardCosts([measured]), new_shape=40.0)
        length, ks = AutoLength(costs), []
        for _ in range(500):
            k = length.choose(BatchState(32, [8] * 32, 100))
            kept = [
                next((n for n in range(k) if rng.random() > 0.75), k) for _ in range(32)
            ]
            rows = [(k, n) for n in kept] if k else []
            seconds = (3.5 + 0.6 * k) * rng.gauss(1, 0.03)
            length.observe(RoundOutcome(32, k, rows, seconds))
            ks.append(k)
        return ks

    counts = [chosen(seed)[100:].count(4) for seed in range(6)]
    assert min(counts) > 200


def test_rounds_that_could_not_draft_are_no_tries() -> None:
    """They are not charged for, nor followed by others of their kind."""
    cost = gpu(0.2)
    length = length_of(cost)
    for k in (0, 1, 2, 4):
        observe(length, cost, k, k, 8)
    state = BatchState(1, [8], 1000)
    assert length.choose(state) > 0

    def last_tokens(n: int) -> None:
        for _ in range(n):
            length.observe(RoundOutcome(1, 0, [], cost(1, 0), forced=True))

    last_tokens(1)
    assert length.choose(state) > 0
    last_tokens(300)
    while (k := length.choose(state)) > 0:  # it has become wrong
        observe(length, cost, k, 0, 1)
    chosen = []
    for _ in range(400):
        chosen.append(length.choose(state))
        observe(length, cost, chosen[-1], 0, 1)
    assert any(chosen)


def test_costs_are_measured_once_per_batch_size() -> None:
    measured: list[int] = []
    saved: list[int] = []
    cost = gpu(0.2)

    def measure(num_rows: int):  # type: ignore[no-untyped-def]
        measured.append(num_rows)
        return cost.measured(num_rows)

    length = AutoLength(
        RoundCosts(ForwardCosts()),
        measure=measure,
        save=lambda costs: saved.append(costs.rounds),
    )
    for num_rows in (8, 8, 7, 6, 1, 8):
        length.prepare(num_rows)
    assert measured == [8, 1]
    assert saved == [0, 0]
    observe(length, cost, 0, 0, 300)
    assert saved == [0, 0, 64, 128, 256]


def test_costs_of_one_row_may_stand_for_all() -> None:
    measured: list[int] = []

    def measure(num_rows: int):  # type: ignore[no-untyped-def]
        measured.append(num_rows)
        return cpu(0.2).measured(num_rows)

    length = AutoLength(RoundCosts(ForwardCosts()), measure=measure, measured_rows=1)
    for num_rows in (8, 1, 32):
        length.prepare(num_rows)
    assert measured == [1]
    found, _ = length.costs.relative(8, 2)
    assert found == pytest.approx(cpu(0.2)(8, 2) / cpu(0.2)(8, 0), rel=0.05)


@pytest.mark.parametrize(
    ("draft", "remaining", "prompt", "expected"),
    [
        (0.5, 128, 100, False),  # a verified token costs nearly a step
        (0.5, 128, 0, True),
        (0.5, 5000, 100, True),
        (0.02, 128, 100, True),
        (0.0, 128, 100_000, True),
        (5.0, 100_000, 0, False),  # not if it were always right
    ],
)
def test_prompts_are_a_drafters_where_it_may_pay_for_them(
    draft: float, remaining: float, prompt: int, expected: bool
) -> None:
    length = length_of(cpu(draft), 8)
    assert length.may_pay(BatchState(8, [8] * 8, remaining, prompt)) is expected


def test_a_draft_that_was_wrong_may_pay_when_that_is_long_ago() -> None:
    cost = cpu(0.05)
    length = length_of(cost)
    state = BatchState(1, [8], 128, 60)
    assert length.may_pay(state)
    for k in (0, 1, 0, 1, 0, 1, 0):
        observe(length, cost, k, 0, 8)
    assert not length.may_pay(state)
    # A hope is a try: what the others lost has to be earned first.
    observe(length, cost, 0, 0, 400)
    assert not length.may_pay(state)
    observe(length, cost, 0, 0, 400)
    assert length.may_pay(state)


def test_prompts_that_take_little_are_a_drafters_always() -> None:
    """As long as it could pay: rows that go on for long may come to draft well."""
    cost = cpu(0.05)
    length = length_of(cost)
    for k in (0, 1, 0, 1, 0, 1, 0):
        observe(length, cost, k, 0, 8)
    length._credit.left = -5.0
    for _ in range(3):
        assert length.may_pay(BatchState(1, [8], 5000, 60))
        assert not length.may_pay(BatchState(1, [8], 128, 60))
    assert length._credit.left == -5.0


def test_a_fixed_length_is_fixed() -> None:
    length = FixedLength(3)
    length.prepare(8)
    assert length.may_pay(BatchState(8, [3] * 8, 1, 1000))
    length.observe(RoundOutcome(1, 3, [(3, 0)], 1.0))
    assert length.choose(BatchState(1, [0], 1)) == length.max_draft_tokens == 3


def test_prompts_are_seldom_taken_in_where_that_comes_to_nothing() -> None:
    """A deadline, say, may forbid what the mean of all rows promises."""
    cost = gpu(0.2)
    length, began = length_of(cost), 0
    for _ in range(60):
        # What prompts take is that of nine plain rounds: a tenth of what the rows take.
        if length.may_pay(BatchState(1, [8], 90, 9 * 1000)):
            began += 1
        observe(length, cost, 0, 0, 90)
    assert length.costs.extra(1, 4, 9 * 1000) == pytest.approx(9, rel=0.2)
    # The time of 54 rounds is lost by a hundredth, and the first hope.
    assert 2 <= began <= 8


def test_prompts_are_taken_in_again_when_that_has_paid() -> None:
    cost = gpu(0.2)
    length = length_of(cost)
    for _ in range(20):
        assert length.may_pay(BatchState(1, [8], 90, 200))
        for _ in range(30):
            k = length.choose(BatchState(1, [8], 90))
            observe(length, cost, k, k, 1)


@pytest.mark.parametrize(("rows", "drafts"), [(1, True), (2, False)])
def test_a_row_that_runs_alone_has_no_deadline(rows: int, drafts: bool) -> None:
    """It holds nobody up, and the best rate ends it soonest."""
    cost = gpu(0.005)
    length = length_of(cost, rows)
    for _ in range(12):
        length.acceptance.observe([(8, 8)] * rows)
    state = BatchState(rows, [8] * rows, 90.0, left=dict.fromkeys(range(rows), 90))
    length.observe(RoundOutcome(rows, 0, [], cost(rows, 0)))
    assert length.choose(state) == 8
    length._deadline.spend(1000.0)
    for _ in range(BURST):  # what was begun is waited for
        length.observe(RoundOutcome(rows, 8, [(8, 8)] * rows, cost(rows, 8)))
    assert (length.choose(state) > 0) is drafts
