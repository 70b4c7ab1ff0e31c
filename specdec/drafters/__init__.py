"""Where proposals come from."""

from .base import Drafter, DraftRows, Proposals, Round
from .model import DraftModel

__all__ = ["DraftModel", "DraftRows", "Drafter", "Proposals", "Round"]
