"""The emulator does what Metal's specification says, and finds what it forbids."""

from __future__ import annotations

from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.cuda.emulation.cuda import KernelFault, needs_compiler

from .emulation import metal_kernel

pytestmark = needs_compiler
numbers = count()
ID = "const uint i = thread_position_in_grid.x;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
X = mx.arange(64).astype(mx.float32)


def run(source: str, *, threads: int = 64, group: int = 64, header: str = "") -> Any:
    """The 64 numbers y that a kernel makes of the numbers x from 0 to 63."""
    kernel = metal_kernel(f"tried_{next(numbers)}", ["x"], ["y"], ID + source, header)
    (found,) = kernel(
        inputs=[X],
        template=[("T", mx.float32)],
        grid=(threads, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    return found.tolist()


def test_what_threads_do_together() -> None:
    assert run("y[i] = simd_sum(x[i]);") == [496.0] * 32 + [1520.0] * 32
    assert run("y[i] = simd_max(x[i]) + simd_min(x[i]);") == [31.0] * 32 + [95.0] * 32
    assert run("y[i] = simd_shuffle_xor(x[i], 5);") == [i ^ 5 for i in range(64)]
    reversed_ = f"threadgroup float s[64]; s[i] = x[i]; {BARRIER} y[i] = s[63 - i];"
    assert run(reversed_) == list(range(63, -1, -1))


def test_memory_of_a_threadgroup_is_its_own_and_holds_nothing_at_first() -> None:
    source = "threadgroup float s[32]; y[i] = s[i % 32]; s[i % 32] = 1.0f;"
    assert np.isnan(run(source, group=32)).all()


def test_products_of_matrices() -> None:
    """Elements lie where MLX's kernels take them to be."""
    source = """
    const int lane = thread_index_in_simdgroup;
    const int row = (lane & 16) / 4 + ((lane / 2) & 3);
    const int column = (lane & 8) / 2 + (lane & 1) * 2;
    simdgroup_matrix<float, 8, 8> a, b, c(1.0f);
    for (int e = 0; e < 2; ++e) {
      a.thread_elements()[e] = x[row * 8 + column + e];
      b.thread_elements()[e] = x[63 - row * 8 - column - e];
    }
    simdgroup_multiply_accumulate(c, a, b, c);
    for (int e = 0; e < 2; ++e) y[row * 8 + column + e] = c.thread_elements()[e];
    """
    a = np.arange(64.0).reshape(8, 8)
    right = a @ a[::-1, ::-1] + 1
    assert np.array_equal(np.reshape(run(source, threads=32, group=32), (8, 8)), right)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_numbers_of_16_bits(dtype: mx.Dtype) -> None:
    """Each operation of two of them rounds to their type."""
    x = mx.random.normal((64,), key=mx.random.key(0)).astype(dtype)
    kernel = metal_kernel(
        "short", ["x"], ["y"], ID + "y[i] = x[i] * x[63 - i] + T(float(x[i]) * 0.3f);"
    )
    (found,) = kernel(
        inputs=[x],
        template=[("T", dtype)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[dtype],
    )
    assert mx.array_equal(
        found, x * x[::-1] + (x.astype(mx.float32) * 0.3).astype(dtype)
    )


def test_threadgroups_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match="not whole"):
        run("y[i] = x[i];", threads=40, group=32)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("threadgroup float s[64]; s[i] = x[i]; y[i] = s[63 - i];", "first"),
        ("y[0] = x[i];", "first"),
        (f"y[i] = x[i]; if (i < 32) {{ {BARRIER} }}\nelse {BARRIER}", "deadlock"),
        ("float t = 0;\nif (i % 2) t = simd_sum(x[i]);\n"
         "else t = simd_max(x[i]);\ny[i] = t;", "deadlock"),
        ("y[i] = x[i + 1000000];", "not its own"),
        ("y[i] = x[i + 1];", "not its own"),
        ("y[i] = 0; if (i == 63) y[64] = 1;", "not its own"),
        ("y[i] = 0; ((device float*)x)[i] = 1;", "not to be written"),
        ("float l[4] = {}; y[i] = l[int(x[i])];", "index"),
        ("y[i] = (*(const device vec<T, 4>*)(x + 1))[0];", "not aligned"),
        ("vec<T, 4> v(1.0f); y[i] = v[int(x[i])];", "element"),
        ("simdgroup_matrix<float, 8, 8> a(1.0f), c(0.0f);\n"
         "if (i != 5) simdgroup_multiply_accumulate(c, a, a, c); y[i] = 1;", "mma"),
    ],
)  # fmt: skip
def test_what_is_forbidden_is_a_fault(source: str, why: str) -> None:
    with pytest.raises(KernelFault, match=why):
        run(source)


@pytest.mark.parametrize(
    ("source", "header", "why"),
    [
        ("double d = x[i]; y[i] = d;", "", "double"),
        ("y[i] = x[i] * 0.5;", "", "double"),
        ("T* p = y + i; *p = 1;", "", "address space"),
        ("const T* p = x + i; y[i] = *p;", "", "address space"),
        ("y[i] = first(x);", "float first(const float* p) { return *p; }", "address"),
        ("static int n = 0; y[i] = n;", "", "no such word"),
        ("float* p = new float[4]; y[i] = p[0];", "", "Metal"),
    ],
)
def test_what_is_no_metal_is_a_fault(source: str, header: str, why: str) -> None:
    """g++ would take it; Apple's compiler would not, on the user's machine."""
    with pytest.raises(KernelFault, match=why):
        run(source, header=header)


@pytest.mark.parametrize(
    "source",
    ["y[i] = __shfl_sync(1, x[i], 0);", "bfloat b = x[i]; y[i] = b;", "x[i] = 1;"],
)
def test_what_does_not_compile_is_an_error(source: str) -> None:
    with pytest.raises(RuntimeError, match="does not compile"):
        run(source)
