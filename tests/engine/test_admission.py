"""What does not fit is refused with the numbers; what does not fit yet waits."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, MemoryLimitError, SamplingParams, SpecDecoder
from specdec import backend as backend_
from specdec.engine.admission import Preflight
from specdec.engine.engine import Engine
from specdec.memory import CacheGeometry, MemoryPlan, ModelGeometry, RowNeeds
from specdec.memory.planning import plan_memory
from specdec.models import LoadedModel
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.spec_decode import DraftModel
from specdec.utils.sizes import parse_size

from ..memory.test_peak import loaded
from ..models.folders import write_folder
from ..plain import AT_ONCE, BEHIND

MIB = 1 << 20


def requests_of(n: int) -> list[Request]:
    """Rows of many lengths, that end and join one by one."""
    return [
        Request(
            i, "", (5 + i,) * (60 + 37 * i % 180), SamplingParams(max_tokens=8 + 4 * i)
        )
        for i in range(n)
    ]


def decode(
    target: LoadedModel,
    draft: LoadedModel | None,
    requests: list[Request],
    backend: backend_.BackendDefaults,
    limit: int | None,
    prefill_step_size: int = 64,
) -> tuple[dict[int, list[int]], int, int]:
    """Tokens of every request, the peak, and most rows that ran together."""
    config = EngineConfig(
        batch_size=6, prefill_step_size=prefill_step_size, num_draft_tokens=2
    )
    plan = plan_memory(target, draft, config, backend)
    preflight = None if limit is None else Preflight(plan, limit)
    runner = ModelRunner(target.model, "target", config, backend)
    drafter = None
    if draft is not None:
        drafter = DraftModel(
            ModelRunner(draft.model, "draft", config, backend),
            vocab_size=runner.vocab_size,
            max_draft_tokens=2,
        )
    gc.collect()
    mx.synchronize()
    others = mx.get_active_memory() - plan.weight_bytes
    mx.reset_peak_memory()
    engine = Engine(runner, drafter, config, backend, frozenset(), preflight=preflight)
    for request in requests:
        engine.add(request)
    tokens: dict[int, list[int]] = {r.index: [] for r in requests}
    most = 0
    while engine.busy:
        for output in engine.step():
            tokens[output.request.index] += output.token_ids
        running = engine._running
        most = max(most, len(running.unfinished) if running else 0)
    return tokens, mx.get_peak_memory() - others, most


@pytest.mark.parametrize(
    ("backend", "with_draft"), [(AT_ONCE, True), (BEHIND, False)], ids=["cpu", "gpu"]
)
def test_a_small_limit_is_never_passed(
    tiny_model: Callable[..., Any], backend: backend_.BackendDefaults, with_draft: bool
) -> None:
    """Rows wait for memory; the output stays, and the peak is within the limit."""
    target = loaded(tiny_model, "full", vocab_size=300)
    draft = loaded(tiny_model, "gemma3", seed=1, vocab_size=300) if with_draft else None
    requests = requests_of(8)
    free, unbounded, most = decode(target, draft, requests, backend, None)
    assert most == 6
    config = EngineConfig(batch_size=6, prefill_step_size=64, num_draft_tokens=2)
    plan = plan_memory(target, draft, config, backend)
    costs = Preflight(plan, 1).cost
    limit = int(max(costs([r]) for r in requests) * 1.35)
    assert limit < unbounded  # so that the limit is what keeps it down
    tokens, peak, most = decode(target, draft, requests_of(8), backend, limit)
    assert tokens == free
    assert peak <= limit
    assert 1 < most < 6


def test_rows_that_ended_have_gone_before_another_begins(
    tiny_model: Callable[..., Any],
) -> None:
    """What they hold is not in what was asked of the limit.

    Where shapes repeat, a batch drops its rows when half of them have ended: a third
    has here when the last request's prefill begins, beside all that the others need.
    """
    shape = {"vocab_size": 300, "num_hidden_layers": 24, "intermediate_size": 32}
    target = loaded(tiny_model, "full", **shape)

    def request(index: int, prompt: int, generated: int) -> Request:
        params = SamplingParams(max_tokens=generated)
        return Request(index, "", (5 + index,) * prompt, params)

    ends, *others = request(0, 230, 3), request(1, 220, 16), request(2, 210, 16)
    last = request(3, 230, 4)
    config = EngineConfig(batch_size=6, prefill_step_size=32, num_draft_tokens=0)
    plan = plan_memory(target, None, config, BEHIND)
    limit = Preflight(plan, 1).cost([*others, last])
    _, peak, most = decode(
        target, None, [ends, *others, last], BEHIND, limit, prefill_step_size=32
    )
    assert most == 3
    assert peak <= limit


def model(**changes: Any) -> ModelGeometry:
    return ModelGeometry(
        **{
            "name": "m",
            "num_parameters": 1000,
            "weight_bytes": 10 * MIB,
            "caches": (CacheGeometry(slot_bytes=1024),),
            "vocab_size": 100,
            "elem_bytes": 2,
            "token_bytes": 400,
            "score_bytes": 6,
            **changes,
        }
    )


def preflight(limit: int) -> Preflight:
    return Preflight(
        MemoryPlan(target=model(), prefill_step_size=64, backend=AT_ONCE), limit
    )


def test_models_that_leave_no_room_are_refused() -> None:
    preflight(11 * MIB).check_models()
    with pytest.raises(MemoryLimitError) as raised:
        preflight(10 * MIB).check_models()
    message = str(raised.value)
    assert "10.5 MB of weights) and the memory limit is 10.5 MB" in message
    assert message.endswith(" or raise --memory-limit"), "a word that is no option"


def test_memory_of_the_prefix_cache_is_named_where_it_counts() -> None:
    plan = replace(preflight(MIB).plan, prefix_bytes=8 * MIB)
    with pytest.raises(MemoryLimitError) as raised:
        Preflight(plan, 11 * MIB).check_models()
    assert (
        "(10.5 MB of weights, 8.39 MB for --prefix-cache-memory) and the memory "
        "limit is 11.5 MB: take models of fewer bits, lower --prefix-cache-memory, "
        "or raise"
    ) in str(raised.value)
    with pytest.raises(MemoryLimitError, match=r"more need .*, 8.39 MB for --prefix"):
        Preflight(plan, 19 * MIB).check(5000, SamplingParams(max_tokens=10))
    with pytest.raises(MemoryLimitError) as raised:
        preflight(10 * MIB).check_models()
    assert ": take models of fewer bits, or raise" in str(raised.value)
    with pytest.raises(MemoryLimitError, match="bits, leave the draft out, or raise"):
        Preflight(replace(preflight(MIB).plan, draft=model()), MIB).check_models()
    # Loading is the fullest moment here: what is kept later does not matter.
    plan = replace(plan, target=replace(plan.target, loading_bytes=99 * MIB))
    with pytest.raises(MemoryLimitError, match=r"MB of weights\) and"):
        Preflight(plan, 20 * MIB).check_models()


def test_a_request_is_served_only_if_it_fits_itself() -> None:
    """Whatever requests were checked before, also those with other steps."""
    rng = random.Random(0)
    layers = (CacheGeometry(slot_bytes=16),) * 4
    plain, small = model(), model(score_bytes=0, caches=layers)
    # Of wide chunks, fewer layers are under way, so that they need less.
    by_layers = replace(BEHIND, prefills_by_layers=True)
    for target, backend, step in (
        (plain, AT_ONCE, 64), (plain, AT_ONCE, 8192), (small, by_layers, 8192)
    ):  # fmt: skip
        plan = MemoryPlan(
            target=target, draft=target, num_draft_tokens=2, backend=backend,
            prefill_step_size=step,
        )  # fmt: skip
        asked = [
            (
                rng.choice((1, 30, 700, 1900, 4000, 4090, 4096, 5000)),
                SamplingParams(
                    max_tokens=rng.choice((1, 40, 900)),
                    min_tokens=rng.choice((0, 1)),
                    temperature=1.0,
                    top_k=rng.choice((0, 3)),
                ),
            )
            for _ in range(200)
        ]
        needs = [plan.peak([RowNeeds(*each)]) for each in asked]
        for limit in sorted(set(needs))[::5]:
            served = Preflight(plan, limit)
            for each, needed in zip(asked, needs, strict=True):
                try:
                    served.check(*each)
                except MemoryLimitError:
                    assert needed > limit, each
                else:
                    assert needed <= limit, each


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    some = SamplingParams(max_tokens=10)
    limit = parse_size("12MB")
    preflight(limit).check(10, some)
    with pytest.raises(MemoryLimitError) as raised:
        preflight(limit).check(5000, some)
    message = str(raised.value)
    assert message.startswith("5000 prompt tokens and up to 10 more need 22.7 MB")
    # In the unit that most people write it in.
    assert "memory limit is 12.0 MB: shorten it, lower --max-tokens" in message


def test_rows_cost_more_together_than_the_sum_of_what_they_hold_alone() -> None:
    """Rows of a batch have the capacity of its longest."""
    short, long = requests_of(1)[0], Request(1, "", (1,) * 4000, SamplingParams())
    costs = preflight(1).cost
    weights = 10 * MIB
    together = costs([short, long]) - weights
    assert together > costs([short]) + costs([long]) - 2 * weights


def test_models_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    write_folder(tmp_path / "m", hidden_size=256, intermediate_size=1024)
    gc.collect()
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with pytest.raises(MemoryLimitError, match="the models need"):
        SpecDecoder.from_pretrained(path, config=EngineConfig(memory_limit=MIB))
    assert mx.get_peak_memory() - before < MIB


def test_prompts_are_refused_together_and_queued_otherwise(tmp_path: Path) -> None:
    """The limit reaches requests, in every way of adding them."""
    path = str(tmp_path / "m")
    write_folder(tmp_path / "m")
    few = SamplingParams(max_tokens=4)
    config = EngineConfig(memory_limit=4 * MIB, num_draft_tokens=0)
    decoder = SpecDecoder.from_pretrained(path, config=config)
    prompts = [[5] * 20] * 12
    assert [len(r.token_ids) for r in decoder.generate(prompts, few)]
    tight = SpecDecoder.from_pretrained(
        path, config=EngineConfig(memory_limit=900_000, num_draft_tokens=0)
    )
    with pytest.raises(MemoryLimitError, match="prompt 1: 400 prompt tokens and up"):
        tight.generate([[5] * 2, [5] * 400], few)
    session = tight.session()
    with pytest.raises(MemoryLimitError, match="the memory limit is"):
        session.add([5] * 400, few)
    assert not session.busy


def test_without_a_limit_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_, "memory_size", lambda: None)
    write_folder(tmp_path / "m")
    decoder = SpecDecoder.from_pretrained(str(tmp_path / "m"))
    assert decoder._preflight is None
    assert decoder.generate([[5] * 4], SamplingParams(max_tokens=2))


def test_the_device_says_what_it_has() -> None:
    size = backend_.memory_size()
    assert size is not None
    assert size > 1 << 28
