"""A draft model: a smaller model, or the target quantized, proposes the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache import put_rows
from ..cache.capacity import CATCH_UP_STEP
from ..models.runner import EndedRow, ModelRows, ModelRunner
from ..models.vocabulary import VocabularyMap
from .commit import Accepted
from .drafter import Drafter, DraftRows, Proposals, Round
from .guard import ours

# After so many rounds, their tokens are joined to one array.
_COMPACT = 64


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
        self.runner = runner.with_tails()
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
            tokens = proposed[-1] if proposed else inputs
            logits = self._rows.forward(self._draft.read(tokens))
            return self._draft.proposable(logits[:, -1:])

        tokens, drawn_from = round_.choose_each(round_.num_draft_tokens, logits_after)
        together = mx.concatenate([round_.recent[:, -1:], *tokens], axis=1)
        return Proposals.within(together, drawn_from)

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
            self._rows.forward(self._draft.read(piece.tokens))
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


@dataclass(frozen=True)
class Piece:
    """What one forward writes.

    Args:
        tokens: shape (B, S).
        valid: how many tokens of each row are its own. They come first; the rest is
            padding, which has to be taken back.
    """

    tokens: mx.array
    valid: Sequence[int]

    @property
    def width(self) -> int:
        """S: tokens of every row, padding included."""
        return int(self.tokens.shape[1])


class Backlog:
    """The tokens of rounds without a draft, for a draft's cache to catch up with.

    Each row missed one in each round, and rows that joined later missed fewer.

    Nothing is computed while it grows: it refers to arrays that the rounds have anyway.

    Args:
        num_rows: number of rows.
    """

    def __init__(self, num_rows: int):
        #: Rounds that each row missed; 0 for rows that have ended (:meth:`reset`).
        self.counts = [0] * num_rows
        self._idle: set[int] = set()
        self._tokens: list[mx.array] = []
        self._compacted: mx.array | None = None

    @property
    def width(self) -> int:
        """Most rounds that a row missed."""
        return max(self.counts, default=0)

    @property
    def mean(self) -> int:
        """Rounds that a row missed, on average."""
        return round(sum(self.counts) / max(1, len(self.counts) - len(self._idle)))

    @property
    def _begun(self) -> list[int]:
        """The counts, where idle rows count as the longest: theirs is taken back."""
        width = self.width
        return [width if i in self._idle else n for i, n in enumerate(self.counts)]

    def add(self, tail: mx.array) -> None:
        """Note a round without a draft.

        Args:
            tail: each row's last two tokens before the round, shape (B, 2). The next
                round's tail begins with the second, so the first is noted.
        """
        self._tokens.append(tail)
        self.counts = [n + (i not in self._idle) for i, n in enumerate(self.counts)]
        if len(self._tokens) >= _COMPACT:
            self._compact()

    def _compact(self) -> mx.array:
        """All tokens, shape (B, W), right-aligned."""
        columns = [t if t is self._compacted else t[:, :1] for t in self._tokens]
        if not columns:
            return mx.zeros((len(self.counts), 0), mx.int32)
        tokens = mx.concatenate(columns, axis=1)
        mx.async_eval(tokens)
        self._tokens = [tokens]
        self._compacted = tokens
        return tokens

    def clear(self) -> None:
        """Forget all."""
        self._tokens, self._compacted = [], None
        self.counts = [0] * len(self.counts)

    def pieces(self, narrow: int, wide: int) -> Iterator[tuple[int, int]]:
        """Columns (first, last + 1) of each piece, where every column costs time.

        No row's tokens begin within a piece. While some rows' tokens have not begun,
        pieces are ``narrow``, since those rows get padding and have little room for it.
        After that they are ``wide``.
        """
        width, counts = self.width, self._begun
        begins = sorted({width - n for n in counts} | {0, width})
        for begin, end in pairwise(begins):
            step = wide if begin == width - min(counts) else narrow
            for first in range(begin, end, step):
                yield first, min(first + step, end)

    def exact(self, narrow: int, wide: int) -> Iterator[Piece]:
        """All tokens, cut as :meth:`pieces` says: a row has all of a piece or none."""
        tokens, width = self._compact(), self.width
        for first, end in self.pieces(narrow, wide):
            came = [first >= width - n for n in self._begun]
            yield Piece(tokens[:, first:end], [(end - first) * c for c in came])

    def padded(
        self, narrow: int, wide: int, fits: Callable[[int], bool]
    ) -> Iterator[Piece]:
        """All tokens in pieces of two widths, since new widths take time.

        All rows begin with the first piece, and are padded at their end.

        Args:
            fits: whether every row's cache has room for so many more tokens. Without
                room for a wide piece, pieces are narrow; without room for a narrow
                one, there is no padding.
        """
        tokens, width = self._compact(), self.width
        begins = mx.array([[width - n] for n in self._begun])
        first = 0
        while first < width:
            rest = width - first
            step = wide if rest > 2 * narrow and fits(first + wide) else narrow
            if not fits(first + step):
                step = min(step, rest)
            columns = mx.minimum(begins + mx.arange(first, first + step), width - 1)
            yield Piece(
                mx.take_along_axis(tokens, columns, axis=1),
                [min(max(n - first, 0), step) for n in self._begun],
            )
            first += step

    def filter(self, rows: Sequence[int]) -> None:
        """Keep only the given rows."""
        before = self.width
        self.counts = [self.counts[i] for i in rows]
        self._idle = {new for new, i in enumerate(rows) if i in self._idle}
        if before:
            tokens = self._compact()[mx.array(list(rows), mx.int32)]
            self._hold(tokens[:, before - self.width :])

    def extend(self, other: Backlog) -> None:
        """Append the rows of ``other``."""
        parts = [self._compact(), other._compact()]
        self._idle |= {len(self.counts) + i for i in other._idle}
        self.counts += other.counts
        width = self.width
        self._hold(
            mx.concatenate(
                [mx.pad(p, [(0, 0), (width - p.shape[1], 0)]) for p in parts]
            )
        )

    def reset(self, rows: Sequence[int]) -> None:
        """The given rows have ended: what they missed is not needed."""
        self._idle |= set(rows)
        if self.width:
            counts = [0 if i in rows else n for i, n in enumerate(self.counts)]
            self._aligned(self._compact(), counts)

    def place(self, rows: Sequence[int], other: Backlog) -> None:
        """Put the first rows of ``other`` in the place of the given ones."""
        self._idle -= set(rows)
        self._idle |= {row for i, row in enumerate(rows) if i in other._idle}
        counts = list(self.counts)
        for i, row in enumerate(rows):
            counts[row] = other.counts[i]
        if self.width or other.width:
            width = max(self.width, other.width)
            tokens, new = (
                mx.pad(p, [(0, 0), (width - p.shape[1], 0)])
                for p in (self._compact(), other._compact())
            )
            self._aligned(put_rows(tokens, rows, new), counts)

    def _aligned(self, tokens: mx.array, counts: list[int]) -> None:
        """Hold right-aligned ``tokens``; ``counts`` are each row's own."""
        self.counts = counts
        self._hold(tokens[:, tokens.shape[1] - self.width :])

    def _hold(self, tokens: mx.array) -> None:
        self._tokens = [tokens] if self.width else []
        self._compacted = tokens if self.width else None
