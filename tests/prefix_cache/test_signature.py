"""Weights that were replaced are noticed, however that was done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec.prefix_cache.signature import KnownWeights


def update(model: Any) -> None:
    model.update({"model": {"norm": {"weight": mx.ones(32)}}})


def swap_layer(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = nn.Linear(32, 32, bias=False)


def swap_in_list(model: Any) -> None:
    model.model.layers[0] = model.model.layers[1]


def add_bias(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.bias = mx.zeros(64)


def drop_layer(model: Any) -> None:
    del model.model.layers[-1]


def rename(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention["renamed"] = attention.pop("o_proj")


@pytest.mark.parametrize(
    "change", [update, swap_layer, swap_in_list, add_bias, drop_layer, rename]
)
def test_a_change_is_noticed_once(
    tiny_model: Callable[..., Any], change: Callable[[Any], None]
) -> None:
    """Graphs, and kept prefixes, would go on with weights that are not the model's."""
    model = tiny_model("llama", seed=3)
    weights = KnownWeights(model)
    assert not weights.replaced()
    change(model)
    assert weights.replaced()
    assert not weights.replaced()


def test_what_was_replaced_is_let_go(tiny_model: Callable[..., Any]) -> None:
    """A model that is updated would be held twice."""
    model = tiny_model("llama", seed=3)
    weights = KnownWeights(model)
    old = weakref.ref(model.model.norm.weight)
    update(model)
    gc.collect()
    assert old() is None
    assert weights.replaced()
