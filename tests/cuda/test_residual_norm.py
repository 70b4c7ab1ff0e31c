"""Sums of residual connections and their norms by one kernel, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from specdec.cuda import kernels, residual_norm
from specdec.cuda.fused_linear import separated
from specdec.cuda.residual_norm import Form, SummingNorm
from specdec.models.draft_heads.config import LayerSizes
from specdec.models.draft_heads.layers import HeadLayer
from specdec.models.layers import record_layers
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant
from tests.models.architectures import build

FORMS = [
    Form(mx.bfloat16, 576, 1e-5),  # 72 threads would have numbers
    Form(mx.float16, 512, 1e-6),
    Form(mx.bfloat16, 1536, 1e-6),  # 3 chunks of 64 threads
    Form(mx.float16, 4096, 1e-5),
    Form(mx.bfloat16, 2056, 1e-6),  # a chunk is not full
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(residual_norm.proven, "verdicts", {})
    yield from emulated(monkeypatch, kernels.cuda_kernel)


def as_mlx(h: mx.array, weight: mx.array, eps: float) -> mx.array:
    """MLX's norm on CUDA, with its order of additions, by NumPy.

    A thread adds up eight numbers of each chunk, a warp its threads' sums by
    ``__shfl_xor``, and all threads those of the warps.
    """
    size, dtype = h.shape[-1], h.dtype
    numbers = -(-size // 8)
    threads = 64
    if size > 512:
        threads = 128 if numbers % 128 == 0 or numbers % 64 else 64
        if threads == 64 and numbers > 8 * 64:
            threads = 128
    chunks = -(-numbers // threads)
    x = np.array(h.astype(mx.float32)).reshape(-1, size)
    padded = np.zeros((len(x), chunks * threads * 8), np.float32)
    padded[:, :size] = x
    sums = np.zeros((len(x), threads), np.float32)
    for chunk in padded.reshape(len(x), chunks, threads, 8).swapaxes(0, 1):
        for j in range(8):  # rounded once, as fmaf does
            exact = chunk[..., j].astype(float) ** 2 + sums.astype(float)
            sums = exact.astype(np.float32)

    def over_warp(values: Any) -> Any:
        for step in (16, 8, 4, 2, 1):
            values = values + values[..., np.arange(32) ^ step]
        return values

    warps = over_warp(sums.reshape(len(x), -1, 32))[..., 0]
    each = np.zeros((len(x), 32), np.float32)
    each[:, : warps.shape[1]] = warps
    total = over_warp(each)[:, :1]
    by = 1 / np.sqrt(total / np.float32(size) + np.float32(eps))
    normed = mx.array((x * by.astype(np.float32)).reshape(h.shape)).astype(dtype)
    return normed * weight


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_bits(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares bits: another order of additions would be seen."""
    monkeypatch.setattr(mx.fast, "rms_norm", as_mlx)
    assert residual_norm.proven(form)


def test_other_forms_are_left_alone() -> None:
    for form in (
        Form(mx.float32, 512, 1e-5),
        Form(mx.bfloat16, 500, 1e-5),
        Form(mx.bfloat16, 8200, 1e-5),
    ):
        assert not residual_norm.proven(form)


@needs_compiler
def test_a_row_has_the_same_bits_beside_others() -> None:
    form = FORMS[0]
    x, r, weight = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(form.dtype)
        for i, shape in enumerate([(2, 3, 576), (2, 3, 576), (576,)])
    )
    whole = residual_norm.summed(form, x, r, weight)
    alone = residual_norm.summed(form, x[1:, 2:], r[1:, 2:], weight)
    for one, other in zip(whole, alone, strict=True):
        assert mx.array_equal(one[1:, 2:], other)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral3"])
def test_models(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum of a model is computed with the norm after it, to the same bits."""
    model: Any = build(architecture)
    model.eval()
    tokens = mx.array([[1, 2, 3], [6, 4, 5]])
    right = model(tokens)
    calls, alone = taken(model, monkeypatch), list[Any]()
    usual: Any = nn.RMSNorm.__call__

    def called(self: Any, x: mx.array) -> Any:
        alone.append(self)
        return usual(self, x)

    layers = len(model.layers)
    with monkeypatch.context() as watched:
        watched.setattr(nn.RMSNorm, "__call__", called)
        assert mx.array_equal(model(tokens), right)
    assert len(calls) == 2 * layers
    first = model.layers[0].input_layernorm
    assert [norm for norm in alone if isinstance(norm, SummingNorm)] == [first]

    # A copy without our layers, and one that records what layers put out.
    assert mx.array_equal(separated(model)(tokens), right)
    recorded, states = record_layers(model, [0, layers - 1], architecture)
    calls.clear()
    assert mx.array_equal(recorded(tokens), right)
    assert len(calls) == 2 * layers
    hidden = states.take()
    twin, wanted = record_layers(separated(model), [0, layers - 1], architecture)
    twin(tokens)
    assert mx.array_equal(hidden, wanted.take())

    # Gradients need MLX's operations.
    calls.clear()
    model.train()
    assert mx.array_equal(model(tokens), right)
    assert not calls


def test_a_replaced_norm_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose next norm was replaced, or gets another sum, norms anew."""
    model: Any = build("llama")
    model.eval()
    taken(model, monkeypatch)
    other: Any = build("llama")
    other.eval()
    norm = nn.RMSNorm(model.model.norm.weight.shape[0])
    norm.weight = norm.weight * 3
    norm.eval()
    model.model.norm = other.model.norm = norm
    model.model.layers = model.model.layers[:1]
    other.model.layers = other.model.layers[:1]
    tokens = mx.array([[1, 2, 3]])
    for _ in range(2):
        assert mx.array_equal(model(tokens), other(tokens))


def taken(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Let a model's norms compute sums, in float32; return the norms' results."""
    calls: list[mx.array] = []

    def counted(
        form: Form, x: mx.array, r: mx.array, weight: mx.array
    ) -> tuple[mx.array, mx.array]:
        results = residual_norm.reference(form, x, r, weight)
        calls.append(results[1])
        return results

    monkeypatch.setattr(residual_norm, "summed", counted)
    monkeypatch.setattr(Form, "known", True)
    monkeypatch.setattr(residual_norm, "_agrees", lambda form: True)
    monkeypatch.setattr(residual_norm.proven, "_agrees", lambda form: True)
    for _ in range(2):  # a second time changes nothing
        residual_norm.take_sums(model)
    return calls


FAULTS = {
    "another row": ("blockIdx.x) * D", "blockIdx.x) * (D - 8)"),
    "a difference": ("[j]) +\n", "[j]) -\n"),
    "the input's norm": ("float value = static_cast<float>(added)",
                         "float value = static_cast<float>(((T*)&one)[j])"),
    "one warp's sum": ("? of_warps[lane]", "? of_warps[0]"),
    "no eps": ("sum / D + static_cast<float>(@EPS@)", "sum / D"),
    "rounded once": ("static_cast<float>(static_cast<T>(kept[c * 8 + j] * by))",
                     "kept[c * 8 + j] * by"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The proof that runs on the device finds them."""
    plant(monkeypatch, residual_norm, "SOURCE", *FAULTS[name])
    monkeypatch.setattr(mx.fast, "rms_norm", as_mlx)
    try:
        assert not residual_norm._agrees(FORMS[0])
    except KernelFault:
        return


def test_other_layers_are_left_alone() -> None:
    """A layer that does more than these sums is left alone."""
    model: Any = build("gemma2")
    residual_norm.take_sums(model)
    assert not any(isinstance(m, SummingNorm) for m in model.modules())


def test_layers_of_draft_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums are computed with the norms after them, to the same bits."""
    sizes = LayerSizes(
        hidden_size=32, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16,
    )  # fmt: skip
    head = nn.Module()
    head.layers = [HeadLayer(sizes) for _ in range(2)]
    head.norm = nn.RMSNorm(32)
    head.eval()
    x = mx.random.normal((2, 3, 32), key=mx.random.key(1))

    def states() -> mx.array:
        h = x
        for layer in head.layers:
            h = layer(h, None, BatchKVCache([0, 1]))
        normed: mx.array = head.norm(h)
        return normed

    right = states()
    calls = taken(head, monkeypatch)
    assert mx.array_equal(states(), right)
    assert len(calls) == 4
    assert head.norm._slot.ready is None
