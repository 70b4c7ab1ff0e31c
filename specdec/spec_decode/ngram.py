"""Prompt lookup: what followed the newest tokens when they occurred before.

(Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023, "Inference with
reference".) No model, and nothing leaves the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..backend import defaults
from ..cuda import ngram_kernel
from ..errors import ConfigError
from ..utils.checks import require, require_int
from . import ngram_search
from .drafter import Proposals, Round
from .ngram_search import EMPTY, Lookup, read, ring_of, write
from .ngram_shared import NgramTable
from .ready import Ready
from .rejection_sampler import Verdict
from .vetting import ours

_MIN_CAPACITY = 256
_TABLE_BYTES = 8 << 20
# Rounds that look nothing up, of which the tokens are handed over together: a hand-over
# takes the host tens of microseconds. What lives on meanwhile are a few small arrays.
_TOGETHER = 8


@dataclass(frozen=True, kw_only=True)
class NgramOptions:
    """How n-grams are looked up.

    Args:
        max_ngram, min_ngram: most and fewest of the newest tokens that must have
            occurred before; the longest match is taken, of equals the newest.
        max_history: newest tokens of a row that are searched. A round's cost
            grows with ``max_ngram`` times this.
        shared: where a row's own tokens have no match, look in those of other
            rows and of finished requests (the newest 65536 of all).

    Raises:
        ConfigError: a value is out of range.
    """

    max_ngram: int = 4
    min_ngram: int = 2
    max_history: int = 8192
    shared: bool = False

    def __post_init__(self) -> None:
        require_int("min_ngram", self.min_ngram, 1)
        require_int("max_ngram", self.max_ngram, self.min_ngram)
        require_int("max_history", self.max_history, _MIN_CAPACITY)
        require(
            self.max_ngram < _MIN_CAPACITY,
            "max_ngram",
            self.max_ngram,
            f"less than {_MIN_CAPACITY}",
        )

    def nbytes(self, num_rows: int) -> int:
        """Most bytes that looking up takes for so many rows, measured and rounded up.

        Comparing a slot with each of the newest tokens takes 8 bytes, what is made
        of that 32; the shared table is held twice while it changes.
        """
        slot = 32 + 8 * self.max_ngram
        table = _TABLE_BYTES if self.shared else 0
        return num_rows * self.max_history * slot + table


class NgramDrafter:
    """Proposes what followed a row's newest tokens when they occurred before.

    A row without a match proposes nothing, and nothing is counted for it.

    Args:
        options: how to look.

    Raises:
        ConfigError: ``options`` are something else.
    """

    context_length: int | None = None
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, options: NgramOptions | None = None):
        if not isinstance(options, NgramOptions | None):
            raise ConfigError(
                f"NgramDrafter takes NgramOptions, not a {type(options).__name__}: a "
                "decoder wants drafter='ngram', or a function that makes one"
            )
        self.options = options or NgramOptions()
        self.table = NgramTable() if self.options.shared else None
        kernels = defaults().kernels and ngram_kernel.proven(
            ngram_search.search, ngram_search.keep
        )
        self.lookup: Lookup = ngram_kernel if kernels else ngram_search

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> NgramRows:
        """Begin rows for ``prompts``."""
        return NgramRows(self, prompts, max_length)


@ours
class NgramRows:
    """The tokens of some rows, searched in every round.

    Args:
        drafter: how to look, and where else.
        prompts: of the rows.
        max_length: tokens that the longest row can ever hold.
    """

    def __init__(
        self, drafter: NgramDrafter, prompts: Sequence[Sequence[int]], max_length: int
    ):
        self._options = drafter.options
        self._table = drafter.table
        self._lookup = drafter.lookup
        self._prompts: Sequence[Sequence[int]] = prompts
        # Most tokens that a row can hold, its first one included.
        self._longest = max(map(len, prompts)) + 1
        self._ring = ring_of(prompts, self._capacity(self._longest))
        # Rounds kept since the ring was last handed over; a look-up computes it, too.
        self._unwritten = 0

    def prefill(self) -> Iterator[None]:
        """Show the prompts to the other rows."""
        if self._table is not None:
            for prompt in self._prompts:
                tokens = [EMPTY] * self._table.context_size + list(prompt)
                self._table.add(mx.array([tokens]), mx.array([len(prompt)]))
        self._prompts = ()
        return iter(())

    def propose(self, round_: Round) -> Proposals:
        """Continue the longest, then newest match of every row."""
        options = self._options
        self._unwritten = 0
        self._reserve(self._longest)
        inputs, lengths = self._lookup.search(
            self._ring,
            round_.lengths,
            round_.recent,
            round_.num_draft_tokens,
            max_ngram=options.max_ngram,
            min_ngram=options.min_ngram,
        )
        if self._table is None:
            return Ready.within(inputs, lengths=lengths)
        return self._shared(self._table, round_, inputs[:, 1:], lengths)

    def _shared(
        self, table: NgramTable, round_: Round, tokens: mx.array, lengths: mx.array
    ) -> Proposals:
        """What was found, and where nothing was, what followed in other rows."""
        # The prompts' first token comes with the first round; later it is there.
        newest = round_.recent[:, -1:]
        self._ring = write(self._ring, round_.lengths - 1, newest, 1)
        context = self._newest(round_.lengths, table.context_size)
        followed, count = table.follow(context, round_.num_draft_tokens)
        found = lengths > 0
        # In empty slots, too, there has to be a token.
        tokens = mx.where(found[:, None], tokens, mx.maximum(followed, 0))
        return Proposals(
            tokens, lengths=mx.where(found, lengths, count).astype(mx.int32)
        )

    def peek(self, round_: Round) -> Proposals | None:
        """The same, in a round that does not draft; not with a shared table.

        Looking in that takes several times as long.
        """
        return None if self._table is not None else self.propose(round_)

    def commit(self, round_: Round, verdict: Verdict) -> None:
        """Take what was kept."""
        width = verdict.chosen.shape[1]
        self._reserve(self._longest + width)
        self._longest += width
        self._ring = self._lookup.keep(
            self._ring, round_.lengths, round_.recent, verdict.chosen, verdict.kept
        )
        if self._table is not None:
            before = self._newest(round_.lengths, self._table.context_size)
            new = mx.concatenate([before, verdict.chosen], axis=1)
            self._table.add(new, verdict.kept)
        self._unwritten += 1
        # Else the graph of every round that looks nothing up would live on.
        if self._unwritten >= _TOGETHER:
            mx.async_eval(self._ring)
            self._unwritten = 0

    def _newest(self, lengths: mx.array, n: int) -> mx.array:
        """The newest ``n`` tokens of rows of those lengths, shape (B, n)."""
        return read(self._ring, lengths[:, None] - n + mx.arange(n))

    def observe(self, hidden: mx.array, lengths: Sequence[int]) -> None:
        """Nothing: no hidden states are asked for."""

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Rows are at most that long."""
        self._longest = longest

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        self._ring = self._ring[mx.array(list(rows), mx.int32)]

    def extend(self, other: NgramRows) -> None:
        """Append the rows of ``other``."""
        self._longest = max(self._longest, other._longest)
        # A ring stays as large as a row that has left made it.
        slots = max(self._ring.shape[1], other._ring.shape[1])
        for rows in (self, other):
            rows._grow(max(slots, self._capacity(self._longest)))
        self._ring = mx.concatenate([self._ring, other._ring])

    def place(self, rows: Sequence[int], other: NgramRows, num_rows: int) -> None:
        """Put the rows of ``other`` into the given ones."""
        self._longest = max(self._longest, other._longest)
        slots = max(self._ring.shape[1], other._ring.shape[1])
        for part in (self, other):
            part._grow(max(slots, self._capacity(self._longest)))
        for i, row in enumerate(rows):
            self._ring = mx.slice_update(
                self._ring, other._ring[i : i + 1], mx.array([row]), axes=(0,)
            )

    def reset(self, rows: Sequence[int]) -> None:
        """Nothing: the row that takes such a place overwrites what is there."""

    def _capacity(self, length: int) -> int:
        """Slots for rows of up to ``length`` tokens: few sizes, so shapes repeat."""
        capacity = _MIN_CAPACITY
        while capacity < length:
            capacity *= 2
        return min(capacity, self._options.max_history)

    def _reserve(self, length: int) -> None:
        self._grow(self._capacity(length))

    def _grow(self, slots: int) -> None:
        # Smaller than max_history nothing was overwritten: slots are positions.
        missing = slots - self._ring.shape[1]
        if missing > 0:
            self._ring = mx.pad(
                self._ring, [(0, 0), (0, missing)], constant_values=EMPTY
            )
