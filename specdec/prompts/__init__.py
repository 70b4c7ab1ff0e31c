"""Reads prompts from files, applies chat templates, and makes token ids.

No mlx here.
"""

from .encode import (
    MAX_PROMPT_BYTES,
    NO_CONTEXT,
    OWN_VARIABLES,
    EncodedPrompt,
    Encoding,
    Prompt,
    PromptLimit,
    encode,
    encode_all,
)
from .files import PromptRecord, read_prompts, read_records, read_text
from .images import Image, PlacedImage

__all__ = [
    "MAX_PROMPT_BYTES",
    "NO_CONTEXT",
    "OWN_VARIABLES",
    "EncodedPrompt",
    "Encoding",
    "Image",
    "PlacedImage",
    "Prompt",
    "PromptLimit",
    "PromptRecord",
    "encode",
    "encode_all",
    "read_prompts",
    "read_records",
    "read_text",
]
