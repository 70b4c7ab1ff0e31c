"""A draft model: a smaller model, or the target quantized, proposes the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache.capacity import CATCH_UP_STEP
from ..models.runner import EndedRow, ModelRows, ModelRunner
from ..models.vocabulary import VocabularyMap
from .backlog import Backlog, Piece
from .drafter import Drafter, DraftRows, Proposals, Round
from .guard import ours
from .rejection_sampler import Accepted


class DraftModel(Drafter):
    """Proposes k tokens with k forwards of a draft model.

    Args:
        runner: the draft model.
        vocab_size: the target's number of logits; no token beyond it is proposed.
        max_draft_tokens: largest k of any round.
        context_length: positions that the draft model was made for, if known.
        vocabulary: maps the target's tokens to its own, if they differ.

    Attributes:
        vocabulary_share: the share of the target's tokens that it can propose;
            ``None`` if both models have the same vocabulary.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        max_draft_tokens: int,
        context_length: int | None = None,
        vocabulary: VocabularyMap | None = None,
    ):
        self.runner = runner
        self.context_length = context_length
        self.vocab_size = min(vocab_size, runner.vocab_size)
        # The target has more tokens than the draft has embeddings.
        self._lacks = vocabulary is None and runner.vocab_size < vocab_size
        # For each of the target's tokens, the token that the draft reads (on the host
        # and on the device) and whether it may propose it; ``None``: the same tokens.
        self._host_reads: npt.NDArray[np.int32] | None = None
        self._reads: mx.array | None = None
        self._proposes: mx.array | None = None
        if vocabulary is not None:
            sized = vocabulary.sized(vocab_size, runner.vocab_size)
            self._host_reads, self._proposes = sized.reads, mx.array(sized.proposes)
            self.vocab_size, self.vocabulary_share = vocab_size, vocabulary.share
            self._reads = mx.array(sized.reads)
            mx.eval(self._reads, self._proposes)
        # The first forward of a round writes two tokens.
        self.max_round = max(2, max_draft_tokens + 1)

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> DraftModelRows:
        known = [self.known(p[:-1]) for p in prompts]
        rows = self.runner.rows(known, max_round=self.max_round, max_length=max_length)
        return DraftModelRows(self, rows)

    def known(self, tokens: Sequence[int]) -> Sequence[int]:
        """:meth:`read` for tokens on the host."""
        if (reads := self._host_reads) is not None:
            return cast("list[int]", reads[np.array(tokens, np.int32)].tolist())
        if self._lacks:
            return [min(token, self.vocab_size - 1) for token in tokens]
        return tokens

    def read(self, tokens: mx.array) -> mx.array:
        """The draft's tokens for the target's."""
        if self._reads is not None:
            return self._reads[tokens]
        return mx.minimum(tokens, self.vocab_size - 1) if self._lacks else tokens

    def proposable(self, logits: mx.array) -> mx.array:
        """The draft's logits by the target's ids; minus infinity for other tokens.

        So it chooses by the target's ids, as the target does: with the same bias,
        filters, noise and grammars. Probabilities add up to 1 over its own tokens.
        """
        if self._proposes is None or self._reads is None:
            return logits[..., : self.vocab_size]
        taken = mx.take(logits, self._reads, axis=-1)
        return mx.where(self._proposes, taken, -mx.inf)


@ours
class DraftModelRows(DraftRows):
    """Rows of a draft model.

    The first forward of a round takes each row's last *two* committed tokens. The draft
    has seen the first of them already, unless the round before accepted every proposal.
    Writing it again changes nothing, so no round is a special case.
    """

    def __init__(self, draft: DraftModel, rows: ModelRows):
        self._draft = draft
        self._rows = rows
        self._missed = Backlog(rows.num_rows)
        # Backlog tokens in the round's first forward.
        self._ahead = 0

    @property
    def backlog(self) -> int:
        return self._missed.mean

    @property
    def new_shapes(self) -> int:
        return self._rows.new_shapes

    def separate(
        self, salts: Sequence[str | None], clients: Sequence[str | None]
    ) -> None:
        self._rows.separate(salts, clients)

    def store(self, ended: Sequence[EndedRow]) -> None:
        prefixes, rows = self._rows.runner.prefixes, []
        if prefixes is None or prefixes.form.has_ends:  # they are further, or behind
            return
        for row in ended:
            # Two tokens are missing, and those of rounds without a draft.
            missed = max(0, self._missed.counts[row.slot] - len(row.rounds))
            tokens = self._draft.known(row.tokens)
            tokens = tokens[: max(0, len(tokens) - 1 - missed)]
            rows.append(replace(row, tokens=tokens, excess=0))
        self._rows.store(rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def prefill(self) -> Iterator[None]:
        """Take in the prompts, without each row's last token."""
        for more in self._rows.prefill():
            if more:
                yield

    def propose(self, round_: Round) -> Proposals:
        """Choose k tokens per row, with one forward each."""
        inputs = self._catch_up(round_)
        self._rows.checkpoint()

        def logits_after(proposed: Sequence[mx.array]) -> mx.array:
            logits = self._forward(proposed[-1] if proposed else inputs)
            return self._draft.proposable(logits[:, -1:])

        tokens, drawn_from = round_.choose_each(round_.num_draft_tokens, logits_after)
        together = mx.concatenate([round_.recent[:, -1:], *tokens], axis=1)
        return Proposals.within(together, drawn_from)

    def _forward(self, tokens: mx.array) -> mx.array:
        return self._rows.forward(self._draft.read(tokens))

    def _catch_up(self, round_: Round) -> mx.array:
        """Write the tokens that rounds without a draft have committed.

        Returns:
            The first input of the round: the last two tokens. Where shapes need not
            repeat, a short rest of the missed tokens comes before them.
        """
        tokens = round_.tail
        if not self._missed.width:
            return tokens
        narrow = self._draft.max_round
        if self._draft.runner.backend.static_shapes:
            pieces = list(self._missed.padded(narrow, CATCH_UP_STEP, self._rows.fits))
        else:
            *pieces, rest = self._missed.exact(narrow, CATCH_UP_STEP)
            all_have = min(rest.valid) > 0
            if all_have and rest.width + round_.num_draft_tokens + 1 <= narrow:
                self._ahead = rest.width
                tokens = mx.concatenate([rest.tokens, tokens], axis=1)
            else:
                pieces.append(rest)
        self._missed.clear()
        self._write(pieces, round_.active)
        return tokens

    def _write(self, pieces: Sequence[Piece], active: mx.array) -> None:
        """Write pieces and take padding back; rows that have ended keep nothing."""
        narrow = self._draft.max_round
        widest = max((piece.width for piece in pieces), default=0)
        if widest > narrow:
            self._rows.resize(widest)
        for piece in pieces:
            self._forward(piece.tokens)
            width = piece.width
            padding = [width - n for n in piece.valid]
            self._rows.trim_per_sequence(
                mx.where(active, mx.array(padding), width), width, min(padding)
            )
            self._rows.evaluate()
        if widest > narrow:
            self._rows.resize(narrow)

    def commit(self, round_: Round, accepted: Accepted) -> None:
        """Keep what was accepted; remember the token of a round without a draft."""
        if not round_.num_draft_tokens:
            self._missed.add(round_.tail)
            return
        written = round_.num_draft_tokens + 1
        dropped = accepted.rejected
        if self._ahead:
            dropped = dropped + mx.where(round_.active, 0, self._ahead)
        self._rows.trim_per_sequence(dropped, written + self._ahead)
        self._ahead = 0

    def note_lengths(self, longest: int, shortest: int) -> None:
        """The cache lacks the last two committed tokens, or more."""
        if not self._missed.width:
            self._rows.note_lengths(longest - 2, max(shortest - 2, 0))

    def filter(self, rows: Sequence[int]) -> None:
        self._rows.filter(rows)
        self._missed.filter(rows)

    def extend(self, other: DraftModelRows) -> None:
        self._rows.extend(other._rows)
        self._missed.extend(other._missed)

    def place(self, rows: Sequence[int], other: DraftModelRows, num_rows: int) -> None:
        self._rows.place(rows, other._rows)
        self._missed.place(rows, other._missed)

    def reset(self, rows: Sequence[int]) -> None:
        self._rows.reset(rows)
        self._missed.reset(rows)

    def make_finite(self, rows: Sequence[int]) -> None:
        self._rows.make_finite(rows)
