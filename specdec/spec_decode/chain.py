"""Two drafters in a chain: each row takes from the first, then from the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..models.runner import ModelRows
from .drafter import Drafter, DraftRows, Proposals, Round
from .rejection_sampler import Accepted
from .vetting import ours, vetted


class ChainDrafter(Drafter):
    """Proposes what ``first`` proposes, and after that what ``second`` does.

    The second continues from the tokens of the first. So what it has seen of a row (a
    draft model's cache) is right, whichever of the two proposed.

    Args:
        first: may propose fewer tokens than asked for, or none, as n-grams do.
        second: proposes the rest.

    Attributes:
        context_length: the smaller of both.
        hidden_layers: those of the first, then those of the second. Each is shown only
            its own.
        max_proposals: the larger of both.
        vocabulary_share: that of the second, which proposes where the first does not.
    """

    def __init__(self, first: Drafter, second: Drafter):
        self.first = first
        self.second = second
        most = (first.max_proposals, second.max_proposals)
        self.max_proposals = None
        if most[0] is not None and most[1] is not None:
            self.max_proposals = max(most[0], most[1])
        contexts = (first.context_length, second.context_length)
        self.context_length = min((n for n in contexts if n is not None), default=None)
        self.hidden_layers = (*first.hidden_layers, *second.hidden_layers)
        self.vocabulary_share = second.vocabulary_share
        reading = [d for d in (first, second) if d.hidden_layers]
        self.context = reading[0].context if len(reading) == 1 else None
        self.reads_prompts = any(d.reads_prompts for d in reading)

    def remember(self, answer: Sequence[int], client: str) -> None:
        self.first.remember(answer, client)
        self.second.remember(answer, client)

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> ChainRows:
        first, second = (
            each.rows(prompts, max_length=max_length)
            for each in (self.first, self.second)
        )
        counts = (len(self.first.hidden_layers), len(self.second.hidden_layers))
        return ChainRows(first, second, counts)


def _both(name: str) -> Callable[..., None]:
    """A method that calls the method of both rows."""

    def call(self: ChainRows, *args: Any) -> None:
        getattr(self._first, name)(*args)
        getattr(self._second, name)(*args)

    return call


@ours
class ChainRows(DraftRows):
    """The same rows, known by two drafters.

    Args:
        first, second: rows of the two drafters.
        num_layers: how many hidden layers each drafter asked for.
    """

    def __init__(
        self, first: DraftRows, second: DraftRows, num_layers: tuple[int, int]
    ):
        self._first = first
        self._second = second
        self._num_layers = num_layers

    separate, store = _both("separate"), _both("store")
    note_lengths = _both("note_lengths")
    filter, reset = _both("filter"), _both("reset")

    @property
    def context(self) -> ModelRows | None:
        """That of the drafter that reads hidden states."""
        first, _ = self._num_layers
        return (self._first if first else self._second).context

    @property
    def backlog(self) -> int:
        """The larger of both."""
        return max(self._first.backlog, self._second.backlog)

    @property
    def nbytes(self) -> int:
        return self._first.nbytes + self._second.nbytes

    @property
    def new_shapes(self) -> int:
        return self._first.new_shapes + self._second.new_shapes

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        first, second = self._shared_out(hidden)
        if first is not None:
            self._first.observe(first, following, lengths)
        if second is not None:
            self._second.observe(second, following, lengths)

    def _shared_out(
        self, hidden: mx.array | None
    ) -> tuple[mx.array | None, mx.array | None]:
        """The states of each drafter's layers; ``None`` if it asked for none."""
        first, second = self._num_layers
        if hidden is None or not first:
            return None, hidden
        if not second:
            return hidden, None
        width = hidden.shape[-1] * first // (first + second)
        return hidden[..., :width], hidden[..., width:]

    def prefill(self) -> Iterator[None]:
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
        first, second = self._shared_out(accepted.hidden)
        self._first.commit(round_, replace(accepted, hidden=first))
        self._second.commit(round_, replace(accepted, hidden=second))

    def extend(self, other: ChainRows) -> None:
        self._first.extend(other._first)
        self._second.extend(other._second)

    def place(self, rows: Sequence[int], other: ChainRows, num_rows: int) -> None:
        self._first.place(rows, other._first, num_rows)
        self._second.place(rows, other._second, num_rows)


def continued(first: Proposals, second: Proposals, vocab_size: int) -> Proposals:
    """For each row, what ``first`` proposes, and after that what ``second`` does."""
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
