"""Where proposals come from."""

from .base import Drafter, DraftRows, Proposals, Round
from .model import DraftModel
from .ngram import NgramDrafter, NgramOptions

__all__ = [
    "DraftModel",
    "DraftRows",
    "Drafter",
    "NgramDrafter",
    "NgramOptions",
    "Proposals",
    "Round",
]
