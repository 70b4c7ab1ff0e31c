"""Products with experts that are too long for one launch on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from specdec.cuda import expert_matmul, kernels, packed_matmul
from specdec.cuda.expert_matmul import take_many_tokens
from specdec.cuda.fused_linear import separated
from specdec.models.precision import cast
from tests.cuda.emulation.cuda import emulated, needs_compiler

EXPERTS, USED = 6, 3


class Layer(nn.Module):
    """Experts as a model has them."""

    experts: Any

    def __init__(self, bias: bool):
        super().__init__()  # type: ignore[no-untyped-call]
        self.experts = SwitchGLU(64, 32, EXPERTS, bias=bias)
        if bias:
            for name in ("gate_proj", "up_proj", "down_proj"):
                layer = self.experts[name]
                layer.bias = mx.random.normal(layer.bias.shape)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        made: mx.array = self.experts(x, chosen)
        return made


def made(packed: bool, bias: bool) -> Layer:
    mx.random.seed(3)
    layer = Layer(bias)
    if packed:
        nn.quantize(layer, 32, 4)
    weights: Any = layer.parameters  # MLX has no types for it
    mx.eval(weights())
    return layer


def inputs(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((rows, tokens, 64), key=mx.random.key(1))
    scores = mx.random.uniform(shape=(rows, tokens, EXPERTS), key=mx.random.key(2))
    return x, mx.argsort(scores, axis=-1)[..., :USED]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pairs of each product with experts from now on."""
    found: list[int] = []

    def recording(usual: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def product(*args: Any, rhs_indices: mx.array, **options: Any) -> mx.array:
            found.append(rhs_indices.size)
            return usual(*args, rhs_indices=rhs_indices, **options)

        return product

    for name in ("gather_mm", "gather_qmm"):
        monkeypatch.setattr(mx, name, recording(getattr(mx, name)))
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_long_inputs_are_computed_in_pieces(
    packed: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece is left out or comes twice, or has another piece's experts."""
    usual, ours = made(packed, bias), made(packed, bias)
    take_many_tokens(ours)
    for most, rows, tokens in ((1000, 4, 9), (50, 4, 9), (36, 4, 9), (7, 4, 9)):
        monkeypatch.setattr(expert_matmul, "MOST_PAIRS", most)
        expected = usual(*inputs(rows, tokens))
        with monkeypatch.context() as patched:
            found = recorded(patched)
            given = ours(*inputs(rows, tokens))
        pairs = rows * tokens * USED
        assert max(found) <= most
        assert sum(found) == 3 * pairs
        assert len(found) == 3 * -(-pairs // most)
        assert mx.array_equal(given, expected)


def test_pairs_that_are_not_sorted_stay_beside_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of (rows, tokens, experts) divide pairs and not rows."""
    monkeypatch.setattr(expert_matmul, "MOST_PAIRS", 30)
    layer = made(packed=False, bias=False)
    x, chosen = inputs(5, 4)
    x = mx.expand_dims(x, (-2, -3))
    expected = layer.experts.up_proj(x, chosen)
    take_many_tokens(layer)
    found = recorded(monkeypatch)
    assert mx.array_equal(layer.experts.up_proj(x, chosen), expected)
    assert found == [24, 24, 12]


@pytest.mark.parametrize("packed", [False, True])
def test_indices_that_all_tokens_share(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs are counted before they are broadcast (deepseek_v41's projections)."""
    monkeypatch.setattr(expert_matmul, "MOST_PAIRS", 30)
    layer = made(packed, bias=False)
    x = mx.random.normal((11, EXPERTS, 1, 64), key=mx.random.key(1))
    chosen = mx.arange(EXPERTS)[None]
    expected = layer.experts.up_proj(x, chosen)
    take_many_tokens(layer)
    sizes: list[int] = []
    name = "gather_qmm" if packed else "gather_mm"
    usual: Any = getattr(mx, name)

    def recording(x: mx.array, *args: Any, **options: Any) -> mx.array:
        sizes.append(x.shape[0] * x.shape[1])
        made: mx.array = usual(x, *args, **options)
        return made

    monkeypatch.setattr(mx, name, recording)
    assert mx.array_equal(layer.experts.up_proj(x, chosen), expected)
    assert sizes == [30, 30, 6]


def test_dense_pairs_of_few_are_not_said_to_be_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLX's slower product is taken for few pairs, or its faster one for many."""
    layer = made(packed=False, bias=False)
    take_many_tokens(layer)
    said: list[tuple[int, bool]] = []
    usual: Any = mx.gather_mm

    def gather(*args: Any, rhs_indices: mx.array, sorted_indices: bool) -> mx.array:
        said.append((rhs_indices.size, sorted_indices))
        product: mx.array = usual(*args, rhs_indices=rhs_indices)
        return product

    monkeypatch.setattr(mx, "gather_mm", gather)
    monkeypatch.setattr(expert_matmul, "FEW_PAIRS", 15)
    for tokens in (4, 30, 31):
        layer(*inputs(1, tokens))
    assert said == [(12, False)] * 3 + [(90, False)] * 3 + [(93, True)] * 3


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept = packed_matmul._kernel, packed_matmul._gathering, packed_matmul._expert_kernel
    monkeypatch.setattr(packed_matmul.proven, "verdicts", {})
    yield from emulated(monkeypatch, *kept, kernels.cuda_kernel)


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
def test_packed_experts_are_the_kernel_s(
    emulation: None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's pairs, sorted or not, in pieces or whole; MLX's while it trains."""
    layer, twin = made(packed=True, bias=bias), made(packed=True, bias=bias)
    layer.set_dtype(mx.float16)
    take_many_tokens(layer.eval())
    monkeypatch.setattr(packed_matmul, "MOST_PAIRS", 60)
    asked: list[int] = []
    usual = packed_matmul.expert_product

    def counted(
        x: mx.array, packed: Any, indices: mx.array, **options: Any
    ) -> mx.array:
        asked.append(indices.size)
        return usual(x, packed, indices, **options)

    monkeypatch.setattr(packed_matmul, "expert_product", counted)
    # From 64 pairs on, mlx-lm sorts them.
    for tokens, pieces in ((5, [15]), (20, [60]), (22, [60, 6])):
        asked.clear()
        x, chosen = inputs(1, tokens)
        half, chosen = x.astype(mx.float16), chosen.astype(mx.uint32)
        found, right = layer(half, chosen), twin(x, chosen)
        assert asked == pieces * 3
        np.testing.assert_allclose(found.astype(mx.float32), right, atol=0.05)
    # What all tokens share is computed as it is for one of them.
    alike, x = mx.arange(EXPERTS)[None], mx.random.normal((5, EXPERTS, 1, 64))
    up, x = layer.experts.up_proj, x.astype(mx.float16)
    assert mx.array_equal(up(x, alike)[:1], up(x[:1], alike))
    asked.clear()
    layer.train()
    layer(half, chosen)
    assert not asked


@pytest.mark.parametrize("packed", [False, True])
def test_the_layers_stay_what_they_were(packed: bool) -> None:
    """A twin with mlx-lm's layers, or an unpacked copy, has unknown layers."""
    layer = made(packed, bias=True)
    weights: Any = layer.parameters  # MLX has no types for it
    before = dict(tree_flatten(weights()))
    take_many_tokens(layer)
    after = dict(tree_flatten(weights()))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    twin: Any = separated(layer)
    kind = QuantizedSwitchLinear if packed else SwitchLinear
    assert type(twin.experts.up_proj) is kind
    assert type(twin.experts) is SwitchGLU
    assert (type(layer.experts) is SwitchGLU) is not packed
    assert layer(*inputs(2, 20)).shape == (2, 20, USED, 64)
    if packed:
        cast(layer, mx.float32)
        assert type(layer.experts.up_proj) is SwitchLinear
        layer.eval()
        assert layer(*inputs(2, 20)).shape == (2, 20, USED, 64)
