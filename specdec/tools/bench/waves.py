"""One wave of rows, and when what reached the host. No mlx here.

Every system that is compared records, for every step, when its tokens arrived. What
a rate counts is then the same for all.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

Prompts = Sequence[Sequence[int]]
Clock = Callable[[], float]
Record = dict[str, Any]
#: k, and what each running row drafted and accepted in the round.
TracedRound = tuple[int, list[tuple[int, int]]]


@dataclass(frozen=True)
class Options:
    """What all systems are given alike.

    Args:
        max_tokens: of every row.
        prefill_step_size: prompt tokens per row in one forward.
        eos_token_ids: tokens that end a row; none: rows run to ``max_tokens``.
        temperature: 0 is greedy.
        seed: of the first prompt's draws; each next one's is one more.
        clock: seconds.
    """

    max_tokens: int
    prefill_step_size: int
    eos_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0
    clock: Clock = time.perf_counter


@dataclass
class Wave:
    """One wave of rows: when what arrived on the host.

    The decode phase begins when every row has its first token and ends with the
    last token; tokens that arrive in it count. A system that brings its first
    token together with others (a first round) gets none of them for free.
    """

    rows: int
    clock: Clock = time.perf_counter
    start: float = 0.0
    end: float = 0.0
    # (time, tokens of each row, rows still running before it)
    steps: list[tuple[float, list[int], int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    #: Per row: rounds, draft tokens, accepted ones.
    counts: list[tuple[int, int, int]] = field(default_factory=list)
    #: Prompt tokens, of all rows, that a prefix cache had.
    prefix_tokens: int = 0
    #: Per round: k, and what each running row drafted and accepted.
    rounds: list[TracedRound] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.clock()
        self.counts = [(0, 0, 0)] * self.rows
        self.tokens = [[] for _ in range(self.rows)]
        self._ended = [False] * self.rows

    def begin_step(self) -> None:
        """Note that a step has reached the host, now."""
        running = self._ended.count(False)
        self.steps.append((self.clock(), [0] * self.rows, running))

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Note tokens that the step brought."""
        self.tokens[row] += tokens
        self.steps[-1][1][row] += len(tokens)

    def count(self, row: int, *, rounds: int, drafted: int, accepted: int) -> None:
        """Add to what a row's rounds drafted and accepted."""
        a, b, c = self.counts[row]
        self.counts[row] = (a + rounds, b + drafted, c + accepted)

    def row_ended(self, row: int) -> None:
        """Note that the step was a row's last."""
        self._ended[row] = True

    def finish(self) -> None:
        """Note that the device is idle."""
        self.end = self.clock()
        # Steps after the last token are rounds that nobody needed.
        while self.steps and not any(self.steps[-1][1]):
            self.steps.pop()

    def _arrivals(self) -> list[int]:
        """Index of the step that brought each row its first token."""
        return [
            next((i for i, (_, n, _) in enumerate(self.steps) if n[row]), 0)
            for row in range(self.rows)
        ]

    def record(self) -> dict[str, object]:
        """Plain numbers, for the raw result."""
        arrivals = self._arrivals()
        first = max(arrivals)
        times = [t for t, _, _ in self.steps] or [self.end]
        decode = self.steps[first + 1 :]
        return {
            "rows": self.rows,
            "wall_seconds": self.end - self.start,
            "first_token_seconds": times[first] - self.start,
            "first_tokens": [times[i] - self.start for i in arrivals],
            "decode_seconds": times[-1] - times[first],
            "decode_tokens": sum(sum(n) for _, n, _ in decode),
            "generated_tokens": sum(map(len, self.tokens)),
            "prefix_tokens": self.prefix_tokens,
            "steps": len(decode),
            "row_rounds": sum(rounds for rounds, _, _ in self.counts),
            "drafted": sum(drafted for _, drafted, _ in self.counts),
            "accepted": sum(accepted for _, _, accepted in self.counts),
            "requests": [
                [*counts, len(tokens)]
                for counts, tokens in zip(self.counts, self.tokens, strict=True)
            ],
            "step_ms": [
                round((b - a) * 1e3, 3)
                for a, b in zip(times[first:], times[first + 1 :], strict=False)
            ],
            "step_rows": [running for _, _, running in decode],
            "rounds": [[k, [list(row) for row in rows]] for k, rows in self.rounds],
        }


#: Decodes the prompts of one wave; the second argument is the first one's index.
Run = Callable[[Prompts, int], Wave]


def total(record: Record, name: str) -> float:
    """The sum of one number over the waves of a pass."""
    return float(sum(wave[name] for wave in record["waves"]))


def rate(record: Record) -> float:
    """Decode tokens per second."""
    seconds = total(record, "decode_seconds")
    return total(record, "decode_tokens") / seconds if seconds else 0.0


def full_steps(record: Record) -> list[float]:
    """Milliseconds of the steps in which every row of the wave was running."""
    return [
        ms
        for wave in record["waves"]
        for ms, rows in zip(wave["step_ms"], wave["step_rows"], strict=True)
        if rows == wave["rows"]
    ]


def full_rounds(record: Record) -> list[tuple[int, float, int, int]]:
    """Of rounds in which every row was running: k, milliseconds, rows, tokens.

    As in a batch whose rows are replaced when they end. A wave's first round, which
    begins its caches, is left out.
    """
    found = []
    for wave in record["waves"]:
        steps = zip(wave["step_ms"], wave["step_rows"], wave["rounds"], strict=False)
        for ms, running, (k, rows) in islice(steps, 1, None):
            if running == wave["rows"]:
                tokens = running + sum(accepted for _, accepted in rows)
                found.append((k, ms, running, tokens))
    return found


def full_rate(record: Record) -> float:
    """Decode tokens per second while every row was running; 0 if none ever was."""
    rounds = full_rounds(record)
    seconds = sum(ms for _, ms, _, _ in rounds) / 1e3
    return sum(tokens for _, _, _, tokens in rounds) / seconds if seconds else 0.0


def quiet_rate(records: Sequence[Record]) -> float:
    """The same over several passes, in the machine's quiet moments.

    Each round counts as long as the quickest twentieth of its k's take at most: other
    load, which hits some passes and spares others, does not count.
    """
    tokens, by_k = 0, defaultdict[int, list[float]](list)
    for record in records:
        for k, ms, _, n in full_rounds(record):
            tokens += n
            by_k[k].append(ms)
    seconds = sum(len(ms) * _quickest(ms) for ms in by_k.values()) / 1e3
    return tokens / seconds if seconds else 0.0


def _quickest(milliseconds: Sequence[float]) -> float:
    return sorted(milliseconds)[(len(milliseconds) - 1) // 20]


def step_ms(record: Record) -> float:
    """Median milliseconds of a step with all rows running; 0 without any."""
    return statistics.median(full_steps(record) or [0.0])
