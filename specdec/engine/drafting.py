"""The drafter's side of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from ..spec_decode import Drafter, DraftRows, Proposals, Round
from ..spec_decode.drafter import backlog, peek
from ..spec_decode.rejection_sampler import Verdict


class Drafting:
    """A drafter's rows beside those of the target, where a row is drafted for.

    Args:
        drafter: proposes; ``None``: nothing does.
    """

    def __init__(self, drafter: Drafter | None):
        self._drafter = drafter
        self._rows: DraftRows | None = None

    @property
    def ready(self) -> bool:
        """Whether there are rows."""
        return self._rows is not None

    @property
    def backlog(self) -> int:
        """Tokens of a row, on average, that the drafter has to catch up with."""
        return 0 if self._rows is None else backlog(self._rows)

    def begin(self, texts: Sequence[Sequence[int]], *, max_length: int) -> None:
        """Begin rows for prompts; :meth:`prefill` takes them."""
        if self._drafter is not None:
            self._rows = self._drafter.rows(texts, max_length=max_length)

    def end(self) -> None:
        """Drop the rows: none of them is drafted for."""
        self._rows = None

    def prefill(self) -> Iterator[None]:
        """Take the prompts, yielding after each chunk."""
        if self._rows is not None:
            yield from self._rows.prefill()

    def observe(self, hidden: mx.array, lengths: Sequence[int]) -> None:
        """See hidden states of the target."""
        if self._rows is not None:
            self._rows.observe(hidden, lengths)

    def propose(self, round_: Round) -> Proposals | None:
        """Tokens for every row; ``None`` without rows, or where none are wanted."""
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

    def note_lengths(self, longest: int, shortest: int) -> None:
        """Committed tokens of the longest and shortest row."""
        if self._rows is not None:
            self._rows.note_lengths(longest, shortest)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        if self._rows is not None:
            self._rows.filter(rows)

    def extend(self, other: Drafting) -> None:
        """Append the rows of ``other``; there are rows in both, or in neither."""
        if self._rows is not None and other._rows is not None:
            self._rows.extend(other._rows)
