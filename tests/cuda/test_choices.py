"""Kernels are chosen by what they take on the machine at hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec.cuda import choices, packed_matmul, proofs, skinny_matmul
from specdec.cuda.flattened_matmul import FlattenedLinear
from specdec.cuda.fused_linear import choices_of, join_products
from specdec.cuda.modules import as_kind
from specdec.cuda.skinny_matmul import take_few_rows, takes

BF16 = mx.bfloat16


def name(kind: choices.Kind) -> str:
    """The name of a choice."""
    return " ".join(map(str, kind))


class Device:
    """A clock, and kernels that take as long as they are told to.

    Attributes:
        ours, theirs: seconds of a product.
        timed: how often each was computed.
    """

    def __init__(self) -> None:
        self.now = self.ours = self.theirs = 0.0
        self.timed: list[str] = []

    def clock(self) -> float:
        return self.now

    def run(self, whose: str) -> Callable[[], list[mx.array]]:
        def run() -> list[mx.array]:
            self.timed.append(whose)
            self.now += getattr(self, whose)
            return []

        return run

    def choose(self, kind: choices.Kind, *, usual: bool) -> bool | None:
        runs = [(self.run("ours"), self.run("theirs"))]
        choices.choose(kind, runs, usual=usual, clock=self.clock)
        return choices.chosen(kind)


class Kept(dict[str, bool]):
    """What earlier processes found."""

    put = dict.__setitem__


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_ours", {})


@pytest.mark.parametrize(
    ("ours", "theirs", "usual", "chosen"),
    [
        (1.0, 2.0, False, True),
        (2.0, 1.0, True, False),
        # About as fast: what is usual.
        (1.0, 1.05, False, False),
        (1.05, 1.0, True, True),
    ],
)
def test_what_is_clearly_faster_is_taken_and_remembered(
    ours: float, theirs: float, usual: bool, chosen: bool
) -> None:
    """A second process times nothing; noise changes nothing."""
    device, kept = Device(), Kept()
    device.ours, device.theirs = ours, theirs
    with proofs.kept_in(kept):
        assert device.choose(("a", 8), usual=usual) is chosen
    assert len(device.timed) == 2 * (2 + choices.TIMES)
    assert kept == {"a 8": chosen}
    choices._ours.clear()
    device.timed.clear()
    with proofs.kept_in(kept):
        assert device.choose(("a", 8), usual=usual) is chosen
    assert device.timed == []


def test_what_cannot_be_run_is_not_chosen() -> None:
    def fail() -> list[mx.array]:
        raise RuntimeError("no such kernel")

    kept = Kept()
    with proofs.kept_in(kept):
        choices.choose(("a",), [(fail, fail)], usual=True)
    assert choices.chosen(("a",)) is None
    assert kept == {}


def test_a_choice_is_a_matrix_s_own_and_holds_for_few_rows() -> None:
    """A row has the same bits beside any others, up to the rows that were timed."""
    weight, other = mx.zeros((64, 32), BF16), mx.zeros((32, 64), BF16)
    rows = {n: mx.zeros((n, 32), BF16) for n in (1, 8, 32, 33)}
    assert all(takes(x, weight, None) for x in rows.values())
    choices.take({name(skinny_matmul._kind(weight)): False})
    assert not any(takes(x, weight, None) for x in rows.values())
    assert takes(mx.zeros((8, 64), BF16), other, None)
    large = mx.zeros((skinny_matmul.MOST_WEIGHTS // 32 + 1, 32), BF16)
    assert not any(takes(x, large, None) for x in rows.values())
    choices.take({name(skinny_matmul._kind(large)): True})
    assert [takes(x, large, None) for x in rows.values()] == [True, True, True, False]


def packed(columns: int, length: int, bits: int) -> Any:
    linear = nn.Linear(length, columns, bias=False)
    linear.set_dtype(BF16)
    layer = nn.QuantizedLinear.from_linear(linear, group_size=64, bits=bits)
    return as_kind(layer, FlattenedLinear).eval()


def test_one_row_of_packed_weights_is_chosen_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a few rows ours is taken: MLX's would be compiled for half a minute."""
    form = packed_matmul.Form(BF16, 8, 64, eights=False)
    monkeypatch.setattr(packed_matmul.proven, "verdicts", {form: True})
    layer = packed(64, 128, 8)
    one, two = (mx.zeros((n, 128), BF16) for n in (1, 2))
    assert not packed_matmul.computes(layer, one)
    asked, usually = Counter[int](), []

    def product(x: mx.array, *_: Any, **__: Any) -> list[mx.array]:
        asked[x.shape[0]] += 1
        return [x]

    def choose(kind: Any, runs: Any, *, usual: bool) -> None:
        usually.append(usual)
        for run in (run for each in runs for run in each):
            assert run()[0].shape[1:] == (128,)
        choices._ours[name(kind)] = kind[:2] != ("packed rows", 256)

    monkeypatch.setattr(packed_matmul, "product", product)
    monkeypatch.setattr(choices, "choose", choose)
    assert packed_matmul.most_rows(layer) == packed_matmul.MOST_ROWS
    packed_matmul.choose([layer] * 3)
    # No matrix twice: MLX would unpack it once.
    assert asked == {1: choices.PRODUCTS, 128: 3, 256: 3}
    assert usually == [False, True, False]
    assert packed_matmul.computes(layer, one)
    assert packed_matmul.computes(layer, two)
    # Of more than 128 rows it is unpacked, of as many it is not.
    assert packed_matmul.most_rows(layer) == 128
    for rows, ours in ((128, 1), (129, 0)):
        asked.clear()
        packed_matmul.of_layer(layer, mx.zeros((rows, 128), BF16))
        assert asked.total() == ours


def test_mlx_is_not_timed_where_it_compiles_another_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load, or the first round, compiles MLX's kernel for half a minute."""
    form = packed_matmul.Form(BF16, 4, 64, eights=False)
    monkeypatch.setattr(packed_matmul.proven, "verdicts", {form: True})
    layer, timed = packed(16384 + 64, 64, 4), list[str]()
    monkeypatch.setattr(choices, "choose", lambda kind, *_, **__: timed.append(kind[0]))
    packed_matmul.choose([layer])
    assert set(timed) == {"packed rows"}
    assert packed_matmul.computes(layer, mx.zeros((1, 64), BF16))
    assert not packed_matmul.computes(packed(16384, 64, 4), mx.zeros((1, 64), BF16))


def test_a_models_matrices_are_timed_as_they_are_used(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked ones once, at each number of rows, several layers' in turn."""
    monkeypatch.setattr(skinny_matmul, "proven", lambda dtype: True)
    monkeypatch.setattr(skinny_matmul, "product", lambda x, weight, bias: x @ weight.T)
    seen: dict[Any, tuple[int, list[int]]] = {}
    layers = 0
    chained = choices.chained

    def count(products: Any, x: mx.array) -> choices.Run:
        nonlocal layers
        layers = len(products)
        return chained(products, x)

    def choose(kind: Any, runs: Any, *, usual: bool) -> None:
        both = [(ours(), theirs()) for ours, theirs in runs]
        assert all(mx.array_equal(ours[0], theirs[0]) for ours, theirs in both)
        seen[kind[2:]] = layers, [ours[0].shape[0] for ours, _ in both]
        assert usual

    monkeypatch.setattr(choices, "chained", count)
    monkeypatch.setattr(choices, "choose", choose)
    model = tiny_model("llama", seed=0, num_hidden_layers=3)
    model.set_dtype(BF16)
    take_few_rows(model)
    join_products(model)
    for step in choices_of(model):
        step()
    rows = list(skinny_matmul.TIMED_ROWS)
    assert seen == {
        (32 + 2 * 16, 32): (3, rows),  # queries, keys and values
        (2 * 64, 32): (3, rows),  # gate and up
        (32, 32): (3, rows),  # attention's output
        (32, 64): (3, rows),  # down
        (97, 32): (1, rows),  # the embedding as the output layer
    }


def test_products_of_a_chain_follow_each_other() -> None:
    """Apart from each other a device computes several at once, which no model does."""
    x = mx.random.normal((2, 8), key=mx.random.key(0))
    weights = [mx.random.normal((4, 8), key=mx.random.key(i)) for i in (1, 2, 3)]

    def times(w: mx.array) -> Callable[[mx.array], mx.array]:
        return lambda x: x @ w.T * 0.1

    run = choices.chained([times(w) for w in weights], x)
    expected = x
    for i in range(choices.PRODUCTS):
        expected = expected + (expected @ weights[i % 3].T * 0.1)[:, :1]
    assert mx.allclose(run()[0], expected, rtol=1e-3)
