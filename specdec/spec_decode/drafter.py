"""The base classes of drafters and the records they work with; see docs/drafters.md."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import mlx.core as mx

from ..models.runner import EndedRow, ModelRows, ModelRunner
from ..sampling import Draws, GrammarMasks, RowSampling
from .commit import Accepted


@dataclass(frozen=True)
class Proposals:
    """What a drafter proposes in a round.

    Args:
        tokens: shape (B, k), int32.
        probabilities: what the tokens were drawn from, shape (B, k, V), float32;
            ``None`` if all probability was on them. Needed if
            :attr:`Round.needs_probabilities`.
        lengths: how many of the k tokens are real proposals, by row, 0 to k, shape
            (B,), int32; ``None``: all. The others are never accepted or counted.

    Attributes:
        inputs: each row's newest token, then ``tokens``, shape (B, k + 1), if they are
            one array already (:meth:`within`), which saves a launch. It is used only
            from specdec's own drafters, since nothing checks the newest token
            (:func:`~specdec.spec_decode.guard.vetted`).
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
        """Propose all but the first column of ``inputs``, int32."""
        proposals = cls(inputs[:, 1:], probabilities, lengths)
        # Not by the constructor, so that a copy with other tokens has none.
        object.__setattr__(proposals, "inputs", inputs)
        return proposals

    def after(self, newest: mx.array) -> mx.array:
        """The target's inputs: the newest tokens (B, 1), then the proposals."""
        if self.inputs is not None:
            return self.inputs
        return mx.concatenate([newest, self.tokens], axis=1)

    @property
    def meant(self) -> mx.array:
        """Which tokens are real proposals, shape (B, k), boolean."""
        num_rows, k = self.tokens.shape
        if self.lengths is None:
            return mx.ones((num_rows, k), mx.bool_)
        return mx.arange(k) < self.lengths[:, None]

    def drawn_from(self, vocab_size: int) -> mx.array:
        """``probabilities``; if ``None``, 1 for each token proposed."""
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
        active: rows still being decoded, shape (B,), boolean. Proposals for the
            others are ignored.
        sampling, draws: how the target will choose; ``draws`` is ``None`` if every row
            takes the token of the largest logit. A drafter that chooses with them
            (:meth:`choose`) is accepted most often.
        needs_probabilities: whether some row's verification needs the probabilities
            that proposals were drawn from.
        given: proposals of another drafter, which come first; continue each row after
            them.
        lengths: committed tokens of every row, the prompt included, shape (B,).
        grammar: what the rows' grammars allow; ``None`` if no row has one.
        target: the target's caches, for drafters that attend to its keys and values.
            They hold all committed tokens of a row but the newest.
        clients: whose request each row is, by names. Nothing that a drafter has learnt
            from one client's answers may be proposed to another. ``None`` for rows
            that have ended, and for those with a ratio rule, whose text would depend
            on what other requests asked for. Empty if nobody is known.
    """

    num_draft_tokens: int
    recent: mx.array
    active: mx.array
    sampling: RowSampling
    draws: Draws | None
    needs_probabilities: bool = False
    given: Proposals | None = None
    lengths: mx.array = field(kw_only=True)
    grammar: GrammarMasks | None = field(default=None, kw_only=True)
    target: ModelRows | None = field(default=None, kw_only=True)
    clients: tuple[str | None, ...] = field(default=(), kw_only=True)

    @property
    def tail(self) -> mx.array:
        """The last two committed tokens of every row, shape (B, 2)."""
        return self.recent[:, -2:]

    @property
    def is_greedy(self) -> bool:
        """Whether each proposal is the token of the draft's largest logit."""
        return self.draws is None and self.grammar is None and self.given is None

    def choose(
        self, logits: mx.array, proposed: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array | None]:
        """Choose the next proposal from a draft's logits, as the target would.

        Where a proposal is given already, it is taken. If a row follows a grammar, this
        waits for the proposals so far.

        Args:
            logits: of the next position, shape (B, 1, V' <= V).
            proposed: the proposals so far, each of shape (B, 1).

        Returns:
            The tokens, shape (B, 1), and what they were drawn from, shape
            (B, 1, V), or ``None`` if no row needs it.
        """
        j = len(proposed)
        draws = None if self.draws is None else self.draws.at(j)
        if draws is not None and self.sampling.adjustments is not None:
            recent = mx.concatenate([self.recent, *proposed], axis=1)[:, j:]
            logits = self.sampling.adjusted(logits, recent, recent[:, :0], draws)
        if self.grammar is not None:
            logits = self.grammar.mask_next(logits, proposed)
        probabilities = None
        if draws is not None and self.needs_probabilities:
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
            logits_after: gives the logits of the position after the proposals so far.

        Returns:
            The tokens, each of shape (B, 1), and what they were drawn from, shape
            (B, k, V), or ``None`` if no row needs it.
        """
        tokens, drawn_from = list[mx.array](), list[mx.array]()
        for _ in range(k):
            chosen, probabilities = self.choose(logits_after(tokens), tokens)
            tokens.append(chosen)
            if probabilities is not None:
                drawn_from.append(probabilities)
        return tokens, mx.concatenate(drawn_from, axis=1) if drawn_from else None

    def choose_all(self, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """Choose all proposals at once, from logits that do not depend on them.

        Args:
            logits: of the next positions, shape (B, k, V' <= V), k up to
                ``num_draft_tokens``.

        Returns:
            The tokens, shape (B, k), and what they were drawn from, shape (B, k, V),
            or ``None`` if no row needs it.
        """
        k = logits.shape[1]
        if self.sampling.adjustments is not None or self.grammar is not None:
            tokens, probabilities = self.choose_each(
                k, lambda before: logits[:, len(before) : len(before) + 1]
            )
            return mx.concatenate(tokens, axis=1), probabilities
        draws = None if self.draws is None else self.draws.first(k)
        probabilities = None
        if draws is not None and self.needs_probabilities:
            probabilities = self.sampling.probabilities(logits, draws)
        chosen = self.sampling.choose(logits, draws)
        if self.given is not None:
            meant = self.given.meant[:, :k]
            chosen = mx.where(meant, self.given.tokens[:, :k], chosen)
        return chosen, probabilities


class DraftRows(ABC):
    """What a drafter knows of rows that decode together.

    After :meth:`prefill`, every round calls :meth:`propose` (unless k is 0) and
    :meth:`commit`. Neither may wait for the device. A derived class must define
    :meth:`propose`, :meth:`filter` and :meth:`extend`. The other methods do nothing
    unless they are defined.
    """

    @property
    def backlog(self) -> int:
        """Tokens of a row, on average, that :meth:`propose` has to take in first."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept for the rows."""
        return 0

    @property
    def new_shapes(self) -> int:
        """Forwards so far whose shapes were new; their rounds took longer."""
        return 0

    @property
    def context(self) -> ModelRows | None:
        """The rows of :attr:`Drafter.context`."""
        return None

    def separate(
        self, salts: Sequence[str | None], clients: Sequence[str | None]
    ) -> None:
        """Share stored prefixes only among rows of the same salt.

        Called before :meth:`prefill` if a request has a ``cache_salt`` or a
        ``draft_corpus``.

        Args:
            clients: answers are shared only among rows of the same client; ``None``:
                of the same salt.
        """
        return

    def store(self, ended: Sequence[EndedRow]) -> None:
        """Store the columns of rows that have ended, for later prompts."""
        return

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        """See the target's hidden states of a chunk of the prompts.

        Called before :meth:`prefill`, for each chunk up to the prompts' last token, if
        the drafter asked for :attr:`Drafter.hidden_layers`.

        Args:
            hidden: shape (B, S, D), as in
                :class:`~specdec.spec_decode.commit.Accepted`.
            following: the token after each, shape (B, S). After a prompt's last token
                it is the first one that the row emits.
            lengths: how many tokens of the chunk are a row's own; the rest is padding.
        """
        return

    def prefill(self) -> Iterator[None]:
        """Take in the prompts, yielding between chunks of work."""
        return iter(())

    @abstractmethod
    def propose(self, round_: Round) -> Proposals:
        """Propose ``round_.num_draft_tokens`` tokens for every row."""

    def commit(self, round_: Round, accepted: Accepted) -> None:
        """Learn what the round kept; called after rounds with k = 0 too."""
        return

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Learn how many committed tokens the longest and the shortest row have."""
        return

    @abstractmethod
    def filter(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in that order; a row may be given several times."""

    @abstractmethod
    def extend(self, other: Self) -> None:
        """Append the rows of ``other``, made by the same drafter and prefilled."""

    def place(self, rows: Sequence[int], other: Self, num_rows: int) -> None:
        """Put rows of ``other`` in the place of the given ones, which have ended.

        A drafter should define it if it can do so without copying all rows.

        Args:
            rows: where the first rows of ``other`` go. Rows after these are idle, and
                are dropped.
            num_rows: the number of rows, before and after.
        """
        self.extend(other)
        order = list(range(num_rows))
        for i, row in enumerate(rows):
            order[row] = num_rows + i
        self.filter(order)

    def reset(self, rows: Sequence[int]) -> None:
        """Learn that the given rows have ended; others may take their places."""
        return

    def make_finite(self, rows: Sequence[int]) -> None:
        """Learn that the given rows have accepted nothing in many rounds.

        A token that the drafter cannot compute with may have left NaN in what it keeps
        of them. It may replace that, so that later proposals can be accepted again.
        """
        return


class Drafter(ABC):
    """Proposes tokens. Whatever it proposes, the output is the target's own."""

    #: Positions that the drafter can serve; ``None``: any number. Longer rows are not
    #: drafted for.
    context_length: int | None = None

    #: The most tokens that it proposes for a row in a round; ``None``: any number.
    #: No round asks for more.
    max_proposals: int | None = None

    #: Layers of the target whose outputs the drafter reads: from 0, or from the last
    #: one with -1, -2, ...
    hidden_layers: tuple[int, ...] = ()

    #: Whether it reads the hidden states of whole prompts; otherwise those of each
    #: prompt's last token are enough, and the others may be left out.
    reads_prompts: bool = True

    #: Whether it reads the tokens after those whose hidden states it is shown;
    #: otherwise those of a prompt's chunk may be anything.
    reads_following: bool = True

    #: Runs a model with one cache entry for each token whose hidden states were
    #: observed. Its entries are stored with prefixes of prompts; with ``None``, a
    #: drafter that reads hidden states of whole prompts has no prefixes reused.
    context: ModelRunner | None = None

    #: The share of the target's tokens that it can propose, 0 to 1; ``None``: all.
    vocabulary_share: float | None = None

    def remember(self, answer: Sequence[int], client: str) -> None:
        """Learn a finished answer of a client; see :attr:`Round.clients`."""
        return

    @abstractmethod
    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        """Begin rows for ``prompts``, each of up to ``max_length`` tokens."""


def most_proposed(drafter: Drafter | None, asked: int) -> int:
    """The most tokens that a round proposes, if ``asked`` are asked for."""
    if drafter is None:
        return 0
    most = drafter.max_proposals
    return asked if most is None else min(asked, most)
