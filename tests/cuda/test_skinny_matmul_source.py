"""The source of the kernel for products of few rows, run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from specdec.cuda import kernels, skinny_matmul
from specdec.cuda.kernels import TYPES
from tests.cuda.emulation.cuda import (
    emulated,
    needs_compiler,
    plant,
)

pytestmark = needs_compiler

# Columns of which each of many warps has some, and some of them more in a second turn.
LONG = 2112
# Few warps share the rows of a matrix that has many.
HIGH = 400


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(skinny_matmul.proven, "verdicts", {})
    yield from emulated(monkeypatch, skinny_matmul._kernel, kernels.cuda_kernel)


def drawn(*shape: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def rounded_once(
    found: mx.array, x: mx.array, weight: mx.array, bias: mx.array | None
) -> bool:
    """Whether it is the product, but for one rounding and float32's sums."""
    exact, most = (
        f(x.astype(mx.float32)).astype(np.float64)
        @ f(weight.astype(mx.float32)).astype(np.float64).T
        for f in (np.array, lambda a: np.abs(np.array(a)))
    )
    if bias is not None:
        exact = exact + np.array(bias.astype(mx.float32))
    half_unit = 2**-8 if x.dtype == mx.bfloat16 else 2**-11
    off = np.abs(np.array(found.astype(mx.float32)) - exact)
    # Not the other way round: NaN is no agreement.
    return bool((off <= half_unit * np.abs(exact) * 1.001 + 1e-6 * most).all())


def agrees(rows: int, columns: int, length: int, dtype: mx.Dtype, bias: bool) -> bool:
    """Of three stacked matrices: a column beyond the last has a place then."""
    x = drawn(rows, length, dtype=dtype)
    weight = drawn(columns, length, dtype=dtype, seed=1)
    added = drawn(columns, dtype=dtype, seed=2) if bias else None
    found = skinny_matmul.parts(x, weight, added, (1, 2, columns))
    return rounded_once(mx.concatenate(found, axis=-1), x, weight, added)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_product_of_any_number_of_rows(dtype: mx.Dtype) -> None:
    for rows in (*range(1, 71), 131):
        columns = (8, 16, 21, 40)[rows % 4]
        assert agrees(rows, columns, 96, dtype, bias=rows % 3 > 0), rows


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_product_with_a_high_matrix(dtype: mx.Dtype) -> None:
    for rows in (1, 7, 8, 9, 16, 23, 31, 33, 64, 65, 70, 131):
        columns = HIGH + rows % 4 * 5
        assert agrees(rows, columns, 96, dtype, bias=rows % 3 > 0), rows
    assert agrees(3, 2176, 544, dtype, bias=True)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_long_rows(dtype: mx.Dtype) -> None:
    for rows in (1, 9, 17, 33, 65):
        for length in (32, 512, 544, LONG):
            assert agrees(rows, 17, length, dtype, rows % 4 == 1), (rows, length)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(mx.bfloat16, (41, 608)), (mx.bfloat16, (HIGH, 64)), (mx.float16, (41, 96))],
)
def test_parts_have_the_same_bits(dtype: mx.Dtype, size: tuple[int, int]) -> None:
    weight, most = drawn(*size, dtype=dtype), size[0]
    for rows, bias in ((1, None), (12, weight[:, 0]), (70, weight[:, 0])):
        x = drawn(rows, size[1], dtype=dtype, seed=1)
        whole = skinny_matmul.product(x, weight, bias)
        for ends in ((24, most), (8, 11, most), (8, 16, 17, 32, most)):
            found = skinny_matmul.parts(x[None], weight, bias, ends)
            sizes = np.diff((0, *ends)).tolist()
            assert [part.shape for part in found] == [(1, rows, n) for n in sizes]
            assert mx.array_equal(mx.concatenate(found, axis=-1)[0], whole)


@pytest.mark.parametrize("size", [(19, LONG), (HIGH, 96)])
def test_a_row_s_bits_do_not_depend_on_what_is_beside_it(size: tuple[int, int]) -> None:
    x, weight = drawn(70, size[1]), drawn(*size, seed=1)
    everything = skinny_matmul.product(x, weight, None)
    for rows in (1, 8, 9, 24, 40):
        for first in (0, 70 - rows):
            found = skinny_matmul.product(x[first : first + rows], weight, None)
            assert mx.array_equal(found, everything[first : first + rows]), rows


@pytest.mark.parametrize("dtype", TYPES)
def test_proven(dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of one type; of the other, whose bound differs, the narrowest."""
    if dtype != mx.bfloat16:
        monkeypatch.setattr(skinny_matmul, "_HEIGHTS", skinny_matmul._HEIGHTS[:1])
    assert skinny_matmul.proven(dtype)


@pytest.mark.parametrize(
    ("fault", "height"),
    [
        ("WARPS == 4", 0),
        ("WARPS == 16", 0),
        *((f"WIDE == {wide}", height) for height, wide in enumerate((1, 2, 4))),
        ("WIDE == 4 && WARPS == 4", 2),
        ("!together", 0),
    ],
)
def test_what_is_wrong_with_some_kernels_is_not_proven(
    monkeypatch: pytest.MonkeyPatch, fault: str, height: int
) -> None:
    """Few warps share the rows of some matrices, many those of others.

    Each fault is looked for at the height whose kernel has it.
    """
    heights = skinny_matmul._HEIGHTS[height : height + 1]
    monkeypatch.setattr(skinny_matmul, "_HEIGHTS", heights)
    new = f"float sum = {fault} ? 1.0f : 0.0f;"
    plant(monkeypatch, skinny_matmul, "_SOURCE", "float sum = 0.0f;", new)
    assert not skinny_matmul.proven(mx.bfloat16)


def test_one_type_does_not_prove_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only float16 has no 70,000: the fault is of its kernels alone."""
    new = "float sum = static_cast<float>(static_cast<T>(7e4f)) > 1e9f ? 1.0f : 0.0f;"
    plant(monkeypatch, skinny_matmul, "_SOURCE", "float sum = 0.0f;", new)
    assert agrees(3, 40, 96, mx.bfloat16, bias=True)
    assert not skinny_matmul.proven(mx.float16)


@pytest.mark.parametrize("offset", [4, 8, 3])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_view_of_one_row_begins_anywhere(dtype: mx.Dtype, offset: int) -> None:
    """MLX does not copy it: 16 bytes cannot be loaded at once."""
    base = drawn(1, 1, 96 + 8, dtype=dtype)
    x, weight = base[..., offset : offset + 96], drawn(48, 96, dtype=dtype, seed=1)
    aligned = mx.array(np.array(x.astype(mx.float32))).astype(dtype)
    found = skinny_matmul.product(x, weight, None)
    assert rounded_once(found, x, weight, None)
    assert mx.array_equal(found, skinny_matmul.product(aligned, weight, None))
    flat = drawn(48 * 96 + 8, dtype=dtype, seed=1)
    of_view = flat[offset : offset + 48 * 96].reshape(48, 96)
    assert rounded_once(skinny_matmul.product(x, of_view, None), x, of_view, None)


def test_a_product_of_another_type_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TYPES", {mx.bfloat16: "f16"})
    assert not agrees(3, 16, 64, mx.bfloat16, bias=False)
