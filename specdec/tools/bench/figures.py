"""Figures computed from the raw results of a recipe. No mlx here."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from ...request import acceptance_length, acceptance_rate
from .cells import Cell, Conditions, units_of
from .job import JobRecord, RequestRecord, RoundTimes
from .raw import Results
from .recipe import Recipe

# Factor by which noisy passes can make a system seem faster than its tokens per round.
NOISE = 1.25


def by_position(rows: Iterable[Sequence[int]]) -> list[float]:
    """The share of rounds that accept the draft's first 1, 2, ... tokens.

    Each is a product of the chances that a token is accepted after all before it
    (Kaplan and Meier 1958). So it never rises with the position, although some rounds
    draft fewer tokens, as at the end of a request.

    Args:
        rows: numbers of drafted and accepted tokens of each row in each round.
    """
    tried: list[int] = []
    accepted: list[int] = []
    for drafted, accepted_tokens in rows:
        more = [0] * (drafted - len(tried))
        tried, accepted = tried + more, accepted + more
        for j in range(min(drafted, accepted_tokens + 1)):
            tried[j] += 1
            accepted[j] += j < accepted_tokens
    shares, share = [], 1.0
    for n, of in zip(accepted, tried, strict=True):
        share *= n / of if of else 0.0
        shares.append(share)
    return shares


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of the drafted tokens of some requests.

    Args:
        requests: the requests for which anything was drafted.
    """

    requests: tuple[RequestRecord, ...]

    @property
    def rounds(self) -> int:
        """Rounds of all requests, counted per row."""
        return sum(r.rounds for r in self.requests)

    @property
    def drafted(self) -> int:
        """Draft tokens of all requests."""
        return sum(r.drafted for r in self.requests)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all requests."""
        return sum(r.accepted for r in self.requests)

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens of all requests together."""
        return acceptance_rate(self.drafted, self.accepted)

    @property
    def length(self) -> float:
        """Mean tokens of a row in a round, including the extra one; 1 if no rounds."""
        return acceptance_length(self.rounds, self.accepted)


class CellFigures:
    """The figures of one cell.

    Args:
        results: the results of the recipe.
        cell: a cell that has at least one pass.
    """

    def __init__(self, results: Results, cell: Cell):
        self.cell = cell
        self._results = results
        self._passes = results.passes[cell]

    @property
    def cold(self) -> JobRecord | None:
        """Pass 0, if it was run."""
        return self._passes.get(0)

    @property
    def counted(self) -> list[JobRecord]:
        """The passes that count."""
        return [p for n, p in sorted(self._passes.items()) if n]

    # -- speed -----------------------------------------------------------------

    @cached_property
    def rates(self) -> dict[int, float]:
        """Tokens per second of each pass that counts, over the whole job."""
        return {n: p.rate for n, p in sorted(self._passes.items()) if n}

    @property
    def rate(self) -> float:
        """The median of :attr:`rates`; 0 without any."""
        return statistics.median(self.rates.values()) if self.rates else 0.0

    @property
    def idle_draft(self) -> bool:
        """Whether the cell has a draft that proposed nothing: its gain is noise."""
        return self.cell.draft is not None and not self.acceptance().drafted

    def ratios(self, other: CellFigures | None) -> list[float]:
        """The cell's rates divided by another cell's, pass by pass."""
        if other is None:
            return []
        pairs = [(r, other.rates.get(n)) for n, r in self.rates.items()]
        return [a / b for a, b in pairs if b]

    def can_be(self, ratio: float) -> bool:
        """Whether the cell can be ``ratio`` times as fast as plain decoding.

        A round takes at least as long as a plain step. So the ratio cannot exceed the
        tokens per round, apart from noise.
        """
        return ratio <= NOISE * self.acceptance().length

    @property
    def first_token_ms(self) -> list[float]:
        """For each request, the milliseconds to its first token."""
        return [1e3 * r.first for p in self.counted for r in p.requests]

    @property
    def token_ms(self) -> list[float]:
        """Milliseconds per token after the first, for each request with two or more."""
        return [
            1e3 * (r.ended - r.first) / (r.tokens - 1)
            for p in self.counted
            for r in p.requests
            if r.tokens > 1
        ]

    @property
    def round_ms(self) -> float | None:
        """Median time of rounds of the commonest k, away from joins if possible."""
        groups: dict[tuple[int, int], list[RoundTimes]] = defaultdict(list)
        for each in (each for p in self.counted for each in p.rounds):
            groups[each.k, each.near_join].append(each)
        best = max(
            groups.values(),
            key=lambda g: (not g[0].near_join, sum(r.number for r in g)),
            default=None,
        )
        return None if best is None else statistics.median(r.p50 for r in best)

    @property
    def peak_bytes(self) -> tuple[int, int]:
        """The largest peak memory, and the largest increase over the memory before."""
        peaks = [
            (p.peak_memory_bytes, p.peak_memory_bytes - p.memory_before_bytes)
            for p in self._passes.values()
        ]
        return max(a for a, _ in peaks), max(b for _, b in peaks)

    def equal_to(self, other: CellFigures | None) -> str | None:
        """How many requests have the same tokens as in another cell, as "N of M"."""
        if other is None:
            return None
        ours, theirs = (f._passes[max(f._passes)].requests for f in (self, other))
        if len(ours) != len(theirs):
            return None
        pairs = zip(ours, theirs, strict=True)
        return f"{sum(a.digest == b.digest for a, b in pairs)} of {len(ours)}"

    # -- acceptance ------------------------------------------------------------

    def acceptance(self, category: str | None = None) -> Acceptance:
        """Acceptance over all requests of the last pass, or over one category's."""
        requests: Sequence[RequestRecord] = self._passes[max(self._passes)].requests
        if category is not None:
            categories = self._results.prompts.categories
            n, m = len(categories), len(requests)
            # A job of few rows has only some of the prompts.
            own_categories = (categories[i * n // m] for i in range(m))
            pairs = zip(requests, own_categories, strict=True)
            requests = [r for r, c in pairs if c == category]
        return Acceptance(tuple(r for r in requests if r.drafted))

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """(drafted, accepted) of each row in each round that drafted for it."""
        # Single rounds are kept only of a first pass.
        first = self._passes[min(self._passes)]
        return [row for _, rows in first.traced for row in rows if row[0]]


class Figures:
    """The figures of a folder of results, cell by cell in the order of the recipe.

    Args:
        results: the results of a recipe.

    Attributes:
        varied: names of the conditions that differ between cells.
        missing: units of the recipe that have no results yet.
    """

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
        self.varied = {
            field.name
            for field in fields(Conditions)
            if len({getattr(cell, field.name) for cell in self.cells}) > 1
        }

    def name(self, cell: Cell) -> str:
        """The name of a cell in tables."""
        return f"{cell.named(self.varied)}: {cell.label}"

    def plain(self, of: CellFigures) -> CellFigures | None:
        """This engine without a draft, under the same conditions."""
        return self.cells.get(of.cell.plain)

    def mlx_lm(self, of: CellFigures) -> CellFigures | None:
        """mlx-lm without a draft, under the same conditions."""
        return self.cells.get(of.cell.mlx_lm)

    @property
    def drafted(self) -> list[CellFigures]:
        """Cells in which this engine decodes with a draft."""
        return [f for f in self.cells.values() if f.cell.drafts]

    @property
    def categories(self) -> list[str]:
        """The categories of the prompts, in the order in which they first appear."""
        named = self.results.prompts.categories
        return list(dict.fromkeys(c for c in named if c is not None))
