"""Options, as frozen dataclasses that raise :class:`ConfigError` when built wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .utils.checks import require, require_bytes, require_int, require_one_of

NumDraftTokens = int | Literal["auto"]

DEFAULT_BATCH_SIZE = 8
# Beyond any batch that pays: plans count rows one by one.
MAX_BATCH_SIZE = 1 << 14
DEFAULT_NUM_DRAFT_TOKENS: NumDraftTokens = "auto"
# The largest k that "auto" chooses.
MAX_AUTO_DRAFT_TOKENS = 8
DEFAULT_PREFILL_STEP_SIZE = 512
DEFAULT_PREFIX_CACHE_SIZE = 8 * 10**9
DEFAULT_PREFIX_CACHE_MEMORY = 10**9


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs; the same for every request.

    Args:
        batch_size: rows that decode together, 16384 at most.
        num_draft_tokens: tokens proposed per round; 0 decodes plainly, "auto"
            chooses for every round, 0 included. See docs/draft-length.md.
        prefill_step_size: prompt tokens per row in one prefill forward.
        kv_bits: 4 or 8 stores keys and values quantized; ``None`` as they are.
        kv_group_size: 32, 64 or 128 elements share a scale; it must divide the
            models' head size.
        quantized_kv_start: quantize once the longest row of a batch holds this
            many tokens.
        max_kv_size: full-attention layers see each row's first 4 tokens and its
            newest ``max_kv_size - 4``; ``None`` sees everything.
        prefix_cache: a folder in which keys and values of prompts are kept, for
            prompts that begin alike, in this run and later ones; made if it is not
            there. ``None`` keeps none on disk. See docs/prefix.md.
        prefix_cache_size: most bytes of the entries in that folder.
        prefix_cache_memory: most bytes of those kept in memory; ``None`` is 1 GB
            with a ``prefix_cache`` and 0, which keeps none, without.
        memory_limit: most bytes that MLX should hold: models that cannot fit are not
            loaded, requests that cannot are refused, and rows wait for memory;
            ``None`` is what the device has. See docs/memory.md.

    Raises:
        ConfigError: a value is out of range, or does not go with another.
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
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        require_int("batch_size", self.batch_size, 1)
        few = self.batch_size <= MAX_BATCH_SIZE
        require(few, "batch_size", self.batch_size, f"at most {MAX_BATCH_SIZE}")
        if self.num_draft_tokens != "auto":
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
        """Bytes of prefixes that may be kept in memory."""
        if self.prefix_cache_memory is not None:
            return self.prefix_cache_memory
        return 0 if self.prefix_cache is None else DEFAULT_PREFIX_CACHE_MEMORY

    def _check_prefix_cache(self) -> None:
        require_bytes("prefix_cache_size", self.prefix_cache_size, 1)
        if self.prefix_cache_memory is not None:
            require_bytes("prefix_cache_memory", self.prefix_cache_memory, 0)
        folder = self.prefix_cache
        if folder is not None:
            path = os.path.expanduser(folder)
            if not path or (os.path.exists(path) and not os.path.isdir(path)):
                raise ConfigError(f"prefix_cache {path!r} is not a folder: name one")
        keeps = folder is not None or self.prefix_memory > 0
        if keeps and self.kv_bits is not None and self.quantized_kv_start:
            raise ConfigError(
                "quantized_kv_start above 0 does not go with a prefix cache: what a "
                "prompt's keys are then depends on the rows beside it; use 0"
            )
