"""Where proposals come from."""

from .base import Drafter, Round
from .model import DraftModel

__all__ = ["DraftModel", "Drafter", "Round"]
