"""The emulator proves itself on MLX's own Metal kernels, from its wheel's headers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.cuda.emulation.cuda import in_both_orders, needs_compiler

from .emulation import PLACES, compiled

HEADERS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not HEADERS.exists(), reason="MLX's wheel has no Metal headers"),
]
NAMES = {mx.float32: "float", mx.bfloat16: "bfloat16_t", mx.float16: "half"}
GROUP = PLACES["threadgroup_position_in_grid"]
LANE = PLACES["thread_index_in_simdgroup"]
SIMD_GROUP = PLACES["simdgroup_index_in_threadgroup"]
# Of MLX's utils.h, which needs complex numbers in every address space.
PRELUDE = """
template <class U>
struct Limits {
  static inline const U finite_min = U(-3.38e38f);
};
"""


def run(
    header: str,
    function: str,
    arguments: Sequence[str],
    inputs: Sequence[mx.array],
    output: tuple[tuple[int, ...], mx.Dtype],
    groups: tuple[int, int, int],
    threads: tuple[int, int, int],
    **constants: bool,
) -> mx.array:
    """The output of a kernel of MLX's headers; arguments begin with those of arrays."""
    code = (HEADERS / header).read_text("utf-8")
    code = re.sub(r"^#(?:include|pragma once).*", "", code, flags=re.M)
    # What follows uses classes of other headers.
    code, _, rest = code.partition("METAL_FUNC void qvm_impl")
    code = code.rpartition("template <")[0] if rest else code
    # What the host chooses when it looks a kernel up.
    code = re.sub(
        r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];",
        lambda found: (
            f"static const {found[1]} {found[2]} = "
            f"{int(constants.get(found[2], False))};"
        ),
        code,
    )
    grid: Any = tuple(g * t for g, t in zip(groups, threads, strict=True))
    built = compiled(PRELUDE + code, function, arguments)
    shape, dtype = output
    (found,) = in_both_orders(
        built, function, inputs, [("out", shape, dtype)], grid, threads
    )
    return found


def pointers(*types: str) -> list[str]:
    return [f"simt::pointer<{each}>({i})" for i, each in enumerate(types)]


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 32), (3, 64)])
@pytest.mark.parametrize("wide", [False, True])
def test_products_with_packed_weights(
    dtype: mx.Dtype, bits: int, group_size: int, wide: bool
) -> None:
    """Of one row at a time, and of several rows that share the weights."""
    rows, columns, length = 4, 16, 1024
    x, dense = (
        mx.random.normal((n, length), key=mx.random.key(i)).astype(dtype)
        for i, n in enumerate((rows, columns))
    )
    packed = mx.quantize(dense, group_size, bits)
    scales, biases = (p.astype(mx.float32) for p in packed[1:])
    matrix = mx.dequantize(packed[0], scales, biases, group_size, bits)
    right = x.astype(mx.float32) @ matrix.T
    of = NAMES[dtype]
    arrays = pointers("uint32_t", of, of, of, of)
    if wide:
        function = f"qmv_wide_impl<{of}, {group_size}, {bits}, {rows}, 8>"
        arguments = [*arrays, str(length), str(columns), str(rows)]
    else:
        function = f"qmv_fast_impl<{of}, {group_size}, {bits}, false>"
        arguments = [*arrays, str(length), str(columns)]
    found = run(
        "quantized.h",
        function,
        [*arguments, GROUP, SIMD_GROUP, LANE],
        [*packed, x],
        ((rows, columns), dtype),
        (1 if wide else rows, columns // 8, 1),
        (32, 2, 1),
    )
    allowed = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype]
    off = mx.abs(found.astype(mx.float32) - right).max()
    assert off <= allowed * mx.abs(right).max()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added"])
def test_attention_of_few_queries(dtype: mx.Dtype, mask: str) -> None:
    heads, pairs, queries, length, size = 4, 2, 3, 70, 64
    q, k, v = (
        mx.random.normal((1, h, n, size), key=mx.random.key(i)).astype(dtype)
        for i, (h, n) in enumerate([(heads, queries), (pairs, length), (pairs, length)])
    )
    sees = mx.random.uniform(shape=(1, heads, queries, length)) < 0.6
    masks: dict[str, Any] = {"none": None, "causal": "causal", "boolean": sees}
    masks["added"] = mx.where(sees, 0, -mx.inf).astype(dtype)
    array = isinstance(masks[mask], mx.array)
    of = NAMES[dtype]
    boolean, added = mask == "boolean", mask == "added"
    seen = masks[mask] if array else mx.zeros((1,), mx.bool_)
    arguments = pointers(of, of, of)
    arguments += [f"simt::pointer<{of}>(4)", str(heads // pairs), str(length)]
    arguments += [f"size_t({n})" for n in (length * size, size, length * size, size)]
    arguments += [f"{size**-0.5}f"]
    arguments += ["simt::pointer<bool>(3)" if boolean else "nullptr"]
    arguments += [f"simt::pointer<{of}>(3)" if added else "nullptr"]
    arguments += ["1", str(length), str(queries * length), "nullptr", str(heads)]
    found = run(
        "sdpa_vector.h",
        f"sdpa_vector<{of}, {size}, {size}>",
        [*arguments, GROUP, PLACES["threadgroups_per_grid"], SIMD_GROUP, LANE],
        [q, k, v, seen],
        ((1, heads, queries, size), dtype),
        (heads, queries, 1),
        (1024, 1, 1),
        has_mask=array,
        bool_mask=boolean,
        float_mask=added,
        do_causal=mask == "causal",
    )
    right = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=size**-0.5, mask=masks[mask]
    )
    off = mx.abs((found - right).astype(mx.float32)).max()
    assert off <= (2e-2 if dtype == mx.bfloat16 else 1e-5)
