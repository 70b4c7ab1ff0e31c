"""Loads models (MLX folders, hub ids, GGUF files) and runs them."""

from .convert import convert
from .loaded import LoadedModel, context_length
from .loading import adopt, load, load_draft
from .vocabulary import VocabularyMap, map_vocabulary

__all__ = [
    "LoadedModel",
    "VocabularyMap",
    "adopt",
    "context_length",
    "convert",
    "load",
    "load_draft",
    "map_vocabulary",
]
