"""The walk of a Markov head by our kernel: tokens, ties, and where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec.cuda import markov_walk
from specdec.cuda.kernels import cuda_kernel
from specdec.cuda.markov_walk import PART, Form, form_of, proven, reference, walk
from specdec.models.draft_heads.markov import GatedMarkovHead, MarkovHead
from tests.cuda.emulation import cuda

BF16 = mx.bfloat16


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from cuda.emulated(monkeypatch, cuda_kernel)


def some(rows: int, slots: int, size: int, rank: int, dtype: Any = BF16) -> list[Any]:
    """Whole numbers, so that every order of sums gives the same bits, and ties."""
    key = mx.random.split(mx.random.key(rows * size + rank), 4)
    logits = mx.random.randint(-5, 6, (rows, slots, size), key=key[0])
    embedding = mx.random.randint(-1, 2, (size, rank), key=key[1])
    weights = mx.random.randint(-1, 2, (size, rank), key=key[2])
    anchor = mx.random.randint(0, size, (rows, 1), key=key[3])
    return [*(a.astype(dtype) for a in (logits, embedding, weights)), anchor]


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("rows", "slots", "size", "rank"),
    [(1, 6, 3 * PART + 5, 64), (3, 2, 40, 8), (2, 1, PART, 16), (1, 3, 2 * PART, 256)],
)
@pytest.mark.parametrize("dtype", [BF16, mx.float16])
def test_tokens_are_those_of_operations(
    rows: int, slots: int, size: int, rank: int, dtype: Any
) -> None:
    given = some(rows, slots, size, rank, dtype)
    assert mx.array_equal(walk(*given), reference(*given))


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
def test_equal_logits_go_to_the_first_token() -> None:
    """Of one thread, of two, and of two parts."""
    size = 3 * PART
    zeros = mx.zeros((size, 8), BF16)
    for tokens in ([5, 5 + 128], [9, 200], [PART + 3, 2 * PART], [size - 1]):
        logits = mx.zeros((1, 2, size), BF16)
        logits[..., mx.array(tokens)] = 1
        found = walk(logits, zeros, zeros, mx.array([[7]], mx.int32))
        assert found.tolist() == [[7, tokens[0], tokens[0]]]


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("worst", [-mx.inf, mx.nan])
def test_a_token_is_found_whatever_the_logits_are(worst: float) -> None:
    """What is no token would be read beyond the embedding."""
    size = PART + 9
    given = some(2, 3, size, 8)
    given[0][:, 1] = worst
    found = walk(*given)
    assert ((found >= 0) & (found < size)).all()
    assert mx.array_equal(found[:, :2], reference(*given)[:, :2])


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
def test_proofs_find_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Form(BF16, 16)
    assert markov_walk._agrees(form)
    for right, wrong in (
        ("its < token_of", "its > token_of"),
        ("width - 2 * parts", "width - 2 * parts - 1"),
        ("* R + i]);", "* R]);"),
        ("static_cast<T>(bias)", "static_cast<T>(0.0f * bias)"),
        ("slot * logits_strides[1]", "0"),
    ):
        with monkeypatch.context() as patch:
            cuda.plant(patch, markov_walk, "_STEP", right, wrong)
            with suppress(cuda.KernelFault):
                assert not markov_walk._agrees(form), right


def layers(rank: int = 8, dtype: Any = BF16) -> MarkovHead:
    head = MarkovHead(40, 40, rank, 16)
    head.set_dtype(dtype)
    return head


def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that was not proven, and what has none, is walked by MLX's operations."""
    monkeypatch.setattr(proven, "verdicts", {Form(BF16, 8): True})
    monkeypatch.setattr(markov_walk, "walk", lambda *given: given[-1])
    logits, anchor = mx.zeros((2, 3, 40), BF16), mx.zeros((2, 1), mx.int32)
    assert layers().walk(logits, anchor) is anchor
    many = mx.zeros((markov_walk.MOST_ROWS + 1, 3, 40), BF16)
    assert layers().walk(many, anchor) is None
    assert layers().walk(logits.astype(mx.float32), anchor) is None
    assert layers(16).walk(logits, anchor) is None  # not proven
    packed = layers(64)
    nn.quantize(packed, group_size=64, bits=4)
    for head in (layers(12), layers(8, mx.float32), layers(512), packed):
        assert form_of(head.markov_w1, head.markov_w2) is None
    gated = GatedMarkovHead(40, 40, 8, 16)
    gated.set_dtype(BF16)
    assert gated.walk_form is None
    assert len(markov_walk.proofs_of(layers())) == 1
