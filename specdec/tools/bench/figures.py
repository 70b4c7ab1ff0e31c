"""What the raw results of a cell come to. No mlx here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from . import counts
from .cells import Cell, Conditions, units_of
from .counts import Policy, RoundCost
from .raw import Results
from .recipe import Recipe
from .waves import Record, full_steps, rate

PARTS = ("draft", "verify", "sampling", "host")
# How much faster than its tokens per round a system can seem where passes are noisy.
NOISE = 1.25


@dataclass(frozen=True)
class RequestCounts:
    """What one request drafted: rounds, draft tokens, accepted ones, tokens."""

    rounds: int
    drafted: int
    accepted: int
    tokens: int

    @property
    def rate(self) -> float:
        """Accepted over drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Mean tokens of a round, the extra token included."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class Acceptance:
    """How much of what was drafted was accepted.

    Args:
        requests: those that drafted anything.
    """

    requests: tuple[RequestCounts, ...]

    @property
    def drafted(self) -> int:
        """Draft tokens."""
        return sum(r.drafted for r in self.requests)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens."""
        return sum(r.accepted for r in self.requests)

    @property
    def rate(self) -> float:
        """Accepted over drafted, all requests together."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Mean tokens of a row in a round, the extra token included."""
        rounds = sum(r.rounds for r in self.requests)
        return 1 + self.accepted / rounds if rounds else 1.0

    def request_mean(self, name: str) -> float:
        """Mean of ``rate`` or ``length`` over requests, each counting the same."""
        if not self.requests:
            return self._of_none(name)
        return statistics.fmean(getattr(r, name) for r in self.requests)

    def token_mean(self, name: str) -> float:
        """The same, each request weighted by the tokens that it generated."""
        weights = [r.tokens for r in self.requests]
        if not any(weights):
            return self._of_none(name)
        values = [getattr(r, name) for r in self.requests]
        return statistics.fmean(values, weights)

    @staticmethod
    def _of_none(name: str) -> float:
        """Nothing was drafted: a rate of 0 and a length of 1, as one request has."""
        value: float = getattr(RequestCounts(0, 0, 0, 0), name)
        return value


@dataclass(frozen=True)
class RoundParts:
    """Milliseconds of a round taken apart, medians but for the shares.

    Args:
        draft, verify, sampling: from where a part begins to be built to where the
            device has computed it.
        total: of the round.
        shares: of the total: the time that the device was waited for in each part,
            and for ``host`` all that remains.
    """

    draft: float
    verify: float
    sampling: float
    total: float
    shares: dict[str, float]

    @classmethod
    def of(cls, rounds: Sequence[Record]) -> RoundParts | None:
        """From a profile; ``None`` when no round was timed."""
        if not rounds:
            return None

        def part(name: str) -> list[tuple[float, float]]:
            return [tuple(r.get(name, (0.0, 0.0))) for r in rounds]

        total = sum(r["total"] for r in rounds)
        waited = {name: sum(w for _, w in part(name)) for name in PARTS[:-1]}
        host = total - sum(waited.values())
        return cls(
            **{n: statistics.median(b + w for b, w in part(n)) for n in PARTS[:-1]},
            total=statistics.median(r["total"] for r in rounds),
            shares={n: t / total for n, t in {**waited, "host": host}.items()},
        )


class CellFigures:
    """The figures of one cell.

    Args:
        results: what was measured.
        cell: one that has a pass.
    """

    def __init__(self, results: Results, cell: Cell):
        self.cell = cell
        self._results = results
        self._passes = results.passes[cell]

    @property
    def cold(self) -> float | None:
        """Decode tokens per second of the first pass."""
        return rate(self._passes[0]) if 0 in self._passes else None

    @cached_property
    def rates(self) -> dict[int, float]:
        """Decode tokens per second of the passes that count, by their number."""
        return {n: rate(p) for n, p in sorted(self._passes.items()) if n}

    @property
    def rate(self) -> float:
        """Their median; 0 when there are none."""
        return statistics.median(self.rates.values()) if self.rates else 0.0

    def can_be(self, ratio: float) -> bool:
        """Whether it can be so many times as fast as plain decoding.

        A round takes as long as a plain step at least, so that no more is to be had
        than the tokens that it brings, and noise.
        """
        return ratio <= NOISE * self.acceptance().length

    def ratios(self, other: CellFigures | None) -> list[float]:
        """Rates over those of another cell, pass by pass."""
        if other is None:
            return []
        pairs = [(r, other.rates.get(n)) for n, r in self.rates.items()]
        return [a / b for a, b in pairs if b]

    def each(self, get: Callable[[Record], list[float]]) -> list[float]:
        """Values of all waves of the passes that count."""
        counted = [p for n, p in sorted(self._passes.items()) if n]
        return [x for p in counted for wave in p["waves"] for x in get(wave)]

    @property
    def first_token_ms(self) -> list[float]:
        """Of every request: milliseconds until its first token."""
        return [1e3 * t for t in self.each(lambda wave: wave["first_tokens"])]

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of steps, or rounds, with all rows running."""
        return [
            ms for n, p in sorted(self._passes.items()) if n for ms in full_steps(p)
        ]

    @property
    def occupancy(self) -> float:
        """Of the rows of all steps, those that were running."""
        running = self.each(lambda wave: wave["step_rows"])
        rows = self.each(lambda wave: [wave["rows"]] * len(wave["step_rows"]))
        return sum(running) / sum(rows) if rows else 0.0

    @property
    def peak_bytes(self) -> tuple[int, int]:
        """Largest peak memory, and the largest above what was held before."""
        peaks = [
            (p["peak_memory_bytes"], p["peak_memory_bytes"] - p["memory_before_bytes"])
            for p in self._passes.values()
        ]
        return max(a for a, _ in peaks), max(b for _, b in peaks)

    def acceptance(self, category: str | None = None) -> Acceptance:
        """Of all requests, or of those of a category."""
        categories = self._results.prompts["categories"]
        requests = [RequestCounts(*r) for w in self._sample for r in w["requests"]]
        chosen = [
            r
            for r, c in zip(requests, categories, strict=True)
            if r.drafted and category in (None, c)
        ]
        return Acceptance(tuple(chosen))

    @property
    def _sample(self) -> list[Record]:
        """The waves that counts are taken from: rounds are kept of one pass only."""
        waves: list[Record] = self._passes[min(self._passes)]["waves"]
        return waves

    @cached_property
    def rounds(self) -> list[tuple[int, list[list[int]]]]:
        """Every round that drafted: k, and each row's (drafted, accepted)."""
        traced = [(k, r) for wave in self._sample for k, r in wave.get("rounds", ())]
        return [(k, rows) for k, rows in traced if k]

    @property
    def rows(self) -> list[list[int]]:
        """Each row of each round that was drafted for: (drafted, accepted)."""
        return [row for _, rows in self.rounds for row in rows if row[0]]

    @cached_property
    def parts(self) -> RoundParts | None:
        """Its rounds, taken apart."""
        return RoundParts.of(self._results.profiles.get(self.cell, []))

    @cached_property
    def cost(self) -> RoundCost | None:
        """What a round costs in plain steps of the same batch, where it is known."""
        k = self.cell.k
        plain = RoundParts.of(self._results.profiles.get(self.cell.plain, []))
        if not k or self.parts is None or plain is None or not plain.verify:
            return None
        step = plain.verify
        return RoundCost(self.parts.draft / k / step, self.parts.verify / step, k)

    @property
    def plain_step_ms(self) -> float | None:
        """A forward of one token per row, as profiled without a draft."""
        plain = RoundParts.of(self._results.profiles.get(self.cell.plain, []))
        return None if plain is None else plain.verify

    @property
    def predicted(self) -> float | None:
        """Speed-up by formula: expected tokens over k c + v (Leviathan et al. 2023).

        The acceptance is that of this cell; c and v are a draft step and the verify
        forward, in plain steps.
        """
        if self.cost is None or not self.rows:
            return None
        k = self.cell.k
        tokens = counts.expected_tokens(counts.chance(self.rows), k)
        return tokens / self.cost.of(k)

    def policies(self) -> dict[str, Policy]:
        """The counterfactuals, from the same accepted counts."""
        return {
            "every row cut to the batch's minimum": counts.batch_minimum(
                self.rounds, self.cost
            ),
            "per-sequence trim (what ran)": counts.per_sequence(self.rounds, self.cost),
            "per-sequence trim, oracle draft length": counts.oracle(
                self.rounds, self.cost
            ),
        }


class Figures:
    """The figures of a folder of results, cell by cell in the order of the recipe."""

    def __init__(self, results: Results):
        self.results = results
        recipe = dict(results.recipe)
        self.recipe = Recipe.of(recipe, name=recipe.pop("name"))
        units = list(units_of(self.recipe))
        self.missing = [unit for unit in units if not results.has(unit)]
        self.num_units = len(units)
        order = dict.fromkeys(unit.cell for unit in units)
        self.cells = {
            cell: CellFigures(results, cell)
            for cell in order
            if results.passes.get(cell)
        }
        conditions = [cell.conditions for cell in self.cells]
        self.among: dict[str, set[Any]] = {
            name: {getattr(c, name) for c in conditions}
            for name in Conditions.__dataclass_fields__
        }

    def find(self, cell: Cell) -> CellFigures | None:
        """The figures of a cell, if it was measured."""
        return self.cells.get(cell)

    def name(self, cell: Cell) -> str:
        """A cell as tables and plots name it."""
        return f"{cell.conditions.label(self.among)}: {cell.label}"

    @property
    def drafted(self) -> list[CellFigures]:
        """Cells of this engine with a draft."""
        return [f for c, f in self.cells.items() if _is_drafted(c)]

    @property
    def categories(self) -> list[str]:
        """The categories of the prompts, in their order."""
        named = self.results.prompts["categories"]
        return list(dict.fromkeys(c for c in named if c is not None))


def _is_drafted(cell: Cell) -> bool:
    return cell.system == "specdec" and cell.draft is not None
