"""Whole runs on small random models in float32: token for token what mlx-lm gives."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from specdec.backend import BackendDefaults
from specdec.engine.batch import DecodeBatch
from specdec.models.runner import ModelRows, ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import commit
from specdec.spec_decode.commit import count_kept
from tests.plain import (
    AT_ONCE,
    BACKENDS,
    BEHIND,
    VOCAB,
    ask,
    drafts_of,
    engine_of,
    exact,
    finish,
    greedy,
    run_rows,
)
from tests.scripted import Script
from tests.spec_decode.repetitive import Knowing

LENGTHS = (1, 7, 30, 2, 70, 3, 16, 33)
_rng = random.Random(0)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]


def grid() -> Iterator[Any]:
    """Every k with every number of rows for the draft that is right now and then."""
    cells = list(itertools.product((1, 4, 7), (1, 3, 8)))
    for draft in ("perfect", "near", "unrelated", "none"):
        for i, (k, batch_size) in enumerate(cells):
            name, backend = [("cpu", AT_ONCE), ("gpu", BEHIND)][i % 2]
            if draft == "near" or i in (2, 3, 7):
                case = (draft, k, batch_size, backend)
                yield pytest.param(*case, id=f"{draft}-{k}-{batch_size}-{name}")


@pytest.mark.parametrize(("draft", "k", "batch_size", "backend"), list(grid()))
def test_greedy_equals_mlx_lm(
    target: Any,
    drafts: dict[str, Any],
    draft: str,
    k: int,
    batch_size: int,
    backend: BackendDefaults,
) -> None:
    rows = exact(
        target, drafts[draft], PROMPTS, [21 + i % 3 for i in range(8)],
        batch_size=batch_size, num_draft_tokens=k, backend=backend,
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    if draft == "perfect":
        assert accepted == drafted > 0
    elif draft == "near":
        assert 0 < accepted < drafted
    elif draft == "none":
        assert drafted == 0


@BACKENDS
def test_a_draft_that_is_always_wrong(target: Any, backend: BackendDefaults) -> None:
    whole = {tuple(p): [*p, *greedy(target, p, 15)] for p in PROMPTS}
    drafter = Knowing(whole, lambda position, token: (token + 1) % VOCAB)
    rows = exact(
        target, None, PROMPTS, 15, batch_size=4, backend=backend, drafter=drafter
    )
    assert drafts_of(rows)[1] == 0
    assert all(r.rounds == 14 for r in rows)


@pytest.mark.parametrize(("k", "backend"), [(1, AT_ONCE), (5, BEHIND)])
def test_nothing_is_emitted_or_counted_after_the_end(
    target: Any, k: int, backend: BackendDefaults
) -> None:
    """Every token of row 0's own continuation serves once as the EOS token."""
    for eos in dict.fromkeys(greedy(target, PROMPTS[0], 24)[:10]):
        rows = exact(
            target, target, PROMPTS, 24,
            num_draft_tokens=k, backend=backend, eos=frozenset({eos}),
        )  # fmt: skip
        for row in rows:
            # A perfect draft: every token used was accepted, but for the extras.
            assert row.accepted == row.drafted
            used = len(row.tokens) + (row.finish_reason == "stop")
            assert used - 1 - row.rounds <= row.accepted <= used - 1


@pytest.mark.parametrize(
    ("step", "backend"), [(1, AT_ONCE), (5, BEHIND), (64, AT_ONCE), (512, BEHIND)]
)
def test_the_prefill_chunk_changes_nothing(
    target: Any, drafts: dict[str, Any], step: int, backend: BackendDefaults
) -> None:
    exact(target, drafts["near"], PROMPTS, 10, backend=backend, prefill_step_size=step)


def test_a_draft_with_a_padded_or_cut_embedding(
    target: Any, tiny_model: Callable[..., Any]
) -> None:
    for vocab in (VOCAB + 31, VOCAB - 20):
        draft = tiny_model("llama", seed=5, vocab_size=vocab)
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=10, temperature=temperature)
            exact(target, draft, PROMPTS, params)


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "perfect", "none"])
def test_bounds_hold_while_caches_grow(
    target: Any, drafts: dict[str, Any], draft: str, backend: BackendDefaults
) -> None:
    """Rows that join, leave and grow past 256 tokens with rounds in flight."""
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (246, 3, 200, 1, 250)]
    exact(
        target, drafts[draft], prompts, [30, 12, 70, 2, 9],
        batch_size=3, backend=backend, prefill_step_size=64,
    )  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_the_longest_row_may_end_long_before_the_others(target: Any, k: int) -> None:
    """An ended row that stays is written to every round: there must be room."""
    prompts = [[1 + i % 90 for i in range(n)] for n in (100, 3, 2)]
    tokens = [2 + 2 * (k + 1), 90, 90]
    exact(target, target, prompts, tokens, num_draft_tokens=k, backend=BEHIND)


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "perfect"])
def test_rounds_without_proposals_in_between(
    target: Any,
    drafts: dict[str, Any],
    draft: str,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft's cache catches up: a perfect draft goes on being accepted."""
    rng = random.Random(1)

    plan = DecodeBatch.plan
    monkeypatch.setattr(
        DecodeBatch, "plan", lambda self: plan(self, rng.choice((0, 3)))
    )
    tokens = [30, 9, 22, 41, 5, 30, 30, 17]
    rows = exact(target, drafts[draft], PROMPTS, tokens, batch_size=4, backend=backend)
    drafted, accepted = drafts_of(rows)
    assert draft != "perfect" or accepted == drafted > 50


@pytest.mark.parametrize(
    ("kept", "limit", "freed"),
    [(0, None, 0), (1 << 40, None, 2), (10**6, 10**8, 0), (10**7, 10**8, 2)],
)
def test_what_mlx_keeps_for_reuse_is_freed_only_if_it_is_much(
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
    limit: int | None,
    freed: int,
) -> None:
    """Freeing waits for the device, and what is freed must be allocated again."""
    calls: list[None] = []
    monkeypatch.setattr(mx, "get_cache_memory", lambda: kept)
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(None))
    params = [SamplingParams(max_tokens=4)] * 2
    run_rows(target, None, PROMPTS[:2], params, batch_size=1, memory_limit=limit)
    assert len(calls) == freed


class Measuring(Script):
    """Takes a hundred seconds before the first round."""

    def unmeasured(self, num_rows: int, context: int = 0) -> int:
        return num_rows

    def measure(self, num_rows: int, context: int = 0) -> None:
        for _ in range(99):
            time.perf_counter()


def test_times_add_up_to_the_wall_clock(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was spent before the first round is not lost, nor called prefill."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    length = Measuring(lambda number: number % 3)
    engine = engine_of(target, target, batch_size=2, num_draft_tokens=2, length=length)
    for i, prompt in enumerate(PROMPTS):
        ask(engine, prompt, 5 + i, i)
    engine.cancel(3)
    wall = 0.0
    while engine.busy:
        start = time.perf_counter()
        engine.step()
        wall += time.perf_counter() - start - 2  # around it
    stats = engine.stats
    parts = (stats.calibration_seconds, stats.prefill_seconds, stats.decode_seconds)
    assert sum(parts) == wall
    assert stats.calibration_seconds > 0 == stats.calibration_seconds % 100
    assert min(parts) > 0


@pytest.mark.parametrize("temperature", [1e-39, 1e-20, 1e-3])
def test_a_tiny_temperature_is_nearly_greedy(target: Any, temperature: float) -> None:
    params = [SamplingParams(max_tokens=12, temperature=temperature)] * 8
    rows = run_rows(target, None, PROMPTS, params)
    assert [r.tokens for r in rows] == [greedy(target, p, 12) for p in PROMPTS]


@pytest.mark.parametrize("k", [0, 2])
def test_batches_shrink_by_halves_where_shapes_are_to_repeat(
    target: Any, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """However many end at once: 11, 6, 3, 2, 1, with ended rows to fill them.

    Those keep nothing: they would grow by a token a round, beyond what caches were
    planned for, and no token of any row would show it.
    """
    sizes: list[int] = []
    idle: set[int] = set()
    dispatch = DecodeBatch.dispatch

    def watched(self: DecodeBatch, *args: Any, **options: Any) -> Any:
        sizes.append(len(self.slots))
        held: list[int] = self._target.offset.tolist()  # type: ignore[assignment]
        idle.update(n for s, n in zip(self.slots, held, strict=True) if s is None)
        return dispatch(self, *args, **options)

    monkeypatch.setattr(DecodeBatch, "dispatch", watched)
    tokens = [3, 4, 5, 9, 9, 12, 16, 16, 30, 31, 60]
    prompts = [[i + 1, i + 2, i + 3] for i in range(len(tokens))]
    exact(
        target, drafts["near" if k else "none"], prompts, tokens,
        batch_size=len(tokens), num_draft_tokens=k, backend=BEHIND,
    )  # fmt: skip
    assert sorted(set(sizes), reverse=True) == [11, 6, 3, 2, 1]
    assert sizes == sorted(sizes, reverse=True)
    assert idle == {0}


def test_a_row_that_was_cancelled_while_it_waited_is_never_begun(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take a place, and its prompt be read, for nobody."""
    prefilled: list[int] = []
    rows = ModelRunner.rows

    def watched(self: ModelRunner, prompts: Any, **options: Any) -> ModelRows:
        prefilled.extend(prompt[0] for prompt in prompts)
        return rows(self, prompts, **options)

    monkeypatch.setattr(ModelRunner, "rows", watched)
    engine = engine_of(target, batch_size=1)
    for index in range(3):
        ask(engine, (index, 7, 8), 4, index)
    ended = engine.step()
    assert engine.cancel(1)
    while engine.busy:
        ended += engine.step()
    reasons = {o.request.index: o.request.finish_reason for o in ended}
    assert reasons == {0: "length", 1: "cancelled", 2: "length"}
    assert prefilled == [0, 2]


@pytest.mark.parametrize(
    ("max_tokens", "wait"), [(1, 0), (40, 0), (40, 1), (40, 2), (40, 3)]
)
def test_an_idle_engine_holds_no_caches(
    target: Any, wait: int, max_tokens: int
) -> None:
    """However its last rows end: nobody calls the next step of an idle server.

    Rows that ended with their first token, before the draft had read their prompts,
    stayed until another request came.
    """
    engine = engine_of(target, target, backend=BEHIND)
    for index in range(2):
        prompt = (3, 4, 5 + index)
        ask(engine, prompt, max_tokens, index)
    for _ in range(wait):
        engine.step()
    if max_tokens > 1:
        for index in range(2):
            engine.cancel(index)
    finish(engine)
    assert engine.load.cache_bytes == 0
    assert not engine._in_flight


def trim_off_by(error: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        trim = ModelRows.trim_per_sequence

        def faulty(self: ModelRows, n: Any, at_most: int, *_: int) -> None:
            off = n if isinstance(n, list) else mx.maximum(n + error, 0)
            trim(self, off, at_most + 1)

        patch.setattr(ModelRows, "trim_per_sequence", faulty)
        # Room for rows that grow too long: after the end is other memory.
        room = DecodeBatch._max_length
        patch.setattr(DecodeBatch, "_max_length", lambda self: room(self) + 64)

    return plant


def trims_to_the_minimum(patch: pytest.MonkeyPatch) -> None:
    trim = ModelRows.trim_per_sequence

    def faulty(self: ModelRows, n: Any, at_most: int, *_: int) -> None:
        uniform = n if isinstance(n, list) else mx.broadcast_to(n.max(), n.shape)
        trim(self, uniform, at_most)

    patch.setattr(ModelRows, "trim_per_sequence", faulty)


def keeps_one_too_many(patch: pytest.MonkeyPatch) -> None:
    def faulty(proposed: mx.array, chosen: mx.array, limit: mx.array) -> mx.array:
        return mx.minimum(count_kept(proposed, chosen, limit) + 1, chosen.shape[1])

    patch.setattr(commit, "count_kept", faulty)
    patch.setattr("specdec.spec_decode.verifier.committer", lambda: commit.commit)


@BACKENDS
@pytest.mark.parametrize(
    "plant", [trim_off_by(-1), trim_off_by(1), trims_to_the_minimum, keeps_one_too_many]
)
def test_faults_are_caught(
    target: Any,
    drafts: dict[str, Any],
    plant: Callable[[pytest.MonkeyPatch], None],
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them changes the output of the tests above."""
    plant(monkeypatch)
    params = [SamplingParams(max_tokens=20)] * 8
    rows = run_rows(target, drafts["near"], PROMPTS, params, backend=backend)
    assert [r.tokens for r in rows] != [greedy(target, p, 20) for p in PROMPTS]
