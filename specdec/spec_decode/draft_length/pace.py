"""What a kind of round costs, told apart from how fast the machine is just now."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

# Variances of natural logarithms: of a cost that was worked out from forwards, of one
# round's time, of what the pace changes by from round to round.
PRIOR_VARIANCE = 0.2**2
NOISE_VARIANCE = 0.08**2
PACE_VARIANCE = NOISE_VARIANCE / 2
# Standard deviations beyond which an error is cut off: a stall says nothing.
MOST_DEVIATIONS = 2.0

#: Rows and k of a round.
Key = tuple[int, int]


@dataclass
class Correction:
    """What real rounds say of one (rows, k): a factor, as its logarithm."""

    log_factor: float = 0.0
    variance: float = PRIOR_VARIANCE
    seen: int = 0


class Paced:
    """A Kalman filter of the pace, and of corrections of the last two kinds of rounds.

    The logarithm of a round's time, less that of what was worked out for it, is the
    pace (other load, a growing context: a random walk that all rounds share) plus its
    kind's correction (which stays) plus noise. So rounds of one kind follow the pace,
    and what changes with the kind is shared between the two corrections by their
    variances; the longer ago rounds of the other kind were, the less is learnt.
    """

    def __init__(self) -> None:
        # The kind of the last round, and the one before it that was another.
        self._keys: list[Key] = []
        # Of the pace, and of the correction of each of the keys.
        self._mean: list[float] = []
        self._covariance: list[list[float]] = []

    @property
    def pace(self) -> float | None:
        """The pace; ``None`` before the first round."""
        return self._mean[0] if self._mean else None

    def corrections(self) -> list[tuple[Key, Correction]]:
        """Of the last kinds of rounds, as they are known now."""
        return [
            (key, Correction(self._mean[i], self._covariance[i][i]))
            for i, key in enumerate(self._keys, 1)
        ]

    def observe(self, key: Key, known: Correction, log_ratio: float) -> None:
        """Learn from a round.

        Args:
            key: its kind.
            known: what was known of that.
            log_ratio: logarithm of its time over what was worked out for it.
        """
        if not self._keys:
            # Of the first nothing but the pace can be told: what follows is
            # relative to it.
            self._keys = [key]
            self._mean = [log_ratio - known.log_factor, known.log_factor]
            self._covariance = [[NOISE_VARIANCE, 0.0], [0.0, 0.0]]
            return
        if key != self._keys[0]:
            self._turn_to(key, known)
        mean, covariance = self._mean, self._covariance
        covariance[0][0] += PACE_VARIANCE
        # What is seen is the sum of the first two.
        with_seen = [row[0] + row[1] for row in covariance]
        variance = with_seen[0] + with_seen[1] + NOISE_VARIANCE
        most = MOST_DEVIATIONS * sqrt(variance)
        error = max(-most, min(most, log_ratio - mean[0] - mean[1]))
        gain = [c / variance for c in with_seen]
        self._mean = [m + g * error for m, g in zip(mean, gain, strict=True)]
        self._covariance = [
            [c - g * seen for c, seen in zip(row, with_seen, strict=True)]
            for row, g in zip(covariance, gain, strict=True)
        ]

    def _turn_to(self, key: Key, known: Correction) -> None:
        """Make ``key`` the kind of the last round."""
        pace, last = self._covariance[0], self._covariance[1]
        if key in self._keys:
            order = (0, 2, 1)
            self._mean = [self._mean[i] for i in order]
            self._covariance = [[self._covariance[i][j] for j in order] for i in order]
            self._covariance[1][1] = max(self._covariance[1][1], known.variance)
        else:
            self._mean = [self._mean[0], known.log_factor, self._mean[1]]
            self._covariance = [
                [pace[0], 0.0, pace[1]],
                [0.0, known.variance, 0.0],
                [last[0], 0.0, last[1]],
            ]
        self._keys = [key, self._keys[0]]
