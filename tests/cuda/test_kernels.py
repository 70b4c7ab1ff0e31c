"""Parts of a product, which are views of one array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from specdec.cuda import kernels, proofs, skinny_matmul
from specdec.cuda.kernels import parts_of, whole_shape
from tests.cuda.emulation.cuda import emulated, needs_compiler

ROWS, TOKENS, HEADS, SIZE = 2, 3, 4, 32
# Queries, keys, values, and two parts of one shape that differ by where they begin.
ENDS = (128, 160, 192, 197, 202)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(monkeypatch, skinny_matmul._kernel, kernels.cuda_kernel)


def used(parts: list[mx.array]) -> list[mx.array]:
    """What models compute of parts: heads, positions, gates, and a cache's content."""
    q, k, v, gate, up = parts

    def heads(x: mx.array) -> mx.array:
        split = x.reshape(ROWS, TOKENS, -1, SIZE).transpose(0, 2, 1, 3)
        return mx.fast.rope(
            split, SIZE, traditional=False, base=1e4, scale=1.0, offset=5
        )

    places = mx.array([1, 4, 2])[None, None, :, None]
    kept = mx.put_along_axis(mx.zeros((ROWS, 1, 6, SIZE)), places, heads(k), axis=2)
    attended = mx.fast.scaled_dot_product_attention(
        heads(q), kept, mx.concatenate([kept, kept], axis=2)[:, :, 1:7], scale=0.2
    )
    normed = mx.fast.rms_norm(v, None, 1e-5)
    return [
        attended,
        normed,
        nn.silu(gate) * up,
        gate - up,
        (q @ q.swapaxes(-1, -2)).sum(axis=0),
        v[:, -1:] + 1,
        mx.argmax(q.reshape(-1, q.shape[-1]), axis=-1),
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_operations_on_parts_compute_what_they_do_on_copies(compiled: bool) -> None:
    """MLX takes one part for another, or reads or reuses memory of the parts beside."""
    shape = ROWS, TOKENS, 8
    assert whole_shape(shape, ENDS) == (ROWS * TOKENS * ENDS[-1],)
    flat = mx.random.normal(whole_shape(shape, ENDS), key=mx.random.key(1))

    def of_views(flat: mx.array) -> list[mx.array]:
        # Nothing else holds the array, as where it is a kernel's output.
        return used(parts_of(flat * 2, shape, ENDS))

    numbers, copies, begin = np.array(flat) * 2, [], 0
    for end in ENDS:
        part = numbers[begin * ROWS * TOKENS : end * ROWS * TOKENS]
        copies.append(mx.array(part.reshape(ROWS, TOKENS, end - begin)))
        begin = end
    run: Any = mx.compile(of_views) if compiled else of_views
    for found, wanted in zip(run(flat), used(copies), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.usefixtures("_kernels")
def test_a_part_is_the_input_of_another_product() -> None:
    """A kernel reads from where the whole array begins."""
    x, weight = (
        mx.random.normal(shape, key=mx.random.key(2)).astype(mx.bfloat16)
        for shape in ((TOKENS, 32), (64 + 3, 32))
    )
    # The second part begins where 16 bytes cannot be loaded at once.
    for part in skinny_matmul.parts(x, weight, None, (32, 35, 67))[::2]:
        copy = mx.array(np.array(part.astype(mx.float32))).astype(mx.bfloat16)
        found, wanted = (skinny_matmul.product(p, weight, None) for p in (part, copy))
        assert mx.array_equal(found, wanted)


def test_a_source_is_shortened_and_stays_the_same_code() -> None:
    """A comment is hashed at each launch; or tokens, or a macro's lines, are joined."""
    code = """
      // A whole line.
      #define PRODUCT(d, a)     \\
        asm("mma {%0, %1};"     \\
            : "+f"(d[0]) : "r"(a) )
      const T* const from = rows [ 2 ], *other;  // after code
      for (int i = 0; i < 4; ++i) x = a - -b <= c ? -1 : 2;
    """
    assert kernels._shortened(code).splitlines() == [
        "#define PRODUCT(d, a) \\",
        'asm("mma {%0, %1};" \\',
        ': "+f"(d[0]) : "r"(a) )',
        "const T* const from=rows[2],*other;",
        "for(int i=0;i < 4;++i)x=a - -b <=c?-1 : 2;",
    ]
    assert kernels._shortened(code).endswith("\n")


@pytest.mark.parametrize("compiles", [True, False])
def test_proofs_leave_mlx_s_compiler_as_it_was(compiles: bool) -> None:
    """A program that has turned it off would have it on after loading a model."""
    runs: list[int] = []

    def noted(x: mx.array) -> mx.array:
        runs.append(1)
        return x

    def calls() -> int:
        runs.clear()
        function = mx.compile(noted)
        for _ in range(3):
            function(mx.zeros(1))
        return len(runs)

    if not compiles:
        mx.disable_compile()
    try:
        with proofs.unfused():
            assert calls() == 3
        assert calls() == (1 if compiles else 3)
    finally:
        mx.enable_compile()
