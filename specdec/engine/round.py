"""A round, from the choice of k to what it taught: :class:`Rounds` shows it whole.

    plan -> dispatch: propose, verify, accept, commit  - - - ->  read -> learn

What the next round needs (kept counts, newest tokens, offsets) stays on the device. The
host reads a round while the next one runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import Literal, TypeVar

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults
from ..errors import DrafterError
from ..models.runner import ModelRows
from ..parallel import Ranks
from ..request import Request, TokenLogprobs
from ..spec_decode import Drafter, DraftGuard, DraftRows, Proposals, Round
from ..spec_decode.chain import continued
from ..spec_decode.commit import Committed
from ..spec_decode.draft_length import (
    BatchState,
    DraftLength,
    RoundTiming,
    StepTimer,
)
from ..spec_decode.verifier import Decision, Verifier

log = logging.getLogger("specdec.engine")

T = TypeVar("T")
Part = Literal["draft", "verify", "sampling"]

# After this many rounds without a draft, the policy decides anew for joining rows.
IDLE = 64
# So often, in rounds without a draft, it decides whether a draft head goes on writing
# its context.
RESTS = 16
# So often, in rounds without a draft, it is asked for how many more k stays 0.
ASKS = 8
# Rounds of a row without an accepted token, after which a draft looks at what it keeps.
FRUITLESS = 16


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


class RoundObserver:
    """Watches the rounds of a session; its methods do nothing unless they are defined.

    No observer changes the tokens. An observer that waits for the device in
    :meth:`built` makes rounds slower.
    """

    def begun(self, num_draft_tokens: int) -> None:
        """A round of k is about to be built; a prompt's last step counts as k = 0."""

    def built(self, part: Part, *arrays: mx.array) -> None:
        """The graph of a part was built; it computes ``arrays``."""

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """A round of k was read; ``rows`` are the rows that had not ended before it.

        Their counts (``rounds``, ``drafted``, ``accepted``, ``tokens``) include the
        round. A prompt's last step does not count in ``rounds``.
        """


@dataclass(frozen=True)
class DraftChoice:
    """How an engine chooses k; nothing is drafted once a drafter has failed.

    Args:
        most: the largest k.
        policy: chooses k by what it is shown; ``None``: always the most.
        guard: knows whether a drafter has failed.
        ranks: rank 0's policy answers for all of them.
    """

    most: int
    policy: DraftLength | None = None
    guard: DraftGuard = field(default_factory=DraftGuard)
    ranks: Ranks | None = None

    def _decided(self, what: str, make: Callable[[], T]) -> T:
        return make() if self.ranks is None else self.ranks.decide(what, make)

    def prepare(self, num_rows: int, context: int) -> None:
        """Measure what the policy wants to know, before ``num_rows`` rows begin.

        Args:
            context: tokens of a prompt, on average.
        """
        if self.policy is None or self.guard.error is not None:
            return
        unmeasured = partial(self.policy.unmeasured, num_rows, context)
        rows = self._decided("measure", unmeasured)
        if rows:
            try:
                self.policy.measure(rows, context)
            except DrafterError as error:  # its steps are timed there
                self.guard.fail(error, self.policy)

    def may_pay(self, state: BatchState) -> bool:
        """Whether joining rows are worth the drafter's prefill."""
        if self.policy is None or self.guard.error is not None:
            return self.guard.error is None
        return self._decided("may_pay", partial(self.policy.may_pay, state))

    def choose(self, state: BatchState) -> int:
        """The policy's k."""
        assert self.policy is not None
        return self._decided("k", partial(self.policy.choose, state))

    def stands(self, state: BatchState) -> int:
        """For how many rounds after this one the policy's k stays 0."""
        assert self.policy is not None
        return self._decided("stands", partial(self.policy.stands, state))


@dataclass(eq=False)
class BatchRound:
    """A round of a batch: what it is to do and, once dispatched, what it decided.

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

    Attributes:
        rows: the request in each slot; ``None`` where the slot was idle.
        members: the same, without an order.
        decision: the round's decision, on the device.
        began: when it began to be built, if rounds are timed.
        backlog: tokens of a row that the drafter took in first.
        spoiled: once read, the slots of rows that kept nothing because their logits
            are not finite.
    """

    num_draft_tokens: int
    limits: tuple[int, ...]
    lookahead: int = 0
    exact: bool = True
    checks: bool = False
    chosen: bool = False
    first: bool = False
    rows: tuple[Request | None, ...] = field(default=(), init=False)
    members: frozenset[Request | None] = field(default=frozenset(), init=False)
    decision: Decision = field(init=False)
    began: float = field(default=0.0, init=False)
    backlog: int = field(default=0, init=False)
    spoiled: list[int] = field(default_factory=list, init=False)

    def read(self) -> list[int | None]:
        """Wait for the round, after its dispatch, and give each request its tokens.

        Returns:
            How many tokens each slot kept; ``None`` where no row was running, or where
            a row kept nothing since its logits are not finite.
        """
        packed: list[list[int]] = self.decision.packed.tolist()  # type: ignore[assignment]
        peaks: list[list[float]] = self.decision.peaks.tolist()  # type: ignore[assignment]
        reported: Sequence[Sequence[TokenLogprobs]] = [()] * len(packed)
        if (logprobs := self.decision.logprobs) is not None:
            reported = logprobs.read(
                [
                    s.params.top_logprobs if s and s.reports_logprobs else None
                    for s in self.rows
                ]
            )
        read: list[int | None] = []
        for i, request in enumerate(self.rows):
            if request is None or request.finish_reason is not None:
                read.append(None)
                continue
            kept, limit, *chosen = packed[i]
            if limit < 0:
                self.spoiled.append(i)
                read.append(None)
                continue
            read.append(kept)
            valid = 0
            while valid < kept and isfinite(peaks[i][valid]):
                valid += 1
            if valid or self.first:
                drafted = None if self.first else max(limit, 0)
                request.commit(chosen[:valid], reported[i][:valid], drafted)
            error = self.decision.errors.get(i)
            if valid < kept and error is None:
                what = _COMPLAINTS[str(peaks[i][valid])]
                error = f"its logits {what} at token {len(request.tokens)}"
            if error is not None:
                request.fail(error)
        return read


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
        assert self.rows is not None
        newest = round_.recent[:, -1:]
        tokens = mx.where(self.rows, newest, proposals.tokens)
        return replace(proposals, tokens=tokens)


class Rounds:
    """Rounds of rows that decode in lockstep; :class:`DecodeBatch` has the rows.

    Between rounds the target's cache holds all committed tokens of a row but the last,
    which is the first input of the next verification.

    Args:
        drafter: what it proposes is bounded by its context; ``None`` drafts nothing.
        choice: chooses k.
        backend: how to shape rounds.
        observer: sees every round, if there is one.
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
    _serves: bool
    _all_drafted: bool
    _committed: Committed
    _note_rows: Callable[[], None]
    stop_drafting: Callable[[], None]

    def __init__(
        self,
        drafter: Drafter | None,
        choice: DraftChoice,
        backend: BackendDefaults,
        observer: RoundObserver | None,
        in_flight: deque[BatchRound],
    ):
        self.most = choice.most if drafter else 0
        context = drafter.context_length if drafter else None
        # Longer rows are not drafted for: the draft's cache takes all proposals but
        # the last.
        self._longest = inf if context is None else context - self.most + 1
        self._choice, self._backend = choice, backend
        self._observer, self._in_flight = observer, in_flight
        self._timer = StepTimer()
        self._idle = 0  # rounds since the last one that drafted
        # k is 0 until there were so many of them, if requests go on to wait or not.
        self._rests: tuple[int, bool] = -1, False
        # The most tokens after a row's own that drafts may have left in its caches.
        self._stale = 0
        self._spoiled = _Spoiled()
        # The limits of the last round as an array; most rounds use it again.
        self._last: tuple[tuple[int, ...], mx.array] = (), mx.array([], mx.int32)

    @property
    def unfinished(self) -> list[Request]:
        """The rows that have not ended."""
        return [s for s in self.slots if s is not None and s.finish_reason is None]

    @property
    def drafts(self) -> bool:
        """Whether one of the last rounds drafted."""
        return self._draft is not None and self._idle < IDLE

    # -- plan --------------------------------------------------------------

    def plan(self, k: int | None = None) -> BatchRound | None:
        """Decide how many tokens the next round proposes; asking changes nothing.

        Args:
            k: the most tokens; ``None``: what is chosen.

        Returns:
            ``None`` if the rounds in flight surely bring all that the rows may emit.
        """
        flying, by_token = self._in_flight, self._backend.costs_by_token
        drafts = self._draft is not None and not self._spoiled.plain_next
        drafts = drafts and self.most > 0 and self._choice.guard.error is None
        until, waiting = self._rests
        rests = k is None and self._idle <= until and waiting == bool(self.expected)
        rests, drafts = drafts and rests, drafts and not rests
        limits, left, needed, exact = list[int](), dict[int, int](), False, True
        lasts = 0.0  # rounds for which a row may be drafted for as much as now
        held = 0
        for s in self.slots:
            if s is None or s.finish_reason is not None:
                limits.append(-1)
                continue
            left[s.number] = remaining = s.remaining
            held += s.length
            rounds, least, longest = self._bounds(s)
            surely = remaining - rounds  # each brings the row a token or more
            needed = needed or surely > 0
            most = 0
            if drafts:
                exact = exact and longest <= self._longest
                most = self.most_for(s, least)
                if most == self.most:
                    beyond = min(surely - 1 - most, self._longest - longest)
                    lasts = max(lasts, beyond)
            # Tokens after the row's end are useless. The answer must depend on the row
            # alone: with the ratio rules, it decides what the row emits. How many
            # tokens are left is known only if rounds are read at once.
            if by_token or (surely < 2 and not self._rules.needs_probabilities):
                most = min(most, max(surely - 1, 0))
            limits.append(most)
        if not needed:
            return None

        chosen = rests or max(limits) > 0
        if rests or not chosen:
            k = 0
        elif k is None and self._choice.policy is None:
            k = self.most
        elif k is None:
            assert self._draft is not None
            room = [n for n in limits if n >= 0]
            state = BatchState(
                len(limits),
                room,
                sum(left.values()) / len(room),
                self._draft.backlog,
                [f.num_draft_tokens for f in flying if not f.first],
                {} if self.expected else left,
                context=held / len(room),
            )
            k = self._choice.choose(state)
            if not k and (self._idle - until - 1) % ASKS == 0:
                stands = min(int(lasts), self._choice.stands(state))
                if stands > 0:
                    self._rests = self._idle + stands, bool(self.expected)
        if chosen and not rests:
            limits = [min(k, n) for n in limits]
            k = max(0, *limits)

        drafted = self._stale > 0
        for f in flying:
            drafted |= f.num_draft_tokens > 0
        # A round is read before the next begins if a row follows a user's function or a
        # grammar, which needs every token, and for drafts on a CPU, where a round that
        # turns out to be useless costs too much. Recurrent states cannot lose a single
        # token, as a row must whose caches a draft has spoiled.
        at_once = by_token if k else drafted and self._target.single_stays
        lookahead = 0 if self._rules.needs_tokens or at_once else LOOKAHEAD
        exact |= k == 0  # nothing is accepted anyway
        return BatchRound(k, tuple(limits), lookahead, exact, k > 0 or drafted, chosen)

    def most_for(self, request: Request, length: int) -> int:
        """The most draft tokens that a row of ``length`` tokens may ever accept."""
        if length > self._longest or not request.drafts:
            return 0
        limit = request.params.num_draft_tokens
        return self.most if limit is None else min(limit, self.most)

    def _bounds(self, request: Request) -> tuple[int, int, int]:
        """A row's rounds in flight, and its fewest and most tokens after them."""
        rounds, least = 0, request.length
        most = least
        for round_ in self._in_flight:
            if request in round_.members:
                rounds += 1
                # A round that checks may bring a row nothing.
                least += request.finish_reason is None and not round_.checks
                most += round_.num_draft_tokens + 1
        return rounds, least, most

    # -- dispatch ----------------------------------------------------------

    def dispatch(self, plan: BatchRound) -> None:
        """Propose, verify, accept, commit: one round, handed to the device.

        Nothing here waits for the device, unless a user's function or a grammar does.
        """
        k, draft, rules = plan.num_draft_tokens, self._draft, self._rules
        watch = self._observer
        self._stale = max(k, self._stale - 1)
        timed = self._choice.policy is not None and not plan.first
        shapes = 0
        if watch is not None:
            watch.begun(k)
        if not plan.first:
            self._idle += 1
            if k:
                self._idle, self._rests = 0, (-1, False)
            self._spoiled.plain_next = self._spoiled.plain_next and k > 0
        if timed:
            plan.backlog = draft.backlog if k and draft is not None else 0
            plan.began, shapes = self._timer.begin(), self._new_shapes
        committed, width = self._committed, rules.sampling.context_size
        if committed.recent.shape[1] != width:
            committed = committed.within(width)
        round_ = rules.round_of(plan.limits, committed, self._active, self._target)

        proposals = self._propose(round_) if k else None

        inputs = committed.recent[:, -1:]
        if proposals is not None:
            inputs = proposals.after(inputs)
            if watch is not None:
                watch.built("draft", inputs)
        logits = self._target.forward(inputs)
        if watch is not None:
            watch.built("verify", logits)

        if self._last[0] != plan.limits:
            self._last = plan.limits, mx.array(plan.limits, mx.int32)
        limit = self._last[1]
        if not plan.exact:  # the device knows which rows are too long
            fits = committed.lengths <= self._longest
            limit = mx.where(fits, limit, mx.minimum(limit, 0))
        hidden, checks = self._target.hidden, plan.checks
        decision = rules.decide(
            round_, inputs, proposals, logits, limit, hidden=hidden, checks=checks
        )
        if watch is not None:
            watch.built("sampling", decision.kept, decision.chosen)

        # In a plain round of rows that all run, each keeps its token.
        if checks or -1 in plan.limits or decision.errors:
            self._target.trim_per_sequence(decision.rejected, k + 1)
        self._committed = committed = decision.committed

        ahead = [committed.recent, committed.lengths, self._target.offset]
        mx.async_eval([decision.packed, decision.peaks, *ahead])
        # Afterwards, since some drafters hand over what they commit.
        if draft is not None and self._serves and not plan.first:
            draft.commit(round_, decision)
        if timed and self._new_shapes > shapes:  # rounds that waited are not timed
            self._timer.interrupt(new_shape=k > 0)
        plan.rows, plan.decision = tuple(self.slots), decision
        plan.members = frozenset(self.slots)
        self._in_flight.append(plan)

    @property
    def _new_shapes(self) -> int:
        """Forwards of both models so far whose shapes were new."""
        draft = 0 if self._draft is None else self._draft.new_shapes
        return self._target.new_shapes + draft

    def _propose(self, round_: Round) -> Proposals:
        """The draft's k tokens for every row."""
        assert self._draft is not None
        proposals = self._draft.propose(round_)
        if round_.given is not None:  # a drafter may ignore the tokens given
            vocab_size = round_.sampling.vocab_size
            proposals = continued(round_.given, proposals, vocab_size)
        if self._spoiled.rows is None:
            return proposals
        return self._spoiled.harmless(round_, proposals)

    # -- learn -------------------------------------------------------------

    def learn(self, round_: BatchRound, kept: Sequence[int | None]) -> None:
        """Learn from a round that was read.

        The policy for k is shown its time and what was accepted. Rows whose logits a
        draft has spoiled go on.

        Args:
            kept: what :meth:`BatchRound.read` has returned.
        """
        choice, doubted = self._choice, list[Request]()
        if round_.began and choice.policy is not None and choice.guard.error is None:
            choice.policy.observe(self._timing(round_, kept))
            if not round_.num_draft_tokens and self._is_followed_in_vain():
                self.stop_drafting()
        if round_.spoiled:
            self._recover(round_)
        drafted = zip(round_.rows, round_.limits, kept, strict=True)
        for s, limit, n in drafted if round_.num_draft_tokens else ():
            # What a draft keeps of a row may not be finite if the row accepts nothing
            # in FRUITLESS rounds, in twice as many, and so on: it may just be bad.
            if s and limit > 0 and n == 1:
                times, rest = divmod(s.fruitless, FRUITLESS)
                if rest == 0 and times.bit_count() == 1:
                    doubted.append(s)
        if doubted and self._draft is not None:
            rows = [i for i, s in enumerate(self.slots) if s in doubted]
            self._draft.make_finite(rows)

    def _is_followed_in_vain(self) -> bool:
        """Whether a draft head follows rows that no round will draft for.

        What ended rows store has the head's context beside it, so a head goes on if
        prefixes are stored.
        """
        if self._idle == 0 or self._idle % RESTS or not self._serves:
            return False
        runner, rows = self._target.runner, self.unfinished
        if runner.recorder is None or runner.prefixes is not None or not rows:
            return False
        room = [self.most_for(s, s.length) for s in rows]
        remaining = sum(s.remaining for s in rows) / len(rows)
        state = BatchState(len(self.slots), room, remaining, rests=RESTS)
        return not self._choice.may_pay(state)

    def _timing(self, round_: BatchRound, kept: Sequence[int | None]) -> RoundTiming:
        """What a round that was read shows the policy."""
        k, limits = round_.num_draft_tokens, round_.limits
        seconds, fair, joining = self._timer.read(
            round_.began,
            [f.num_draft_tokens == k for f in self._in_flight if not f.first],
        )
        drafted = zip(round_.rows, limits, kept, strict=True) if k else ()
        running = [
            (s.number, limit, min(n - 1, limit))
            for s, limit, n in drafted
            if s is not None and n and limit > 0
        ]
        return RoundTiming(
            len(limits),
            k,
            [(limit, accepted) for _, limit, accepted in running],
            seconds,
            fair,
            round_.backlog,
            [number for number, *_ in running],
            not round_.chosen,
            joining,
        )

    def note_interruption(self) -> None:
        """Note that other work was dispatched between two rounds."""
        self._timer.interrupt()
        self._rests = -1, False

    def _recover(self, round_: BatchRound) -> None:
        """Let rows go on that kept nothing, since a draft has spoiled their caches."""
        spoiled = []
        for i in round_.spoiled:
            request = round_.rows[i]
            assert request is not None
            request.drafts = False
            spoiled.append(request.number)
        self._spoiled.numbers.update(spoiled)
        self._spoiled.plain_next = True
        self._note_rows()
        self._target.clean([i for i, s in enumerate(self.slots) if s])
        self._stale = 0
        log.debug(
            "draft tokens made logits of %d rows that are not finite: these rows go on "
            "without a draft",
            len(spoiled),
        )
