"""The emulator does what CUDA's guide says, and finds what the guide forbids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.cuda.kernels import tensor_cores

from .cuda import (
    Input,
    KernelFault,
    Strided,
    cuda_kernel,
    needs_compiler,
)

pytestmark = needs_compiler

numbers = count()


def run(
    source: str,
    *inputs: Input,
    threads: int = 32,
    blocks: int = 1,
    shape: Sequence[int] | None = None,
    dtype: mx.Dtype = mx.int32,
    header: str = "",
    contiguous: bool = False,
    **options: Any,
) -> mx.array:
    """The ``out`` of a kernel with inputs a, b, c; by default a number per thread."""
    kernel = cuda_kernel(
        name=f"tried_{next(numbers)}",
        input_names=list("abc"[: len(inputs)]),
        output_names=["out"],
        source=source,
        header=header,
        ensure_row_contiguous=contiguous,
    )
    (found,) = kernel(
        inputs=list(inputs),
        grid=(threads * blocks, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[[threads * blocks] if shape is None else shape],
        output_dtypes=[dtype],
        **options,
    )
    return found


def lanes(*expressions: str, threads: int = 32, **options: Any) -> Any:
    """The values of expressions of ``t``, the thread, in all threads."""
    source = "const int t = threadIdx.x;"
    for i, expression in enumerate(expressions):
        source += f"\nout[{i * threads} + t] = {expression};"
    shape = (len(expressions), threads)
    return run(source, threads=threads, shape=shape, **options).tolist()


# -- threads -----------------------------------------------------------------


def test_a_block_waits_for_all_that_live() -> None:
    source = """
    __shared__ int held[64];
    const int t = threadIdx.x;
    if (t % 3 == 0) return;
    for (int turn = 0; turn < 3; ++turn) {
      held[t] = t + turn;
      __syncthreads();
      out[t] = held[t % 3 == 1 ? (t + 4) % 63 : (t + 59) % 63];
      __syncthreads();
    }
    """
    found = np.array(run(source, threads=64, blocks=2, shape=[64], init_value=-5))
    t = np.arange(64)
    other = np.where(t % 3 == 1, (t + 4) % 63, (t + 59) % 63)
    wanted = np.where(t % 3 == 0, -5, other + 2)
    # Except where the other thread has ended: it never wrote.
    assert (found == wanted)[(t % 3 == 0) | (other % 3 != 0)].all()


@pytest.mark.parametrize(
    "source",
    [
        "if (t < 40) __syncthreads(); else __syncwarp(); out[t] = t;",
        "if (t < 40)\n__syncthreads();\nelse\n__syncthreads(); out[t] = t;",
        "out[t] = t < 3 ? __shfl_sync(~0u, t, 0) : __ballot_sync(~0u, t);",
        "out[t] = t % 2 ? t : __shfl_sync(~0u, t, 0); __syncthreads();",
    ],
)
def test_a_deadlock_is_a_fault(source: str) -> None:
    with pytest.raises(KernelFault, match="deadlock"):
        run(f"const int t = threadIdx.x; {source}", threads=64)


@pytest.mark.parametrize(
    "source",
    [
        "out[0] = t;",
        "__shared__ int held[64]; held[t] = t; out[t] = held[63 - t];",
        "__shared__ int held[64]; held[t] = t; out[t] = held[(t + 1) % 64];",
        "__shared__ int all; if (t == 9) all = 9; __syncwarp(); out[t] = all;",
    ],
)
def test_a_race_is_a_fault(source: str) -> None:
    with pytest.raises(KernelFault, match="first"):
        run(f"const int t = threadIdx.x; {source}", threads=64)


def test_shared_memory_is_of_a_block_and_holds_nothing_at_first() -> None:
    source = """
    __shared__ float held[32];
    const float before = held[threadIdx.x];
    held[threadIdx.x] = 1.0f;
    out[blockIdx.x * 32 + threadIdx.x] = before;
    """
    assert mx.isnan(run(source, blocks=3, dtype=mx.float32)).all().item()


# -- warps -------------------------------------------------------------------


def test_shuffles() -> None:
    own = range(32)
    wanted = {
        "__shfl_xor_sync(~0u, t, 5)": [t ^ 5 for t in own],
        "__shfl_xor_sync(~0u, t + 0.5f, 16)": [(t ^ 16) + 0.5 for t in own],
        # Lanes of later groups are not read; those of earlier groups are.
        "__shfl_xor_sync(~0u, t, 12, 8)": [min(t, t ^ 12) for t in own],
        "__shfl_sync(~0u, t * 3, 7)": [21] * 32,
        "__shfl_sync(~0u, t, t + 1)": [(t + 1) % 32 for t in own],
        "__shfl_sync(~0u, t, 2, 8)": [t // 8 * 8 + 2 for t in own],
        "__shfl_up_sync(~0u, t, 3, 16)": [t - 3 if t % 16 > 2 else t for t in own],
        "__shfl_down_sync(~0u, t, 3)": [t + 3 if t < 29 else t for t in own],
    }
    assert lanes(*wanted, dtype=mx.float32) == list(wanted.values())


def test_parts_of_a_warp() -> None:
    expression = "t / 8 % 2 ? -1 : __shfl_xor_sync(0xffu << t / 8 * 8, t, 3)"
    assert lanes(expression) == [[-1 if t // 8 % 2 else t ^ 3 for t in range(32)]]
    with pytest.raises(KernelFault, match="its own lane"):
        lanes("__shfl_sync(1u, t, 0)")


def test_ballots() -> None:
    expressions = ["__ballot_sync(~0u, t & 1)", "__any_sync(~0u, t == 3)"]
    expressions += [f"__all_sync(~0u, t < {n})" for n in (31, 32)]
    wanted = [[value] * 32 for value in (0xAAAAAAAA, 1, 0, 1)]
    assert lanes(*expressions, dtype=mx.uint32) == wanted
    # Threads that have ended are not waited for.
    source = "if (threadIdx.x % 2) return; out[0] = __ballot_sync(~0u, 1);"
    assert run(source, shape=[1]).item() == 0x55555555


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_products_of_tensor_cores(dtype: mx.Dtype) -> None:
    a, b, c = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate([(2, 16, 16), (2, 16, 8), (2, 16, 8)])
    )
    # The elements that each lane holds, as in PTX's manual.
    source = """
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    auto pair = [](T low, T high) {
      unsigned word;
      T both[2] = {low, high};
      memcpy(&word, both, 4);
      return word;
    };
    const T* A = a + warp * 256;
    const T* B = b + warp * 128;
    float d[4];
    for (int i = 0; i < 4; ++i)
      d[i] = static_cast<float>(c[warp * 128 + (g + i / 2 * 8) * 8 + t * 2 + i % 2]);
    unsigned as[4], bs[2];
    for (int i = 0; i < 4; ++i) {
      const T* from = A + (g + i % 2 * 8) * 16 + t * 2 + i / 2 * 8;
      as[i] = pair(from[0], from[1]);
    }
    for (int i = 0; i < 2; ++i) {
      const T* from = B + (t * 2 + i * 8) * 8 + g;
      bs[i] = pair(from[0], from[8]);
    }
    SPECDEC_MMA(d, as[0], as[1], as[2], as[3], bs[0], bs[1]);
    for (int i = 0; i < 4; ++i)
      out[warp * 128 + (g + i / 2 * 8) * 8 + t * 2 + i % 2] = d[i];
    """
    for header in ("", tensor_cores(dtype)):
        found = run(
            source,
            *(a, b, c),
            threads=64,
            shape=(2, 16, 8),
            dtype=mx.float32,
            template=[("T", dtype)],
            header=header,
        )
        wide = [np.array(x.astype(mx.float32)).astype(np.float64) for x in (a, b, c)]
        wanted = wide[0] @ wide[1] + wide[2]
        np.testing.assert_allclose(np.array(found), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("threads", "before"), [(32, "if (threadIdx.x == 4) return;"), (31, "")]
)
def test_products_take_a_whole_warp(threads: int, before: str) -> None:
    source = f"{before} float d[4] = {{}}; SPECDEC_MMA(d, 0, 0, 0, 0, 0, 0);"
    with pytest.raises(KernelFault, match="mma"):
        run(source, threads=threads, template=[("T", mx.float16)])


# -- numbers -----------------------------------------------------------------


def test_byte_perm() -> None:
    x, y = 0x83828180, 0x07060504
    selectors = [0x3210, 0x7654, 0x5410, 0x7632, 0x0123, 0x0000, 0xBA98, 0xFEDC, 0x4C8F]
    wanted = [x, y, 0x05048180, 0x07068382, 0x80818283, 0x80808080]
    wanted += [0xFFFFFFFF, 0x00000000, 0x0400FF00]
    source = "out[threadIdx.x] = __byte_perm(a[0], a[1], a[2 + threadIdx.x]);"
    given = mx.array([x, y, *selectors], mx.uint32)
    assert run(source, given, threads=9, dtype=mx.uint32).tolist() == wanted


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_halves_are_rounded_to_nearest_even(dtype: mx.Dtype) -> None:
    every = mx.arange(2**16).astype(mx.uint16).view(dtype)
    place = "const int i = threadIdx.x + 1024 * blockIdx.x;"
    widened = run(
        f"{place} out[i] = static_cast<float>(a[i]);",
        every,
        threads=1024,
        blocks=64,
        dtype=mx.float32,
    )
    exact = every.astype(mx.float32)
    assert np.array_equal(np.array(widened), np.array(exact), equal_nan=True)
    # All numbers of the type, the numbers halfway between two, and their neighbours.
    held = np.array(exact)
    with np.errstate(all="ignore"):
        middle = held + (np.roll(held, -1) - held) / 2
        tried = np.concatenate([held, middle, np.nextafter(middle, 0)])
        tried = tried.astype(np.float32)
        if dtype == mx.float16:
            wanted = tried.astype(np.float16).view(np.uint16)
        else:
            bits = tried.view(np.uint32).astype(np.uint64)
            wanted = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    found = run(
        f"{place} out[i] = static_cast<T>(a[i]);",
        mx.array(tried),
        threads=1024,
        blocks=192,
        dtype=dtype,
        template=[("T", dtype)],
    )
    usual = ~np.isnan(tried)
    assert (np.array(found.view(mx.uint16)) == wanted)[usual].all()
    assert mx.isnan(found.astype(mx.float32)).sum().item() == (~usual).sum()


# -- memory ------------------------------------------------------------------

OWN = mx.arange(64)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("out[t + 1] = t;", "not its own"),
        ("out[t - 1] = t;", "beyond its ends"),
        ("out[t] = a[t + 1];", "not its own"),
        ("const_cast<int*>(a)[t] = t;", "not to be written"),
        ("out[t] = a_shape[a_ndim];", "dimension 1 of an array of 1"),
        ("__shared__ int held[9]; held[t] = t;", "line 1: index 9"),
        ("out[t] = reinterpret_cast<const uint2*>(a + 1)->x;", "not aligned"),
        ("out[t] = __ldg(reinterpret_cast<const uint4*>(a + 2)).x;", "16 bytes"),
        ("out[t] = a[2] / a[0] + a[0] / a[t];", "division by zero"),
        ("int held[1 << 16]; held[a[t]] = 1; out[t] = held[a[9]];", "not its own"),
    ],
)
def test_memory_that_is_not_its_own_is_a_fault(source: str, what: str) -> None:
    with pytest.raises(KernelFault, match=what):
        run(f"const int t = threadIdx.x; {source}", OWN, threads=64)
    assert mx.array_equal(OWN, mx.arange(64))


def test_arrays_with_gaps() -> None:
    array = Strided(OWN, shape=(3, 4), strides=(16, 2), offset=5)
    assert (array.ndim, array.size, array.dtype) == (2, 12, mx.int32)
    wanted = [5 + 16 * (t // 4) + 2 * (t % 4) for t in range(12)]
    own = "out[threadIdx.x] = a[threadIdx.x / 4 * a_strides[0] + threadIdx.x % 4 * "
    found = run(own + "a_strides[1]];", array, threads=12)
    assert found.tolist() == wanted
    # MLX makes inputs contiguous by default.
    found = run(
        "out[threadIdx.x] = a[threadIdx.x];", array, threads=12, contiguous=True
    )
    assert found.tolist() == wanted


# -- as in MLX ---------------------------------------------------------------


def test_what_does_not_compile_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"source:1.*nonsense"):
        run("out[0] = nonsense;")


def test_sizes_of_an_array_without_dimensions_are_not_to_be_asked_for() -> None:
    with pytest.raises(ValueError, match="no dimensions"):
        run("out[0] = a_ndim;", mx.array(1))


def test_a_name_stands_for_one_kernel() -> None:
    kernel = cuda_kernel("named", ["a"], ["out"], "out[0] = a[0];")
    sizes: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    sizes |= {"output_shapes": [(1,)], "output_dtypes": [mx.int32]}
    assert kernel(inputs=[mx.array([3])], **sizes)[0].item() == 3
    with pytest.raises(ValueError, match="another kernel of this name"):
        kernel(inputs=[mx.array([3.0])], **sizes)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("offset", [0, 4, 8])
def test_a_view_without_gaps_begins_where_it_does(
    offset: int, contiguous: bool
) -> None:
    """MLX does not copy it, so a load of 16 bytes may be unaligned: a fault."""
    source = "out[threadIdx.x] = __ldg(reinterpret_cast<const uint4*>(a)).x + a_ndim;"
    base = mx.random.normal((1, 72)).astype(mx.bfloat16)
    mx.eval(base)
    described = Strided(base.reshape(-1), (1, 64), (72, 1), offset)
    for view in (base[:, offset : offset + 64], described):
        if offset % 8:
            with pytest.raises(KernelFault, match="not aligned"):
                run(source, view, contiguous=contiguous)
        else:
            run(source, view, contiguous=contiguous)
