"""Drafters that begin when they are wanted: tokens and acceptance are the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from specdec.engine.drafting import Drafting

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine.decode_batch import DecodeBatch
from specdec.engine.engine import Engine
from specdec.models.runner import ModelRunner
from specdec.prefix_cache.store import PrefixStore
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import ChainDrafter, Drafter, DraftModel, NgramDrafter
from specdec.spec_decode.draft_length import (
    AutoLength,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundOutcome,
)
from specdec.spec_decode.draft_length.pacing import Pacer
from tests.plain import (
    BEHIND,
    greedy,
    plainly,
    run_rows,
)
from tests.scripted import Script
from tests.spec_decode.repetitive import BACKENDS

VOCAB = 97
WINDOWED = {"sliding_window": 24, "sliding_window_pattern": 2}


class Late(Script):
    """Says that drafting may not pay, and wants k by the round's number."""

    def __init__(self, choose: Callable[[int], int], *, may_pay: bool = False):
        super().__init__(choose, may_pay=may_pay)


def make_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", seed=0)


@BACKENDS
@pytest.mark.parametrize("wanted", [0, 1, 7, 40, 90])
def test_a_perfect_draft_that_begins_late_is_accepted(
    target: Any, backend: BackendDefaults, wanted: int
) -> None:
    """From its first round on; prompts of several chunks, 16 tokens each."""
    prompts = make_prompts(7, 50, 30, 1)
    length = Late(lambda number: 2 if number >= wanted else 0)
    params = [SamplingParams(max_tokens=wanted + 40)] * 4
    rows = run_rows(
        target,
        target,
        prompts,
        params,
        num_draft_tokens=4,
        backend=backend,
        length=length,
    )
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == greedy(target, prompt, wanted + 40)
        assert row.accepted == row.drafted > 12
    # Nobody waited: while it took in its chunks, rounds went on without proposals.
    after = [o.num_draft_tokens for o in length.outcomes][wanted:]
    late = after.index(2)
    assert 1 <= late <= 10
    assert all(o.forced for o in length.outcomes[wanted:][:late])
    # What it takes in is told when it begins; then it has rounds to catch up with.
    begun, *_ = [o for o in length.outcomes if o.forced]
    assert begun.undrafted >= wanted + 88 // 4
    assert 0 < length.outcomes[wanted + late].undrafted <= late
    assert all(o.undrafted == 0 for o in length.outcomes[wanted + late + 1 :])
    begun_by = [s.begun for s in length.states]
    assert begun_by == sorted(begun_by)
    assert wanted < begun_by.count(False) <= wanted + 3


@BACKENDS
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go_while_drafts_begin(
    tiny_model: Callable[..., Any], backend: BackendDefaults, arch: str, seed: int
) -> None:
    """Rows join a batch without a drafter, one that gets it, and one that has it."""
    extra = WINDOWED if arch == "gemma3_text" else {}
    model = tiny_model(arch, seed=2, **extra)
    rng = random.Random(seed)
    prompts = make_prompts(30, 3, 12, 60, 2, 9, 41, seed=seed)
    lengths = [rng.choice((3, 8, 25, 60)) for _ in prompts]
    begin = rng.randrange(2, 30)
    length = Late(lambda number: 3 if number >= begin and number % 9 < 6 else 0)
    rows = run_rows(
        model,
        model,
        prompts,
        [SamplingParams(max_tokens=n) for n in lengths],
        batch_size=3,
        num_draft_tokens=4,
        backend=backend,
        length=length,
    )
    for row, prompt, n in zip(rows, prompts, lengths, strict=True):
        assert row.tokens == greedy(model, prompt, n)
    assert sum(r.accepted for r in rows) == sum(r.drafted for r in rows) > 0


@BACKENDS
@pytest.mark.parametrize("kind", ["ngram", "chain", "another model"])
def test_any_drafter_may_begin_late(
    tiny_model: Callable[..., Any],
    target: Any,
    backend: BackendDefaults,
    kind: str,
) -> None:
    """Sampled too; the text does not depend on when it begins."""
    prompts = make_prompts(20, 33, 5)
    params = [
        SamplingParams(max_tokens=50, temperature=t, seed=i)
        for i, t in enumerate((0.0, 0.8, 1.0))
    ]
    drafter: Drafter = NgramDrafter()
    if kind != "ngram":
        other = tiny_model("llama", seed=5, num_hidden_layers=1)
        drafter = DraftModel(
            ModelRunner(other, "draft", EngineConfig(), backend),
            vocab_size=VOCAB,
            max_draft_tokens=4,
        )
    if kind == "chain":
        drafter = ChainDrafter(NgramDrafter(), drafter)
    length = Late(lambda number: 2 if number >= 5 else 0)
    rows = run_rows(
        target,
        None,
        prompts,
        params,
        num_draft_tokens=4,
        backend=backend,
        drafter=drafter,
        length=length,
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == plainly(target, prompt, p).tokens
    assert sum(r.drafted for r in rows) > 0


def test_rounds_that_a_late_draft_is_not_told_of_are_noticed(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above fail for a draft that leaves out what was emitted meanwhile."""
    commit = Drafting.commit

    def silent(self: Drafting, round_: Any, verdict: Any) -> None:
        if self.ready:
            commit(self, round_, verdict)

    monkeypatch.setattr(Drafting, "commit", silent)
    length = Late(lambda number: 2 if number >= 3 else 0)
    rows = run_rows(
        target,
        target,
        make_prompts(7, 50),
        [SamplingParams(max_tokens=40)] * 2,
        num_draft_tokens=4,
        length=length,
    )
    assert sum(r.accepted for r in rows) < sum(r.drafted for r in rows)


def test_a_batch_that_never_empties_drafts_when_it_pays(target: Any) -> None:
    """What was decided for the rows that began it does not bind those that join."""
    prompts = make_prompts(5, 9, 6, 8, 7, 5)
    lengths = (10, 45, 30, 30, 30, 30)
    length = Late(lambda number: 2 if number >= 20 else 0)
    rows = run_rows(
        target,
        target,
        prompts,
        [SamplingParams(max_tokens=n) for n in lengths],
        batch_size=2,
        num_draft_tokens=4,
        length=length,
    )
    assert [r.drafted > 0 for r in rows] == [False, True, True, True, True, True]
    assert len(length.asked) == 1


def test_a_drafter_begins_at_once_where_it_may_pay(target: Any) -> None:
    length = Late(lambda number: 2, may_pay=True)
    params = [SamplingParams(max_tokens=20)] * 2
    run_rows(target, target, make_prompts(5, 9), params, length=length)
    assert not any(o.forced for o in length.outcomes[:3])
    (state,) = length.asked
    assert (state.num_rows, state.remaining, state.undrafted) == (2, 20, 7)


def test_what_is_missing_of_rows_is_known(target: Any) -> None:
    """All of the running rows that are drafted for, as long as nothing has begun."""
    length = Late(lambda number: 0)
    params = [SamplingParams(max_tokens=n) for n in (10, 5, 10)]
    params[2] = SamplingParams(max_tokens=10, num_draft_tokens=0)
    run_rows(target, target, make_prompts(20, 50, 90), params, length=length)
    missing = [s.undrafted for s in length.states]
    assert missing[0] == 36
    assert max(missing) <= 36 + 5
    # The longer one has left; the longest one never counts.
    assert 20 + 7 <= missing[-1] <= 20 + 9


def test_a_late_start_is_charged_for_and_kept() -> None:
    """The try that it was begun for follows, though credit is spent by it."""
    pacer = Pacer(length := charged(), count().__next__)
    while not (k := pacer.choose(1, [8], 1000, missing=200)):
        pacer.begin(0, (0,))
        pacer.read([1])
    before = length._credit.left
    assert before > 0
    pacer.begin(pacer.begin_late(200), (0,))
    pacer.read([1])
    assert length._credit.left < before - 1
    for _ in range(5):  # it is coming
        pacer.begin(pacer.defer(), (0,))
        pacer.read([1])
    assert pacer.choose(1, [8], 1000) == k
    # One that was let go before it was ready is weighed anew.
    pacer.begin(pacer.begin_late(200), (0,))
    pacer.read([1])
    assert pacer.choose(1, [8], 1000, missing=205) == 0


def charged() -> AutoLength:
    """Taking in 200 tokens costs three plain rounds; nothing was accepted so far."""
    forwards = Forwards(1, {1: 1.0, 2: 1.05, 5: 1.1, 9: 1.2}, 0.3, taking_in=2.0)
    length = AutoLength(RoundCosts(ForwardCosts([forwards])))
    for _ in range(4):
        length.observe(RoundOutcome(1, 1, [(1, 0)], 1.3))
        length.observe(RoundOutcome(1, 0, [], 1.0))
    return length


@BACKENDS
def test_late_starts_stay_within_the_credit(
    tiny_model: Callable[..., Any],
    target: Any,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a draft that is never right few are begun, and each of them drafts."""
    begun = []
    begin = Drafting.begin_late

    def counted(self: Drafting, texts: Any, **options: Any) -> None:
        begun.append(sum(map(len, texts)))
        begin(self, texts, **options)

    monkeypatch.setattr(Drafting, "begin_late", counted)
    wrong = tiny_model("llama", seed=77, num_hidden_layers=1)
    prompts = make_prompts(*[60] * 16)
    length = Steady()
    rows = run_rows(
        target,
        wrong,
        prompts,
        [SamplingParams(max_tokens=60)] * 16,
        batch_size=2,
        num_draft_tokens=4,
        backend=backend,
        length=length,
    )
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == greedy(target, prompt, 60)
    assert len(begun) <= 4
    assert length.drafted >= len(begun)


class Steady(AutoLength):
    """``auto`` on a machine whose rounds take what forwards do."""

    def __init__(self) -> None:
        self.drafted = 0
        super().__init__(RoundCosts(ForwardCosts()), measure=self.measured)

    def measured(self, num_rows: int) -> Forwards:
        return Forwards(num_rows, {1: 1.0, 2: 1.05, 5: 1.1}, 0.3, taking_in=3.0)

    def observe(self, outcome: RoundOutcome) -> None:
        k = outcome.num_draft_tokens
        self.drafted += k > 0
        if outcome.seconds is not None:
            outcome = replace(outcome, seconds=1 + 0.35 * k)
        if outcome.spent is not None:
            outcome = replace(outcome, spent=1 + 0.35 * k)
        super().observe(outcome)


@BACKENDS
def test_rows_that_leave_do_not_wait_for_a_draft_that_is_coming(
    target: Any, backend: BackendDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a chunk in a step, whoever leaves or joins meanwhile."""
    chunks = [0]
    advance = Drafting.advance

    def counted(self: Drafting) -> None:
        chunks[-1] += self.coming
        advance(self)

    monkeypatch.setattr(Drafting, "advance", counted)
    step = Engine.step

    def stepped(self: Engine) -> Any:
        chunks.append(0)
        return step(self)

    monkeypatch.setattr(Engine, "step", stepped)
    prompts = make_prompts(400, 300, 5, 200, 100)
    lengths = (40, 8, 60, 30, 50)
    length = Late(lambda number: 2 if number >= 3 else 0)
    rows = run_rows(
        target,
        target,
        prompts,
        [SamplingParams(max_tokens=n) for n in lengths],
        batch_size=2,
        num_draft_tokens=4,
        backend=backend,
        length=length,
    )
    for row, prompt, n in zip(rows, prompts, lengths, strict=True):
        assert row.tokens == greedy(target, prompt, n)
    assert max(chunks) == 1
    assert sum(r.accepted for r in rows) == sum(r.drafted for r in rows) > 0


def test_a_draft_of_no_use_is_let_go_when_rows_join(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that join then cost nothing, until it is wanted again."""
    let_go = []
    letting = DecodeBatch.let_go_of_draft

    def noted(self: DecodeBatch) -> None:
        let_go.append(self.idle)
        letting(self)

    monkeypatch.setattr(DecodeBatch, "let_go_of_draft", noted)
    length = Late(lambda number: 2 if number < 10 or number > 150 else 0)
    rows = run_rows(
        target,
        target,
        make_prompts(9, 9, 9, 9),
        [SamplingParams(max_tokens=n) for n in (250, 110, 90, 90)],
        batch_size=2,
        num_draft_tokens=4,
        length=length,
    )
    assert len(let_go) == 1
    assert let_go[0] >= 64
    assert sum(r.accepted for r in rows) == sum(r.drafted for r in rows)
    assert rows[0].drafted > 40


class Failing(NgramDrafter):
    """Raises when rows are begun late, in one way or another."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def late(self) -> Any:
        if self.where == "late":
            raise RuntimeError("no")
        return self

    def rows(self, prompts: Any, *, max_length: int) -> Any:
        rows = super().rows(prompts, max_length=max_length)

        def fails(*_: Any) -> Any:
            raise RuntimeError("no")

        if self.where != "late":
            setattr(rows, self.where, fails)
        return rows


@pytest.mark.parametrize("where", ["late", "prefill", "commit", "propose"])
def test_a_drafter_that_fails_while_it_begins_costs_its_drafts_alone(
    target: Any, where: str, draft_failures: list[str]
) -> None:
    prompts = make_prompts(20, 33)
    rows = run_rows(
        target,
        None,
        prompts,
        [SamplingParams(max_tokens=30)] * 2,
        num_draft_tokens=4,
        drafter=Failing(where),
        length=Late(lambda number: 2 if number >= 3 else 0),
    )
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == greedy(target, prompt, 30)
        assert row.drafted == 0
    assert "(RuntimeError: no)" in draft_failures.pop()


class OfOldCode:
    """A drafter that was written before drafters could begin late."""

    context_length: int | None = None
    hidden_layers: tuple[int, ...] = ()

    def rows(self, prompts: Any, *, max_length: int) -> Any:
        return NgramDrafter().rows(prompts, max_length=max_length)


def test_a_drafter_need_not_know_of_it(target: Any) -> None:
    prompt = [5, 6, 7] * 8
    (row,) = run_rows(
        target,
        None,
        [prompt],
        [SamplingParams(max_tokens=30)],
        num_draft_tokens=4,
        drafter=OfOldCode(),
        length=(length := Late(lambda number: 2 if number >= 3 else 0)),
    )
    assert row.tokens == greedy(target, prompt, 30)
    assert any(o.num_draft_tokens for o in length.outcomes)


def test_what_was_generated_is_not_kept_with_prefixes(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late rows take in prompt and answer; the store has prompts alone."""
    placed = []
    insert = PrefixStore.insert

    def noted(self: PrefixStore, place: Any, kind: Any, cut: Any) -> None:
        placed.append(len(place.path) - 1)
        insert(self, place, kind, cut)

    monkeypatch.setattr(PrefixStore, "insert", noted)
    store = PrefixStore(memory=1 << 30, block_size=8)
    config = EngineConfig(num_draft_tokens=4, prefill_step_size=16)
    runner, draft = (
        ModelRunner(target, name, config, BEHIND, store) for name in ("target", "draft")
    )
    drafter = DraftModel(draft, vocab_size=VOCAB, max_draft_tokens=4)
    length = Late(lambda number: 2 if number >= 40 else 0)
    engine = Engine(runner, drafter, config, BEHIND, frozenset(), length=length)
    prompt = tuple(make_prompts(60)[0])
    engine.add(Request(0, "", prompt, SamplingParams(max_tokens=90)))
    tokens: list[int] = []
    while engine.busy:
        for output in engine.step():
            tokens += output.token_ids
    assert tokens == greedy(target, prompt, 90)
    assert any(o.num_draft_tokens for o in length.outcomes)
    assert 0 < max(placed) < 60
