"""A head that drafts for no row costs what no head costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.config import EngineConfig
from specdec.engine.batch import DecodeBatch
from specdec.engine.engine import Engine
from specdec.engine.round import RESTS, BatchRound, Rounds
from specdec.models.runner import ModelRunner
from specdec.spec_decode.draft_length import (
    AutoLength,
    BatchState,
    ForwardCosts,
    Forwards,
    RoundCosts,
)
from specdec.spec_decode.head_drafter import BlockRows
from tests.plain import BACKENDS, BEHIND, ask, finish, greedy
from tests.scripted import Script
from tests.spec_decode.test_heads import CONFIGS, K, drafter_of, lender, read_by

__all__ = ["lender"]  # a fixture

TOKENS = 4 * RESTS


class Resting(Script):
    """Never drafts; rows that begin are drafted for, and then left."""

    def may_pay(self, state: BatchState) -> bool:
        super().may_pay(state)
        return state.rests == 0


def engine_of(
    target: Any, backend: Any, head: Path | None, length: Any = None, rows: int = 8
) -> Engine:
    """An engine with a head, which is written to a folder, or without one."""
    k = K if head else 0
    config = EngineConfig(batch_size=rows, num_draft_tokens=k, prefill_step_size=16)
    if head is None:
        runner = ModelRunner(target.model, "target", config, backend)
        return Engine(runner, None, config, backend, frozenset())
    drafter, _ = drafter_of(head, CONFIGS["dflash"], target, backend)
    runner = read_by(drafter, target, config, backend)
    return Engine(runner, drafter, config, backend, frozenset(), length=length)


class Graphs:
    """The operations that every dispatch of a round hands over, the forward's too.

    Attributes:
        prompts: those of all prompts.
        unread: rounds after which hidden states are kept that nobody reads.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path):
        self.rounds: list[Counter[str]] = []
        self.prompts, self.unread = Counter[str](), 0
        found, dispatch, file = Counter[str](), DecodeBatch.dispatch, folder / "graph"
        usual: Callable[..., None] = mx.async_eval

        def leaves(tree: Any) -> list[mx.array]:
            if isinstance(tree, mx.array):
                return [tree]
            parts = tree if isinstance(tree, list | tuple) else ()
            return [leaf for part in parts for leaf in leaves(part)]

        def handed_over(*trees: Any) -> None:
            mx.export_to_dot(str(file), *leaves(trees))
            found.update(re.findall(r'label ="(\w+)"', file.read_text("utf-8")))
            usual(*trees)
            mx.eval(*trees)

        def noted(batch: DecodeBatch, plan: BatchRound) -> None:
            self.prompts.update(found)
            found.clear()
            dispatch(batch, plan)
            self.rounds.append(found.copy())
            found.clear()
            kept = batch._target.hidden is not None
            self.unread += kept and not any(s and s.drafts for s in batch.slots)

        patch.setattr(mx, "async_eval", handed_over)
        patch.setattr(DecodeBatch, "dispatch", noted)


@BACKENDS
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("begins", [True, False])
def test_a_round_without_a_draft_is_that_without_a_head(
    lender: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: Any,
    num_rows: int,
    begins: bool,
) -> None:
    """No hidden states are kept, and no context is written; prompts are the same."""
    prompts = [[3 + i, 7, *range(5, 9 + i)] for i in range(num_rows)]
    graphs = Graphs(monkeypatch, tmp_path)
    length: Any = Resting(lambda n: 0) if begins else Script(lambda n: 0, may_pay=False)
    rounds, chunks = [], []
    for head in (None, tmp_path):
        engine = engine_of(lender, backend, head, length)
        graphs.rounds.clear()
        graphs.prompts.clear()
        requests = [ask(engine, p, TOKENS, i) for i, p in enumerate(prompts)]
        finish(engine)
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.tokens == greedy(lender.model, prompt, TOKENS)
        rounds.append([*graphs.rounds])
        chunks.append(graphs.prompts.copy())
    # A row's head is left after so many rounds, and the round in flight then.
    start = RESTS + 4 if begins else 0
    assert rounds[0][start:] == rounds[1][start:]
    assert (rounds[0][:start] != rounds[1][:start]) == begins
    assert (chunks[0] != chunks[1]) == begins
    assert chunks[0]
    assert not graphs.unread


@pytest.mark.parametrize("drafting", [0.1, 0.4, 1.5])
@BACKENDS
def test_rounds_that_draft_nothing_seldom_ask_for_k(
    lender: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    backend: Any,
    drafting: float,
) -> None:
    """k is that of a policy that is asked before every round, in jobs with joins.

    The draft is right in its third and fourth ten rounds of forty. Catches choices
    that stand although a row has joined or ended, or requests begin to wait.
    """
    num_rows, ks, asked = 3, list[list[int]](), Counter[str]()
    forwards = Forwards(num_rows, {1: 1.0, 2: 1.02, 9: 1.2}, 0.01, drafting)
    timing, choose, dispatch = Rounds._timing, AutoLength.choose, Rounds.dispatch

    def told(rounds: Rounds, round_: BatchRound, kept: Any) -> Any:
        usual = timing(rounds, round_, kept)
        seconds = ForwardCosts([forwards]).round(num_rows, usual.num_draft_tokens)
        right = sum(map(bool, ks[-1])) % 40 >= 20
        accepted = [(limit, limit * right) for limit, _ in usual.accepted]
        return replace(usual, seconds=seconds, fair=True, accepted=accepted)

    def chosen(length: AutoLength, state: BatchState) -> int:
        asked[str(len(ks))] += 1
        return choose(length, state)

    def dispatched(rounds: Any, plan: BatchRound) -> None:
        if not plan.first:
            ks[-1].append(plan.num_draft_tokens)
        dispatch(rounds, plan)

    monkeypatch.setattr(Rounds, "_timing", told)
    monkeypatch.setattr(AutoLength, "choose", chosen)
    monkeypatch.setattr(Rounds, "dispatch", dispatched)
    for always in (False, True):
        length = AutoLength(
            RoundCosts(ForwardCosts([forwards])), ladder=(0, 1, 2), max_draft_tokens=K
        )
        ks.append([])
        if always:
            monkeypatch.setattr(AutoLength, "stands", lambda length, state: 0)
        engine = engine_of(lender, backend, tmp_path, length, num_rows)
        for i in range(4 * num_rows):
            ask(engine, [3, 5 + i, 7], 60 + 37 * i % 100, i)
        finish(engine)
    assert ks[0] == ks[1]
    assert drafting < 1 or asked["1"] < asked["2"] * 3 / 4


@pytest.mark.parametrize(("num_rows", "drafting"), [(1, 0.4), (4, 0.1), (4, 1.5)])
def test_prompts_are_read_by_a_useless_head_for_tries_alone(
    lender: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_rows: int,
    drafting: float,
) -> None:
    """A head that is always wrong is tried where it reads prompts, and then left.

    It followed all rows of all waves, even if none of them could afford a try. Rows
    that join in several prefills are one decision.
    """
    forwards = Forwards(num_rows, {1: 1.0, 2: 1.02, 9: 1.2}, 0.01, drafting)
    known = ForwardCosts([forwards])
    length = AutoLength(RoundCosts(known), ladder=(0, 1, 2), max_draft_tokens=K)
    timing = Rounds._timing

    def told(rounds: Rounds, round_: BatchRound, kept: Any) -> Any:
        usual = timing(rounds, round_, kept)
        seconds = known.round(usual.num_rows, usual.num_draft_tokens)
        accepted = [(limit, 0) for limit, _ in usual.accepted]
        return replace(usual, seconds=seconds, fair=True, accepted=accepted)

    monkeypatch.setattr(Rounds, "_timing", told)
    counts = Counter[str]()
    commit, dispatch = BlockRows.commit, Rounds.dispatch
    may_pay = AutoLength.may_pay

    def asked(length: AutoLength, state: BatchState) -> bool:
        answer = may_pay(length, state)
        counts["prompts"] += answer and not state.rests
        return answer

    def committed(rows: Any, round_: Any, accepted: Any) -> None:
        counts["followed"] += 1
        commit(rows, round_, accepted)

    def dispatched(rounds: Any, plan: BatchRound) -> None:
        counts["rounds"] += not plan.first
        counts["tries"] += plan.num_draft_tokens > 0
        dispatch(rounds, plan)

    monkeypatch.setattr(AutoLength, "may_pay", asked)
    monkeypatch.setattr(BlockRows, "commit", committed)
    monkeypatch.setattr(Rounds, "dispatch", dispatched)
    engine = engine_of(lender, BEHIND, tmp_path, length, num_rows)
    waves, tokens = 5, 96
    for i in range(waves * num_rows):
        ask(engine, [3, 5 + i, 7], tokens, i)
    finish(engine)
    assert 0 < counts["tries"] < counts["rounds"] / 8
    assert counts["prompts"] <= counts["tries"]
    assert counts["followed"] < counts["rounds"] / 2
