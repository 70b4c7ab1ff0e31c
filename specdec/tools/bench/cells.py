"""The cells that a recipe measures, and their order. No mlx import here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Literal, TypeVar

from ...config import NumDraftTokens
from ...model_names import DraftSpec, short
from .recipe import Recipe

System = Literal["specdec", "mlx-lm step", "mlx-lm batch", "mlx-lm speculative"]

S = TypeVar("S")

#: Names of systems without a draft in reports.
_PLAIN = {
    "specdec": "specdec, no draft",
    "mlx-lm step": "mlx-lm, generate_step",
    "mlx-lm batch": "mlx-lm, batch_generate",
}


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that all compared systems share."""

    batch: int = 1
    temperature: float = 0.0
    kv_bits: int = 0
    context: int = 0
    prefix_cache: bool = False

    def named(self, names: Collection[str]) -> str:
        """The batch and the named conditions in words."""
        words = {
            "temperature": f"T = {self.temperature:g}",
            "kv_bits": f"KV {self.kv_bits} bits" if self.kv_bits else "KV as it is",
            "context": f"context {self.context}",
            "prefix_cache": "prefix cache" if self.prefix_cache else "no prefix cache",
        }
        shown = [text for name, text in words.items() if name in names]
        return ", ".join([f"batch {self.batch}", *shown])


@dataclass(frozen=True, kw_only=True)
class Cell(Conditions):
    """One system under some conditions.

    Args:
        num_draft_tokens: k; 0 is plain decoding, ``"auto"`` chooses k every round.
    """

    system: System
    draft: str | None = None
    num_draft_tokens: NumDraftTokens = 0

    @property
    def conditions(self) -> Conditions:
        """The conditions without the system."""
        return Conditions(**{f.name: getattr(self, f.name) for f in fields(Conditions)})

    def without_draft(self, system: System) -> Cell:
        """The given system without a draft, under the same conditions."""
        return replace(self, system=system, draft=None, num_draft_tokens=0)

    @property
    def plain(self) -> Cell:
        """This engine without a draft, under the same conditions."""
        return self.without_draft("specdec")

    @property
    def mlx_lm(self) -> Cell:
        """mlx-lm's usual decoding without a draft, under the same conditions."""
        return self.without_draft("mlx-lm step" if self.batch == 1 else "mlx-lm batch")

    @property
    def drafts(self) -> bool:
        """Whether this engine decodes with a draft."""
        return self.system == "specdec" and self.draft is not None

    @property
    def draft_name(self) -> str:
        """The draft's name in reports: of a path only the last part."""
        return short(self.draft or "none")

    @property
    def length(self) -> str:
        """The draft length in words."""
        auto = self.num_draft_tokens == "auto"
        return "auto" if auto else f"k = {self.num_draft_tokens}"

    @property
    def label(self) -> str:
        """System, draft and k."""
        if self.draft is None:
            return _PLAIN[self.system]
        name = "specdec" if self.system == "specdec" else "mlx-lm"
        return f"{name}, {self.draft_name}, {self.length}"


@dataclass(frozen=True)
class Unit:
    """The unit that is run and kept as a whole: a pass of a cell.

    Args:
        number: the number of the pass. Pass 0 does not count.
    """

    cell: Cell
    number: int

    @property
    def label(self) -> str:
        """The unit's name in progress messages."""
        unusual = {
            name: value
            for name, value in asdict(self.cell.conditions).items()
            if value != getattr(Conditions(), name)
        }
        return f"{self.cell.named(unusual)}: {self.cell.label}, pass {self.number}"


def turns(systems: Sequence[S], number: int) -> list[S]:
    """The order of systems in a pass: A B C, then B C A, then C A B, ...

    The machine's speed may drift meanwhile, which then affects all systems alike.
    """
    turn = number % len(systems)
    return [*systems[turn:], *systems[:turn]]


def conditions_of(recipe: Recipe) -> list[Conditions]:
    """All combinations of the sweep, except for draft lengths."""
    s = recipe.sweep
    names = ("context", "kv_bits", "prefix_cache", "temperature", "batch")
    combined = product(*(getattr(s, name) for name in names))
    return [Conditions(**dict(zip(names, each, strict=True))) for each in combined]


def cells_of(recipe: Recipe, conditions: Conditions) -> list[Cell]:
    """The cells that are compared under the given conditions."""
    plain = Cell(system="specdec", **asdict(conditions))
    cells = [plain.mlx_lm, plain] if recipe.run.mlx_lm else [plain]
    for draft, k in product(recipe.draft, recipe.sweep.num_draft_tokens):
        ours = replace(plain, draft=draft, num_draft_tokens=k)
        # mlx-lm speculates only with models, one row at a time, at fixed lengths.
        model = not DraftSpec.parse(draft).ngram
        if recipe.run.mlx_lm and conditions.batch == 1 and model and k != "auto":
            cells.append(replace(ours, system="mlx-lm speculative"))
        cells.append(ours)
    return cells


def units_of(recipe: Recipe) -> Iterator[Unit]:
    """All units in the order in which they run; systems of one group take turns.

    Each pass covers all cells, so that a stopped run has some results of each.
    """
    groups = [cells_of(recipe, conditions) for conditions in conditions_of(recipe)]
    for number in range(recipe.run.repeat + 1):
        for cells in groups:
            yield from (Unit(cell, number) for cell in turns(cells, number))
