"""How many tokens a round drafts. No mlx here.

A batch asks before each round, and reports each round that it has read:

    choose(BatchState) -> k              observe(RoundTiming)
            |                                  |
    Acceptance: the chance of a draft  <-------+  tokens accepted; those that a look
    token at each position                     |  (ShadowAcceptance) found right
            |                                  |
    RoundCosts: what a round of k      <-------+  seconds, where StepTimer says that
    costs, in plain rounds                        another such round would take as long
            |
    the k with the most expected tokens in the time of a plain round, if in half of what
    rows may still emit it brings back what it costs once: catching up, a new shape
            |
    or a k that may be better, for some rounds: TryBudget gives 1% of the time for that

What a row owes its neighbours: while requests wait for a place, only the sum of tokens
counts, and a row may be slower than alone. Where none waits, a batch takes as long as
its last row, so that the k counts with which that row ends soonest (RowFactors).
"""

from .acceptance import Acceptance, RowFactors, tokens_per_round
from .base import BatchState, DraftLength, FixedLength, RoundTiming
from .costs import ForwardCosts, Forwards, RoundCosts
from .policy import LADDER, GoodputPolicy, TryBudget
from .predict import Advice, Prediction, advise, survival_of
from .shadow import Peek, ShadowAcceptance
from .timer import StepTimer

__all__ = [
    "LADDER",
    "Acceptance",
    "Advice",
    "BatchState",
    "DraftLength",
    "FixedLength",
    "ForwardCosts",
    "Forwards",
    "GoodputPolicy",
    "Peek",
    "Prediction",
    "RoundCosts",
    "RoundTiming",
    "RowFactors",
    "ShadowAcceptance",
    "StepTimer",
    "TryBudget",
    "advise",
    "survival_of",
    "tokens_per_round",
]
