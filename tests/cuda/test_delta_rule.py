"""The delta rule by one kernel: its source, run on the CPU, against formulas."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gated_delta

from specdec.cuda import delta_rule, kernels
from specdec.cuda.attention_patch import usual_calls
from specdec.cuda.delta_rule import Form, Inputs
from tests.cuda.emulation.cuda import emulated, needs_compiler
from tests.models.architectures import build

VECTOR = Form(mx.float32, mx.float32, 32, 32, True)
SCALAR = Form(mx.float32, mx.float32, 64, 16, False)
HALF = Form(mx.bfloat16, mx.float32, 96, 48, True)
LENGTHS = (1, 15, 16, 17, 40)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delta_rule.proven, "verdicts", {})
    yield from emulated(monkeypatch, delta_rule._kernel, kernels.cuda_kernel)


def exact(inputs: Inputs, mask: mx.array | None = None) -> list[Any]:
    """Outputs and the state by formulas, token by token, in float64."""
    q, k, v, g, beta, state = (
        np.array(a.astype(mx.float32)).astype(np.float64) for a in inputs
    )
    repeats = v.shape[2] // q.shape[2]
    q, k = (np.repeat(a, repeats, axis=2) for a in (q, k))
    g = g if g.ndim > 3 else g[..., None]
    counts = np.ones(q.shape[:2]) if mask is None else np.array(mask)
    outputs = []
    for t in range(q.shape[1]):
        after = state * g[:, t, :, None]
        known = np.einsum("bhvk,bhk->bhv", after, k[:, t])
        delta = (v[:, t] - known) * beta[:, t, :, None]
        after = after + delta[..., None] * k[:, t, :, None]
        which = counts[:, t, None, None]
        outputs.append(np.einsum("bhvk,bhk->bhv", after, q[:, t]) * which)
        state = np.where(which[..., None], after, state)
    return [np.stack(outputs, axis=1), state]


def agrees(form: Form, inputs: Inputs, mask: mx.array | None = None) -> bool:
    most = 2e-5 if form.dtype == mx.float32 else 0.01
    found = delta_rule.scan(inputs, mask)
    return all(
        np.abs(np.array(one.astype(mx.float32)) - other).max()
        <= most * np.abs(other).max()
        for one, other in zip(found, exact(inputs, mask), strict=True)
    )


@needs_compiler
@pytest.mark.parametrize("form", [VECTOR, SCALAR, HALF])
def test_tokens_of_any_number(form: Form) -> None:
    """Random keys, and the same key again and again; rows that are masked."""
    for tokens in LENGTHS:
        inputs = delta_rule.drawn(form, 2, tokens, key_heads=2)
        assert agrees(form, inputs), tokens
        mask = mx.arange(tokens) < mx.array([[tokens // 2], [tokens]])
        assert agrees(form, inputs, mask), tokens
        q, k = (mx.broadcast_to(a[:, :1], a.shape) for a in inputs[:2])
        assert agrees(form, inputs._replace(q=q, k=k)), tokens


@needs_compiler
def test_gates_of_any_size() -> None:
    """Of 0, which forgets a channel, and of 1."""
    inputs = delta_rule.drawn(VECTOR, 1, 20)
    channels = mx.arange(32) % 3
    g = mx.where(channels == 0, 0.0, mx.where(channels == 1, 1.0, inputs.g))
    assert agrees(VECTOR, inputs._replace(g=g))


@needs_compiler
def test_a_token_has_the_same_bits_in_any_parts() -> None:
    """The bits of a row depend neither on steps nor on rows beside it."""
    inputs = delta_rule.drawn(HALF, 3, 40)
    y, after = delta_rule.scan(inputs)
    for step in (1, 7, 16):
        state, outputs = inputs[-1][1:2], []
        for begin in range(0, 40, step):
            q, k, v, g, beta = (a[1:2, begin : begin + step] for a in inputs[:-1])
            output, state = delta_rule.scan(Inputs(q, k, v, g, beta, state))
            outputs.append(output)
        assert mx.array_equal(mx.concatenate(outputs, axis=1)[0], y[1])
        assert mx.array_equal(state[0], after[1])


@needs_compiler
@pytest.mark.parametrize(
    ("vector", "options"),
    [(True, {}), (True, {"lower_bound": -5.0}), (False, {"allow_neg_eigval": True})],
)
def test_update_is_mlx_lm_s(vector: bool, options: dict[str, Any]) -> None:
    """Gates, beta up to 2, no state yet, and a model that trains."""
    form = Form(mx.float32, mx.float32, 32, 32, vector)
    assert delta_rule.proven(form)
    q, k, v, a, b, state = delta_rule.drawn(form, 2, 18)
    shape = (2, 32) if vector else (2,)
    a_log = mx.random.normal((2, 1) if vector else (2,), key=mx.random.key(1))
    bias = mx.random.normal(shape, key=mx.random.key(2))
    mask = mx.arange(18) < mx.array([[18], [11]])
    for held, which in ((None, None), (state, mask)):
        for use_kernel in (True, False):
            found, right = (
                how(q, k, v, a, b, a_log, bias, held, which, use_kernel=use_kernel,
                    **options)
                for how in (delta_rule.update, gated_delta.gated_delta_update)
            )  # fmt: skip
            counts = True if which is None else which[..., None, None]
            assert mx.allclose(found[0] * counts, right[0] * counts, atol=1e-5)
            assert mx.allclose(found[1], right[1], atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(
    "architecture", ["bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid"]
)
def test_models(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose form is read wrongly, or that call mlx-lm's function still."""
    model = build(architecture)
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]])
    right = model(ids)
    forms = {form for _, form in delta_rule._layers(model)}
    assert forms
    monkeypatch.setattr(Form, "known", True)
    monkeypatch.setattr(delta_rule.proven, "verdicts", dict.fromkeys(forms, True))
    calls: list[Form] = []

    def counted(inputs: Inputs, mask: mx.array | None) -> tuple[mx.array, mx.array]:
        q, _, v, g, beta, _ = inputs
        sizes = q.shape[-1], v.shape[-1]
        calls.append(Form(q.dtype, beta.dtype, *sizes, g.ndim > 3))
        return delta_rule.looped(inputs, mask)

    monkeypatch.setattr(delta_rule, "scan", counted)
    delta_rule.take_delta_rules(model)
    assert mx.allclose(model(ids), right, atol=1e-4)
    assert set(calls) == forms
    pickle.loads(pickle.dumps(type(model)))
    number = len(calls)
    usual_calls(model)
    model(ids)
    assert len(calls) == number


def test_other_layers_have_no_such_rule() -> None:
    """Qwen's layers, which have their own kernel, and attention."""
    assert not delta_rule.proofs_of(build("qwen3_5"))
    assert not delta_rule.proofs_of(nn.Linear(2, 2))
