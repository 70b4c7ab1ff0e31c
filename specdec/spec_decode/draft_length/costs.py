"""What a round of k costs: from a few timed forwards, corrected by timed rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, log, log2, sqrt

LEAST_SECONDS = 1e-7
# The share of a new shape's cost that the rounds to come must bring back; later
# requests use the shape too.
NEW_SHAPE_SHARE = 0.2
# Variances of natural logarithms: of a cost that no round has confirmed; of a cost's
# change from round to round; of the machine's pace; of a round's time.
PRIOR, DRIFT, PACE, NOISE = 0.2**2, 0.01**2, 0.06**2, 0.08**2
MOST_VARIANCE = 0.7**2
# Larger errors of a round's time are cut: a stall says nothing.
MOST_ERROR = 0.3
# How well costs are known that were corrected without being timed, in timed rounds.
FEW_ROUNDS = 0
# How much of an error a (rows, k) takes if the round before had the same, relative
# to one that had another.
UNCHANGED = 0.25


@dataclass(frozen=True)
class Forwards:
    """Measured seconds at one batch size.

    Args:
        num_rows: the batch size, B.
        verify: by S, the time of a target forward of shape (B, S); S = 1 is included.
        draft_step: the time of one proposed token for each row.
        draft_once: the time that drafting takes beside that, for any number of tokens.
    """

    num_rows: int
    verify: Mapping[int, float]
    draft_step: float
    draft_once: float = 0.0


class ForwardCosts:
    """Seconds of forwards at any batch size, interpolated from measured ones.

    They are linear in the tokens between and beyond the measured numbers. At a batch
    size that was not measured, they are linear in B * S over all measured sizes, and a
    draft step grows with the target's.
    """

    def __init__(self, measured: Iterable[Forwards] = ()):
        self._by_rows: dict[int, Forwards] = {}
        self._rounds: dict[tuple[int, int], float] = {}
        for forwards in measured:
            self.add(forwards)

    def add(self, forwards: Forwards) -> None:
        """Add a measurement; it replaces one of the same batch size."""
        self._by_rows[forwards.num_rows] = forwards
        self._rounds.clear()

    @property
    def measured(self) -> list[Forwards]:
        """The measurements, smallest batch first."""
        return [self._by_rows[b] for b in sorted(self._by_rows)]

    def covers(self, num_rows: int) -> bool:
        """Whether a measured batch size is near enough to ``num_rows``."""
        return any(2 / 3 <= b / num_rows <= 1.5 for b in self._by_rows)

    def verify(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a forward of the target of shape (num_rows, num_tokens)."""
        own = self._by_rows.get(num_rows)
        if own is not None and (len(own.verify) > 1 or num_tokens in own.verify):
            return _interpolated(own.verify, num_tokens)
        by_tokens: dict[int, list[float]] = {}
        for forwards in self._by_rows.values():
            for s, seconds in forwards.verify.items():
                by_tokens.setdefault(s * forwards.num_rows, []).append(seconds)
        means = {n: sum(found) / len(found) for n, found in by_tokens.items()}
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
        near = min(self._by_rows, key=lambda b: abs(log2(b / num_rows)))
        return self._by_rows[near]

    def _grown(self, num_rows: int) -> float:
        """The time of a forward, relative to the nearest measured batch size."""
        near = self._near(num_rows).num_rows
        if near == num_rows:
            return 1.0
        return self.verify(num_rows, 1) / self.verify(near, 1)

    def round(self, num_rows: int, k: int) -> float:
        """Seconds of a round: drafting k tokens, and a verify forward of k + 1."""
        seconds = self._rounds.get((num_rows, k))
        if seconds is None:
            drafting = self.drafting(num_rows, k)
            seconds = max(LEAST_SECONDS, drafting + self.verify(num_rows, k + 1))
            self._rounds[num_rows, k] = seconds
        return seconds

    def catch_up(self, num_rows: int, num_tokens: int) -> float:
        """Seconds for a drafter to take in ``num_tokens`` of each row at once.

        A draft step is assumed to grow with its tokens as the target's forward does.
        """
        if not num_tokens:
            return 0.0
        more = self.verify(num_rows, num_tokens + 1) / self.verify(num_rows, 1) - 1
        return self.draft_step(num_rows) * max(0.0, more)


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


@dataclass
class Correction:
    """What timed rounds say about one (rows, k).

    Args:
        log_factor: logarithm of their time over the time from measured forwards.
        rounds: how many were timed.
        seen: the number of the last one.
        shaken: variance from a correction by plain rounds, of which no round of this
            (rows, k) was timed.
    """

    log_factor: float = 0.0
    rounds: int = 0
    seen: int = 0
    shaken: float = 0.0

    def variance(self, now: int) -> float:
        """Doubt about the factor: shrinks with every round, and grows with time."""
        doubt = (PRIOR + self.shaken) / (1 + self.rounds) + DRIFT * (now - self.seen)
        return min(MOST_VARIANCE, doubt)


@dataclass
class RoundCosts:
    """Costs of rounds in plain rounds, corrected while running.

    Only ratios decide which k is best. A change of time while k stays is the machine's
    pace (other load, a growing context), which all rounds share. An error when k
    changes is divided between the pace and the costs of the two k, by their variances.
    If the pace has changed since a plain round was timed, it may also be that rounds
    that draft have become slower, and plain ones have not: a busy host slows rounds of
    many operations more. So plain rounds are doubted by that change, and the next one
    corrects the costs of all k. How large a share of earlier changes plain rounds did
    not have says how much of a change is doubted.

    Args:
        forwards: measured forwards.
        corrections: by (rows, k); the factor of plain rounds stays 1.
        new_shape: extra seconds of the first round of a (rows, k).
    """

    forwards: ForwardCosts
    corrections: dict[tuple[int, int], Correction] = field(default_factory=dict)
    new_shape: float = 0.0
    rounds: int = 0
    _pace: float | None = None
    # The pace when a plain round was last timed; the share of changes since such
    # rounds that only rounds that draft had.
    _plain_pace: float = 0.0
    _of_drafts: float = 1.0
    _last: tuple[int, int] | None = None
    _met: set[tuple[int, int]] = field(default_factory=set)

    def _correction(self, num_rows: int, k: int) -> Correction:
        """The correction of (num_rows, k), or that of its nearest neighbour."""
        own = self.corrections.get((num_rows, k))
        alike = [key for key in self.corrections if key[1] and k]
        if own is not None or not alike:
            return own or Correction(seen=self.rounds)

        def distance(key: tuple[int, int]) -> float:
            return abs(log2(key[0] / num_rows)) + abs(log2((key[1] + 1) / (k + 1)))

        near = self.corrections[min(alike, key=distance)]
        return Correction(near.log_factor, 0, self.rounds)

    def relative(self, num_rows: int, k: int, *, doubt: float = 0.0) -> float:
        """The cost of a round, in plain rounds of as many rows.

        Args:
            doubt: assume it to be cheaper by this many standard deviations.
        """
        if not k:
            # Compared with rounds that draft, it may be cheaper.
            doubted = self._correction(num_rows, 0).variance(self.rounds)
            doubted += (self._of_drafts * self._moved) ** 2
            return exp(-doubt * sqrt(doubted)) if doubt else 1.0
        known = self._correction(num_rows, k)
        ratio = self.forwards.round(num_rows, k) / self.forwards.round(num_rows, 0)
        # Drafting only adds work: if it seems cheaper, that is noise.
        cost = max(1.0, ratio * exp(known.log_factor))
        return cost * exp(-doubt * sqrt(known.variance(self.rounds)))

    def once(self, num_rows: int, k: int, backlog: int) -> float:
        """What k costs once, in plain rounds: catching up, a share of a new shape."""
        if not k:
            return 0.0
        new = self.new_shape if (num_rows, k) not in self._met else 0.0
        shape = NEW_SHAPE_SHARE * new / self.forwards.round(num_rows, 0)
        return self.catch_up(num_rows, backlog) + shape

    def catch_up(self, num_rows: int, backlog: int) -> float:
        """The cost of taking in ``backlog`` tokens of each row, in plain rounds."""
        seconds = self.forwards.catch_up(num_rows, backlog)
        return seconds / self.forwards.round(num_rows, 0)

    def plain_seconds(self, num_rows: int) -> float | None:
        """Seconds of a plain round at the current pace; ``None`` before any round."""
        if self._pace is None:
            return None
        return exp(self._pace) * self.forwards.round(num_rows, 0)

    @property
    def _moved(self) -> float:
        """How much the pace has changed since a plain round was timed."""
        return 0.0 if self._pace is None else self._pace - self._plain_pace

    def observe(self, num_rows: int, k: int, seconds: float | None) -> bool:
        """Learn from a round.

        Args:
            seconds: ``None`` if they are not fair.

        Returns:
            Whether the round's time was used. The first round of a shape is not used
            where new shapes take time.
        """
        self.rounds += 1
        key = num_rows, k
        new = key not in self._met
        self._met.add(key)
        if seconds is None or (new and k and self.new_shape):
            return False
        own = self.corrections[key] = self._correction(num_rows, k)
        worked_out = log(self.forwards.round(num_rows, k)) + own.log_factor
        found = log(max(seconds, LEAST_SECONDS)) - worked_out
        if self._pace is None:
            self._pace = self._plain_pace = found
        moved = 0.0 if k else self._moved
        least, most = min(-MOST_ERROR, -moved), max(MOST_ERROR, -moved)
        error = max(least, min(most, found - self._pace))
        # Divided by variances. If the costs of the k before are wrong, the pace has
        # been estimated wrongly until now, by the same factor.
        of_own = of_last = 0.0
        if k:
            of_own = own.variance(self.rounds) * (UNCHANGED if key == self._last else 1)
        if self._last is not None and key != self._last and self._last[1]:
            last = self.corrections[self._last]
            of_last = last.variance(self.rounds)
        of_drafts = 0.0
        if abs(moved) > MOST_ERROR:
            share = max(0.0, min(1.0, -error / moved))
            of_drafts = moved**2 if abs(error) > MOST_ERROR else 0.0
            self._of_drafts = (self._of_drafts + share) / 2
        step = error / (PACE + NOISE + of_own + of_last + of_drafts)
        own.log_factor += step * of_own
        if of_last:
            last.log_factor -= step * of_last
        self._pace += step * (PACE + of_last + of_drafts)
        if of_drafts:
            self._correct_drafts(-step * of_drafts)
        if not k:
            self._plain_pace = self._pace
        own.rounds, own.seen = own.rounds + 1, self.rounds
        self._last = key
        return True

    def _correct_drafts(self, change: float) -> None:
        """Correct the costs of all k > 0, which are known less well then."""
        for (_, k), known in self.corrections.items():
            if k:
                known.log_factor += change
                known.rounds, known.shaken = 0, change**2
