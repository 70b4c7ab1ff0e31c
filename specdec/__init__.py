"""Batched speculative decoding for MLX: every row keeps the tokens accepted for it."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from .config import EngineConfig
from .errors import (
    CacheError,
    CompilerMissingError,
    ConfigError,
    DrafterError,
    MemoryLimitError,
    ModelError,
    ModelNameError,
    ModelNotFoundError,
    PromptError,
    PromptFileError,
    RankError,
    ServerError,
    SessionError,
    SpecdecError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from .grammar import Grammar
from .outputs import EngineLoad, GenerationResult, RunStats, StreamEvent
from .request import TokenLogprobs
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .decoder import SpecDecoder
    from .parallel import Ranks

try:
    __version__ = metadata.version("mlx-specdec")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "CacheError",
    "CompilerMissingError",
    "ConfigError",
    "DrafterError",
    "EngineConfig",
    "EngineLoad",
    "GenerationResult",
    "Grammar",
    "MemoryLimitError",
    "ModelError",
    "ModelNameError",
    "ModelNotFoundError",
    "PromptError",
    "PromptFileError",
    "RankError",
    "Ranks",
    "RunStats",
    "SamplingParams",
    "ServerError",
    "SessionError",
    "SpecDecoder",
    "SpecdecError",
    "StreamEvent",
    "TokenLogprobs",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Importing the decoder loads mlx and transformers, which takes seconds.
    if name == "SpecDecoder":
        from .decoder import SpecDecoder

        return SpecDecoder
    if name == "Ranks":
        from .parallel import Ranks

        return Ranks
    raise AttributeError(f"module 'specdec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
