"""Chooses the k with the most tokens per second, and bounds what trying may cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...utils.printable import counted
from .acceptance import Acceptance, RowFactors, tokens_per_round
from .base import BatchState, RoundTiming
from .costs import Forwards, RoundCosts

# Few values of k, since each is a shape; 3, 5, 6 and 7 would bring little more.
LADDER = (0, 1, 2, 4, 8)
# A k is tried if it would be PROMISE times better, were acceptance and costs DOUBT
# standard deviations better than known. The k changes if another is SWITCH times
# better.
PROMISE, DOUBT, SWITCH = 1.02, 1.5, 1.01
# A longer k than acceptance was measured for is chosen from too, if its rounds cost at
# most this many times as much: a block drafts few tokens in the time of many.
HARDLY_MORE = 1.15
# A k that was chosen stays until TIMED of its rounds were timed, for LONGEST rounds at
# most.
TIMED, LONGEST = 2, 6
# The share of the time that trying may lose.
EXPLORE = 0.01
# In plain rounds: the budget at first, the most it may save up, the most that a try may
# cost, the most that a round is charged, and the largest debt.
FIRST, MOST_SAVED, MOST_PRICE, MOST_CHARGE, MOST_DEBT = 0.2, 8.0, 4.0, 20.0, 30.0
# In plain rounds: what k costs once and does not show in a round's time.
NOTICED = 0.02
# Costs are saved after this many rounds, and whenever the number has doubled.
SAVE_AT = 64


class TryBudget:
    """How many plain rounds tries may lose: a share of the time that has passed."""

    def __init__(self) -> None:
        self.left = FIRST

    @property
    def reach(self) -> float:
        """The most that the next try may cost; 0 while there is a debt."""
        return max(self.left, MOST_PRICE) if self.left > 0 else 0.0

    def earn(self, rounds: float) -> None:
        """Note that the time of so many plain rounds has passed."""
        self.left = min(MOST_SAVED, self.left + EXPLORE * rounds)

    def lose(self, rounds: float) -> None:
        """Charge what a try lost."""
        self.left = max(-MOST_DEBT, self.left - min(MOST_CHARGE, max(0.0, rounds)))


class GoodputPolicy:
    """Chooses the k with the most expected tokens per expected second; k may be 0.

    A k that seems worse is tried now and then, within a budget of ``EXPLORE`` of the
    time. If no request waits for a row, a batch takes as long as its last row, and the
    k is chosen with which that row ends soonest.

    Args:
        costs: the costs of rounds.
        max_draft_tokens: the largest k.
        measure: measures forwards at a batch size, before its first round.
        measured_rows: the number of rows to measure with; ``None``: as many as the
            batch has.
        save: saves what was learnt; called now and then.
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
        self.budget = TryBudget()
        self._rows = RowFactors()
        self._measure, self._measured_rows, self._save = measure, measured_rows, save
        self._save_at = SAVE_AT
        # Of the last choice: the rates by k, and the best k. Of the rounds read last:
        # their k, how many in a row had it, and how many of these were timed.
        self._rates_known: dict[int, float] = {}
        self._best = 0
        self._run = (0, LONGEST, TIMED)
        # For `reason`: how many rounds had so many rows and this k.
        self._chosen: Counter[tuple[int, int]] = Counter()

    @property
    def reason(self) -> str | None:
        """The commonest k so far, and what a round that drafts costs.

        ``None`` before the first round.
        """
        chosen = Counter(dict(self._chosen))  # rounds may go on in another thread
        if not chosen:
            return None
        ks, rows = Counter[int](), Counter[int]()
        for (num_rows, k), rounds in chosen.items():
            ks[k] += rounds
            rows[num_rows] += rounds
        k = max(ks, key=lambda k: ks[k])
        # Rounds that drafted, if there were any, and their commonest number of rows.
        drafted = {key: n for key, n in chosen.items() if key[1] == k > 0}
        if not drafted:
            drafted = {key: n for key, n in chosen.items() if key[1]}
        num_rows, some = max(rows, key=lambda n: rows[n]), 1
        if drafted:
            num_rows, some = max(drafted, key=lambda key: drafted[key])
        return (
            f"{counted(k, 'draft token') if k else 'no draft'} in "
            f"{ks[k] / chosen.total():.0%} of the rounds; with "
            f"{counted(num_rows, 'row')} a round of {counted(some, 'draft token')} "
            f"takes {self.costs.relative(num_rows, some):.2f} times one without"
        )

    def prepare(self, num_rows: int) -> None:
        """Measure forwards of ``num_rows``, unless those known are near enough."""
        rows = self._measured_rows or num_rows
        if self._measure is None or self.costs.forwards.covers(rows):
            return
        self.costs.forwards.add(self._measure(rows))
        if self._save is not None:
            self._save(self.costs)

    # -- choosing ----------------------------------------------------------

    def choose(self, state: BatchState) -> int:
        """k of the next round."""
        ks = self._ladder(state)
        # A plain round comes first: costs are relative to it.
        if len(ks) == 1 or not self.costs.rounds:
            return 0
        self._rates_known = rates = self._rates(state, ks)
        k, run, timed = self._newest(state)
        self._best = best = self._best_of(state, rates, 0 if state.backlog else k)
        if k in rates and run < LONGEST and timed < TIMED:
            return k
        return self._worth_a_try(state, rates) if k == best else best

    def _ladder(self, state: BatchState) -> list[int]:
        """The values of k to choose from: a few positions beyond those tried.

        Longer ones are in reach where a block is drafted at once and they cost hardly
        more.
        """
        room = min(self.max_draft_tokens, max(state.room, default=0))
        top = min(room, 2 * self.acceptance.measured + 1)
        most = 0.0
        if self.costs.forwards.at_once(state.num_rows):
            most = HARDLY_MORE * self.costs.relative(state.num_rows, top)
        return [
            k
            for k in sorted({*LADDER, room})
            if k <= top
            or (k <= room and self.costs.relative(state.num_rows, k) <= most)
        ]

    def _rates(
        self, state: BatchState, ks: Sequence[int], *, doubt: float = 0.0
    ) -> dict[int, float]:
        """Expected tokens in the time of a plain round, by k."""
        tokens = tokens_per_round(self.acceptance.survival(ks[-1], doubt=doubt))
        of_rows = self._of_last_row if len(state.left) > 1 else self._of_mean_row
        return {
            k: of_rows(state, k, tokens)
            / self.costs.relative(state.num_rows, k, doubt=doubt)
            for k in ks
        }

    def _of_mean_row(self, state: BatchState, k: int, tokens: Sequence[float]) -> float:
        """Tokens of a running row in a round of k, on average."""
        if min(state.room) >= k:
            return tokens[k]
        return sum(tokens[min(k, r)] for r in state.room) / len(state.room)

    def _of_last_row(self, state: BatchState, k: int, tokens: Sequence[float]) -> float:
        """How many times sooner, in rounds, the last row ends with rounds of k."""
        more = tokens[k] - 1
        rounds = max(
            n / (1 + min(k, room, self._rows.of(row) * more))
            for (row, n), room in zip(state.left.items(), state.room, strict=True)
        )
        return max(state.left.values()) / rounds

    def _newest(self, state: BatchState) -> tuple[int, int, int]:
        """k of the last round dispatched; rounds in a row with it; those timed."""
        k, run, timed = self._run
        for dispatched in state.in_flight:
            if dispatched != k:
                k, run, timed = dispatched, 0, 0
            run += 1
        return k, run, timed

    def _best_of(self, state: BatchState, rates: dict[int, float], last: int) -> int:
        """The best k as far as is known; the last one, if none is clearly better."""
        stay = last if rates.get(last, 0.0) >= rates[0] * SWITCH else 0
        best, gained = stay, 0.0
        for k, rate in rates.items():
            # Half of what rows may still emit must bring back what k costs once.
            rounds = state.remaining / 2 / max(rate, rates[stay])
            gain = rounds * (rate / rates[stay] - 1)
            gain -= self.costs.once(state.num_rows, k, state.backlog)
            if rate > rates[stay] * SWITCH and gain > gained:
                best, gained = k, gain
        return best

    def _worth_a_try(self, state: BatchState, rates: dict[int, float]) -> int:
        """A k that may be better than the best: 0, else the cheapest to try."""
        best, reach = self._best, self.budget.reach
        if not reach:
            return best
        rounds = min(LONGEST, TIMED + len(state.in_flight))
        hopes = self._rates(state, list(rates), doubt=DOUBT)
        tried = best
        for k, hope in hopes.items():
            # Plain rounds teach nothing new while nothing is drafted.
            if k == best or hope < rates[best] * PROMISE or (not k and state.backlog):
                continue
            loss = max(0.0, 1 - rates[k] / rates[best])
            price = rounds * loss * self.costs.relative(state.num_rows, k)
            price += self.costs.once(state.num_rows, k, state.backlog)
            if price < reach:
                tried, reach = k, price
                if not k:  # comes first: all costs are relative to it
                    break
        return tried

    def may_pay(self, state: BatchState) -> bool:
        """Whether half of what rows may emit can bring back what their prompts cost.

        If it could only with better acceptance and costs than known, that is a try.
        Prompts that cost next to nothing are worth it wherever a draft could pay.
        """
        ks = self._ladder(state)
        # `choose` weighs what a new shape costs; later rows use it too.
        once = self.costs.catch_up(state.num_rows, state.backlog)
        state = BatchState(state.num_rows, state.room, state.remaining, state.backlog)
        for doubt in (0.0, 1.0) if self.budget.left > 0 else (0.0,):
            rates = self._rates(state, ks, doubt=doubt)
            for k in ks[1:]:
                rounds = state.remaining / 2 / max(1.0, rates[k])
                if rounds * (rates[k] - 1) > once:
                    self.budget.lose(once if doubt else 0.0)
                    return True
        return once <= EXPLORE * state.remaining / 2 and any(
            self.costs.relative(state.num_rows, k) < k + 1 for k in ks[1:]
        )

    # -- learning ----------------------------------------------------------

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a round's time and from what its rows accepted."""
        num_rows, k = timing.num_rows, timing.num_draft_tokens
        once = self.costs.once(num_rows, k, timing.backlog)
        fair = timing.fair and once <= NOTICED
        learnt = self.costs.observe(num_rows, k, timing.seconds if fair else None)
        if not timing.forced:
            self._chosen[num_rows, k] += 1
            self._charge(timing, once)
            _, run, timed = self._run if self._run[0] == k else (k, 0, 0)
            self._run = k, run + 1, timed + learnt
        self._rows.observe(timing.rows, timing.accepted, self.acceptance.survival(k))
        if k:
            self.acceptance.observe(timing.accepted)
        else:
            self.acceptance.observe_positions(timing.shadow)
        if self._save is not None and self.costs.rounds >= self._save_at:
            self._save_at = 2 * self.costs.rounds
            self._save(self.costs)

    def _charge(self, timing: RoundTiming, once: float) -> None:
        """Charge what a round lost by having another k than the best."""
        num_rows, k = timing.num_rows, timing.num_draft_tokens
        cost = self.costs.relative(num_rows, k)
        plain = self.costs.plain_seconds(num_rows)
        self.budget.earn(cost)
        late = once
        if (
            timing.seconds is not None
            and plain is not None
            and (once > NOTICED or not timing.fair)
        ):
            late = timing.seconds / plain - cost
        if k != self._best:
            rates = self._rates_known
            best = rates.get(self._best, 0.0)
            loss = 1 - rates.get(k, best) / best if best else 0.0
            self.budget.lose(cost * max(0.0, loss) + max(0.0, late))
