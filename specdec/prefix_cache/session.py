"""Finds, restores and records prefixes of the rows that a model prefills."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.nn as nn

from .entries import Kind, Plan, apart, block_start, place_key
from .radix import common_length
from .signature import KnownWeights, signature
from .snapshot import Form, Piece, cut, refill
from .store import Place, PrefixStore


class ModelPrefixes:
    """The part of a store that belongs to one model.

    Args:
        store: shared by the models of a run.
        model: its weights and arguments are in the signature.
        name: the name that the user gave.
        caches: makes the caches of one row, like those of the model's rows, with a
            token written to them; only their kinds, types and shapes are used.
        beside: a second model whose caches are stored with the model's; ``None``: none.
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
        # The entries of a single model are stored under its own signature.
        self._signature = each[0] if len(each) == 1 else place_key(each[0], each[1:])
        self.form = Form.of(caches)

    @property
    def is_shared(self) -> bool:
        """Whether caches of another model are stored with the model's."""
        return len(self._models) > 1

    @property
    def signature(self) -> str:
        """The signature that the model's entries begin with; new weights change it."""
        replaced = [weights.replaced() for weights in self._weights]  # updates each one
        if any(replaced):
            self._describe()
        return self._signature

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_write: int,
        branches: Sequence[int] = (),
    ) -> PrefixSession:
        """A session for rows with these prompts.

        Args:
            max_write: ``max_write`` of the rows' caches during prefill.
            branches: where later prompts are likely to diverge from each; 0: nowhere.
        """
        rows = [tuple(p) for p in prompts]
        return PrefixSession(self, rows, max_write, branches or [0] * len(rows))


NOTHING: Plan[Piece] = Plan(0)


@dataclass
class _Row:
    """What is known about a row's prefix.

    Args:
        keys: keys of the places where its blocks so far end; the root comes first.
        plan: the entries that restore the prefix; emptied when that is done.
        reused: tokens restored.
        slack: how many tokens its rings could go back from ``reused``.
        shared: tokens in common with a stored prompt.
        covered: tokens that stored blocks hold.
        branch: where it diverges from other prompts; 0: nowhere.
        answers: the signature that entries of its client alone begin with.
        private: where these entries begin; ``None``: all are shared.
    """

    tokens: tuple[int, ...]
    keys: list[str]
    answers: str
    plan: Plan[Piece] = NOTHING
    reused: int = 0
    slack: int = 0
    shared: int = 0
    covered: int = 0
    branch: int = 0
    private: int | None = None

    @property
    def root(self) -> str:
        """The signature that its entries begin with, salted if the row has a salt."""
        return self.keys[0]

    def keep_private(self, start: int, size: int) -> None:
        """Store what follows ``start``, where a block begins, for its client alone."""
        if self.answers == self.root or self.private is not None:
            return
        del self.keys[start // size + 1 :]
        self.private = start
        if not start:
            self.keys = [self.answers]


class PrefixSession:
    """Takes rows through their prefill: find, refill, and record chunk by chunk."""

    def __init__(
        self,
        prefixes: ModelPrefixes,
        prompts: list[tuple[int, ...]],
        max_write: int,
        branches: Sequence[int],
    ):
        self._prefixes = prefixes
        self._store = prefixes.store
        self._max_write = max_write
        self._signature = prefixes.signature
        signature = self._signature
        self._rows = [
            _Row(tokens, [signature], signature, branch=branch)
            for tokens, branch in zip(prompts, branches, strict=True)
        ]

    def separate(
        self, salts: Sequence[str | None], clients: Sequence[str | None]
    ) -> None:
        """Let each row use only prefixes of its own salt, and its client's answers.

        Call this first.
        """
        for row, salt, client in zip(self._rows, salts, clients, strict=True):
            row.keys = [apart(self._signature, "salt", salt)]
            row.answers = apart(row.root, "client", client)

    @property
    def reused(self) -> list[int]:
        """Tokens of every row that need no prefill."""
        return [row.reused for row in self._rows]

    @property
    def stops(self) -> list[int]:
        """Where a chunk of each row has to end; 0: nowhere.

        Recurrent states can only be stored where a chunk ends.
        """
        states = bool(self._prefixes.form.states)
        return [row.branch if states else 0 for row in self._rows]

    def find(self, without: Collection[int] = ()) -> Iterator[None]:
        """Look the prompts up, yielding after each one whose prefix was loaded.

        Args:
            without: rows that are computed from their first token on.
        """
        if self._is_outdated:
            return
        form = self._prefixes.form
        self._store.refresh()
        for i, row in enumerate(self._rows):
            if i in without:
                continue
            match = self._store.lookup(row.root, row.tokens, form, row.answers)
            if match.private is not None:
                row.keep_private(match.private, self._store.block_size)
            row.plan, row.shared = match.plan, match.shared
            row.covered = match.covered
            row.reused = match.plan.length
            ring = match.plan.ring
            row.slack = 0 if ring is None else row.reused - (ring.end - ring.slack)
            if row.reused:
                yield
        if form.has_ends:
            self._find_branches()

    @property
    def _is_outdated(self) -> bool:
        """Whether weights were replaced since these rows began.

        Their caches then mix two sets of weights and are not stored.
        """
        return self._prefixes.signature != self._signature

    def _find_branches(self) -> None:
        """Note where each prompt diverges from stored prompts and from other rows.

        A ring that is stored there serves the next prompt with the same beginning.
        """
        ordered = sorted(self._rows, key=lambda row: (row.root, row.tokens))
        for row in ordered:
            row.branch = max(row.branch, row.shared)
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
        """Caches like ``caches`` that hold the prefixes that were found."""
        plans = [row.plan for row in self._rows]
        for row in self._rows:
            row.plan = NOTHING
        return refill(caches, plans) if any(p.length for p in plans) else caches

    def record(
        self, caches: list[Any], before: Sequence[int], after: Sequence[int], width: int
    ) -> None:
        """Store the entries that a chunk of prefill has completed.

        Args:
            caches: the rows' caches after the chunk, its padding trimmed.
            before, after: tokens of every row before and after the chunk.
            width: columns that the chunk wrote to every row.
        """
        if self._is_outdated:
            return
        for i, (row, first, last) in enumerate(
            zip(self._rows, before, after, strict=True)
        ):
            for end, kinds in self._ends(row, first, last):
                # Padding has overwritten the oldest columns of a ring, and restored
                # rings begin late.
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

    def finish(
        self,
        number: int,
        caches: list[Any],
        slot: int,
        answer: Sequence[int],
        begin: int,
        *,
        before: bool,
    ) -> None:
        """Store the tokens of a row that has ended; nothing waits for the device.

        Args:
            number: the row among those of this session.
            caches: caches that hold the row now.
            slot: the row in ``caches``.
            answer: keys of the tokens after the prompt.
            begin: the length of the prompt. If the row did not take it in, nothing is
                stored.
            before: recurrent states are those before the last write.
        """
        row, size = self._rows[number], self._store.block_size
        if self._is_outdated or len(row.tokens) != begin:
            return
        row.tokens += tuple(answer)
        first, end = begin - begin % size, len(row.tokens)
        row.keep_private(first, size)
        for start in range(first, end, size):
            last = min(start + size, end)
            kinds: list[Kind] = ["block"]
            if self._prefixes.form.has_ends and last == end:
                kinds.append("ring")
            for kind in kinds:
                copy = partial(
                    cut, caches, slot, kind, start, last, 0, before=before, waits=False
                )
                place = self._place(row, start, last)
                self._store.insert(place, kind, copy, computed=False)

    def _ends(
        self, row: _Row, first: int, last: int
    ) -> Iterator[tuple[int, list[Kind]]]:
        """Ends of entries in ``first + 1 .. last``, ascending, and their kinds.

        Recurrent states exist only at the end of the chunk.
        """
        size, whole = self._store.block_size, len(row.tokens)
        form = self._prefixes.form
        ends = {*range(first - first % size + size, last + 1, size)}
        served = [last] if form.states else [row.branch, whole]
        ends |= {end for end in (*served, whole) if first < end <= last}
        for end in sorted(ends):
            kinds: list[Kind] = []
            # The block at the prompt's end is partial: a stored one may cover it.
            if end % size == 0 or (end == whole and row.covered < whole):
                kinds.append("block")
            if form.has_ends and end in served:
                kinds.append("ring")
            yield end, kinds

    def _place(self, row: _Row, start: int, end: int) -> Place:
        size = self._store.block_size
        while len(row.keys) <= start // size:
            at = (len(row.keys) - 1) * size
            row.keys.append(self._key(row, at, at + size))
        private = row.private is not None and start >= row.private
        return Place(
            path=(row.answers if private else row.root, *row.tokens[:end]),
            key=self._key(row, start, end),
            parent=row.keys[start // size],
            start=start,
            model=self._prefixes.name,
        )

    def _key(self, row: _Row, start: int, end: int) -> str:
        tokens: tuple[int | str, ...] = row.tokens[start:end]
        if start and start == row.private:  # it stands on a shared entry
            tokens = row.answers, *tokens
        return place_key(row.keys[start // self._store.block_size], tokens)
