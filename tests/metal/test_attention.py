"""The Metal kernel for attention of few queries, in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from specdec.cuda import attention_patch
from specdec.cuda.attention_patch import attending_by
from specdec.metal import attention
from specdec.metal.attention import Form
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant

from . import emulation

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # As if a threadgroup took fewer keys: its pieces are what is tried.
    monkeypatch.setattr(attention, "SPAN", 96)
    yield from emulated(
        monkeypatch, attention._kernel, metal_kernel=emulation.metal_kernel
    )


@pytest.mark.parametrize(
    "form",
    [
        Form(64, 4, 2, mx.float32),
        Form(128, 9, 3, mx.bfloat16),
        Form(192, 3, 1, mx.float16),
        Form(256, 2, 2, mx.bfloat16),
        Form(64, 4, 2, mx.float32, 8, 32),
        Form(128, 9, 3, mx.bfloat16, 4, 64),
        Form(192, 3, 1, mx.float16, 4, 32),
    ],
)
def test_attention_is_right(form: Form) -> None:
    """One tile and two, one piece and several, rows of different lengths."""
    assert attention.faults(form, (3,) if form.bits else (1, 3, 6)) == ""


def test_a_query_has_the_same_bits_whatever_is_beside_it() -> None:
    """Alone, among the tokens of a verification, or in a batch."""
    q, k, v = (
        mx.random.normal((2, h, n, 64), key=mx.random.key(h))
        for h, n in ((6, 5), (2, 90), (2, 90))
    )
    sees = mx.random.uniform(shape=(2, 1, 5, 90), key=mx.random.key(1)) < 0.7
    whole = attention.attention(q, k, v, 0.125, sees)
    for row in range(2):
        one = slice(row, row + 1)
        for token in range(5):
            part = slice(token, token + 1)
            alone = attention.attention(
                q[one, :, part], k[one], v[one], 0.125, sees[one, :, part]
            )
            assert mx.array_equal(alone[0, :, 0], whole[row, :, token])


def test_a_query_that_sees_nothing_has_nothing() -> None:
    """In one piece and in several; others are not touched."""
    for columns in (90, 200):
        q, k = mx.ones((1, 2, 2, 64)), mx.ones((1, 2, columns, 64))
        sees = mx.array([False, True])[None, None, :, None]
        sees = mx.broadcast_to(sees, (1, 1, 2, columns)) * 1 > 0
        found = attention.attention(q, k, k * 3, 0.125, sees)
        assert mx.array_equal(found[0, :, 0], mx.zeros((2, 64)))
        assert mx.allclose(found[0, :, 1], mx.full((2, 64), 3.0))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tops[p][tile] - (top == NONE", "tops[0][tile] - (top == NONE"),
        ("metal::min(begin + row, L - 1)", "(begin + row)"),
        ("bool sees = at < end;", "bool sees = at <= end;"),
        ("at <= L - S + tokens[r][i]", "at < L - S + tokens[r][i]"),
        ("tokens[r][i] * mask_strides[2]", "tokens[r][0] * mask_strides[2]"),
        ("batch * mask_strides[0]", "0 * mask_strides[0]"),
        ("metal::fma(total[r][i], shrunk, chance)", "total[r][i] + chance"),
        ("results[u][r].thread_elements()[i] *= shrunk", ""),
        ("best[r][i] - (top == NONE", "top - (top == NONE"),
        ("if (r >= rows) continue;", ""),
        ("(row >> 1) * (D / 4) + 4 * f", "(row >> 1) * (D / 4) + 2 * f"),
        ("const int d = row * EIGHTH", "const int d = column * EIGHTH"),
        ("H + kv * heads + r % heads;", "H + kv * heads + r / S;"),
        ("r / heads * q_strides[2]", "r % S * q_strides[2]"),
        ("WIDE = D + 4", "WIDE = D - 4"),
        ("  threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n\n  int", "  int"),
    ],
)
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """By the emulator, or by the proof that a machine runs."""
    plant(monkeypatch, attention, "SOURCE", old, new)
    try:
        found = attention.faults(Form(64, 6, 2, mx.float32), (3,))
    except KernelFault as fault:
        found = str(fault)
    assert found


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("HEADER", ">> (d * BITS % 32)", ">> 0"),
        ("HEADER", "float(scales[d / GROUP])", "float(scales[0])"),
        ("HEADER", "float(four >> 2 * BITS & ones)", "float(four >> 2 * BITS)"),
        ("SOURCE", "value_biases = v_biases + v_at", "value_biases = v_biases"),
        ("SOURCE", "key_scales + key * k_scales_strides[2]", "key_scales"),
    ],
)
def test_planted_faults_of_packed_keys_are_found(
    monkeypatch: pytest.MonkeyPatch, text: str, old: str, new: str
) -> None:
    plant(monkeypatch, attention, text, old, new)
    assert attention.faults(Form(64, 4, 2, mx.float32, 4, 32), (2,))


def test_what_is_not_proven_is_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of queries, short rows, other bits, added masks, sinks."""
    form, packed = Form(64, 4, 2, mx.float32), Form(64, 4, 2, mx.float32, 4, 32)
    some = frozenset({2, 3})
    monkeypatch.setattr(attention, "tokens_of", {form: some, packed: some})
    monkeypatch.setattr(attention, "FEWEST_COLUMNS", 40)
    calls: list[str] = []
    monkeypatch.setattr(attention, "attention", lambda *_: calls.append("ours"))
    monkeypatch.setattr(attention_patch, "_USUAL", lambda *_, **__: calls.append("mlx"))
    q, k = mx.zeros((2, 4, 2, 64)), mx.zeros((2, 2, 40, 64))
    mask, cache = mx.ones((2, 1, 2, 40), mx.bool_), object()

    def ours(q: mx.array, k: Any, v: Any, **given: Any) -> bool:
        given = {"cache": cache, "scale": 1.0, **given}
        attending_by(attention)(q, k, v, **given)
        return calls.pop() == "ours"

    assert ours(q, k, k, mask=mask)
    assert ours(q, k, k, mask=mx.repeat(mask, 4, axis=1))
    assert ours(q, k, k, mask="causal")
    assert not ours(q, k, k, mask=None)
    assert not ours(q, k, k, mask=mask.astype(mx.float32))
    assert not ours(q, k, k, mask=mask, sinks=mx.zeros((4,)))
    assert not ours(q, k, k, mask=mask, cache=None)
    assert not ours(q[:, :, :1], k, k, mask=mask[:, :, :1])
    assert not ours(q, k[:, :, :39], k[:, :, :39], mask=mask[..., :39])
    assert ours(q, packed.packed(k), packed.packed(k), mask=mask)
    other = packed._replace(bits=8).packed(k)
    assert not ours(q, other, other, mask=mask)
    assert not ours(q, packed.packed(k), other, mask=mask)
    assert not ours(q.astype(mx.bfloat16), k, k, mask=mask)
