"""Loading models: MLX folders, hub ids, GGUF files; vocabulary checks."""

from .context import context_length
from .convert import convert
from .loaded import LoadedModel
from .loading import adopt, load, load_draft
from .vocabulary import check_same_vocabulary

__all__ = [
    "LoadedModel",
    "adopt",
    "check_same_vocabulary",
    "context_length",
    "convert",
    "load",
    "load_draft",
]
