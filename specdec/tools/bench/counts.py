"""What follows from how many draft tokens each row accepted in each round.

Pure arithmetic, no mlx. A *round* is k and, for every row that took part, how many
tokens were drafted for it and how many of them were accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

Rows = Sequence[Sequence[int]]
TracedRounds = Sequence[tuple[int, Rows]]


@dataclass(frozen=True)
class Position:
    """Acceptance of the j-th draft token of a round.

    Args:
        tried: rows and rounds that drafted j tokens and accepted the j - 1 before.
        accepted: of these, the ones in which it was accepted too.
    """

    tried: int
    accepted: int

    @property
    def conditional(self) -> float:
        """The chance that it is accepted, given that those before it are."""
        return self.accepted / self.tried if self.tried else 0.0


def positions(rows: Iterable[Sequence[int]]) -> list[Position]:
    """Acceptance at position 1, 2, ... from (drafted, accepted) of rows in rounds."""
    counts: list[list[int]] = []
    for drafted, accepted in rows:
        counts += [[0, 0] for _ in range(drafted - len(counts))]
        for j in range(drafted):
            counts[j][0] += accepted >= j
            counts[j][1] += accepted > j
    return [Position(*each) for each in counts]


def unconditional(each: Iterable[Position]) -> list[float]:
    """The chance that a round of many tokens accepts the first 1, 2, ... of them.

    The product of the conditional chances (Kaplan and Meier 1958): where all rounds
    draft alike it is the share of rounds; where some draft fewer, at the end of a
    request for one, it still never rises with the position.
    """
    return list(accumulate((p.conditional for p in each), mul))


def histogram(rows: Iterable[Sequence[int]]) -> list[int]:
    """How often 0, 1, 2, ... draft tokens were accepted."""
    counts: list[int] = []
    for drafted, accepted in rows:
        counts += [0] * (drafted + 1 - len(counts))
        counts[accepted] += 1
    return counts


def chance(rows: Iterable[Sequence[int]]) -> float:
    """The chance that a draft token is accepted, given that those before it are.

    Over all positions: the maximum-likelihood estimate where it is the same at each.
    """
    each = positions(rows)
    tried = sum(p.tried for p in each)
    return sum(p.accepted for p in each) / tried if tried else 0.0


def expected_tokens(acceptance: float, k: int) -> float:
    """Mean tokens of a row in a round of k, the extra token included.

    (1 - a^(k+1)) / (1 - a), where every draft token is accepted with chance a
    (Leviathan et al. 2023, equation 1).
    """
    if acceptance >= 1:
        return k + 1.0
    return float((1 - acceptance ** (k + 1)) / (1 - acceptance))


@dataclass(frozen=True)
class RoundCost:
    """What a round costs, in plain steps of the same batch.

    Args:
        draft_step: one draft step.
        verify: the forward that verifies k tokens.
        k: the k for which ``verify`` was measured.
    """

    draft_step: float
    verify: float
    k: int

    def of(self, k: int) -> float:
        """A round of k; a verify forward grows from 1 linearly with its tokens."""
        return k * self.draft_step + 1 + (self.verify - 1) * k / self.k


@dataclass(frozen=True)
class Policy:
    """Tokens and costs, if the accepted counts were used in one way.

    Args:
        tokens: kept by all rows in all rounds, extra tokens included.
        row_rounds: rows in rounds.
        rounds: rounds.
        draft_steps: over all rounds.
        cost: of all rounds, in plain steps; ``None`` where costs are not known.
    """

    tokens: int
    row_rounds: int
    rounds: int
    draft_steps: int
    cost: float | None

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens of a row in a round."""
        return self.tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def speedup(self) -> float | None:
        """Tokens per time over those of plain decoding with as many rows."""
        if self.cost is None or not self.row_rounds:
            return None
        # A plain step of cost 1 brings every row one token.
        return (self.tokens / self.cost) / (self.row_rounds / self.rounds)


def per_sequence(rounds: TracedRounds, cost: RoundCost | None) -> Policy:
    """What ran: every row keeps what was accepted for it."""
    return _policy([(k, _kept(rows, k), len(rows)) for k, rows in rounds], cost)


def batch_minimum(rounds: TracedRounds, cost: RoundCost | None) -> Policy:
    """Every row is cut to the fewest that any row accepted in the round."""
    cut = [(k, len(r) * (1 + min(a for _, a in r)), len(r)) for k, r in rounds]
    return _policy(cut, cost)


def oracle(rounds: TracedRounds, cost: RoundCost | None) -> Policy:
    """Every round drafts as many tokens, up to its k, as pay best.

    The most tokens per time that any choice of draft lengths gives with the same
    accepted counts: a ratio of sums, maximised by Dinkelbach's method (1967). Where
    costs are not known, each round drafts what the luckiest row accepts.
    """
    if cost is None:
        exact = [(max(a for _, a in r), _kept(r, k), len(r)) for k, r in rounds]
        return _policy(exact, None)
    choices = [
        [(k, _kept(rows, k), len(rows)) for k in range(most + 1)]
        for most, rows in rounds
    ]
    best = [each[-1] for each in choices]
    while True:
        spent = sum(cost.of(k) for k, _, _ in best)
        rate = sum(tokens for _, tokens, _ in best) / spent if spent else 0.0
        better = [max(c, key=lambda x: x[1] - rate * cost.of(x[0])) for c in choices]
        gain = sum(t - rate * cost.of(k) for k, t, _ in better)
        if gain <= 1e-9 * max(1.0, rate * spent):
            return _policy(best, cost)
        best = better


def _kept(rows: Rows, k: int) -> int:
    """Tokens that a round of up to ``k`` brings, extra tokens included."""
    return sum(1 + min(accepted, k) for _, accepted in rows)


def _policy(chosen: Sequence[tuple[int, int, int]], cost: RoundCost | None) -> Policy:
    """From (k, tokens, rows) of every round."""
    return Policy(
        tokens=sum(tokens for _, tokens, _ in chosen),
        row_rounds=sum(rows for _, _, rows in chosen),
        rounds=len(chosen),
        draft_steps=sum(k for k, _, _ in chosen),
        cost=None if cost is None else sum(cost.of(k) for k, _, _ in chosen),
    )
