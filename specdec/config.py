"""Options, as frozen dataclasses that raise :class:`ConfigError` when built wrong."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import require_int, require_one_of
from .errors import ConfigError

DEFAULT_BATCH_SIZE = 8
DEFAULT_NUM_DRAFT_TOKENS = 3
DEFAULT_PREFILL_STEP_SIZE = 512

# Drafts that are made from the target's own weights.
SELF_DRAFTS = ("self:2bit", "self:3bit", "self:4bit", "self:8bit")


def check_draft_name(source: str) -> None:
    """Refuse a draft ``self...`` that is none; other names are a loader's question.

    Raises:
        ConfigError: it is not one of ``SELF_DRAFTS``.
    """
    is_self = source == "self" or source.startswith("self:")
    if is_self and source not in SELF_DRAFTS:
        raise ConfigError(
            f"draft {source!r} is not known: use {', '.join(SELF_DRAFTS)}, "
            "a folder, a .gguf file or a hub id"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs; the same for every request.

    Args:
        batch_size: rows that decode together.
        num_draft_tokens: tokens proposed per round; 0 decodes plainly.
        prefill_step_size: prompt tokens per row in one prefill forward.
        read_bucket: cache columns handed to attention are rounded up to a
            multiple of this; ``None`` takes the backend's default
            (:func:`specdec.backend.defaults`).
        kv_bits: 4 or 8 stores keys and values quantized; ``None`` as they are.
        kv_group_size: 32, 64 or 128 elements share a scale; it must divide the
            models' head size.
        quantized_kv_start: quantize once the longest row of a batch holds this
            many tokens.
        max_kv_size: full-attention layers see each row's first 4 tokens and its
            newest ``max_kv_size - 4``; ``None`` sees everything.

    Raises:
        ConfigError: a value is out of range.
    """

    batch_size: int = DEFAULT_BATCH_SIZE
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    read_bucket: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size, 1)
        require_int("num_draft_tokens", self.num_draft_tokens, 0)
        require_int("prefill_step_size", self.prefill_step_size, 1)
        if self.read_bucket is not None:
            require_int("read_bucket", self.read_bucket, 1)
        if self.kv_bits is not None:
            require_one_of("kv_bits", self.kv_bits, (4, 8))
        require_one_of("kv_group_size", self.kv_group_size, (32, 64, 128))
        require_int("quantized_kv_start", self.quantized_kv_start, 0)
        if self.max_kv_size is not None:
            require_int("max_kv_size", self.max_kv_size, 5)
