"""The engine's options: a frozen dataclass that refuses wrong values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .utils.checks import require, require_bytes, require_int, require_one_of
from .utils.names import settings

NumDraftTokens = int | Literal["auto"]

DEFAULT_BATCH_SIZE = 8
# Larger than any useful batch; memory plans count rows one by one.
MAX_BATCH_SIZE = 1 << 14
DEFAULT_NUM_DRAFT_TOKENS: NumDraftTokens = "auto"
# The largest k that "auto" chooses.
MAX_AUTO_DRAFT_TOKENS = 8
DEFAULT_PREFILL_STEP_SIZE = 512
DEFAULT_PREFIX_CACHE_SIZE = 8 * 10**9
DEFAULT_PREFIX_CACHE_MEMORY = 10**9


@settings
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs; the same for every request.

    Args:
        batch_size: the most rows that decode together, up to 16384.
        num_draft_tokens: tokens proposed per round. 0 decodes without a draft; "auto"
            chooses for every round, and may choose 0. See docs/draft-length.md.
        prefill_step_size: prompt tokens per row in one prefill forward; fewer need
            less memory.
        kv_bits: store keys and values of target and draft in 4 or 8 bits. ``None``:
            not quantized.
        kv_group_size: with ``kv_bits``, 32, 64 or 128 elements share a scale. It must
            divide the models' head size.
        quantized_kv_start: with ``kv_bits``, quantize once the longest row of a batch
            holds this many tokens.
        max_kv_size: full-attention layers see this many tokens of a row: its first 4
            and its newest. ``None``: all.
        prefix_cache: a folder that keeps keys and values of prompts, for prompts that
            begin alike, in this run and later ones. It is made if it does not exist.
            ``None`` keeps none on disk. See docs/prefix.md.
        prefix_cache_size: the most bytes of entries in this folder.
        prefix_cache_memory: the most bytes of prefixes kept in memory. ``None`` is
            1 GB with a ``prefix_cache``, and 0 (keep none) without.
        prefix_answers: whether answers are kept with their prompts, so that the next
            turn of the same client's conversation does not compute them again.
        draft_corpus: whether ``ngram`` drafts also look in finished answers of the same
            client.
        load_vision: load what images need with the model, not with the first image.
            Targets that read text only are refused. See docs/images.md.
        memory_limit: the most bytes that MLX should hold. Models that cannot fit are
            not loaded, requests that cannot fit are refused, and rows wait for memory.
            ``None``: what the device has. See docs/memory.md.

    Raises:
        ConfigError: a value is out of range, or conflicts with another.
    """

    batch_size: int = DEFAULT_BATCH_SIZE
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS
    prefill_step_size: int = DEFAULT_PREFILL_STEP_SIZE
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    max_kv_size: int | None = None
    prefix_cache: str | os.PathLike[str] | None = None
    prefix_cache_size: int = DEFAULT_PREFIX_CACHE_SIZE
    prefix_cache_memory: int | None = None
    prefix_answers: bool = True
    draft_corpus: bool = True
    load_vision: bool = False
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size, 1)
        few = self.batch_size <= MAX_BATCH_SIZE
        require(few, "batch_size", self.batch_size, f"at most {MAX_BATCH_SIZE}")
        if (
            not isinstance(self.num_draft_tokens, str)
            or self.num_draft_tokens != "auto"
        ):
            require_int("num_draft_tokens", self.num_draft_tokens, 0, other='"auto"')
        require_int("prefill_step_size", self.prefill_step_size, 1)
        if self.kv_bits is not None:
            require_one_of("kv_bits", self.kv_bits, (4, 8))
        require_one_of("kv_group_size", self.kv_group_size, (32, 64, 128))
        require_int("quantized_kv_start", self.quantized_kv_start, 0)
        if self.max_kv_size is not None:
            require_int("max_kv_size", self.max_kv_size, 5)
        self._check_prefix_cache()
        if self.memory_limit is not None:
            require_bytes("memory_limit", self.memory_limit, 1)

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that any round proposes."""
        k = self.num_draft_tokens
        return MAX_AUTO_DRAFT_TOKENS if k == "auto" else k

    @property
    def prefix_memory(self) -> int:
        """The most bytes of prefixes to keep in memory."""
        if self.prefix_cache_memory is not None:
            return self.prefix_cache_memory
        return 0 if self.prefix_cache is None else DEFAULT_PREFIX_CACHE_MEMORY

    def _check_prefix_cache(self) -> None:
        require_bytes("prefix_cache_size", self.prefix_cache_size, 1)
        if self.prefix_cache_memory is not None:
            require_bytes("prefix_cache_memory", self.prefix_cache_memory, 0)
        folder = self.prefix_cache
        if folder is not None:
            named = isinstance(folder, str | os.PathLike)
            path = os.path.expanduser(os.fspath(folder)) if named else ""
            can_be = isinstance(path, str) and bool(path) and "\0" not in path
            can_be = can_be and (os.path.isdir(path) or not os.path.exists(path))
            require(can_be, "prefix_cache", folder, "the path of a folder")
        keeps = folder is not None or self.prefix_memory > 0
        if keeps and self.kv_bits is not None and self.quantized_kv_start:
            raise ConfigError(
                "quantized_kv_start above 0 does not go with a prefix cache: a "
                "prompt's keys would depend on the rows beside it; use 0"
            )
