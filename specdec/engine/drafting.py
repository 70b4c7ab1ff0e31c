"""The drafter's side of a batch: there from the beginning, or begun when wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from ..spec_decode import Drafter, DraftRows, Proposals, Round
from ..spec_decode.drafter import late, peek
from ..spec_decode.rejection_sampler import Verdict

Texts = Sequence[Sequence[int]]


class Drafting:
    """A drafter's rows beside those of the target.

    A draft that hardly pays should not cost its share of prefill. So its rows may be
    begun late, with what has been committed until then: chunk by chunk, while rounds
    go on without proposals; of these it is told in the end.

    Args:
        drafter: proposes; ``None``: nothing does.
    """

    def __init__(self, drafter: Drafter | None):
        self._drafter = drafter
        self._rows: DraftRows | None = None
        # Rows that are being begun late, what is left of their prefill, and the rounds
        # that they do not know of.
        self._coming: DraftRows | None = None
        self._chunks: Iterator[None] = iter(())
        self._untold: list[tuple[Round, Verdict]] = []

    @property
    def ready(self) -> bool:
        """Whether it can propose."""
        return self._rows is not None

    @property
    def waits(self) -> bool:
        """Whether there is a drafter whose rows have not been begun."""
        return not (self._drafter is None or self.ready or self.coming)

    @property
    def coming(self) -> bool:
        """Whether its rows are being begun late."""
        return self._coming is not None

    def begin(self, texts: Texts, *, max_length: int) -> None:
        """Begin rows for prompts; :meth:`prefill` takes them."""
        if self._drafter is not None:
            self._rows = self._drafter.rows(texts, max_length=max_length)

    def prefill(self) -> Iterator[None]:
        """Take the prompts, yielding behind each chunk."""
        if self._rows is not None:
            yield from self._rows.prefill()

    # -- late --------------------------------------------------------------

    def begin_late(self, texts: Texts, *, max_length: int) -> None:
        """Begin rows of which so much, and a token more, is committed.

        No round is in flight.
        """
        if self._drafter is not None:
            self._coming = late(self._drafter).rows(texts, max_length=max_length)
            self._chunks = iter(self._coming.prefill())

    def advance(self) -> None:
        """Take in a chunk of what is committed; behind the last it is ready."""
        if self._coming is None or next(self._chunks, _THROUGH) is not _THROUGH:
            return
        for round_, verdict in self._untold:
            self._coming.commit(round_, verdict)
        rows = self._coming
        self.let_go()
        self._rows = rows

    def let_go(self) -> None:
        """Wait again: with rows that are coming, or of no use."""
        self._rows, self._coming = None, None
        self._chunks, self._untold = iter(()), []

    # -- rounds ------------------------------------------------------------

    def observe(self, hidden: mx.array, lengths: Sequence[int]) -> None:
        """See hidden states of the target."""
        if self._rows is not None:
            self._rows.observe(hidden, lengths)

    def propose(self, round_: Round) -> Proposals | None:
        """Tokens for every row; ``None`` where it is not ready, or none are wanted."""
        if self._rows is None or not round_.num_draft_tokens:
            return None
        return self._rows.propose(round_)

    def peek(self, round_: Round, num_draft_tokens: int) -> Proposals | None:
        """What it would propose in a round without a draft, where that is told."""
        if self._rows is None or not num_draft_tokens:
            return None
        return peek(self._rows, replace(round_, num_draft_tokens=num_draft_tokens))

    def commit(self, round_: Round, verdict: Verdict) -> None:
        """Learn what a round kept."""
        if self._rows is not None:
            self._rows.commit(round_, verdict)
        elif self.coming:
            self._untold.append((round_, verdict))

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Committed tokens of the longest and shortest row."""
        if self._rows is not None:
            self._rows.note_lengths(longest, shortest)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows; those that are coming have to be begun anew."""
        if self._rows is None:
            self.let_go()
        else:
            self._rows.filter(rows)

    def extend(self, other: Drafting) -> None:
        """Append the rows of ``other``; where one of them is not ready, none is."""
        if self._rows is not None and other._rows is not None:
            self._rows.extend(other._rows)
        else:
            self.let_go()


_THROUGH = object()
