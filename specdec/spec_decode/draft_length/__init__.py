"""How many tokens a round drafts. No mlx here."""

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
