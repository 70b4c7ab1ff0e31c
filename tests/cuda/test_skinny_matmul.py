"""Products of few rows: who computes what, and on a GPU the kernel itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.backend import defaults
from specdec.cuda import skinny_matmul
from specdec.cuda.fused_linear import JoinedSkinny, join_products, separated
from specdec.cuda.kernels import TYPES
from specdec.cuda.skinny_matmul import (
    MOST_ROWS,
    SkinnyEmbedding,
    SkinnyLinear,
    take_few_rows,
)
from specdec.models import precision
from specdec.tools.decoding import token_level
from tests.cuda.emulation.cuda import needs_cuda

TinyModel = Callable[..., nn.Module]


def reference(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """What the kernel computes, in float32 and rounded once."""
    exact = x.astype(mx.float32) @ weight.astype(mx.float32).T
    if bias is not None:
        exact = exact + bias.astype(mx.float32)
    return exact.astype(x.dtype)


def parted(whole: Any) -> Any:
    """The same in parts, by ``whole``."""

    def parts(x: mx.array, weight: mx.array, bias: Any, ends: Any) -> list[mx.array]:
        found: Any = mx.split(whole(x, weight, bias), list(ends[:-1]), axis=-1)
        return list(found)

    return parts


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """A stand-in for the kernel: rows, columns and bias of each of its products."""
    calls: list[tuple[int, int, bool]] = []

    def stand_in(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        calls.append((x.size // x.shape[-1], weight.shape[0], bias is not None))
        return reference(x, weight, bias)

    monkeypatch.setattr(skinny_matmul, "product", stand_in)
    monkeypatch.setattr(skinny_matmul, "parts", parted(stand_in))
    monkeypatch.setattr(skinny_matmul, "proven", lambda dtype: dtype in TYPES)
    return calls


def model_of(tiny_model: TinyModel, **changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, **changes}
    model = tiny_model("llama", attention_bias=True, **sizes)
    precision.cast(model, mx.bfloat16)
    return model.eval()


def test_layers_and_head_of_few_rows(
    tiny_model: TinyModel, asked: list[tuple[int, int, bool]]
) -> None:
    model = model_of(tiny_model, tie_word_embeddings=True)
    tokens = mx.arange(6).reshape(2, 3)
    expected = model(tokens)
    take_few_rows(model)
    found = model(tokens)
    kinds = {type(m) for _, m in model.named_modules()}
    assert {SkinnyLinear, SkinnyEmbedding} <= kinds
    assert nn.Linear not in kinds
    # Seven products in each layer, with a bias those of attention; and the head.
    layers = len(model.layers)
    assert len(asked) == 7 * layers + 1
    assert all(rows == 6 for rows, _, _ in asked)
    assert sum(bias for *_, bias in asked) == 4 * layers
    close(found, expected)
    asked.clear()
    join_products(model)
    close(model(tokens), expected)
    assert JoinedSkinny in {type(m) for _, m in model.named_modules()}
    assert len(asked) == 4 * layers + 1
    assert sum(bias for *_, bias in asked) == 2 * layers


def close(found: mx.array, expected: mx.array) -> None:
    """Equal but for a few roundings in bfloat16."""
    scale: Any = mx.abs(expected).max().item()
    np.testing.assert_allclose(
        found.astype(mx.float32), expected.astype(mx.float32), atol=0.03 * scale
    )


def test_many_rows_other_types_and_odd_sizes_are_left_to_mlx(
    asked: list[tuple[int, int, bool]],
) -> None:
    def layer(columns: int, rows: int, dtype: mx.Dtype = mx.bfloat16) -> Any:
        holder: Any = nn.Sequential(nn.Linear(columns, rows))
        holder.set_dtype(dtype)
        take_few_rows(holder.eval())
        return holder.layers[0]

    def x(rows: int, columns: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.ones((rows, columns), dtype)

    layer(64, 8)(x(MOST_ROWS + 1, 64))
    layer(64, 8, mx.float32)(x(2, 64, mx.float32))
    layer(64, 8)(x(2, 64, mx.float16))
    layer(48, 8)(x(2, 48))
    layer(8192, 8193)(x(1, 8192))  # too large a matrix
    layer(4096, 4096)(x(33, 4096))  # too much to do
    layer(64, 8)(x(2 * 17, 64).reshape(2, 17, 64))  # of prompts
    assert asked == []
    layer(64, 8)(x(MOST_ROWS, 64))
    layer(64, 8, mx.float16)(x(1, 64, mx.float16))
    layer(4096, 4096)(x(32, 4096))
    layer(64, 8)(x(3 * 16, 64).reshape(3, 16, 64))
    rows = [MOST_ROWS, 1, 32, 48]
    assert asked == [(n, 4096 if n == 32 else 8, True) for n in rows]


def test_a_model_that_trains_uses_products_with_a_gradient(
    tiny_model: TinyModel, asked: list[tuple[int, int, bool]]
) -> None:
    model = model_of(tiny_model)
    take_few_rows(model)
    join_products(model)
    tokens = mx.arange(6).reshape(2, 3)
    model.train()
    model(tokens)
    assert asked == []
    model.eval()
    model(tokens)
    assert asked


def test_copies_in_other_formats_and_for_peers_are_mlx_s_layers(
    tiny_model: TinyModel, asked: list[tuple[int, int, bool]]
) -> None:
    model = model_of(tiny_model, tie_word_embeddings=True)
    take_few_rows(model)
    join_products(model)

    def kinds(of: nn.Module) -> set[str]:
        return {type(m).__module__ for _, m in of.named_modules()}

    assert not any(name.startswith("specdec") for name in kinds(separated(model)))
    quantized, _ = precision.quantized_copy(model, 8)
    assert not any(name.startswith("specdec") for name in kinds(quantized))
    arrays = dict(tree_flatten(model.parameters()))
    assert all(a.dtype == mx.bfloat16 for a in arrays.values())


def test_without_a_kernel_nothing_changes(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny_matmul, "proven", lambda dtype: False)
    model = model_of(tiny_model)
    take_few_rows(model)
    assert not any(isinstance(m, SkinnyLinear) for _, m in model.named_modules())


def test_a_model_speculates_with_itself(
    tiny_model: TinyModel, asked: list[tuple[int, int, bool]]
) -> None:
    """Through the engine, in half precision: nearly all of it is accepted.

    Where a step of one token is padded, single ones of three rows are products of six.
    """
    model = model_of(tiny_model)
    take_few_rows(model)
    join_products(model)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = SamplingParams(max_tokens=12, temperature=0)
    config = EngineConfig(batch_size=3, num_draft_tokens=3)
    decoder = SpecDecoder(token_level(model), token_level(model), config=config)
    found = decoder.generate(prompts, params)
    single = 3 * (1 + defaults().pad_single_token)
    assert {rows for rows, *_ in asked} > {single, 12}
    assert sum(r.accepted for r in found) > 0.9 * sum(r.drafted for r in found)


# -- the kernel itself -------------------------------------------------------


SIZES = [(40, 96), (576, 1536), (960, 576), (8, 32), (1000, 608), (1536, 8960)]


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_kernel_computes_the_product(dtype: mx.Dtype) -> None:
    mx.random.seed(0)
    for size, rows in product(SIZES, (1, 2, 5, 8, 9, 16, 17, 31, 33, 64, 96, 160)):
        x = mx.random.normal((rows, size[1])).astype(dtype)
        weight = mx.random.normal(size).astype(dtype)
        for bias in (None, mx.random.normal((size[0],)).astype(dtype)):
            found = skinny_matmul.product(x, weight, bias).astype(mx.float32)
            wanted = reference(x, weight, bias).astype(mx.float32)
            # A unit in the last place: the sums differ by float32's rounding alone.
            unit = 2**-7 if dtype == mx.bfloat16 else 2**-9
            near = mx.abs(found - wanted) <= unit * mx.abs(wanted) + 1e-2
            assert mx.all(near).item(), (size, rows)
            # In parts, and of more dimensions: the same sums, elsewhere.
            whole = skinny_matmul.product(x, weight, bias)
            third = size[0] // 3
            for ends in ((third, size[0]), (third, third + 1, size[0])):
                found_parts = skinny_matmul.parts(
                    x.reshape(1, *x.shape), weight, bias, ends
                )
                assert len(found_parts) == len(ends)
                joined = mx.concatenate(found_parts, axis=-1)[0]
                assert mx.array_equal(joined, whole), (size, rows, ends)
