"""The protocol that every drafter follows; docs/drafters.md explains it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

import mlx.core as mx

from ..errors import DrafterError
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
    """

    tokens: mx.array
    probabilities: mx.array | None = None
    lengths: mx.array | None = None

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
            tokens, drawn_from = list[mx.array](), list[mx.array]()
            for j in range(k):
                chosen, each = self.choose(logits[:, j : j + 1], tokens)
                tokens.append(chosen)
                if each is not None:
                    drawn_from.append(each)
            found = mx.concatenate(drawn_from, axis=1) if drawn_from else None
            return mx.concatenate(tokens, axis=1), found
        draws, probabilities = self.draws.first(k), None
        if self.needs_probabilities:
            probabilities = self.sampling.probabilities(logits, draws)
        chosen = self.sampling.choose(logits, draws)
        if self.given is not None:
            meant = self.given.meant[:, :k]
            chosen = mx.where(meant, self.given.tokens[:, :k], chosen)
        return chosen, probabilities


class DraftRows(Protocol):
    """What a drafter knows of some rows that decode together.

    Once :meth:`prefill` is through, every round calls :meth:`propose` (unless k
    is 0) and :meth:`commit`. Neither may wait for the device. A class that inherits
    from this one has to write :meth:`propose`, :meth:`filter` and :meth:`extend`; what
    else it does not write does nothing. Where proposing costs next to nothing it may
    have a method ``peek``, see :func:`peek`; where rounds with k = 0 leave something to
    do, an attribute ``backlog``, see :func:`backlog`; where something of prompts is
    kept for later ones, a method ``separate``, see :func:`separate`.
    """

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


class Drafter(Protocol):
    """Proposes tokens; whatever it proposes, the output is the target's."""

    #: Positions that the drafter can serve; ``None``: any number. A row that is
    #: longer is not drafted for any more.
    context_length: int | None = None

    #: Layers of the target whose outputs the drafter wants, counted from 0, or from
    #: the last with -1, -2, ...
    hidden_layers: tuple[int, ...] = ()

    #: Runs what has an entry for each token whose hidden states were observed: then
    #: prefixes of prompts are kept with these; ``None``: they are not reused.
    context: ModelRunner | None = None

    @abstractmethod
    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        """Begin rows for ``prompts``, each of up to ``max_length`` tokens."""


def vocabulary_share(drafter: Drafter | None) -> float | None:
    """Of the target's tokens, those that a drafter can propose, 0 to 1; ``None``: all.

    Its attribute ``vocabulary_share`` says it, where it has one.
    """
    found: float | None = getattr(drafter, "vocabulary_share", None)
    return found


def backlog(rows: DraftRows) -> int:
    """Tokens of a row, on average, that the next :meth:`DraftRows.propose` takes in.

    Their attribute ``backlog`` says it, where they have one.
    """
    return int(getattr(rows, "backlog", 0))


def nbytes(rows: DraftRows) -> int:
    """Bytes that rows keep, where their attribute ``nbytes`` says it."""
    return int(getattr(rows, "nbytes", 0))


def context(rows: DraftRows) -> ModelRows | None:
    """What rows of :attr:`Drafter.context` hold: their attribute ``context``."""
    found: ModelRows | None = getattr(rows, "context", None)
    return found


def new_shapes(rows: DraftRows) -> int:
    """Forwards so far whose shapes were not ready: the round they were in took longer.

    The attribute ``new_shapes`` of rows says it, where they have one.
    """
    return int(getattr(rows, "new_shapes", 0))


def separate(rows: DraftRows, salts: Sequence[str | None]) -> None:
    """Have rows share what is kept of prompts with those of the same salt alone.

    Called before :meth:`DraftRows.prefill`, where a request has a ``cache_salt``. Their
    method ``separate`` does it, where they have one.
    """
    if (own := getattr(rows, "separate", None)) is not None:
        own(salts)


def method(rows: DraftRows, name: str) -> Callable[..., None]:
    """``place`` or ``reset`` of rows whose class need not inherit from DraftRows."""
    own = getattr(rows, name, None)
    found: Callable[..., None] = own or partial(getattr(DraftRows, name), rows)
    return found


def peek(rows: DraftRows, round_: Round) -> Proposals | None:
    """What rows would propose in a round that does not draft; ``None``: unknown.

    Their method ``peek`` says so, where they have one. It is given the round with the k
    that is looked at (its draws have one position, as in a round of k = 0), and changes
    nothing that is proposed or kept; :meth:`DraftRows.commit` follows, with k = 0. Of
    proposals that were drawn from probabilities, what rows emit does not tell enough.
    """
    own = getattr(rows, "peek", None)
    found: Proposals | None = None if own is None else own(round_)
    return found if found is None or found.probabilities is None else None


def check_proposals(rows: DraftRows, round_: Round, proposals: Proposals) -> None:
    """See that proposals have the shapes and types of their protocol.

    Looks at no values, and so waits for nothing.

    Args:
        rows: whose they are.
        round_: what they are for.

    Raises:
        DrafterError: they have not.
    """
    name = type(rows).__qualname__
    if not isinstance(proposals, Proposals):
        raise DrafterError(
            f"drafter {name}: propose returned a {type(proposals).__name__}: it must "
            "return Proposals"
        )
    shape = (round_.recent.shape[0], round_.num_draft_tokens)
    vocab_size = round_.sampling.vocab_size
    for part, array, wanted, kind in (
        ("tokens", proposals.tokens, shape, mx.integer),
        ("lengths", proposals.lengths, shape[:1], mx.integer),
        ("probabilities", proposals.probabilities, (*shape, vocab_size), mx.floating),
    ):
        if array is None and part != "tokens":
            continue
        if not isinstance(array, mx.array):
            found = f"of type {type(array).__name__}"
        elif array.shape == wanted and mx.issubdtype(array.dtype, kind):
            continue
        else:
            found = _described(array.shape, str(array.dtype))
        dtype = "of integers" if kind is mx.integer else "of floats"
        raise DrafterError(
            f"drafter {name}: the {part} that it proposed are {found}: they must be "
            f"{_described(wanted, 'an array ' + dtype)}"
        )


def _described(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype.removeprefix('mlx.core.')} of shape {tuple(shape)}"
