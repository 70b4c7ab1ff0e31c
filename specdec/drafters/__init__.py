"""Where proposals come from; docs/drafters.md tells how to add one."""

from .base import Drafter, DraftRows, Proposals, Round
from .chain import ChainDrafter
from .factory import DraftContext, DrafterFactory, NamedDrafter
from .model import DraftModel
from .ngram import NgramDrafter, NgramOptions

__all__ = [
    "ChainDrafter",
    "DraftContext",
    "DraftModel",
    "DraftRows",
    "Drafter",
    "DrafterFactory",
    "NamedDrafter",
    "NgramDrafter",
    "NgramOptions",
    "Proposals",
    "Round",
]
