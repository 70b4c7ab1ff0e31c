"""A draft model: a smaller model, or the target quantized, proposing in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..models.runner import ModelRunner
from ..sampling import choose
from .base import Round


class DraftModel:
    """Proposes k tokens with k forwards of a draft model.

    The first forward of a round takes each row's last *two* committed tokens.
    The draft has seen the first of them already, unless the round before kept
    every proposal; writing it again changes nothing, so no round is special.

    Args:
        runner: the draft model.
        vocab_size: the target's number of logits; nothing beyond is proposed.
        max_draft_tokens: largest k of any round.
    """

    def __init__(self, runner: ModelRunner, *, vocab_size: int, max_draft_tokens: int):
        self._runner = runner
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._clip = runner.vocab_size < vocab_size
        self._max_draft_tokens = max_draft_tokens
        # Committed tokens behind those in the cache, shape (B, 2 or more).
        self._unseen: mx.array | None = None

    def start(self, batch_size: int, max_length: int) -> None:
        """Make empty caches for a new batch."""
        self._unseen = None
        self._runner.start(
            batch_size,
            max_round=max(2, self._max_draft_tokens + 1),
            max_length=max_length,
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Take the prompts, but for each row's last token."""
        self._runner.prefill([p[:-1] for p in prompts])
        self._runner.end_prefill()

    def propose(self, round_: Round) -> mx.array:
        """Choose k tokens per row, shape (B, k)."""
        inputs = round_.tail
        if self._unseen is not None:
            self._catch_up(self._unseen[:, :-2], round_.active)
        proposed = []
        for j in range(round_.num_draft_tokens):
            logits = self._forward(inputs)[:, -1:, : self._vocab_size]
            noise = None if round_.noise is None else round_.noise[:, j : j + 1]
            inputs = choose(logits, round_.sampling, noise)
            proposed.append(inputs)
        return mx.concatenate(proposed, axis=1)

    def _forward(self, tokens: mx.array) -> mx.array:
        if self._clip:
            tokens = mx.minimum(tokens, self._runner.vocab_size - 1)
        return self._runner.forward(tokens)

    def _catch_up(self, missed: mx.array, active: mx.array) -> None:
        """Write what rounds without proposals committed, a round's width at a time."""
        step = self._max_draft_tokens + 1
        for first in range(0, missed.shape[1], step):
            chunk = missed[:, first : first + step]
            width = chunk.shape[1]
            self._forward(chunk)
            # Rows that have ended committed nothing: keep them where they are.
            self._runner.trim_per_sequence(mx.where(active, 0, width), width)
        self._unseen = None

    def commit(self, round_: Round, chosen: mx.array, kept: mx.array) -> None:
        """Keep what was accepted; remember what a round without proposals added."""
        written = round_.num_draft_tokens + 1
        if round_.num_draft_tokens:
            self._runner.trim_per_sequence(written - kept, written)
            return
        seen = round_.tail if self._unseen is None else self._unseen
        self._unseen = mx.concatenate([seen, chosen], axis=1)

    def note_lengths(self, longest: int, shortest: int) -> None:
        """The cache is two tokens behind what is committed, or more."""
        if self._unseen is None:
            self._runner.note_lengths(longest - 2, max(shortest - 2, 0))

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows."""
        self._runner.filter(rows)
        if self._unseen is not None:
            self._unseen = self._unseen[mx.array(list(rows), mx.int32)]
