"""Prefixes of the rows that a model is about to prefill: found, restored, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.nn as nn

from .entries import Kind, Plan, block_start, place_key, salted
from .radix import common_length
from .signature import KnownWeights, signature
from .snapshot import Form, Piece, cut, refill
from .store import Place, PrefixStore


class ModelPrefixes:
    """The part of a store that belongs to one model.

    Args:
        store: shared by the models of a run.
        model: whose weights and arguments are in the signature.
        name: the name that the user gave.
        caches: makes those of a row, with a token written to them, as the model's rows
            have them; only their kinds, types and shapes are looked at.
        beside: a model whose caches are kept with the model's; ``None``: there is none.
    """

    def __init__(
        self,
        store: PrefixStore,
        model: nn.Module,
        name: str,
        caches: Callable[[], list[Any]],
        beside: nn.Module | None = None,
    ):
        self.store = store
        self.name = name.encode("utf-8", "replace").decode()
        self._caches = caches
        self._models = [model] if beside is None else [model, beside]
        self._weights = [KnownWeights(each) for each in self._models]
        self._describe()

    def _describe(self) -> None:
        caches = self._caches()
        each = [signature(model, caches) for model in self._models]
        # Of one model, its own, as files have it.
        self._signature = each[0] if len(each) == 1 else place_key(each[0], each[1:])
        self.form = Form.of(caches)

    @property
    def is_shared(self) -> bool:
        """Whether caches of another model are kept with the model's."""
        return len(self._models) > 1

    @property
    def signature(self) -> str:
        """What the model's entries begin with: another one for other weights."""
        found = [weights.replaced() for weights in self._weights]  # each notes it
        if any(found):
            self._describe()
        return self._signature

    def begin(
        self, prompts: Sequence[Sequence[int]], *, max_write: int
    ) -> PrefixSession:
        """A session for rows with these prompts.

        Args:
            max_write: of their caches during prefill.
        """
        return PrefixSession(self, [tuple(p) for p in prompts], max_write)


NOTHING: Plan[Piece] = Plan(0)


@dataclass
class _Row:
    """What is known of a row's prefix.

    Args:
        keys: of the places at the ends of its blocks so far, the root first.
        plan: what restores it; emptied when that is done.
        reused: tokens restored.
        slack: ends before ``reused`` that its rings could go back to.
        shared: tokens in common with some stored prompt.
        covered: tokens that stored blocks hold.
        branch: where it parts from the other prompts known; 0 for nowhere.
    """

    tokens: tuple[int, ...]
    keys: list[str]
    plan: Plan[Piece] = NOTHING
    reused: int = 0
    slack: int = 0
    shared: int = 0
    covered: int = 0
    branch: int = 0

    @property
    def root(self) -> str:
        """What its entries begin with: the signature, or another one by its salt."""
        return self.keys[0]


class PrefixSession:
    """Takes rows through their prefill: find, refill, and record chunk by chunk."""

    def __init__(
        self, prefixes: ModelPrefixes, prompts: list[tuple[int, ...]], max_write: int
    ):
        self._prefixes = prefixes
        self._store = prefixes.store
        self._max_write = max_write
        self._signature = prefixes.signature
        self._rows = [_Row(tokens, [self._signature]) for tokens in prompts]

    def separate(self, salts: Sequence[str | None]) -> None:
        """Have each row find and keep prefixes of its own salt alone; first of all."""
        for row, salt in zip(self._rows, salts, strict=True):
            row.keys = [salted(self._signature, salt)]

    @property
    def reused(self) -> list[int]:
        """Tokens of every row that need no prefill."""
        return [row.reused for row in self._rows]

    @property
    def stops(self) -> list[int]:
        """Where a chunk of each row has to end; 0 for nowhere.

        States can only be kept where a chunk ends.
        """
        states = bool(self._prefixes.form.states)
        return [row.branch if states else 0 for row in self._rows]

    def find(self) -> Iterator[None]:
        """Look the prompts up, yielding after each that had something to load."""
        if self._is_outdated:
            return
        form = self._prefixes.form
        self._store.refresh()
        for row in self._rows:
            found = self._store.lookup(row.root, row.tokens, form)
            row.plan, row.shared = found.plan, found.shared
            row.covered = found.covered
            row.reused = found.plan.length
            ring = found.plan.ring
            row.slack = 0 if ring is None else row.reused - (ring.end - ring.slack)
            if row.reused:
                yield
        if form.has_ends:
            self._find_branches()

    @property
    def _is_outdated(self) -> bool:
        """Whether weights were replaced since these rows began.

        What they hold then is of two models, and of no use to others.
        """
        return self._prefixes.signature != self._signature

    def _find_branches(self) -> None:
        """Where a prompt parts from those stored, and from the others beside it.

        A ring that is kept there serves the next prompt that begins like these.
        """
        ordered = sorted(self._rows, key=lambda row: (row.root, row.tokens))
        for row in ordered:
            row.branch = row.shared
        for one, other in pairwise(ordered):
            if one.root != other.root:
                continue
            shared = common_length(one.tokens, other.tokens)
            one.branch = max(one.branch, shared)
            other.branch = max(other.branch, shared)
        for row in ordered:
            if row.branch < self._store.min_length:
                row.branch = 0

    def refill(self, caches: list[Any]) -> list[Any]:
        """Caches like these with the prefixes that were found."""
        plans = [row.plan for row in self._rows]
        for row in self._rows:
            row.plan = NOTHING
        return refill(caches, plans) if any(p.length for p in plans) else caches

    def record(
        self, caches: list[Any], before: Sequence[int], after: Sequence[int], width: int
    ) -> None:
        """Keep what a chunk of prefill has completed.

        Args:
            caches: after the chunk, its padding taken back.
            before, after: tokens of every row before and after it.
            width: columns that it wrote to every row.
        """
        if self._is_outdated:
            return
        for i, (row, first, last) in enumerate(
            zip(self._rows, before, after, strict=True)
        ):
            for end, kinds in self._ends(row, first, last):
                # What padding has overwritten, and what was never restored.
                slack = min(
                    self._max_write - (first + width - end),
                    end - row.reused + row.slack,
                )
                if self._prefixes.form.states:
                    slack = 0
                for kind in kinds:
                    start = block_start(end, self._store.block_size)
                    self._store.insert(
                        self._place(row, start, end),
                        kind,
                        partial(
                            cut, caches, i, kind, start, end, slack * (kind == "ring")
                        ),
                    )

    def _ends(
        self, row: _Row, first: int, last: int
    ) -> Iterator[tuple[int, list[Kind]]]:
        """Ends of entries in ``first + 1 .. last``, ascending, and their kinds.

        States are those at the end of the chunk.
        """
        size, whole = self._store.block_size, len(row.tokens)
        form = self._prefixes.form
        ends = {*range(first - first % size + size, last + 1, size)}
        served = [last] if form.states else [row.branch, whole]
        ends |= {end for end in (*served, whole) if first < end <= last}
        for end in sorted(ends):
            kinds: list[Kind] = []
            # At the prompt's end a block may be half of one that is there.
            if end % size == 0 or (end == whole and row.covered < whole):
                kinds.append("block")
            if form.has_ends and end in served:
                kinds.append("ring")
            yield end, kinds

    def _place(self, row: _Row, start: int, end: int) -> Place:
        size = self._store.block_size
        while len(row.keys) <= start // size:
            at = (len(row.keys) - 1) * size
            row.keys.append(place_key(row.keys[-1], row.tokens[at : at + size]))
        parent = row.keys[start // size]
        return Place(
            path=(row.root, *row.tokens[:end]),
            key=place_key(parent, row.tokens[start:end]),
            parent=parent,
            start=start,
            model=self._prefixes.name,
        )
