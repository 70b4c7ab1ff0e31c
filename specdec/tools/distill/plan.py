"""The sizes of a run: rows that write, blocks to learn, bytes they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ... import backend
from ...cache.capacity import grown_capacity
from ...config import EngineConfig
from ...memory.model_geometry import geometry_of
from .options import Options
from .wave import Wave

# Bytes of one chunk's logits, one copy in float32.
_CHUNK_BYTES = 500_000_000
_LARGEST_CHUNK, _SMALLEST_CHUNK = 2048, 64
# Rows that write together, and tokens of a block, by backend: where launches cost
# more than work, many.
_WRITERS = {"cuda": 2048, "metal": 64, "cpu": 16}
_BLOCK_TOKENS = {"cuda": 32768, "metal": 8192, "cpu": 2048}
# Shares of the memory, for keys and values of what writes, and for target states.
_WRITING_SHARE, _STATES_SHARE = 0.4, 0.4


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a run works with at a time.

    Args:
        writers: rows that write together.
        block_tokens: tokens of a step.
        chunk: positions whose logits are held at a time.
        states_bytes: most bytes of target states to keep.
    """

    writers: int
    block_tokens: int
    chunk: int
    states_bytes: int


def sizes_of(
    model: nn.Module,
    config: Mapping[str, Any],
    name: str,
    *,
    vocab_size: int,
    writers: int | None = None,
    block_tokens: int | None = None,
) -> Sizes:
    """Sizes that fit in memory where the default ones would not.

    Args:
        model: the target.
        vocab_size: its number of logits.
        writers, block_tokens: as many as the user says, if they do.
    """
    where = backend.defaults().name
    memory = backend.memory_size() or 8 << 30
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and chunk * vocab_size * 4 > _CHUNK_BYTES:
        chunk //= 2
    if writers is None:
        writers = _WRITERS[where]
        geometry = geometry_of(model, config, name)
        slots = grown_capacity(longest_document(Wave()))
        per_row = slots * sum(cache.slot_bytes for cache in geometry.caches)
        per_row += 4 * vocab_size * 4  # logits and noise
        while writers > 1 and writers * per_row > _WRITING_SHARE * memory:
            writers //= 2
    block_tokens = block_tokens or _BLOCK_TOKENS[where]
    return Sizes(
        writers=writers,
        block_tokens=block_tokens,
        chunk=min(chunk, block_tokens),
        states_bytes=int(_STATES_SHARE * memory),
    )


def computing_dtype(options: Options) -> str:
    """The type that models compute in."""
    on_cpu = backend.defaults().name == "cpu"
    return options.dtype or ("float32" if on_cpu else "bfloat16")


def longest_document(wave: Wave) -> int:
    """Tokens of a prompt and its answer, with room for the template's own."""
    return wave.turn_tokens + wave.answer_tokens + 64


def engine_config(sizes: Sizes) -> EngineConfig:
    """How the target runs while it writes."""
    return EngineConfig(
        batch_size=sizes.writers, num_draft_tokens=0, prefill_step_size=256
    )
