"""One drafter where it has something to say, another one elsewhere, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..models.runner import ModelRows, ModelRunner
from .drafter import (
    Drafter,
    DraftRows,
    Proposals,
    Round,
    backlog,
    context,
    method,
    nbytes,
    new_shapes,
    separate,
    vocabulary_share,
)
from .rejection_sampler import Accepted
from .vetting import ours, vetted


class ChainDrafter:
    """Proposes what ``first`` proposes, and after that what ``second`` does.

    The second continues from the tokens of the first, so that what it has seen of
    a row (a draft model's cache) is right whoever proposed.

    Args:
        first: may propose fewer tokens than it was asked for, or none; of
            n-grams, those that match.
        second: for the rest.

    Attributes:
        context_length: the smaller of the two.
        hidden_layers: those of the first, then those of the second; each is shown
            its own.
        max_proposals: the larger of the two.
        vocabulary_share: that of the second, which proposes where the first does not.
    """

    def __init__(self, first: Drafter, second: Drafter):
        self.first = first
        self.second = second
        most: list[Any] = [
            getattr(each, "max_proposals", None) for each in (first, second)
        ]
        self.max_proposals = None if None in most else max(most)
        contexts = (first.context_length, second.context_length)
        self.context_length = min((n for n in contexts if n is not None), default=None)
        self.hidden_layers = (*first.hidden_layers, *second.hidden_layers)
        self.vocabulary_share = vocabulary_share(second)
        reading = [d for d in (first, second) if d.hidden_layers]
        self.context: ModelRunner | None = None
        if len(reading) == 1:
            self.context = getattr(reading[0], "context", None)

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> ChainRows:
        """Begin rows for ``prompts``."""
        first, second = (
            each.rows(prompts, max_length=max_length)
            for each in (self.first, self.second)
        )
        counts = (len(self.first.hidden_layers), len(self.second.hidden_layers))
        return ChainRows(first, second, counts)


@ours
class ChainRows:
    """The same rows, twice.

    Args:
        first, second: rows of the two drafters.
        num_layers: how many hidden layers each of them asked for.
    """

    def __init__(
        self, first: DraftRows, second: DraftRows, num_layers: tuple[int, int]
    ):
        self._first = first
        self._second = second
        self._num_layers = num_layers

    @property
    def context(self) -> ModelRows | None:
        """Of the one that reads hidden states."""
        first, _ = self._num_layers
        return context(self._first if first else self._second)

    @property
    def backlog(self) -> int:
        """Of the one that has more."""
        return max(backlog(self._first), backlog(self._second))

    @property
    def nbytes(self) -> int:
        """Of both together."""
        return nbytes(self._first) + nbytes(self._second)

    @property
    def new_shapes(self) -> int:
        """Of both together."""
        return new_shapes(self._first) + new_shapes(self._second)

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        """Show each its layers."""
        first, second = self._shared_out(hidden)
        if first is not None:
            self._first.observe(first, following, lengths)
        if second is not None:
            self._second.observe(second, following, lengths)

    def _shared_out(
        self, hidden: mx.array | None
    ) -> tuple[mx.array | None, mx.array | None]:
        """The states of each one's layers; ``None`` for one that asked for none."""
        first, second = self._num_layers
        if hidden is None or not first:
            return None, hidden
        if not second:
            return hidden, None
        width = hidden.shape[-1] * first // (first + second)
        return hidden[..., :width], hidden[..., width:]

    def separate(self, salts: Sequence[str | None]) -> None:
        """Both share prompts among rows of the same salt alone."""
        separate(self._first, salts)
        separate(self._second, salts)

    def prefill(self) -> Iterator[None]:
        """Take the prompts."""
        yield from self._first.prefill()
        yield from self._second.prefill()

    def propose(self, round_: Round) -> Proposals:
        """The first's proposals, continued by the second."""
        first = vetted(self._first, round_, self._first.propose(round_))
        if round_.given is not None:
            first = continued(round_.given, first, round_.sampling.vocab_size)
        round_ = replace(round_, given=first)
        second = vetted(self._second, round_, self._second.propose(round_))
        return continued(first, second, round_.sampling.vocab_size)

    def commit(self, round_: Round, accepted: Accepted) -> None:
        """Both learn what was kept."""
        first, second = self._shared_out(accepted.hidden)
        self._first.commit(round_, replace(accepted, hidden=first))
        self._second.commit(round_, replace(accepted, hidden=second))

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Pass it on to both."""
        self._first.note_lengths(longest, shortest)
        self._second.note_lengths(longest, shortest)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        self._first.filter(rows)
        self._second.filter(rows)

    def extend(self, other: ChainRows) -> None:
        """Append the rows of ``other``."""
        self._first.extend(other._first)
        self._second.extend(other._second)

    def place(self, rows: Sequence[int], other: ChainRows, num_rows: int) -> None:
        """Put the rows of ``other`` into the given ones."""
        method(self._first, "place")(rows, other._first, num_rows)
        method(self._second, "place")(rows, other._second, num_rows)

    def reset(self, rows: Sequence[int]) -> None:
        """Both learn that rows have ended."""
        method(self._first, "reset")(rows)
        method(self._second, "reset")(rows)


def continued(first: Proposals, second: Proposals, vocab_size: int) -> Proposals:
    """Of every row what ``first`` means, and after that what ``second`` proposes."""
    meant = first.meant
    probabilities = None
    if first.probabilities is not None or second.probabilities is not None:
        probabilities = mx.where(
            meant[..., None],
            first.drawn_from(vocab_size),
            second.drawn_from(vocab_size),
        )
    lengths = None
    if first.lengths is not None and second.lengths is not None:
        lengths = mx.maximum(first.lengths, second.lengths)
    return Proposals(
        mx.where(meant, first.tokens, second.tokens), probabilities, lengths
    )
