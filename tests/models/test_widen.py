"""Packed weights on the CPU compute in float32 and stay packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from specdec.models.precision import widen_packed


def arrays(model: nn.Module) -> dict[str, mx.array]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def test_only_floats_of_a_quantized_model_change(
    tiny_model: Callable[..., nn.Module],
) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=64)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    before = arrays(model)
    widen_packed(model)
    after = arrays(model)
    assert before.keys() == after.keys()
    assert any(a.dtype == mx.uint32 for a in after.values())
    for path, array in after.items():
        old = before[path]
        if old.dtype == mx.uint32:
            assert array.dtype == mx.uint32
        else:
            assert array.dtype == mx.float32
        assert mx.array_equal(array, old.astype(array.dtype))


def test_a_model_without_packed_weights_stays(
    tiny_model: Callable[..., nn.Module],
) -> None:
    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    widen_packed(model)
    assert {a.dtype for a in arrays(model).values()} == {mx.bfloat16}
