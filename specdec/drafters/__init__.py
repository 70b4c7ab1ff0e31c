"""Where proposals come from."""

from .base import Drafter, DraftRows, Round
from .model import DraftModel

__all__ = ["DraftModel", "DraftRows", "Drafter", "Round"]
