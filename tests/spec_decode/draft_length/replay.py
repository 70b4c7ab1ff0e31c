"""Replays jobs whose rounds were recorded: times by k, and what each row kept."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.engine.round import IDLE
from specdec.spec_decode.draft_length import (
    BatchState,
    DraftLength,
    Forwards,
    RoundTiming,
)
from tests.scripted import Script

RECORDED = Path(__file__).with_name("recorded.json")


def chance_of(per_round: float, k: int) -> float:
    """The chance of each draft token with which a round of k keeps ``per_round``."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**j for j in range(1, k + 1)) < per_round:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Job:
    """Requests that decode in a batch of fixed size, on a clock of their own.

    Args:
        name: of the recording.
        rows: slots of the batch.
        tokens: tokens of each request.
        ms: by k, eleven quantiles of a round's milliseconds.
        chances: of each request's draft tokens, taken in turn.
        waves: requests for each slot.
        head: a whole block is drafted at once.
        lag: rounds in flight while the next is chosen.
        join: milliseconds of a chunk that prefills joining rows.
        near: milliseconds more of a round near a join, if it drafts.
        keep: all slots are computed to the end.
        absorb: milliseconds more of a prefill whose rows are drafted for.
        join_rounds: free rows wait for each other, as :class:`Scheduler` has them wait.
        alike: all requests have as many tokens.
        context: tokens of every row, as the policy is told.
    """

    name: str
    rows: int
    tokens: int
    ms: Mapping[int, Sequence[float]]
    chances: Sequence[float]
    waves: int = 2
    head: bool = False
    lag: int = 0
    join: float = 0.0
    near: float = 0.0
    keep: bool = False
    absorb: float = 0.0
    join_rounds: int = 0
    alike: bool = False
    context: int = 0

    @cached_property
    def most(self) -> int:
        """The longest draft that was recorded."""
        return max(self.ms)

    def median(self, k: int) -> float:
        """Milliseconds of a round of k, between the recorded ones."""
        return self._at(k, 5)

    def _at(self, k: int, quantile: int) -> float:
        if k in self.ms:
            return self.ms[k][quantile]
        low = max(x for x in self.ms if x < k)
        high = min(x for x in self.ms if x > k)
        if self.head and k:  # a block's length hardly changes what it costs
            return self.ms[high][quantile]
        share = (k - low) / (high - low)
        return self.ms[low][quantile] * (1 - share) + self.ms[high][quantile] * share

    def sweep(self, wrong: float = 1.0) -> Forwards:
        """Forwards as timed before the first round, drafts wrong by a factor."""
        plain, last = self.median(0) / 1e3, self.median(self.most) / 1e3
        verify = {1: plain, 2: plain, 5: plain}
        if self.head:
            return Forwards(self.rows, verify, 1e-5, (last - plain) * wrong)
        share = 0.0 if "ngram" in self.name else 0.3 if "cpu" in self.name else 0.95
        first = self.median(1) / 1e3
        step = share * max(0.0, first - plain)
        times = {1: plain, 2: first - step, 1 + self.most: last - self.most * step}
        verify = {s: plain + (max(t, plain) - plain) * wrong for s, t in times.items()}
        return Forwards(self.rows, verify, step * wrong)

    def seconds(self, length: DraftLength, seed: int = 0) -> float:
        """Seconds from the first prompt to the last token."""
        rng = random.Random(seed)
        clock = 0.0
        queue = list(range(self.rows * self.waves))
        left: dict[int, int] = {}
        room: dict[int, int] = {}
        backlog, joined = 0, False
        pending: list[RoundTiming] = []
        slots, pace, idle, plain = self.rows, rng.randrange(11), 0, 0
        while queue or left:
            free = min(self.rows - len(left), len(queue))
            may_idle = self.join_rounds * self.rows - idle
            others = sorted(left.values())
            if (
                left
                and free
                and len(queue) > free
                and (2 * free < self.rows or others[len(left) // 2] * free <= may_idle)
            ):
                idle += max(free, self.rows // 16)
                free *= idle >= self.join_rounds * self.rows
            if free:
                idle = 0
                state = BatchState(
                    max(1, len(left) + free),
                    [*room.values(), *[self.most] * free],
                    (sum(left.values()) + free * self.tokens) / (len(left) + free),
                    60,
                    context=self.context,
                )
                drafts = (plain < IDLE and any(room.values())) or length.may_pay(state)
                for _ in range(free):
                    row = queue.pop(0)
                    left[row] = self.tokens * (4 + 7 * row % 5) // 8 - 1
                    if self.alike:
                        left[row] = self.tokens - 1
                    room[row] = self.most if drafts else 0
                clock += (self.join + drafts * self.absorb) / 1e3
                joined = True
            waiting = bool(queue)
            while slots // 2 >= len(left) and not (waiting or self.keep):
                slots //= 2
            rooms = [room[row] for row in left]
            k = 0
            if any(rooms):
                flying = [p.num_draft_tokens for p in pending]
                state = BatchState(
                    slots, rooms, sum(left.values()) / len(left), backlog,
                    flying, {} if waiting else dict(left), context=self.context,
                )  # fmt: skip
                k = length.choose(state)
            if rng.random() < 1 / 40:
                pace = rng.randrange(11)
            quantile = max(0, min(10, pace + rng.randrange(-1, 2)))
            took = self._at(k, quantile) * self.share(slots) / 1e3
            if joined and k:
                took += self.near / 1e3
            clock += took
            plain = 0 if k else plain + 1
            rows, accepted = list(left), []
            for row in rows:
                kept = 0
                while kept < min(k, room[row]) and rng.random() < self.chance(row):
                    kept += 1
                accepted.append((min(k, room[row]), kept))
                left[row] -= kept + 1
                if left[row] <= 0:
                    del left[row], room[row]
            timing = RoundTiming(
                slots, k, accepted if k else [], took, True,
                backlog if k else 0, rows if k else (), not any(rooms),
            )  # fmt: skip
            if joined:
                timing = replace(timing, fair=False, joining=True)
            pending.append(timing)
            backlog, joined = 0 if k else backlog + 1, False
            if len(pending) > self.lag:
                first = pending.pop(0)
                if any(p.num_draft_tokens != first.num_draft_tokens for p in pending):
                    first = replace(first, fair=False)
                length.observe(first)
        return clock

    def share(self, slots: int) -> float:
        """The time of a round with fewer slots: launches cost the same."""
        fixed = 0.3 if "cpu" in self.name else 0.75
        return fixed + (1 - fixed) * slots / self.rows

    def chance(self, row: int) -> float:
        """The chance of each draft token of a request."""
        return self.chances[row % len(self.chances)]

    def fixed(self, k: int, seeds: Sequence[int]) -> float:
        """Mean seconds with a fixed k."""
        return sum(self.seconds(Script(lambda _: k), s) for s in seeds) / len(seeds)


def recorded() -> dict[str, Job]:
    """The jobs of ``recorded.json`` by name."""
    jobs = {}
    content: dict[str, Any] = json.loads(RECORDED.read_text("utf-8"))
    for name, cell in content.items():
        ms = {int(k): times for k, times in cell["ms"].items()}
        most = max(ms)
        chances = [chance_of(kept / rounds, most) for rounds, kept in cell["kept"]]
        jobs[name] = Job(
            name, cell["rows"], cell["tokens"], ms, chances,
            waves=2 if cell["rows"] > 1 else len(chances),
            head=name.endswith("head"),
            lag=0 if "cpu" in name else 1,
            join=2 * ms[0][5],
        )  # fmt: skip
    return jobs
