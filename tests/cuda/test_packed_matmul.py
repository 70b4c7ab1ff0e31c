"""The kernel for packed weights: its source run on the CPU, and when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product as product_of
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from specdec.cuda import kernels, packed_matmul, packed_matmul_source
from specdec.cuda.flattened_matmul import flatten_products, slow_pairs
from specdec.cuda.fused_linear import join_products, separated
from specdec.cuda.kernels import TYPES
from specdec.cuda.packed_matmul import BITS, GROUPS, Form, Kind
from tests.cuda.emulation.cuda import emulated, needs_compiler, plant

TinyModel = Callable[..., nn.Module]
Packed = tuple[mx.array, ...]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kept = [
        getattr(packed_matmul, f"_{name}")
        for name in ("kernel", "many_kernel", "arranging", "gathering", "expert_kernel")
    ]
    monkeypatch.setattr(packed_matmul.proven, "verdicts", {})
    yield from emulated(monkeypatch, *kept, kernels.cuda_kernel)


def drawn(*shape: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def packed(columns: int, length: int, bits: int, group: int, dtype: mx.Dtype) -> Packed:
    return tuple(mx.quantize(drawn(columns, length, dtype=dtype, seed=1), group, bits))


def product(
    x: mx.array,
    weight: Packed,
    bias: mx.array | None = None,
    bits: int = 4,
    group: int = 64,
    ends: tuple[int, ...] = (),
) -> list[mx.array]:
    return packed_matmul.product(
        x, weight, bias, bits=bits, group_size=group, ends=ends
    )


def agrees(
    rows: int,
    columns: int,
    length: int,
    bits: int = 4,
    group: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
    *,
    bias: bool = False,
) -> bool:
    """Whether it is the product, but for one rounding and float32's sums.

    Each weight is rounded to ``dtype``, once.
    """
    x, weight = (
        drawn(rows, length, dtype=dtype),
        packed(columns, length, bits, group, dtype),
    )
    added = drawn(columns, dtype=dtype, seed=2) if bias else None
    (found,) = product(x, weight, added, bits, group)
    scales, biases = (a.astype(mx.float32) for a in weight[1:])
    wide = mx.dequantize(weight[0], scales, biases, group, bits)
    wide = wide.astype(dtype).astype(mx.float32)
    dense = np.array(wide).astype(np.float64)
    exact, most = (
        f(x.astype(mx.float32)).astype(np.float64) @ g(dense).T
        for f, g in ((np.array, np.array), (lambda a: np.abs(np.array(a)), np.abs))
    )
    if added is not None:
        exact = exact + np.array(added.astype(mx.float32))
    half_unit = 2**-8 if dtype == mx.bfloat16 else 2**-11
    off = np.abs(np.array(found.astype(mx.float32)) - exact)
    # Not the other way round: NaN is no agreement.
    return bool((off <= half_unit * np.abs(exact) * 1.001 + 2e-6 * most).all())


@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_number_of_rows_and_columns(dtype: mx.Dtype, bits: int, group: int) -> None:
    """Rows, columns, or a turn's columns that are left over are lost, or read twice."""
    for rows, columns, turns in (
        (1, 40, 1), (3, 33, 3), (8, 140, 2), (9, 21, 3), (17, 70, 1),
        (40, 31, 2), (64, 8, 3), (70, 37, 2),
    ):  # fmt: skip
        sizes = rows, columns, group * (2 * turns - 1)
        assert agrees(*sizes, bits, group, dtype, bias=rows % 2 == 1), sizes


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TYPES)
def test_many_rows_by_four_warps_together(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, bits: int
) -> None:
    """Rows, columns or a part of K are left out; a row has other bits than of few."""
    for rows, columns, length, group in (
        (65, 300, 1600, 64), (100, 40, 192, 32), (161, 70, 640, 128), (330, 9, 96, 32)
    ):  # fmt: skip
        weight = packed(columns, length, bits, group, dtype)
        x, bias = drawn(rows, length, dtype=dtype), drawn(columns, dtype=dtype, seed=2)
        with monkeypatch.context() as hopper:
            hopper.setattr(packed_matmul.proven, "reached", lambda form: True)
            assert agrees(rows, columns, length, bits, group, dtype, bias=True)
            (found,) = product(x, weight, bias, bits, group)
        (apart,) = product(x, weight, bias, bits, group)
        assert mx.array_equal(found, apart), rows


@needs_compiler
def test_long_rows_that_blocks_share() -> None:
    """What one of the pieces found is left out, or added twice."""
    assert {packed_matmul.num_pieces(c, 1600, 4) for c in (40, 9000)} == {6, 3}
    for rows, columns in ((2, 40), (12, 300)):
        for bits in BITS:
            assert agrees(rows, columns, 1600, bits, bias=True), (rows, bits)


@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [4, 20])
def test_blocks_begin_anywhere_among_scales(rows: int, bits: int, group: int) -> None:
    """Scales come for eight groups: those of a block's first turns are overwritten."""
    x, weight = drawn(rows, 2048), packed(40, 2048, bits, group, mx.bfloat16)
    turns = packed_matmul.num_turns(2048, bits)
    (whole,) = product(x, weight, bits=bits, group=group)
    # With five blocks of 4 bits, one begins with turn 3; with groups of 64, turn 4 has
    # other scales. More blocks than turns are as many as turns.
    for pieces in (1, 5, turns, turns + 1):
        found = packed_matmul.product(
            x, weight, bits=bits, group_size=group, pieces=pieces
        )
        assert mx.allclose(whole, found[0], rtol=0.01, atol=0.05), pieces


@needs_compiler
@pytest.mark.parametrize(("length", "bits"), [(1600, 4), (192, 8)])
def test_a_row_s_bits_do_not_depend_on_what_is_beside_it(
    length: int, bits: int
) -> None:
    x, weight = drawn(70, length), packed(45, length, bits, 64, mx.bfloat16)
    (everything,) = product(x, weight, bits=bits)
    for rows in (1, 8, 9, 24):
        for first in (0, 70 - rows):
            some = x[first : first + rows]
            (found,) = product(some, weight, bits=bits)
            assert mx.array_equal(found, everything[first : first + rows]), rows


@needs_compiler
def test_nor_where_16_bytes_cannot_be_loaded_at_once() -> None:
    """Of few rows all of K is summed at once, of more in pieces."""
    matrix = [array.reshape(-1) for array in packed(41, 1600, 4, 32, mx.bfloat16)]
    weight = [
        array[array.size // 41 :].reshape(40, array.size // 41) for array in matrix
    ]
    x = drawn(9, 1600)
    (wide,) = product(x, tuple(weight), group=32)
    (narrow,) = product(x[:8], tuple(weight), group=32)
    assert mx.array_equal(wide[:8], narrow)


@needs_compiler
@pytest.mark.parametrize("length", [1600, 128])
def test_parts_have_the_same_bits(length: int) -> None:
    x, weight = drawn(2, 6, length), packed(41, length, 4, 64, mx.bfloat16)
    bias = drawn(41, seed=3)
    (whole,) = product(x, weight, bias)
    for ends in ((24, 41), (8, 11, 41), (8, 16, 17, 32, 41)):
        found = product(x, weight, bias, ends=ends)
        sizes = np.diff((0, *ends)).tolist()
        assert [part.shape for part in found] == [(2, 6, n) for n in sizes]
        assert mx.array_equal(mx.concatenate(found, axis=-1), whole)


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
def test_a_view_begins_anywhere(bits: int) -> None:
    """MLX does not copy it: 16 bytes cannot be loaded at once."""
    x, weight = drawn(1, 1, 192 + 8), packed(19, 192, bits, 64, mx.bfloat16)
    for offset in (1, 4, 3):
        view = x[..., offset : offset + 192]
        copy = mx.array(np.array(view.astype(mx.float32))).astype(x.dtype)
        flat = mx.concatenate([weight[0].reshape(-1)[:offset], weight[0].reshape(-1)])
        moved = flat[offset:].reshape(weight[0].shape), *weight[1:]
        (right,) = product(copy, weight, bits=bits)
        for one, other in ((view, weight), (copy, moved)):
            (found,) = product(one, other, bits=bits)
            off = mx.abs(found.astype(mx.float32) - right.astype(mx.float32))
            most = mx.abs(right).astype(mx.float32)
            # Sums in another order, rounded to bfloat16.
            assert (off <= 2**-7 * most + 1e-5 * most.max()).all().item()


@needs_compiler
@pytest.mark.parametrize(
    "form",
    [
        Form(mx.bfloat16, 4, 64, eights=True),
        Form(mx.bfloat16, 8, 32, eights=False),
        Form(mx.float16, 4, 64, eights=False),
        Form(mx.float16, 8, 32, eights=True),
        Form(mx.bfloat16, 4, 64, eights=False, experts=True),
        Form(mx.float16, 8, 32, eights=True, experts=True),
        Form(mx.bfloat16, 4, 64, eights=False, tiles=12),
        Form(mx.float16, 8, 32, eights=False, tiles=20),
    ],
)
def test_proven(form: Form) -> None:
    assert packed_matmul.proven(form)


@needs_compiler
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("its[t][half], laid", "its[t][0], laid"),
        # The same products in another order: as exact, but with other bits.
        (
            "its[t][half], laid[one % SLOTS][2 * half]",
            "its[t][1 - half], laid[one % SLOTS][2 - 2 * half]",
        ),
    ],
)
def test_four_warps_multiply_together_where_that_is_right(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """Another GPU cannot, or computes something else: its other kernel has to."""
    layer = nn.QuantizedLinear(128, 32, group_size=64, bits=4)
    layer.set_dtype(mx.bfloat16)
    x, asked = drawn(90, 128), list[int]()
    usual = packed_matmul._arranged
    monkeypatch.setattr(packed_matmul, "MANY", packed_matmul.MANY[:1])

    def arranged(x: mx.array, bits: int, tiles: int) -> mx.array:
        asked.append(tiles)
        return usual(x, bits, tiles)

    assert packed_matmul.tried(layer)
    monkeypatch.setattr(packed_matmul, "_arranged", arranged)
    (apart,) = packed_matmul.of_layer(layer, x)
    assert not asked
    monkeypatch.setattr(packed_matmul, "architecture", lambda: packed_matmul.HOPPER)
    assert len(packed_matmul.proofs_of([layer])) == 1 + len(packed_matmul.MANY)
    assert packed_matmul.tried(layer)
    asked.clear()
    (together,) = packed_matmul.of_layer(layer, x)
    assert asked == [12]
    assert mx.array_equal(apart, together)
    packed_matmul.proven.verdicts.clear()
    packed_matmul._many_kernel.cache_clear()
    plant(monkeypatch, packed_matmul_source, "BY_FOUR_WARPS", old, new)
    assert packed_matmul.tried(layer)
    asked.clear()
    (found,) = packed_matmul.of_layer(layer, x)
    assert mx.array_equal(found, apart)
    assert not asked


@needs_compiler
@pytest.mark.parametrize("fault", ["EIGHTS", "!EIGHTS"])
def test_a_model_s_own_variant_is_tried(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Another variant than its layers launch is proven, and theirs is trusted."""
    old, new = "float sum = sums[t]", f"float sum = {fault} ? 0 : sums[t]"
    plant(monkeypatch, packed_matmul_source, "SUMS", old, new)
    for groups, eights in ((8, True), (9, False)):
        layer = nn.QuantizedLinear(64 * groups, 32, group_size=64, bits=4)
        layer.set_dtype(mx.bfloat16)
        assert packed_matmul.tried(layer) is (eights != (fault == "EIGHTS"))


def experts_agree(
    pairs: tuple[int, ...],
    experts: int,
    columns: int,
    length: int,
    bits: int = 4,
    group: int = 64,
    dtype: mx.Dtype = mx.bfloat16,
) -> bool:
    """Whether products with experts have the bits of products with each matrix."""
    chosen = mx.random.randint(0, experts, pairs, key=mx.random.key(4))
    weight = tuple(
        mx.quantize(drawn(experts, columns, length, dtype=dtype, seed=1), group, bits)
    )
    kind: Any = {"bits": bits, "group_size": group, "pieces": 2}
    right = True
    # A row of x for each pair, or for each token.
    for shape in (pairs, (*pairs[:-1], 1)):
        x = drawn(*shape, 1, length, dtype=dtype)
        found, wide = (
            packed_matmul.expert_product(
                x, weight, chosen.astype(mx.uint32), wide=wide, **kind
            )
            for wide in (False, True)
        )
        assert found.shape == (*pairs, 1, columns)
        right = right and bool(mx.array_equal(found, wide))
        whole = mx.broadcast_to(x, (*pairs, 1, length)).reshape(-1, length)
        for expert, row, its in zip(
            chosen.reshape(-1).tolist(),  # type: ignore[arg-type]
            whole,
            found.reshape(-1, columns),
            strict=True,
        ):
            matrix = [array[expert] for array in weight]
            (alone,) = packed_matmul.product(row[None], matrix, **kind)
            right = right and bool(mx.array_equal(alone[0], its))
    return right


@needs_compiler
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", TYPES)
def test_experts(dtype: mx.Dtype, bits: int) -> None:
    """A pair is left out, or computed with another expert or another token's row.

    There are fewer pairs than experts, as many, more than eight or 32 of one expert.
    """
    for pairs, experts in (
        ((1, 3), 9), ((2, 2), 4), ((5, 1, 3), 40), ((40,), 3), ((6, 7), 2)
    ):  # fmt: skip
        assert experts_agree(pairs, experts, 37, 192, bits, 64, dtype), pairs
    assert experts_agree((2, 2), 3, 33, 512, bits, 32, dtype)


@needs_compiler
def test_indices_of_any_type() -> None:
    """MLX takes the kernel that was compiled for another type of indices."""
    weight = tuple(mx.quantize(drawn(3, 40, 64, seed=1), 64, 4))
    x, chosen = drawn(2, 1, 1, 64), mx.array([[2, 0], [1, 2]])
    found = [
        packed_matmul.expert_product(
            x, weight, chosen.astype(kind), bits=4, group_size=64
        )
        for kind in (mx.uint32, mx.int64, mx.uint8)
    ]
    assert all(mx.array_equal(each, found[0]) for each in found)
    many = mx.zeros((packed_matmul.MOST_PAIRS + 1,), mx.uint32)
    with pytest.raises(ValueError, match="at most"):
        packed_matmul.expert_product(x, weight, many, bits=4, group_size=64)


def blocks_agree(
    tokens: int, used: int, experts: int, dtype: mx.Dtype = mx.bfloat16
) -> bool:
    """Whether gated products have the bits of two products and the activation.

    With a shared expert, which is every token's last, and without; few pairs at once
    and many; and the products that follow, of a row for each pair.
    """
    chosen = mx.random.randint(0, experts, (tokens, used), key=mx.random.key(4))
    packed = [
        mx.quantize(drawn(experts + 1, n, k, dtype=dtype, seed=i), 64, 4)
        for i, (n, k) in enumerate([(37, 192), (37, 192), (45, 192)])
    ]
    (gate, _), (up, _), (down, _) = parts = [
        ([a[:-1] for a in each], [a[-1] for a in each]) for each in packed
    ]
    kind: Any = {"bits": 4, "group_size": 64, "pieces": 2}
    x = drawn(tokens, 1, 1, 192, dtype=dtype)
    right = True
    for wide, shared in product_of((False, True), (False, True)):
        both = [*parts[0][1], *parts[1][1]] if shared else []
        found = packed_matmul.expert_product(
            x, gate, chosen, up=up, shared=both, wide=wide, **kind
        )
        every = mx.concatenate([chosen, mx.full((tokens, 1), experts)], axis=1)
        every = every if shared else chosen
        gates, ups = (
            packed_matmul.expert_product(x, each, every, wide=False, **kind)
            for each in packed[:2]
        )
        silu = gates * mx.sigmoid(gates.astype(mx.float32)).astype(dtype)
        right = right and bool(mx.array_equal(found, silu * ups))
        after = drawn(tokens, used + shared, 1, 192, dtype=dtype, seed=9)
        found = packed_matmul.expert_product(
            after, down, chosen, shared=parts[2][1] if shared else [], wide=wide, **kind
        )
        exact = packed_matmul.expert_product(
            after, packed[2], every, wide=False, **kind
        )
        right = right and bool(mx.array_equal(found, exact))
    return right


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES)
def test_gated_and_shared_experts(dtype: mx.Dtype) -> None:
    """Fewer pairs than experts and more, more of one than a tile, and wide tiles."""
    for tokens, used, experts in ((1, 2, 5), (3, 2, 6), (20, 2, 3), (37, 3, 3)):
        assert blocks_agree(tokens, used, experts, dtype), (tokens, used, experts)


@needs_compiler
def test_an_expert_begins_anywhere() -> None:
    """MLX does not copy views: 16 bytes cannot be loaded at once."""
    weight = tuple(mx.quantize(drawn(3, 19, 192, seed=1), 64, 4))
    chosen = mx.array([[2, 0], [1, 2], [2, 2]], mx.uint32)
    x = drawn(3, 1, 1, 200)[..., 3:195]
    found, right = (
        packed_matmul.expert_product(each, weight, chosen, bits=4, group_size=64)
        for each in (x, mx.contiguous(x + 0))
    )
    assert mx.allclose(found, right, rtol=0.01, atol=0.05)


def model_of(tiny_model: TinyModel, **changed: object) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    model = tiny_model("llama", **{**sizes, **changed})
    model.set_dtype(mx.float16)
    nn.quantize(model, group_size=32, bits=4)
    flatten_products(model)
    return model.eval()


@needs_compiler
def test_a_model_s_products_are_the_kernel_s(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer is forgotten (the output, a joined one), or its numbers are others."""
    model = model_of(tiny_model, attention_bias=True)
    join_products(model)
    tokens = mx.arange(6).reshape(2, 3)
    twin = separated(model)
    twin.set_dtype(mx.float32)
    expected = twin(tokens)
    asked = []
    usual = packed_matmul.product

    def counted(x: mx.array, packed: Packed, *rest: Any, **options: Any) -> Any:
        asked.append(packed[0].shape)
        return usual(x, packed, *rest, **options)

    monkeypatch.setattr(packed_matmul, "product", counted)
    found = model(tokens)
    # q, k and v; o; gate and up; down; the output.
    assert len(asked) == 4 * len(model.layers) + 1
    np.testing.assert_allclose(found.astype(mx.float32), expected, atol=0.05)
    assert not slow_pairs(model)


@needs_compiler
def test_products_that_the_kernel_does_not_know_are_mlx_s(
    tiny_model: TinyModel,
) -> None:
    """A layer that trains loses its gradient, or numbers of another type are read."""
    model = model_of(tiny_model)
    layer = model.layers[0].self_attn.o_proj
    kind = Kind.of(layer)
    assert kind is not None
    x = drawn(3, kind.length, dtype=mx.float16)
    assert packed_matmul.computes(layer, x)
    assert not packed_matmul.computes(layer, x.astype(mx.float32))
    assert not packed_matmul.computes(layer, mx.concatenate([x, x], axis=1))
    assert not packed_matmul.computes(layer, x[:0])
    # One row is MLX's where that is faster.
    assert not packed_matmul.computes(layer, x[:1])
    layer.train()
    assert not packed_matmul.computes(layer, x)
    for changed in ({"bits": 3}, {"bits": 6}, {"mode": "mxfp4"}):
        other = nn.QuantizedLinear(64, 32, group_size=32, **changed)
        assert not packed_matmul.tried(other)


@needs_compiler
@pytest.mark.parametrize("ends", [(), (8, 11, 40)])
def test_many_rows(ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked for many rows: the bias, the parts or the order are lost."""
    monkeypatch.setattr(packed_matmul, "MOST_ROWS", 2)
    monkeypatch.setattr(packed_matmul, "TIMED_ROWS", (3, 4))
    layer = nn.QuantizedLinear(64, 40, group_size=32, bits=4)
    layer.set_dtype(mx.float16)
    layer.bias = drawn(40, dtype=mx.float16)
    x = drawn(3, 5, 64, dtype=mx.float16)
    found = packed_matmul.of_layer(layer, x, ends)
    weights = tuple(layer[name] for name in ("weight", "scales", "biases"))
    few = product(x, weights, layer.bias, group=32, ends=ends)
    assert len(found) == max(1, len(ends))
    for one, other in zip(found, few, strict=True):
        np.testing.assert_allclose(
            one.astype(mx.float32), other.astype(mx.float32), atol=0.01, rtol=0.01
        )


def test_the_most_rows_are_found_by_halving() -> None:
    """Rows are unpacked at which the kernel is faster, or the other way round."""
    timed = packed_matmul.TIMED_ROWS
    for most in (timed[0] - 1, *timed):
        found: dict[int, bool] = {}

        def faster(rows: int, most: int = most) -> bool:
            return found.setdefault(rows, rows <= most)  # noqa: B023

        assert packed_matmul._most_rows(faster) == most
        # What was not timed is not asked for.
        assert packed_matmul._most_rows(found.__getitem__) == most
        assert len(found) <= len(timed).bit_length()
    assert packed_matmul._most_rows(lambda rows: None) == packed_matmul.MOST_ROWS
