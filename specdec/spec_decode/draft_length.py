"""Chooses k, the number of tokens that a round drafts. No mlx here.

    choose(BatchState) -> k     asked before each round
    observe(RoundTiming)        shown each round that was read

:class:`AutoLength` takes the k with the most expected tokens per second. It knows the
chance of a draft token at each position (:class:`Acceptance`), and the time of a round
by rows and k (:class:`RoundCosts`): timed forwards to begin with, then moving means of
timed rounds. Other k are tried within ``EXPLORE`` of the time.

While requests wait for a row, the sum of tokens counts. When none waits, a batch takes
as long as its last row, so the k is chosen with which that row ends soonest.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, inf, log, log2, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

from ..utils.printable import counted
from ..utils.user_cache import CachedEntries, cache_path
from .round_times import RoundTiming, StepTimer

__all__ = [
    "LADDER",
    "Acceptance",
    "AutoLength",
    "BatchState",
    "CostStore",
    "DraftLength",
    "ForwardCosts",
    "Forwards",
    "RoundCosts",
    "RoundTiming",
    "StepTimer",
    "tokens_per_round",
]

#: Few values of k, since each is a shape; 3, 5, 6 and 7 would bring little more.
LADDER = (0, 1, 2, 4, 8)
# The share of the time that tries may lose, and how many plain rounds they may save up,
# which pays for any try: what is never tried can never be corrected.
EXPLORE, MOST_SAVED = 0.01, 8.0
# Plain rounds saved up that pay for the first try of a draft whose costs only another
# process has timed.
FIRST_TRY = 1.0
# Prompts are no try if they cost more than so many times what their rows save up;
# of 2 to 5, the value that simulated jobs like best.
AFFORD = 3.2
# A k that was chosen stays until TIMED of its rounds were timed, for LONGEST rounds at
# most: with one round in flight, only the second of two alike is timed.
TIMED = 2
LONGEST = 3 * TIMED
# The k changes if another is better by this factor; less is noise.
SWITCH = 1.01
# A longer draft is a choice before shorter ones were tried if it adds no more than
# this many times as much to a plain round: the steps of a staircase are flat.
FLAT = 1.1
# A k is tried that would be better, were acceptance and costs so many standard
# deviations better than known.
DOUBT = 1.5
# An observed acceptance weighs 1/e after this many rounds: some 100 tokens of a text.
MEMORY = 48.0
# The chance of a draft token before any is seen, and how many observations that is
# worth. Those that another process has saved are worth as much as five rows' rounds.
PRIOR, PRIOR_WEIGHT = 0.6, 2.0
STORED_WEIGHT = 5.5 * PRIOR_WEIGHT
# A choice of 0 stands for so many rounds, if nothing can change it until then.
STANDS = 32, 8
# Standard deviations of logarithms: of a round's time; of the machine's pace, from one
# round to the next; of a cost that no round has confirmed.
NOISE, PACE, UNSURE = 0.08, 0.06, 0.2
# A logarithm of times: a larger error is no noise. Forwards that were timed on a busy
# machine may be as wrong.
GROSS = 0.3
# A context of fewer tokens is not timed. Costs are those of whole bands of tokens.
LONG, BAND = 1024, 512
# A round shows what it takes to catch up with so many tokens, for so many rounds.
SHOWN, FORGOTTEN = 16, 4096
# The accepted tokens that "this row is like the others" is worth.
ALIKE = 8.0
# While requests wait, rows that accept different numbers of tokens end apart, and more
# prefills run for a row or two: so many for each round that drafts.
APART = 1 / 16


@dataclass(frozen=True)
class BatchState:
    """A batch before its next round.

    Args:
        num_rows: rows that are computed, idle slots included.
        room: the most draft tokens that each running row can use.
        remaining: tokens that a running row may still emit, on average.
        backlog: tokens of a row that the drafter has to take in before it drafts.
        in_flight: k of each round that was dispatched and not read yet.
        left: tokens that each running row may still emit, by the row's number; empty
            if requests wait for a row.
        rests: rounds for which the drafter would only follow the rows.
        context: tokens that a running row has, on average.
    """

    num_rows: int
    room: Sequence[int]
    remaining: float
    backlog: int = 0
    in_flight: Sequence[int] = ()
    left: Mapping[int, int] = field(default_factory=dict)
    rests: int = 0
    context: float = 0.0


class DraftLength(Protocol):
    """Chooses k for each round. With a ratio rule, a seed's text depends on it."""

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that it ever chooses."""

    def unmeasured(self, num_rows: int, context: int = 0) -> int:
        """How many rows to measure with, before as many begin; 0: nothing is needed.

        Args:
            context: tokens of a prompt, on average.
        """

    def measure(self, num_rows: int, context: int = 0) -> None:
        """Measure forwards of ``num_rows``, and of rows with such a context.

        Raises:
            DrafterError: the drafter has failed.
        """

    def may_pay(self, state: BatchState) -> bool:
        """Whether joining rows are worth the drafter's prefill.

        It is also asked whether rows that rounds do not draft for are worth being
        followed on: no rows join then, and ``state.rests`` is not 0.

        Args:
            state: the joining rows and the running ones. Rows that are not drafted
                for have no room; the backlog is the joining rows' prompts.
        """

    def choose(self, state: BatchState) -> int:
        """k of the next round; asking changes nothing."""

    def stands(self, state: BatchState) -> int:
        """For how many rounds after this one :meth:`choose` would go on to say 0.

        Asked once it has said 0. No row joins or ends in these rounds, no request
        begins or ceases to wait, and ``state.room`` stays.
        """

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a round that was read."""


# -- acceptance -----------------------------------------------------------


@dataclass
class _Position:
    """The chance at one position, and how many observations it is worth.

    The newest rounds replace it if they differ by three standard deviations.
    """

    mean: float
    weight: float
    new_mean: float = 0.0
    new_weight: float = 0.0

    def fade(self, unseen: int) -> None:
        """Fade in a round that drafted, after so many that did not."""
        self.weight = self.after(unseen) * (1 - 1 / MEMORY)
        self.new_weight *= 0.0 if unseen else 1 - 6 / MEMORY

    def after(self, unseen: int) -> float:
        """The weight after rounds without a draft, in which it grows doubtful."""
        return self.weight / (1 + unseen * self.weight / (8 * MEMORY))

    def add(self, trials: int, right: int) -> None:
        self.weight += trials
        self.mean += (right - trials * self.mean) / self.weight
        self.new_weight += trials
        self.new_mean += (right - trials * self.new_mean) / self.new_weight
        deviation = sqrt((self.mean * (1 - self.mean) + 0.02) / self.new_weight)
        if self.new_weight >= 6 and abs(self.new_mean - self.mean) > 3 * deviation:
            self.mean, self.weight = self.new_mean, self.new_weight


class Acceptance:
    """The chance of a draft token at each position, if all before it were accepted.

    A row that accepts n of at most m tokens says something about the first
    min(m, n + 1) positions. The product of the chances up to j is the share of rounds
    that accept j tokens or more (Kaplan and Meier 1958). So rounds of every k add to
    one estimate.
    """

    def __init__(self, chances: Iterable[float] = ()) -> None:
        self._positions = [_Position(chance, STORED_WEIGHT) for chance in chances]
        # Rounds since the last one that drafted.
        self.unseen = 0
        # By row: tokens accepted, and how many were expected of any row.
        self._rows: dict[int, list[float]] = {}
        self._last: tuple[BatchState, list[tuple[int, int, float]]] | None = None

    @property
    def chances(self) -> list[float]:
        """The chance at each position that was reached."""
        return [position.mean for position in self._positions]

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a round."""
        self._last = None
        pairs = Counter(timing.accepted if timing.num_draft_tokens else ())
        most = max((min(limit, n + 1) for limit, n in pairs), default=0)
        if not most:
            self.unseen += 1
            return
        expected = tokens_per_round(self.survival(timing.num_draft_tokens))
        known, more = self._rows, [tokens - 1 for tokens in expected]
        for row, (limit, n) in zip(timing.rows, timing.accepted, strict=False):
            if (each := known.get(row)) is None:
                each = known[row] = [ALIKE, ALIKE]
            each[0] += n
            each[1] += more[limit]
        # Those that began first fall out in time.
        old = set(self._rows) - set(timing.rows) if len(self._rows) > 2048 else ()
        for row in sorted(old)[:1024]:
            del self._rows[row]
        # By number, the rows that reached and that accepted just so many positions.
        reached, accepted = [0] * (most + 1), [0] * (most + 1)
        for (limit, n), rows in pairs.items():
            reached[min(limit, n + 1)] += rows
            accepted[n] += rows
        for position in self._positions:
            position.fade(self.unseen)
        self.unseen, trials, right = 0, len(timing.accepted), len(timing.accepted)
        for j in range(most):
            # What a row reached or accepted, it did at the positions before, too.
            trials, right = trials - reached[j], right - accepted[j]
            if j == len(self._positions):
                self._positions.append(_Position(*self._at(j)))
            self._positions[j].add(trials, right)

    def _at(self, j: int) -> tuple[float, float]:
        """Chance and weight at a position; one never reached is like the last one."""
        if j < len(self._positions):
            return self._positions[j].mean, self._positions[j].after(self.unseen)
        if not self._positions:
            return PRIOR, PRIOR_WEIGHT
        mean, weight = self._at(len(self._positions) - 1)
        return mean, min(PRIOR_WEIGHT, weight)

    @property
    def measured(self) -> int:
        """How many positions were tried often enough, lately."""
        weights = [position.after(self.unseen) for position in self._positions]
        known = PRIOR_WEIGHT + 3
        return next((j for j, w in enumerate(weights) if w < known), len(weights))

    def survival(self, k: int, *, doubt: float = 0.0) -> list[float]:
        """Chances that at least 1, 2, ... ``k`` draft tokens are accepted.

        Args:
            doubt: assume each position to be better by this many standard deviations.
        """
        survival, reached = [], 1.0
        for j in range(k):
            mean, weight = self._at(j)
            if doubt:
                mean += doubt * sqrt((mean * (1 - mean) + 0.1) / weight)
            reached *= min(1.0, mean)
            survival.append(reached)
        return survival

    def last_rows(self, state: BatchState) -> list[tuple[int, int, float]]:
        """Rows that may end last, at any k: tokens left, room, factor.

        A row's factor is how many tokens it accepts, relative to all rows. These are
        modelled as Poisson counts whose means differ by gamma factors. So it stays near
        1 while little is known of the row.
        """
        if self._last is not None and self._last[0] is state:
            return self._last[1]
        known, alike = self._rows, (ALIKE, ALIKE)
        counts = [known.get(row, alike) for row in state.left]
        factors = [seen / expected for seen, expected in counts]
        rows = sorted(zip(state.left.values(), state.room, factors, strict=True))
        last, least_room, least_factor = [], inf, inf
        # One that has no more left than others, as much room as one of them and as good
        # a factor as one does not end after them.
        for row in reversed(rows):
            _, room, factor = row
            if room < least_room or factor < least_factor:
                last.append(row)
                least_room = min(room, least_room)
                least_factor = min(factor, least_factor)
        self._last = state, last
        return last


class Emission(NamedTuple):
    """What rounds of one k bring a row, by renewal theory (Feller 1971, chapter XI).

    Args:
        mean: tokens of a round, m = E[Y].
        variance: of the tokens of a round, v.
        surplus: tokens of the last round beyond the row's end, E[Y(Y - 1)] / 2m.
    """

    mean: float = 1.0
    variance: float = 0.0
    surplus: float = 0.0

    def rounds(self, num_tokens: float, late: float = 0.0) -> float:
        """Rounds in which a row emits ``num_tokens``, about n / m.

        Args:
            late: standard deviations, each sqrt(n v / m^3), by which it is late.
        """
        rounds = (num_tokens + self.surplus) / self.mean
        rounds += late * sqrt(num_tokens * self.variance / self.mean**3)
        return min(rounds, num_tokens)


def emissions(survival: Iterable[float]) -> list[Emission]:
    """What a row emits in rounds of k = 0, 1, ..., by the survival up to k."""
    by_k, mean, pairs = [Emission()], 1.0, 0.0
    for j, s in enumerate(survival, 1):
        mean, pairs = mean + s, pairs + 2 * j * s
        variance = max(0.0, pairs + mean - mean**2)
        by_k.append(Emission(mean, variance, pairs / 2 / mean))
    return by_k


def lateness(num_rows: int) -> float:
    """The expected largest of so many standard normals (Blom 1958); 0 for one."""
    return NormalDist().inv_cdf((num_rows - 0.375) / (num_rows + 0.25))


def tokens_per_round(survival: Iterable[float]) -> list[float]:
    """Expected tokens of a row in a round of k = 0, 1, ...: 1 + survival up to k."""
    expected = [1.0]
    for s in survival:
        expected.append(expected[-1] + s)
    return expected


# -- costs ----------------------------------------------------------------


@dataclass(frozen=True)
class Forwards:
    """Measured seconds at one batch size.

    Args:
        num_rows: the batch size, B.
        verify: by S, the time of a target forward of shape (B, S); S = 1 is included.
        draft_step: the time of one proposed token for each row.
        draft_once: the time that drafting takes beside that, for any number of tokens.
        busy: other work ran on the machine meanwhile.
        fall: the largest ratio of the times of a forward and of one of more tokens,
            before ``verify`` was corrected; above 1, it is noise.
        context: tokens that each row had in some more forwards; 0: there were none.
        longer: by S, the times of these.
    """

    num_rows: int
    verify: Mapping[int, float]
    draft_step: float
    draft_once: float = 0.0
    busy: bool = False
    fall: float = 0.0
    context: int = 0
    longer: Mapping[int, float] = field(default_factory=dict)


class ForwardCosts:
    """Seconds of forwards at any batch size, interpolated from measured ones.

    They are linear in the tokens between and beyond the measured numbers. At a batch
    size that was not measured, they are linear in B * S over all measured sizes, and a
    draft step grows with the target's.

    With a context, a round takes longer by what reading the context takes, which is
    linear in its tokens. A draft step grows as much as a plain one.

    Attributes:
        context: tokens that rows have, on average.
    """

    def __init__(self, measured: Iterable[Forwards] = ()):
        self._by_rows = {each.num_rows: each for each in measured}
        # By rows, the nearest measurement; by rows, k and context, seconds.
        self._nearest: dict[int, Forwards] = {}
        self._rounds: dict[tuple[int, int, int], float] = {}
        self.context = 0

    def add(self, forwards: Forwards) -> None:
        """Add a measurement; it replaces one of the same batch size."""
        self._by_rows[forwards.num_rows] = forwards
        self._rounds.clear()
        self._nearest.clear()

    @property
    def measured(self) -> list[Forwards]:
        """The measurements, smallest batch first."""
        return [self._by_rows[b] for b in sorted(self._by_rows)]

    def covers(self, num_rows: int, context: int = 0) -> bool:
        """Whether a near batch size was measured, with a context if it is long."""
        return any(
            2 / 3 <= b / num_rows <= 1.5 and (context < LONG or f.context)
            for b, f in self._by_rows.items()
        )

    def verify(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a forward of the target of shape (num_rows, num_tokens)."""
        of_rows = self._by_rows.get(num_rows)
        if of_rows and (len(of_rows.verify) > 1 or num_tokens in of_rows.verify):
            return _interpolated(of_rows.verify, num_tokens)
        by_tokens: dict[int, list[float]] = {}
        for forwards in self._by_rows.values():
            for s, seconds in forwards.verify.items():
                by_tokens.setdefault(s * forwards.num_rows, []).append(seconds)
        means = {n: sum(times) / len(times) for n, times in by_tokens.items()}
        return _interpolated(means, num_rows * num_tokens)

    def draft_step(self, num_rows: int) -> float:
        """Seconds for one more proposed token of each row."""
        return self._near(num_rows).draft_step * self._grown(num_rows)

    def drafting(self, num_rows: int, k: int) -> float:
        """Seconds to propose ``k`` tokens of each row."""
        near = self._near(num_rows)
        seconds = near.draft_once + k * near.draft_step
        return seconds * self._grown(num_rows) if k else 0.0

    def at_once(self, num_rows: int) -> bool:
        """Whether drafting takes mostly the same time for any number of tokens."""
        near = self._near(num_rows)
        return near.draft_once > near.draft_step

    def _near(self, num_rows: int) -> Forwards:
        near = self._nearest.get(num_rows)
        if near is None:
            near = self._nearest[num_rows] = _nearest(self._by_rows.values(), num_rows)
        return near

    def _grown(self, num_rows: int) -> float:
        """The time of a forward, relative to the nearest measured batch size."""
        near = self._near(num_rows).num_rows
        if near == num_rows:
            return 1.0
        return self.verify(num_rows, 1) / self.verify(near, 1)

    def round(self, num_rows: int, k: int) -> float:
        """Seconds of a round: drafting k tokens, and a verify forward of k + 1."""
        key = num_rows, k, self.context // BAND
        seconds = self._rounds.get(key)
        if seconds is None:
            plain = self.verify(num_rows, 1)
            grown = 1 + self._reading(num_rows, 1) / max(plain, 1e-9)
            seconds = grown * self.drafting(num_rows, k) + self.verify(num_rows, k + 1)
            seconds += self._reading(num_rows, k + 1)
            self._rounds[key] = seconds = max(1e-7, seconds)
        return seconds

    def _reading(self, num_rows: int, num_tokens: int) -> float:
        """Seconds that the context adds to a forward of the target."""
        known = [f for f in self._by_rows.values() if f.longer and f.context]
        if not known or self.context < BAND:
            return 0.0
        near = _nearest(known, num_rows)
        rows, longer = near.num_rows, near.longer
        each = {s: max(0.0, t - self.verify(rows, s)) for s, t in longer.items()}
        share = num_rows * (self.context // BAND * BAND) / near.context / rows
        # If one width was timed, wider forwards are taken to read as much.
        return share * _interpolated({2: each[1], **each}, num_tokens)

    def catch_up(self, num_rows: int, num_tokens: int) -> float:
        """Seconds for a drafter to take in ``num_tokens`` of each row at once.

        A draft step is assumed to grow with its tokens as the target's forward does.
        """
        if not num_tokens:
            return 0.0
        more = self.verify(num_rows, num_tokens + 1) / self.verify(num_rows, 1) - 1
        return self.drafting(num_rows, 1) * max(0.0, more)


def _nearest(measured: Iterable[Forwards], num_rows: int) -> Forwards:
    return min(measured, key=lambda f: abs(log2(f.num_rows / num_rows)))


def _interpolated(points: Mapping[int, float], x: int) -> float:
    """Linear between the points, and beyond them along the last two."""
    xs = sorted(points)
    if len(xs) == 1 or x in points:
        # A single point: at least as much for more tokens.
        return points[x] if x in points else points[xs[0]] * max(1.0, x / xs[0])
    i = next((i for i, right in enumerate(xs) if right >= x), len(xs) - 1)
    left, right = xs[max(i, 1) - 1], xs[max(i, 1)]
    slope = max(0.0, (points[right] - points[left]) / (right - left))
    value = points[left] + slope * (x - left)
    return max(value, points[xs[0]] * x / xs[0]) if x < xs[0] else value


def _bounded(value: float, n: int, points: Mapping[int, float]) -> float:
    """A cost of ``n`` that fits the known costs: later ones count for more.

    More tokens take no less time, and twice as many at most twice the time.
    """
    for m, cost in points.items():
        low, high = sorted((cost, cost * n / m))
        value = min(max(value, low), high)
    return value


@dataclass
class _Timed:
    """What rounds of one (rows, k) took.

    Args:
        excess: mean logarithm of their time over that of the forwards and the pace.
        shaken: its variance from a correction by plain rounds alone.
        rounds: how many were timed since then.
        seen: the number of the last one.
        confirmed: how many this process timed.
    """

    excess: float = 0.0
    shaken: float = 0.0
    rounds: int = 0
    seen: int = 0
    confirmed: int = 0

    def variance(self, now: int) -> float:
        """Doubt about the mean: shrinks with every round, and grows with time."""
        doubt = (UNSURE**2 + self.shaken) / (1 + self.rounds)
        return min(0.5, doubt + (PACE / 6) ** 2 * (now - self.seen))


class RoundCosts:
    """Times of rounds by (rows, k), in plain rounds of as many rows.

    Only ratios decide which k is best. While k stays, a change of time is the machine's
    pace (other load, a growing context), which all rounds share. When k changes, the
    error is divided among the pace and the two k by their variances. But a busy host
    may slow only rounds that draft: a pace that has changed since a plain round was
    timed makes the costs of all k doubtful, until the next plain round.

    Args:
        forwards: measured forwards, to begin with.
        excess: by (rows, k), what rounds of another process took beyond them.
        new_shape: extra seconds of the first round of a (rows, k).
        join_rounds: plain rounds that a prefill takes, whatever the number of rows; 0
            if that depends on its tokens.
    """

    def __init__(
        self,
        forwards: ForwardCosts,
        excess: Mapping[tuple[int, int], float] | None = None,
        *,
        new_shape: float = 0.0,
        join_rounds: int = 0,
    ):
        self.forwards, self.new_shape = forwards, new_shape
        self.join_rounds = join_rounds
        known = (excess or {}).items()
        # A plain round has no excess: all costs are relative to it.
        self.timed = {key: _Timed(value) for key, value in known if key[1]}
        # By (rows, k), the nearest that was timed.
        self._alike: dict[tuple[int, int], tuple[int, int]] = {}
        self.rounds = 0
        # Batch sizes whose forwards this process has measured.
        self.measured: set[int] = set()
        # The pace, now and when a plain round was last timed; the share of earlier
        # changes that plain rounds did not have.
        self._pace: float | None = None
        self._plain_pace, self._of_drafts = 0.0, 1.0
        self._last: tuple[int, int] | None = None
        self._met: set[tuple[int, int]] = set()
        # By rows and tokens: the plain rounds that taking in so many took, and when,
        # the newest last.
        self._caught: dict[int, dict[int, tuple[float, int]]] = {}
        # Rounds contradict forwards that another process has measured.
        self._wrong = False

    def covers(self, num_rows: int, context: int = 0) -> bool:
        """Whether forwards need no measurement: known ones are near, and not busy."""
        known, busy = self.forwards.measured, self.seem_busy()
        here = self.measured
        good = [f for f in known if f.num_rows in here or not (busy or f.busy)]
        return ForwardCosts(good).covers(num_rows, context)

    def add(self, forwards: Forwards) -> None:
        """Take in forwards that this process has measured."""
        self.forwards.add(forwards)
        self.measured.add(forwards.num_rows)
        self._wrong = False
        self._caught.clear()

    def seem_busy(self) -> bool:
        """Whether rounds are much faster than the forwards measured before them.

        Or whether rounds that draft contradict forwards of another process.
        """
        return self._wrong or (self._pace is not None and self._pace < -GROSS)

    def source(self, num_rows: int, k: int, *, near: int | None = None) -> str | None:
        """Where the cost of a round comes from; ``None``: from rounds timed here.

        Args:
            near: forwards of about so many rows stand for it; ``None``: of as many.
        """
        known = self.timed.get((num_rows, k))
        if known is not None and known.confirmed:
            return None
        if known is not None or not self._measured_here(near or num_rows):
            return "costs of an earlier run"
        return "forwards timed before the first round"

    def _measured_here(self, num_rows: int) -> bool:
        forwards = self.forwards.measured
        here = ForwardCosts(f for f in forwards if f.num_rows in self.measured)
        return here.covers(num_rows)

    def hearsay(self, near: int) -> bool:
        """Whether only another process has timed what drafting costs."""
        timed = any(k and known.confirmed for (_, k), known in self.timed.items())
        return not timed and not self._measured_here(near)

    def age(self, num_rows: int, k: int) -> int:
        """Rounds since one of (num_rows, k) was timed."""
        known = self.timed.get((num_rows, k))
        return self.rounds - (known.seen if known else 0)

    def _at(self, num_rows: int, k: int) -> _Timed:
        """What is known of (num_rows, k): if nothing, that of its neighbour."""
        exact = self.timed.get((num_rows, k))
        if exact is not None:
            return exact

        def distance(key: tuple[int, int]) -> float:
            return abs(log2(key[0] / num_rows)) + abs(log2((key[1] + 1) / (k + 1)))

        near = self._alike.get((num_rows, k))
        if near is None:
            alike = [key for key in self.timed if key[1] and k]
            near = min(alike, key=distance, default=(num_rows, k))
            self._alike[num_rows, k] = near
        known = self.timed.get(near)
        return _Timed(known.excess if known else 0.0, seen=self.rounds)

    def _doubt(self, known: _Timed) -> float:
        """The variance of a cost's logarithm."""
        variance = known.variance(self.rounds)
        if not known.confirmed and any(f.busy for f in self.forwards.measured):
            variance += GROSS**2
        return variance

    def relative(self, num_rows: int, k: int, *, doubt: float = 0.0) -> float:
        """The cost of a round, in plain rounds of as many rows.

        Args:
            doubt: assume it to be cheaper by this many standard deviations.
        """
        if not k and not doubt:
            return 1.0
        known = self._at(num_rows, k)
        variance = self._doubt(known) if doubt else 0.0
        if not k:
            # Compared with rounds that draft, it may be cheaper.
            variance += (self._of_drafts * self._moved) ** 2
            return exp(-doubt * sqrt(variance))
        ratio = self.forwards.round(num_rows, k) / self.forwards.round(num_rows, 0)
        cost = ratio * exp(known.excess)
        if self._wrong and not known.confirmed:
            here = {j: t for (b, j), t in self.timed.items() if b == num_rows and j}
            timed = [j for j, t in here.items() if t.confirmed]
            cost = _bounded(cost, k, {j: self.relative(num_rows, j) for j in timed})
        # Drafting only adds work: if it seems cheaper, that is noise.
        cost = max(1.0, cost)
        return cost * exp(-doubt * sqrt(variance)) if doubt else cost

    def once(self, num_rows: int, k: int, backlog: int) -> float:
        """What k costs once, in plain rounds: catching up, a share of a new shape."""
        if not k:
            return 0.0
        once = self.catch_up(num_rows, backlog) if backlog else 0.0
        if self.new_shape and (num_rows, k) not in self._met:
            # Later requests use the shape too: a fifth of it has to be brought back.
            once += self.new_shape / 5 / self.forwards.round(num_rows, 0)
        return once

    def catch_up(self, num_rows: int, backlog: int) -> float:
        """The cost of taking in ``backlog`` tokens of each row, in plain rounds."""
        caught = self._caught.get(num_rows, {}).items() if self._wrong else ()
        # One that a stall made dear is forgotten.
        seen = {n: cost for n, (cost, at) in caught if self.rounds - at < FORGOTTEN}
        return _bounded(self._calculated(num_rows, backlog), backlog, seen)

    def _calculated(self, num_rows: int, num_tokens: int) -> float:
        """The same by forwards alone."""
        seconds = self.forwards.catch_up(num_rows, num_tokens)
        return seconds / self.forwards.round(num_rows, 0)

    def prefill(self, num_rows: int, num_tokens: int) -> float:
        """The cost of a drafter's forward of joining rows, in plain rounds.

        Where rows join, a block head's is to its rounds as the target's to plain ones.
        """
        drafting = self.forwards.drafting(num_rows, 1)
        if num_tokens and num_rows > 1 and self.forwards.at_once(num_rows):
            drafting *= max(1, self.join_rounds)
        seconds = drafting + self.forwards.catch_up(num_rows, num_tokens)
        return seconds / self.forwards.round(num_rows, 0)

    def plain_seconds(self, num_rows: int) -> float | None:
        """Seconds of a plain round at the current pace; ``None`` before any round."""
        if self._pace is None:
            return None
        return exp(self._pace) * self.forwards.round(num_rows, 0)

    def paced_by(self, num_rows: int) -> bool:
        """Whether the last round that was timed was a plain one of as many rows.

        Then another changes the cost of no k.
        """
        return self._last == (num_rows, 0)

    @property
    def _moved(self) -> float:
        """How much the pace has changed since a plain round was timed."""
        return 0.0 if self._pace is None else self._pace - self._plain_pace

    def observe(self, timing: RoundTiming, *, once: float) -> bool:
        """Learn from a round.

        Args:
            once: what k cost once, in plain rounds; such a round's time shows little.

        Returns:
            Whether the time was used as that of a usual round. The first round of a
            shape is not used where new shapes take time.
        """
        self.rounds += 1
        num_rows, k = key = timing.num_rows, timing.num_draft_tokens
        new = key not in self._met
        self._met.add(key)
        if timing.seconds is None:
            return False
        if new and k and self.new_shape:
            return False
        tokens = timing.backlog
        plain = self.plain_seconds(num_rows) if k and tokens >= SHOWN else None
        if plain is not None and not timing.joining:
            known = self.timed.get(key)
            usual = self.relative(num_rows, k) if known and known.confirmed else 1.0
            took = max(NOISE, timing.seconds / plain - usual)
            expected = max(NOISE, self._calculated(num_rows, tokens))
            self._note_error(log(took / expected) / 4)
            caught = self._caught.setdefault(num_rows, {})
            # Few are kept: by powers of 2.
            caught.pop(about := 1 << tokens.bit_length() - 1, None)
            caught[about] = took * about / tokens, self.rounds
        if not timing.fair or once > 0.02:
            return False
        self._take(key, log(max(timing.seconds, 1e-7)))
        return True

    def _note_error(self, error: float) -> None:
        """Note by how much, as a logarithm, a round differs from the forwards."""
        self._wrong |= abs(error) > GROSS and not self.measured

    def _take(self, key: tuple[int, int], seconds: float) -> None:
        """Correct the pace, and the costs of this k and of the last one."""
        num_rows, k = key
        if key not in self.timed:
            self._alike.clear()
        mine = self.timed[key] = self._at(num_rows, k)
        error = seconds - log(self.forwards.round(num_rows, k)) - mine.excess
        if self._pace is None:
            self._pace = self._plain_pace = error
        error -= self._pace
        others = self._last is not None and self._last[0] != num_rows
        if others and k and mine.confirmed > MEMORY:
            # Forwards of another number of rows may be wrong by any factor. What is
            # well known of k changes only where that number stays.
            self._pace, self._plain_pace = self._pace + error, self._plain_pace + error
            error = 0.0
        moved = 0.0 if k else self._moved
        # What was measured or stored may be wrong by any factor. Later rounds are not,
        # and a stall says nothing, but no load makes a round quicker.
        trusted = k > 0 and mine.confirmed < (TIMED if error < 0 else 1)
        trusted &= abs(error) > GROSS
        if trusted:
            self._note_error(error)
        if not trusted:
            error = max(min(-GROSS, -moved), min(max(GROSS, -moved), error))
        of_mine = of_last = of_drafts = 0.0
        if k:  # while k stays, most of an error is the pace's
            of_mine = mine.variance(self.rounds) * (1 if key != self._last else 1 / 4)
            of_mine = max(of_mine, error**2) if trusted else of_mine
        if self._last is not None and key != self._last and self._last[1]:
            last = self.timed[self._last]
            of_last = last.variance(self.rounds)
        if abs(moved) > GROSS:
            share = max(0.0, min(1.0, -error / moved))
            of_drafts = moved**2 if abs(error) > GROSS else 0.0
            self._of_drafts = (self._of_drafts + share) / 2
        step = error / (PACE**2 + NOISE**2 + of_mine + of_last + of_drafts)
        mine.excess += step * of_mine
        if trusted:  # what is known of other k is as wrong
            for (_, drafted), each in self.timed.items():
                if drafted and not each.confirmed and each is not mine:
                    each.excess += step * of_mine
        if of_last:
            last.excess -= step * of_last
        self._pace += step * (PACE**2 + of_last + of_drafts)
        if of_drafts:
            for (_, drafted), each in self.timed.items():
                if drafted:
                    each.excess -= step * of_drafts
                    each.rounds, each.shaken = 0, (step * of_drafts) ** 2
        if not k:
            self._plain_pace = self._pace
        mine.rounds, mine.confirmed = mine.rounds + 1, mine.confirmed + 1
        mine.seen, self._last = self.rounds, key


# -- the choice -----------------------------------------------------------


class AutoLength:
    """Chooses the k with the most expected tokens per expected second; k may be 0.

    Sessions in several threads may share it: one lock guards all that it knows.

    Args:
        costs: the costs of rounds.
        acceptance: what is known of the draft.
        ladder: the values of k to choose from, besides the largest.
        max_draft_tokens: the largest k.
        forwards: measures forwards at a batch size, before its first round, and with
            ``context`` tokens in every row.
        measured_rows: the number of rows to measure with; ``None``: as many as the
            batch has.
        save: saves what was learnt, see :meth:`CostStore.save`; called now and then.
    """

    def __init__(
        self,
        costs: RoundCosts,
        acceptance: Acceptance | None = None,
        *,
        ladder: Sequence[int] = LADDER,
        max_draft_tokens: int = LADDER[-1],
        forwards: Callable[..., Forwards] | None = None,
        measured_rows: int | None = None,
        save: Callable[[RoundCosts, Acceptance, bool], None] | None = None,
    ):
        self.costs, self.acceptance = costs, acceptance or Acceptance()
        self.max_draft_tokens = max_draft_tokens
        self._ladder = ladder
        self._forwards, self._measured_rows, self._save = forwards, measured_rows, save
        self._lock = threading.RLock()
        # Plain rounds that tries may lose.
        self._budget = 0.2
        # Whether prompts were paid for a try that was not made yet.
        self._owed = False
        # Of the last choice: the rates by k, and the best k, also before the last round
        # was read. Of the rounds read last: their k, how many in a row had it, and how
        # many of these were timed.
        self._rates_known: dict[int, float] = {}
        self._best = self._best_before = 0
        self._run = (0, LONGEST, TIMED)
        # For `reason`: how many rounds had so many rows and this k.
        self._chosen: Counter[tuple[int, int]] = Counter()

    @property
    def reason(self) -> str | None:
        """The commonest k so far, and what a round that drafts brings and costs.

        ``None`` before the first round.
        """
        with self._lock:
            if not self._chosen:
                return None
            ks, rows = Counter[int](), Counter[int]()
            for (num_rows, k), rounds in self._chosen.items():
                ks[k] += rounds
                rows[num_rows] += rounds
            k = max(ks, key=lambda k: ks[k])
            # Rounds that drafted, if any, and their commonest number of rows.
            drafted = {key: n for key, n in self._chosen.items() if key[1] == k > 0}
            if not drafted:
                drafted = {key: n for key, n in self._chosen.items() if key[1]}
            num_rows, some = max(rows, key=lambda n: rows[n]), 1
            if drafted:
                num_rows, some = max(drafted, key=lambda key: drafted[key])
            tokens = 1 + sum(self.acceptance.survival(some))
            text = (
                f"{counted(k, 'draft token') if k else 'no draft'} in "
                f"{ks[k] / ks.total():.0%} of the rounds; with "
                f"{counted(num_rows, 'row')} a round of {counted(some, 'draft token')} "
                f"brings about {tokens:.2f} tokens a row and "
                f"takes {self.costs.relative(num_rows, some):.2f} times one without"
            )
            near = self._measured_rows
            source = self.costs.source(num_rows, some, near=near)
            return text if source is None else f"{text} by {source}"

    def unmeasured(self, num_rows: int, context: int = 0) -> int:
        """``num_rows``, or 0 if the forwards known are good enough."""
        rows = self._measured_rows or num_rows
        with self._lock:
            known = self._forwards is None or self.costs.covers(rows, context)
            return 0 if known else rows

    def measure(self, num_rows: int, context: int = 0) -> None:
        """Measure forwards of ``num_rows``, and save them."""
        assert self._forwards is not None
        with self._lock:
            context = context if context >= LONG else 0
            self.costs.add(self._forwards(num_rows, context=context))
            self._keep(waits=True)

    def _keep(self, *, waits: bool) -> None:
        if self._save is not None:
            self._save(self.costs, self.acceptance, waits)

    def choose(self, state: BatchState) -> int:
        """k of the next round."""
        with self._lock:
            self.costs.forwards.context = int(state.context)
            ks = self._ks(state)
            # A plain round comes first: costs are relative to it.
            if len(ks) == 1 or self.costs.plain_seconds(state.num_rows) is None:
                return 0
            self._rates_known = rates = self._rates(state, ks)
            k, run, timed = self._newest(state)
            self._best = best = self._best_of(state, rates, 0 if state.backlog else k)
            if k in rates and run < LONGEST and timed < TIMED:
                return k
            return self._try_of(state, rates, best) if k == best else best

    def stands(self, state: BatchState) -> int:
        """For how many rounds after this one :meth:`choose` would go on to say 0.

        Until then doubt and the budget for tries grow, and rows near their end stop
        counting; no other change makes a draft seem better. So the last of these rounds
        decides, with all that its rows may still emit now.
        """
        with self._lock:
            plain = not self._run[0] and not any(state.in_flight)
            if not plain or not self.costs.paced_by(state.num_rows):
                return 0
            ks = self._ks(state)
            # Costs change with the band of a context.
            left = BAND - 1 - int(state.context) % BAND
            stands = (n for n in STANDS if n <= left)
            return next((n for n in stands if not self._drafts_after(n, state, ks)), 0)

    def _drafts_after(self, rounds: int, state: BatchState, ks: Sequence[int]) -> bool:
        left = {row: max(1, n - rounds - 2) for row, n in state.left.items()}
        state, budget = replace(state, left=left), self._budget
        try:
            self._skip(rounds)
            rates = self._rates(state, ks)
            best = self._best_of(state, rates, 0)
            return (best or self._try_of(state, rates, best)) > 0
        finally:
            self._skip(-rounds)
            self._budget = budget

    def _skip(self, rounds: int) -> None:
        """Go on as if so many plain rounds had been read."""
        self.acceptance.unseen += rounds
        self.costs.rounds += rounds
        self._budget = min(MOST_SAVED, self._budget + EXPLORE * (rounds + 2))

    def _ks(self, state: BatchState) -> list[int]:
        """The values of k to choose from; of a block, that is drafted at once, all.

        Else they reach a few positions beyond those tried.
        """
        room = min(self.max_draft_tokens, max(state.room, default=0))
        ks = [k for k in sorted({*self._ladder, room}) if k <= room]
        if self.costs.forwards.at_once(state.num_rows):
            return ks
        top = max(k for k in ks if k <= 2 * self.acceptance.measured + 1)
        most = 1 + FLAT * (self.costs.relative(state.num_rows, top) - 1)
        return [
            k for k in ks if k <= top or self.costs.relative(state.num_rows, k) <= most
        ]

    def _rates(
        self, state: BatchState, ks: Sequence[int], *, doubt: float = 0.0
    ) -> dict[int, float]:
        """Expected tokens in the time of a plain round, by k."""
        tokens = tokens_per_round(self.acceptance.survival(ks[-1], doubt=doubt))
        if len(state.left) > 1:
            of_rows = self._of_last_row(state, ks, tokens)
        else:
            of_rows = [self._of_mean_row(state, k, tokens) for k in ks]
        waiting = not state.left and len(state.room) > 1
        apart = APART * self.costs.join_rounds if waiting else 0.0
        relative = self.costs.relative
        return {
            k: n / (relative(state.num_rows, k, doubt=doubt) + (k > 0) * apart)
            for k, n in zip(ks, of_rows, strict=True)
        }

    def _of_mean_row(self, state: BatchState, k: int, tokens: Sequence[float]) -> float:
        """Tokens of a running row in a round of k, on average."""
        if min(state.room) >= k:
            return tokens[k]
        return sum(tokens[min(k, r)] for r in state.room) / len(state.room)

    def _of_wave(
        self, state: BatchState, ks: Sequence[int], *, doubt: float
    ) -> dict[int, float]:
        """Expected tokens in the time of a plain round of rows that begin together.

        Where rows join together, the next ones wait for the last of these. They join
        apart if that takes less: r rounds, with joins of j, become sqrt(2rj) - j more.
        """
        rates = self._rates(state, ks, doubt=doubt)
        n, join = state.remaining, self.costs.join_rounds
        emission = emissions(self.acceptance.survival(ks[-1], doubt=doubt))
        for k in ks[1:] if join and n and len(state.room) > 1 else ():
            rounds = emission[k].rounds(n)
            last = emission[k].rounds(n, lateness(len(state.room)))
            last = min(last, rounds + max(0.0, sqrt(2 * join * rounds) - join))
            cost = self.costs.relative(state.num_rows, k, doubt=doubt)
            rates[k] = min(rates[k], n / (last * cost))
        return rates

    def _of_last_row(
        self, state: BatchState, ks: Sequence[int], tokens: Sequence[float]
    ) -> list[float]:
        """How many times sooner, in rounds, the last row ends with rounds of each k."""
        plain, rows = max(state.left.values()), self.acceptance.last_rows(state)
        return [
            plain
            / max([n / (1 + min(k, room, f * (tokens[k] - 1))) for n, room, f in rows])
            for k in ks
        ]

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

    def _try_of(self, state: BatchState, rates: dict[int, float], best: int) -> int:
        """A k that may be better than the best: 0, else the cheapest to try.

        With a full budget, any k that was not timed for long, by its price: an estimate
        that forbids a try could never be corrected.
        """
        full = self._budget >= MOST_SAVED
        if full and state.backlog:
            full = self.costs.catch_up(state.num_rows, state.backlog) <= MOST_SAVED
        if not best and self._first_try(state.num_rows):
            return min(k for k in rates if k)
        if self._budget <= 0 and not self._owed:  # most rounds end here
            return best
        reach = max(self._budget, MOST_SAVED / 2)
        rounds = min(LONGEST, TIMED + len(state.in_flight))
        hopes = self._rates(state, list(rates), doubt=DOUBT)
        tried, longest = best, 0.0
        for k, hope in hopes.items():
            # Plain rounds teach nothing new while nothing is drafted.
            if k == best or (not k and state.backlog):
                continue
            loss = max(0.0, 1 - rates[k] / rates[best])
            price = rounds * loss * self.costs.relative(state.num_rows, k)
            price += self.costs.once(state.num_rows, k, state.backlog)
            if full:
                overdue = self.costs.age(state.num_rows, k) / max(price, EXPLORE)
                if overdue > longest:
                    tried, longest = k, overdue
            elif hope > rates[best] * SWITCH**2 and price < reach:
                # If the hope is right, what rows may still emit must repay it.
                gain = state.remaining * (1 / rates[best] - 1 / hope)
                if k and gain < price:
                    continue
                tried, reach = k, price
                if not k:  # comes first: all costs are relative to it
                    break
        return tried

    def _first_try(self, num_rows: int) -> bool:
        """Whether to try a draft because no round of this process shows its costs."""
        hearsay = self.costs.hearsay(self._measured_rows or num_rows)
        return hearsay and self._budget >= FIRST_TRY

    def may_pay(self, state: BatchState) -> bool:
        """Whether half of what rows may emit can bring back what their prompts cost.

        If it could only with better acceptance and costs than known, that is a try.
        Prompts that cost next to nothing are worth it wherever a draft could pay.
        """
        with self._lock:
            self.costs.forwards.context = int(state.context)
            ks = self._ks(state)
            # `choose` weighs what a new shape costs; later rows use it too.
            once = self.costs.prefill(state.num_rows, state.backlog)
            # No more than most of these rows save up: tries follow.
            most = self._budget + EXPLORE * state.remaining * 2 / 3
            affordable = self._budget > 0 and once <= AFFORD * most
            expected = self._rates if state.rests else self._of_wave
            if state.rests:
                if self._owed:  # else prompts are paid for, and never a try
                    return True
                # What follows a round is about half of what drafting a token takes.
                once *= state.rests / 2
                affordable = most >= once
                self._spend(once)
            for doubt in (0.0, 1.0) if affordable else (0.0,):
                rates = expected(state, ks, doubt=doubt)
                for k in ks[1:]:
                    rounds = state.remaining / 2 / max(1.0, rates[k])
                    if rounds * (rates[k] - 1) > once:
                        if doubt and not state.rests:
                            self._spend(min(once, most))
                            self._owed = True
                        return True
            if state.rests:
                return False
            if once <= EXPLORE * state.remaining / 4 and any(
                self.costs.relative(state.num_rows, k) < k + 1 for k in ks[1:]
            ):
                return True
            if self._budget >= MOST_SAVED or self._first_try(state.num_rows):
                self._spend(once)
                return len(ks) > 1
            return False

    def _spend(self, rounds: float) -> None:
        """Charge plain rounds; what is known of costs may be wrong by any factor."""
        self._budget = max(-30.0, self._budget - rounds)

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a round's time and from what its rows accepted."""
        with self._lock:
            num_rows, k = timing.num_rows, timing.num_draft_tokens
            once = self.costs.once(num_rows, k, timing.backlog)
            timed = self.costs.observe(timing, once=once)
            cost = self.costs.relative(num_rows, k)
            self._budget = min(MOST_SAVED, self._budget + EXPLORE * cost)
            self._owed &= k == 0
            if not timing.forced:
                self._chosen[num_rows, k] += 1
                self._pay(timing, once)
                _, run, before = self._run if self._run[0] == k else (k, 0, 0)
                self._run = k, run + 1, before + timed
            self.acceptance.observe(timing)
            rounds = self.costs.rounds
            if rounds >= 64 and rounds.bit_count() == 1:
                self._keep(waits=False)

    def _pay(self, timing: RoundTiming, once: float) -> None:
        """Charge what a round lost by having another k than the best."""
        num_rows, k = timing.num_rows, timing.num_draft_tokens
        best_before, self._best_before = self._best_before, self._best
        if k == self._best:
            return
        rates, plain = self._rates_known, self.costs.plain_seconds(num_rows)
        cost, late = self.costs.relative(num_rows, k), once
        unfair = once > 0.02 or not timing.fair
        # A round that was the best until now shared its time with the next one.
        if k == best_before:
            late = 0.0
        elif timing.seconds is not None and plain is not None and unfair:
            late = timing.seconds / plain - cost
        best = rates.get(self._best, 0.0)
        loss = cost * (1 - rates.get(k, best) / best) if best else 0.0
        # A stall is not the fault of a try.
        lost = min(20.0, max(0.0, loss) + max(0.0, late))
        self._spend(lost)


# -- on disk --------------------------------------------------------------


class CostStore:
    """A JSON file of costs and acceptance by key, read by later processes.

    If it cannot be read or written, nothing is kept.

    Args:
        path: the file; it and its folder are made when something is saved.
            ``None``: ``costs.json`` in the user's cache folder.
    """

    def __init__(self, path: Path | None = None):
        self.path = path or cache_path("costs.json")
        self._entries = CachedEntries(self.path, "costs", version=9, most=64)

    def load(
        self, key: str, *, new_shape: float = 0.0, join_rounds: int = 0
    ) -> tuple[RoundCosts, Acceptance]:
        """What was saved for ``key``; nothing known if there is none.

        Args:
            new_shape, join_rounds: see :class:`RoundCosts`.
        """
        costs = partial(RoundCosts, new_shape=new_shape, join_rounds=join_rounds)
        try:
            entry = self._entries.load()[key]
            forwards = [
                Forwards(
                    _number(f["rows"], 1, 1e6, int),
                    {_number(s, 1, 1e6, int): _number(t, 1e-9) for s, t in f["verify"]},
                    _number(f["draft_step"], 0.0),
                    _number(f["draft_once"], 0.0),
                    bool(f["busy"]),
                    context=_number(f["context"], 0, 1e9, int),
                    longer={
                        _number(s, 1, 1e6, int): _number(t, 1e-9)
                        for s, t in f["longer"]
                    },
                )
                for f in entry["forwards"]
            ]
            times = [t for f in forwards for t in (f.verify, f.longer or f.verify)]
            if not all(1 in t for t in times):
                raise ValueError("a plain step is missing")
            excess = {
                (_number(b, 1, 1e6, int), _number(k, 0, 1e6, int)): _number(x, -50, 50)
                for b, k, x in entry["excess"]
            }
            chances = [_number(chance, 0, 1) for chance in entry["acceptance"]]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return costs(ForwardCosts()), Acceptance()
        return costs(ForwardCosts(forwards), excess), Acceptance(chances)

    def save(
        self, key: str, costs: RoundCosts, acceptance: Acceptance, waits: bool = True
    ) -> None:
        """Add what is known to the file, atomically.

        Args:
            waits: until it is on the disk, which takes as long as several rounds.
                Otherwise a thread writes it, at the latest before the process ends.
        """
        entry: dict[str, Any] = {
            "forwards": [
                {
                    "rows": f.num_rows,
                    "verify": [[s, f.verify[s]] for s in sorted(f.verify)],
                    "draft_step": f.draft_step,
                    "draft_once": f.draft_once,
                    "busy": f.busy or costs.seem_busy(),
                    "context": f.context,
                    "longer": [[s, f.longer[s]] for s in sorted(f.longer)],
                }
                for f in costs.forwards.measured
            ],
            "excess": [[*at, each.excess] for at, each in costs.timed.items() if at[1]],
            "acceptance": acceptance.chances,
        }

        def write() -> None:
            with _writing:
                self._entries.save(key, entry)

        if not waits:
            # While the interpreter ends, and at the system's limit, none can start.
            with suppress(RuntimeError):
                threading.Thread(target=write, name="specdec-costs").start()
                return
        write()


# A file is read and replaced by one thread at a time.
_writing = threading.Lock()


def _number(
    value: Any, least: float, most: float = 1e6, kind: Callable[[Any], Any] = float
) -> Any:
    number = kind(value)
    if not least <= number <= most:  # NaN too
        raise ValueError(f"{value} is out of range")
    return number
