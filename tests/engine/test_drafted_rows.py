"""Rows are drafted for from their beginning or not at all: tokens are the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine.batch import DecodeBatch
from specdec.engine.round import IDLE
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import (
    ChainDrafter,
    Drafter,
    DraftModel,
    DraftRows,
    NgramDrafter,
    Proposals,
    Round,
)
from specdec.spec_decode.draft_length import BatchState
from tests.plain import (
    AT_ONCE,
    BACKENDS,
    BEHIND,
    VOCAB,
    ask,
    drafts_of,
    engine_of,
    exact,
    run_rows,
)
from tests.scripted import Script
from tests.spec_decode.repetitive import Knowing, KnowingRows

WINDOWED = {"sliding_window": 24, "sliding_window_pattern": 2}


class Deciding(Script):
    """Says by the number of the question whether rows that begin are drafted for."""

    def __init__(self, choose: Callable[[int], int], answers: Sequence[bool]):
        super().__init__(choose)
        self._answers = answers

    def may_pay(self, state: BatchState) -> bool:
        super().may_pay(state)
        return self._answers[(len(self.asked) - 1) % len(self._answers)]


class Noting(Drafter):
    """A drafter that notes the prompts that it is given."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.prompts: list[tuple[int, ...]] = []

    def rows(self, prompts: Any, *, max_length: int) -> Any:
        # That of an idle slot is a token 0.
        self.prompts += [tuple(p) for p in prompts if tuple(p) != (0,)]
        return self.drafter.rows(prompts, max_length=max_length)


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def draft_model(model: Any, backend: BackendDefaults, **options: Any) -> DraftModel:
    runner = ModelRunner(model, "draft", EngineConfig(**options), backend)
    return DraftModel(runner, vocab_size=runner.vocab_size, max_draft_tokens=4)


@BACKENDS
@pytest.mark.parametrize("drafts", [True, False])
def test_drafting_begins_once_however_many_rows_come_and_go(
    target: Any, backend: BackendDefaults, drafts: bool
) -> None:
    """A draft that begins anew whenever rows change is never ready among many."""
    rng = random.Random(1)
    prompts = make_prompts(*[rng.randrange(50, 70) for _ in range(16)])
    lengths = [rng.randrange(6, 24) for _ in prompts]
    drafter = Noting(draft_model(target, backend, prefill_step_size=16))
    rows = exact(
        target, None, prompts, lengths,
        batch_size=4, num_draft_tokens=4, backend=backend, drafter=drafter,
        length=Script(lambda number: 3 if number >= 3 else 0, may_pay=drafts),
    )  # fmt: skip
    expected = prompts if drafts else []
    assert sorted(drafter.prompts) == sorted(map(tuple, expected))
    assert all(r.accepted == r.drafted for r in rows)
    assert all((r.drafted > 0) == drafts for r in rows)


@pytest.mark.parametrize("kind", ["model", "model that waits", "ngram"])
def test_rounds_hold_no_memory_while_nothing_is_drafted(
    tiny_model: Callable[..., Any], kind: str
) -> None:
    """The noise of a round is as large as its logits: one that is kept is seen."""
    batch, vocab_size = 4, 20_000
    model = tiny_model("llama", seed=0, vocab_size=vocab_size)
    drafter: Drafter = NgramDrafter()
    if kind != "ngram":
        drafter = draft_model(model, AT_ONCE, prefill_step_size=16)
    length = Script(
        lambda number: 3 if number >= 40 else 0, may_pay=kind != "model that waits"
    )
    engine = engine_of(
        model, batch_size=batch, num_draft_tokens=4, drafter=drafter, length=length
    )
    for i, prompt in enumerate(make_prompts(*[120] * batch)):
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=i)
        ask(engine, prompt, params, i)
    held: list[int] = []
    while engine.busy:
        engine.step()
        if len(length.outcomes) > len(held):
            held.append(mx.get_active_memory())
    noise = batch * vocab_size * 4
    assert max(held[10:40]) - max(held[4:8]) < 2 * noise


@BACKENDS
@pytest.mark.parametrize("seed", range(2))
def test_rows_with_and_without_a_draft_come_and_go(
    tiny_model: Callable[..., Any], backend: BackendDefaults, seed: int
) -> None:
    """A draft that knows one of its rows wrongly is refused, and so it is here.

    Rows without a draft are joined by rows that have one, and the other way round,
    while rounds draft and while they rest.
    """
    model = tiny_model("gemma3_text", seed=2, **WINDOWED)
    rng = random.Random(seed)
    prompts = make_prompts(30, 3, 12, 60, 2, 9, 41, 1, seed=seed)
    lengths = [rng.choice((3, 8, 25, 90)) for _ in prompts]
    answers = [rng.random() < 0.5 for _ in range(16)]
    length = Deciding(lambda number: 3 if number % 90 < 20 else 0, answers)
    drafter = Noting(draft_model(model, backend, prefill_step_size=16))
    rows = exact(
        model, None, prompts, lengths, batch_size=3, num_draft_tokens=4,
        backend=backend, drafter=drafter, length=length,
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert accepted == drafted > 0


@BACKENDS
@pytest.mark.parametrize("kind", ["ngram", "chain", "another model"])
def test_any_drafter_may_have_a_part_of_the_rows(
    tiny_model: Callable[..., Any], target: Any, backend: BackendDefaults, kind: str
) -> None:
    """Sampled too; the text does not depend on which rows are drafted for."""
    prompts = make_prompts(20, 33, 5, 12)
    params = [
        SamplingParams(max_tokens=n, temperature=t, seed=i)
        for i, (n, t) in enumerate(((50, 0.0), (20, 0.8), (60, 0.0), (40, 1.0)))
    ]
    drafter: Drafter = NgramDrafter()
    if kind != "ngram":
        other = tiny_model("llama", seed=5, num_hidden_layers=1)
        drafter = draft_model(other, backend)
    if kind == "chain":
        drafter = ChainDrafter(NgramDrafter(), drafter)
    rows = exact(
        target, None, prompts, params, batch_size=2, num_draft_tokens=4,
        backend=backend, drafter=drafter,
        length=Deciding(lambda number: 2 if number >= 5 else 0, [False, True]),
    )  # fmt: skip
    assert [r.drafted > 0 for r in rows] == [False, False, True, True]


def test_what_rows_that_begin_are_asked_by(target: Any) -> None:
    """Those that run without a draft have no use of one; what they took is known."""
    prompts = make_prompts(5, 9, 6)
    length = Script(lambda number: 2, may_pay=False)
    params = [SamplingParams(max_tokens=n) for n in (20, 10, 20)]
    rows = run_rows(target, target, prompts, params, batch_size=2, length=length)
    first, second = length.asked
    assert (first.num_rows, first.remaining, first.backlog) == (2, 20 - 5, 7)
    assert list(first.room) == [4, 4]
    assert (second.num_rows, second.backlog) == (2, 3)
    assert list(second.room) == [0, 4]
    assert not any(r.drafted for r in rows)
    assert all(o.forced for o in length.outcomes)


def test_rows_that_join_in_parts_are_asked_for_together(target: Any) -> None:
    """Catches a choice by the few rows of the first prefill: all wait for the last."""
    length = Script(lambda number: 2, may_pay=False)
    params = [SamplingParams(max_tokens=20)] * 4
    prompts = make_prompts(4, 4, 4, 60)
    run_rows(target, target, prompts, params, batch_size=4, length=length)
    first = length.asked[0]
    assert (first.num_rows, list(first.room)) == (4, [4] * 4)


def test_rows_join_those_that_draft_unasked(target: Any) -> None:
    """Until nothing was drafted for long: a draft of no use takes in no prompts."""
    length = Deciding(lambda number: 2 if number < 10 else 0, [True, False])
    rows = exact(
        target, target, make_prompts(9, 9, 9, 9), [250, 5, 110, 90],
        batch_size=2, num_draft_tokens=4, length=length,
    )  # fmt: skip
    assert [r.drafted > 0 for r in rows] == [True, True, True, False]
    assert [list(s.room) for s in length.asked] == [[4, 4], [4, 4]]


def test_rows_that_bring_a_draft_are_joined_as_those_that_draft(target: Any) -> None:
    """Catches a count of rounds without a draft that goes on from before they came."""
    params = SamplingParams(max_tokens=IDLE + 40, num_draft_tokens=0)
    engine = engine_of(target, target, num_draft_tokens=2)
    ask(engine, (5, 6), params)
    while engine.stats.rounds <= IDLE:
        engine.step()
    assert engine._running is not None
    assert not engine._running.drafts
    ask(engine, (7, 8), 30, 1)
    while len(engine._running.unfinished) < 2:
        engine.step()
    assert engine._running.drafts


def test_a_draft_is_dropped_with_the_last_row_that_has_one(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it misses would grow for as long as others run, for nothing."""
    ended: list[bool] = []
    retire = DecodeBatch.retire

    def noted(self: DecodeBatch) -> bool:
        had = self._draft is not None
        left = retire(self)
        ended.append(had and self._draft is None)
        return left

    monkeypatch.setattr(DecodeBatch, "retire", noted)
    length = Deciding(lambda number: 2, [False, True])
    rows = exact(
        target, target, make_prompts(9, 7, 5), [60, 4, 10],
        batch_size=2, num_draft_tokens=4, length=length,
    )  # fmt: skip
    assert [r.drafted > 0 for r in rows] == [False, False, True]
    assert ended.count(True) == 1
    assert length.outcomes[-1].forced


class Reading(Drafter):
    """Reads hidden states, and counts the calls that bring some."""

    hidden_layers = (-1,)

    def __init__(self) -> None:
        self.observed, self.committed = list[int](), 0

    def rows(self, prompts: Any, *, max_length: int) -> DraftRows:
        return ReadingRows(self)


class ReadingRows(DraftRows):
    def __init__(self, drafter: Reading):
        self._drafter = drafter

    def observe(self, hidden: Any, following: Any, lengths: Sequence[int]) -> None:
        self._drafter.observed.append(max(lengths))

    def propose(self, round_: Round) -> Proposals:
        return Proposals(mx.repeat(round_.recent[:, -1:], round_.num_draft_tokens, 1))

    def commit(self, round_: Round, accepted: Any) -> None:
        self._drafter.committed += 1

    def filter(self, rows: Sequence[int]) -> None: ...

    def extend(self, other: ReadingRows) -> None: ...


def test_a_head_reads_nothing_of_rows_that_it_is_not_asked_for(target: Any) -> None:
    """Catches prompts and plain rounds that are charged for a draft of no use."""
    for drafts in (True, False):
        head, length = Reading(), Deciding(lambda number: 2 * (number > 4), [drafts])
        exact(
            target, None, make_prompts(40, 20), 30,
            drafter=head, num_draft_tokens=2, length=length, prefill_step_size=16,
        )  # fmt: skip
        assert (head.committed > 4) is drafts
        assert (len(head.observed) > 2) is drafts
        assert any(head.observed) is drafts


def test_a_draft_is_asked_up_to_its_last_position(target: Any) -> None:
    """Catches a draft that is asked past its position table, or that stops early."""
    written: list[int] = []

    class Wrong(Knowing):
        context_length = 20

        def rows(
            self, prompts: Sequence[Sequence[int]], *, max_length: int
        ) -> KnowingRows:
            return WrongRows(self, [tuple(p) for p in prompts])

    class WrongRows(KnowingRows):
        def propose(self, round_: Round) -> Proposals:
            # Its cache would take all proposals but the last.
            lengths: Any = round_.lengths.tolist()
            written.append(lengths[0] + round_.num_draft_tokens - 1)
            return super().propose(round_)

    never = Wrong({}, lambda at, token: VOCAB - 1)
    params = [SamplingParams(max_tokens=40, logit_bias={VOCAB - 1: -100.0})]
    run_rows(
        target, None, [[5, 6, 7]], params,
        num_draft_tokens=3, drafter=never,
    )  # fmt: skip
    assert max(written) == 20


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_the_last_token_of_a_row_needs_no_draft(target: Any, verification: Any) -> None:
    """With a ratio rule its token depends on proposals, so the row alone decides."""
    params = SamplingParams(
        max_tokens=2, temperature=1.0, seed=3, verification=verification
    )
    rows = run_rows(
        target, target, [[5, 6, 7], [8, 9]], [params] * 2,
        num_draft_tokens=3, backend=BEHIND,
    )  # fmt: skip
    assert drafts_of(rows)[0] == (0 if verification == "coupled" else 2)
