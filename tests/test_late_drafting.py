"""Drafters that begin when they are wanted: tokens and acceptance are the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from specdec.backend import BackendDefaults
from specdec.drafters import ChainDrafter, Drafter, DraftModel, NgramDrafter
from specdec.drafting import Drafting
from specdec.lengths import BatchState, RoundOutcome
from specdec.models.runner import ModelRunner
from specdec.pacing import Pacer
from specdec.params import SamplingParams
from tests.plain import AT_ONCE, BEHIND, greedy, plainly, run_rows

VOCAB = 97
BACKENDS = pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["cpu", "gpu"])
WINDOWED = {"sliding_window": 24, "sliding_window_pattern": 2}


class Late:
    """Says that drafting may not pay, and wants k by the round's number."""

    max_draft_tokens = 4

    def __init__(self, choose: Callable[[int], int], *, may_pay: bool = False):
        self._choose, self._may_pay = choose, may_pay
        self.outcomes: list[RoundOutcome] = []
        self.states: list[BatchState] = []
        self.asked: list[BatchState] = []

    def prepare(self, num_rows: int) -> None:
        pass

    def may_pay(self, state: BatchState) -> bool:
        self.asked.append(state)
        return self._may_pay

    def choose(self, state: BatchState) -> int:
        self.states.append(state)
        return self._choose(len(self.outcomes) + len(state.in_flight))

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


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
    # What it took in is paid for by its first round, whose time does not hold it.
    first = length.outcomes[wanted + late]
    assert first.undrafted >= wanted + 88 // 4
    assert first.seconds is None
    assert all(o.undrafted == 0 for o in length.outcomes[wanted + late + 1 :])


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
        from specdec.config import EngineConfig

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


def test_what_is_missing_of_rows_is_known() -> None:
    """Prompts at first; then a token a round; rows that join bring theirs."""
    length = Late(lambda number: 0)
    pacer = Pacer(length, count().__next__, undrafted=30.0)
    for _ in range(10):
        pacer.choose(2, [4, 4], 100)
        pacer.begin(0, (0, 0))
        pacer.read([1, 1])
    assert length.states[-1].undrafted == 39
    pacer.join(2, 2, 20.0)
    pacer.choose(4, [4] * 4, 100)
    assert length.states[-1].undrafted == 30
