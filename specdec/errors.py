"""Every error that specdec raises on purpose, in one tree.

    SpecdecError
    ├── ConfigError            an option has a value that cannot work (also a ValueError)
    ├── PromptError            a prompt, or a prompt file, cannot be used (also a ValueError)
    │   ├── PromptTooLongError     the prompt is longer than the context
    │   └── PromptFileError        a file of prompts or text does not exist, or has the
    │                              wrong form (also a ConfigError)
    ├── ModelError
    │   ├── ModelNotFoundError     no model under that name
    │   │   └── ModelNameError         no model can have that name (also a ConfigError)
    │   ├── UnsupportedModelError  a model, or a part of it, that is not supported (named)
    │   └── VocabularyMismatchError  target and draft share too few tokens
    ├── DrafterError           a drafter violates its protocol
    ├── MemoryLimitError       a run does not fit in memory (the numbers are named)
    ├── CacheError             a cache was asked for something that it cannot do (also a ValueError)
    ├── SessionError           a session was interrupted in a step: it decodes no more
    ├── ServerError            a server is not open, or its engine failed
    ├── RankError              ranks of a tensor-parallel run differ, or one has ended
    └── CompilerMissingError   MLX's CPU backend needs a C++ compiler and found none

Each message is one line that names the way out; the command line prints it as it is.
"""

from __future__ import annotations

from copy import copy
from typing import Self

from .utils.printable import message as as_message
from .utils.printable import shorten


class SpecdecError(Exception):
    """Base of every error raised on purpose by specdec.

    The message becomes one line of printable characters of limited length, whatever
    foreign names and texts it contains.

    Attributes:
        field: the option or parameter at fault; ``None``: it is not one alone.
        prompt: the index of the prompt at fault, if it is one of several.
    """

    prompt: int | None = None

    def __init__(self, message: object = "", *, field: str | None = None) -> None:
        super().__init__(as_message(message))
        self.field = field
        self._reason = message

    def of_prompt(self, index: int, name: str | None = None) -> Self:
        """The same error of one of several prompts, which its message names."""
        named = copy(self)
        named.prompt = index
        named.args = (as_message(f"{name or f'prompt {index}'}: {self._reason}"),)
        return named


class ConfigError(SpecdecError, ValueError):
    """An option has a value that cannot work."""


class PromptError(SpecdecError, ValueError):
    """A prompt, or a prompt file, cannot be used."""


class PromptTooLongError(PromptError):
    """A prompt is longer than the target's context.

    Attributes:
        tokens: how many tokens it has at least; ``None``: not known.
        most: how many are possible.
        image_tokens: how many of ``tokens`` are of images.
    """

    def __init__(
        self,
        message: object = "",
        tokens: int | None = None,
        most: int | None = None,
        image_tokens: int = 0,
    ) -> None:
        super().__init__(message)
        self.tokens, self.most, self.image_tokens = tokens, most, image_tokens


class PromptFileError(ConfigError, PromptError):
    """A file of prompts or of text does not exist, or has the wrong form.

    This can be found without a model. An error that only a model can show, such as a
    prompt longer than the context, is a :class:`PromptError`.
    """


class ModelError(SpecdecError):
    """A model cannot be used as asked."""


class ModelNotFoundError(ModelError):
    """No model was found under the given name."""


class ModelNameError(ConfigError, ModelNotFoundError):
    """No model can have that name: it is neither a path, a hub id nor a known name."""


class UnsupportedModelError(ModelError):
    """The model, or a part of it, is not supported; the message names the part."""


class VocabularyMismatchError(ModelError):
    """Target and draft share too few tokens; the message says how many."""


class DrafterError(SpecdecError):
    """A drafter violates its protocol; the message says how."""


class MemoryLimitError(SpecdecError):
    """A run does not fit in memory; the message has the numbers."""


class CacheError(SpecdecError, ValueError):
    """A cache was asked for something that it cannot do."""


class SessionError(SpecdecError):
    """A session was interrupted in a step, and decodes no more."""


class ServerError(SpecdecError):
    """A server is not open, or its engine failed (``__cause__`` says why)."""


class RankError(SpecdecError):
    """Ranks of a tensor-parallel run cannot connect, differ, or one has ended."""


class CompilerMissingError(SpecdecError):
    """MLX's CPU backend compiles kernels at run time and found no C++ compiler."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def reason_of(error: BaseException) -> str:
    """A foreign error as one short line: its type and its message."""
    kind = type(error).__name__
    try:
        text = shorten(error)
    except Exception:  # an error's own __str__ may fail
        text = ""
    return f"{kind}: {text}" if text else kind


def is_full(error: Exception) -> bool:
    """Whether memory ran out, in the words of CUDA, of Metal or of MLX on a CPU."""
    words = "out of memory", "insufficient memory", "to allocate", "alloc_failed"
    message = str(error).lower()
    in_mlx = isinstance(error, RuntimeError) and any(word in message for word in words)
    return in_mlx or isinstance(error, MemoryError)
