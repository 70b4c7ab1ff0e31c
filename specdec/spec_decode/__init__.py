"""Drafters, and what is done with their proposals; see docs/drafters.md."""

from .chain import ChainDrafter
from .commit import Accepted
from .draft_model import DraftModel
from .drafter import Drafter, DraftRows, Proposals, Round
from .factory import (
    DescribedFactory,
    DraftContext,
    DrafterFactory,
    NamedDrafter,
    describe,
    factory_of,
    make_drafter,
)
from .guard import DraftGuard, check_proposals
from .ngram import NgramDrafter, NgramOptions

__all__ = [
    "Accepted",
    "ChainDrafter",
    "DescribedFactory",
    "DraftContext",
    "DraftGuard",
    "DraftModel",
    "DraftRows",
    "Drafter",
    "DrafterFactory",
    "NamedDrafter",
    "NgramDrafter",
    "NgramOptions",
    "Proposals",
    "Round",
    "check_proposals",
    "describe",
    "factory_of",
    "make_drafter",
]
