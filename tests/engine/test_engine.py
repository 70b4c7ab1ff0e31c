"""Whole runs on small random models in float32: token for token what mlx-lm gives."""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine.decode_batch import DecodeBatch
from specdec.engine.engine import Engine
from specdec.models.runner import ModelRows, ModelRunner
from specdec.request import Request
from specdec.sampling import gumbel_noise
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import DraftModel, DraftRows, Proposals, Round
from specdec.spec_decode.rejection_sampler import Accepted
from tests.plain import (
    AT_ONCE,
    BEHIND,
    greedy,
    run_rows,
    sampled,
)
from tests.scripted import Script

VOCAB = 97
LENGTHS = (1, 7, 30, 2, 70, 3, 16, 33)
BACKENDS = pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["cpu", "gpu"])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", seed=0)


@pytest.fixture(scope="module")
def drafts(target: Any, tiny_model: Callable[..., Any]) -> dict[str, Any]:
    other = tiny_model("llama", seed=5, num_hidden_layers=1)
    near = tiny_model("llama", seed=0)
    noise = mx.random.normal(near.model.embed_tokens.weight.shape, key=mx.random.key(1))
    near.model.embed_tokens.weight = near.model.embed_tokens.weight + 0.15 * noise
    return {"perfect": target, "near": near, "unrelated": other, "none": None}


class AlwaysWrong:
    """Proposes what the target will not choose: its own choice plus one."""

    context_length: int | None = None
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, continuations: dict[tuple[int, ...], list[int]]):
        self._all = continuations

    def rows(
        self, prompts: Sequence[Sequence[int]], *, max_length: int
    ) -> AlwaysWrongRows:
        return AlwaysWrongRows([self._all[tuple(p)] for p in prompts])


class AlwaysWrongRows(DraftRows):
    def __init__(self, continuations: list[list[int]]):
        # The first token of each came from prefill.
        self._left = [c[1:] for c in continuations]

    def propose(self, round_: Round) -> Proposals:
        k = round_.num_draft_tokens
        padded = [[*row, *([0] * k)][:k] for row in self._left]
        return Proposals((mx.array(padded, mx.int32) + 1) % VOCAB)

    def commit(self, round_: Round, accepted: Accepted) -> None:
        counts: list[int] = accepted.kept.tolist()  # type: ignore[assignment]
        self._left = [row[n:] for row, n in zip(self._left, counts, strict=True)]

    def note_lengths(self, longest: int, shortest: int) -> None:
        pass

    def filter(self, rows: Sequence[int]) -> None:
        self._left = [self._left[i] for i in rows]

    def extend(self, other: AlwaysWrongRows) -> None:
        self._left += other._left


def grid() -> Iterator[Any]:
    """Every cell for the draft that is right now and then; each pair for the others."""
    for draft in ("perfect", "near", "unrelated", "none"):
        cells = list(itertools.product((1, 4, 7), (1, 3, 8)))
        for i, (k, batch_size) in enumerate(cells):
            for j, (name, backend) in enumerate([("cpu", AT_ONCE), ("gpu", BEHIND)]):
                if draft == "near" or (i + j) % 2 == 0:
                    case = (draft, k, batch_size, backend)
                    yield pytest.param(*case, id=f"{draft}-{k}-{batch_size}-{name}")


@pytest.mark.parametrize(("draft", "k", "batch_size", "backend"), list(grid()))
def test_greedy_equals_mlx_lm(
    target: Any,
    drafts: dict[str, Any],
    prompts: list[list[int]],
    draft: str,
    k: int,
    batch_size: int,
    backend: BackendDefaults,
) -> None:
    params = [SamplingParams(max_tokens=21 + i % 3) for i in range(len(prompts))]
    rows = run_rows(
        target,
        drafts[draft],
        prompts,
        params,
        batch_size=batch_size,
        num_draft_tokens=k,
        backend=backend,
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == greedy(target, prompt, p.max_tokens)
        assert row.finish_reason == "length"
    drafted = sum(r.drafted for r in rows)
    accepted = sum(r.accepted for r in rows)
    if draft == "perfect":
        assert accepted == drafted > 0
    elif draft == "near":
        assert 0 < accepted < drafted
    elif draft == "none":
        assert drafted == 0


@BACKENDS
def test_a_draft_that_is_always_wrong(
    target: Any, prompts: list[list[int]], backend: BackendDefaults
) -> None:
    expected = [greedy(target, p, 15) for p in prompts]
    rows = run_rows(
        target,
        None,
        prompts,
        [SamplingParams(max_tokens=15)] * 8,
        batch_size=4,
        num_draft_tokens=3,
        backend=backend,
        drafter=AlwaysWrong(
            {tuple(p): e for p, e in zip(prompts, expected, strict=True)}
        ),
    )
    assert [r.tokens for r in rows] == expected
    assert sum(r.accepted for r in rows) == 0
    assert all(r.rounds == 14 for r in rows)


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "unrelated", "none"])
@pytest.mark.parametrize(("k", "batch_size"), [(1, 8), (4, 3), (3, 1)])
def test_sampling_is_a_function_of_the_request(
    target: Any,
    drafts: dict[str, Any],
    prompts: list[list[int]],
    draft: str,
    k: int,
    batch_size: int,
    backend: BackendDefaults,
) -> None:
    """Sampled and greedy rows in one batch, each equal to plain decoding alone."""
    params = [
        SamplingParams(max_tokens=20, temperature=t, seed=100 + i)
        for i, t in enumerate((0.0, 0.5, 1.0, 1.5, 0.0, 0.7, 1.0, 2.0))
    ]
    rows = run_rows(
        target,
        drafts[draft],
        prompts,
        params,
        batch_size=batch_size,
        num_draft_tokens=k,
        backend=backend,
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == sampled(target, prompt, p)
    if draft == "near":
        assert sum(r.accepted for r in rows) > 0


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "none"])
def test_filters_are_each_rows_own(
    target: Any, drafts: dict[str, Any], prompts: list[list[int]], draft: str,
    backend: BackendDefaults,
) -> None:  # fmt: skip
    """Rows with different filters, without one, and greedy, in one batch."""
    options: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 2.0, "min_p": 0.2},
        {},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 3.0, "top_p": 0.9, "min_p": 0.05, "top_k": 5},
        {"temperature": 1.0, "top_k": 10_000},
    ]
    params = [SamplingParams(max_tokens=20, seed=i, **o) for i, o in enumerate(options)]
    rows = run_rows(
        target, drafts[draft], prompts, params, batch_size=5, backend=backend
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        reference = p if p.top_k < VOCAB else replace(p, top_k=0)
        assert row.tokens == sampled(target, prompt, reference)
    if draft == "near":
        assert sum(r.accepted for r in rows) > 10


@BACKENDS
@pytest.mark.parametrize("k", [1, 2, 5])
def test_nothing_is_emitted_or_counted_behind_the_end(
    target: Any, prompts: list[list[int]], k: int, backend: BackendDefaults
) -> None:
    """Every token of row 0's own continuation serves once as the EOS token."""
    whole = [greedy(target, p, 24) for p in prompts]
    for eos in dict.fromkeys(whole[0][:10]):
        rows = run_rows(
            target,
            target,
            prompts,
            [SamplingParams(max_tokens=24)] * 8,
            num_draft_tokens=k,
            backend=backend,
            eos=frozenset({eos}),
        )
        for row, tokens in zip(rows, whole, strict=True):
            expected = tokens[: tokens.index(eos)] if eos in tokens else tokens
            assert row.tokens == expected
            assert row.finish_reason == ("stop" if eos in tokens else "length")
            # A perfect draft: every token used was accepted, but for the extras.
            assert row.accepted == row.drafted
            used = len(expected) + (eos in tokens)
            assert used - 1 - row.rounds <= row.accepted <= used - 1


@BACKENDS
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_short_requests(
    target: Any, prompts: list[list[int]], max_tokens: int, backend: BackendDefaults
) -> None:
    rows = run_rows(
        target,
        target,
        prompts,
        [SamplingParams(max_tokens=max_tokens)] * 8,
        num_draft_tokens=3,
        backend=backend,
    )
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.tokens == greedy(target, prompt, max_tokens)


@pytest.mark.parametrize("step", [1, 5, 64, 512])
def test_the_prefill_chunk_changes_nothing(
    target: Any, drafts: dict[str, Any], prompts: list[list[int]], step: int
) -> None:
    params = [SamplingParams(max_tokens=10)] * 8
    for backend in (AT_ONCE, BEHIND):
        rows = run_rows(
            target,
            drafts["near"],
            prompts,
            params,
            backend=backend,
            prefill_step_size=step,
        )
        for row, prompt in zip(rows, prompts, strict=True):
            assert row.tokens == greedy(target, prompt, 10)


def test_a_draft_with_a_padded_or_cut_embedding(
    target: Any, tiny_model: Callable[..., Any], prompts: list[list[int]]
) -> None:
    for vocab in (VOCAB + 31, VOCAB - 20):
        draft = tiny_model("llama", seed=5, vocab_size=vocab)
        for temperature in (0.0, 1.0):
            params = [SamplingParams(max_tokens=10, temperature=temperature)] * 8
            rows = run_rows(target, draft, prompts, params)
            for row, prompt, p in zip(rows, prompts, params, strict=True):
                assert row.tokens == sampled(target, prompt, p)


@BACKENDS
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_join_and_leave_change_nothing_for_the_others(
    target: Any, drafts: dict[str, Any], backend: BackendDefaults, seed: int
) -> None:
    """Random prompts, lengths, ends and settings through few rows."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 9, 40)))]
        for _ in range(14)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 17)),
            temperature=rng.choice((0.0, 0.0, 0.8, 1.3)),
            seed=rng.randrange(100),
        )
        for _ in prompts
    ]
    eos = frozenset({rng.randrange(VOCAB)})
    rows = run_rows(
        target,
        drafts[rng.choice(("near", "near", "none"))],
        prompts,
        params,
        batch_size=rng.choice((2, 3, 5)),
        num_draft_tokens=rng.choice((1, 3)),
        backend=backend,
        prefill_step_size=rng.choice((4, 16)),
        eos=eos,
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        tokens = sampled(target, prompt, p)
        ends = [i for i, t in enumerate(tokens) if t in eos]
        assert row.tokens == (tokens[: ends[0]] if ends else tokens)
        assert row.finish_reason == ("stop" if ends else "length")


@pytest.fixture
def watched_bounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check, at every forward, what the caches believe of their rows' lengths.

    A bound that is too low hides keys without an error; the list counts checks.
    """
    checks: list[int] = []
    forward = ModelRows.forward

    def checked(self: ModelRows, tokens: mx.array) -> mx.array:
        for cache in self._caches:
            offset = np.array(cache.offset)
            assert offset.max() <= cache._longest
            assert not cache._uniform or (offset == cache._longest).all()
            checks.append(1)
        return forward(self, tokens)

    monkeypatch.setattr(ModelRows, "forward", checked)
    return checks


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "perfect", "none"])
def test_bounds_hold_while_caches_grow(
    target: Any,
    drafts: dict[str, Any],
    draft: str,
    backend: BackendDefaults,
    watched_bounds: list[int],
) -> None:
    """Rows that join, leave and grow past 256 tokens with rounds in flight."""
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (246, 3, 200, 1, 250)]
    params = [SamplingParams(max_tokens=n) for n in (30, 12, 70, 2, 9)]
    rows = run_rows(
        target,
        drafts[draft],
        prompts,
        params,
        batch_size=3,
        num_draft_tokens=3,
        backend=backend,
        prefill_step_size=64,
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == greedy(target, prompt, p.max_tokens)
    assert watched_bounds


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_the_longest_row_may_end_long_before_the_others(target: Any, k: int) -> None:
    """An ended row that stays is written to every round: there must be room."""
    prompts = [[1 + i % 90 for i in range(n)] for n in (100, 3, 2)]
    params = [SamplingParams(max_tokens=n) for n in (2 + 2 * (k + 1), 90, 90)]
    rows = run_rows(target, target, prompts, params, num_draft_tokens=k, backend=BEHIND)
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == greedy(target, prompt, p.max_tokens)


@BACKENDS
@pytest.mark.parametrize("draft", ["near", "perfect"])
def test_rounds_without_proposals_in_between(
    target: Any,
    drafts: dict[str, Any],
    prompts: list[list[int]],
    draft: str,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
    watched_bounds: list[int],
) -> None:
    """The draft's cache catches up: a perfect draft goes on being accepted."""
    rng = random.Random(1)

    def choose_k(self: DecodeBatch) -> int:
        if rng.random() < 0.5:
            return 0
        return min(3, max(s.remaining for s in self.unfinished) - 1)

    monkeypatch.setattr(DecodeBatch, "choose_k", choose_k)
    params = [SamplingParams(max_tokens=n) for n in (30, 9, 22, 41, 5, 30, 30, 17)]
    rows = run_rows(
        target,
        drafts[draft],
        prompts,
        params,
        batch_size=4,
        num_draft_tokens=3,
        backend=backend,
    )
    for row, prompt, p in zip(rows, prompts, params, strict=True):
        assert row.tokens == greedy(target, prompt, p.max_tokens)
    if draft == "perfect":
        assert sum(r.accepted for r in rows) == sum(r.drafted for r in rows) > 50


def test_noise_is_drawn_only_while_a_row_samples(
    target: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import specdec.sampling.rows

    drawn: list[int] = []

    def counted(*args: Any) -> mx.array:
        drawn.append(1)
        return gumbel_noise(*args)

    monkeypatch.setattr(specdec.sampling.rows, "gumbel_noise", counted)
    params = [
        SamplingParams(max_tokens=3, temperature=1.0),
        SamplingParams(max_tokens=40),
    ]
    run_rows(target, None, prompts[:2], params)
    assert 0 < len(drawn) <= 4


class Measuring(Script):
    """Takes a hundred seconds before the first round."""

    def prepare(self, num_rows: int) -> None:
        for _ in range(99):
            time.perf_counter()


def test_times_add_up_to_the_wall_clock(
    target: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was spent before the first round is not lost, nor called prefill."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    config = EngineConfig(batch_size=2, num_draft_tokens=2)
    runner, draft = (ModelRunner(target, n, config, AT_ONCE) for n in ("a", "b"))
    drafter = DraftModel(draft, vocab_size=VOCAB, max_draft_tokens=2)
    length = Measuring(lambda number: number % 3)
    engine = Engine(runner, drafter, config, AT_ONCE, frozenset(), length=length)
    for i, prompt in enumerate(prompts):
        engine.add(Request(i, "", tuple(prompt), SamplingParams(max_tokens=5 + i)))
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
def test_a_tiny_temperature_is_nearly_greedy(
    target: Any, prompts: list[list[int]], temperature: float
) -> None:
    params = [SamplingParams(max_tokens=12, temperature=temperature)] * 8
    rows = run_rows(target, None, prompts, params)
    assert [r.tokens for r in rows] == [greedy(target, p, 12) for p in prompts]


@pytest.mark.parametrize("k", [0, 2])
def test_batches_shrink_by_halves_where_shapes_are_to_repeat(
    target: Any, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """However many end at once: 11, 6, 3, 2, 1, with ended rows to fill them."""
    sizes: list[int] = []
    dispatch = DecodeBatch.dispatch

    def watched(self: DecodeBatch, *args: Any, **options: Any) -> Any:
        sizes.append(len(self.slots))
        return dispatch(self, *args, **options)

    monkeypatch.setattr(DecodeBatch, "dispatch", watched)
    lengths = [3, 4, 5, 9, 9, 12, 16, 16, 30, 31, 60]
    prompts = [[i + 1, i + 2, i + 3] for i in range(len(lengths))]
    rows = run_rows(
        target,
        drafts["near"] if k else None,
        prompts,
        [SamplingParams(max_tokens=n) for n in lengths],
        batch_size=len(lengths),
        num_draft_tokens=k,
        backend=BEHIND,
    )
    for row, prompt, n in zip(rows, prompts, lengths, strict=True):
        assert row.tokens == greedy(target, prompt, n)
    assert sorted(set(sizes), reverse=True) == [11, 6, 3, 2, 1]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("k", [0, 2])
def test_ended_rows_that_fill_a_batch_keep_nothing(
    target: Any, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """They would grow by a token a round, beyond what caches were planned for.

    Only rows that stay to keep a shape show it, and no token of any row does.
    """
    lengths: dict[int, set[int]] = {}
    dispatch = DecodeBatch.dispatch

    def watched(self: DecodeBatch, *args: Any, **options: Any) -> Any:
        held: list[int] = self._target.offset.tolist()  # type: ignore[assignment]
        for slot, (row, n) in enumerate(zip(self.slots, held, strict=True)):
            if row is None:
                lengths.setdefault(slot, set()).add(n)
        return dispatch(self, *args, **options)

    monkeypatch.setattr(DecodeBatch, "dispatch", watched)
    prompts = [[i + 1, i + 2, i + 3] for i in range(5)]
    rows = run_rows(
        target,
        drafts["near"] if k else None,
        prompts,
        [SamplingParams(max_tokens=n) for n in (4, 40, 40, 40, 40)],
        batch_size=5,
        num_draft_tokens=k,
        backend=BEHIND,
    )
    assert rows[1].tokens == greedy(target, prompts[1], 40)
    assert lengths == {0: {0}}


def test_a_row_that_was_cancelled_while_it_waited_is_never_begun(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take a place, and its prompt be read, for nobody."""
    begun: list[int] = []
    rows = ModelRunner.rows

    def watched(self: ModelRunner, prompts: Any, **options: Any) -> ModelRows:
        begun.extend(prompt[0] for prompt in prompts)
        return rows(self, prompts, **options)

    monkeypatch.setattr(ModelRunner, "rows", watched)
    config, params = EngineConfig(batch_size=1), SamplingParams(max_tokens=4)
    runner = ModelRunner(target, "target", config, AT_ONCE)
    engine = Engine(runner, None, config, AT_ONCE, frozenset())
    for index in range(3):
        engine.add(Request(index, "", (index, 7, 8), params))
    ended = engine.step()
    assert engine.cancel(1)
    while engine.busy:
        ended += engine.step()
    reasons = {o.request.index: o.request.finish_reason for o in ended}
    assert reasons == {0: "length", 1: "cancelled", 2: "length"}
    assert begun == [0, 2]


def test_joined_rows_are_not_held_twice(target: Any, prompts: list[list[int]]) -> None:
    config = EngineConfig(batch_size=4)
    runner = ModelRunner(target, "target", config, AT_ONCE)
    engine = Engine(runner, None, config, AT_ONCE, frozenset())
    alive: list[weakref.ref[Any]] = []
    make = runner.rows

    def rows(*args: Any, **options: Any) -> ModelRows:
        made = make(*args, **options)
        alive.append(weakref.ref(made))
        return made

    runner.rows = rows  # type: ignore[method-assign]
    for i, n in enumerate((3, 30, 30, 30, 30)):
        params = SamplingParams(max_tokens=n)
        engine.add(Request(i, "", tuple(prompts[2]), params))
    while engine.busy:
        engine.step()
        gc.collect()
        # Those that run, and those that join.
        assert sum(r() is not None for r in alive) <= 2
    assert len(alive) == 2
    assert not any(r() for r in alive)


class TestFaultsAreCaught:
    """Each fault, planted in the round, changes the output of the test above."""

    def differs(self, target: Any, draft: Any, prompts: list[list[int]]) -> bool:
        """Whether it shows with rounds read at once, and with rounds in flight."""
        params = [SamplingParams(max_tokens=20)] * 8
        expected = [greedy(target, p, 20) for p in prompts]
        return all(
            [r.tokens for r in run_rows(target, draft, prompts, params, backend=b)]
            != expected
            for b in (AT_ONCE, BEHIND)
        )

    def test_no_fault(
        self, target: Any, drafts: dict[str, Any], prompts: list[list[int]]
    ) -> None:
        assert not self.differs(target, drafts["near"], prompts)

    @pytest.mark.parametrize("error", [-1, 1])
    def test_a_trim_off_by_one(
        self,
        target: Any,
        drafts: dict[str, Any],
        prompts: list[list[int]],
        error: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        trim = ModelRows.trim_per_sequence

        def faulty(self: ModelRows, n: Any, at_most: int, *_: int) -> None:
            off = n if isinstance(n, list) else mx.maximum(n + error, 0)
            trim(self, off, at_most + 1)

        monkeypatch.setattr(ModelRows, "trim_per_sequence", faulty)
        # Room for rows that grow too long: behind the end is other memory.
        room = DecodeBatch._max_length
        monkeypatch.setattr(DecodeBatch, "_max_length", lambda self: room(self) + 64)
        assert self.differs(target, drafts["near"], prompts)

    def test_trimming_every_row_to_the_batchs_minimum(
        self,
        target: Any,
        drafts: dict[str, Any],
        prompts: list[list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        trim = ModelRows.trim_per_sequence

        def faulty(self: ModelRows, n: Any, at_most: int, *_: int) -> None:
            uniform = n if isinstance(n, list) else mx.broadcast_to(n.max(), n.shape)
            trim(self, uniform, at_most)

        monkeypatch.setattr(ModelRows, "trim_per_sequence", faulty)
        assert self.differs(target, drafts["near"], prompts)

    def test_one_token_too_many_kept(
        self,
        target: Any,
        drafts: dict[str, Any],
        prompts: list[list[int]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from specdec.spec_decode import commit

        def faulty(proposed: mx.array, chosen: mx.array, limit: mx.array) -> mx.array:
            from specdec.spec_decode.rejection_sampler import count_kept

            return mx.minimum(count_kept(proposed, chosen, limit) + 1, chosen.shape[1])

        committer = commit.Committer(commit.commit)
        monkeypatch.setattr(commit, "count_kept", faulty)
        monkeypatch.setattr("specdec.spec_decode.verifier.committer", lambda: committer)
        assert self.differs(target, drafts["near"], prompts)
