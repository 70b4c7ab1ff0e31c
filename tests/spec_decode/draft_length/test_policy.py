"""Simulated rounds: auto against the best fixed k and against plain decoding."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.spec_decode.draft_length import (
    LONGEST,
    TIMED,
    Acceptance,
    AutoLength,
    BatchState,
    CostStore,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)
from tests.spec_decode.draft_length.simulation import Costs, Simulation


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
    "always wrong, read a round late": Simulation(gpu(0.2), lambda n, row: 0.0, lag=1),
    "always wrong, cheap": Simulation(gpu(0.01), lambda n, row: 0.0),
    "always wrong, many rows": Simulation(cpu(0.2), lambda n, row: 0.0, num_rows=8),
    "n-gram like": Simulation(gpu(0.005), lambda n, row: 0.4),
    "n-gram like, 8 rows": Simulation(gpu(0.005), lambda n, row: 0.4, num_rows=8),
    "good": Simulation(gpu(0.2), lambda n, row: 0.8),
    "good, read a round late": Simulation(gpu(0.2), lambda n, row: 0.8, lag=1),
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


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_never_slower(scenario: str) -> None:
    """At least 0.97 of plain decoding and 0.95 of the best fixed k, on average."""
    simulation = SCENARIOS[scenario]
    plain, (best, k) = simulation.fixed(0), simulation.best()
    for measured, (draft, verify) in MEASURED.items():
        rates = [
            simulation.auto(draft=draft, verify=verify, seed=seed)[0].rate
            for seed in range(2 if measured == "right" else 1)
        ]
        mean = sum(rates) / len(rates)
        assert mean >= 0.97 * plain, (measured, plain)
        assert mean >= 0.95 * best, (measured, f"best fixed k is {k}")


def test_why_it_chose_what_it_chose() -> None:
    """Runs that decide differently, and give no number to compare."""
    good = SCENARIOS["good, 32 rows"]
    result, policy = good.auto()
    assert policy.reason is not None
    said = re.fullmatch(
        r"(\d) draft tokens in (\d+)% of the rounds; with 32 rows a round of (\d) "
        r"draft tokens brings about (\S+) tokens a row and takes (\S+) times one "
        r"without",
        policy.reason,
    )
    assert said is not None, policy.reason
    k = int(said[1])
    assert int(said[3]) == k
    assert float(said[2]) == pytest.approx(
        100 * result.chosen.count(k) / len(result.chosen), abs=0.51
    )
    true_cost = good.cost(32, k) / good.cost(32, 0)
    true_tokens = 1 + sum(policy.acceptance.survival(k))
    assert float(said[4]) == pytest.approx(true_tokens, abs=0.006)
    assert float(said[5]) == pytest.approx(true_cost, rel=0.15)
    _, against = SCENARIOS["always wrong, as dear"].auto()
    assert re.fullmatch(
        r"no draft in \d+% of the rounds; with 1 row a round of \d draft tokens? "
        r"brings about 1\.\d\d tokens a row and takes \d\.\d\d times one without",
        str(against.reason),
    ), against.reason
    fresh = AutoLength(RoundCosts(ForwardCosts([cpu(3.0).measured(1)])))
    assert fresh.reason is None
    # With whatever number of rows.
    for rows in (1, 1, 2, 2, 2):
        state = BatchState(rows, [8] * rows, 100, left=dict.fromkeys(range(rows), 100))
        assert fresh.choose(state) == 0
        fresh.observe(RoundTiming(rows, 0, [], 1.0))
    assert str(fresh.reason).startswith(
        "no draft in 100% of the rounds; with 2 rows a round of 1 draft token brings "
    )


@pytest.mark.parametrize(
    ("draft_step", "draft_once", "per_token", "first"),
    [
        (0.01, 0.4, 0.01, 6),  # a block head on a GPU
        (0.2, 0.0, 0.01, 1),  # a draft of layers on a GPU
        (0.01, 0.4, 0.3, 2),  # a block head on a CPU, if it pays at all
    ],
)
def test_a_block_is_drafted_whole_from_the_beginning(
    draft_step: float, draft_once: float, per_token: float, first: int
) -> None:
    """Shorter ones would cost as much, and be a shape each."""
    verify = {s: 1 + per_token * (s - 1) for s in (1, 2, 5)}
    forwards = Forwards(1, verify, draft_step, draft_once)
    policy = AutoLength(RoundCosts(ForwardCosts([forwards])), max_draft_tokens=6)
    state = BatchState(1, [6], 1000, left={0: 1000})
    chosen = []
    for _ in range(3):
        chosen.append(policy.choose(state))
        k, seconds = chosen[-1], forwards.verify[1]
        if k:
            seconds = policy.costs.forwards.round(1, k)
        policy.observe(RoundTiming(1, k, [(k, k)] if k else [], seconds, True))
    drafted = [k for k in chosen if k]
    assert chosen[0] == 0
    assert not drafted or drafted[0] == first


@pytest.mark.parametrize("scenario", ["always wrong", "always wrong, as dear"])
def test_a_short_run_loses_little(scenario: str) -> None:
    """Nothing is known of the draft: what finding out costs, in 100 rounds."""
    simulation = replace(SCENARIOS[scenario], rounds=100)
    rates = [simulation.auto(seed=seed)[0].rate for seed in range(10)]
    assert sum(rates) / len(rates) >= 0.95 * simulation.fixed(0)


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


@pytest.mark.parametrize("slower", [2.5, 4.0])
def test_rounds_that_draft_become_slower_midway(slower: float) -> None:
    """Plain ones do not, as on a busy host: drafting stops, and resumes later."""
    quiet = Simulation(gpu(0.1), _always(0.7), noise=0.1, lag=1)
    busy = replace(quiet, rounds=500, slowed=lambda n: slower)
    rates, resumed = [], []
    for seed in range(4):
        _, length = quiet.auto(seed=seed)
        rates.append(busy.run(length, seed + 10).rate)
        resumed.append(quiet.run(length, seed + 20).chosen[-100:])
    assert sum(rates) / len(rates) >= 0.9 * quiet.fixed(0)
    assert sum(k > 0 for ks in resumed for k in ks) >= 300


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


def prepare(length: AutoLength, num_rows: int) -> None:
    if rows := length.unmeasured(num_rows):
        length.measure(rows)


def observe(length: AutoLength, cost: Costs, k: int, accepted: int, n: int) -> None:
    for _ in range(n):
        length.observe(RoundTiming(1, k, [(k, accepted)] if k else [], cost(1, k)))


def test_there_is_no_draft_after_the_last_token() -> None:
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
            length.observe(RoundTiming(4, k, rows, cost(4, k)))
    assert length.choose(BatchState(4, [8] * 4, 100)) >= 4
    assert length.choose(BatchState(4, [8, 0, 0, 0], 100)) < 4


def test_catching_up_is_weighed_against_what_is_left() -> None:
    """Drafting resumes where the gain repays it, not for the last few tokens."""
    cost = cpu(0.3)
    length = length_of(cost)
    for k in (0, 1, 2, 0):
        observe(length, cost, k, k, 8)
    assert length.choose(BatchState(1, [8], 200, backlog=0)) > 0
    assert length.choose(BatchState(1, [8], 2000, backlog=300)) > 0
    assert length.choose(BatchState(1, [8], 30, backlog=300)) == 0


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
    for rounds in range(LONGEST - 1):
        assert length.choose(replace(state, in_flight=[tried] * rounds)) == tried
    assert length.choose(replace(state, in_flight=[tried] * (LONGEST - 1))) == 0


def test_a_try_goes_on_until_rounds_of_it_were_timed() -> None:
    """Those that got new shapes ready say nothing of the cost."""
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
            length.observe(RoundTiming(1, tried, [(tried, 0)], seconds))
        return 20

    assert [rounds_of_a_try(n) for n in (0, 1, 3)] == [TIMED, TIMED + 1, TIMED + 3]
    assert rounds_of_a_try(20) == LONGEST


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
        length.observe(RoundTiming(10, k, rows, cost(10, k)))
        chosen.append(k)
    assert set(chosen[20:400]) == {1}
    assert max(chosen) > 1


def test_a_round_read_late_is_no_try_of_what_was_best_before() -> None:
    """Catches a plain round that is charged for the new shape built beside it."""
    cost = gpu(0.02)
    length = AutoLength(RoundCosts(ForwardCosts([cost.measured(1)]), new_shape=3.0))
    state = BatchState(1, [8], 1000)
    observe(length, cost, 0, 0, 2)
    before = length._budget
    drafted = length.choose(replace(state, in_flight=[0]))
    assert drafted > 0
    # The plain round is read while the new shape is made.
    length.observe(RoundTiming(1, 0, [], 4.0, fair=False))
    assert length._budget > before - 0.5
    # One that no choice thought best is charged what it took.
    length.observe(RoundTiming(1, 8, [(8, 0)], 9.0, fair=False))
    assert length._budget < before - 5


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
            length.observe(RoundTiming(32, k, rows, seconds))
            ks.append(k)
        return ks

    counts = [chosen(seed)[100:].count(4) for seed in range(6)]
    assert min(counts) > 200


def test_costs_are_measured_once_per_batch_size() -> None:
    """No round waits until what was learnt is on the disk."""
    measured: list[int] = []
    saved: list[tuple[int, bool]] = []
    cost = gpu(0.2)

    def measure(num_rows: int, **how: int):  # type: ignore[no-untyped-def]
        measured.append(num_rows)
        return cost.measured(num_rows)

    length = AutoLength(
        RoundCosts(ForwardCosts()),
        forwards=measure,
        save=lambda costs, acceptance, waits: saved.append((costs.rounds, waits)),
    )
    for num_rows in (8, 8, 7, 6, 1, 8):
        prepare(length, num_rows)
    assert measured == [8, 1]
    assert saved == [(0, True)] * 2
    observe(length, cost, 0, 0, 300)
    assert saved[2:] == [(64, False), (128, False), (256, False)]


def test_costs_of_one_row_may_stand_for_all() -> None:
    measured: list[int] = []

    def measure(num_rows: int, **how: int):  # type: ignore[no-untyped-def]
        measured.append(num_rows)
        return cpu(0.2).measured(num_rows)

    length = AutoLength(RoundCosts(ForwardCosts()), forwards=measure, measured_rows=1)
    for num_rows in (8, 1, 32):
        prepare(length, num_rows)
    assert measured == [1]
    found = length.costs.relative(8, 2)
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
        length.choose(state)
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
    length._budget = -5.0
    for _ in range(3):
        assert length.may_pay(BatchState(1, [8], 5000, 60))
        assert not length.may_pay(BatchState(1, [8], 128, 60))
    assert length._budget == -5.0


def test_prompts_are_taken_in_again_when_that_has_paid() -> None:
    cost = gpu(0.2)
    length = length_of(cost)
    for _ in range(20):
        assert length.may_pay(BatchState(1, [8], 90, 200))
        for _ in range(30):
            k = length.choose(BatchState(1, [8], 90))
            observe(length, cost, k, k, 1)


def test_rows_that_come_one_by_one_are_drafted_for() -> None:
    """Catches rows that are refused, or that use up what tries may cost, one by one.

    On a GPU one row's round of k = 1 to 4 costs 1.6 to 2.4 plain rounds, and each new
    shape three; a draft that is right three times in four gains a fifth.
    """
    forwards = Forwards(1, {1: 2.72e-3, 2: 3.84e-3, 5: 4.01e-3}, 0.6e-3)
    policy = AutoLength(RoundCosts(ForwardCosts([forwards]), new_shape=0.04))
    rng = random.Random(0)
    rounds = tokens = 0.0
    for _ in range(12):
        left = 130
        drafts = policy.may_pay(BatchState(1, [left - 1], left, backlog=96))
        while left > 0:
            k = policy.choose(BatchState(1, [left - 1 if drafts else 0], left))
            accepted = next((i for i in range(k) if rng.random() > 0.76), k)
            cost = policy.costs.forwards.round(1, k)
            pairs = [(k, accepted)] if k else []
            policy.observe(RoundTiming(1, k, pairs, cost * rng.uniform(0.95, 1.1)))
            left -= accepted + 1
            rounds += cost / policy.costs.forwards.round(1, 0)
            tokens += accepted + 1
    assert tokens > 1.1 * rounds


def test_sessions_in_threads_may_share_it() -> None:
    """Catches a table that changes its size while another thread reads it."""
    forwards = Forwards(8, {1: 0.01, 2: 0.011, 5: 0.013}, 0.002)
    length = AutoLength(RoundCosts(ForwardCosts([forwards])))
    errors: list[Exception] = []
    rounds = 400

    def decode(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for i in range(rounds):
                rows = rng.randrange(1, 400)
                k = length.choose(BatchState(rows, [8, 8], 50, left={1: 50, 2: 50}))
                k = rng.choice((0, 1, 2, 4, 8, k))
                accepted = [(k, 0)] * 2 if k else []
                timing = RoundTiming(rows, k, accepted, 0.01, rows=[i, i + 1])
                length.observe(timing)
                length.may_pay(BatchState(rows, [8, 8], 50, 60))
                assert length.reason is not None
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=decode, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert length.costs.rounds == 3 * rounds


def test_forwards_measured_on_a_busy_machine_are_measured_again(
    tmp_path: Path,
) -> None:
    """By the next process, however they were found out: by sweeps or by rounds."""
    quiet = gpu(0.2).measured(1)
    slow = Forwards(1, {s: 3 * t for s, t in quiet.verify.items()}, 0.6)
    for number, (forwards, busy) in enumerate(
        ((quiet, False), (replace(quiet, busy=True), True), (slow, True))
    ):
        store = CostStore(tmp_path / f"{number}.json")
        for expected in (1, int(busy)):
            measured = []

            def measure(
                rows: int, forwards: Forwards = forwards, **how: int
            ) -> Forwards:
                measured.append(rows)  # noqa: B023
                return forwards

            costs, acceptance = store.load("pair")
            length = AutoLength(costs, acceptance, forwards=measure)
            for _ in range(3):
                prepare(length, 1)
                observe(length, gpu(0.2), 0, 0, 8)
            store.save("pair", costs, acceptance)
            assert len(measured) == expected


def test_a_draft_is_tried_where_a_busy_machine_made_it_look_dear() -> None:
    """Catches costs timed on a busy machine that forbid a draft to short jobs."""
    simulation = Simulation(Costs(1.0, 0.1, 0.12), _always(0.9), num_rows=4, rounds=200)
    measured = simulation.cost.measured(4, draft=4.0, verify=4.0)
    rates = {}
    for busy in (False, True):
        costs = RoundCosts(ForwardCosts())
        costs.add(replace(measured, busy=busy))
        result = simulation.run(AutoLength(costs))
        rates[busy] = result.rate / simulation.fixed(0)
    assert rates[False] == pytest.approx(1.0, abs=0.01)
    assert rates[True] > 1.25


@pytest.mark.parametrize(
    ("cost", "rows", "wrong"),
    [
        (gpu(0.3), 8, {"excess": {(8, 1): 1.4}}),
        (gpu(0.3), 8, {"excess": {(64, k): 7.0 for k in (1, 2, 4)}}),
        (gpu(0.1), 1, {"verify": {1: 0.001}}),
        (gpu(0.1), 1, {"verify": {2: 4.0, 5: 4.0}}),
        (cpu(0.05), 1, {"draft": 1000.0}),
    ],
)
def test_stored_costs_are_tried_before_a_draft_has_missed_much(
    cost: Costs, rows: int, wrong: dict[str, Any]
) -> None:
    """Catches a draft that is never tried: it misses more than tries may cost."""
    simulation = Simulation(cost, _always(0.8), num_rows=rows, rounds=500)
    right = cost.measured(rows)
    verify = {s: t * wrong.get("verify", {}).get(s, 1) for s, t in right.verify.items()}
    stored = Forwards(rows, verify, right.draft_step * wrong.get("draft", 1))
    costs = RoundCosts(ForwardCosts([stored]), wrong.get("excess"))
    result = simulation.run(AutoLength(costs))
    assert any(result.chosen[:100])
    assert result.chosen[-200:].count(0) < 20
    assert not costs.covers(rows)  # they are measured again before the next batch


def test_a_stored_cost_of_prompts_does_not_end_tries() -> None:
    """Catches a charge by stored costs that thousands of rounds do not pay back."""
    right = cpu(0.05).measured(1)
    stored = replace(right, verify={**right.verify, 1: 1e-6})
    length = AutoLength(RoundCosts(ForwardCosts([stored])))
    state, tries = BatchState(1, [8], 100, 500), 0
    for _ in range(100):
        tries += length.may_pay(state)
        observe(length, cpu(0.05), 0, 0, 100)
    assert tries > 1


def test_what_a_prompt_costs_leaves_time_for_tries() -> None:
    """Catches a charge that a job never earns: poor acceptance that is stored stays.

    The costs were measured on two CPU cores, with a head of 6 tokens.
    """
    forwards = Forwards(1, {1: 57e-3, 2: 61e-3, 5: 74e-3}, 1.3e-3, draft_once=24.5e-3)
    excess = {(1, 2): 0.07, (1, 4): 0.035, (1, 6): -0.05}
    costs = RoundCosts(ForwardCosts([forwards]), excess)
    known = Acceptance([0.41, 0.62, 0.31, 0.76, 0.84, 0.89])
    length = AutoLength(costs, known, max_draft_tokens=6)
    left = 200
    assert length.may_pay(BatchState(1, [6], left, 39))
    while not length.choose(BatchState(1, [6], left)):
        length.observe(RoundTiming(1, 0, [], costs.forwards.round(1, 0)))
        left -= 1
    assert left > 60


def test_catching_up_is_as_dear_as_it_was() -> None:
    """Catches forwards of another process by which a catch-up takes next to nothing."""
    simulation = Simulation(cpu(0.3), _always(0.8), num_rows=8, rounds=3000)
    right = simulation.cost.measured(8)
    for stored in (
        replace(right, draft_step=right.draft_step / 1000),
        replace(right, verify={**right.verify, 2: 4 * right.verify[2]}),
    ):
        result = simulation.run(AutoLength(RoundCosts(ForwardCosts([stored]))))
        assert result.rate > 0.96 * simulation.fixed(0)


def test_the_reason_says_whose_costs_it_goes_by() -> None:
    """Catches costs of another process that are told as if they were measured now."""
    old = RoundCosts(ForwardCosts([gpu(0.2).measured(1)]))
    new = RoundCosts(ForwardCosts())
    for costs in (old, new):
        length = AutoLength(costs, forwards=gpu(0.2).measured)
        prepare(length, 1)
        observe(length, gpu(0.2), 0, 0, 4)
        source = "costs of an earlier run"
        if costs is new:
            source = "forwards timed before the first round"
        assert str(length.reason).endswith(f" times one without by {source}")
        observe(length, gpu(0.2), 1, 1, 4)
        assert str(length.reason).endswith(" times one without")
