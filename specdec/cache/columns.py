"""Finds models that derive positions from the number of columns attention reads.

The rows of a batch differ in length, and a cache hands attention more columns than most
of them hold. Code that derives its queries' positions from the number of columns is
right for one sequence with mlx-lm's caches. Here it would be wrong, without an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import mlx.core as mx

from .recurrent import BatchRecurrentCache

logger = logging.getLogger(__name__)

# The columns of the two traces. Nothing is computed, so they cost nothing. They are
# more than a model would read before it selects among them.
_COLUMNS = 2**20, 2**20 + 64
_ROWS, _TOKENS = 3, 2
# Larger constants are weights.
_MOST_NUMBERS = 4096


class _Shown:
    """A stand-in for a cache that shows a given number of columns."""

    def __init__(self, cache: Any, offset: mx.array, seen: mx.array, columns: int):
        self._cache, self._seen, self._columns = cache, seen, columns
        self.offset = offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        self.keys, self.values = self._wide(keys), self._wide(values)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    def make_mask(self, N: int, **how: Any) -> mx.array:  # noqa: N803 - mlx-lm's name
        return mx.broadcast_to(self._seen, (_ROWS, 1, N, self._columns))

    def _wide(self, array: mx.array) -> mx.array:
        rows, heads, _, size = array.shape
        return mx.broadcast_to(array[:, :, :1], (rows, heads, self._columns, size))


def _numbers(model: Any, caches: list[Any], columns: int) -> Counter[str]:
    """The constants in a forward of the model, and how often each occurs."""
    constants: Counter[str] = Counter()

    def forward(tokens: mx.array, offset: mx.array, seen: mx.array) -> Any:
        def shown(cache: Any) -> Any:
            members = getattr(cache, "caches", None)
            if isinstance(cache, BatchRecurrentCache):
                return BatchRecurrentCache(_ROWS, size=cache.num_states)
            if members is not None:
                return type(cache)(*map(shown, members))
            return _Shown(cache, offset, seen, columns)

        return model(tokens, cache=[shown(c) for c in caches])

    def see(part: dict[str, Any]) -> None:
        if part.get("name") == "Arange":
            constants[f"{part['arguments']}"] += 1
        for _, array in part.get("constants", ()):
            small = array.size == 1 or mx.issubdtype(array.dtype, mx.integer)
            if small and array.size <= _MOST_NUMBERS:
                constants[f"{array.dtype} {array.tolist()}"] += 1

    seen = mx.array(True)
    tokens, offset = mx.zeros((_ROWS, _TOKENS), mx.int32), mx.array([5, 3, 4])
    mx.export_function(see, forward, tokens, offset, seen)
    return constants


# Results by a model's code and arguments, since a trace takes a while.
_known: dict[tuple[Any, ...], bool] = {}


def counts_columns(model: Any, caches: list[Any]) -> bool:
    """Whether the constants of the model's forward change with the number of columns.

    A module with the attribute ``counts_by_row`` is trusted: it uses columns for the
    positions of keys only, and computes queries' positions for each row.

    Args:
        caches: dense batch caches of the model, of three rows; they do not change.
    """
    modules = [module for _, module in model.named_modules()]
    if any(getattr(module, "counts_by_row", False) for module in modules):
        return False
    arguments = getattr(model, "args", None)
    if arguments is None:
        return _differ(model, caches)
    code = frozenset(map(type, modules))
    key = (code, tuple(map(type, caches)), repr(arguments))
    if key not in _known:
        _known[key] = _differ(model, caches)
    return _known[key]


def _differ(model: Any, caches: list[Any]) -> bool:
    try:
        few, many = (_numbers(model, caches, columns) for columns in _COLUMNS)
    except Exception as error:  # it runs but cannot be traced
        logger.debug("positions cannot be traced: %s", error)
        return False
    return few != many
