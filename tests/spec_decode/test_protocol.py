"""What a drafter must write, and that what it proposes is looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from specdec import DrafterError
from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine.profiler import measure_forwards
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    ChainDrafter,
    Drafter,
    DraftModel,
    DraftRows,
    NgramDrafter,
    NgramOptions,
    Proposals,
    Round,
)
from specdec.spec_decode.guard import vetted
from specdec.spec_decode.ngram import NgramRows
from tests.plain import AT_ONCE, BACKENDS, VOCAB, exact
from tests.spec_decode.repetitive import make_prompts

Make = Callable[[int, int], Any]


class Proposing(Drafter):
    """Proposes what ``make(B, k)`` gives."""

    def __init__(self, make: Make, *, forgetful: bool = False):
        self.make = make
        self.forgetful = forgetful

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> ProposingRows:
        return ProposingRows(self, len(prompts))


class ProposingRows(DraftRows):
    def __init__(self, drafter: Proposing, num_rows: int):
        self.drafter = drafter
        self.num_rows = num_rows

    def propose(self, round_: Round) -> Proposals:
        return self.drafter.make(self.num_rows, round_.num_draft_tokens)  # type: ignore[no-any-return]

    def filter(self, rows: Sequence[int]) -> None:
        if not self.drafter.forgetful:
            self.num_rows = len(rows)

    def extend(self, other: ProposingRows) -> None:
        self.num_rows += other.num_rows


def sound(num_rows: int, k: int) -> Proposals:
    return Proposals(mx.full((num_rows, k), 3, mx.int32))


def with_lengths(lengths: Callable[[int], Any]) -> Make:
    return lambda b, k: replace(sound(b, k), lengths=lengths(b))


def with_probabilities(probabilities: Callable[[int, int], Any]) -> Make:
    return lambda b, k: replace(sound(b, k), probabilities=probabilities(b, k))


PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
FAULTS: dict[str, tuple[Make, str]] = {
    "none": (lambda b, k: None, "propose returned a NoneType: it must return Prop"),
    "a tuple": (lambda b, k: (1, 2), "propose returned a tuple"),
    "a list": (
        lambda b, k: Proposals([[1] * k] * b),  # type: ignore[arg-type]
        r"the tokens that it proposed are of type list: they must be an array of "
        r"integers of shape \([34], 2\)",
    ),
    "no tokens": (lambda b, k: Proposals(None), "tokens .* are of type NoneType"),  # type: ignore[arg-type]
    "too few": (lambda b, k: sound(b, k - 1), r"are int32 of shape \([34], 1\): they"),
    "flat": (
        lambda b, k: Proposals(mx.zeros((b,), mx.int32)),
        r"shape \([34],\): they",
    ),
    "another batch": (lambda b, k: sound(b + 1, k), r"of shape \([45], 2\): they must"),
    "floats": (lambda b, k: Proposals(mx.zeros((b, k))), r"are float32 of shape"),
    "truth": (lambda b, k: Proposals(mx.zeros((b, k), mx.bool_)), "are bool of shape"),
    "lengths": (
        with_lengths(lambda b: mx.zeros((b, 1))),
        r"the lengths .* \([34], 1\)",
    ),
    "float lengths": (with_lengths(lambda b: mx.zeros((b,))), "lengths .* float32"),
    "probabilities": (
        with_probabilities(lambda b, k: mx.zeros((b, k, VOCAB - 1))),
        r"the probabilities .* \([34], 2, 96\): they must be an array of floats of "
        r"shape "
        r"\([34], 2, 97\)",
    ),
}


def decode(model: Any, drafter: Drafter, backend: BackendDefaults = AT_ONCE) -> None:
    exact(
        model, None, make_prompts()[:5], [9 + i for i in range(5)],
        batch_size=3, num_draft_tokens=2, backend=backend, drafter=drafter,
    )  # fmt: skip


def looked_at(make: Make) -> None:
    """Look at proposals for four rows and k = 2, as in a round."""
    round_: Any = SimpleNamespace(
        num_draft_tokens=2,
        recent=mx.zeros((4, 2), mx.int32),
        sampling=SimpleNamespace(vocab_size=VOCAB),
    )
    vetted(ProposingRows(Proposing(sound), 4), round_, make(4, 2))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_proposal_is_named(fault: str) -> None:
    make, message = FAULTS[fault]
    looked_at(sound)
    with pytest.raises(DrafterError, match=f"drafter ProposingRows: .*{message}"):
        looked_at(make)


def test_with_auto_too(target: Any) -> None:
    """There it is timed before the first round."""
    runner = ModelRunner(target, "target", EngineConfig(), AT_ONCE)
    faulty = Proposing(lambda b, k: None)
    with pytest.raises(DrafterError, match="ProposingRows: propose returned a None"):
        measure_forwards(runner, faulty, 2, max_draft_tokens=2)


@BACKENDS
def test_rows_that_were_not_dropped_are_noticed(
    backend: BackendDefaults, target: Any, draft_failures: list[str]
) -> None:
    """The first round was right; what is wrong comes with rows that leave."""
    model = target
    decode(model, Proposing(sound), backend)
    assert draft_failures == []
    decode(model, Proposing(sound, forgetful=True), backend)
    named = "drafter ProposingRows: the tokens that it proposed"
    assert draft_failures.pop().startswith(named)


def in_round(
    number: int, fault: Callable[[int, int], Any]
) -> Callable[[int, int], Any]:
    """Makes sound proposals but in that round."""
    rounds = count(1)
    return lambda b, k: (fault if next(rounds) == number else sound)(b, k)


def singular(b: int, k: int) -> Proposals:
    """What fails where it is computed, not where it is built."""
    inverse = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    return Proposals(mx.zeros((b, k), mx.int32) + inverse.sum().astype(mx.int32))


def tokens_of(token: int, dtype: mx.Dtype) -> Callable[[int, int], Proposals]:
    return lambda b, k: Proposals(mx.full((b, k), token, dtype))


LATER: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "beyond": (tokens_of(VOCAB, mx.int32), "one is 97: they must be 0 to 96"),
    "far": (tokens_of(10**6, mx.int32), "one is 1000000: they"),
    "below": (tokens_of(-1, mx.int64), "one is -1: they"),
    "far below": (tokens_of(-(10**9), mx.int32), "one is -1000000000: they"),
    "beyond int32": (tokens_of(2**32 + 1, mx.int64), "one is 4294967297: they"),
    "narrow": (tokens_of(-1, mx.int8), "one is -1: they"),
    "negative lengths": (
        with_lengths(lambda b: mx.full((b,), -1)),
        "among the lengths that it proposed, one is -1: they must be 0 to 2",
    ),
    "long lengths": (with_lengths(lambda b: mx.full((b,), 3)), "one is 3: they"),
    "lazy": (singular, r"failed \(RuntimeError: .*Inverse"),
    "shape": (lambda b, k: Proposals(mx.zeros((b, k + 1), mx.int32)), r"\([34], 3\)"),
    "type": (tokens_of(1, mx.float32), "float32"),
    "nothing": (lambda b, k: None, "returned a NoneType"),
}


@pytest.mark.parametrize("fault", [name for name in LATER if name != "lazy"])
def test_values_out_of_range_are_named(fault: str) -> None:
    make, message = LATER[fault]
    with pytest.raises(DrafterError, match=message):
        looked_at(make)


@BACKENDS
@pytest.mark.parametrize(
    ("fault", "verification"),
    [("far", "coupled"), ("far", "rejection"), ("lazy", "coupled"), ("shape", "block")],
)
def test_every_round_is_looked_at(
    fault: str,
    verification: Any,
    backend: BackendDefaults,
    target: Any,
    draft_failures: list[str],
) -> None:
    """A value that is out of range reads what is not there, hangs, or ends the run."""
    make, message = LATER[fault]
    params = SamplingParams(max_tokens=12, verification=verification)
    drafter = Proposing(in_round(3, make))
    exact(
        target, None, PROMPTS, params,
        num_draft_tokens=2, backend=backend, drafter=drafter,
    )  # fmt: skip
    assert re.match(f"drafter ProposingRows:? .*{message}", draft_failures.pop())


@pytest.mark.parametrize("fault", ["far", "negative lengths", "lazy"])
def test_a_draft_model_does_not_read_what_another_proposed_unseen(
    fault: str, target: Any, draft_failures: list[str]
) -> None:
    """In a chain the second one reads it before the target does."""
    make, message = LATER[fault]
    runner = ModelRunner(target, "draft", EngineConfig(), AT_ONCE)
    second = DraftModel(runner, vocab_size=VOCAB, max_draft_tokens=2)
    chain = ChainDrafter(Proposing(in_round(2, make)), second)
    exact(target, None, [[1, 2, 3]], 12, num_draft_tokens=2, drafter=chain)
    assert re.search(message, draft_failures.pop())


@pytest.mark.parametrize("fault", ["far", "negative lengths", "lazy"])
def test_values_are_looked_at_where_costs_are_measured(fault: str, target: Any) -> None:
    runner = ModelRunner(target, "target", EngineConfig(), AT_ONCE)
    faulty = Proposing(LATER[fault][0])
    with pytest.raises(DrafterError, match=LATER[fault][1]):
        measure_forwards(runner, faulty, 2, max_draft_tokens=2)


@pytest.mark.parametrize("forgotten", ["propose", "filter", "extend"])
def test_what_must_be_written(forgotten: str) -> None:
    """A class without it cannot be made; the others may be left out."""
    written = {
        name: getattr(ProposingRows, name)
        for name in ("__init__", "propose", "filter", "extend")
        if name != forgotten
    }
    forgetful = type("Forgetful", (DraftRows,), written)
    with pytest.raises(TypeError, match=f"Forgetful .*{forgotten}"):
        forgetful(Proposing(sound), 1)
    with pytest.raises(TypeError, match=r"Empty .*rows"):
        type("Empty", (Drafter,), {})()


class Derived(Proposals):
    """Is of another class."""


def ready_beside(num_rows: int, k: int) -> Proposals:
    return Proposals.within(mx.full((num_rows, k + 1), 3, mx.int32))


def derived_beside(num_rows: int, k: int) -> Proposals:
    return Derived.within(mx.full((num_rows, k + 1), 3, mx.int32))


class OtherNgramRows(NgramRows):
    """Hands over another newest token than each row has."""

    def propose(self, round_: Round) -> Proposals:
        proposals = super().propose(round_)
        assert proposals.inputs is not None
        return Proposals.within(
            (proposals.inputs + 1) % VOCAB, lengths=proposals.lengths
        )


class OtherNgrams(NgramDrafter):
    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> OtherNgramRows:
        return OtherNgramRows(self, prompts, max_length)


@BACKENDS
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(
    "drafter",
    [
        Proposing(ready_beside),
        Proposing(derived_beside),
        OtherNgrams(NgramOptions(min_ngram=1)),
    ],
    ids=["ready", "derived", "ngrams"],
)
def test_no_drafter_chooses_what_the_target_reads(
    drafter: Any,
    chained: bool,
    backend: BackendDefaults,
    target: Any,
    draft_failures: list[str],
) -> None:
    """Of the newest token, which nothing compares, the output would be another."""
    if chained:
        drafter = ChainDrafter(drafter, Proposing(sound))
    decode(target, drafter, backend)
    assert not draft_failures
