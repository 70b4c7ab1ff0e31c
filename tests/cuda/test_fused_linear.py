"""Joined products: the same numbers and weights, whatever is done to the layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.lora import LoRALinear

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.cuda.flattened_matmul import flatten_products
from specdec.cuda.fused_linear import (
    JoinedFlattened,
    JoinedLinear,
    join_products,
    separated,
)
from specdec.models import precision
from specdec.models.layer_skip import SkippingModel
from specdec.tools.decoding import token_level

from ..cache.small_models import MODELS

TinyModel = Callable[..., nn.Module]
TOKENS = mx.arange(12).reshape(3, 4)


def llama(tiny_model: TinyModel, **changes: Any) -> nn.Module:
    return tiny_model("llama", attention_bias=True, **changes)


def packed(tiny_model: TinyModel) -> nn.Module:
    model = llama(tiny_model, hidden_size=64, intermediate_size=128)
    nn.quantize(model, group_size=32, bits=8)
    flatten_products(model)
    return model


def products(model: nn.Module) -> set[int]:
    """The stacked products of a model, by identity."""
    found = [m for _, m in model.named_modules() if hasattr(m, "_product")]
    return {id(m._product) for m in found}


def arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def close(found: mx.array, expected: mx.array) -> None:
    """A wider product may be summed in another order."""
    least = 1e-5 * max(1.0, float(mx.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=least)


@pytest.mark.parametrize("kind", [k for k in MODELS if k != "latent"])
def test_the_same_logits(tiny_model: TinyModel, kind: str) -> None:
    arch, arguments = MODELS[kind]
    model = tiny_model(arch, **arguments)
    expected = model(TOKENS)
    join_products(model)
    assert products(model)
    close(model(TOKENS), expected)
    close(model(TOKENS), expected)


@pytest.mark.parametrize("make", [llama, packed])
def test_the_same_weights_under_the_same_names(
    tiny_model: TinyModel, make: Callable[[TinyModel], nn.Module]
) -> None:
    model = make(tiny_model)
    before, expected = arrays(model), model(TOKENS)
    join_products(model)
    after = arrays(model)
    assert after.keys() == before.keys()
    assert all(mx.array_equal(after[name], before[name]) for name in before)
    close(model(TOKENS), expected)
    kinds = {type(m) for _, m in model.named_modules() if hasattr(m, "_product")}
    assert kinds == {JoinedLinear if make is llama else JoinedFlattened}


def test_one_product_for_each_input(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers: queries, keys and values; gate and up; the rest as they were."""
    model = llama(tiny_model)
    computed: list[int] = []
    plain: Any = nn.Linear.__call__

    def counted(self: nn.Linear, x: mx.array) -> mx.array:
        computed.append(self.weight.shape[0])
        out: mx.array = plain(self, x)
        return out

    monkeypatch.setattr(nn.Linear, "__call__", counted)
    model(TOKENS)
    alone = len(computed)
    computed.clear()
    join_products(model)
    model(TOKENS)
    layers = len(model.layers)
    assert alone - len(computed) == 3 * layers


def test_nothing_is_held_twice(tiny_model: TinyModel) -> None:
    model = llama(tiny_model, hidden_size=256, intermediate_size=1024)
    mx.eval(model.parameters())
    mx.synchronize()
    before = mx.get_active_memory()
    join_products(model)
    mx.synchronize()
    assert mx.get_active_memory() <= before * 1.01


def test_weights_that_are_replaced_are_used(tiny_model: TinyModel) -> None:
    """As by training, or by casting: the stacked ones would be stale."""
    model, other = llama(tiny_model), llama(tiny_model)
    other.update(tree_map(lambda a: a * 1.5, other.parameters()))
    expected = other(TOKENS)
    join_products(model)
    model(TOKENS)
    model.update(other.parameters())
    close(model(TOKENS), expected)


def test_a_bias_that_is_added_is_used(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    join_products(model)
    mlp, x = model.layers[0].mlp, mx.random.normal((2, 3, 32))
    expected = mlp.up_proj(x) + 3
    mlp.up_proj.bias = mx.full((expected.shape[-1],), 3.0)
    mlp.gate_proj(x)
    close(mlp.up_proj(x), expected)


def test_layers_that_are_wrapped(tiny_model: TinyModel) -> None:
    """As adapters do: theirs is added, and the others' parts stay their own."""
    model, other = llama(tiny_model), llama(tiny_model)
    join_products(model)
    model(TOKENS)
    for each in (model, other):
        linear = each.layers[0].self_attn.k_proj
        adapted = LoRALinear.from_base(linear, r=2)
        adapted.lora_b = mx.ones_like(adapted.lora_b)
        adapted.lora_a = mx.ones_like(adapted.lora_a)
        each.layers[0].self_attn.k_proj = adapted
        each.layers[1].mlp.up_proj = LoRALinear.from_base(
            each.layers[1].mlp.up_proj, r=2
        ).fuse()
    for _ in range(3):
        close(model(TOKENS), other(TOKENS))


def test_two_threads(tiny_model: TinyModel) -> None:
    """One's parts are never the other's, whichever comes between."""
    model = llama(tiny_model)
    inputs = [TOKENS, TOKENS + 1]
    expected = [model(x) for x in inputs]
    mx.eval(expected)
    join_products(model)
    found: list[list[mx.array]] = [[], []]

    def forwards(i: int) -> None:
        for _ in range(20):
            logits = model(inputs[i])
            mx.eval(logits)
            found[i].append(logits)

    threads = [Thread(target=forwards, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, logits in zip(found, expected, strict=True):
        assert len(each) == 20
        for one in each:
            close(one, logits)


def test_gradients_are_those_of_the_layers(tiny_model: TinyModel) -> None:
    model = llama(tiny_model)

    def loss(m: nn.Module) -> mx.array:
        found: mx.array = m(TOKENS).square().mean()
        return found

    def gradients() -> dict[str, mx.array]:
        _, found = nn.value_and_grad(model, lambda: loss(model))()
        return dict(tree_flatten(found))

    expected = gradients()
    join_products(model)
    found = gradients()
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_a_copy_stands_by_itself(tiny_model: TinyModel) -> None:
    model = llama(tiny_model)
    join_products(model)
    twin = copy.deepcopy(model)
    expected = model(TOKENS)
    model.update(tree_map(lambda a: a * 1.5, model.parameters()))
    close(twin(TOKENS), expected)


@pytest.mark.parametrize("make", [llama, packed])
def test_it_can_be_quantized_and_cast(
    tiny_model: TinyModel, make: Callable[[TinyModel], nn.Module]
) -> None:
    model = make(tiny_model)
    plain, _ = precision.quantized_copy(model, 8)
    expected, own = plain(TOKENS), model(TOKENS)
    join_products(model)
    draft, _ = precision.quantized_copy(model, 8)
    assert not products(draft)
    close(draft(TOKENS), expected)
    precision.cast(model, mx.float32)
    np.testing.assert_allclose(model(TOKENS), own, rtol=1e-4, atol=1e-4)


def test_layers_asked_with_other_arrays(tiny_model: TinyModel) -> None:
    """Each gets its own answer, and the product is given up as useless."""
    model = llama(tiny_model)
    mlp = model.layers[0].mlp
    x, y = mx.random.normal((2, 3, 32)), mx.random.normal((2, 3, 32))
    gate, up = mlp.gate_proj(x), mlp.up_proj(y)
    join_products(model)
    for _ in range(3):
        close(mlp.gate_proj(x), gate)
        close(mlp.up_proj(y), up)
    assert mlp.gate_proj._product._useless


def test_forwards_that_were_cut_off(tiny_model: TinyModel) -> None:
    """Ctrl-C between two layers: never joined again, however long the process runs."""
    model = llama(tiny_model)
    expected = model(TOKENS)
    join_products(model)
    attention = model.layers[0].self_attn
    for _ in range(5):
        attention.q_proj(mx.random.normal((2, 3, 32)))
        close(model(TOKENS), expected)
        assert attention.q_proj._product._wasted == 0
    assert not attention.q_proj._product._useless


def test_layers_that_differ_stay_alone(tiny_model: TinyModel) -> None:
    model = llama(tiny_model)
    mlp = model.layers[0].mlp
    mlp.up_proj.weight = mlp.up_proj.weight.astype(mx.float16)
    join_products(model)
    assert type(mlp.up_proj) is nn.Linear
    assert type(model.layers[1].mlp.up_proj) is JoinedLinear


def test_decoding_with_a_draft_of_its_own_layers(tiny_model: TinyModel) -> None:
    """Target and draft share layers, and so products; compiled or not."""
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = SamplingParams(max_tokens=12)
    config = EngineConfig(batch_size=3, num_draft_tokens=2)
    model = llama(tiny_model, num_hidden_layers=3)
    expected = SpecDecoder(token_level(model)).generate(prompts, params)
    join_products(model)
    draft = SkippingModel(model, (0, 2))
    decoder = SpecDecoder(token_level(model), token_level(draft), config=config)
    found = decoder.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


@pytest.mark.parametrize("make", [llama, packed])
def test_separated_it_is_as_mlx_lm_made_it(
    tiny_model: TinyModel, make: Callable[[TinyModel], nn.Module]
) -> None:
    """For a peer to be measured with: the same arrays, mlx-lm's own layers."""
    model = make(tiny_model)
    before, expected = arrays(model), model(TOKENS)
    join_products(model)
    mx.synchronize()
    held = mx.get_active_memory()
    twin = separated(model)
    mx.synchronize()
    assert mx.get_active_memory() - held < 1000
    modules = {type(m).__module__ for _, m in twin.named_modules()}
    assert not any(name.startswith("specdec") for name in modules)
    assert arrays(twin).keys() == before.keys()
    close(twin(TOKENS), expected)
    assert products(model)
