"""Chooses k, the number of tokens that a round drafts. No mlx here.

A batch asks before each round, and reports each round that it has read:

    choose(BatchState) -> k              observe(RoundTiming)
            |                                  |
    Acceptance: the chance of a draft  <-------+  how many tokens rows accepted, or
        would
    token at each position                     |  have accepted (ShadowAcceptance)
            |                                  |
    RoundCosts: the time of a round    <-------+  seconds, if StepTimer finds that
        another
    of k, in plain rounds                         such round would take as long
            |
    GoodputPolicy: the k with the most expected tokens per time. What k costs once
    (catching up, a new shape) must be brought back by half of what rows may still emit.
            |
    TryBudget: or a k that may be better, for a few rounds, at 1% of the time

What a row owes its neighbours: while requests wait for a row, only the sum of tokens
counts, and a row may be slower than alone. When none waits, a batch takes as long as
its last row, so the k is chosen with which that row ends soonest (RowFactors).
"""

from .acceptance import Acceptance, RowFactors, tokens_per_round
from .base import BatchState, DraftLength, FixedLength, RoundTiming
from .costs import ForwardCosts, Forwards, RoundCosts
from .policy import LADDER, GoodputPolicy, TryBudget
from .shadow import Peek, ShadowAcceptance
from .timer import StepTimer

__all__ = [
    "LADDER",
    "Acceptance",
    "BatchState",
    "DraftLength",
    "FixedLength",
    "ForwardCosts",
    "Forwards",
    "GoodputPolicy",
    "Peek",
    "RoundCosts",
    "RoundTiming",
    "RowFactors",
    "ShadowAcceptance",
    "StepTimer",
    "TryBudget",
    "tokens_per_round",
]
