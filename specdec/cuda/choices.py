"""Which products with packed weights a kernel of ours computes: those it is faster at.

What is faster depends on the device, on MLX's version and on a matrix's shape. So both
are timed on the machine at hand, with the layers of the model at hand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import packed_matmul
from .flattened_matmul import FlattenedEmbedding, FlattenedLinear
from .fused_linear import JoinedFlattened
from .packed_matmul import CLASSES, Kind, proven

logger = logging.getLogger(__name__)

# Rows that are timed, for each of the classes.
ROWS = ((1, 8), (12, 40), (160,))
# Layers of one kind that are timed in turn, so that not all of them are in a cache, and
# how often.
LAYERS, REPEAT = 8, 3


def choose_products(model: nn.Module) -> None:
    """Let the kernel compute those of the model's packed products that it is faster at.

    Times kinds of layers that were not met before in this process.
    """
    wholes: dict[Kind, Any] = {}
    layers: dict[Kind, list[Any]] = {}
    for layer, whole in _packed(model):
        kind, timed = Kind.of(layer), Kind.of(whole)
        if kind is None or timed is None:
            continue
        wholes.setdefault(kind, timed)
        known = layers.setdefault(timed, [])
        if len(known) < LAYERS and all(whole is not each for each in known):
            known.append(whole)
    for kind, some in layers.items():
        if kind not in packed_matmul.chosen:
            packed_matmul.chosen[kind] = _faster(kind, some)
    for kind, timed in wholes.items():
        packed_matmul.chosen.setdefault(kind, packed_matmul.chosen[timed])


def slow_pairs(model: nn.Module) -> bool:
    """Whether two tokens take longer than one: packed products without the kernel."""
    return any(
        (kind := Kind.of(whole)) is None
        or not packed_matmul.chosen.get(kind, (False,))[0]
        for _, whole in _packed(model)
    )


def _packed(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Packed layers, and the layer that computes for each: itself, or a joined one."""
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, layer in modules:
        if isinstance(layer, JoinedFlattened):
            yield layer, layer.whole
        elif isinstance(layer, FlattenedLinear | FlattenedEmbedding):
            yield layer, layer


def _faster(kind: Kind, layers: Sequence[Any]) -> tuple[bool, ...]:
    """For each class of rows, whether the kernel takes less time than MLX."""
    if not proven(kind.dtype, kind.bits, kind.group_size):
        return (False,) * len(CLASSES)
    verdicts = []
    for rows in ROWS:
        xs = [mx.ones((m, kind.length), kind.dtype) for m in rows]
        mx.eval(xs)
        ours = sum(
            _seconds(lambda w, x: packed_matmul.of_layer(w, x)[0], layers, x)
            for x in xs
        )
        mlx = sum(_seconds(_mlx, layers, x) for x in xs)
        logger.debug("%s, %s rows: %.6f s by the kernel, %.6f", kind, rows, ours, mlx)
        verdicts.append(ours < mlx)
    return tuple(verdicts)


def _mlx(layer: Any, x: mx.array) -> mx.array:
    return mx.quantized_matmul(
        x,
        layer["weight"],
        layer["scales"],
        layer["biases"],
        group_size=layer.group_size,
        bits=layer.bits,
    )


def _seconds(
    product: Callable[[Any, mx.array], mx.array], layers: Sequence[Any], x: mx.array
) -> float:
    """The least time of one product with each of the layers."""
    times = []
    for _ in range(1 + REPEAT):
        begun = time.perf_counter()
        mx.eval([product(layer, x) for layer in layers])
        times.append(time.perf_counter() - begun)
    return min(times[1:])
