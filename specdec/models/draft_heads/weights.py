"""Puts arrays, packed or not, into the networks of draft heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...cache import CacheOptions, make_batch_caches
from ...errors import ModelError
from ..layers import arrays_of
from .head import DraftHead

# Packings without biases, by group size and bits. With biases, a packing is affine.
_WITHOUT_BIASES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}


def fill(head: nn.Module, weights: dict[str, mx.array], source: str) -> None:
    """Load arrays into a head; refuse missing, unknown and misshapen ones.

    Layers with ``scales`` beside their weights are packed. How, their shapes say:
    configurations leave it out, or name another packing than some layers have.

    Raises:
        ModelError: the arrays are not the head's.
    """
    nn.quantize(
        head, class_predicate=lambda path, layer: _packing(path, layer, weights)
    )
    wanted = dict(arrays_of(head))
    problems = [f"{name} is missing" for name in wanted.keys() - weights.keys()]
    problems += [f"{name} is not known" for name in weights.keys() - wanted.keys()]
    for name in wanted.keys() & weights.keys():
        array, like = weights[name], wanted[name]
        if array.shape != like.shape:
            problems.append(f"{name} is of shape {array.shape}, not {like.shape}")
        elif _is_floating(array) != _is_floating(like):
            problems.append(f"{name} is of type {array.dtype}, not {like.dtype}")
    if problems:
        raise ModelError(
            f"{source} cannot be loaded: of its weights {min(problems)}: download it "
            "again, or take another draft"
        )
    head.load_weights(list(weights.items()))


def rehearse(head: DraftHead) -> None:
    """Build a forward, which is not computed, so that what does not fit shows now."""
    args = head.args
    token = mx.zeros((1, 1), mx.int32)
    hidden = mx.zeros((1, 1, args.target_size * len(args.target_layers)))
    caches = make_batch_caches(head, 1, CacheOptions(max_write=2))
    head.absorb(hidden, token, caches)
    head(token, caches)


def _packing(path: str, layer: Any, weights: Mapping[str, mx.array]) -> Any:
    """How a layer is packed, as :func:`nn.quantize` takes it; ``False``: it is not."""
    weight, scales = weights.get(f"{path}.weight"), weights.get(f"{path}.scales")
    if weight is None or scales is None or not hasattr(layer, "to_quantized"):
        return False
    columns = layer.weight.shape[-1]
    packed, groups = (a.shape[-1] if a.ndim else 0 for a in (weight, scales))
    if not packed or not groups or 32 * packed % columns or columns % groups:
        return False  # its shape is reported
    bits, group_size = 32 * packed // columns, columns // groups
    mode: str | None = "affine"
    if f"{path}.biases" not in weights:
        mode = _WITHOUT_BIASES.get((group_size, bits))
    return mode and {"group_size": group_size, "bits": bits, "mode": mode}


def _is_floating(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)
