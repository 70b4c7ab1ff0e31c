"""Computes once per forward what every layer of a model needs.

All layers of a model advance in lockstep, so positions, slots, masks and trims are
equal for all layers that share a layout. Their caches share one :class:`Memo` and ask
it with the very array objects they hold; the first to ask computes. A cache that is out
of step holds other objects, and computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")


class Memo:
    """The last result of each computation, found by the identity of its inputs.

    Attributes:
        until: the last position that each of the next tokens sees, shape (B, N);
            ``None``: its own. The caches of a model share it, as they share results.
        in_windows: whether ``until`` holds only where a window slides.
        valid: how many tokens of the next write each row keeps, shape (B,), while a
            graph of padded rows is built; ``None``: the caches know.
    """

    def __init__(self) -> None:
        self.until: mx.array | None = None
        self.in_windows = False
        self.valid: mx.array | None = None
        self._last: dict[Hashable, tuple[tuple[mx.array, ...], Hashable, object]] = {}

    def get(
        self,
        name: Hashable,
        arrays: tuple[mx.array, ...],
        params: Hashable,
        compute: Callable[[], T],
    ) -> T:
        """``compute()``, or its last result under ``name`` if nothing changed.

        Args:
            arrays: inputs compared by identity, and kept alive.
            params: inputs compared by value.
        """
        last = self._last.get(name)
        if last is not None:
            old_arrays, old_params, result = last
            if (
                old_params == params
                and len(old_arrays) == len(arrays)
                and all(a is b for a, b in zip(old_arrays, arrays, strict=True))
            ):
                return result  # type: ignore[return-value]
        result = compute()
        self._last[name] = (arrays, params, result)
        return result

    def clear(self) -> None:
        """Drop all results and the arrays that they were computed from."""
        self._last.clear()
