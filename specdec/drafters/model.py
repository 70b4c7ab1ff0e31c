"""A draft model: a smaller model, or the target quantized, proposing in lockstep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from ..models.runner import ModelRows, ModelRunner
from ..verification import Verdict
from .base import Proposals, Round


class DraftModel:
    """Proposes k tokens with k forwards of a draft model.

    Args:
        runner: the draft model.
        vocab_size: the target's number of logits; nothing beyond is proposed.
        max_draft_tokens: largest k of any round.
        context_length: positions that the draft model was made for, if known.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        max_draft_tokens: int,
        context_length: int | None = None,
    ):
        self.runner = runner
        self.context_length = context_length
        self.vocab_size = min(vocab_size, runner.vocab_size)
        # A target may have more tokens than the draft has embeddings.
        self.clips = runner.vocab_size < vocab_size
        # The first forward of a round writes two tokens.
        self.max_round = max(2, max_draft_tokens + 1)

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> DraftModelRows:
        """Begin rows for ``prompts``."""
        known = [p[:-1] for p in prompts]
        if self.clips:
            last = self.runner.vocab_size - 1
            known = [[min(token, last) for token in p] for p in known]
        rows = self.runner.rows(known, max_round=self.max_round, max_length=max_length)
        return DraftModelRows(self, rows)


class DraftModelRows:
    """Rows of a draft model.

    The first forward of a round takes each row's last *two* committed tokens.
    The draft has seen the first of them already, unless the round before kept
    every proposal; writing it again changes nothing, so no round is special.
    """

    def __init__(self, draft: DraftModel, rows: ModelRows):
        self._draft = draft
        self._rows = rows
        # After rounds without proposals: committed tokens behind those in the
        # cache, shape (B, more than 2).
        self._unseen: mx.array | None = None

    def prefill(self) -> Iterator[None]:
        """Take the prompts, but for each row's last token."""
        return self._rows.prefill()

    def propose(self, round_: Round) -> Proposals:
        """Choose k tokens per row, one forward each."""
        self._catch_up(round_.active)
        inputs = round_.tail
        tokens: list[mx.array] = []
        drawn_from: list[mx.array] = []
        for _ in range(round_.num_draft_tokens):
            logits = self._forward(inputs)[:, -1:, : self._draft.vocab_size]
            inputs, probabilities = round_.choose(logits, tokens)
            tokens.append(inputs)
            if probabilities is not None:
                drawn_from.append(probabilities)
        return Proposals(
            mx.concatenate(tokens, axis=1),
            mx.concatenate(drawn_from, axis=1) if drawn_from else None,
        )

    def _forward(self, tokens: mx.array) -> mx.array:
        if self._draft.clips:
            tokens = mx.minimum(tokens, self._draft.runner.vocab_size - 1)
        return self._rows.forward(tokens)

    def _catch_up(self, active: mx.array | None = None) -> None:
        """Write what rounds without proposals committed, a round's width at a time."""
        if self._unseen is None:
            return
        missed = self._unseen[:, :-2]
        step = self._draft.max_round
        for first in range(0, missed.shape[1], step):
            chunk = missed[:, first : first + step]
            width = chunk.shape[1]
            self._forward(chunk)
            if active is not None:
                # Rows that have ended committed nothing: keep them where they are.
                self._rows.trim_per_sequence(mx.where(active, 0, width), width)
        self._unseen = None

    def commit(self, round_: Round, verdict: Verdict) -> None:
        """Keep what was accepted; remember what a round without proposals added."""
        written = round_.num_draft_tokens + 1
        if round_.num_draft_tokens:
            self._rows.trim_per_sequence(written - verdict.kept, written)
            return
        seen = round_.tail if self._unseen is None else self._unseen
        self._unseen = mx.concatenate([seen, verdict.chosen], axis=1)
        # Else the graph of every such round would live until it is looked at.
        mx.async_eval(self._unseen)

    def observe(self, hidden: mx.array, lengths: Sequence[int]) -> None:
        """Nothing: no hidden states are asked for."""

    def note_lengths(self, longest: int, shortest: int) -> None:
        """The cache is two tokens behind what is committed, or more."""
        if self._unseen is None:
            self._rows.note_lengths(longest - 2, max(shortest - 2, 0))

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        self._rows.filter(rows)
        if self._unseen is not None:
            self._unseen = self._unseen[mx.array(list(rows), mx.int32)]

    def extend(self, other: DraftModelRows) -> None:
        """Append the rows of ``other``."""
        self._catch_up()
        other._catch_up()
        self._rows.extend(other._rows)
