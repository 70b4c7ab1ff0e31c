"""What every drafter is derived from; docs/drafters.md explains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx

from ..models.runner import ModelRows, ModelRunner
from ..sampling import Draws, GrammarMasks, RowSampling
from .rejection_sampler import Accepted


@dataclass(frozen=True)
class Proposals:
    """What a drafter proposes in a round.

    Args:
        tokens: shape (B, k), int32.
        probabilities: what the tokens were drawn from, shape (B, k, V), float32;
            ``None`` when all probability was on them. Used where
            :attr:`Round.needs_probabilities`.
        lengths: how many of its k tokens each row means, 0 to k, shape (B,),
            int32; ``None``: all. The others are never accepted nor counted.

    Attributes:
        inputs: each row's newest token, then ``tokens``, shape (B, k + 1), where they
            are one array already (:meth:`within`): to join them is a launch. Only
            specdec's own rows are taken at their word, as nothing compares the newest
            token (:func:`~specdec.spec_decode.vetting.vetted`).
    """

    tokens: mx.array
    probabilities: mx.array | None = None
    lengths: mx.array | None = None
    inputs: mx.array | None = field(default=None, init=False)

    @classmethod
    def within(
        cls,
        inputs: mx.array,
        probabilities: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> Proposals:
        """Of ``inputs``, int32, all but the first column is proposed."""
        made = cls(inputs[:, 1:], probabilities, lengths)
        # Not by the constructor: a copy with other tokens has none.
        object.__setattr__(made, "inputs", inputs)
        return made

    def after(self, newest: mx.array) -> mx.array:
        """What the target is given: the newest tokens (B, 1), then those proposed."""
        if self.inputs is not None:
            return self.inputs
        return mx.concatenate([newest, self.tokens], axis=1)

    @property
    def meant(self) -> mx.array:
        """Which tokens are meant, shape (B, k), boolean."""
        num_rows, k = self.tokens.shape
        if self.lengths is None:
            return mx.ones((num_rows, k), mx.bool_)
        return mx.arange(k) < self.lengths[:, None]

    def drawn_from(self, vocab_size: int) -> mx.array:
        """``probabilities``, made of the tokens where they are ``None``."""
        if self.probabilities is not None:
            return self.probabilities
        return (self.tokens[..., None] == mx.arange(vocab_size)).astype(mx.float32)


@dataclass(frozen=True)
class Round:
    """What a drafter knows when a round begins.

    Args:
        num_draft_tokens: k, how many tokens to propose for every row.
        recent: the newest committed tokens of every row, the last one last, shape
            (B, W), W at least 2; -1 in front of a row that has fewer.
        active: rows still being decoded, shape (B,), boolean; what is proposed
            for the others is ignored.
        sampling, draws: how the target will choose. A drafter that chooses with
            them (:meth:`choose`) is accepted most often.
        needs_probabilities: whether a row's verification looks at them.
        given: proposals that stand already, where another drafter came first:
            continue each row after those that are meant.
        lengths: committed tokens of every row, the prompt included, shape (B,).
        grammar: what the rows' grammars allow; ``None`` where no row has one.
    """

    num_draft_tokens: int
    recent: mx.array
    active: mx.array
    sampling: RowSampling
    draws: Draws
    needs_probabilities: bool = False
    given: Proposals | None = None
    lengths: mx.array = field(kw_only=True)
    grammar: GrammarMasks | None = field(default=None, kw_only=True)

    @property
    def tail(self) -> mx.array:
        """The last two committed tokens of every row, shape (B, 2)."""
        return self.recent[:, -2:]

    def choose(
        self, logits: mx.array, proposed: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """Choose the next proposal as the target would, from a draft's logits.

        Where a proposal is given already, it is that one. With a row that follows a
        grammar, it waits for the proposals so far.

        Args:
            logits: of the next position, shape (B, 1, V' <= V).
            proposed: the proposals so far, each of shape (B, 1).

        Returns:
            The tokens, shape (B, 1), and what they were drawn from, shape
            (B, 1, V), or ``None`` where no row needs it.
        """
        j = len(proposed)
        draws = self.draws.at(j)
        if self.sampling.adjustments is not None:
            recent = mx.concatenate([self.recent, *proposed], axis=1)[:, j:]
            logits = self.sampling.adjusted(logits, recent, recent[:, :0], draws)
        if self.grammar is not None:
            logits = self.grammar.mask_next(logits, proposed)
        probabilities = None
        if self.needs_probabilities:
            probabilities = self.sampling.probabilities(logits, draws)
        chosen = self.sampling.choose(logits, draws)
        if self.given is not None:
            meant = self.given.meant[:, j : j + 1]
            chosen = mx.where(meant, self.given.tokens[:, j : j + 1], chosen)
        return chosen, probabilities

    def choose_each(
        self, k: int, logits_after: Callable[[Sequence[mx.array]], mx.array]
    ) -> tuple[list[mx.array], mx.array | None]:
        """Choose ``k`` proposals with :meth:`choose`, one after the other.

        Args:
            logits_after: of the position after those proposed so far.

        Returns:
            The tokens, each of shape (B, 1), and what they were drawn from, shape
            (B, k, V), or ``None`` where no row needs it.
        """
        tokens, drawn_from = list[mx.array](), list[mx.array]()
        for _ in range(k):
            chosen, probabilities = self.choose(logits_after(tokens), tokens)
            tokens.append(chosen)
            if probabilities is not None:
                drawn_from.append(probabilities)
        return tokens, mx.concatenate(drawn_from, axis=1) if drawn_from else None

    def choose_all(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """Choose all proposals as :meth:`choose` does, where none changes the logits.

        Args:
            logits: of the next positions, shape (B, k, V' <= V), k up to
                ``num_draft_tokens``.

        Returns:
            The tokens, shape (B, k), and what they were drawn from, shape (B, k, V),
            or ``None`` where no row needs it.
        """
        k = logits.shape[1]
        if self.sampling.adjustments is not None or self.grammar is not None:
            tokens, found = self.choose_each(
                k, lambda before: logits[:, len(before) : len(before) + 1]
            )
            return mx.concatenate(tokens, axis=1), found
        draws, probabilities = self.draws.first(k), None
        if self.needs_probabilities:
            probabilities = self.sampling.probabilities(logits, draws)
        chosen = self.sampling.choose(logits, draws)
        if self.given is not None:
            meant = self.given.meant[:, :k]
            chosen = mx.where(meant, self.given.tokens[:, :k], chosen)
        return chosen, probabilities


class DraftRows(ABC):
    """What a drafter knows of some rows that decode together.

    Once :meth:`prefill` is through, every round calls :meth:`propose` (unless k
    is 0) and :meth:`commit`. Neither may wait for the device. A derived class has to
    write :meth:`propose`, :meth:`filter` and :meth:`extend`; what else it does not
    write does nothing.
    """

    @property
    def backlog(self) -> int:
        """Tokens of a row, on average, that the next :meth:`propose` takes in first."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes that the rows keep."""
        return 0

    @property
    def new_shapes(self) -> int:
        """Forwards so far whose shapes were not ready: their rounds took longer."""
        return 0

    @property
    def context(self) -> ModelRows | None:
        """The rows of :attr:`Drafter.context`."""
        return None

    def separate(self, salts: Sequence[str | None]) -> None:
        """Share what is kept of prompts among rows of the same salt alone.

        Called before :meth:`prefill`, where a request has a ``cache_salt``.
        """
        return

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        """See the target's hidden states of a chunk of the prompts.

        Called before :meth:`prefill`, chunk after chunk up to the prompts' last
        token, where the drafter asked for :attr:`Drafter.hidden_layers`.

        Args:
            hidden: shape (B, S, D), as in
                :class:`~specdec.spec_decode.rejection_sampler.Accepted`.
            following: the token after each, shape (B, S): of a prompt's last token the
                first that the row emits.
            lengths: tokens of the chunk that each row has; what follows them is
                padding.
        """
        return

    def prefill(self) -> Iterator[None]:
        """Hand the prompts to the device, yielding between chunks of work."""
        return iter(())

    @abstractmethod
    def propose(self, round_: Round) -> Proposals:
        """``round_.num_draft_tokens`` tokens for every row."""

    def peek(self, round_: Round) -> Proposals | None:
        """What would be proposed in a round that does not draft; ``None``: unknown.

        For rows that propose at next to no cost, and not by drawing. It changes
        nothing; :meth:`commit` follows, with k = 0.

        Args:
            round_: with the k that is looked at; its draws have one position.
        """
        return None

    def commit(self, round_: Round, accepted: Accepted) -> None:
        """Learn what the round kept; called for rounds with k = 0 too."""
        return

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Committed tokens of the longest and shortest row, as the host knows."""
        return

    @abstractmethod
    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows, in that order; one may be there several times."""

    @abstractmethod
    def extend(self, other: Self) -> None:
        """Append the rows of ``other``, made by the same drafter and prefilled."""

    def place(self, rows: Sequence[int], other: Self, num_rows: int) -> None:
        """Put the rows of ``other`` into the given ones, which nobody needs any more.

        A drafter that can do it without a copy of all its rows should.

        Args:
            rows: where each row of ``other`` goes.
            num_rows: how many there are.
        """
        self.extend(other)
        order = list(range(num_rows))
        for i, row in enumerate(rows):
            order[row] = num_rows + i
        self.filter(order)

    def reset(self, rows: Sequence[int]) -> None:
        """The given rows have ended, and others may be put into their places."""
        return


class Drafter(ABC):
    """Proposes tokens; whatever it proposes, the output is the target's."""

    #: Positions that the drafter can serve; ``None``: any number. A row that is
    #: longer is not drafted for any more.
    context_length: int | None = None

    #: The most tokens that it proposes for a row in a round; ``None``: any number.
    #: Rounds are no wider.
    max_proposals: int | None = None

    #: Layers of the target whose outputs the drafter wants, counted from 0, or from
    #: the last with -1, -2, ...
    hidden_layers: tuple[int, ...] = ()

    #: Runs what has an entry for each token whose hidden states were observed: then
    #: prefixes of prompts are kept with these; ``None``: they are not reused.
    context: ModelRunner | None = None

    #: Of the target's tokens, those that it can propose, 0 to 1; ``None``: all.
    vocabulary_share: float | None = None

    @abstractmethod
    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        """Begin rows for ``prompts``, each of up to ``max_length`` tokens."""
