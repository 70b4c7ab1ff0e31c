"""Gated delta layers by one kernel: its source, run on the CPU, and its reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

from specdec.cuda import gated_delta, kernels
from specdec.cuda.gated_delta import Form, Found, Log
from tests.cuda.emulation.cuda import emulated, needs_compiler

PLAIN = Form(
    dtype=mx.float32,
    key_heads=2,
    repeats=2,
    key_size=16,
    value_size=16,
    kernel_size=4,
    eps=1e-6,
    grouped=False,
    types=(mx.float32, mx.float32, mx.float32),
)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(monkeypatch, gated_delta._kernel, kernels.cuda_kernel)


def agrees(form: Form, rounds: tuple[tuple[int, list[int]], ...]) -> bool:
    """Whether rounds of so many tokens, of which rows keep some, are as referred to."""
    rows = len(rounds[0][1])
    weights, _, window, state = gated_delta.drawn(form, rows, 1)
    past: list[mx.array | Log] = [window] * 2
    before, kept = [state] * 2, None
    for i, (tokens, keeps) in enumerate(rounds):
        inputs = gated_delta.drawn(form, rows, tokens, seed=i)[1]
        found: list[Found] = [
            how(form, weights, inputs, past[n], before[n], kept)
            for n, how in enumerate((gated_delta.scan, gated_delta.reference))
        ]
        if not gated_delta.alike(form, *found):
            return False
        past[:], before = [f.log for f in found], [f.before for f in found]
        kept = mx.array(keeps)
    return True


ROUNDS = (
    (1, [0, 1]),
    (5, [2, 5]),
    (1, [1, 0]),
    (9, [9, 0]),
    (16, [15, 3]),
    (2, [0, 0]),
)


HALF = replace(
    PLAIN,
    dtype=mx.bfloat16,
    grouped=True,
    key_size=48,
    repeats=3,
    kernel_size=3,
    types=(mx.float32, mx.bfloat16, mx.bfloat16),
)
WIDE = replace(PLAIN, key_size=128, value_size=128, repeats=1, dtype=mx.float16)


@needs_compiler
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", [PLAIN, HALF, WIDE])
def test_emulated(form: Form) -> None:
    """Rounds longer than a tile, of one token, of which rows keep all or none."""
    assert agrees(form, ROUNDS if form is not WIDE else ROUNDS[:2])
