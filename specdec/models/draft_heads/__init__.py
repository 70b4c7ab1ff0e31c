"""Draft heads: networks that draft from the target's hidden states."""

from .block import BlockHead
from .config import BlockConfig, EagleConfig, HeadConfig, LayerSizes, is_head
from .eagle import EagleHead
from .head import DraftHead
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
