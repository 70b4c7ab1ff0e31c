"""Chooses k for every round: most committed tokens per second, at a bounded risk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .acceptance import Acceptance, tokens_per_round
from .base import BatchState, RoundOutcome
from .costs import Forwards, RoundCosts
from .credit import EXPLORE, MOST_CHARGE, Credit, Hope
from .deadline import Deadline
from .ladder import LADDER, Ladder
from .peeks import Peeked
from .rest import Rest, worth_resting
from .rows import RowAcceptance, rounds_left

# What is tried must promise this much more, in case it is this many standard
# deviations better than thought; what is chosen anew, that much more.
PROMISE, DOUBT, SWITCH = 1.02, 1.5, 1.01
# Standard deviations by which a cost is taken to be higher where an end must be kept.
CAUTION = 1.0
FIRST_PLAIN = 1
# Timed rounds of one k before another, and how many to wait for them at most: where
# rounds overlap, those are timed that lie between others of their kind, and none while
# new shapes are got ready for.
TIMED, BURST = 2, 6


class AutoLength:
    """Maximises expected tokens over expected time, round by round.

    With s_j the chance that a row accepts at least j tokens, a round of k brings
    each row 1 + s_1 + ... + s_k tokens (up to what it has room for) and takes
    k draft steps and a verify forward of k + 1 tokens. Both are estimates that
    rounds correct. What is thought to be worse is tried now and then, since it may
    have become better, and only as far as a credit reaches that grows by
    ``EXPLORE`` of the time: a draft that never pays costs about that much, and so
    does catching up its cache.

    A batch that nobody joins takes as long as its last row. There, no k is chosen
    with which the last row would end later than without a draft: rows that accept
    little would pay for those that accept much.

    Args:
        costs: of rounds.
        max_draft_tokens: the largest k.
        measure: measures forwards at a batch size, before the first round.
        measured_rows: at how many rows forwards are measured; ``None``: as many as a
            batch has.
        save: keeps what was learnt; called now and then.
    """

    def __init__(
        self,
        costs: RoundCosts,
        *,
        max_draft_tokens: int = LADDER[-1],
        measure: Callable[[int], Forwards] | None = None,
        measured_rows: int | None = None,
        save: Callable[[RoundCosts], None] | None = None,
    ):
        self.costs = costs
        self.max_draft_tokens = max_draft_tokens
        self.acceptance = Acceptance()
        self._rows = RowAcceptance()
        self._deadline = Deadline()
        self._ladder = Ladder(max_draft_tokens, dear=bool(costs.new_shape))
        self._measure, self._save = measure, save
        self._measured_rows = measured_rows
        self._save_at = 64
        self._credit = Credit()
        self._last = 0
        # The best k when a round was last asked for; k of the last rounds that were
        # chosen and read, how many in a row had it, and how many of these were timed.
        self._best_known = 0
        self._run = (0, BURST, TIMED)
        self._rest = Rest()
        # What the last thought came to, behind the last rest.
        self._thought: int | None = None
        self._hope = Hope()

    def prepare(self, num_rows: int) -> None:
        """Measure forwards of ``num_rows``, unless those known tell enough."""
        rows = self._measured_rows or num_rows
        if self._measure is None or self.costs.forwards.covers(rows):
            return
        self.costs.add(self._measure(rows))
        if self._save is not None:
            self._save(self.costs)

    # -- choosing ----------------------------------------------------------

    def may_pay(self, state: BatchState) -> bool:
        """Whether drafting may pay for rows that begin.

        That is, whether half of what they may emit would bring back what the drafter
        takes for their prompts; or would, as long as something can be tried, were
        acceptance and costs better than thought by a standard deviation. The latter is
        a try, and so is the former where nothing was drafted the last time; a try is
        charged if nothing comes of it. Where the prompts take next to nothing, a draft
        may pay that would if it were always right.
        """
        self._credit.lose(self._hope.end())
        ks = self._ladder.up_to(state.room, self.acceptance.measured)
        if any(self._is_little(state, k) for k in ks[1:]):
            return True
        trusted = () if self._hope.was_vain else (0.0,)
        for doubt in (0.0, 1.0) if self._credit.left > 0 else trusted:
            hopes = self._expected(state, ks[-1], doubt)
            for k in ks[1:]:
                hope = hopes[k] / self.costs.least(state.num_rows, k, doubt)
                rounds = state.remaining / 2 / max(1.0, hope)
                extra = self.costs.extra(state.num_rows, k, state.undrafted)
                if rounds * (hope - 1) > extra:
                    self._hope.begin(extra)
                    return True
        return False

    def _is_little(self, state: BatchState, k: int) -> bool:
        """Whether prompts take little of what rows may, and k can be of use at all."""
        n, costs = state.num_rows, self.costs
        taken_in = costs.extra(n, k, state.undrafted) - costs.extra(n, k, 0)
        little = taken_in <= EXPLORE * state.remaining / 2
        return little and costs.relative(n, k)[0] < k + 1

    def held(self, num_rows: int) -> int | None:
        """k, where rounds of one follow each other and the next one is another."""
        return self._rest.held(num_rows)

    def choose(self, state: BatchState) -> int:
        """k of the next round."""
        if state.fresh:
            self._begin_batch()
        self._learn_rested()  # it counts where rows left or joined meanwhile
        k = self._think(state)
        # A deadline is looked at in every round that drafts.
        self._thought = None if k and len(state.left) > 1 else k
        return k

    def _begin_batch(self) -> None:
        """What was waited for was another batch's."""
        self._learn_rested()
        self._credit.settle()

    def _think(self, state: BatchState) -> int:
        ks = self._ladder.up_to(state.room, self.acceptance.measured)
        # Plain rounds come first: costs are learnt in comparison with theirs.
        if len(ks) == 1 or self.costs.rounds < FIRST_PLAIN:
            return 0
        rates = self._rates(state, ks)
        in_time = self._in_time(state, rates)
        self._best_known = best = self._best(state, in_time)
        k, run, timed = self._newest(state)
        if run < BURST and timed < TIMED and k in rates:
            return k
        # What was tried is awaited before anything else is.
        return self._worth_a_try(state, rates, in_time, best) if k == best else best

    def _in_time(self, state: BatchState, rates: dict[int, float]) -> dict[int, float]:
        """Those of the k with which a batch that nobody joins ends in time."""
        if len(state.left) < 2:  # the best rate ends it soonest
            return rates
        tokens = tokens_per_round(self.acceptance.survival(max(rates)))
        known, left = self._rows, state.left
        rows = [(n, known.factor(row)) for row, n in left.items()]
        # One of them is the slowest, and it is not known which.
        slow = [(n, known.least(row, len(left))) for row, n in left.items()]

        def until_the_end(k: int) -> float:
            rounds = rounds_left(rows, k, tokens[k])
            longest = max(rounds_left(slow, k, tokens[k]))
            once = self.costs.extra(state.num_rows, k, state.undrafted)
            return self._cost_of(state.num_rows, k, rounds, longest) + once

        def plainly(tokens: Sequence[int]) -> float:
            rounds = [float(n) for n in tokens]
            of_one = self.costs.forwards.round(len(rounds), 0)
            return of_one * self._cost_of(len(rounds), 0, rounds, max(rounds))

        plain = self.costs.forwards.round(state.num_rows, 0)
        self._deadline.look_at(left, plainly)
        return {
            k: rate
            for k, rate in rates.items()
            if not k or self._deadline.is_met(plain * until_the_end(k))
        }

    def _cost_of(
        self, num_rows: int, k: int, rounds: list[float], longest: float
    ) -> float:
        """Plain rounds that rounds of k cost until every row has had its number.

        The last one has the ``longest``.

        A round's cost grows with the rows that still run, from that of one.
        """
        forwards = self.costs.forwards
        # One that is thought cheap by mistake is chosen, and stays as it is known.
        cost = self.costs.least(num_rows, k, -CAUTION) if k else 1.0
        one = min(1.0, forwards.round(1, k) / forwards.round(num_rows, k))
        each = cost * (1 - one) / max(1, num_rows - 1)
        return (cost - each * num_rows) * longest + each * sum(rounds)

    def _newest(self, state: BatchState) -> tuple[int, int, int]:
        """k of the round that was handed out last, rounds in a row with it, timed ones.

        Of those that are not read yet, it is not known whether they will be timed.
        """
        k, run, timed = self._run
        for handed_out in state.in_flight:
            if handed_out != k:
                k, run, timed = handed_out, 0, 0
            run += 1
        return k, run, timed

    def _is_plain(self, state: BatchState) -> bool:
        """Whether the newest round drafts nothing."""
        return state.undrafted > 0 or not self._newest(state)[0]

    def _rates(self, state: BatchState, ks: list[int]) -> dict[int, float]:
        """Expected tokens of a row in the time of a plain round, by k."""
        expected = self._expected(state, ks[-1])
        return {k: expected[k] / self.costs.relative(state.num_rows, k)[0] for k in ks}

    def _expected(self, state: BatchState, k: int, doubt: float = 0.0) -> list[float]:
        """Expected tokens per running row for each length up to ``k``."""
        tokens = tokens_per_round(self.acceptance.survival(k, doubt=doubt))
        room = state.room
        if min(room, default=0) >= k:
            return tokens
        n = len(room)
        return [sum(tokens[min(j, r)] for r in room) / n for j in range(k + 1)]

    def _best(self, state: BatchState, rates: dict[int, float]) -> int:
        """The best k as far as is known, with a preference for the last one."""
        last = 0 if self._is_plain(state) else self._last
        stay = last if rates.get(last, 0.0) >= rates[0] * SWITCH else 0
        best, gained = stay, 0.0
        for k, rate in rates.items():
            if rate < rates[stay] * SWITCH:
                continue
            # What the change costs once must come back, were half of what may
            # remain to be emitted.
            rounds = state.remaining / 2 / max(rate, rates[stay])
            extra = self.costs.extra(state.num_rows, k, state.undrafted)
            gain = rounds * (rate / rates[stay] - 1) - extra
            if gain > gained:
                best, gained = k, gain
        return best

    def _worth_a_try(
        self,
        state: BatchState,
        rates: dict[int, float],
        in_time: Collection[int],
        best: int,
    ) -> int:
        """The cheapest k that may be better than the best known, if credit allows.

        First come those that are thought to be better, and are not the best for what
        beginning them takes.
        """
        hopes = self._expected(state, max(rates), DOUBT)
        found = [(True, self._credit.reach, best)]
        for k in rates:
            # Of one plain round after another, nothing new is learnt.
            if k == best or (k == 0 and self._is_plain(state)):
                continue
            hope = hopes[k] / self.costs.least(state.num_rows, k, DOUBT)
            if hope < rates[best] * PROMISE:
                continue
            extra = self.costs.extra(state.num_rows, k, state.undrafted)
            cost = self.costs.relative(state.num_rows, k)[0]
            loss = cost * max(0.0, 1 - rates[k] / rates[best])
            better = k in in_time and rates[k] > rates[best] * SWITCH
            price = BURST * loss + extra
            if price < found[0][1]:
                found.append((not better, price, k))
        return min(found)[2]

    # -- learning ----------------------------------------------------------

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn what a round cost and what its rows accepted."""
        if self._rest.add(outcome) or self._learn_rested() is outcome:
            return
        self._spend(outcome)
        num_rows, k = outcome.num_rows, outcome.num_draft_tokens
        extra = self.costs.extra(num_rows, k, outcome.undrafted)
        learnt = self._learn(outcome)
        self.costs.meet(num_rows, k)
        self._settle(outcome, extra, learnt)
        self._charge(outcome)
        if self._thought == k == self._best_known == self._run[0]:
            plain = self.costs.plain_seconds(num_rows)
            if rounds := worth_resting(k, self._run[1], plain):
                self._thought = None
                first = self.acceptance.survival(1)[0]
                self._rest.begin(rounds, num_rows, k, first)
        if self._save is not None and self.costs.rounds >= self._save_at:
            self._save_at = 2 * self.costs.rounds
            self._save(self.costs)

    def _learn_rested(self) -> RoundOutcome | None:
        """End a rest; its last round. What they took is learnt from the median."""
        rested = self._rest.take()
        if not rested:
            return None
        num_rows, k = rested[0].num_rows, rested[0].num_draft_tokens
        for outcome in rested:
            self._spend(outcome)
            self._learn_of_rows(outcome)
            self._credit.earn(self.costs.relative(num_rows, k)[0])
        timed = sorted(o.seconds for o in rested if o.seconds is not None)
        self.costs.pass_by(len(rested) - bool(timed))
        if timed:
            self.costs.observe(num_rows, k, timed[len(timed) // 2])
        return rested[-1]

    def _learn(self, outcome: RoundOutcome) -> bool:
        """What its rows accepted, and what it cost; whether that is known."""
        self._learn_of_rows(outcome)
        if outcome.seconds is None:
            return False
        n, k, undrafted = outcome.num_rows, outcome.num_draft_tokens, outcome.undrafted
        return self.costs.observe(n, k, outcome.seconds, undrafted=undrafted)

    def _learn_of_rows(self, outcome: RoundOutcome) -> None:
        """What its rows accepted, or would have."""
        k = outcome.num_draft_tokens
        if outcome.rows:
            survival = self.acceptance.survival(k)
            self._rows.observe(outcome.rows, outcome.accepted, survival)
        if k:
            self.acceptance.observe(outcome.accepted)
        else:
            self._see(outcome.peeked)

    def _see(self, peeked: Peeked) -> None:
        """What a plain round's rows would have accepted, where that was looked at."""
        if rows := peeked.rows:
            self._rows.observe(rows, peeked.accepted, self.acceptance.survival(1))
        self.acceptance.observe_positions(peeked.positions)

    def _spend(self, outcome: RoundOutcome) -> None:
        """Take its time off what the batch may take."""
        num_rows, k = outcome.num_rows, outcome.num_draft_tokens
        rounds = self.costs.relative(num_rows, k)[0]
        plain = self.costs.plain_seconds(num_rows)
        if outcome.spent is not None and plain is not None:
            rounds = max(rounds, min(outcome.spent / plain, MOST_CHARGE))
        else:
            rounds += self.costs.extra(num_rows, k, outcome.undrafted)
        self._deadline.spend(rounds * self.costs.forwards.round(num_rows, 0))

    def _settle(self, outcome: RoundOutcome, extra: float, learnt: bool) -> None:
        """Take what it was estimated to lose off the credit; note the run of its k."""
        k, num_rows = outcome.num_draft_tokens, outcome.num_rows
        cost = self.costs.relative(num_rows, k)[0]
        self._credit.earn(cost)
        if outcome.forced:
            return
        if k == self._best_known:
            self._last = k
            if k:
                self._hope.fulfil()
        else:
            state = BatchState(num_rows, [max(k, self.max_draft_tokens)], 1e9)
            ks = self._ladder.up_to(state.room, self.acceptance.measured)
            rates = self._rates(state, ks if k in ks else sorted([*ks, k]))
            best = max(rates, key=lambda k: rates[k])
            self._credit.lose(cost * max(0.0, 1 - rates[k] / rates[best]))
            self._credit.foresee(extra)
            if rates[k] * SWITCH >= rates[best]:
                self._last = k
        _, run, timed = self._run if self._run[0] == k else (k, 0, 0)
        self._run = (k, run + 1, timed + learnt)

    def _charge(self, outcome: RoundOutcome) -> None:
        """Take what a try really took off the credit."""
        k, best = outcome.num_draft_tokens, self._best_known
        # A plain round that drafting held up is a try's where plain ones are best, but
        # not one that looked.
        if outcome.peeked.rows or not (k != best if k else best == 0):
            return
        plain = self.costs.plain_seconds(outcome.num_rows)
        if outcome.spent is not None and plain is not None:
            cost = self.costs.relative(outcome.num_rows, k)[0]
            self._credit.spend(outcome.spent / plain - cost)
        if k:
            self._credit.settle()
