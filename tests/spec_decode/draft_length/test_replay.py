"""Whole jobs whose rounds were recorded, and devices whose costs were published.

``recorded.json`` has, for each job, quantiles of the milliseconds of its rounds by k
and (rounds, tokens kept) of its rows. 22 jobs are from the results of ``benchmarks``.
The three ``head-other-prompts`` are calculated: medians and tokens a round are
published ones, the spread around them is assumed. The choice was tuned with all of
them, so they say little about other jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specdec.spec_decode.draft_length import (
    Acceptance,
    AutoLength,
    BatchState,
    CostStore,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)
from tests.scripted import Script

from .replay import Job, recorded

JOBS = recorded()
SEEDS = range(8)


def auto(job: Job) -> AutoLength:
    costs = RoundCosts(ForwardCosts(), **device(job))
    costs.add(job.sweep())
    return AutoLength(costs, max_draft_tokens=job.most)


def device(job: Job) -> dict[str, Any]:
    """What is known of the device without measuring."""
    return {} if "cpu" in job.name else {"new_shape": 0.01, "join_rounds": 4}


@cache
def fixed(name: str) -> dict[int, float]:
    """Seconds of all seeds by k."""
    job = JOBS[name]
    return {k: len(SEEDS) * job.fixed(k, SEEDS) for k in job.ms}


def rates(name: str, folder: Path) -> dict[str, float]:
    """Seconds of the best fixed k over those of ``auto``: in three stages."""
    job, seconds = JOBS[name], dict.fromkeys(("first", "fourth", "stored"), 0.0)
    for seed in SEEDS:
        length = auto(job)
        seconds["first"] += job.seconds(length, seed)
        for more in (100, 200):
            job.seconds(length, seed + more)
        store = CostStore(folder / f"{seed}.json")
        store.save("pair", length.costs, length.acceptance)
        seconds["fourth"] += job.seconds(length, seed)
        stored = store.load("pair", **device(job))
        later = AutoLength(*stored, max_draft_tokens=job.most)
        seconds["stored"] += job.seconds(later, seed)
    best = min(fixed(name).values())
    return {stage: best / each for stage, each in seconds.items()}


def test_recorded_jobs(tmp_path: Path) -> None:
    """The mean is near the best fixed k, and no job is much slower than plain decoding.

    A short job of a new process begins with what another process has saved.
    """
    measured = {name: rates(name, tmp_path) for name in JOBS}
    means = {
        stage: sum(each[stage] for each in measured.values()) / len(measured)
        for stage in ("first", "fourth", "stored")
    }
    assert means["first"] > 0.96, means
    assert means["fourth"] > 0.985, means
    assert means["stored"] > 0.98, means
    for name, stages in measured.items():
        plain = fixed(name)[0] / min(fixed(name).values())
        assert plain * stages["fourth"] > 0.96, name
        assert plain * stages["stored"] > 0.95, name


# -- short jobs ------------------------------------------------------------

# Milliseconds of a plain round and of a head's, published for SmolLM2-135M on an H100.
ROUNDS = {8: (3.5, 5.7), 32: (4.3, 7.4), 64: (5.6, 10.2)}
# For each kind of draft: a round by k, in plain ones; the chances of its tokens; and
# the least rate, relative to plain decoding.
LOOKUP = {1: 1.05, 2: 1.1, 4: 1.15, 8: 1.3}
MODEL = {1: 1.6, 2: 2.2, 4: 3.4, 8: 5.5}
SHORT: dict[str, tuple[Mapping[int, float] | None, tuple[float, ...], float]] = {
    "head": (None, (0.6, 0.7, 0.55, 0.65), 1.01),
    "poor head": (None, (0.35, 0.4, 0.3, 0.4), 0.96),
    "lookup": (LOOKUP, (0.02, 0.1, 0.25, 0.5), 0.955),
    "always wrong": (MODEL, (0.0,), 0.98),
}


def short(draft: str, rows: int) -> Job:
    """Two waves of requests of 128 tokens, whose prefills take several rounds each.

    Without a draft all rows end at once, and join at once. With one they end apart.
    """
    (plain, head), (costs, chances, _) = ROUNDS[rows], SHORT[draft]
    medians = {6: head} if costs is None else {k: plain * c for k, c in costs.items()}
    spread = [0.97 + 0.008 * i for i in range(11)]
    ms = {k: [m * x for x in spread] for k, m in {0: plain, **medians}.items()}
    return Job(
        draft, rows, 128, ms, chances, head=costs is None, lag=1, join=16.0, near=4.0,
        absorb=6.0 if costs is None else 1.0, join_rounds=4, alike=True,
    )  # fmt: skip


@pytest.mark.parametrize("draft", SHORT)
def test_short_jobs_lose_little(draft: str, tmp_path: Path) -> None:
    """Catches drafts that gain by rounds and lose in joins, and tries without end.

    Means of seven seeds, over plain decoding: the first job of a process, the second,
    and the first of a process that goes by stored costs.
    """
    for rows in ROUNDS:
        job, rates = short(draft, rows), [0.0, 0.0, 0.0]
        for seed in range(7):
            length, store = auto(job), CostStore(tmp_path / f"{rows}-{seed}.json")
            plain = job.seconds(Script(lambda _: 0, may_pay=False), seed)
            rates[0] += plain / job.seconds(length, seed) / 7
            rates[1] += plain / job.seconds(length, seed) / 7
            store.save("pair", length.costs, length.acceptance)
            stored = store.load("pair", **device(job))
            later = AutoLength(*stored, max_draft_tokens=job.most)
            rates[2] += plain / job.seconds(later, seed) / 7
        assert min(rates) > SHORT[draft][2], (rows, rates)


def few_rounds(rows: int, cost: float, chances: Sequence[float], path: Path) -> float:
    """Rate relative to plain decoding: two waves of 16 or 32 tokens a row.

    Times of rounds and prompts are as on one H200.
    """
    plain, spread = 6.0, [0.97 + 0.008 * i for i in range(11)]
    ms = {k: [m * x for x in spread] for k, m in {0: plain, 6: plain * cost}.items()}
    rates = []
    for tokens, alike in ((16, True), (32, True), (32, False)):
        job = Job(
            "head", rows, tokens, ms, chances, head=True, lag=1, join=4 * plain,
            near=4.0, absorb=6 * plain, join_rounds=4, alike=alike,
        )  # fmt: skip
        for seed in range(3):
            length, store = auto(job), CostStore(path / f"{rows}-{tokens}-{seed}.json")
            none = job.seconds(Script(lambda _: 0, may_pay=False), seed)
            for earlier in (100, 200, 300):
                job.seconds(length, seed + earlier)
            store.save("pair", length.costs, length.acceptance)
            stored = store.load("pair", **device(job))
            later = AutoLength(*stored, max_draft_tokens=job.most)
            rates += [none / job.seconds(each, seed) for each in (length, later)]
    return sum(rates) / len(rates)


def test_jobs_of_a_few_rounds_lose_little(tmp_path: Path) -> None:
    """Catches a draft whose rows end apart by chance, and prompts that never pay."""
    rates = {
        (rows, chances): few_rounds(rows, cost, chances, tmp_path)
        for rows, cost in ((32, 1.5), (64, 2.1))
        for chances in ((0.68,), (0.56,), (0.68, 0.56))
    }
    assert sum(rates.values()) / len(rates) > 0.98, rates
    assert min(rates.values()) > 0.95, rates


# -- staircases ------------------------------------------------------------

# Published times of a forward by rows in all, over one row's: 4 bits on an M4 Pro,
# a 70B on an M5 Max, experts of a 30B-A3B. In between they are linear.
METAL: dict[str, Mapping[int, float]] = {
    "m4": {1: 1, 2: 1, 3: 1.2, 4: 1.45, 5: 1.75, 6: 2.1, 8: 2.75, 10: 4.5, 32: 4.5,
           64: 9},
    "m2": {1: 1, 2: 1.7, 4: 2.6, 6: 3.6, 10: 4.9, 13: 5.1, 32: 5.1, 64: 10},
    "m5": {1: 1, 3: 1.12, 5: 1.42, 8: 2.21, 13: 2.9, 32: 3.1, 64: 6.2},
    "experts": {1: 1, 2: 1.6, 5: 2.44, 8: 3.3, 16: 5, 32: 7.4, 64: 12},
}  # fmt: skip
# With 32k keys, milliseconds of a layer's attention by queries of a row; that of one
# query is assumed, and that its products with one row take 0.2.
LONG: Mapping[int, float] = {1: 1, 5: 2.5, 6: 7.1, 8: 7.5}
LADDER = (0, 1, 2, 3, 4, 7)
# Few: their rounds have no spread.
FEW_SEEDS = range(3)


def stairs(costs: Mapping[int, float], rows_in_all: int) -> float:
    low = max(n for n in costs if n <= rows_in_all)
    high = min((n for n in costs if n >= rows_in_all), default=low)
    share = 0.0 if high == low else (rows_in_all - low) / (high - low)
    return costs[low] * (1 - share) + costs[high] * share


def followed(
    device: str, rows: int, chance: float, *, context: int = 0, earlier: int = 3
) -> float:
    """Seconds of the best fixed k over those of ``auto``, after some jobs.

    Args:
        context: of forwards that are timed with one before the first round; 0: all are
            timed without the keys of a long context.
    """
    chip, _, keys = device.partition(" ")
    timed = {k: 0.02 * (stairs(METAL[chip], rows * (k + 1)) + 0.05 * k) for k in LADDER}
    attention = {k: 0.1 * rows * stairs(LONG, k + 1) * bool(keys) for k in LADDER}
    times = {k: [timed[k] + attention[k]] * 11 for k in LADDER}
    # Slots are never dropped, since other batch sizes would be other staircases.
    job = Job(
        "metal", rows, 400, times, [chance], waves=3, keep=True, context=32 * 1024
    )
    widths = {k + 1: timed[k] - 0.001 * k for k in LADDER}
    share = context / job.context
    longer = {k + 1: widths[k + 1] + share * attention[k] for k in LADDER}
    forwards = Forwards(rows, widths, 0.001)
    if context:
        forwards = replace(forwards, context=context, longer=longer)
    seconds = 0.0
    for seed in FEW_SEEDS:
        costs = RoundCosts(ForwardCosts([forwards]))
        length = AutoLength(costs, ladder=LADDER, max_draft_tokens=7)
        for number in range(earlier):
            job.seconds(length, seed + 50 + 10 * number)
        seconds += job.seconds(length, seed) / len(FEW_SEEDS)
    return min(job.fixed(k, FEW_SEEDS) for k in LADDER) / seconds


def test_a_staircase_is_followed() -> None:
    """Catches costs that are thought to rise with each row: 32 cost what 20 do."""
    cells = {
        (device, rows, chance): followed(device, rows, chance)
        for device in (*METAL, "m4 32k")
        for rows in ((1, 8) if device == "m4 32k" else (1, 2, 4, 8))
        for chance in (0.6, 0.8)
    }
    assert sum(cells.values()) / len(cells) > 0.97, cells
    assert min(cells.values()) > 0.955, cells


def test_a_context_that_was_timed_is_no_news_to_a_first_job() -> None:
    """Catches attention of many queries that is found out by trying."""
    cells = [(rows, chance) for rows in (1, 8) for chance in (0.6, 0.8)]
    timed, untimed = (
        [followed("m4 32k", *cell, context=context, earlier=0) for cell in cells]
        for context in (4096, 0)
    )
    assert min(timed) > 0.97, timed
    assert sum(timed) > sum(untimed) + 0.02, (timed, untimed)


# -- costs that are wrong --------------------------------------------------


@pytest.mark.parametrize("wrong", [5.0, 50.0])
@pytest.mark.parametrize("stored", ["forwards", "rounds"])
@pytest.mark.parametrize("rows", [1, 8])
def test_any_wrong_cost_is_corrected(wrong: float, stored: str, rows: int) -> None:
    """Catches a cost, measured on a busy machine, that forbids its own correction."""
    truth = {0: 0.02, 1: 0.024, 2: 0.028, 4: 0.036}
    forwards = Forwards(rows, {1: 0.02, 2: 0.02, 5: 0.02}, 0.004)
    excess = {}
    if stored == "rounds":
        excess = {(rows, k): 3.9 if wrong > 9 else 1.6 for k in (1, 2, 4)}
    else:
        verify = {1: 0.02, 2: 0.02 * wrong, 5: 0.02 * wrong}
        forwards = replace(forwards, verify=verify, draft_step=0.004 * wrong)
    length = AutoLength(
        RoundCosts(ForwardCosts([forwards]), excess),
        Acceptance([0.1]),
        max_draft_tokens=4,
    )
    chosen = []
    for number in range(4000):
        # Rows of 128 tokens, which miss what is not drafted for them.
        state = BatchState(rows, [4] * rows, 128 - number % 128, 0)
        k = length.choose(state)
        accepted = [(k, k - (number % 5 == 0 < k))] * rows if k else []
        length.observe(RoundTiming(rows, k, accepted, truth[k]))
        chosen.append(k)
    assert any(chosen[:1000])
    assert sum(k == 4 for k in chosen[-500:]) > 400
