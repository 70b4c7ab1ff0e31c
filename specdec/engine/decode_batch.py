"""Rows that decode together, and the round that they go through.

    propose -> verify -> accept -> trim -> commit

A batch has a fixed number of slots. A row that ends leaves its slot idle; a row that
joins is written into an idle one, and nothing else is copied or changes its shape.

What decides the next round's inputs (kept counts, last tokens, offsets) stays on the
device. The host reads a round's tokens while the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults
from ..models.runner import ModelRunner
from ..request import Request
from ..spec_decode import Drafter, DraftRows, Proposals, Round
from ..spec_decode.chain import continued
from ..spec_decode.commit import Committed
from ..spec_decode.draft_length import DraftLength
from ..spec_decode.verifier import Verifier
from .in_flight import InFlight
from .limits import DraftLimits
from .observer import RoundObserver
from .pacing import Pacing

NO_TOKENS: tuple[int, ...] = ()


class DecodeBatch:
    """Rows that decode in lockstep, each keeping what was accepted for it.

    Between rounds the target's cache holds all committed tokens of a row but the
    last, which is the first input of its next verification. That of an idle slot holds
    nothing.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly.
        rows: those to begin with, one or more, none of them begun.
        length: chooses k, how many tokens are proposed in a round.
        backend: how to shape rounds.
        observer: sees every round.
        in_flight: rounds that were handed out and not read yet, of this batch and of
            those that it joins or is joined by.
        num_slots: as many as ``rows`` or more.

    Attributes:
        slots: the row of each slot; ``None`` where it is idle.
        expected: rows that are to take the places of those that end.
        alone: whether no other rows decode meanwhile; then first tokens do not wait for
            the drafter's prompts.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        rows: Sequence[Request],
        length: DraftLength,
        backend: BackendDefaults,
        observer: RoundObserver,
        in_flight: deque[InFlight],
        num_slots: int,
    ):
        self.slots: list[Request | None] = [*rows, *[None] * (num_slots - len(rows))]
        self.expected = 0
        self.alone = True
        self._in_flight = in_flight
        self._limits = DraftLimits(
            drafter, length.max_draft_tokens, exact=backend.costs_by_token
        )
        self._backend = backend
        self._observer = observer
        self._pacing = Pacing(length, backend.peek_rows)
        prompts = [s.prompt_tokens if s else NO_TOKENS for s in self.slots]
        # The last token is fed alone: no chunk then computes logits it drops.
        self._target = target.rows(
            [p[:-1] for p in prompts],
            max_round=self._limits.most + 1,
            max_length=self._max_length(),
            last=[p[-1] if p else 0 for p in prompts],
            single_stays=True,
        )
        if any(salts := self._salts):
            self._target.separate(salts)
        self._drafter = drafter
        self._draft: DraftRows | None = None
        if self._wants_draft():
            self._draft = self._begin_draft()
            self._target.beside = self._draft.context
        self._note_rows()
        # On the device, after all rounds that were handed out.
        self._committed = Committed.of(prompts, self._rules.sampling.context_size)

    def _max_length(self) -> int:
        """Tokens that the longest row can ever hold, rejected ones included."""
        longest = max(s.max_length for s in self.slots if s)
        # A row that has ended may be past its end by rounds that were not read.
        return longest + (LOOKAHEAD + 2) * (self._limits.most + 1)

    def _is_drafted(self, sequence: Request) -> bool:
        """Whether a row is drafted for, at least when it begins."""
        return self._limits.at(sequence, len(sequence.prompt_tokens)) > 0

    def _wants_draft(self) -> bool:
        """Whether the drafter needs to know the rows: all, where it sees hidden states.

        Those of a prompt are there but once.
        """
        sees = self._target.runner.recorder is not None
        return self._drafter is not None and (
            sees or any(s is not None and self._is_drafted(s) for s in self.slots)
        )

    def _begin_draft(self) -> DraftRows:
        """The drafter's rows; one that is not drafted for has a last token, no more."""
        assert self._drafter is not None
        texts = []
        for s in self.slots:
            prompt = NO_TOKENS if s is None else s.prompt_tokens
            texts.append(prompt[0 if s and self._is_drafted(s) else -1 :] or (0,))
        rows = self._drafter.rows(texts, max_length=self._max_length())
        if any(salts := self._salts):
            rows.separate(salts)
        return rows

    @property
    def _salts(self) -> list[str | None]:
        return [None if s is None else s.params.cache_salt for s in self.slots]

    @property
    def unfinished(self) -> list[Request]:
        """Rows that are still being decoded."""
        return [s for s in self.slots if s is not None and s.finish_reason is None]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values: the target's, and what the drafter keeps."""
        draft = 0 if self._draft is None else self._draft.nbytes
        return self._target.nbytes + draft

    @property
    def drafts(self) -> bool:
        """Whether a row was drafted for in one of the last rounds."""
        return self._draft is not None and self._pacing.drafts

    # -- prefill -----------------------------------------------------------

    def prefill(self) -> Iterator[None]:
        """Hand the prompts to the device, yielding between chunks.

        The target's come first, then the first token of every row, which goes to those
        in flight, then the drafter's.
        """
        for more in self._target.prefill():
            self._observe(self._following(), self._target.written)
            if more:
                yield
        for sequence, reused in zip(self.slots, self._target.reused, strict=True):
            if sequence is not None:
                sequence.prefix_tokens = reused
        first = self.dispatch(0, first=True)
        self._in_flight.append(first)
        self._observe(first.decision.result.accepted.chosen, [1] * len(self.slots))
        if self._draft is not None:
            if self.alone:
                yield
            yield from self._draft.prefill()

    def _following(self) -> mx.array:
        """Of the last chunk of the prompts, the token after each, shape (B, S)."""
        target = self._target
        if target.hidden is None:
            return self._committed.newest
        width, tokens = target.hidden.shape[1], []
        for s, n, end in zip(self.slots, target.written, target.done, strict=True):
            after = NO_TOKENS if s is None else s.prompt_tokens[end - n + 1 : end + 1]
            tokens.append([*after[:n], *[0] * (width - n)])
        return mx.array(tokens, mx.int32)

    def _observe(self, following: mx.array, lengths: Sequence[int]) -> None:
        """Show the drafter the hidden states that it asked for."""
        if self._target.hidden is not None and self._draft is not None:
            drafted = [
                n if s and self._is_drafted(s) else 0
                for s, n in zip(self.slots, lengths, strict=True)
            ]
            self._draft.observe(self._target.hidden, following, drafted)

    # -- rounds ------------------------------------------------------------

    def needs_a_round(self) -> bool:
        """Whether a row can need more than the rounds in flight surely bring."""
        return any(s.remaining > self._pending(s) for s in self.unfinished)

    def _pending(self, sequence: Request) -> int:
        """Rounds in flight that the row takes part in: each brings a token or more."""
        return sum(f.has(sequence) for f in self._in_flight)

    def choose_k(self) -> int:
        """Tokens to propose in the next round; to ask twice is as to ask once."""
        left = {s.number: s.remaining for s in self.unfinished}
        room, most = list[int](), 0
        if self._draft is not None:
            most = max(self._limits.of_use(s, self._pending) for s in self.unfinished)
            room = [n for n in self._row_limits(most) if n >= 0]
        missed, alone = self._backlog, not self.expected
        k = self._pacing.choose(
            len(self.slots), room, left, backlog=missed, alone=alone
        )
        return min(most, k)

    @property
    def _backlog(self) -> int:
        """Tokens of a row, on average, that the drafter has to take in."""
        return 0 if self._draft is None else self._draft.backlog

    @property
    def _new_shapes(self) -> int:
        """Forwards so far, of both models, of shapes that were not ready."""
        draft = 0 if self._draft is None else self._draft.new_shapes
        return self._target.new_shapes + draft

    def lookahead(self, k: int) -> int:
        """Rounds that may be on their way when one of k is handed out.

        A round that turns out to be of no use is dear where tokens, not launches,
        cost time, and functions of the user's, and grammars, need every token before
        the next: then rounds are read at once.
        """
        if self._rules.needs_tokens or (k and self._backend.costs_by_token):
            return 0
        return LOOKAHEAD

    def _row_limits(self, k: int) -> tuple[int, ...]:
        """Draft tokens that each row may accept in a round of k; -1: it has ended."""
        return self._limits.of(k, self.slots, self._bounds, self._pending)

    def dispatch(self, k: int, *, first: bool = False) -> InFlight:
        """Build one round and hand it to the device; nothing here waits for it.

        Args:
            k: tokens to propose.
            first: it is the last step of the prompts, and brings the first tokens.
        """
        limits = self._row_limits(k if self._draft is not None else 0)
        k = max(0, *limits)
        limit = self._limits.array(limits, self._bounds, self._committed.lengths)
        before, looks = self._new_shapes, False
        self._observer.begun(k)
        if not first:
            numbers = [-1 if s is None else s.number for s in self.slots]
            looks = self._pacing.begin(k, limits, numbers, self._backlog)
        # 1. propose
        committed = self._committed.within(self._rules.sampling.context_size)
        round_ = self._rules.round_of(k, committed, self._active, limits)
        inputs, proposals, peeked = self._committed.newest, None, None
        if k and self._draft is not None:
            proposals = self._draft.propose(round_)
            if round_.given is not None:  # for those that do not look at it
                vocab_size = round_.sampling.vocab_size
                proposals = continued(round_.given, proposals, vocab_size)
            inputs = proposals.after(inputs)
            self._observer.built("draft", inputs)
        elif looks:
            peeked = self._peek(round_)
        # 2. verify, 3. accept
        logits = self._target.forward(inputs)
        self._observer.built("verify", logits)
        decision = self._rules.decide(round_, inputs, proposals, logits, limit)
        result, accepted = decision.result, decision.result.accepted
        self._observer.built("sampling", accepted.kept, accepted.chosen)
        # 4. trim, unless all rows keep all that was written
        if k or min(limits) < 0 or decision.errors:
            self._target.trim_per_sequence(result.rejected, k + 1)
        # 5. commit
        if self._draft is not None and not first:
            self._draft.commit(round_, replace(accepted, hidden=self._target.hidden))
        self._committed = result.committed
        if self._new_shapes > before:
            self._pacing.interrupt(new_shape=k > 0)  # rounds that waited are not timed
        rows, offset = tuple(self.slots), self._target.offset
        return InFlight.of(rows, decision, offset, first=first, peeked=peeked)

    def _peek(self, round_: Round) -> Proposals | None:
        """What would be proposed in a round without a draft, if the drafter says."""
        if self._draft is None or not self._limits.most:
            return None
        # What a grammar allows is not made for tokens that nobody verifies.
        most = self._limits.most
        asked = replace(round_, num_draft_tokens=most, grammar=None)
        peeked = self._draft.peek(asked)
        # Of tokens that were drawn, what rows emit does not say enough.
        if peeked is None or peeked.probabilities is not None:
            return None
        self._pacing.look()
        return peeked

    def learn(self, in_flight: InFlight, kept: Sequence[int | None]) -> None:
        """Note what a round brought, which was the oldest in flight.

        Args:
            kept: tokens of each slot; ``None`` where no row was running.
        """
        self._pacing.read(in_flight, kept)

    def note_interruption(self) -> None:
        """Other work was handed out between two rounds."""
        self._pacing.interrupt()

    def _bounds(self) -> list[tuple[int, int]]:
        """Least and most tokens of each row in the target's cache.

        As many as were read, plus what the rounds in flight may add.
        """
        bounds = []
        for s in self.slots:
            if s is None:
                bounds.append((0, 0))
                continue
            least = most = s.length - 1
            for flying in self._in_flight:
                if flying.has(s):
                    least += s.finish_reason is None
                    most += flying.num_draft_tokens + 1
            bounds.append((least, most))
        return bounds

    def _note_lengths(self) -> None:
        """Tell the caches what the host knows of their rows."""
        least, most = zip(*self._bounds(), strict=True)
        self._target.note_lengths(max(most), min(least))
        if self._draft is not None:
            # A row that is not drafted for may be shorter with the drafter.
            drafted = all(s and self._is_drafted(s) for s in self.slots)
            shortest = min(least) + 1 if drafted else 0
            self._draft.note_lengths(max(most) + 1, shortest)

    # -- rows --------------------------------------------------------------

    def _note_rows(self) -> None:
        """Work out what depends on which rows there are."""
        running = [s is not None and s.finish_reason is None for s in self.slots]
        self._active = mx.array(running, mx.bool_)
        self._rules = Verifier.of(self.slots, self._target.runner.vocab_size)

    def retire(self) -> None:
        """Let go of rows that have ended.

        Their slots stay where other rows wait for them; else they go, as far as that
        saves work.
        """
        ended = [
            i for i, s in enumerate(self.slots) if s and s.finish_reason is not None
        ]
        for i in ended:
            self.slots[i] = None
        running, size = len(self.unfinished), len(self.slots)
        if not running:
            return
        if not self._wants_draft():
            self._draft = None
        if running < size:
            wanted = min(size, running + self.expected)
            size = self._backend.rows_to_keep(size, wanted)
        if size < len(self.slots):
            self._resize(size)
        elif ended:
            self._target.reset(ended)
            if self._draft is not None:
                self._draft.reset(ended)
            self._note_rows()
        self._note_lengths()

    def join(self, other: DecodeBatch, num_slots: int) -> None:
        """Take the running rows of ``other``: into idle slots, or into new ones.

        Args:
            other: a batch whose prompts were handed out, and no round.
            num_slots: how many there are to be where there are too few.
        """
        rows = [i for i, s in enumerate(other.slots) if s and s.finish_reason is None]
        free = [i for i, s in enumerate(self.slots) if s is None]
        if (self._draft is None) != (other._draft is None):
            plain = self if self._draft is None else other
            plain._draft = plain._begin_draft()
            for _ in plain._draft.prefill():  # of last tokens there is hardly any
                pass
            self._pacing.restart()
        if len(free) >= len(rows):
            if len(rows) < len(other.slots):
                other._resize(len(rows))
            self._place(free[: len(rows)], other)
        else:
            self.compact()
            if (size := max(len(rows), num_slots - len(self.slots))) < len(other.slots):
                other._resize(size)
            self._extend(other)
            if len(self.slots) < num_slots and self._backend.static_shapes:
                self._resize(num_slots)
        self._note_rows()
        self._note_lengths()

    def _place(self, slots: Sequence[int], other: DecodeBatch) -> None:
        """Put the rows of ``other`` into idle slots; no other row is touched."""
        self._target.place(slots, other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.place(slots, other._draft, len(self.slots))
        self._committed = self._committed.placed(slots, other._committed)
        for slot, sequence in zip(slots, other.slots, strict=True):
            self.slots[slot] = sequence

    def _extend(self, other: DecodeBatch) -> None:
        """Append the slots of ``other``, which copies all."""
        self._target.extend(other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.extend(other._draft)
        self._committed = self._committed.joined(other._committed)
        self.slots += other.slots

    def compact(self) -> None:
        """Have no idle slots: what they hold is free."""
        if len(running := self.unfinished) < len(self.slots):
            self._resize(len(running))

    def _resize(self, size: int) -> None:
        """Have ``size`` slots, as many as rows are running or more: copies them all."""
        running = [i for i, s in enumerate(self.slots) if s and s.finish_reason is None]
        idle = [i for i in range(len(self.slots)) if i not in running]
        rows = sorted(running + idle[: max(0, size - len(running))])
        self.slots = [self.slots[i] if i in running else None for i in rows]
        # A slot is never empty of tokens when it is made of another one.
        added = size - len(rows)
        rows += [0] * added
        self.slots += [None] * added
        self._note_rows()
        self._committed = self._committed.only(rows)
        empty = [i for i, s in enumerate(self.slots) if s is None]
        for part in (self._target, self._draft):
            if part is not None:
                part.filter(rows)
                part.reset(empty)
