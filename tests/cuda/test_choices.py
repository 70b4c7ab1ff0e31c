"""Kernels are chosen by what they take on the machine at hand."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from specdec.cuda import choices, proofs, skinny_matmul
from specdec.cuda.skinny_matmul import takes

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
    # Rank 0's choice stays, whatever this machine has found.
    choices.take({"a 8": not chosen})
    with proofs.kept_in(kept):
        assert device.choose(("a", 8), usual=usual) is not chosen


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
    assert len(choices.all_chosen()) == 1  # the other process's, and no others
    assert [takes(x, large, None) for x in rows.values()] == [True, True, True, False]


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
