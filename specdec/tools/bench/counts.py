"""Statistics of the draft tokens that each row accepted in each round.

Pure arithmetic, no mlx. A *round* is k and, for every row that took part, the numbers
of its drafted and of its accepted tokens.
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
        tried: row-rounds that drafted j tokens or more and accepted the first j - 1.
        accepted: the row-rounds among these that accepted the j-th token, too.
    """

    tried: int
    accepted: int

    @property
    def conditional(self) -> float:
        """The chance that the token is accepted, given that all before it are."""
        return self.accepted / self.tried if self.tried else 0.0


def positions(rows: Iterable[Sequence[int]]) -> list[Position]:
    """Acceptance at positions 1, 2, ... from (drafted, accepted) of each row-round."""
    counts: list[list[int]] = []
    for drafted, accepted in rows:
        counts += [[0, 0] for _ in range(drafted - len(counts))]
        for j in range(drafted):
            counts[j][0] += accepted >= j
            counts[j][1] += accepted > j
    return [Position(*each) for each in counts]


def unconditional(each: Iterable[Position]) -> list[float]:
    """The chances that a long enough draft has its first 1, 2, ... tokens accepted.

    Each is a product of conditional chances (Kaplan and Meier 1958). If all rounds
    draft equally many tokens, it is the share of rounds. If some draft fewer, as at the
    end of a request, it still never rises with the position.
    """
    return list(accumulate((p.conditional for p in each), mul))


def histogram(rows: Iterable[Sequence[int]]) -> list[int]:
    """The numbers of row-rounds that accepted 0, 1, 2, ... draft tokens."""
    counts: list[int] = []
    for drafted, accepted in rows:
        counts += [0] * (drafted + 1 - len(counts))
        counts[accepted] += 1
    return counts


def chance(rows: Iterable[Sequence[int]]) -> float:
    """The chance that a draft token is accepted, given that all before it are.

    This is the maximum-likelihood estimate if the chance is the same at each position.
    """
    each = positions(rows)
    tried = sum(p.tried for p in each)
    return sum(p.accepted for p in each) / tried if tried else 0.0


def expected_tokens(acceptance: float, k: int) -> float:
    """Mean tokens of a row in a round of k, including the extra token.

    (1 - a^(k+1)) / (1 - a), if every draft token is accepted with chance a
    (Leviathan et al. 2023, equation 1).
    """
    if acceptance >= 1:
        return k + 1.0
    return float((1 - acceptance ** (k + 1)) / (1 - acceptance))


@dataclass(frozen=True)
class RoundCost:
    """The cost of a round, in plain steps of the same batch.

    Args:
        draft_step: the cost of one draft step.
        verify: the cost of the forward that verifies k tokens.
        k: the k for which ``verify`` was measured.
    """

    draft_step: float
    verify: float
    k: int

    def of(self, k: int) -> float:
        """The cost of a round of k; the verify forward's grows linearly from 1."""
        return k * self.draft_step + 1 + (self.verify - 1) * k / self.k


@dataclass(frozen=True)
class Policy:
    """Tokens and costs under one policy, given the accepted counts.

    Args:
        tokens: tokens kept by all rows in all rounds, including extra tokens.
        row_rounds: number of rows, summed over rounds.
        rounds: number of rounds.
        draft_steps: draft steps of all rounds.
        cost: cost of all rounds, in plain steps; ``None`` if costs are not known.
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
        """Token rate divided by the rate of plain decoding with as many rows."""
        if self.cost is None or not self.row_rounds:
            return None
        # A plain step of cost 1 brings every row one token.
        return (self.tokens / self.cost) / (self.row_rounds / self.rounds)


def per_sequence(rounds: TracedRounds, cost: RoundCost | None) -> Policy:
    """The policy that ran: every row keeps its own accepted tokens."""
    return _policy([(k, _kept(rows, k), len(rows)) for k, rows in rounds], cost)


def batch_minimum(rounds: TracedRounds, cost: RoundCost | None) -> Policy:
    """Every row keeps only as many tokens as the worst row accepted in the round."""
    cut = [(k, len(r) * (1 + min(a for _, a in r)), len(r)) for k, r in rounds]
    return _policy(cut, cost)


def oracle(rounds: TracedRounds, cost: RoundCost | None) -> Policy:
    """Every round drafts the number of tokens, up to its k, that pays best.

    This is the highest token rate that any choice of draft lengths gives with the same
    accepted counts. It is a ratio of sums, maximised by Dinkelbach's method (1967). If
    costs are not known, each round drafts as many tokens as its best row accepts.
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
    """Tokens of all rows if the round drafts ``k``, including extra tokens."""
    return sum(1 + min(accepted, k) for _, accepted in rows)


def _policy(chosen: Sequence[tuple[int, int, int]], cost: RoundCost | None) -> Policy:
    """The policy that has (k, tokens, rows) in each round."""
    return Policy(
        tokens=sum(tokens for _, tokens, _ in chosen),
        row_rounds=sum(rows for _, _, rows in chosen),
        rounds=len(chosen),
        draft_steps=sum(k for k, _, _ in chosen),
        cost=None if cost is None else sum(cost.of(k) for k, _, _ in chosen),
    )
