"""Predicts what drafting would bring, by k and batch size (`specdec advise`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from ..outputs import GenerationResult, RunStats
from ..spec_decode.draft_length import ForwardCosts, tokens_per_round
from ..utils.printable import counted

# Below this predicted speed-up, the draft's prefill and noise use up the gain.
WORTH_IT = 1.03
# How often the prompts are resampled, to see how the verdict depends on them.
_DRAWS = 200
_FEW_PROMPTS, _FEW_ROUNDS = 5, 50
# Share of the draws that must agree with a verdict for it to be called sure.
_SURE = 0.9
_MORE = "give more prompts"


@dataclass(frozen=True)
class Prediction:
    """The prediction for one batch size.

    Args:
        num_rows: the batch size.
        plain_seconds: the time of a plain step.
        draft_step: the cost of one proposed token for each row, in plain steps.
        draft_once: the cost of drafting in a round that does not depend on the number
            of proposed tokens, in plain steps.
        verify: the cost of a verify forward by k, in plain steps.
        speedup: the speed-up over plain decoding by k; 1 for k = 0.
    """

    num_rows: int
    plain_seconds: float
    draft_step: float
    draft_once: float
    verify: tuple[float, ...]
    speedup: tuple[float, ...]

    @property
    def best(self) -> int:
        """The best k."""
        return max(range(len(self.speedup)), key=lambda k: self.speedup[k])

    @property
    def one_token(self) -> float:
        """The cost of drafting one token for each row, in plain steps."""
        return self.draft_once + self.draft_step


@dataclass(frozen=True)
class Advice:
    """Predictions for several batch sizes, and a verdict.

    Args:
        survival: the share of rounds that accepted at least 1, 2, ... tokens. Beyond
            the measured positions it is extrapolated.
        measured: how many positions were measured.
        predictions: one for each batch size.
    """

    survival: tuple[float, ...]
    measured: int
    predictions: tuple[Prediction, ...]

    @property
    def worth_it(self) -> bool:
        """Whether drafting pays at any of the batch sizes."""
        return any(p.speedup[p.best] >= WORTH_IT for p in self.predictions)

    @property
    def verdict(self) -> str:
        """The best setting, or why no setting pays, in one line."""
        best = max(self.predictions, key=lambda p: p.speedup[p.best])
        k, gain = best.best, best.speedup[best.best]
        if self.worth_it:
            where = ", ".join(
                str(p.num_rows)
                for p in self.predictions
                if p.speedup[p.best] >= WORTH_IT
            )
            return (
                f"--num-draft-tokens {k} at --batch {best.num_rows}: {gain:.2f} times "
                f"plain decoding; drafting pays at batch {where} (auto finds k itself)"
            )
        return f"this pair does not pay here: use --draft none ({self._reason(best)})"

    def _reason(self, at: Prediction) -> str:
        """Why drafting does not pay: a cost that is too high, or low acceptance."""
        drafting, seconds = at.one_token, at.one_token + at.verify[1]
        if 2 / seconds < WORTH_IT:
            what = "a draft step and verifying a second token"
            if at.verify[1] - 1 > drafting:
                what = "verifying a second token"
            elif drafting > 2 * (at.verify[1] - 1):
                what = "a draft step"
            return (
                f"{what} costs too much at batch {at.num_rows}: a round of one draft "
                f"token takes {seconds:.2f} plain steps and brings 2 tokens at best"
            )
        needed = seconds * WORTH_IT - 1
        return (
            f"too little is accepted at batch {at.num_rows}: the first draft token "
            f"{self.survival[0]:.2f} of the time, {needed:.2f} would be needed"
        )


@dataclass(frozen=True)
class Division:
    """Rounds on one device, and with the target divided between several.

    Args:
        devices: how many.
        batches: numbers of rows and of draft tokens.
        alone, divided: seconds of a round on one device and on all.
        problem: in one line, why there are no times.
    """

    devices: int
    batches: tuple[tuple[int, int], ...]
    alone: tuple[float, ...] = ()
    divided: tuple[float, ...] = ()
    problem: str = ""

    @property
    def speedup(self) -> tuple[float, ...]:
        """How many times as fast all devices are, by batch."""
        return tuple(a / d for a, d in zip(self.alone, self.divided, strict=True))

    @property
    def verdict(self) -> str:
        """Where dividing the target pays, in one line."""
        if self.problem:
            return f"not timed: {self.problem}"
        gains = zip(self.batches, self.speedup, strict=True)
        faster = [str(rows) for (rows, _), gain in gains if gain >= WORTH_IT]
        if not faster:
            return (
                f"no faster than one: for more requests use --replicas {self.devices}"
            )
        return (
            f"--tensor-parallel {self.devices} is up to {max(self.speedup):.2f} times "
            f"as fast, at batch {', '.join(faster)}; for more requests at once use "
            f"--replicas {self.devices}"
        )


def survival_of(
    num_draft_tokens_per_pos: Sequence[int],
    num_accepted_tokens_per_pos: Sequence[int],
    *,
    rounds: int,
    rows: int,
) -> list[float]:
    """Share of rounds that accepted at least 1, 2, ... tokens.

    Args:
        num_draft_tokens_per_pos, num_accepted_tokens_per_pos: for each position, the
            rounds that drafted a token there, and the rounds that accepted it.
        rounds: all rounds. A round in which the drafter had nothing to propose cost
            as much and accepted nothing.
        rows: each may have had one round without a draft, for its last token.
    """
    if not num_draft_tokens_per_pos:
        return []
    without = max(0, rounds - num_draft_tokens_per_pos[0] - rows)
    accepted = [*num_accepted_tokens_per_pos, *([0] * len(num_draft_tokens_per_pos))]
    shares = [
        a / (d + without)
        for a, d in zip(accepted, num_draft_tokens_per_pos, strict=False)
    ]
    # Rounds that a row's end cuts short count at fewer positions. A share that rises
    # with the position is noise from them.
    return list(accumulate(shares, min))


def extrapolated(survival: Sequence[float], k: int) -> tuple[float, ...]:
    """``survival`` up to position ``k``, continued by its last conditional chance."""
    chances = list(survival[:k])
    if not chances:
        return (0.0,) * k
    before = chances[-2] if len(chances) > 1 else 1.0
    chance = chances[-1] / before if before else 0.0
    while len(chances) < k:
        chances.append(chances[-1] * chance)
    return tuple(chances)


def advise(
    survival: Sequence[float],
    costs: ForwardCosts,
    batch_sizes: Sequence[int],
    max_draft_tokens: int,
) -> Advice:
    """Predict speed-ups: (1 + s_1 + ... + s_k) / (c_0 + k c + v_k).

    This is theorem 3.8 of Leviathan et al. 2023, with measured survival in place of
    independent acceptance and with a verify forward that is not free. c_0 is the fixed
    cost of a head that proposes a block.

    Args:
        max_draft_tokens: the largest k: the most tokens that the drafter can propose.
    """
    full = extrapolated(survival, max_draft_tokens)
    tokens = tokens_per_round(full)
    predictions = []
    for num_rows in batch_sizes:
        plain = costs.verify(num_rows, 1)
        step = costs.draft_step(num_rows) / plain
        once = costs.drafting(num_rows, 1) / plain - step
        verify = tuple(
            costs.verify(num_rows, k + 1) / plain for k in range(max_draft_tokens + 1)
        )
        speedup = tuple(
            tokens[k] * plain / costs.round(num_rows, k)
            for k in range(max_draft_tokens + 1)
        )
        predictions.append(Prediction(num_rows, plain, step, once, verify, speedup))
    return Advice(full, min(len(survival), max_draft_tokens), tuple(predictions))


@dataclass(frozen=True)
class Sureness:
    """How much the verdict depends on the prompts, found by drawing them again.

    Args:
        speedup_range: 5th and 95th percentile of the speed-ups at the best setting that
            drafts.
        same_verdict: share of the draws that give the same verdict.
        num_prompts: number of prompts in each draw.
        num_rounds: number of rounds that were measured.
        disturbed: what makes the times doubtful; empty: nothing.
    """

    speedup_range: tuple[float, float]
    same_verdict: float
    num_prompts: int
    num_rounds: int
    disturbed: str = ""

    @property
    def sure(self) -> bool:
        """Whether other prompts and other times would hardly change the verdict."""
        low, high = self.speedup_range
        # With both a gain and a loss among the likely ratios, neither is known.
        one_side = low > 1 or high < 1
        doubtful = self._too_few or self.disturbed
        return not doubtful and one_side and self.same_verdict >= _SURE

    @property
    def _too_few(self) -> str:
        """What is missing to say how sure the verdict is; empty if nothing is."""
        if self.num_prompts < _FEW_PROMPTS:
            return f"give {_FEW_PROMPTS} prompts or more"
        if self.num_rounds < _FEW_ROUNDS:
            return (
                f"{counted(self.num_rounds, 'round')} of {_FEW_ROUNDS}: raise "
                "--num-prompts or --max-tokens"
            )
        return ""

    @property
    def words(self) -> str:
        """The same in one line."""
        if self._too_few:
            return f"too few to say how sure that is: {self._too_few}"
        low, high = self.speedup_range
        share = f"{self.same_verdict:.0%}"
        how = "sure" if self.sure else f"unsure: {self.disturbed or _MORE}"
        return (
            f"the best draft length gives {low:.2f} to {high:.2f} times plain decoding "
            f"in nine of ten sets of such prompts; {share} of the sets come to this "
            f"verdict ({how})"
        )


def advice_of(
    results: Sequence[GenerationResult],
    costs: ForwardCosts,
    sizes: Sequence[int],
    most: int,
    *,
    busy: bool = False,
) -> tuple[Advice, Sureness]:
    """The advice for k up to ``most``, and how much other prompts would change it.

    Args:
        busy: other programs used the machine meanwhile.
    """

    def advice_from(rows: Sequence[GenerationResult]) -> Advice:
        totals = RunStats()
        for row in rows:
            totals.take_ended(row)
        survival = survival_of(
            totals.num_draft_tokens_per_pos,
            totals.num_accepted_tokens_per_pos,
            rounds=totals.row_rounds,
            rows=len(rows),
        )
        return advise(survival, costs, sizes, most)

    advice = advice_from(results)
    # The best setting that drafts, even if none is worth it.
    _, n, k = max(
        (speedup, n, k)
        for n, p in enumerate(advice.predictions)
        for k, speedup in enumerate(p.speedup)
        if k
    )
    draw = Random(0)
    drawn = [advice_from(draw.choices(results, k=len(results))) for _ in range(_DRAWS)]
    speedups = sorted(each.predictions[n].speedup[k] for each in drawn)
    low, high = speedups[_DRAWS // 20], speedups[-1 - _DRAWS // 20]
    same = sum(each.worth_it == advice.worth_it for each in drawn) / _DRAWS
    rounds = sum(result.rounds for result in results)
    disturbed = "the machine is busy" if busy else _disturbance(costs)
    return advice, Sureness((low, high), same, len(results), rounds, disturbed)


def _disturbance(costs: ForwardCosts) -> str:
    """What measured forwards show of other load; empty: nothing."""
    if any(forwards.busy for forwards in costs.measured):
        return "the machine is busy"
    if any(forwards.fall > WORTH_IT for forwards in costs.measured):
        return "a forward of more tokens took less time than one of fewer"
    return ""
