"""The invariant of every cache, as pure functions of positions.

Row ``i`` of a batch has kept ``offset[i]`` tokens, at positions
``0 .. offset[i] - 1``. A *layout* says which slot holds a position; a *rule*
says which positions a query may see. Both are independent of how keys and
values are stored. A slot is visible to a query iff the newest position written
to it, counted up to the row's last one, is at or before the query and allowed
by the rule: padding, rejected draft tokens and unwritten slots need no
bookkeeping of their own, because their positions lie after the query.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from ..errors import CacheError


class Layout(Protocol):
    """Which slot holds which position."""

    @property
    def num_slots(self) -> int | None:
        """The most slots that the layout uses; ``None`` if there is no limit."""

    def slots(self, positions: mx.array) -> mx.array:
        """The slot of every position; same shape."""

    def held(self, num_slots: int, last: mx.array) -> mx.array:
        """The newest position at or below ``last`` in each slot.

        Args:
            num_slots: slots to describe, counted from the first.
            last: newest position of every row, shape (B,).

        Returns:
            Shape (B, num_slots), or (1, num_slots) when rows do not differ.
            Negative where the row has written nothing.
        """


@dataclass(frozen=True)
class LinearLayout:
    """Position ``p`` lies in slot ``p``."""

    num_slots: ClassVar[None] = None

    def slots(self, positions: mx.array) -> mx.array:
        return positions

    def held(self, num_slots: int, last: mx.array) -> mx.array:
        # Slots after `last` name positions that no query can see.
        return counted(0, num_slots)[None]


@dataclass(frozen=True)
class RingLayout:
    """The first ``keep`` positions are pinned; the others share ``ring`` slots.

    ``slot(p) = p`` for ``p < keep``, else ``keep + (p - keep) % ring``.
    """

    ring: int
    keep: int = 0

    @property
    def num_slots(self) -> int | None:
        return self.keep + self.ring

    def slots(self, positions: mx.array) -> mx.array:
        wrapped = (positions - self.keep) % self.ring + self.keep
        return mx.where(positions < self.keep, positions, wrapped)

    def held(self, num_slots: int, last: mx.array) -> mx.array:
        slot = counted(0, num_slots)[None]
        last = last[:, None]
        newest = last - (last - slot) % self.ring
        # A slot of the ring that was never written would name a pinned position.
        newest = mx.where(newest < self.keep, -1, newest)
        return mx.where(slot < self.keep, slot, newest)


class Rule(Protocol):
    """Which earlier positions a query may attend to."""

    @property
    def span(self) -> int:
        """Nothing is hidden from rows of up to this many tokens."""

    def visible(self, keys: mx.array, queries: mx.array) -> mx.array:
        """Boolean, broadcast over positions ``keys`` and ``queries``."""


@dataclass(frozen=True)
class SlidingRule:
    """The newest ``window`` positions, the query's own included, and ``keep`` sinks."""

    window: int
    keep: int = 0

    @property
    def span(self) -> int:
        return self.window

    def visible(self, keys: mx.array, queries: mx.array) -> mx.array:
        near = keys > queries - self.window
        return near | (keys < self.keep) if self.keep else near


@dataclass(frozen=True)
class ChunkedRule:
    """Positions of the query's own chunk of ``chunk`` positions."""

    chunk: int

    @property
    def span(self) -> int:
        return self.chunk

    def visible(self, keys: mx.array, queries: mx.array) -> mx.array:
        return keys // self.chunk == queries // self.chunk


def visible_slots(
    layout: Layout,
    rules: Iterable[Rule],
    offset: mx.array,
    num_tokens: int,
    num_slots: int,
    *,
    until: mx.array | None = None,
) -> mx.array:
    """Which slots the next ``num_tokens`` queries of every row may attend to.

    Args:
        offset: tokens kept by every row before the queries' tokens, shape (B,).
        until: the last position that each query sees, shape (B, num_tokens);
            ``None``: its own.

    Returns:
        Boolean, shape (B, 1, num_tokens, num_slots). Every query sees at least
        its own key, so no row of a softmax is empty.
    """
    queries = positions_after(offset, num_tokens)[:, :, None]
    last = offset + (num_tokens - 1)
    keys = layout.held(num_slots, last)[:, None, :]
    sees = queries if until is None else until[:, :, None]
    visible = unfused(mx.less_equal, keys, sees)
    if layout.num_slots is not None:
        visible = visible & (keys >= 0)
    for rule in rules:
        visible = visible & rule.visible(keys, queries)
    return visible[:, None]


def additive_mask(visible: mx.array, dtype: mx.Dtype) -> mx.array:
    """0 where visible, minus infinity elsewhere, in the model's ``dtype``."""
    shown, hidden = mx.array(0, dtype), mx.array(-float("inf"), dtype)
    return unfused(mx.where, visible, shown, hidden)


def positions_after(offset: mx.array, num_tokens: int) -> mx.array:
    """Positions of the next tokens of every row, shape (B, num_tokens)."""
    return unfused(mx.add, offset[:, None], counted(0, num_tokens)[None])


def counted(begin: int, end: int) -> mx.array:
    """``mx.arange(begin, end)``, as a view of numbers that the device has already."""
    return _numbers(max(end, 4095).bit_length())[begin:end]


@cache
def _numbers(bits: int) -> mx.array:
    """The whole numbers of up to ``bits`` bits."""
    numbers = mx.arange(2**bits)
    mx.eval(numbers)
    return numbers


def unfused(operation: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
    """Apply ``operation`` to broadcast arrays, with a kernel that MLX already has.

    In a compiled function MLX fuses an operation and its broadcasts into a new kernel,
    which takes 3.5 seconds to compile on CUDA. Another operation between them prevents
    that.
    """
    wide = [mx.expand_dims(array, 0) for array in mx.broadcast_arrays(*arrays)]
    return mx.squeeze(operation(*wide), 0)


def whole(name: str, value: Any) -> int:
    """``value`` as an ``int``; :class:`CacheError` unless it is a whole number."""
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        raise CacheError(f"{name} is {value!r}: it must be a whole number") from None


def at_least(name: str, value: int, low: int) -> int:
    """``value``; :class:`CacheError` unless it is whole and ``low`` or more."""
    if whole(name, value) < low:
        raise CacheError(f"{name} is {value}: it must be {low} or more")
    return value
