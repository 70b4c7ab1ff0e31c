"""Prompt lookup: proposes what followed the newest tokens when they occurred before.

Before: in the row itself, or in finished answers of the same client.

(Saxena 2023, "Prompt lookup decoding"; Yang et al. 2023, "Inference with
reference".) No model, and nothing leaves the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx

from ..backend import defaults
from ..cache import put_rows
from ..cuda import ngram_kernel
from ..errors import ConfigError
from ..models.kernel_proofs import cached_proofs
from ..utils.checks import require, require_int
from . import ngram_search
from .commit import Accepted
from .corpus import DEPTH, Continuation, Corpora, Corpus
from .drafter import Drafter, DraftRows, Proposals, Round
from .guard import ours
from .ngram_search import EMPTY, ring_of

_MIN_CAPACITY = 256
# The tokens of so many rounds without a look-up are computed together, since each call
# takes the host tens of microseconds. Until then a few small arrays are held.
_TOGETHER = 8
# Clients whose answers are kept: with all of them, 50 MB.
_MOST_CLIENTS = 64


@dataclass(frozen=True, kw_only=True)
class NgramOptions:
    """How n-grams are looked up.

    Args:
        max_ngram, min_ngram: most and fewest of the newest tokens that must have
            occurred before. The longest match is taken; among equal ones, the newest.
        max_history: how many of a row's newest tokens are searched. A round's cost
            grows with ``max_ngram`` times this.
        corpus: tokens of finished answers that are kept for each client and searched,
            too: a power of two, or 0 for none.

    Raises:
        ConfigError: a value is out of range.
    """

    max_ngram: int = 4
    min_ngram: int = 2
    max_history: int = 8192
    corpus: int = 1 << 16

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
        require_int("corpus", self.corpus, 0)
        fits = self.corpus == 0 or (self.corpus.bit_count() == 1 and self.corpus >= 256)
        require(fits, "corpus", self.corpus, "0, or a power of two from 256 on")

    def nbytes(self, num_rows: int) -> int:
        """The most bytes that a look-up takes for so many rows.

        For each slot, 8 bytes to compare it with each of the newest tokens, and 32 for
        the results: measured, and rounded up. Each row may have a corpus of its own,
        and a copy of it is held while the next one is made.
        """
        searched = self.max_history * (32 + 8 * self.max_ngram)
        return num_rows * (searched + 2 * Corpus.nbytes(self.corpus))


class NgramDrafter(Drafter):
    """Proposes what followed a row's newest tokens when they occurred before.

    A row without a match proposes nothing, and nothing is counted for it.

    Args:
        options: how to look n-grams up.

    Raises:
        ConfigError: ``options`` are not :class:`NgramOptions`.
    """

    def __init__(self, options: NgramOptions | None = None):
        if not isinstance(options, NgramOptions | None):
            raise ConfigError(
                f"NgramDrafter takes NgramOptions, not a {type(options).__name__}: a "
                "decoder wants drafter='ngram', or a function that makes one"
            )
        self.options = options or NgramOptions()
        self.corpora = Corpora(self.options.corpus, _MOST_CLIENTS)
        # What has `search` and `keep`: the operations, or their kernels.
        self.lookup: ModuleType = ngram_search
        if defaults().kernels:
            with cached_proofs():
                if ngram_kernel.proven(ngram_search.search, ngram_search.keep):
                    self.lookup = ngram_kernel

    def remember(self, answer: Sequence[int], client: str) -> None:
        """Keep a finished answer, to look n-grams up in for the same client."""
        self.corpora.add(client, answer)

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> NgramRows:
        return NgramRows(self, prompts, max_length)


@ours
class NgramRows(DraftRows):
    """The tokens of some rows, searched in every round.

    Args:
        drafter: the drafter that they belong to.
        prompts: the rows' prompts.
        max_length: the most tokens that a row can ever hold.
    """

    def __init__(
        self, drafter: NgramDrafter, prompts: Sequence[Sequence[int]], max_length: int
    ):
        self._options = drafter.options
        self._corpora = drafter.corpora
        self._lookup = drafter.lookup
        # The most tokens that a row can have now, its first one included.
        self._longest = max(map(len, prompts)) + 1
        self._ring = ring_of(prompts, self._capacity(self._longest))
        # Rounds since the ring was last computed; a look-up computes it too.
        self._unwritten = 0

    def propose(self, round_: Round) -> Proposals:
        """Continue the longest, then newest match of every row."""
        options = self._options
        self._unwritten = 0
        self._reserve(self._longest)
        answers = self._in_answers(round_)
        if answers is not None:
            return self._longer(round_, answers)
        inputs, lengths = self._lookup.search(
            self._ring,
            round_.lengths,
            round_.recent,
            round_.num_draft_tokens,
            max_ngram=options.max_ngram,
            min_ngram=options.min_ngram,
        )
        return Proposals.within(inputs, lengths=lengths)

    def _in_answers(self, round_: Round) -> Continuation | None:
        """What followed the newest tokens in finished answers, if there are any."""
        if not self._corpora.owners(round_.clients):
            return None  # before anything is computed for it: each launch counts
        last = (round_.lengths - 1)[:, None]
        tail = ngram_search.read(self._ring, last - mx.arange(DEPTH))
        tail = mx.concatenate([round_.recent[:, -1:], tail[:, 1:]], axis=1)
        return self._corpora.find(round_.clients, tail, round_.num_draft_tokens)

    def _longer(self, round_: Round, answers: Continuation) -> Proposals:
        """The longer match of each row: its own, or that in answers."""
        options, k = self._options, round_.num_draft_tokens
        newest = round_.recent[:, -1:]
        ring = ngram_search.write(self._ring, round_.lengths - 1, newest, 1)
        match = ngram_search.longest_match(
            ring,
            round_.lengths,
            max_ngram=options.max_ngram,
            min_ngram=options.min_ngram,
        )
        back = mx.arange(DEPTH)
        before = ngram_search.read(ring, match.last[:, None] - back)
        tail = ngram_search.read(ring, (round_.lengths - 1)[:, None] - back)
        agree = (before == tail) & (before >= 0)
        size = mx.cumprod(agree.astype(mx.int32), axis=1).sum(axis=1)
        size = mx.where(match.size > 0, size, 0)
        continued = ngram_search.continuation(ring, round_.lengths, match, k)
        other = (answers.size > size) & (answers.count > 0)
        tokens = mx.where(other[:, None], answers.tokens, mx.maximum(continued, 0))
        lengths = mx.where(other, answers.count, mx.where(size > 0, k, 0))
        tokens = mx.where((lengths > 0)[:, None], tokens, 0)
        inputs = mx.concatenate([newest, tokens], axis=1)
        return Proposals.within(inputs, lengths=lengths.astype(mx.int32))

    def commit(self, round_: Round, accepted: Accepted) -> None:
        width = accepted.chosen.shape[1]
        self._reserve(self._longest + width)
        self._longest += width
        self._ring = self._lookup.keep(
            self._ring, round_.lengths, round_.recent, accepted.chosen, accepted.kept
        )
        self._unwritten += 1
        # Otherwise the graphs of rounds without a look-up would pile up.
        if self._unwritten >= _TOGETHER:
            mx.async_eval(self._ring)
            self._unwritten = 0

    def note_lengths(self, longest: int, shortest: int) -> None:
        self._longest = longest

    def filter(self, rows: Sequence[int]) -> None:
        self._ring = self._ring[mx.array(list(rows), mx.int32)]

    def extend(self, other: NgramRows) -> None:
        self._longest = max(self._longest, other._longest)
        # A ring may be larger than its rows need, by rows that have left.
        slots = max(self._ring.shape[1], other._ring.shape[1])
        for rows in (self, other):
            rows._grow(max(slots, self._capacity(self._longest)))
        self._ring = mx.concatenate([self._ring, other._ring])

    def place(self, rows: Sequence[int], other: NgramRows, num_rows: int) -> None:
        self._longest = max(self._longest, other._longest)
        slots = max(self._ring.shape[1], other._ring.shape[1])
        for part in (self, other):
            part._grow(max(slots, self._capacity(self._longest)))
        self._ring = put_rows(self._ring, rows, other._ring)

    def _capacity(self, length: int) -> int:
        """Slots for rows of up to ``length`` tokens: few sizes, so shapes repeat."""
        capacity = _MIN_CAPACITY
        while capacity < length:
            capacity *= 2
        return min(capacity, self._options.max_history)

    def _reserve(self, length: int) -> None:
        self._grow(self._capacity(length))

    def _grow(self, slots: int) -> None:
        # Below max_history nothing has been overwritten, so slots are positions.
        missing = slots - self._ring.shape[1]
        if missing > 0:
            self._ring = mx.pad(
                self._ring, [(0, 0), (0, missing)], constant_values=EMPTY
            )
