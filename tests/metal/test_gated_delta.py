"""CUDA's kernel of gated delta layers in Metal's language, in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import mlx.core as mx
import pytest

from specdec.cuda import gated_delta, gated_delta_source
from specdec.cuda.gated_delta import Form, Inputs
from specdec.cuda.to_metal import translated
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant
from tests.cuda.test_gated_delta import FAULTS, HALF, PADDED, PLAIN, ROUNDS, agrees

from . import emulation


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    yield from emulated(
        monkeypatch, gated_delta._kernel, metal_kernel=emulation.metal_kernel
    )


@needs_compiler
@pytest.mark.parametrize("form", [PLAIN, HALF])
def test_rounds_and_the_proof(form: Form) -> None:
    """Rows keep all, some or none of a round; a prompt has rows of any length."""
    assert agrees(form, ROUNDS)
    assert gated_delta._agrees(form)


@needs_compiler
def test_a_token_has_the_same_bits_whatever_is_computed_with_it() -> None:
    """Alone, or after others of its round and tokens that are done again."""
    weights, inputs, window, state = gated_delta.drawn(HALF, 2, 7)

    def part(start: int, stop: int) -> Inputs:
        return Inputs(*(a[:, start:stop] for a in inputs))

    whole = gated_delta.scan(HALF, weights, inputs, window, state)
    first = gated_delta.scan(HALF, weights, part(0, 5), window, state)
    rest = gated_delta.scan(
        HALF, weights, part(5, 7), first.log, state, mx.array([5, 5])
    )
    assert mx.array_equal(mx.concatenate([first.y, rest.y], axis=1), whole.y)
    assert mx.array_equal(rest.after, whole.after)


@needs_compiler
@pytest.mark.parametrize(
    "name", ["half a row", "norms too soon", "gates of another head"]
)
def test_planted_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, gated_delta_source, *FAULTS[name])
    with suppress(KernelFault):
        assert not gated_delta._agrees(PLAIN)


@needs_compiler
def test_a_planted_fault_with_padding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, gated_delta_source, *PADDED["another row's length"])
    with suppress(KernelFault):
        assert not gated_delta._agrees(PLAIN)


def test_translation() -> None:
    """Pointers get the address space of what they point into; sums stay sums."""
    text = """
  auto twice = [](float value) { return value + value; };
  __shared__ float some[8], others[2];
  const T* from = a + 1;
  float* to = others + 1;
  const float4 all = reinterpret_cast<const float4*>(some)[0];
  some[threadIdx.x] = fmaf(twice(b[0] * 2), 1.0f, fmaxf(0.0f, c)); __syncthreads();
  """
    lines = [line.strip() for line in translated(text).splitlines() if line.strip()]
    assert lines == [
        "#define twice(value) ((value) + (value))",
        "threadgroup float some[8];",
        "threadgroup float others[2];",
        "const device T* from = a + 1;",
        "threadgroup float* to = others + 1;",
        "const float4 all = reinterpret_cast<const threadgroup float4*>(some)[0];",
        "some[int(thread_index_in_threadgroup)] = metal::fma(twice(b[0] * 2), 1.0f, "
        "metal::max(0.0f, c)); threadgroup_barrier(metal::mem_flags::mem_threadgroup);",
    ]
