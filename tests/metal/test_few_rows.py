"""The Metal kernel for products of few rows, in the emulator."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec.metal import few_rows
from specdec.metal.few_rows import FewRowsEmbedding, FewRowsLinear, Kind
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant

from . import emulation

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(
        monkeypatch, few_rows._kernel, metal_kernel=emulation.metal_kernel
    )


def matrix(kind: Kind) -> tuple[Sequence[mx.array], mx.array]:
    """A packed matrix, and the same unpacked in float32."""
    dense = mx.random.normal((kind.columns, kind.length), key=mx.random.key(7))
    packed = mx.quantize(dense.astype(kind.dtype), kind.group_size, kind.bits)
    scales, biases = (p.astype(mx.float32) for p in packed[1:])
    return packed, mx.dequantize(packed[0], scales, biases, kind.group_size, kind.bits)


@pytest.mark.parametrize("dtype", few_rows.DTYPES)
@pytest.mark.parametrize("bits", few_rows.BITS)
@pytest.mark.parametrize("group_size", few_rows.GROUPS)
def test_products_are_right_and_rows_keep_their_bits(
    dtype: mx.Dtype, bits: int, group_size: int
) -> None:
    """A wrong number, a read beyond an array, a race, or a row that sees another."""
    # Columns that fill no tile, and groups that the pieces cannot share equally.
    kind = Kind(bits, group_size, dtype, 43, group_size * 5)
    assert few_rows.faults(kind, (2, 8, 9, 16)) == ""


def test_rows_keep_their_bits_in_any_place_and_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hardware may add up a matrix product in another order, the same for all."""
    backwards = partial(emulation.metal_kernel, flags=("-DSUMS_BACKWARDS",))
    monkeypatch.setattr(mx.fast, "metal_kernel", backwards)
    rng, kind = random.Random(1), Kind(4, 64, mx.bfloat16, 24, 640)
    packed, dense = matrix(kind)
    x = mx.random.normal((16, 640), key=mx.random.key(1)).astype(kind.dtype)
    compute = partial(few_rows.product, packed=packed, bits=4, group_size=64)
    whole = compute(x)
    right = x.astype(mx.float32) @ dense.T
    assert mx.abs(whole - right).max() < 0.01 * mx.abs(right).max()
    for count in (2, 7, 11):
        some = mx.array(rng.sample(range(16), count))
        assert mx.array_equal(compute(x[some]), whole[some])


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("columns", [1, 3])
def test_other_geometries_are_right(pieces: int, columns: int) -> None:
    """What a later chip may want must not be wrong."""
    kind = Kind(8, 32, mx.float32, 50, 160)
    packed, dense = matrix(kind)
    x = mx.random.normal((2, 3, 160), key=mx.random.key(2))
    found = few_rows.product(
        x, packed, bits=8, group_size=32, pieces=pieces, columns=columns
    )
    right = x @ dense.T
    assert found.shape == right.shape
    assert mx.abs(found - right).max() < 1e-5 * mx.abs(right).max()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("threadgroup_barrier(metal::mem_flags::mem_threadgroup);", ""),
        ("metal::min(8 * r + column + i, M - 1)", "(8 * r + column + i)"),
        ("metal::min(first + 8 * c + row, N - 1)", "(first + 8 * c + row)"),
        ("m < M && first + n < N", "m < M"),
        ("8 * r + column + j][8 * c + row]", "8 * r + row][8 * c + column + j]"),
        ("total += metal::simd_shuffle_xor(total, 16);", ""),
        ("parts[P][8 * MT][8 * CT]", "parts[P][8 * MT - 1][8 * CT]"),
        ("const device T* scale_of", "const T* scale_of"),
        ("(row & 1) * 4", "(row & 1) * 8"),
        ("for (int p = 1; p < P; ++p)", "for (int p = 1; p < P; p += 2)"),
        ("(piece + 1) * groups / P", "(piece + 1) * (groups / P)"),
        ("float(bias_of[c][g]), total,", "float(bias_of[c][g]), totals[r][j],"),
        # Another row's numbers, added to this row's by no more than rounding.
        ("totals[r][j] +=\n", "totals[r][j] += 1e-6f * float(part[MT - 1][j][0]) +\n"),
    ],
)
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """By the emulator, or by the proof that a machine runs."""
    plant(monkeypatch, few_rows, "SOURCE", old, new)
    kind = Kind(4, 64, mx.float32, 43, 64 * 5)
    try:
        found = few_rows.faults(kind, (2, 8, 9, 16))
    except KernelFault as fault:
        found = str(fault)
    assert found


class TestLayers:
    """Layers call the kernel for the rows that a machine has proven, and no others."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        seen: list[int] = []
        right = few_rows.product

        def product(x: mx.array, *args: Any, **how: Any) -> mx.array:
            seen.append(x.size // x.shape[-1])
            return right(x, *args, **how)

        monkeypatch.setattr(few_rows, "product", product)
        monkeypatch.setattr(few_rows, "rows_of", {})
        return seen

    def test_rows(self, calls: list[int]) -> None:
        layer = nn.QuantizedLinear(128, 40, bias=True, group_size=32, bits=4)
        layer.bias = mx.random.normal((40,))
        layer.eval()
        ours: Any = FewRowsLinear.__new__(FewRowsLinear)
        dict.update(ours, layer)
        vars(ours).update(vars(layer))
        kind = Kind.of(ours)
        assert kind is not None
        x = mx.random.normal((2, 5, 128))
        for rows in (frozenset[int](), frozenset(range(9, 17))):
            few_rows.rows_of[kind] = rows
            assert mx.allclose(ours(x), layer(x), atol=1e-5)
        assert calls == [10]
        ours(x[:1])
        ours.train()
        ours(x)
        assert calls == [10]

    def test_an_output_layer(self, calls: list[int]) -> None:
        layer = FewRowsEmbedding(40, 128, group_size=64, bits=8)
        layer.eval()
        kind = Kind.of(layer)
        assert kind is not None
        few_rows.rows_of[kind] = frozenset({3})
        x = mx.random.normal((1, 3, 128))
        right = nn.QuantizedEmbedding.as_linear(layer, x)
        assert mx.allclose(layer.as_linear(x), right, atol=1e-5)
        assert calls == [3]

    @pytest.mark.parametrize(
        "how", [{"bits": 3}, {"mode": "mxfp4", "group_size": 32, "bits": 4}]
    )
    def test_other_packings_are_left_to_mlx(self, how: dict[str, Any]) -> None:
        assert Kind.of(nn.QuantizedLinear(128, 40, bias=False, **how)) is None
