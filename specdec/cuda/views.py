"""Arrays that are parts of others, as far as that is noted.

A kernel reads a part by the strides of the whole, which MLX's Python does not tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx


class View(NamedTuple):
    """An array, and where it lies.

    Args:
        array: the part; it has the strides of the whole.
        whole: an array that is read as one without gaps.
        offset: numbers of the whole before the part's first.
    """

    array: mx.array
    whole: mx.array
    offset: int = 0

    @classmethod
    def of(cls, array: mx.array) -> View:
        """As it was noted; else the array is its own whole."""
        return noted(array) or cls(array, array)


_noted: dict[int, tuple[weakref.ref[mx.array], mx.array | None, int]] = {}


def part(array: mx.array, whole: mx.array, offset: int = 0) -> mx.array:
    """Note that ``array`` is a part of ``whole``, see :class:`View`, and return it.

    It must not be changed in place afterwards.
    """
    key = id(array)
    # No Python code, in which a Ctrl-C would be lost: the reference is the default.
    forget: Callable[[Any], Any] = partial(_noted.pop, key)
    reference = weakref.ref(array, forget)
    # An array that held itself would stay.
    _noted[key] = reference, None if whole is array else whole, offset
    return array


def split(whole: mx.array, ends: Sequence[int]) -> list[mx.array]:
    """Its parts along the last axis, the last of which ends where ``whole`` does."""
    parts = mx.split(whole, list(ends[:-1]), axis=-1)
    starts = (start for start, _ in pairwise((0, *ends)))
    return [part(one, whole, at) for one, at in zip(parts, starts, strict=True)]


def noted(array: mx.array) -> View | None:
    """What was noted of an array; ``None``: nothing."""
    found = _noted.get(id(array))
    if found is None or found[0]() is not array:
        return None
    return View(array, array if found[1] is None else found[1], found[2])
