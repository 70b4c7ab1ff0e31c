"""Which model, weights and caches a stored prefix belongs to."""

from __future__ import annotations

import hashlib
import json
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import backend
from ..cache import members
from .files import VERSION

# Odd factors, so that no bit of a word is lost; any large ones would do.
_WITHIN, _ACROSS = 2654435761, 2246822519
_SCALE = operator.attrgetter("scale")
_SLAB = 1 << 26  # bytes at a time, because they are widened


class KnownWeights:
    """Notices when arrays of a model are replaced (``model.update``).

    It compares arrays and modules by identity and place, and scales of adapters by
    value, so that a check takes a tenth of a millisecond: joining rows wait for it. It
    does not notice writes into an array (``weight[0] = 1``).
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module]):
        self._model = model
        self._look()

    def _look(self) -> None:
        self._parts = list(_parts(self._model))
        self._sizes = list(map(len, self._parts))
        self._scaled = list(filter(_is_scaled, self._parts))
        self._scales = list(map(_SCALE, self._scaled))
        places = [
            (part, key, weakref.ref(value))
            for part in self._parts
            for key, value in _places(part)
            if isinstance(value, mx.array | nn.Module)
        ]
        self._places = [list(each) for each in zip(*places, strict=True)]

    def replaced(self) -> bool:
        """Whether arrays or modules were replaced since the last check."""
        try:
            same = self._sizes == list(map(len, self._parts))
            same &= self._scales == list(map(_SCALE, self._scaled))
            if same and self._places:
                parts, keys, values = self._places
                now = map(operator.getitem, parts, keys)
                same = all(map(operator.is_, now, map(operator.call, values)))
        except LookupError:
            same = False
        if not same:
            self._look()
        return not same


def _parts(tree: Any) -> Iterator[Any]:
    """The modules, lists and dicts of a model; the model itself comes first."""
    yield tree
    for _, value in _places(tree):
        if isinstance(value, dict | list | tuple):
            yield from _parts(value)


def _places(part: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a part of a model, without private attributes."""
    if not isinstance(part, dict):
        yield from enumerate(part)
        return
    for key, value in part.items():
        if not (isinstance(part, nn.Module) and key.startswith("_")):
            yield key, value


def _is_scaled(part: Any) -> bool:
    """Whether a part of a model is an adapter, whose scale is no array of the model."""
    return isinstance(part, nn.Module) and "lora_a" in part and hasattr(part, "scale")


def signature(model: nn.Module, caches: list[Any]) -> str:
    """A hash of everything that decides which keys and values a prefix has.

    It covers the model's class and arguments, its weights, the kind of every cache with
    its bits and group size, the versions of specdec, mlx and mlx-lm, and the backend.
    """
    versions = backend.describe()
    modules: list[tuple[str, Any]] = model.named_modules()
    scales = [(path, layer.scale) for path, layer in modules if _is_scaled(layer)]
    text = json.dumps(
        {
            "format": VERSION,
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            "arguments": repr(getattr(model, "args", None)),
            "weights": weights_checksum(model),
            **({"scales": scales} if scales else {}),
            "caches": [cache.kind for cache in members(caches)],
            **{k: versions[k] for k in ("specdec", "mlx", "mlx_lm", "backend")},
        },
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def weights_checksum(model: nn.Module) -> str:
    """A hash of all weights: names, types, shapes and a checksum of every value.

    The checksums are computed on the device, as fast as it reads memory. They do not
    protect against forged weights.
    """
    weights: Any = tree_flatten(model.parameters())
    hashed = hashlib.sha256()
    for name, weight in sorted(weights):
        value = _checksum(weight)
        hashed.update(f"{name} {weight.dtype} {weight.shape} {value}\n".encode())
    return hashed.hexdigest()[:32]


def _checksum(weight: mx.array) -> int:
    """A weighted sum of all words modulo 2**32; the weights depend on the place."""
    if weight.size == 0:
        return 0
    rows = weight.reshape(-1, weight.shape[-1] if weight.ndim else 1)
    step = max(1, _SLAB * rows.shape[0] // rows.nbytes)
    total = 0
    for first in range(0, rows.shape[0], step):
        slab = rows[first : first + step]
        words = slab.view(mx.uint8 if slab.itemsize == 1 else mx.uint16)
        words = words.astype(mx.uint32)
        within = mx.arange(1, 2 * words.shape[1], 2, mx.uint32) * _WITHIN
        last = first + words.shape[0]
        across = mx.arange(2 * first + 1, 2 * last, 2, mx.uint32) * _ACROSS
        sums = (words * within).sum(axis=1)
        checksum: Any = ((sums ^ (sums >> 15)) * across).sum().item()
        total += checksum
    return total % 2**32
