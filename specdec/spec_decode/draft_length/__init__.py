"""How many tokens a round drafts. No mlx here."""

from .acceptance import Acceptance, tokens_per_round
from .auto import AutoLength
from .base import BatchState, DraftLength, FixedLength, RoundOutcome
from .costs import FEW, TAKEN_IN, ForwardCosts, Forwards, RoundCosts
from .ladder import LADDER
from .peeks import Peek, Peeked, Peeks
from .predict import Advice, Prediction, advise, survival_of

__all__ = [
    "FEW",
    "LADDER",
    "TAKEN_IN",
    "Acceptance",
    "Advice",
    "AutoLength",
    "BatchState",
    "DraftLength",
    "FixedLength",
    "ForwardCosts",
    "Forwards",
    "Peek",
    "Peeked",
    "Peeks",
    "Prediction",
    "RoundCosts",
    "RoundOutcome",
    "advise",
    "survival_of",
    "tokens_per_round",
]
