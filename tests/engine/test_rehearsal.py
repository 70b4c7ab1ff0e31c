"""Kernels are compiled before the first request, and by nothing that is timed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

import specdec.backend
from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.engine import round as round_module
from specdec.engine.rehearsal import Rehearsal
from specdec.engine.scheduler import Scheduler
from specdec.models.runner import ModelRows
from specdec.spec_decode.draft_length import StepTimer
from specdec.tools.decoding import token_level
from tests.plain import BEHIND, ask, engine_of, exact, finish, plainly
from tests.scripted import Script

COMPILES = replace(BEHIND, new_shape_seconds=0.04)
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11], [3, 4]]
# Seconds that anything takes, and a kernel that was not met before.
TICK, KERNEL = 2.0**-10, 16.0


class Device:
    """A clock, and a device that compiles a kernel for each kind of forward."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now, self.compiled, self.by_rows = 0.0, set[Any](), False
        patch.setattr(time, "perf_counter", self)
        patch.setattr(round_module, "StepTimer", lambda: StepTimer(self))
        for name in ("forward", "_forward"):
            patch.setattr(ModelRows, name, self._slow(name, getattr(ModelRows, name)))

    def __call__(self) -> float:
        self.now += TICK
        return self.now

    def _slow(self, name: str, right: Callable[..., mx.array]) -> Any:
        def forward(
            rows: ModelRows, tokens: mx.array, *args: Any, **more: Any
        ) -> mx.array:
            width = tokens.shape[1]
            wide = width if name == "forward" else width > 1
            num_rows = tokens.shape[0] if self.by_rows else 0
            kernel = name, rows.runner.name, wide, num_rows
            if kernel not in self.compiled:
                self.compiled.add(kernel)
                self.now += KERNEL
            return right(rows, tokens, *args, **more)

        return forward


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with monkeypatch.context() as patch:
        yield Device(patch)


@pytest.mark.parametrize("drafts_too", [True, False])
def test_no_request_waits_and_no_round_is_measured_while_kernels_compile(
    target: Any, drafts: dict[str, Any], device: Device, drafts_too: bool
) -> None:
    """And the times of the run add up: what compiling takes is in none but its own.

    A round that compiled would be taken for a dear k, and first tokens for slow ones.
    """
    draft = drafts["near"] if drafts_too else None
    length = Script(lambda number: 2 * (number % 2) if drafts_too else 0)
    length.max_draft_tokens = 2 * drafts_too
    engine = engine_of(
        target, draft, batch_size=2, num_draft_tokens=2, backend=COMPILES, length=length
    )
    requests = [ask(engine, p, 12 + i, i) for i, p in enumerate(PROMPTS)]
    start = device.now
    while engine.busy:
        engine.step()
        device.now += 0.125  # the caller's own
    stats, end = engine.stats, device.now - 0.125
    kernels = len(device.compiled)
    assert kernels >= (6 if drafts_too else 2)
    assert stats.warmup_seconds // KERNEL == kernels
    rest = (stats.calibration_seconds, stats.prefill_seconds, stats.decode_seconds)
    assert 0 < max(rest) < KERNEL
    assert stats.other_seconds > 0.125
    # A tick before the first step's first look.
    assert stats.warmup_seconds + sum(rest) + stats.other_seconds == end - start - TICK
    timed = [o.seconds for o in length.outcomes if o.seconds is not None]
    assert timed
    assert max(timed) < KERNEL
    for request in requests:
        wanted = plainly(target, request.prompt_tokens, request.params, frozenset())
        assert request.tokens == wanted.tokens


def test_a_server_compiles_nothing_when_rows_have_ended(
    target: Any, drafts: dict[str, Any], device: Device
) -> None:
    """Batches shrink to the rows that run; the requests left would wait for seconds."""
    device.by_rows = True
    length = Script(lambda number: 2 * (number % 2))
    length.max_draft_tokens = 2
    engine = engine_of(
        target, drafts["near"], batch_size=5, backend=COMPILES, length=length
    )
    engine.warm_up()
    known = set(device.compiled)
    assert {kernel[-1] for kernel in known} == {5, 3, 2, 1}
    for i in range(5):
        ask(engine, (1, 2, 3), 4 + 6 * i, i)
    finish(engine)
    assert device.compiled == known


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_a_rehearsal_leaves_nothing_behind(
    target: Any,
    drafts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drafter: str,
) -> None:
    """Not in a prefix store, not in what is learnt, and once for all sessions.

    The user's functions are called for tokens of requests alone.
    """
    caplog.set_level(logging.DEBUG, "specdec.engine")
    called: list[Any] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        first: Any = tokens[:1].tolist()
        called.extend(first)
        return logits

    config = EngineConfig(batch_size=3, num_draft_tokens=2, prefix_cache_memory=1 << 24)
    draft: dict[str, Any] = {"drafter": None if drafter == "none" else drafter}
    if drafter == "model":
        draft = {"draft": token_level(drafts["near"])}
    monkeypatch.setattr(specdec.backend, "defaults", lambda: COMPILES)
    decoder = SpecDecoder(token_level(target), config=config, **draft)
    rehearsal = decoder._rehearsal
    assert rehearsal.due
    session = decoder.session()
    session.warm_up()
    assert not rehearsal.due
    assert session.stats.warmup_seconds > 0
    assert decoder.prefix_store is not None
    assert decoder.prefix_store.nbytes == 0
    assert session.stats.rounds == session.stats.generated_tokens == 0
    rehearsal.due = True  # now with parameters of a request
    asked = SamplingParams(
        max_tokens=9, temperature=0.8, seed=3, logits_processors=(processor,)
    )
    results = decoder.generate(PROMPTS, [asked] * 5)
    assert set(called) == {p[0] for p in PROMPTS}
    assert decoder.stats.generated_tokens == 45
    again = decoder.generate(PROMPTS, [asked] * 5)
    assert [r.token_ids for r in again] == [r.token_ids for r in results]
    assert decoder.stats.warmup_seconds == 0
    assert caplog.messages == []  # it did not fail


def test_a_rehearsal_that_fails_is_no_loss(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong is for requests to find; here nothing is."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("specdec.engine.rehearsal._Show._round", fail)
    exact(target, None, PROMPTS, 5, batch_size=2, backend=COMPILES)


def test_a_server_that_ends_rehearses_no_further(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM right after the start would wait until all kernels are compiled."""
    begun, closed, steps = threading.Event(), threading.Event(), list[str]()

    def step(*_: Any) -> None:
        steps.append("")
        begun.set()
        assert closed.wait(60)

    async def serve() -> None:
        async with decoder.serve() as server:
            assert await asyncio.to_thread(begun.wait, 60)
            closing = asyncio.create_task(server.aclose())
            await asyncio.sleep(0)  # it has begun
            closed.set()
            await closing

    monkeypatch.setattr("specdec.engine.rehearsal._Show._prompts", step)
    monkeypatch.setattr(specdec.backend, "defaults", lambda: COMPILES)
    decoder = SpecDecoder(token_level(target), config=EngineConfig(batch_size=3))
    asyncio.run(serve())
    assert len(steps) == 1


def test_no_more_rows_are_rehearsed_than_memory_has(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would run out of memory before its first request."""
    slots: list[int] = []
    monkeypatch.setattr(Rehearsal, "run", lambda *given, **_: slots.append(given[3]))
    for budget in (None, 100, 7, 1, 0):
        engine = engine_of(target, None, batch_size=8, backend=COMPILES)
        engine._scheduler = Scheduler(8, budget=budget, cost=len)
        engine.warm_up()
    assert slots == [8, 8, 4, 1, 1]
