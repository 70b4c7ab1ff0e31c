"""Rows that decode in lockstep, and the round that they go through together.

    propose -> verify -> accept -> trim -> commit -> read

What decides the next round's inputs (kept counts, last tokens, offsets) stays
on the device; the host reads a round's tokens while the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace

import mlx.core as mx

from ..backend import BackendDefaults
from ..models.compiled import CompiledForwards
from ..models.runner import ModelRunner
from ..request import Sequence
from ..spec_decode import Drafter
from ..spec_decode.commit import Committed
from ..spec_decode.draft_length import DraftLength
from ..spec_decode.draft_length.pacing import Pacer
from ..spec_decode.ready import behind
from ..spec_decode.verifier import RowRules
from .drafting import Drafting
from .in_flight import InFlight, RowOutput
from .limits import DraftLimits
from .observer import RoundObserver

# Rounds without a draft after which it is asked again whether rows that join get one.
IDLE = 64


class RowBatch:
    """Rows that decode in lockstep, each keeping what was accepted for it.

    Between rounds the target's cache holds all committed tokens of a row but the
    last, which is the first input of its next verification.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly.
        sequences: the rows, one or more, none of them begun.
        length: chooses k, how many tokens are proposed in a round.
        backend: how to shape rounds.
        observer: is told of every round.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        sequences: AbstractSequence[Sequence],
        length: DraftLength,
        backend: BackendDefaults,
        observer: RoundObserver,
    ):
        self.rows = tuple(sequences)
        # Whether others wait to take the places of rows that end.
        self.replaced = False
        self._limits = DraftLimits(
            drafter, length.max_draft_tokens, every_use=backend.repeat_shapes
        )
        # The largest k of any round.
        self.num_draft_tokens = self._limits.most
        self._backend = backend
        self._observer = observer
        self._vocab_size = target.vocab_size
        prompts = [s.request.prompt_tokens for s in self.rows]
        self._pacer = Pacer(length, peek_rows=backend.peek_rows)
        # The last token is fed alone: no chunk then computes logits it drops.
        self._target = target.rows(
            [p[:-1] for p in prompts],
            max_round=self.num_draft_tokens + 1,
            max_length=self._max_length(),
        )
        self._draft = Drafting(drafter)
        if self._is_drafted_for():
            self._begin_drafting()
        self._note_rows()
        # On the device, behind all rounds that were handed out.
        self._committed = Committed.of(prompts, self._rules.sampling.context_size)
        # Tokens in the target's cache per row, as far as the host has read.
        self._cached = [len(p) - 1 for p in prompts]
        self._in_flight: deque[InFlight] = deque()

    def _max_length(self) -> int:
        """Tokens that the longest row can ever hold, rejected ones included."""
        longest = max(s.request.max_length for s in self.rows)
        # A row that has ended may be past its end by rounds that were not read; while
        # it stays, every round writes behind it, then trims.
        return longest + (self._backend.lookahead + 2) * (self.num_draft_tokens + 1)

    def _is_drafted(self, sequence: Sequence) -> bool:
        """Whether a row is drafted for, at least when it begins."""
        return self._limits.at(sequence, len(sequence.request.prompt_tokens)) > 0

    def _is_drafted_for(self) -> bool:
        """Whether the drafter needs to know the rows: all, where it sees hidden states.

        Those of a prompt are there but once.
        """
        sees = self._target.runner.recorder is not None
        return sees or any(map(self._is_drafted, self.rows))

    def _begin_drafting(self) -> None:
        """Begin the drafter's rows; one that is not drafted for has its last token."""
        texts = [
            s.request.prompt_tokens[0 if self._is_drafted(s) else -1 :]
            for s in self.rows
        ]
        self._draft.begin(texts, max_length=self._max_length())

    @property
    def drafts(self) -> bool:
        """Whether rows are drafted for, and one was in one of the last rounds."""
        return self._draft.ready and self._pacer.idle < IDLE

    @property
    def unfinished(self) -> list[Sequence]:
        """Rows that are still being decoded."""
        return [s for s in self.rows if s.finish_reason is None]

    # -- prefill -----------------------------------------------------------

    def prefill(self) -> Iterator[list[RowOutput]]:
        """Run the prompts, yielding behind each chunk; the first tokens among it."""
        for _ in self._target.prefill():
            self._observe(self._target.written)
            yield []
        for sequence, reused in zip(self.rows, self._target.reused, strict=True):
            sequence.prefix_tokens = reused
        in_flight = self._dispatch(0, first=True)
        self._observe([1] * len(self.rows))
        yield self._read(in_flight)  # they do not wait for the drafter
        for _ in self._draft.prefill():
            yield []
        self.retire()

    def _observe(self, lengths: AbstractSequence[int]) -> None:
        """Show the drafter the hidden states that it asked for."""
        if self._target.hidden is not None:
            drafted = [
                n if self._limits.at(s, len(s.request.prompt_tokens)) else 0
                for s, n in zip(self.rows, lengths, strict=True)
            ]
            self._draft.observe(self._target.hidden, drafted)

    # -- rounds ------------------------------------------------------------

    def step(self) -> list[RowOutput]:
        """Hand a round to the device, if one is of use; read the one before it.

        Returns nothing while the first rounds are on their way.
        """
        ahead = len(self._in_flight)
        if ahead <= self._backend.lookahead and self._worth_a_round():
            k = self._choose_k()
            lookahead = self._lookahead(k)
            if ahead <= lookahead:
                if k and self._draft.backlog > self.num_draft_tokens:
                    # For rows that have ended there may be no room to catch up.
                    self.drop_ended()
                self._in_flight.append(self._dispatch(k))
            if ahead < lookahead:
                return []
        return self._read(self._in_flight.popleft()) if self._in_flight else []

    def _worth_a_round(self) -> bool:
        """Whether a row can need more than the rounds in flight surely bring."""
        return any(s.remaining > self._pending(s) for s in self.unfinished)

    def _pending(self, sequence: Sequence) -> int:
        """Rounds in flight that the row takes part in: each brings a token or more."""
        return sum(f.has(sequence) for f in self._in_flight)

    def _choose_k(self) -> int:
        if not self._draft.ready:
            return self._pacer.defer()
        if (held := self._pacer.held(len(self.rows))) == 0:
            return 0
        unfinished = self.unfinished
        most = max(self._limits.of_use(s, self._pending) for s in unfinished)
        room = [n for n in self._row_limits(most) if n >= 0]
        if held and held <= max(room):
            return held
        left = {s.number: s.remaining for s in unfinished}
        remaining = sum(left.values()) / len(room)
        known = {} if self.replaced else left
        backlog = self._draft.backlog
        k = self._pacer.choose(len(self.rows), room, remaining, known, backlog=backlog)
        return min(most, k)

    def _lookahead(self, k: int) -> int:
        """Rounds that may be on their way when one of k is handed out.

        A round that turns out to be of no use is dear where tokens, not launches,
        cost time, and functions of the user's need every token before the next:
        then rounds are read at once.
        """
        patient = self._backend.repeat_shapes or not k
        return self._backend.lookahead if patient and not self._rules.stepwise else 0

    def _row_limits(self, k: int) -> tuple[int, ...]:
        """Draft tokens that each row may accept in a round of k; -1: it has ended."""
        return self._limits.of(k, self.rows, self._bounds, self._pending)

    def _dispatch(self, k: int, *, first: bool = False) -> InFlight:
        """Build one round and hand it to the device; nothing here waits for it."""
        limits = self._row_limits(k if self._draft.ready else 0)
        k = max(0, *limits)
        limit = self._limits.array(limits, self._bounds, self._committed.lengths)
        unsettled = CompiledForwards.unsettled
        self._observer.begun(k)
        if not first:
            numbers = [s.number for s in self.rows]
            self._pacer.begin(k, limits, numbers, backlog=self._draft.backlog)
        # 1. propose
        round_ = self._rules.round_of(k, self._committed, self._active)
        inputs = self._committed.newest
        if (proposals := self._draft.propose(round_)) is not None:
            inputs = behind(inputs, proposals)
            self._observer.built("draft", inputs)
        looks = not (k or first) and self._pacer.may_look(len(self.rows))
        peeked = self._draft.peek(round_, self.num_draft_tokens * looks)
        if peeked is not None:
            self._pacer.look()
        # 2. verify, 3. accept
        logits = self._target.forward(inputs)
        self._observer.built("verify", logits)
        decision = self._rules.decide(round_, inputs, proposals, logits, limit)
        settled, verdict = decision.settled, decision.settled.verdict
        self._observer.built("sampling", verdict.kept, verdict.chosen)
        # 4. trim, unless all rows keep all that was written
        if k or min(limits) < 0 or decision.errors:
            self._target.trim_per_sequence(settled.rejected, k + 1)
        # 5. commit
        if not first:
            self._draft.commit(round_, replace(verdict, hidden=self._target.hidden))
        self._committed = settled.committed
        if CompiledForwards.unsettled > unsettled:
            self._pacer.interrupt(drafting=k > 0)  # rounds that waited are not timed
        offset = self._target.offset
        return InFlight.of(self.rows, decision, offset, first=first, peeked=peeked)

    def _read(self, in_flight: InFlight) -> list[RowOutput]:
        """Wait for a round; append its tokens to the rows and retire those that end."""
        cached = dict(zip(map(id, self.rows), self._cached, strict=True))
        running = [s for s in in_flight.rows if s.finish_reason is None]
        read = in_flight.read()
        for sequence, kept in read:
            if id(sequence) in cached:
                cached[id(sequence)] += kept
        if not in_flight.first:
            ran = set(map(id, running))
            counts = [n if id(s) in ran else None for s, n in read]
            self._pacer.read(counts, in_flight.peeks)
        self._observer.read(in_flight.num_draft_tokens, running)
        self._cached = [cached[id(s)] for s in self.rows]
        if not in_flight.first:
            self.retire()
        return [RowOutput.of(s) for s in running]

    def _bounds(self) -> list[tuple[int, int]]:
        """Least and most tokens of each row in the target's cache.

        As many as were read, plus what the rounds in flight may add.
        """
        bounds = list(zip(self._cached, self._cached, strict=True))
        for flying in self._in_flight:
            bounds = flying.added_to(bounds, self.rows)
        return bounds

    def _note_lengths(self) -> None:
        """Tell the caches what the host knows of their rows."""
        if not self.rows:
            return
        least, most = zip(*self._bounds(), strict=True)
        self._target.note_lengths(max(most), min(least))
        # A row that is not drafted for may be shorter with the drafter.
        shortest = min(least) + 1 if self._all_drafted else 0
        self._draft.note_lengths(max(most) + 1, shortest)

    # -- rows --------------------------------------------------------------

    def note_interruption(self) -> None:
        """Other work ran on the device between two rounds."""
        self._pacer.interrupt()

    def extend(self, other: RowBatch) -> None:
        """Append the rows of ``other``, which has been prefilled and not stepped.

        Rows that have ended are dropped; one of each batch must be running.
        """
        self.drop_ended()
        other.drop_ended()
        if self._draft.ready != other._draft.ready:
            plain = other if self._draft.ready else self
            plain._begin_drafting()
            for _ in plain._draft.prefill():  # of last tokens there is hardly any
                pass
            self._pacer.idle = 0
        self._target.extend(other._target)
        self._draft.extend(other._draft)
        self.rows += other.rows
        self._cached += other._cached
        self._note_rows()
        self._committed = self._committed.joined(other._committed)
        self._note_lengths()

    def _running_rows(self) -> tuple[bool, ...]:
        return tuple(s.finish_reason is None for s in self.rows)

    def _note_rows(self) -> None:
        """Work out what depends on which rows there are and which are running."""
        self._noted = self._running_rows()
        self._active = mx.array(self._noted, mx.bool_)
        self._rules = RowRules.of(self.rows, self._vocab_size)
        self._all_drafted = all(map(self._is_drafted, self.rows))

    def retire(self) -> None:
        """Stop decoding rows that have ended; drop them where that saves work."""
        running = len(self.unfinished)
        if running < len(self.rows):
            size = self._backend.rows_to_keep(len(self.rows), running)
            if size < len(self.rows):
                self.drop_ended(size)
            elif self._running_rows() != self._noted:
                self._note_rows()
        self._note_lengths()

    def drop_ended(self, size: int = 0) -> None:
        """Drop the rows that have ended, and their memory.

        Args:
            size: rows to keep, ended ones among them where too few are running.
        """
        running: list[int] = []
        ended: list[int] = []
        for i, sequence in enumerate(self.rows):
            (running if sequence.finish_reason is None else ended).append(i)
        rows = sorted(running + ended[: max(0, size - len(running))])
        if len(rows) == len(self.rows):
            return
        self.rows = tuple(self.rows[i] for i in rows)
        self._cached = [self._cached[i] for i in rows]
        self._note_rows()
        if not rows:
            return
        width = self._rules.sampling.context_size
        self._committed = self._committed.only(rows, width)
        self._target.filter(rows)
        if self._is_drafted_for():
            self._draft.filter(rows)
        else:
            self._draft.end()
