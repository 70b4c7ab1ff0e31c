"""The source of the kernel for attention of few queries, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.cuda import decode_attention, decode_attention_source, kernels
from tests.cuda.emulation.cuda import (
    KernelFault,
    Strided,
    emulated,
    needs_compiler,
    plant,
)

from .test_decode_attention import (
    alone_the_same,
    drawn,
    reference,
    visible,
)

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(monkeypatch, decode_attention._kernel, kernels.cuda_kernel)


def close(found: mx.array, exact: mx.array) -> bool:
    """Equal but for the rounding of the shares, and of the result."""
    unit = 2**-8 if found.dtype == mx.bfloat16 else 2**-11
    off = mx.abs(found.astype(mx.float32) - exact.astype(mx.float32)).max()
    # Not the other way round: NaN is no agreement.
    return bool((off <= 4 * unit * mx.abs(exact.astype(mx.float32)).max()).item())


# Rows, queries, columns, heads, key heads.
SIZES = (
    (1, 1, 700, 6, 2),
    (1, 2, 5, 6, 2),
    (2, 5, 150, 12, 2),
    (1, 3, 300, 4, 4),
    (3, 2, 17, 9, 3),
    (1, 16, 140, 32, 1),
)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (64, mx.float16),
        *((size, mx.bfloat16) for size in decode_attention.SIZES),
    ],
)
def test_attention_with_any_mask(size: int, dtype: mx.Dtype) -> None:
    for rows, tokens, held, heads, kv in SIZES:
        q, k, v = drawn(rows, heads, kv, tokens, held, size, dtype)
        seen = visible(rows, tokens, held)
        added = mx.where(seen, 0.0, -mx.inf).astype(dtype)
        for mask in (seen, seen[:1], added, "causal", *[None] * (tokens == 1)):
            exact = reference(q, k, v, 0.1, mask)
            found = decode_attention.attention(q, k, v, 0.1, mask)
            assert found.shape == q.shape
            assert close(found, exact), (rows, tokens, held, heads, kv)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("size", [64, 256])
def test_blocks_share_the_keys_of_long_rows(
    monkeypatch: pytest.MonkeyPatch, size: int, dtype: mx.Dtype
) -> None:
    monkeypatch.setattr(decode_attention, "SPAN", 128)
    for rows, tokens, held, heads, kv in ((1, 1, 300, 6, 2), (3, 5, 257, 12, 2)):
        q, k, v = drawn(rows, heads, kv, tokens, held, size, dtype)
        seen = visible(rows, tokens, held)
        # A row that sees nothing of the first piece, one nothing of the last.
        seen = seen & (
            mx.arange(held) >= (140 * (mx.arange(rows) == 1))[:, None, None, None]
        )
        added = mx.where(seen, 0.0, -mx.inf).astype(dtype)
        for mask in (seen, added, "causal"):
            exact = reference(q, k, v, 0.1, mask)
            found = decode_attention.attention(q, k, v, 0.1, mask)
            assert close(found, exact), (rows, tokens, held)


def test_bits_do_not_depend_on_whether_blocks_share_keys() -> None:
    """A row that needs no second block has the same, read beside a longer one."""
    held = decode_attention.SPAN
    q, k, v = drawn(1, 6, 2, 3, held + 256, 64, mx.bfloat16)
    seen = visible(1, 3, held) & (mx.arange(held) < 900)
    alone = decode_attention.attention(q, k[:, :, :held], v[:, :, :held], 0.1, seen)
    wider = mx.concatenate([seen, mx.zeros((1, 1, 3, 256), mx.bool_)], axis=-1)
    assert mx.array_equal(decode_attention.attention(q, k, v, 0.1, wider), alone)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("SOURCE", "at_piece = piece * queries + row", "at_piece = row"),
        ("SOURCE", "= peak[in_tile]", "= 0.0f"),
        ("SOURCE", "1] = whole[in_tile]", "1] = 1.0f"),
        ("SOURCE", "results[at_piece * D", "results[row * D"),
        ("SOURCE", "results + pieces * queries * D", "results + queries * D"),
        ("GATHER", "top = fmaxf(top, seen[(p * rows + row) * 2])", "top = -1e30f"),
        ("GATHER", "total += share *", "total +="),
        ("GATHER", "sum += share *", "sum +="),
        ("GATHER", "* 2 + 1]", "* 2]"),
        ("GATHER", "at >= rows * D", "at > rows * D"),
        ("SOURCE", "blockIdx.z % pieces", "blockIdx.z / pieces"),
        ("SOURCE", "begin = piece * SPAN + warp * 16", "begin = warp * 16"),
        ("SOURCE", "min(L, (piece + 1) * SPAN)", "L"),
    ],
)
def test_faults_of_sharing_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str
) -> None:
    plant(monkeypatch, decode_attention_source, name, old, new)
    monkeypatch.setattr(decode_attention, "SPAN", 128)
    # No whole number of blocks gathers so many numbers.
    q, k, v = (3 * x for x in drawn(2, 3, 1, 3, 300, 64, mx.float16))
    mask = visible(2, 3, 300)
    with suppress(KernelFault):
        found = decode_attention.attention(q, k, v, 0.5, mask)
        assert not close(found, reference(q, k, v, 0.5, mask))


def test_a_mask_that_adds_numbers() -> None:
    q, k, v = drawn(2, 6, 2, 3, 40, 64, mx.bfloat16)
    mask = mx.random.normal((2, 1, 3, 40), key=mx.random.key(9)).astype(mx.bfloat16)
    found = decode_attention.attention(q, k, v, 0.1, mask)
    assert close(found, reference(q, k, v, 0.1, mask))


def test_a_scale_of_any_kind() -> None:
    q, k, v = drawn(1, 4, 2, 3, 40, 64, mx.bfloat16)
    found = decode_attention.attention(q, k, v, 0.5, "causal")
    scale: Any = np.float32(0.5)
    assert mx.array_equal(decode_attention.attention(q, k, v, scale, "causal"), found)


@pytest.mark.parametrize(
    ("size", "dtype"), [(64, mx.float16), (64, mx.bfloat16), (256, mx.bfloat16)]
)
def test_proven(size: int, dtype: mx.Dtype) -> None:
    assert decode_attention._agrees((size, dtype))


def test_a_fault_with_one_size_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = "sum / all", "D == 128 ? 0.0f : sum / all"
    plant(monkeypatch, decode_attention_source, "SOURCE", old, new)
    monkeypatch.setattr(decode_attention.proven, "verdicts", {})
    assert decode_attention.proven((64, mx.bfloat16))
    assert not decode_attention.proven((128, mx.bfloat16))


@pytest.mark.parametrize("mask", ["bool", "added"])
@pytest.mark.parametrize("pieces", [True, False])
def test_each_form_of_the_mask_is_tried(
    mask: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of one form, or where blocks share keys, stands for no kernel at all."""
    fault = f"if (pieces {'>' if pieces else '=='} 1) score[t][i] += at;"
    text = decode_attention_source.MASKS[mask]
    faulty = {**decode_attention_source.MASKS, mask: text + fault}
    monkeypatch.setattr(decode_attention_source, "MASKS", faulty)
    assert not decode_attention._agrees((64, mx.bfloat16))


@pytest.mark.parametrize("size", [64, 128])
def test_a_querys_bits_do_not_depend_on_what_is_beside_it(size: int) -> None:
    """Not on other rows, other tokens, nor on columns after its last one."""
    q, k, v = drawn(2, 6, 2, 5, 384, size, mx.bfloat16)
    seen = visible(2, 5, 384) & (mx.arange(384) < 200)
    whole = decode_attention.attention(q, k, v, 0.1, seen)
    for row, token in ((0, 0), (0, 4), (1, 2)):
        assert alone_the_same(q, k, v, seen, whole, row, token)


def gaps(x: mx.array, between: int, offset: int = 0) -> Any:
    """The same numbers, with others ``between`` every two of them."""
    step = between + 1
    flat = mx.full((x.size * step + offset,), mx.nan).astype(x.dtype)
    flat[offset + step * mx.arange(x.size)] = x.reshape(-1)
    strides = [step * prod(x.shape[i + 1 :]) for i in range(x.ndim)]
    return Strided(flat, x.shape, tuple(strides), offset)


@pytest.mark.parametrize(("between", "offset"), [(0, 0), (0, 8), (0, 3), (1, 0)])
def test_arrays_with_gaps_and_odd_beginnings(between: int, offset: int) -> None:
    """MLX may hand over any view: what cannot be read at once is read singly."""
    q, k, v = (mx.contiguous(x) for x in drawn(1, 4, 2, 3, 40, 64, mx.bfloat16))
    seen = visible(1, 3, 40)
    exact = decode_attention.attention(q, k, v, 0.1, seen)
    for which in range(3):
        inputs: list[Any] = [q, k, v]
        inputs[which] = gaps(inputs[which], between, offset)
        found = decode_attention.attention(inputs[0], inputs[1], inputs[2], 0.1, seen)
        assert mx.array_equal(found, exact), which
    added = mx.where(seen, 0.0, -mx.inf).astype(mx.bfloat16)
    for mask in (seen, added):
        found = decode_attention.attention(q, k, v, 0.1, gaps(mask, between, offset))
        assert mx.array_equal(found, exact), mask.dtype


def test_what_sees_nothing_has_nothing_and_what_is_no_number_stays_so() -> None:
    q, k, v = drawn(2, 4, 2, 2, 40, 64, mx.bfloat16)
    seen = visible(2, 2, 40) & (mx.arange(2) > 0)[:, None, None, None]
    found = decode_attention.attention(q, k, v, 0.1, seen)
    assert mx.all(found[0] == 0)
    assert mx.all(mx.isfinite(found[1]))
    q[1, 0, 0, 5] = mx.nan
    found = decode_attention.attention(q, k, v, 0.1, seen)
    assert mx.all(mx.isnan(found[1, 0, 0]))
    assert mx.all(mx.isfinite(found[1, :, 1]))


FAULTS = {
    "half of a score": ("key[t][c][2], key[t][c][3]);", "key[t][c][0], key[t][c][1]);"),
    "no scale": ("score[t][i] *= static_cast<float>(@SCALE@);", ""),
    "a key more": ("if (at >= L)", "if (at > L)"),
    "keys beyond the last": (
        "begin + t * 8 + group, L - 1)",
        "begin + t * 8 + group, L)",
    ),
    "values beyond the last": ("min(at, L - 1)", "min(at, L)"),
    "no common maximum": ("__shfl_xor_sync(0xffffffffu, top, 2)", "top"),
    "sums not shrunk": ("sums[j][2 * i + 1] *= shrunk;", ""),
    "the total not shrunk": ("total[i] *= shrunk;", ""),
    "shares of another row": (
        "pair(chance[0][2], chance[0][3])",
        "pair(chance[0][0], chance[0][1])",
    ),
    "halves swapped": ("? 0x7632u : 0x5410u", "? 0x5410u : 0x7632u"),
    "values of another key": (
        "i / 2 * 8 + 2 * part + i % 2;\n        const T*",
        "i / 2 * 8 + part + i % 2;\n        const T*",
    ),
    "the token of another row": ("token[i] = r / heads", "token[i] = r % S"),
    "another head": (
        "(kv * heads + r % heads) * q_strides[1]",
        "(r % heads) * q_strides[1]",
    ),
    "the total of one warp": ("exp2f(tops[w][i * 8 + group] - from)", "(w == 0)"),
    "no common total": ("__shfl_xor_sync(0xffffffffu, total[i], 1)", "0.0f"),
    "warps not brought together": ("sums[j][2 * i] *= share;", ""),
    "too soon read": (
        "__syncthreads();\n  #pragma unroll\n  for (int i = 0; i < 2; ++i) {\n    fl",
        "#pragma unroll\n  for (int i = 0; i < 2; ++i) {\n    fl",
    ),
    "too soon written": (
        "      }\n    }\n    __syncthreads();\n  }\n",
        "      }\n    }\n  }\n",
    ),
    "a row more": ("if (r < rows)", "if (r <= rows)"),
    "rows in another order": ("(batch * S + r / heads) * H", "(batch * S + r % S) * H"),
    "always at once": ("return strides[3] == 1 && all % 8 == 0;", "return true;"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, decode_attention_source, "SOURCE", *FAULTS[name])
    q, k, v = (mx.contiguous(3 * x) for x in drawn(2, 6, 2, 7, 150, 128, mx.float16))
    mask = mx.where(visible(2, 7, 150), 0.0, -mx.inf).astype(mx.float16)
    exact = reference(q, k, v, 0.5, mask)
    with suppress(KernelFault):
        right = close(decode_attention.attention(q, k, v, 0.5, mask), exact)
        odd: Any = gaps(k, 1)
        right = right and close(decode_attention.attention(q, odd, v, 0.5, mask), exact)
        assert not right


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("bool", "asks * mask_strides[2]", "0"),
        ("bool", "asks * mask_strides[2]", "asks * mask_shape[3]"),
        ("bool", "batch * mask_strides[0]", "0"),
        ("bool", "at * mask_strides[3]", "at"),
        ("added", "asks * mask_strides[2]", "asks * mask_shape[3]"),
        ("added", "at * mask_strides[3]", "at"),
        ("added", "1.44", "1.0"),
    ],
)
def test_faults_of_masks_are_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, old: str, new: str
) -> None:
    text = decode_attention_source.MASKS[kind]
    assert text.count(old) == 1
    changed = {**decode_attention_source.MASKS, kind: text.replace(old, new)}
    monkeypatch.setattr(decode_attention_source, "MASKS", changed)
    q, k, v = drawn(2, 4, 2, 5, 24, 64, mx.float16)
    some = 3 * mx.random.normal((2, 1, 5, 24), key=mx.random.key(4))
    masks: dict[str, Any] = {
        "bool": visible(2, 5, 24),
        "added": some.astype(mx.float16),
    }
    exact = reference(q, k, v, 0.3, masks[kind])
    right = close(decode_attention.attention(q, k, v, 0.3, masks[kind]), exact)
    if right:
        odd = gaps(masks[kind], 1)
        right = close(decode_attention.attention(q, k, v, 0.3, odd), exact)
    assert not right
