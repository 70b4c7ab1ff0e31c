"""Batched speculative decoding for MLX: every row keeps the tokens accepted for it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .decoder import SpecDecoder
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
        PromptTooLongError,
        RankError,
        ServerError,
        SessionError,
        SpecdecError,
        UnsupportedModelError,
        VocabularyMismatchError,
    )
    from .grammar import Grammar
    from .outputs import EngineLoad, GenerationResult, RunStats, StreamEvent
    from .parallel import Ranks
    from .request import TokenLogprobs
    from .sampling_params import SamplingParams

    __version__: str

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
    "PromptTooLongError",
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

# Modules of the names in ``__all__``; those that are not here are errors.
_HOMES = {
    "EngineConfig": "config",
    "EngineLoad": "outputs",
    "GenerationResult": "outputs",
    "Grammar": "grammar",
    "Ranks": "parallel",
    "RunStats": "outputs",
    "SamplingParams": "sampling_params",
    "SpecDecoder": "decoder",
    "StreamEvent": "outputs",
    "TokenLogprobs": "request",
}


def __getattr__(name: str) -> Any:
    # Modules are imported when they are used. The decoder loads mlx and transformers,
    # which takes seconds; the command listens for Ctrl-C before it imports anything.
    if name not in __all__:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    if name == "__version__":
        value: Any = _version()
    else:
        home = _HOMES.get(name, "errors")
        if home in ("decoder", "parallel"):
            from .utils.process import prepare_process

            prepare_process()
        from .utils.extras import naming_backend

        with naming_backend():
            value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("mlx-specdec")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
