"""What a recipe measures, one cell at a time, and in which order. No mlx here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from ...config import NumDraftTokens
from ...draft_names import DraftSpec
from ...model_names import short
from .recipe import WRONG, Recipe
from .tables import turns

System = Literal["specdec", "mlx-lm step", "mlx-lm batch", "mlx-lm speculative"]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all systems that are compared have in common."""

    batch: int = 1
    temperature: float = 0.0
    kv_bits: int = 0
    context: int = 0
    prefix_cache: bool = False
    load: float = 0.0

    def label(self, among: Mapping[str, set[Any]]) -> str:
        """The conditions by name, those that differ ``among`` all; the batch always."""
        return ", ".join([f"batch {self.batch}", *self.besides_batch(among)])

    def besides_batch(self, among: Mapping[str, set[Any]]) -> list[str]:
        """The same without the batch, each condition for itself."""
        words = []
        if len(among["temperature"]) > 1:
            words.append(f"T = {self.temperature:g}")
        if len(among["kv_bits"]) > 1:
            words.append(f"KV {self.kv_bits} bits" if self.kv_bits else "KV as it is")
        if len(among["context"]) > 1:
            words.append(f"context {self.context}")
        if len(among["prefix_cache"]) > 1:
            words.append("prefix cache" if self.prefix_cache else "no prefix cache")
        if len(among["load"]) > 1:
            words.append(f"load {self.load:g}" if self.load else "all at once")
        return words


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One system under some conditions.

    Args:
        num_draft_tokens: k; 0 decodes plainly, ``"auto"`` is chosen round by round.
    """

    system: System
    conditions: Conditions
    draft: str | None = None
    num_draft_tokens: NumDraftTokens = 0

    @property
    def k(self) -> int:
        """The draft length, where it is one number."""
        assert self.num_draft_tokens != "auto"
        return self.num_draft_tokens

    @property
    def plain(self) -> Cell:
        """This engine without a draft, under the same conditions."""
        return Cell(system="specdec", conditions=self.conditions)

    @property
    def mlx_lm(self) -> Cell:
        """mlx-lm's batched decoding, under the same conditions."""
        return Cell(system="mlx-lm batch", conditions=self.conditions)

    @property
    def draft_name(self) -> str:
        """The draft as reports name it: of a path, the last part."""
        name = self.draft or "none"
        if name.startswith(WRONG):
            return WRONG + short(name.removeprefix(WRONG))
        return short(name)

    @property
    def label(self) -> str:
        """System, draft and k."""
        if self.system in ("mlx-lm batch", "mlx-lm step"):
            return "mlx-lm"
        if self.draft is None:
            return "specdec, no draft"
        name = "specdec" if self.system == "specdec" else "mlx-lm"
        if self.num_draft_tokens == "auto":
            return f"{name}, {self.draft_name}, auto"
        return f"{name}, {self.draft_name}, k = {self.num_draft_tokens}"

    def to_dict(self) -> dict[str, Any]:
        """Flat, as in a raw result."""
        flat = asdict(self)
        return {**flat.pop("conditions"), **flat}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Cell:
        """From a raw result."""
        named = dict(flat)
        # What older results do not name was as it is by default.
        known = Conditions.__dataclass_fields__
        shared = {k: named.pop(k) for k in known if k in named}
        return cls(conditions=Conditions(**shared), **named)


@dataclass(frozen=True)
class Unit:
    """What is run, and kept, at a time: one pass of a cell, or its profile.

    Args:
        number: of the pass; ``None`` for the profile. Pass 0 does not count.
    """

    cell: Cell
    number: int | None

    @property
    def label(self) -> str:
        """What progress calls it."""
        what = "profile" if self.number is None else f"pass {self.number}"
        c = self.cell.conditions
        extra = f", KV {c.kv_bits} bits" if c.kv_bits else ""
        extra += f", T = {c.temperature:g}" if c.temperature else ""
        extra += f", context {c.context}" if c.context else ""
        extra += ", prefix cache" if c.prefix_cache else ""
        extra += f", load {c.load:g}" if c.load else ""
        return f"batch {c.batch}{extra}: {self.cell.label}, {what}"


def conditions_of(recipe: Recipe) -> list[Conditions]:
    """All combinations of the sweep, but for draft lengths."""
    s = recipe.sweep
    return [
        Conditions(
            context=context,
            kv_bits=kv_bits,
            prefix_cache=prefix_cache,
            temperature=temperature,
            batch=batch,
            load=load,
        )
        # A load is a share of what the job of load 0 came to.
        for load, context, kv_bits, prefix_cache, temperature, batch in product(
            sorted(s.load), s.context, s.kv_bits, s.prefix_cache, s.temperature, s.batch
        )
    ]


def cells_of(recipe: Recipe, conditions: Conditions) -> list[Cell]:
    """The systems that are compared under some conditions."""
    plain = Cell(system="specdec", conditions=conditions)
    jobs = recipe.run.jobs
    theirs = plain.mlx_lm
    if jobs and conditions.batch == 1:
        theirs = replace(theirs, system="mlx-lm step")
    cells = [theirs, plain] if recipe.run.mlx_lm else [plain]
    for draft, k in product(recipe.draft, recipe.sweep.num_draft_tokens):
        ours = replace(plain, draft=draft, num_draft_tokens=k)
        # mlx-lm speculates with models, one row at a time.
        model = not draft.startswith(WRONG) and not DraftSpec.parse(draft).ngram
        alone = conditions.batch == 1 and model
        if recipe.run.mlx_lm and alone and k != "auto":
            cells.append(replace(ours, system="mlx-lm speculative"))
        cells.append(ours)
    return cells


def units_of(recipe: Recipe) -> Iterator[Unit]:
    """All that is run, in order: systems of one group take turns."""
    if recipe.run.jobs:
        yield from _jobs_of(recipe)
        return
    for conditions in conditions_of(recipe):
        cells = cells_of(recipe, conditions)
        for number, cell in turns(cells, recipe.run.repeat + 1):
            yield Unit(cell, number)
        if recipe.run.profile_rounds:
            yield from (Unit(c, None) for c in cells if c.system == "specdec")


def _jobs_of(recipe: Recipe) -> Iterator[Unit]:
    """Pass after pass of everything, so that a run that is stopped has some of all.

    Jobs under a load come last, once each: what was new to the machine no longer is.
    """
    groups = [cells_of(recipe, conditions) for conditions in conditions_of(recipe)]
    for number in range(recipe.run.repeat + 1):
        for cells in groups:
            if not cells[0].conditions.load:
                turn = number % len(cells)
                ordered = [*cells[turn:], *cells[:turn]]
                yield from (Unit(cell, number) for cell in ordered)
    for cells in groups:
        if cells[0].conditions.load:
            yield from (Unit(cell, 1) for cell in cells)
