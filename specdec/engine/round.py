"""A round, from the choice of k to what it taught: :class:`Rounds` shows it whole.

    plan -> propose -> verify -> accept -> commit  - - - ->  read -> learn

What the next round needs (kept counts, newest tokens, offsets) stays on the device. The
host reads a round while the next one runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isfinite
from typing import Any

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults
from ..models.runner import ModelRows
from ..request import Request, TokenLogprobs
from ..spec_decode import Drafter, DraftRows, Proposals, Round
from ..spec_decode.chain import continued
from ..spec_decode.commit import Committed
from ..spec_decode.draft_length import (
    BatchState,
    DraftLength,
    Peek,
    ShadowAcceptance,
    StepTimer,
)
from ..spec_decode.verifier import Decision, Verifier
from .observer import RoundObserver

log = logging.getLogger("specdec.engine")

# After this many rounds without a draft, the policy decides anew for joining rows.
IDLE = 64


@dataclass(frozen=True)
class StepOutput:
    """A row's output in one step; ``ended`` is set if these were its last tokens."""

    request: Request
    token_ids: list[int]
    text: str
    ended: bool
    logprobs: list[TokenLogprobs] | None = None

    @classmethod
    def of(cls, request: Request) -> StepOutput:
        """The output that ``request`` has generated and not emitted yet."""
        token_ids, text, logprobs = request.take()
        ended = request.finish_reason is not None
        return cls(request, token_ids, text, ended, logprobs)


@dataclass(frozen=True)
class Plan:
    """What a round is to do.

    Args:
        num_draft_tokens: k.
        limits: the most draft tokens that each slot may accept; -1: no row runs there.
            Some may be too high, if ``exact`` is false.
        lookahead: rounds that may be in flight when it is dispatched.
        exact: no row can be too long for the drafter's context.
        checks: a row whose logits are not finite keeps nothing.
        chosen: k was chosen; otherwise no row could use a draft token.
        first: it is the last step of the prompts, and brings their first tokens. It is
            not counted as a round.
    """

    num_draft_tokens: int
    limits: tuple[int, ...]
    lookahead: int = 0
    exact: bool = True
    checks: bool = False
    chosen: bool = False
    first: bool = False


@dataclass(frozen=True)
class InFlight:
    """A round that was dispatched and not read yet.

    Args:
        plan: what it does.
        rows: the request in each slot; ``None`` where the slot was idle.
        decision: the round's decision, on the device.
        peeked: the tokens that a draft would have proposed, if the round did not draft
            and peeked.

    Attributes:
        spoiled: once read, the slots of rows that kept nothing because their logits
            are not finite, and what is wrong.
    """

    plan: Plan
    rows: tuple[Request | None, ...]
    decision: Decision
    peeked: Proposals | None = None
    spoiled: dict[int, str] = field(default_factory=dict)

    @property
    def num_draft_tokens(self) -> int:
        """k of the round."""
        return self.plan.num_draft_tokens

    @property
    def running(self) -> list[Request]:
        """The round's rows that have not ended, as far as the host knows."""
        return [s for s in self.rows if s is not None and s.finish_reason is None]

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.rows))

    def has(self, request: Request) -> bool:
        """Whether the row takes part."""
        return id(request) in self._ids

    def read(self) -> list[int | None]:
        """Wait for the round and give each request its tokens.

        Returns:
            How many tokens each slot kept; ``None`` where no row was running, or where
            a row kept nothing since its logits are not finite.
        """
        packed: list[list[int]] = self.decision.packed.tolist()  # type: ignore[assignment]
        peaks: list[list[float]] = self.decision.peaks.tolist()  # type: ignore[assignment]
        logprobs = self.decision.logprobs
        reported = [()] * len(packed) if logprobs is None else logprobs.read(self.rows)
        read: list[int | None] = []
        for i, request in enumerate(self.rows):
            if request is None or request.finish_reason is not None:
                read.append(None)
                continue
            kept, limit, *chosen = packed[i]
            if limit < 0:
                worst = next(p for p in peaks[i] if not p < inf)
                self.spoiled[i] = self._complaint(worst, len(request.tokens))
                read.append(None)
                continue
            read.append(kept)
            valid = next((j for j in range(kept) if not isfinite(peaks[i][j])), kept)
            if self.plan.first:
                request.commit(chosen[:valid], reported[i][:valid])
            elif valid:
                drafted = max(limit, 0)
                request.commit_round(chosen[:valid], drafted, reported[i][:valid])
            at = len(request.tokens)
            if valid < kept:
                what = self._complaint(peaks[i][valid], at)
                request.fail(self.decision.errors.get(i, what))
            elif i in self.decision.errors:
                request.fail(self.decision.errors[i])
        return read

    def _complaint(self, peak: float, at: int) -> str:
        return f"its logits {_COMPLAINTS[str(peak)]} at token {at}"

    def peeks(self) -> list[Peek]:
        """For each drafted row that goes on: its token, and the tokens peeked at."""
        tokens: list[Any] = [None] * len(self.rows)
        if self.peeked is not None:
            tokens = self.peeked.tokens.tolist()  # type: ignore[assignment]
            if self.peeked.lengths is not None:
                lengths: Any = self.peeked.lengths.tolist()
                tokens = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        return [
            Peek(s.number, s.tokens[-1], row)
            for s, row in zip(self.rows, tokens, strict=True)
            if s and s.finish_reason is None and s.tokens and s.drafts
        ]


# Messages by str() of the largest logit.
_COMPLAINTS = {"nan": "hold NaN", "inf": "hold infinity", "-inf": "leave no token"}


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


class Rounds:
    """Rounds of rows that decode in lockstep; :class:`DecodeBatch` has the rows.

    Between rounds the target's cache holds all committed tokens of a row but the last,
    which is the first input of the next verification.

    Args:
        drafter: what it proposes is bounded by its context; ``None`` drafts nothing.
        length: chooses k.
        backend: how to shape rounds.
        observer: sees every round.
        in_flight: rounds that were dispatched and not read yet.

    Attributes:
        slots: the request in each slot; ``None`` where the slot is idle.
        expected: requests that will take the places of rows that end.
        most: the largest k of any round.
    """

    slots: list[Request | None]
    expected: int
    _target: ModelRows
    _draft: DraftRows | None
    _rules: Verifier
    _active: mx.array
    _committed: Committed

    def __init__(
        self,
        drafter: Drafter | None,
        length: DraftLength,
        backend: BackendDefaults,
        observer: RoundObserver,
        in_flight: deque[InFlight],
    ):
        self.most = length.max_draft_tokens if drafter else 0
        context = drafter.context_length if drafter else None
        # Longer rows are not drafted for: the draft's cache takes all proposals but
        # the last.
        self._longest = inf if context is None else context - self.most + 1
        self._length, self._backend = length, backend
        self._observer, self._in_flight = observer, in_flight
        self._timer, self._shadow = StepTimer(), ShadowAcceptance()
        self._idle = 0  # rounds since the last one that drafted
        self._spoiled = _Spoiled()
        # The limits of the last round as an array; most rounds use it again.
        self._last: tuple[tuple[int, ...], mx.array] | None = None

    @property
    def unfinished(self) -> list[Request]:
        """The rows that have not ended."""
        return [s for s in self.slots if s is not None and s.finish_reason is None]

    @property
    def drafts(self) -> bool:
        """Whether one of the last rounds drafted."""
        return self._draft is not None and self._idle < IDLE

    # -- plan --------------------------------------------------------------

    def needs_a_round(self) -> bool:
        """Whether a row may need more tokens than the rounds in flight surely bring."""
        return any(s.remaining > self._pending(s) for s in self.unfinished)

    def _pending(self, request: Request) -> int:
        """How many rounds in flight have this row: each brings it a token or more."""
        return sum(f.has(request) for f in self._in_flight)

    def plan(self, k: int | None = None) -> Plan:
        """Decide how many tokens the next round proposes; asking changes nothing.

        Args:
            k: the most tokens; ``None``: the policy's choice.
        """
        limits, exact = self._room()
        room = [n for n in limits if n >= 0]
        chosen = any(room)
        if k is None:
            k = self._choice(room) if chosen else 0
        if k < max(room, default=0):
            limits = tuple([min(k, n) for n in limits])
        k = max(0, *limits)
        drafted = any(f.num_draft_tokens for f in self._in_flight)
        # A round is read before the next begins if a row follows a user's function or a
        # grammar, which needs every token, and for drafts on a CPU, where a round that
        # turns out to be useless costs too much. Recurrent states cannot lose a single
        # token, as a row must whose caches a draft has spoiled.
        at_once = self._backend.costs_by_token
        if not k:
            at_once = drafted and self._target.single_stays
        lookahead = 0 if self._rules.needs_tokens or at_once else LOOKAHEAD
        return Plan(k, limits, lookahead, exact, k > 0 or drafted, chosen)

    def _room(self) -> tuple[tuple[int, ...], bool]:
        """The most draft tokens that each slot can use, and whether that is exact."""
        if self._draft is None or not self.most or self._spoiled.plain_next:
            return self._no_draft(), True
        bounds = self._bounds() if self._longest < inf else ()
        room = []
        for i, s in enumerate(self.slots):
            if s is None or s.finish_reason is not None:
                room.append(-1)
                continue
            most = self.most_for(s, bounds[i][0] + 1 if bounds else 0)
            # Tokens after the row's end are useless. The answer must depend on the row
            # alone: with the ratio rules, it decides what the row emits. How many
            # tokens are left is known only if rounds are read at once.
            if self._backend.costs_by_token:
                most = min(most, max(s.remaining - self._pending(s) - 1, 0))
            room.append(most)
        longest = max((most for _, most in bounds), default=0)
        return tuple(room), longest + 1 <= self._longest

    def _no_draft(self) -> tuple[int, ...]:
        return tuple([0 if s and s.finish_reason is None else -1 for s in self.slots])

    def most_for(self, request: Request, length: int) -> int:
        """The most draft tokens that a row of ``length`` tokens may ever accept."""
        if length > self._longest or not request.drafts:
            return 0
        limit = request.params.num_draft_tokens
        return self.most if limit is None else min(limit, self.most)

    def _choice(self, room: Sequence[int]) -> int:
        """The policy's choice of k for rows with so much room."""
        left = {s.number: s.remaining for s in self.unfinished}
        state = BatchState(
            len(self.slots),
            room,
            sum(left.values()) / len(room),
            self._backlog,
            self._timer.in_flight,
            {} if self.expected else left,
            self._timer.joining,
        )
        return self._length.choose(state)

    @property
    def _backlog(self) -> int:
        """Tokens of a row, on average, that the drafter has yet to take in."""
        return 0 if self._draft is None else self._draft.backlog

    @property
    def _new_shapes(self) -> int:
        """Forwards of both models so far whose shapes were new."""
        draft = 0 if self._draft is None else self._draft.new_shapes
        return self._target.new_shapes + draft

    # -- dispatch ----------------------------------------------------------

    def dispatch(self, plan: Plan) -> InFlight:
        """Propose, verify, accept, commit: one round, handed to the device.

        Nothing here waits for the device, unless a user's function or a grammar does.
        """
        k, shapes = plan.num_draft_tokens, self._new_shapes
        self._observer.begun(k)
        looks = not plan.first and self._begin_timing(plan)
        committed = self._committed.within(self._rules.sampling.context_size)
        round_ = self._rules.round_of(
            plan.limits, committed, self._active, self._target
        )

        proposals = self._propose(round_) if k else None
        peeked = self._peek(round_) if looks else None

        inputs = committed.newest
        if proposals is not None:
            inputs = proposals.after(inputs)
            self._observer.built("draft", inputs)
        logits = self._target.forward(inputs)
        self._observer.built("verify", logits)

        decision = self._rules.decide(
            round_,
            inputs,
            proposals,
            logits,
            self._limit(plan),
            hidden=self._target.hidden,
            checks=plan.checks,
        )
        accepted = decision.accepted
        self._observer.built("sampling", accepted.kept, accepted.chosen)

        all_run = plan.limits.count(-1) == 0
        if plan.checks or not all_run or decision.errors:  # else each keeps its token
            self._target.trim_per_sequence(decision.rejected, k + 1)
        if self._draft is not None and not plan.first:
            self._draft.commit(round_, accepted)
        self._committed = decision.committed

        if self._new_shapes > shapes:  # rounds that waited are not timed
            self._timer.interrupt(new_shape=k > 0)
        # One call starts all that the host will read or the next round needs.
        ahead = [*vars(decision.committed).values(), self._target.offset]
        if peeked is not None:
            ahead += [peeked.tokens, peeked.lengths]
        mx.async_eval(decision.packed, decision.peaks, ahead)
        return InFlight(plan, tuple(self.slots), decision, peeked)

    def _begin_timing(self, plan: Plan) -> bool:
        """Start the round's clock; return whether to peek at draft proposals."""
        k, numbers = plan.num_draft_tokens, [s.number if s else -1 for s in self.slots]
        self._idle = 0 if k else self._idle + 1
        self._spoiled.plain_next = self._spoiled.plain_next and k > 0
        self._timer.begin(
            k, plan.limits, numbers, backlog=self._backlog, forced=not plan.chosen
        )
        peek_rows = self._backend.peek_rows
        few = peek_rows is None or len(numbers) <= peek_rows
        return not k and few and plan.chosen and self._shadow.due()

    def _propose(self, round_: Round) -> Proposals:
        """The draft's k tokens for every row."""
        assert self._draft is not None
        proposals = self._draft.propose(round_)
        if round_.given is not None:  # a drafter may ignore the tokens given
            vocab_size = round_.sampling.vocab_size
            proposals = continued(round_.given, proposals, vocab_size)
        return self._spoiled.harmless(round_, proposals)

    def _peek(self, round_: Round) -> Proposals | None:
        """The proposals for a round that does not draft, if the drafter tells them."""
        if self._draft is None:
            return None
        # No grammar masks: they would be made for tokens that nothing verifies.
        asked = replace(round_, num_draft_tokens=self.most, grammar=None)
        peeked = self._draft.peek(asked)
        # For proposals that were drawn, the emitted tokens do not show acceptance.
        if peeked is None or peeked.probabilities is not None:
            return None
        self._timer.look()
        return peeked

    def _limit(self, plan: Plan) -> mx.array:
        """The plan's limits as an exact array."""
        if self._last is None or self._last[0] != plan.limits:
            self._last = plan.limits, mx.array(plan.limits, mx.int32)
        limit = self._last[1]
        if not plan.exact:
            fits = self._committed.lengths <= self._longest
            limit = mx.where(fits, limit, mx.minimum(limit, 0))
        return limit

    # -- read --------------------------------------------------------------

    def read(self, round_: InFlight) -> None:
        """Wait for the oldest round in flight, and learn from it.

        Its rows get their tokens, the policy for k is shown its time and what was
        accepted, and rows whose logits a draft has spoiled go on.
        """
        kept = round_.read()
        shadow: list[tuple[int, int]] = []
        if round_.num_draft_tokens:
            self._shadow.forget()
        elif round_.peeked is not None or self._shadow.awaiting:
            shadow = self._shadow.compare(round_.peeks())
        self._length.observe(self._timer.read(kept, shadow))
        if round_.spoiled:
            self._recover(round_)

    def note_interruption(self) -> None:
        """Note that other work was dispatched between two rounds."""
        self._timer.interrupt()

    def _recover(self, round_: InFlight) -> None:
        """Let rows go on that kept nothing, since a draft has spoiled their caches."""
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
        self._spoiled.mark(self.slots)
        self._target.clean(
            [i for i, s in enumerate(self.slots) if s and s.number in spoiled]
        )
        log.debug(
            "draft tokens made logits of %d rows that are not finite: these rows go on "
            "without a draft",
            len(spoiled),
        )

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
                    least += s.finish_reason is None and not flying.plan.checks
                    most += flying.num_draft_tokens + 1
            bounds.append((least, most))
        return bounds
