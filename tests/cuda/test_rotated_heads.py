"""Norms and rotations of queries and keys by one kernel, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from specdec.cuda import kernels, rotated_heads
from specdec.cuda.attention_patch import usual_calls
from specdec.cuda.fused_linear import join_products, separated
from specdec.cuda.rotated_heads import Form
from specdec.models.draft_heads.config import LayerSizes
from specdec.models.draft_heads.layers import HeadAttention
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant
from tests.models.architectures import build

WHOLE = Form(mx.bfloat16, 4, 2, 64, 64, 1e-6, 1.0, 1e6)
PART = Form(mx.float16, 3, 1, 256, 64, 1e-5, 0.25, 1e4)
BARE = Form(mx.bfloat16, 9, 3, 64, 64, None, 1.0, 1e5)
PAIRS = Form(mx.bfloat16, 3, 1, 192, 128, 1e-5, 1.0, 1e5, True)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rotated_heads.proven, "verdicts", {})
    yield from emulated(monkeypatch, rotated_heads._kernel, kernels.cuda_kernel)


@dataclass
class Drawn:
    q: mx.array
    k: mx.array
    norms: Sequence[mx.array]
    offset: mx.array


def drawn(form: Form, rows: int = 2, tokens: int = 3) -> Drawn:
    shapes = (
        (rows, tokens, form.heads, form.size),
        (rows, tokens, form.key_heads, form.size),
        (form.size,),
        (form.size,),
    )
    q, k, *norms = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(form.dtype)
        for i, shape in enumerate(shapes)
    )
    offset = mx.array([5, 131071, 0, 77][:rows], mx.int32)
    return Drawn(q, k, norms if form.eps is not None else [], offset)


def exact(form: Form, given: mx.array, norm: mx.array | None, offset: mx.array) -> Any:
    """By the formulas, in float64."""
    x = np.array(given.astype(mx.float32)).astype(float)
    if norm is not None:
        weight = np.array(norm.astype(mx.float32)).astype(float)
        mean = (x * x).mean(axis=-1, keepdims=True)
        x = x / np.sqrt(mean + (form.eps or 0)) * weight
    half = form.rotated // 2
    places = np.array(offset)[:, None] + np.arange(x.shape[1])
    angle = form.scale * places[..., None] * form.base ** -(np.arange(half) / half)
    c, s = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    both = slice(0, half), slice(half, 2 * half)
    if form.traditional:
        both = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    first, second = (x[..., each].copy() for each in both)
    x[..., both[0]] = first * c - second * s
    x[..., both[1]] = first * s + second * c
    return x.transpose(0, 2, 1, 3)


def agrees(form: Form, given: Drawn) -> bool:
    both = rotated_heads.rotated(form, given.q, given.k, given.norms, given.offset)
    pairs = zip(both, (given.q, given.k), given.norms or (None, None), strict=True)
    return all(
        # A position of 131,071 has an angle that is off by 0.004 in float32.
        np.abs(np.array(found.astype(mx.float32)) - right).max()
        <= 0.02 * np.abs(right).max()
        for found, x, norm in pairs
        for right in [exact(form, x, norm, given.offset)]
    )


@needs_compiler
@pytest.mark.parametrize("form", [WHOLE, PART, PAIRS, BARE])
def test_heads(form: Form) -> None:
    """Of one token and of several; all of a head rotates, or a part."""
    for rows, tokens in ((1, 1), (2, 3), (4, 2)):
        assert agrees(form, drawn(form, rows, tokens))
    assert form.eps is None or rotated_heads.proven(form)


@needs_compiler
@pytest.mark.parametrize("off", [0, 1])
def test_a_rotation_alone_has_to_have_the_same_bits(
    off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof sees one bit of one number."""

    def ours(x: mx.array, dims: int, *, offset: mx.array, **options: Any) -> mx.array:
        heads = x.transpose(0, 2, 1, 3)
        alone = BARE._replace(heads=heads.shape[2], key_heads=heads.shape[2])
        turned = rotated_heads.rotated(alone, heads, heads, (), offset)[0]
        bits = turned.view(mx.uint16)
        bits[2, 0, 1, 5] += off
        return bits.view(mx.bfloat16)

    monkeypatch.setattr(mx.fast, "rope", ours)
    assert rotated_heads.proven(BARE) == (off == 0)


@needs_compiler
def test_a_token_has_the_same_bits_beside_others() -> None:
    """In another row, or as a later token of a verification."""
    given = drawn(WHOLE, 2, 3)
    whole = rotated_heads.rotated(WHOLE, given.q, given.k, given.norms, given.offset)
    alone = rotated_heads.rotated(
        WHOLE, given.q[1:, 2:], given.k[1:, 2:], given.norms, given.offset[1:] + 2
    )
    for one, other in zip(whole, alone, strict=True):
        assert mx.array_equal(one[1:, :, 2:], other)


def by_operations(
    form: Form, q: mx.array, k: mx.array | None, norms: Any, offset: mx.array
) -> list[mx.array]:
    """What the kernel computes, in any type."""
    if k is None:
        heads = q.reshape(*q.shape[:2], -1, form.size)
        ends = form.heads, form.heads + form.key_heads
        q, k, v = mx.split(heads, ends, axis=2)
        both = by_operations(form, q, k, norms, offset)
        return [*both, v.transpose(0, 2, 1, 3)]
    return [
        mx.fast.rope(
            (
                x
                if norm is None or form.eps is None
                else mx.fast.rms_norm(x, norm, form.eps)
            ).transpose(0, 2, 1, 3),
            form.rotated,
            traditional=form.traditional,
            base=form.base,
            scale=form.scale,
            offset=offset,
        )
        for x, norm in zip((q, k), norms or (None, None), strict=True)
    ]


@needs_compiler
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5"]
)
@pytest.mark.parametrize("joins", [False, True])
def test_models(
    architecture: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different lengths, by a model whose heads are large enough.

    Where one product makes queries, keys and values, the kernel reads it.
    """
    model: Any = build(
        architecture,
        head_dim=64,
        rope_parameters={"type": "default", "rope_theta": 1e4,
                         "partial_rotary_factor": 1.0},
    )  # fmt: skip
    forms = {rotated_heads.form_of(layer) for layer in rotated_heads._layers(model)}
    assert forms
    assert None not in forms
    right = tokens_of(model)
    monkeypatch.setattr(rotated_heads.proven, "verdicts", dict.fromkeys(forms, True))
    # The kernel is for 16 bits; here its place is taken in float32.
    calls: list[Form] = []
    whole: list[bool] = []

    def counted(form: Form, *given: Any) -> list[mx.array]:
        calls.append(form)
        whole.append(given[1] is None)
        return by_operations(form, *given)

    monkeypatch.setattr(rotated_heads, "rotated", counted)
    for _ in range(2):  # a second time changes nothing
        monkeypatch.setattr(Form, "known", True)
        rotated_heads.take_heads(model)
    if joins:
        model.eval()
        join_products(model)
    assert mx.allclose(tokens_of(model), right, atol=1e-4)
    assert set(calls) == forms
    gated = architecture == "qwen3_5"  # whose queries have gates among them
    assert all(read == (joins and not gated) for read in whole)
    number = len(calls)
    twin = separated(model)
    assert not any(isinstance(m, rotated_heads._OneKernel) for m in twin.modules())
    tokens_of(twin)
    model(mx.array([[1, 2]]))  # without caches
    usual_calls(model)
    tokens_of(model)
    assert len(calls) == number


@pytest.mark.parametrize("traditional", [False, True])
def test_draft_heads(traditional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the packaged head's kind; one with gates or sinks is left alone."""
    sizes = LayerSizes(
        hidden_size=96, intermediate_size=8, num_layers=1, num_heads=3, num_kv_heads=1,
        head_dim=64, rope_traditional=traditional,
    )  # fmt: skip
    layer = HeadAttention(sizes, 96)
    layer.eval()
    form = rotated_heads.form_of(layer)
    assert form is not None
    assert form.traditional is traditional
    for other in replace(sizes, gated=True), replace(sizes, sinks=True):
        assert rotated_heads.form_of(HeadAttention(other, 96)) is None
    x = mx.random.normal((2, 3, 96), key=mx.random.key(1))

    def attended() -> mx.array:
        cache = BatchKVCache([0, 1])
        return layer(x, cache.make_mask(3, return_array=True), cache)

    right = attended()
    monkeypatch.setattr(rotated_heads.proven, "verdicts", {form: True})
    monkeypatch.setattr(rotated_heads, "rotated", by_operations)
    rotated_heads.take_heads(layer)
    assert isinstance(layer, rotated_heads._OneKernel)
    assert mx.allclose(attended(), right, atol=1e-5)


def tokens_of(model: Any) -> mx.array:
    """Logits of three tokens of two rows, the second of which is padded."""
    caches = model.make_cache() if hasattr(model, "make_cache") else None
    layers = caches or [None] * len(model.layers)
    made: list[Any] = [
        BatchKVCache([0, 1]) if c is None or hasattr(c, "keys") else c for c in layers
    ]
    logits: mx.array = model(mx.array([[1, 2, 3], [0, 4, 5]]), cache=made)
    return logits


FAULTS = {
    "keys as queries": ("of_query = head < H,", "of_query = head < all,"),
    "the norm of queries for keys": ("q_norm : k_norm", "q_norm : q_norm"),
    "another token's position": ("offset[row] + token", "offset[row]"),
    "another row's position": ("offset[row] + token", "offset[0] + token"),
    "the other direction": ("first * c - second * s", "first * c + second * s"),
    "another token's place": ("(place + token) * D + place_of", "place * D + place_of"),
    "the other kind of pairs": ("!PAIRS ||", "PAIRS ||"),
    "values that rotate": ("if (of_value) {", "if (false) {"),
    "another token's value": ("(place + token) * D + i", "place * D + i"),
    "keys in the place of values": ("of_value ? H + KV : H,", "H,"),
    "neighbours that rotate together": ("/ HALF;", "/ (2 * HALF);"),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The proof that runs on the device finds them, too."""
    plant(monkeypatch, rotated_heads, "SOURCE", *FAULTS[name])
    try:
        assert "value" in name or not agrees(PART, drawn(PART))
        assert not rotated_heads._agrees(PART)
    except KernelFault:
        return
