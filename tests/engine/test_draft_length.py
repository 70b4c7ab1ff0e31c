"""Draft lengths in whole runs: k that varies changes nothing; drafts catch up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.engine import profiler
from specdec.engine.profiler import (
    PROPOSED,
    SWEEPS,
    SpreadTokens,
    _Stopwatch,
    cost_key,
    draft_length,
    measure_forwards,
    without_noise,
)
from specdec.models.runner import ModelRows, ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import DraftModel, DraftRows, NgramDrafter, Proposals, Round
from specdec.spec_decode import draft_model as draft_model
from specdec.spec_decode.draft_length import (
    AutoLength,
    CostStore,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)
from specdec.spec_decode.draft_model import Backlog
from tests.models.architectures import build
from tests.plain import AT_ONCE, BACKENDS, BEHIND, VOCAB, drafts_of, exact
from tests.scripted import Script

# Fewer columns than a catch-up chunk, so that rings have to be re-laid for it.
WINDOWED = {"sliding_window": 24, "sliding_window_pattern": 2}


_rng = random.Random(0)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(n)] for n in (1, 7, 30, 2, 40, 3)]


@pytest.fixture
def other(drafts: dict[str, Any]) -> Any:
    return drafts["unrelated"]


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k_that_varies_changes_nothing(
    target: Any,
    other: Any,
    backend: BackendDefaults,
    temperature: float,
) -> None:
    """Every k, 0 included, in every order; rows that join and leave meanwhile."""
    rng = random.Random(3)
    script = Script(lambda number: rng.choice((0, 0, 1, 2, 4)))
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=n)
        for n in (20, 31, 9, 26, 2, 33)
    ]
    exact(
        target, other, PROMPTS, params,
        batch_size=3, num_draft_tokens=4, backend=backend, length=script,
    )  # fmt: skip
    assert {o.num_draft_tokens for o in script.outcomes} >= {0, 1, 2, 4}


@BACKENDS
@pytest.mark.parametrize("batch_size", [1, 6])
def test_auto_changes_nothing(
    target: Any,
    other: Any,
    backend: BackendDefaults,
    batch_size: int,
) -> None:
    """Auto itself, with costs under which several k are chosen."""
    costs = RoundCosts(ForwardCosts([Forwards(1, {1: 1.0, 2: 1.0, 9: 1.1}, 0.01)]))
    length = AutoLength(costs)
    chosen: list[int] = []
    observe = length.observe

    def noted(timing: RoundTiming) -> None:
        k = timing.num_draft_tokens
        chosen.append(k)
        seconds = costs.forwards.round(timing.num_rows, k)
        observe(replace(timing, seconds=seconds, fair=True))

    length.observe = noted  # type: ignore[method-assign]
    for draft in (target, other):
        exact(
            target, draft, PROMPTS, [24 + i for i in range(6)],
            batch_size=batch_size, num_draft_tokens=8, backend=backend, length=length,
        )  # fmt: skip
    assert 0 in chosen
    assert len(set(chosen)) >= 3


# -- catching up -----------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("phase", [1, 37, 150])
def test_acceptance_after_a_long_phase_without_drafts(
    target: Any, backend: BackendDefaults, phase: int
) -> None:
    """A perfect draft goes on being accepted, however long it was not asked."""
    script = Script(lambda number: 0 if 3 <= number < 3 + phase else 2)
    rows = exact(
        target, target, PROMPTS[1:4], phase + 40,
        num_draft_tokens=4, backend=backend, length=script,
    )  # fmt: skip
    assert all(row.accepted == row.drafted > 20 for row in rows)


@BACKENDS
def test_rows_that_joined_meanwhile_missed_less(
    tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """Rows that join and end in phases without drafts; rings wrap meanwhile."""
    model = tiny_model("gemma3_text", seed=2, **WINDOWED)
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (30, 3, 12, 40, 2, 9)]
    lengths = (210, 12, 30, 25, 60, 90)
    script = Script(lambda number: 3 if number % 60 in (0, 1, 50) else 0)
    rows = exact(
        model, model, prompts, lengths,
        batch_size=3, num_draft_tokens=4, backend=backend, length=script,
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert accepted == drafted > 20


def test_catching_up_takes_chunks(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens are a few forwards, not a hundred."""
    widths: list[int] = []
    read = draft_model.DraftModel.read

    def noted(self: Any, tokens: Any) -> Any:
        widths.append(tokens.shape[1])
        return read(self, tokens)

    monkeypatch.setattr(draft_model.DraftModel, "read", noted)
    script = Script(lambda number: 0 if number < 300 else 1)
    exact(target, target, PROMPTS[1:3], 310, num_draft_tokens=4, length=script)
    assert widths[:3] == [128, 128, 44]
    assert set(widths[3:]) == {2}


def test_pieces_begin_where_rows_begin() -> None:
    missed = Backlog(3)
    missed.counts = [10, 4, 4]
    assert list(missed.pieces(3, 100)) == [(0, 3), (3, 6), (6, 10)]
    missed.counts = [10, 10, 0]
    assert list(missed.pieces(4, 100)) == [(0, 4), (4, 8), (8, 10)]
    missed.counts = [300, 300, 300]
    assert list(missed.pieces(4, 128)) == [(0, 128), (128, 256), (256, 300)]


# -- what lengths are shown -------------------------------------------------


@BACKENDS
def test_outcomes_are_reported_in_order(target: Any, backend: BackendDefaults) -> None:
    at_once = backend.compile_after is not None
    if at_once:
        backend = replace(backend, compile_after=0)
    ks = [0, 0, 2, 2, 0, 1]
    script = Script(lambda number: ks[number % len(ks)])
    rows = exact(
        target, target, PROMPTS[1:3], 20,
        num_draft_tokens=4, backend=backend, length=script,
    )  # fmt: skip
    outcomes = script.outcomes[:10]
    assert [o.num_draft_tokens for o in outcomes] == (ks + ks)[:10]
    assert [o.backlog for o in outcomes] == [0, 0, 2, 0, 0, 1, 0, 0, 2, 0]
    # While the others ran, another k was built, nothing at all, or a graph.
    if not backend.static_shapes:
        assert all(o.seconds and o.fair for o in outcomes if o.num_draft_tokens)
    elif not at_once:
        assert [i for i, o in enumerate(outcomes) if o.seconds and o.fair] == [2, 6, 8]
    accepted = sum(n for o in script.outcomes for _, n in o.accepted)
    # Those after a row's last token are accepted, and not counted there.
    assert accepted >= sum(r.accepted for r in rows)
    assert all(0 <= n <= limit for o in outcomes for limit, n in o.accepted)


def test_rounds_are_not_timed_until_their_shapes_have_settled(target: Any) -> None:
    """The first run as usual, the next builds a graph: neither shows the cost."""
    backend = replace(BEHIND, compile_after=2, read_bucket=512)
    script = Script(lambda number: 2)
    exact(
        target, target, PROMPTS[1:3], 40,
        num_draft_tokens=2, backend=backend, length=script,
    )  # fmt: skip
    timed = [o.seconds is not None and o.fair for o in script.outcomes[:8]]
    # While the first was on its way the second was built, and so on.
    assert timed == [False, False, *[True] * 6]


@pytest.mark.parametrize("drafts", [True, False])
def test_last_tokens_and_rows_without_a_drafter_leave_no_choice(
    target: Any, drafts: bool
) -> None:
    script = Script(lambda number: 2)
    draft = target if drafts else None
    exact(target, draft, PROMPTS[1:2], 8, num_draft_tokens=4, length=script)
    # The prompt's forward brings one token, 3 + 3 tokens, and the last.
    expected = [False, False, True] if drafts else [True] * 7
    assert [o.forced for o in script.outcomes] == expected


def test_rows_of_another_session_have_other_numbers(target: Any) -> None:
    """A length outlives sessions, and remembers what each row accepted."""
    numbers: list[set[int]] = []
    for _ in range(2):
        script = Script(lambda number: 2)
        exact(target, target, PROMPTS[1:3], 8, num_draft_tokens=4, length=script)
        numbers.append({row for o in script.outcomes for row in o.rows})
        assert {row for state in script.states for row in state.left} == numbers[-1]
    assert [len(rows) for rows in numbers] == [2, 2]
    assert not numbers[0] & numbers[1]


def test_missed_tokens_go_to_the_slots_of_their_rows() -> None:
    """Rows after the first ones are idle slots, and are left out."""
    missed, others = Backlog(3), Backlog(3)
    missed.add(mx.array([[1, 0], [2, 0], [3, 0]]))
    others.add(mx.array([[4, 0], [5, 0], [6, 0]]))
    others.counts = [1, 0, 1]
    missed.place([2, 0], others)
    assert missed.counts == [0, 1, 1]
    assert missed._compact()[1:].tolist() == [[2], [4]]


def test_rows_that_join_have_missed_nothing() -> None:
    """What rows missed on average is reported, not what one of them did."""
    missed, others = Backlog(1), Backlog(2)
    for _ in range(30):
        missed.add(mx.zeros((1, 2), mx.int32))
    missed.extend(others)
    assert missed.mean == 10
    missed.filter([1, 2])
    assert missed.mean == 0


# -- measuring -------------------------------------------------------------


def runners(target: Any, draft: Any) -> tuple[EngineConfig, ModelRunner, DraftModel]:
    config = EngineConfig()
    runner = ModelRunner(target, "target", config, AT_ONCE)
    drafter = DraftModel(
        ModelRunner(draft, "draft", config, AT_ONCE),
        vocab_size=runner.vocab_size,
        max_draft_tokens=config.max_draft_tokens,
    )
    return config, runner, drafter


@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_forwards_are_measured(target: Any, other: Any, kind: str) -> None:
    _, runner, drafter = runners(target, other)
    drafter = NgramDrafter() if kind == "ngram" else drafter  # type: ignore[assignment]
    forwards = measure_forwards(runner, drafter, 3, max_draft_tokens=8)
    assert forwards.num_rows == 3
    assert set(forwards.verify) >= {1, 2}
    assert set(forwards.verify) <= {1, 2, 5}
    assert all(seconds > 0 for seconds in forwards.verify.values())
    assert forwards.draft_step > 0


@pytest.mark.parametrize("backend", [AT_ONCE, BEHIND], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_forwards_are_measured_with_a_context(
    other: Any, kind: str, backend: BackendDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows, with windows and recurrent layers, too."""
    runner = ModelRunner(build(kind), "target", EngineConfig(), backend)
    seen, forward = list[tuple[int, Any]](), ModelRows.forward

    def noted(rows: ModelRows, tokens: mx.array) -> mx.array:
        logits = forward(rows, tokens)
        if rows.runner is runner:
            seen.append((tokens.shape[1], rows.offset.tolist()))
        return logits

    monkeypatch.setattr(ModelRows, "forward", noted)
    options: Any = {"max_draft_tokens": 4, "budget_seconds": 1000}
    forwards = measure_forwards(runner, NgramDrafter(), 2, context=1500, **options)
    assert forwards.context == 1500
    assert {*forwards.longer} == {*forwards.verify} == {1, 2, 5}
    assert all(seconds > 0 for seconds in forwards.longer.values())
    long = [(width, each) for width, each in seen if min(each) >= 1500]
    assert {width for width, _ in long} == set(forwards.longer)
    assert all(each == [1500 + width] * 2 for width, each in long)
    assert not measure_forwards(runner, NgramDrafter(), 2, **options).longer


def test_a_context_is_packed_where_rows_of_so_many_tokens_are() -> None:
    """Dense, it would take more memory than plans count, and other times."""
    config = EngineConfig(kv_bits=8, kv_group_size=32, quantized_kv_start=100)
    rows = ModelRunner(build("llama", head_dim=32), "it", config, AT_ONCE).rows(
        [[1] * 3] * 2, max_round=2, max_length=300
    )
    for _ in rows.prefill():
        pass
    for more, packed in ((50, False), (150, True)):
        rows.skip(more)
        rows.forward(mx.ones((2, 1), mx.int32))
        assert all(bool(cache.packing) is packed for cache in rows._caches)


def test_prompts_say_which_context_is_measured(
    target: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[int, int]]()

    class Noted(Script):
        def unmeasured(self, num_rows: int, context: int = 0) -> int:
            asked.append((num_rows, context))
            return 0

    prompts = [[1] * n for n in (10, 20, 30, 7, 7)]
    exact(target, other, prompts, [3] * 5, batch_size=3, length=Noted(lambda _: 1))
    assert asked[0] == (3, 20)


def test_verify_forwards_are_measured_with_experts_spread(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one token repeated, the experts of that token would be all that is read.

    Verifying would look as cheap as a plain step, in a mixture of experts alone.
    """
    target = tiny_model(
        "qwen3_moe",
        seed=0,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )
    _, runner, drafter = runners(target, target)
    chosen: list[tuple[int, set[int]]] = []
    call = SwitchGLU.__call__

    def noted(self: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        tokens: Any = indices.reshape(-1).tolist()
        chosen.append((len(tokens) // 2, set(tokens)))
        return call(self, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", noted)
    measure_forwards(runner, drafter, 3, max_draft_tokens=8)
    widest = [experts for tokens, experts in chosen if tokens == 3 * 5]
    assert widest
    # 15 tokens of 2 experts each, of 16, by chance: hardly ever fewer than 8.
    assert min(map(len, widest)) >= 8
    assert len(set(map(frozenset, widest))) > len(target.layers)  # others every time


def test_measured_tokens_are_all_different() -> None:
    """Of any vocabulary; one that the stride divides would have them come again."""
    for size in (2, 97, 100, 49152, 151936):
        tokens: Any = SpreadTokens(size).next(4, 64).reshape(-1).tolist()
        assert len(set(tokens)) == min(256, size)
        assert 0 <= min(tokens) <= max(tokens) < size


def test_measuring_stops_when_its_time_is_up(target: Any, other: Any) -> None:
    _, runner, drafter = runners(target, other)
    ticks = count(0.0, 1.0)
    forwards = measure_forwards(
        runner, drafter, 1, max_draft_tokens=8, clock=ticks.__next__
    )
    assert set(forwards.verify) == {1, 2}


class Slow(DraftRows):
    """Rows whose proposals take as long as they say, by a clock of their own.

    Args:
        settling: what the first proposals take, one after the other; then ``usual``.
    """

    usual = 0.003
    context_length: int | None = None
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, settling: list[float]):
        self.settling, self.now = settling, 0.0

    def rows(self, prompts: Any, *, max_length: int) -> Slow:
        return self

    def clock(self) -> float:
        self.now += 1e-4
        return self.now

    def propose(self, round_: Round) -> Proposals:
        self.now += self.settling.pop(0) if self.settling else self.usual
        return Proposals(mx.zeros((1, round_.num_draft_tokens), mx.int32))

    def commit(self, round_: Round, verdict: Any) -> None: ...

    def filter(self, rows: Any) -> None: ...

    def extend(self, other: Slow) -> None: ...


@pytest.mark.parametrize("settling", [[18.0, 3.0], [2.0, 1.0, 0.5], [30.0, 5.0, 1.0]])
def test_it_is_not_measured_while_kernels_are_compiled(
    target: Any, settling: list[float]
) -> None:
    """However long that takes, as long as every run is quicker than the one before."""
    _, runner, _ = runners(target, target)
    slow: Any = Slow(settling)
    forwards = measure_forwards(runner, slow, 1, max_draft_tokens=8, clock=slow.clock)
    assert forwards.draft_step == pytest.approx(slow.usual / 3, rel=0.2)


def test_what_is_measured_is_compiled(target: Any, other: Any) -> None:
    """As decoding will be, however often shapes have to be met for that."""
    backend = replace(BEHIND, compile_after=1000)
    runner = ModelRunner(target, "target", EngineConfig(), backend)
    drafter = DraftModel(
        ModelRunner(other, "draft", EngineConfig(), backend),
        vocab_size=runner.vocab_size,
        max_draft_tokens=8,
    )
    forwards = measure_forwards(runner, drafter, 3, max_draft_tokens=8)
    drafting = drafter.runner.compiled
    assert runner.compiled is not None
    assert drafting is not None
    # A graph for each forward of the target at least, and the draft's.
    built = runner.compiled.new_shapes, drafting.new_shapes
    assert sum(built) > len(forwards.verify) > 0 < min(built)
    rows = runner.rows([[1, 2], [3, 4]], max_round=3, max_length=40)
    for _ in rows.prefill():
        pass
    graphs = len(runner.compiled._functions)
    rows.forward(mx.ones((2, 3), mx.int32))
    assert len(runner.compiled._functions) == graphs


class Device:
    """A clock, and work that takes its time while the next is being built."""

    def __init__(self, build: float, compute: float):
        self.now, self.build, self.compute = 0.0, build, compute
        self.free_at = 0.0
        self.ends: dict[int, float] = {}
        self.work: list[mx.array] = []

    def run(self) -> list[mx.array]:
        self.now += self.build
        self.work.append(mx.zeros(1))
        self.free_at = max(self.free_at, self.now) + self.compute
        self.ends[id(self.work[-1])] = self.free_at
        return [self.work[-1]]

    def wait(self, arrays: list[mx.array]) -> None:
        self.now = max([self.now, *(self.ends[id(a)] for a in arrays)])


@pytest.mark.parametrize(
    ("build", "compute", "expected"),
    [
        (3.0, 1.0, 3.0),  # launching takes longest: that is what a round takes
        (1.0, 3.0, 3.0),
        (100.0, 50.0, 150.0),  # long: waited for, as nothing is won by overlapping
    ],
)
def test_work_is_timed_as_rounds_run_it(
    monkeypatch: pytest.MonkeyPatch, build: float, compute: float, expected: float
) -> None:
    """Built while the work before it runs, and not one by one."""
    device = Device(build, compute)
    monkeypatch.setattr(mx, "eval", device.wait)
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)
    watch = _Stopwatch(lambda: device.now, 1000.0)
    settled = watch.settled(device.run, 0.0)
    assert watch.again(device.run, settled) == expected


def test_a_slow_spell_is_no_cost(
    monkeypatch: pytest.MonkeyPatch, target: Any, other: Any
) -> None:
    """Whatever is being measured while other load lasts is measured again."""
    _, runner, drafter = runners(target, other)
    for slow in range(9):
        measured = count()

        def again(watch: _Stopwatch, run: Any, known: float) -> float:
            return 2.0 if next(measured) == slow else 1.0  # noqa: B023

        monkeypatch.setattr(_Stopwatch, "again", again)
        forwards = measure_forwards(
            runner, drafter, 2, max_draft_tokens=4, budget_seconds=1000
        )
        assert next(measured) == SWEEPS * (1 + 3)
        assert set(forwards.verify.values()) == {1.0}
        assert forwards.fall == 1.0
        assert forwards.draft_step == pytest.approx(1 / PROPOSED)


@pytest.mark.parametrize(("first", "likely", "runs"), [(1.0, 0.0, 2), (1.0, 1.5, 1)])
def test_what_is_slow_is_timed_once(
    monkeypatch: pytest.MonkeyPatch, first: float, likely: float, runs: int
) -> None:
    """After the run that builds it, or that one if it took no longer."""
    device = Device(0.0, first)
    monkeypatch.setattr(mx, "eval", device.wait)
    watch = _Stopwatch(lambda: device.now, 5.0)
    assert watch.settled(device.run, likely) == first
    assert watch.again(device.run, first) == first
    assert device.now == runs * first


def test_a_fall_of_times_is_reported(
    target: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise that the corrected times no longer show."""
    _, runner, drafter = runners(target, other)
    # A plain step, drafting, and verify forwards of 2 and of 5 tokens.
    times = cycle([1.0, 1.0, 3.0, 2.0])
    monkeypatch.setattr(_Stopwatch, "again", lambda *_: next(times))
    forwards = measure_forwards(
        runner, drafter, 2, max_draft_tokens=4, budget_seconds=1000
    )
    assert forwards.verify == {1: 1.0, 2: 2.0, 5: 2.0}
    assert forwards.fall == 1.5


def test_what_is_still_being_built_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels may be compiled by the second run too, for longer than the budget."""
    device = Device(0.0, 0.01)
    monkeypatch.setattr(mx, "eval", device.wait)
    building = [5.0, 3.0, 2.0]

    def run() -> list[mx.array]:
        device.now += building.pop(0) if building else 0.0
        return device.run()

    watch = _Stopwatch(lambda: device.now, 1.5)
    assert watch.settled(run, 0.0) == pytest.approx(0.01)
    assert not building
    # There is as much time left as if nothing had been built.
    assert not watch.late(1.4)
    assert watch.late(1.5)


def test_a_kernel_compiled_while_settling_is_no_cost(
    monkeypatch: pytest.MonkeyPatch, target: Any, other: Any
) -> None:
    """Two runs that compile take alike: a plain step of seconds makes drafts look free.

    Costs are kept, so that it would last.
    """
    took = [10.0, 7.2]

    def once(self: _Stopwatch, run: Any) -> float:
        run()
        return took.pop(0) if took else 0.01

    monkeypatch.setattr(_Stopwatch, "once", once)
    monkeypatch.setattr(_Stopwatch, "again", lambda _, run, known: known)
    backend = replace(BEHIND, new_shape_seconds=0.04)
    runner = ModelRunner(target, "target", EngineConfig(), backend)
    _, _, drafter = runners(target, other)
    forwards = measure_forwards(runner, drafter, 2, max_draft_tokens=4)
    assert not took
    assert set(forwards.verify.values()) == {0.01}


def test_what_took_longer_than_more_tokens_is_noise() -> None:
    measured = {1: 5.0, 2: 7.0, 3: 4.0, 5: 4.5, 9: 4.25}
    assert without_noise(measured) == {1: 5.0, 2: 4.0, 3: 4.0, 5: 4.25, 9: 4.25}


def test_costs_are_kept_on_disk(
    target: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "BUSY", float("inf"))  # whatever else runs here
    config, runner, drafter = runners(target, other)
    store = CostStore(tmp_path / "costs.json")
    length = draft_length(config, runner, drafter, AT_ONCE, store=store)
    assert isinstance(length, AutoLength)
    length.measure(length.unmeasured(2))
    written = store.path.read_text("utf-8")
    again = draft_length(config, runner, drafter, AT_ONCE, store=store)
    assert isinstance(again, AutoLength)
    assert again.costs.covers(1)
    assert not again.unmeasured(2)
    assert store.path.read_text("utf-8") == written
    # Other models, and other caches, are other costs.
    keys = {
        cost_key(config, runner, drafter, AT_ONCE),
        cost_key(config, runner, drafter, BEHIND),
        cost_key(config, runner, runners(target, target)[2], AT_ONCE),
        cost_key(config, runner, NgramDrafter(), AT_ONCE),
        cost_key(EngineConfig(kv_bits=8), runner, drafter, AT_ONCE),
    }
    assert len(keys) == 5


def test_a_number_or_no_draft_needs_no_costs(target: Any, other: Any) -> None:
    config, runner, drafter = runners(target, other)
    assert draft_length(config, runner, None, AT_ONCE) is None
    three = EngineConfig(num_draft_tokens=3)
    assert draft_length(three, runner, drafter, AT_ONCE) is None
