"""What a round costs by rows and k: measured forwards, corrected by real rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, log, log2, sqrt

from .pace import PRIOR_VARIANCE, Correction, Key, Paced

# Variances of natural logarithms: of what a cost may change by in a round, and at most.
DRIFT_VARIANCE = 0.01**2
MOST_VARIANCE = 0.7**2
LEAST_SECONDS = 1e-7
# Tokens of a row that a drafter is measured with while it takes in a prompt; so few are
# taken in by the way.
TAKEN_IN, FEW = 128, 8
# Of what a new shape costs once, the share that the rounds to come have to bring back:
# it serves later requests too.
NEW_SHAPE_SHARE = 0.2


@dataclass(frozen=True)
class Forwards:
    """Measured seconds at one batch size.

    Args:
        num_rows: the batch size, B.
        verify: by S, a forward of the target of shape (B, S), S = 1 among them.
        draft_step: what one proposed token of each row costs.
        taking_in: what :data:`TAKEN_IN` tokens of each row cost the drafter that it
            has to catch up with; ``None`` where that follows from the others.
    """

    num_rows: int
    verify: Mapping[int, float]
    draft_step: float
    taking_in: float | None = None


class ForwardCosts:
    """Seconds of forwards at any batch size, from those that were measured.

    A verify forward that was not measured is taken from those of its batch size,
    linear in S; at other batch sizes from all of them, linear in the number of
    tokens B * S. A draft step grows with the batch as the target's step does.
    """

    def __init__(self, measured: Iterable[Forwards] = ()):
        self._by_rows: dict[int, Forwards] = {}
        # Worked out once: every choice asks for all of them.
        self._rounds: dict[tuple[int, int], float] = {}
        for forwards in measured:
            self.add(forwards)

    def add(self, forwards: Forwards) -> None:
        """Take a measurement in; it replaces one of the same batch size."""
        self._by_rows[forwards.num_rows] = forwards
        self._rounds.clear()

    @property
    def measured(self) -> list[Forwards]:
        """The measurements, the smallest batch first."""
        return [self._by_rows[b] for b in sorted(self._by_rows)]

    def covers(self, num_rows: int) -> bool:
        """Whether a measurement is near enough to tell costs of ``num_rows``."""
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
        near = self._near(num_rows)
        step = near.draft_step
        if near.num_rows != num_rows:
            step *= self.verify(num_rows, 1) / self.verify(near.num_rows, 1)
        return step

    def _near(self, num_rows: int) -> Forwards:
        """What was measured at the nearest batch size."""
        return self._by_rows[min(self._by_rows, key=lambda b: abs(log2(b / num_rows)))]

    def round(self, num_rows: int, k: int) -> float:
        """Seconds of a round: k draft steps and a verify forward of k + 1 tokens."""
        seconds = self._rounds.get((num_rows, k))
        if seconds is None:
            drafting = k * self.draft_step(num_rows) if k else 0.0
            seconds = max(LEAST_SECONDS, drafting + self.verify(num_rows, k + 1))
            self._rounds[num_rows, k] = seconds
        return seconds

    def catch_up(self, num_rows: int, num_tokens: int) -> float:
        """Seconds for a drafter to take in ``num_tokens`` more of each row at once.

        Where it was not measured: as the target's forward grows with its tokens, so
        does the draft's. Few tokens are taken in with the first ones of a round.
        """
        if not num_tokens:
            return 0.0
        near = self._near(num_rows)
        if near.taking_in is not None and num_tokens > FEW:
            share = num_tokens / TAKEN_IN * num_rows / near.num_rows
            return max(self.draft_step(num_rows), near.taking_in * share)
        plain = self.verify(num_rows, 1)
        more = self.verify(num_rows, num_tokens + 1) / plain - 1
        return self.draft_step(num_rows) * max(0.0, more)


def _interpolated(points: Mapping[int, float], x: int) -> float:
    """Linear between the points, and on from the last two at either end."""
    xs = sorted(points)
    if len(xs) == 1 or x in points:
        # Alone, it says what is there at least.
        return points[x] if x in points else points[xs[0]] * max(1.0, x / xs[0])
    i = next((i for i, right in enumerate(xs) if right >= x), len(xs) - 1)
    left, right = xs[max(i, 1) - 1], xs[max(i, 1)]
    slope = max(0.0, (points[right] - points[left]) / (right - left))
    value = points[left] + slope * (x - left)
    return max(value, points[xs[0]] * x / xs[0]) if x < xs[0] else value


@dataclass
class RoundCosts:
    """Relative costs of rounds, corrected while running.

    Only ratios decide which k is best. The machine's pace (other load, a growing
    context) changes all rounds alike, so it is followed apart (:class:`Paced`), and
    costs relative to each other are learnt where k or the rows change.

    Args:
        forwards: measured forwards, which say what was never run.
        corrections: by (rows, k), as learnt.
        new_shape: seconds that a (rows, k) takes longer when it is met first.
    """

    forwards: ForwardCosts
    corrections: dict[Key, Correction] = field(default_factory=dict)
    new_shape: float = 0.0
    rounds: int = 0
    _paced: Paced = field(default_factory=Paced)
    # Rounds that ran, whose shapes were got ready for then, and those of them that were
    # timed: the first one is not learnt from.
    _met: set[tuple[int, int]] = field(default_factory=set)
    _timed: set[tuple[int, int]] = field(default_factory=set)
    # relative() since the last round: asked several times for every choice.
    _known: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _catch_up_factor: float = 1.0

    def add(self, forwards: Forwards) -> None:
        """Take measured forwards in."""
        self.forwards.add(forwards)
        self._known.clear()

    def _log_cost(self, num_rows: int, k: int) -> float:
        factor = self.correction(num_rows, k).log_factor
        return log(self.forwards.round(num_rows, k)) + factor

    def correction(self, num_rows: int, k: int) -> Correction:
        """What is known of (num_rows, k), by itself or from its nearest neighbour."""
        own = self.corrections.get((num_rows, k))
        if own is not None:
            return self._aged(own)
        # A plain round says little of those that draft, and they of it.
        alike = [key for key in self.corrections if (key[1] > 0) == (k > 0)]
        if not alike:
            return self._aged(Correction())

        def distance(key: tuple[int, int]) -> float:
            return abs(log2(key[0] / num_rows)) + abs(log2((key[1] + 1) / (k + 1)))

        near = min(alike, key=distance)
        found = self._aged(self.corrections[near])
        found.variance += PRIOR_VARIANCE * min(1.0, distance(near))
        return found

    def _aged(self, known: Correction) -> Correction:
        """``known`` with the doubt that time brings."""
        variance = known.variance + DRIFT_VARIANCE * (self.rounds - known.seen)
        return Correction(known.log_factor, min(variance, MOST_VARIANCE), self.rounds)

    def relative(self, num_rows: int, k: int) -> tuple[float, float]:
        """A round's cost in plain rounds of as many rows; its standard deviation.

        The deviation is that of the logarithm.
        """
        known = self._known.get((num_rows, k))
        if known is None:
            cost = exp(self._log_cost(num_rows, k) - self._log_cost(num_rows, 0))
            # Drafting only adds work: what seems cheaper is noise.
            known = max(1.0, cost), sqrt(self.correction(num_rows, k).variance)
            self._known[num_rows, k] = known
        return known

    def least(self, num_rows: int, k: int, doubt: float) -> float:
        """Plain rounds that one costs if it is so many deviations cheaper."""
        cost, deviation = self.relative(num_rows, k)
        return cost * exp(-doubt * deviation)

    def plain_seconds(self, num_rows: int) -> float | None:
        """A plain round's time at the pace of the last rounds; ``None`` before any."""
        pace = self._paced.pace
        return None if pace is None else exp(pace + self._log_cost(num_rows, 0))

    def extra(self, num_rows: int, k: int, undrafted: int) -> float:
        """What a round of k costs once: catching up, a new shape; in plain rounds."""
        if not k:
            return 0.0
        plain = self.forwards.round(num_rows, 0)
        caught = self._catch_up(num_rows, undrafted)
        met = (num_rows, k) in self._met
        new = 0.0 if met else NEW_SHAPE_SHARE * self.new_shape
        return (caught + new) / plain

    def meet(self, num_rows: int, k: int) -> None:
        """A round of k ran, whether it was timed or not."""
        self._met.add((num_rows, k))

    def pass_by(self, rounds: int) -> None:
        """So many rounds ran that are not learnt from."""
        self.rounds += rounds
        self._known.clear()

    def _catch_up(self, num_rows: int, undrafted: int) -> float:
        if self.new_shape:
            # Chunks have one of two widths, see Missed.padded.
            chunks, rest = divmod(undrafted, TAKEN_IN)
            wide = rest > 2 * FEW
            undrafted = (chunks + wide) * TAKEN_IN + (0 if wide else rest)
        return self.forwards.catch_up(num_rows, undrafted) * self._catch_up_factor

    def observe(
        self, num_rows: int, k: int, seconds: float, *, undrafted: int = 0
    ) -> bool:
        """Learn from a round's time.

        Returns:
            Whether it tells of rounds of the same shapes: the first one does not.
        """
        self.rounds += 1
        self._known.clear()
        key = (num_rows, k)
        is_new = key not in self._timed
        self._timed.add(key)
        self.meet(num_rows, k)
        if is_new and k and self.new_shape:
            return False
        own = self.correction(num_rows, k)
        if k:
            plain = self.forwards.round(num_rows, 0)
            if self._catch_up(num_rows, undrafted) > 0.02 * plain:
                self._observe_catch_up(num_rows, k, undrafted, seconds)
                return True
        worked_out = log(self.forwards.round(num_rows, k))
        self._paced.observe(key, own, log(max(seconds, LEAST_SECONDS)) - worked_out)
        for found, correction in self._paced.corrections():
            # Doubt about the other one goes on growing.
            before = None if found == key else self.corrections.get(found)
            correction.seen = self.rounds if before is None else before.seen
            self.corrections[found] = correction
        return True

    def _observe_catch_up(
        self, num_rows: int, k: int, undrafted: int, seconds: float
    ) -> None:
        if self._paced.pace is None:
            return
        expected = exp(self._log_cost(num_rows, k))
        caught = seconds / exp(self._paced.pace) - expected
        worked_out = self.forwards.catch_up(num_rows, undrafted)
        # Only where it is much of the round does the round tell.
        if worked_out > expected:
            found = max(0.1, min(10.0, caught / worked_out))
            self._catch_up_factor = sqrt(self._catch_up_factor * found)
