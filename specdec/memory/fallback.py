"""A request that fits in memory with packed keys and values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What ``kv_bits="auto"`` decided for a request that does not fit otherwise.

    Args:
        kv_bits: bits in which its keys and values are kept.
        needed: bytes that it would need, alone, with keys and values as they are.
        packed: bytes that it needs now.
        limit: bytes that there are.
    """

    kv_bits: int
    needed: int
    packed: int
    limit: int
