"""All kinds of input: a new one is a function in one of these modules."""

from . import (
    folders,
    gguf_files,
    heads,
    prefix_folders,
    prompt_files,
    ranks_port,
    served,
)
from .case import KINDS

__all__ = [
    "KINDS", "folders", "gguf_files", "heads", "prefix_folders", "prompt_files",
    "ranks_port", "served",
]  # fmt: skip
