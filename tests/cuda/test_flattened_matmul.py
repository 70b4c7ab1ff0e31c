"""Flattened products: the same numbers, names and files."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec.cuda.flattened_matmul import (
    FlattenedEmbedding,
    FlattenedLinear,
    flatten_products,
)
from specdec.models import precision

TinyModel = Callable[..., nn.Module]


def packed(tiny_model: TinyModel) -> nn.Module:
    model = tiny_model(
        "llama", hidden_size=64, intermediate_size=128, attention_bias=True
    )
    nn.quantize(model, group_size=32, bits=8)
    return model


def test_the_same_logits_and_weights(tiny_model: TinyModel) -> None:
    model = packed(tiny_model)
    tokens = mx.arange(12).reshape(3, 4)
    expected = model(tokens)
    before = dict(tree_flatten(model.parameters()))
    flatten_products(model)
    np.testing.assert_allclose(model(tokens), expected, rtol=1e-5, atol=1e-5)
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_every_packed_layer_is_flattened(tiny_model: TinyModel) -> None:
    model = packed(tiny_model)
    flatten_products(model)
    kinds = {type(m) for _, m in model.named_modules() if "scales" in m}
    assert kinds == {FlattenedLinear, FlattenedEmbedding}


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (1, 1, 1, 64)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    layer = nn.QuantizedLinear(64, 32, group_size=32, bits=4)
    holder = nn.Sequential(layer)
    flatten_products(holder)
    x = mx.random.normal(shape)
    np.testing.assert_allclose(holder(x), layer(x), rtol=1e-5, atol=1e-5)


def test_it_can_be_dequantized_and_quantized_again(tiny_model: TinyModel) -> None:
    """As the target of a ``self:4bit`` draft, and for another dtype."""
    model = packed(tiny_model)
    flatten_products(model)
    tokens = mx.arange(6).reshape(2, 3)
    draft, _ = precision.quantized_copy(model, 4)
    assert draft(tokens).shape == (2, 3, 97)
    expected = model(tokens)
    precision.cast(model, mx.float32)
    np.testing.assert_allclose(model(tokens), expected, rtol=1e-4, atol=1e-4)
