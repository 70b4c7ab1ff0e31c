"""Computes how many slots a cache allocates."""

from __future__ import annotations

from ..errors import CacheError

FIRST_CAPACITY = 256
# A narrower prefill chunk takes as long to launch as to compute.
NARROWEST_CHUNK = 32
# How many missed tokens of a row a draft takes in with one forward.
CATCH_UP_STEP = 128


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def grown_capacity(needed: int, limit: int | None = None) -> int:
    """Slots to allocate for ``needed``: 256, 512, 1024, ..., never past ``limit``.

    Raises:
        CacheError: ``needed`` is more than ``limit``.
    """
    if limit is not None and needed > limit:
        raise CacheError(
            f"a row needs {needed} cache slots and the cache was made for {limit}: "
            "make it with a larger max_length"
        )
    capacity = FIRST_CAPACITY
    while capacity < needed:
        capacity *= 2
    return capacity if limit is None else min(capacity, limit)


def chunk_width(remaining: int, prefill_step_size: int, read_bucket: int) -> int:
    """The width of the next prefill chunk of a row with ``remaining`` tokens.

    A whole number of buckets, or a half, a quarter, ... of one: few widths, and a short
    prompt is not computed several times over.
    """
    width = round_up(remaining, read_bucket)
    while width <= read_bucket and width // 2 >= max(remaining, NARROWEST_CHUNK):
        width //= 2
    return min(prefill_step_size, width)


def padded_length(length: int, prefill_step_size: int, read_bucket: int) -> int:
    """Slots that prefill touches for a row of ``length`` tokens."""
    rest = length % prefill_step_size
    if not rest:
        return length
    return length - rest + chunk_width(rest, prefill_step_size, read_bucket)


def ring_slots(window: int, max_write: int, keep: int = 0) -> int:
    """Slots of a ring: the pinned first tokens, the window, and one write less one."""
    return keep + window + max_write - 1


def cache_slots(
    length: int,
    *,
    max_length: int | None = None,
    window: int | None = None,
    keep: int = 0,
    max_write: int = 1,
) -> int:
    """Slots that a cache holds for each row once the longest has ``length`` tokens.

    Args:
        length: tokens of the longest row, including tokens that were taken back.
        max_length: the most tokens that a row can ever hold, if known.
        window: tokens that a query sees in a ring (a sliding window without its
            ``keep`` first tokens, or a chunk); ``None`` is full attention.
        keep: first tokens that a ring never drops.
        max_write: most tokens written in one call.

    Returns:
        0 while nothing is written.
    """
    if not length:
        return 0
    limits = [n for n in (max_length,) if n is not None]
    if window is not None:
        slots = ring_slots(window, max_write, keep)
        limits.append(slots)
        length = min(length, slots)
    return grown_capacity(length, min(limits, default=None))
