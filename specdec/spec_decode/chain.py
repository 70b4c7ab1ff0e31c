"""Two drafters in a chain: each row takes from the first, then from the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..models.runner import ModelRows
from .commit import Accepted
from .drafter import Drafter, DraftRows, Proposals, Round
from .guard import ours, vetted


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
        self.reads_following = any(d.reads_following for d in reading)

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
    """A method that calls the method of both rows; rows that join are parted, too."""

    def call(self: ChainRows, *args: Any) -> None:
        for i, rows in enumerate(self._parts):
            parts = [a._parts[i] if isinstance(a, ChainRows) else a for a in args]
            getattr(rows, name)(*parts)

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
        self._parts, self._num_layers = (first, second), num_layers

    separate, store = _both("separate"), _both("store")
    note_lengths, reset = _both("note_lengths"), _both("reset")
    make_finite = _both("make_finite")
    filter, extend, place = _both("filter"), _both("extend"), _both("place")

    @property
    def context(self) -> ModelRows | None:
        """That of the drafter that reads hidden states."""
        return self._parts[0 if self._num_layers[0] else 1].context

    @property
    def backlog(self) -> int:
        """The larger of both."""
        return max(rows.backlog for rows in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._parts)

    @property
    def new_shapes(self) -> int:
        return sum(rows.new_shapes for rows in self._parts)

    def _shared_out(self, hidden: mx.array | None) -> list[mx.array | None]:
        """The states of each drafter's layers; ``None`` if it asked for none."""
        first, second = self._num_layers
        if hidden is None or not (first and second):
            return [hidden if first else None, None if first else hidden]
        width = hidden.shape[-1] * first // (first + second)
        return [hidden[..., :width], hidden[..., width:]]

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        for rows, states in zip(self._parts, self._shared_out(hidden), strict=True):
            if states is not None:
                rows.observe(states, following, lengths)

    def prefill(self) -> Iterator[None]:
        for rows in self._parts:
            yield from rows.prefill()

    def propose(self, round_: Round) -> Proposals:
        """The first's proposals, continued by the second."""
        for rows in self._parts:
            proposals = vetted(rows, round_, rows.propose(round_))
            if round_.given is not None:
                vocab_size = round_.sampling.vocab_size
                proposals = continued(round_.given, proposals, vocab_size)
            round_ = replace(round_, given=proposals)
        return proposals

    def commit(self, round_: Round, accepted: Accepted) -> None:
        states = self._shared_out(accepted.hidden)
        for rows, hidden in zip(self._parts, states, strict=True):
            rows.commit(round_, replace(accepted, hidden=hidden))


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
