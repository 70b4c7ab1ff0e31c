"""What whole jobs come to: rates, latencies, times of rounds. No mlx here."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .cells import Cell
from .figures import Figures
from .raw import Results
from .waves import Record

# Of all requests: more than these without a token when the last one comes are a queue.
_QUEUE = 0.05


def arrivals_per_second(results: Results, cell: Cell) -> float:
    """The rate at which requests of a job under a load arrive; 0 without a load."""
    if not cell.conditions.load:
        return 0.0
    at_once = replace(cell.conditions, load=0.0)
    passes = results.passes[Cell(system="specdec", conditions=at_once)]
    warm = [p for n, p in passes.items() if n] or list(passes.values())
    rates: list[float] = [len(p["requests"]) / p["seconds"] for p in warm]
    return statistics.median(rates) * cell.conditions.load


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of rounds of one k, near a join or not.

    Args:
        number: over all passes that count; the times are medians over these.
    """

    k: int
    near_join: bool
    number: int
    p10: float
    p50: float
    p90: float
    mean: float


class JobFigures:
    """The figures of one system under some conditions.

    Args:
        cell: what was measured.
        passes: its jobs by number.
    """

    def __init__(self, cell: Cell, passes: dict[int, Record]):
        self.cell = cell
        self.passes = passes

    @property
    def counted(self) -> list[Record]:
        """The passes that count."""
        return [p for n, p in sorted(self.passes.items()) if n]

    @property
    def cold(self) -> Record | None:
        """The first pass."""
        return self.passes.get(0)

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second of the passes that count, from the call to the last one."""
        return {n: job_rate(p) for n, p in sorted(self.passes.items()) if n}

    def ratios(self, other: JobFigures | None) -> list[float]:
        """Rates over those of another system, pass by pass."""
        if other is None:
            return []
        theirs = other.rates
        return [r / theirs[n] for n, r in self.rates.items() if theirs.get(n)]

    def total(self, name: str) -> int:
        """The sum of one number over the requests of the passes that count."""
        each: list[int] = [r[name] for p in self.counted for r in p["requests"]]
        return sum(each)

    @property
    def length(self) -> float:
        """Tokens of a row in a round, the extra token included; 0 without rounds."""
        rounds = self.total("rounds")
        return 1 + self.total("accepted") / rounds if rounds else 0.0

    @property
    def first_token_ms(self) -> list[float]:
        """Of every request: milliseconds from its arrival to its first token."""
        return self._each(lambda r: 1e3 * (r["first"] - r["arrived"]))

    @property
    def token_ms(self) -> list[float]:
        """Of every request with two tokens or more: milliseconds a token after it."""
        return [
            1e3 * (r["ended"] - r["first"]) / (r["tokens"] - 1)
            for p in self.counted
            for r in p["requests"]
            if r["tokens"] > 1
        ]

    def _each(self, get: Callable[[Record], float]) -> list[float]:
        return [get(r) for p in self.counted for r in p["requests"]]

    @property
    def rounds(self) -> list[RoundTime]:
        """Times of rounds, by k and joins."""
        found: dict[tuple[int, bool], list[Record]] = defaultdict(list)
        for job in self.counted:
            for row in job["rounds"]:
                found[row["k"], bool(row["near_join"])].append(row)

        def middle(rows: Sequence[Record], name: str) -> float:
            values: list[float] = [row[name] for row in rows]
            return statistics.median(values)

        return [
            RoundTime(
                k,
                near,
                sum(row["number"] for row in rows),
                *(middle(rows, name) for name in ("p10", "p50", "p90", "mean")),
            )
            for (k, near), rows in sorted(found.items())
        ]

    @property
    def peak_bytes(self) -> int:
        """Largest peak memory above what was held before."""
        peaks: list[int] = [
            p["peak_memory_bytes"] - p["memory_before_bytes"]
            for p in self.passes.values()
        ]
        return max(peaks)

    def phase(self, name: str) -> float:
        """Median seconds of a phase in the passes that count."""
        seconds: list[float] = [p["phases"][name] for p in self.counted]
        return statistics.median(seconds)

    def equal_to(self, other: JobFigures | None) -> str | None:
        """How many requests had another system's tokens, of how many."""
        if other is None or not self.passes or not other.passes:
            return None
        ours, theirs = (f.passes[max(f.passes)]["requests"] for f in (self, other))
        if len(ours) != len(theirs):
            return None
        same = sum(
            a["digest"] == b["digest"] for a, b in zip(ours, theirs, strict=True)
        )
        return f"{same} of {len(ours)}"

    # -- under a load --------------------------------------------------------

    @property
    def offered(self) -> float:
        """Requests that arrived in a second."""
        return self._middle(lambda p: (len(p["requests"]) - 1) / _last_arrival(p))

    @property
    def completed(self) -> float:
        """Requests per second, until the last one's end."""
        return self._middle(
            lambda p: len(p["requests"]) / max(r["ended"] for r in p["requests"])
        )

    @property
    def waiting(self) -> int:
        """Requests without a token when the last one arrived; the last one not."""
        return round(self._middle(_waiting))

    @property
    def saturated(self) -> bool:
        """Whether requests queued up: they came faster than rows became free."""
        return self._middle(_waiting) > max(
            2, _QUEUE * self._middle(lambda p: len(p["requests"]))
        )

    def _middle(self, get: Callable[[Record], float]) -> float:
        return statistics.median(map(get, self.counted))


def job_rate(job: Record) -> float:
    """Tokens per second of a job."""
    tokens = sum(r["tokens"] for r in job["requests"])
    return float(tokens / job["seconds"])


def _last_arrival(job: Record) -> float:
    return max(r["arrived"] for r in job["requests"]) or 1e-9


def _waiting(job: Record) -> int:
    last = _last_arrival(job)
    return sum(r["arrived"] < last < r["first"] for r in job["requests"])


class Jobs:
    """All figures of a folder of jobs.

    Args:
        figures: of the same folder; it knows recipe, order and names.
    """

    def __init__(self, figures: Figures):
        self.figures = figures
        self.cells = {
            cell: JobFigures(cell, figures.results.passes[cell])
            for cell in figures.cells
        }

    @property
    def at_once(self) -> list[JobFigures]:
        """Jobs whose requests are there from the beginning."""
        return [f for c, f in self.cells.items() if not c.conditions.load]

    @property
    def under_load(self) -> list[JobFigures]:
        """Jobs whose requests arrive at random."""
        return [f for c, f in self.cells.items() if c.conditions.load and f.counted]

    def plain(self, of: JobFigures) -> JobFigures | None:
        """This engine without a draft, under the same conditions."""
        return self.cells.get(of.cell.plain)

    def mlx_lm(self, of: JobFigures) -> JobFigures | None:
        """mlx-lm's plain decoding, under the same conditions."""
        theirs = of.cell.mlx_lm
        one = replace(theirs, system="mlx-lm step")
        return self.cells.get(one) or self.cells.get(theirs)

    def saturation(self) -> list[tuple[str, str]]:
        """Of each system under loads: its name, and from which load on it queues up."""
        groups: dict[tuple[str, int], list[JobFigures]] = defaultdict(list)
        for f in self.under_load:
            groups[f.cell.label, f.cell.conditions.batch].append(f)
        found = []
        for (label, batch), each in groups.items():
            each.sort(key=lambda f: f.offered)
            full = [f for f in each if f.saturated]
            free = [f for f in each if not full or f.offered < full[0].offered]
            kept = f"keeps up with {free[-1].offered:.2f} requests/s" if free else ""
            late = f"queues up at {full[0].offered:.2f} requests/s" if full else ""
            text = ", ".join(filter(None, [kept, late])) or "not measured"
            found.append((f"batch {batch}: {label}", text))
        return found
