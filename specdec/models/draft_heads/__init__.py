"""Draft heads: networks that draft from the target's hidden states."""

from .block import BlockConfig, BlockHead
from .config import HeadConfig, LayerSizes
from .eagle import EagleConfig, EagleHead
from .head import DraftHead
from .kinds import is_head
from .loading import load_head, open_head

__all__ = [
    "BlockConfig",
    "BlockHead",
    "DraftHead",
    "EagleConfig",
    "EagleHead",
    "HeadConfig",
    "LayerSizes",
    "is_head",
    "load_head",
    "open_head",
]
