"""Rows come and go in place: no shape changes, nobody else is copied or disturbed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.cache.storage import Storage
from specdec.engine.batch import DecodeBatch
from specdec.engine.round import BatchRound
from specdec.models.compiled import CompiledForwards
from specdec.models.runner import ModelRows
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import NgramDrafter
from tests.plain import (
    BACKENDS,
    BEHIND,
    ask,
    engine_of,
    exact,
    finish,
    greedy,
    run_rows,
)
from tests.scripted import Script

BATCH, BUCKET = 8, BEHIND.read_bucket


def job(requests: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 150 tokens, answers of 1 to 40."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(97) for _ in range(rng.choice((1, 5, 40, 150)))]
        for _ in range(requests)
    ]
    return prompts, [SamplingParams(max_tokens=rng.randint(1, 40)) for _ in prompts]


def shapes_met(
    target: Any, draft: Any, requests: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[Any], set[Any], Counter[bool]]:
    """Shapes of decode forwards and of prefill chunks, and graphs built, in a job."""
    decode: set[Any] = set()
    prefill: set[Any] = set()
    graphs: Counter[bool] = Counter()
    seen = {"forward": decode, "_forward": prefill}

    with monkeypatch.context() as patch:
        for name, met in seen.items():
            right = getattr(ModelRows, name)

            def noted(
                self: ModelRows,
                tokens: mx.array,
                *args: Any,
                right: Any = right,
                met: Any = met,
                **more: Any,
            ) -> Any:
                done = right(self, tokens, *args, **more)
                cache = self._caches[0]
                longest = cache._longest
                extent = min(cache.capacity, -(-longest // BUCKET) * BUCKET)
                met.add((id(self.runner), tokens.shape, cache.capacity, extent))
                return done

            patch.setattr(ModelRows, name, noted)
        make = CompiledForwards._make

        def made(self: CompiledForwards, *args: Any) -> Any:
            graphs[args[-1]] += 1  # whether of a chunk of prompts
            return make(self, *args)

        patch.setattr(CompiledForwards, "_make", made)
        prompts, params = job(requests)
        run_rows(
            target,
            draft,
            prompts,
            params,
            batch_size=BATCH,
            num_draft_tokens=3,
            backend=BEHIND,
            prefill_step_size=64,
            length=Script(lambda number: 3 if number % 2 else 0),
        )
    return decode, prefill - decode, graphs


def test_a_job_meets_few_shapes_however_many_requests_it_has(
    target: Any, tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new one costs tens of milliseconds on CUDA, and a graph more to build.

    docs/architecture.md says the number: with a full batch, read extents times draft
    lengths in use. Rounds here have k = 0 and 3; the draft's forwards take 1 token, 2,
    and what it catches up with.
    """
    draft = tiny_model("llama", seed=5, num_hidden_layers=1)
    short = shapes_met(target, draft, 60, monkeypatch)
    long = shapes_met(target, draft, 160, monkeypatch)
    full = [[each for each in met if each[1][0] == BATCH] for met, *_ in (short, long)]
    extents = {extent for *_, extent in full[1]}
    assert len(full[1]) <= len(extents) * (2 + 3)
    # Neither they, nor those of chunks, nor graphs grow with the number of requests;
    # the last few rows, which nobody joins, decode in 4, 2 and 1 slots.
    common = {extent for *_, extent in full[0]}
    assert len([each for each in full[1] if each[-1] in common]) <= len(full[0])
    assert len(long[0]) <= len(short[0]) + 3
    assert len(long[1]) <= len(short[1]) + 6
    assert long[2][False] <= short[2][False] + 6
    assert 0 < long[2][True] <= len(long[1])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("draft", [None, "model", "ngram"])
def test_joining_rows_copy_nobody(
    target: Any, draft: str | None, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others wait, a row that joins is written into a slot, and that is all.

    Three rows that join together are prefilled in four slots. To drop the fourth first
    would copy the three, and wait for the device.
    """
    joins: list[bool] = []
    numbers: set[tuple[int, int]] = set()
    copies: list[str] = []
    join, resize = DecodeBatch.join, DecodeBatch._resize
    stack = Storage.stack

    def noted(self: DecodeBatch, other: DecodeBatch, num_slots: int) -> None:
        before = len(copies)
        numbers.add((len(other.unfinished), len(other.slots)))
        join(self, other, num_slots)
        joins.append(len(copies) == before)

    def resized(self: DecodeBatch, size: int) -> None:
        if self._in_flight or len(self.unfinished) > 1:
            copies.append("resize")
        resize(self, size)

    def stacked(*args: Any) -> Any:
        copies.append("stack")
        return stack(*args)

    monkeypatch.setattr(DecodeBatch, "join", noted)
    monkeypatch.setattr(Storage, "stack", stacked)
    monkeypatch.setattr(DecodeBatch, "_resize", resized)
    prompts, params = job(32, seed=3)
    exact(
        target, target if draft == "model" else None, prompts, params,
        batch_size=8 if together else 4, num_draft_tokens=3 if draft else 0,
        backend=replace(BEHIND, join_rounds=6 * together), prefill_step_size=64,
        drafter=NgramDrafter() if draft == "ngram" else None,
    )  # fmt: skip
    assert len(joins) > (5 if together else 20)
    assert all(joins)
    assert ((3, 4) in numbers) == together


def test_rows_join_together_and_none_is_forgotten(
    target: Any, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA free rows wait for others; some of these are cancelled meanwhile.

    A backend's ``join_rounds`` that no scheduler gets would join them one by one.
    """
    joins: list[int] = []
    join = DecodeBatch.join

    def noted(self: DecodeBatch, other: DecodeBatch, num_slots: int) -> None:
        joins.append(len(other.unfinished))
        join(self, other, num_slots)

    monkeypatch.setattr(DecodeBatch, "join", noted)
    prompts, _ = job(24, seed=3)
    rng = random.Random(5)
    lengths = [rng.randint(6, 24) for _ in prompts]
    prompts = [prompt[-5:] for prompt in prompts]
    engine = engine_of(
        target, drafts["near"], batch_size=8, backend=replace(BEHIND, join_rounds=4)
    )
    work = list(enumerate(zip(prompts, lengths, strict=True)))
    requests = [ask(engine, prompt, n, i) for i, (prompt, n) in work[:20]]
    cancelled, waited, late = [9, 11, 19, 14], 0, work[20:]
    while engine.busy:
        engine.step()
        load = engine.load
        if load.waiting and 0 < load.running < 8 and not engine._joining:
            waited += 1
            if waited % 2 and cancelled:
                engine.cancel(cancelled.pop())
            elif late:
                i, (prompt, n) = late.pop(0)
                requests.append(ask(engine, prompt, n, i))
    assert waited > 8
    assert sum(joins) >= 2 * len(joins) > 0
    cancelled_rows = [r.index for r in requests if r.finish_reason == "cancelled"]
    assert len(cancelled_rows) > 1
    for request, prompt, n in zip(requests, prompts, lengths, strict=True):
        wanted = greedy(target, prompt, n)
        if request.index in cancelled_rows:
            assert request.tokens == wanted[: len(request.tokens)]
        else:
            assert request.tokens == wanted


@BACKENDS
def test_a_slot_keeps_nothing_of_a_row_whose_keys_hold_nan(
    tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """No mask hides a NaN: a row that ends by one ended the next one in its slot."""
    model = tiny_model("llama", seed=0, tie_word_embeddings=False)
    weight = model.model.embed_tokens.weight
    weight[96] = float("nan")
    model.model.embed_tokens.weight = weight
    longest = [1 + i % 50 for i in range(300)]
    bad = [*longest[:280], 96, *[7] * 19]
    rows = run_rows(
        model,
        None,
        [longest, bad, [3, 4, 5]],
        [SamplingParams(max_tokens=n) for n in (60, 60, 12)],
        batch_size=2,
        backend=backend,
        prefill_step_size=64,
    )
    assert rows[1].finish_reason == "error"
    assert rows[2].error is None
    assert rows[2].tokens == greedy(model, [3, 4, 5], 12)


def test_rows_that_wait_for_memory_keep_no_slots(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU an idle slot costs as much as a row, in every round."""
    sizes: list[tuple[int, int]] = []
    dispatch = DecodeBatch.dispatch

    def noted(self: DecodeBatch, plan: BatchRound) -> Any:
        if not plan.first:
            sizes.append((len(self.slots), len(self.unfinished)))
        return dispatch(self, plan)

    def affords(rows: Any) -> int:
        return 2 if any(r.index == 6 for r in rows) and len(rows) > 1 else 1

    monkeypatch.setattr(DecodeBatch, "dispatch", noted)
    engine = engine_of(target, batch_size=6)
    engine._scheduler.budget, engine._scheduler._cost = 1, affords
    for i in range(7):
        ask(engine, (1, 2 + i), 4 if i else 60, i)
    finish(engine)
    assert (6, 6) in sizes
    assert sizes.count((6, 1)) <= 1
    assert sizes.count((1, 1)) > 40


@pytest.mark.parametrize(("budget", "slots"), [(18, 16), (17, 8), (6, 4), (5, 2)])
def test_some_that_wait_have_slots_if_memory_is_short_of_all(
    target: Any, budget: int, slots: int
) -> None:
    """Without, the batch grows, and is copied, at each of their joins."""
    engine = engine_of(target, batch_size=16, backend=BEHIND)
    engine._scheduler.budget, engine._scheduler._cost = budget, len
    for index in range(20):
        ask(engine, (1, 2), SamplingParams(), index)
    first = [engine._scheduler._waiting.popleft() for _ in range(2)]
    assert engine._room([], first) == (2, slots)
