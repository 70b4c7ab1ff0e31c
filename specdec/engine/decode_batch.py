"""Rows that decode together. :meth:`DecodeBatch.dispatch` is their round.

    propose -> verify -> accept -> commit

A batch has a fixed number of slots. A row that ends leaves its slot idle. A row that
joins is written into an idle slot; no other row is copied, and no shape changes.

What the next round needs (kept counts, newest tokens, offsets) stays on the device.
The host reads a round's tokens while the next round runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults
from ..models.runner import ModelRunner
from ..request import Request
from ..spec_decode import Drafter, DraftRows, Proposals, Round
from ..spec_decode.chain import continued
from ..spec_decode.commit import Committed
from ..spec_decode.draft_length import DraftLength
from ..spec_decode.verifier import Decision, Verifier
from .in_flight import InFlight
from .limits import DraftLimits
from .observer import RoundObserver
from .pacing import Pacing

log = logging.getLogger("specdec.engine")

NO_TOKENS: tuple[int, ...] = ()


@dataclass
class _Spoiled:
    """Rows that are drafted for no more: their proposals made logits not finite.

    Args:
        numbers: their numbers.
        plain_next: whether the next round has no draft, so that they get a token.
        rows: which rows they are, shape (B, 1), boolean; ``None`` if there are none.
    """

    numbers: set[int] = field(default_factory=set)
    plain_next: bool = False
    rows: mx.array | None = None

    def mark(self, slots: Sequence[Request | None]) -> None:
        """Note in which slots they are."""
        spoiled = [s is not None and s.number in self.numbers for s in slots]
        self.rows = mx.array(spoiled)[:, None] if any(spoiled) else None

    def harmless(self, round_: Round, proposals: Proposals) -> Proposals:
        """The proposals, where these rows get a token that the target has read."""
        if self.rows is None:
            return proposals
        newest = round_.recent[:, -1:]
        tokens = mx.where(self.rows, newest, proposals.tokens)
        return replace(proposals, tokens=tokens)


class DecodeBatch:
    """Rows that decode in lockstep, each keeping what was accepted for it.

    Between rounds the target's cache holds all committed tokens of a row but the
    last, which is the first input of the next verification. The cache of an idle slot
    is empty.

    Args:
        target: runs the target model.
        drafter: proposes tokens; ``None`` decodes plainly.
        rows: the first rows, one or more; none has tokens yet.
        length: chooses k, the number of tokens that a round proposes.
        backend: how to shape rounds.
        observer: sees every round.
        in_flight: rounds that were dispatched and not read yet. Batches that join each
            other share this queue.
        num_slots: as many as ``rows`` or more.

    Attributes:
        slots: the request in each slot; ``None`` where the slot is idle.
        expected: requests that will take the places of rows that end.
        alone: whether no other batch decodes meanwhile. Then the first tokens are read
            before the drafter's prefill.
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
        self._spoiled = _Spoiled()
        self._backend = backend
        self._observer = observer
        self._pacing = Pacing(length, backend.peek_rows)
        prompts = [s.prompt_tokens if s else NO_TOKENS for s in self.slots]
        # A prompt's last token is fed alone, so that no chunk computes logits in vain.
        self._target = target.rows(
            [p[:-1] for p in prompts],
            max_round=self._limits.most + 1,
            max_length=self._max_length(),
            last=[p[-1] if p else 0 for p in prompts],
            single_stays=True,
            images=[s.images if s else () for s in self.slots],
        )
        if any(salts := self._salts):
            self._target.separate(salts)
        self._drafter = drafter
        self._draft: DraftRows | None = None
        if self._wants_draft():
            self._draft = self._begin_draft()
            self._target.beside = self._draft.context
        self._note_rows()
        # On the device, after all rounds that were dispatched.
        self._committed = Committed.of(prompts, self._rules.sampling.context_size)

    def _max_length(self) -> int:
        """The most tokens that a row can ever hold, rejected ones included."""
        longest = max(s.max_length for s in self.slots if s)
        # Rounds in flight may have taken a row past its end.
        return longest + (LOOKAHEAD + 2) * (self._limits.most + 1)

    def _is_drafted(self, request: Request) -> bool:
        """Whether a row is drafted for when it begins."""
        return self._limits.at(request, len(request.prompt_tokens)) > 0

    def _wants_draft(self) -> bool:
        """Whether the drafter needs to know the rows.

        A drafter that reads hidden states needs all rows: a prompt's hidden states
        exist only while the prompt is prefilled.
        """
        sees = self._target.runner.recorder is not None
        return self._drafter is not None and (
            sees or any(s is not None and self._is_drafted(s) for s in self.slots)
        )

    def _begin_draft(self) -> DraftRows:
        """The drafter's rows; a row that is not drafted for has only its last token."""
        assert self._drafter is not None
        texts = []
        for s in self.slots:
            prompt = NO_TOKENS if s is None else s.prompt_tokens
            texts.append(prompt[0 if s and self._is_drafted(s) else -1 :] or (0,))
        most = self._max_length()
        if self._target.runner.recorder is not None:
            # The drafter is shown chunks of all rows, and gets the stored prefix of
            # each.
            most = self._target.max_length
        rows = self._drafter.rows(texts, max_length=most)
        if any(salts := self._salts):
            rows.separate(salts)
        return rows

    @property
    def _salts(self) -> list[str | None]:
        return [None if s is None else s.params.cache_salt for s in self.slots]

    @property
    def unfinished(self) -> list[Request]:
        """The rows that have not ended."""
        return [s for s in self.slots if s is not None and s.finish_reason is None]

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens prefilled so far: computed, or found in the prefix store."""
        return sum(self._target.done)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's caches and of the drafter's state."""
        draft = 0 if self._draft is None else self._draft.nbytes
        return self._target.nbytes + draft

    @property
    def drafts(self) -> bool:
        """Whether one of the last rounds drafted."""
        return self._draft is not None and self._pacing.drafts

    # -- prefill -----------------------------------------------------------

    def prefill(self) -> Iterator[None]:
        """Hand the prompts to the device, yielding between chunks.

        First come the target's chunks, then the step that gives every row its first
        token (added to the rounds in flight), then the drafter's chunks.
        """
        for more in self._target.prefill():
            self._observe(self._following(), self._target.written)
            if more:
                yield
        for request, reused in zip(self.slots, self._target.reused, strict=True):
            if request is not None:
                request.prefix_tokens = reused
        first = self.dispatch(0, first=True)
        self._in_flight.append(first)
        self._observe(first.decision.accepted.chosen, [1] * len(self.slots))
        if self._draft is not None:
            if self.alone:
                yield
            yield from self._draft.prefill()

    def _following(self) -> mx.array:
        """The token after each token of the prompts' last chunk, shape (B, S)."""
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
        """Whether a row may need more tokens than the rounds in flight surely bring."""
        return any(s.remaining > self._pending(s) for s in self.unfinished)

    def _pending(self, request: Request) -> int:
        """How many rounds in flight have this row: each brings it a token or more."""
        return sum(f.has(request) for f in self._in_flight)

    def choose_k(self) -> int:
        """Tokens to propose in the next round; asking changes nothing."""
        left = {s.number: s.remaining for s in self.unfinished}
        room, most = list[int](), 0
        if self._draft is not None:
            most = max(self._limits.of_use(s, self._pending) for s in self.unfinished)
            room = [n for n in self._row_limits(most) if n >= 0]
        missed, alone = self._backlog, not self.expected
        k = self._pacing.choose(
            len(self.slots), room, left, backlog=missed, alone=alone
        )
        return 0 if self._spoiled.plain_next else min(most, k)

    @property
    def _backlog(self) -> int:
        """Tokens of a row, on average, that the drafter has yet to take in."""
        return 0 if self._draft is None else self._draft.backlog

    @property
    def _new_shapes(self) -> int:
        """Forwards of both models so far whose shapes were new."""
        draft = 0 if self._draft is None else self._draft.new_shapes
        return self._target.new_shapes + draft

    def lookahead(self, k: int) -> int:
        """Rounds that may be in flight when a round of k is dispatched.

        With 0, a round is read before the next begins. That is so if a row follows a
        user's function or a grammar, which needs every token, and for drafts on a CPU,
        where a round that turns out to be useless costs too much. Recurrent states
        cannot lose a single token, as a row must whose caches a draft has spoiled: a
        round without a draft then waits for those with one.
        """
        at_once = self._backend.costs_by_token
        if not k:
            at_once = self._target.single_stays and self._drafted_in_flight
        if self._rules.needs_tokens or at_once:
            return 0
        return LOOKAHEAD

    @property
    def _drafted_in_flight(self) -> bool:
        """Whether a round in flight has a draft, which may spoil rows."""
        return any(f.num_draft_tokens for f in self._in_flight)

    def _row_limits(self, k: int) -> tuple[int, ...]:
        """Draft tokens that each row may accept in a round of k; -1: it has ended."""
        return self._limits.of(k, self.slots, self._bounds, self._pending)

    def dispatch(self, k: int, *, first: bool = False) -> InFlight:
        """Propose, verify, accept, commit: one round, handed to the device.

        Nothing here waits for the device, unless a user's function or a grammar does.

        Args:
            k: tokens to propose.
            first: the round is the last step of the prompts: it brings their first
                tokens.
        """
        shapes = self._new_shapes
        limits = self._row_limits(k if self._draft is not None else 0)
        k = max(0, *limits)
        self._spoiled.plain_next = self._spoiled.plain_next and (k > 0 or first)
        self._observer.begun(k)
        looks = not first and self._begin_timing(k, limits)
        round_ = self._round(k, limits)

        proposals = self._propose(round_)
        peeked = self._peek(round_) if looks else None
        inputs, logits = self._verify(proposals)
        checks = k > 0 or (not first and self._drafted_in_flight)
        decision = self._accept(
            round_, inputs, proposals, logits, limits, checks=checks
        )
        self._commit(round_, decision, to_draft=not first, checks=checks)

        if self._new_shapes > shapes:
            self._pacing.interrupt(new_shape=k > 0)  # rounds that waited are not timed
        rows, offset = tuple(self.slots), self._target.offset
        return InFlight.of(
            rows, decision, offset, first=first, checks=checks, peeked=peeked
        )

    def _begin_timing(self, k: int, limits: Sequence[int]) -> bool:
        """Start the round's clock; return whether to peek at draft proposals."""
        numbers = [-1 if s is None else s.number for s in self.slots]
        return self._pacing.begin(k, limits, numbers, self._backlog)

    def _round(self, k: int, limits: Sequence[int]) -> Round:
        committed = self._committed.within(self._rules.sampling.context_size)
        round_ = self._rules.round_of(k, committed, self._active, limits)
        return replace(round_, target=self._target, clients=self._rules.clients)

    def _propose(self, round_: Round) -> Proposals | None:
        """The draft's k tokens for every row; ``None`` if k is 0."""
        if not round_.num_draft_tokens or self._draft is None:
            return None
        proposals = self._draft.propose(round_)
        if round_.given is not None:  # a drafter may ignore the tokens given
            vocab_size = round_.sampling.vocab_size
            proposals = continued(round_.given, proposals, vocab_size)
        return self._spoiled.harmless(round_, proposals)

    def _verify(self, proposals: Proposals | None) -> tuple[mx.array, mx.array]:
        """One forward of the target: inputs (B, k + 1) and logits (B, k + 1, V)."""
        inputs = self._committed.newest
        if proposals is not None:
            inputs = proposals.after(inputs)
            self._observer.built("draft", inputs)
        logits = self._target.forward(inputs)
        self._observer.built("verify", logits)
        return inputs, logits

    def _accept(
        self,
        round_: Round,
        inputs: mx.array,
        proposals: Proposals | None,
        logits: mx.array,
        limits: tuple[int, ...],
        *,
        checks: bool,
    ) -> Decision:
        """How many proposals each row keeps, and the target's token after them."""
        limit = self._limits.array(limits, self._bounds, self._committed.lengths)
        decision = self._rules.decide(
            round_, inputs, proposals, logits, limit, checks=checks
        )
        accepted = decision.accepted
        self._observer.built("sampling", accepted.kept, accepted.chosen)
        return decision

    def _commit(
        self, round_: Round, decision: Decision, *, to_draft: bool, checks: bool
    ) -> None:
        """Trim rejected tokens from both caches; note the tokens that rows gained."""
        k = round_.num_draft_tokens
        all_run = len(self.unfinished) == len(self.slots)
        if (
            checks or not all_run or decision.errors
        ):  # else every row keeps its one token
            self._target.trim_per_sequence(decision.rejected, k + 1)
        if to_draft and self._draft is not None:
            accepted = replace(decision.accepted, hidden=self._target.hidden)
            self._draft.commit(round_, accepted)
        self._committed = decision.committed

    def _peek(self, round_: Round) -> Proposals | None:
        """The proposals for a round that does not draft, if the drafter tells them."""
        if self._draft is None or not self._limits.most:
            return None
        # No grammar masks: they would be made for tokens that nothing verifies.
        most = self._limits.most
        asked = replace(round_, num_draft_tokens=most, grammar=None)
        peeked = self._draft.peek(asked)
        # For proposals that were drawn, the emitted tokens do not show acceptance.
        if peeked is None or peeked.probabilities is not None:
            return None
        self._pacing.look()
        return peeked

    def learn(self, in_flight: InFlight, kept: Sequence[int | None]) -> None:
        """Show the policy what the oldest round in flight brought.

        Args:
            kept: tokens that each slot kept; ``None`` where no row was running.
        """
        self._pacing.read(in_flight, kept)

    def recover(self, round_: InFlight) -> None:
        """Let rows go on that kept nothing, since a draft has spoiled their caches.

        Args:
            round_: the round that was read.
        """
        spoiled = []
        for i, error in round_.spoiled.items():
            request = round_.rows[i]
            assert request is not None
            if round_.num_draft_tokens or request.number in self._spoiled.numbers:
                request.drafts = False
                spoiled.append(request.number)
            else:  # no draft has touched it
                request.fail(error)
        if not spoiled:
            return
        self._spoiled.numbers.update(spoiled)
        self._spoiled.plain_next = True
        self._note_rows()
        self._target.clean(
            [i for i, s in enumerate(self.slots) if s and s.number in spoiled]
        )
        log.debug(
            "draft tokens made logits of %d rows that are not finite: these rows go on "
            "without a draft",
            len(spoiled),
        )

    def note_interruption(self) -> None:
        """Note that other work was dispatched between two rounds."""
        self._pacing.interrupt()

    def _bounds(self) -> list[tuple[int, int]]:
        """The least and the most tokens that each row can have in the target's cache.

        These are the tokens that were read, plus what the rounds in flight may add.
        """
        bounds = []
        for s in self.slots:
            if s is None:
                bounds.append((0, 0))
                continue
            least = most = s.length - 1
            for flying in self._in_flight:
                if flying.has(s):
                    # A round that checks may bring a row nothing.
                    least += s.finish_reason is None and not flying.checks
                    most += flying.num_draft_tokens + 1
            bounds.append((least, most))
        return bounds

    def _note_lengths(self) -> None:
        """Tell the caches how long their rows are, as far as the host knows."""
        least, most = zip(*self._bounds(), strict=True)
        self._target.note_lengths(max(most), min(least))
        if self._draft is not None:
            # The drafter may have less of a row that is not drafted for.
            drafted = all(s and self._is_drafted(s) for s in self.slots)
            shortest = min(least) + 1 if drafted else 0
            self._draft.note_lengths(max(most) + 1, shortest)

    # -- rows --------------------------------------------------------------

    def _note_rows(self) -> None:
        """Update the fields that depend on the rows."""
        running = [s is not None and s.finish_reason is None for s in self.slots]
        self._active = mx.array(running, mx.bool_)
        self._rules = Verifier.of(self.slots, self._target.runner.vocab_size)
        self._spoiled.mark(self.slots)

    def retire(self) -> None:
        """Remove rows that have ended.

        Their slots stay idle if other requests wait for them. Otherwise the batch
        shrinks, where fewer slots are faster.
        """
        ended = [
            i for i, s in enumerate(self.slots) if s and s.finish_reason is not None
        ]
        for i in ended:
            self._remember(self.slots[i])
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

    def _remember(self, request: Request | None) -> None:
        """Show the drafter a finished answer."""
        if self._drafter is not None and request is not None and request.answered:
            client = request.drafted_as
            if client is not None:
                self._drafter.remember(request.tokens, client)

    def join(self, other: DecodeBatch, num_slots: int) -> None:
        """Take over the running rows of ``other``, in idle slots or in new ones.

        Idle slots of ``other`` after its rows are left out. Removing them would wait
        for the device: for the rounds in flight, and for the whole prefill.

        Args:
            other: a batch that was prefilled and has dispatched no round.
            num_slots: slots to have afterwards, if there are too few now.
        """
        rows = [i for i, s in enumerate(other.slots) if s and s.finish_reason is None]
        free = [i for i, s in enumerate(self.slots) if s is None]
        if (self._draft is None) != (other._draft is None):
            plain = self if self._draft is None else other
            plain._draft = plain._begin_draft()
            for _ in plain._draft.prefill():  # last tokens only, so there is little
                pass
            self._pacing.restart()
        if rows[-1] >= len(free) >= len(rows):  # rows that ended take no slots then
            other._resize(len(rows))
            rows = list(range(len(rows)))
        if len(free) > rows[-1]:
            self._place(free[: rows[-1] + 1], other)
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
        """Put the first rows of ``other`` into idle slots; no other row is touched."""
        self._target.place(slots, other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.place(slots, other._draft, len(self.slots))
        self._committed = self._committed.placed(slots, other._committed)
        for i, slot in enumerate(slots):
            self.slots[slot] = other.slots[i]

    def _extend(self, other: DecodeBatch) -> None:
        """Append the slots of ``other``; this copies all rows."""
        self._target.extend(other._target)
        if self._draft is not None and other._draft is not None:
            self._draft.extend(other._draft)
        self._committed = self._committed.joined(other._committed)
        self.slots += other.slots

    def compact(self) -> None:
        """Drop all idle slots, to free their memory."""
        if len(running := self.unfinished) < len(self.slots):
            self._resize(len(running))

    def widen(self, num_slots: int) -> None:
        """Have at least ``num_slots`` slots."""
        if num_slots > len(self.slots):
            self._resize(num_slots)
            self._note_lengths()

    def _resize(self, size: int) -> None:
        """Have ``size`` slots, at least as many as running rows; this copies all."""
        runs = [s is not None and s.finish_reason is None for s in self.slots]
        running = [i for i, r in enumerate(runs) if r]
        idle = [i for i, r in enumerate(runs) if not r]
        rows = sorted(running + idle[: max(0, size - len(running))])
        self.slots = [self.slots[i] if runs[i] else None for i in rows]
        # A new slot is a copy of slot 0, which is then reset.
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
