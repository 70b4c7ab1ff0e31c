"""Compiled forwards compute what the model computes, and leave the same caches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from specdec.cache import (
    CacheOptions,
    Memo,
    core,
    make_batch_caches,
    members,
    positions,
)
from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.errors import CacheError
from specdec.models import compiled
from specdec.models import runner as runner_module
from specdec.models.compiled import CompiledForwards
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.sampling_params import SamplingParams

from ..cache.small_models import MODELS
from ..plain import BEHIND, greedy, run_rows

TinyModel = Callable[..., nn.Module]
KINDS = ("full", "sliding", "gemma3", "list", "shared-kv", "latent")
UNPACKED = ("latent", "list", "shared-kv")  # heads that 32 does not divide
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "8-bit": {"kv_bits": 8, "kv_group_size": 32},
    "bounded": {"max_kv_size": 12},
}


def built(tiny_model: TinyModel, kind: str, **changes: Any) -> nn.Module:
    arch, arguments = MODELS[kind]
    return tiny_model(arch, **{**arguments, **changes})


def caches_of(model: nn.Module, rows: int, **options: Any) -> list[Any]:
    chosen: dict[str, Any] = {
        "max_write": 5, "read_bucket": 8, "max_length": 90, **options,
    }  # fmt: skip
    caches = make_batch_caches(model, rows, CacheOptions(**chosen), "it", Memo())
    model(mx.arange(4 * rows).reshape(rows, 4), cache=caches)
    for cache in caches:
        cache.trim_per_sequence(list(range(rows)), rows - 1)
    return caches


def contents(caches: list[Any]) -> list[Any]:
    return [np.array(leaf) for c in caches for leaf in flat(c.state)]


def flat(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    parts = tree if isinstance(tree, list | tuple) else ()
    return [array for part in parts for array in flat(part)]


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (kind, option)
        for kind in KINDS
        for option in OPTIONS
        if option != "8-bit" or kind not in UNPACKED
    ],
)
def test_forwards_and_caches_are_the_same(
    tiny_model: TinyModel, kind: str, option: str
) -> None:
    """Over growth, wraps and trims; a stale constant in a graph would show."""
    options = OPTIONS[option]
    head = {"head_dim": 32} if option == "8-bit" else {}
    model = built(tiny_model, kind, **head)
    rows = 3
    plain, replayed = (caches_of(model, rows, **options) for _ in range(2))
    forwards = CompiledForwards(model)
    draw = np.random.default_rng(0)
    for step in range(24):
        width = int(draw.integers(1, 6))
        tokens = mx.array(draw.integers(0, 90, (rows, width)))
        expected = model(tokens, cache=plain)
        done = forwards((tokens,), replayed)
        assert done is not None
        np.testing.assert_allclose(done[0], expected, rtol=2e-4, atol=2e-4)
        counts = draw.integers(0, width + 1, rows).tolist()
        for caches in (plain, replayed):
            for cache in caches:
                cache.trim_per_sequence(counts, width)
        if step % 7 == 6:  # the host learns how long rows are
            lengths = plain[0].offset.tolist()
            for caches in (plain, replayed):
                for cache in caches:
                    cache.note_lengths(longest=max(lengths), shortest=min(lengths))
    assert plain[0].offset.tolist() == replayed[0].offset.tolist()
    if option != "8-bit":
        for a, b in zip(contents(plain), contents(replayed), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind in KINDS for option in ("dense", "bounded")],
)
def test_chunks_of_prompts_and_what_follows_are_the_same(
    tiny_model: TinyModel, kind: str, option: str
) -> None:
    """From nothing on; padding that is kept, or counted for another row, would show."""
    model, rows, options = built(tiny_model, kind), 3, OPTIONS[option]
    forwards, draw = CompiledForwards(model), np.random.default_rng(1)
    built_before = 0
    for _ in range(2):  # the second time, graphs are there
        chosen = CacheOptions(max_write=8, read_bucket=8, max_length=90, **options)
        plain, replayed = (
            make_batch_caches(model, rows, chosen, "it", Memo()) for _ in range(2)
        )
        for valid in ([8, 5, 1], [0, 8, 3], [4, 4, 4], None, [2, 0, 7], None):
            width = 8 if valid else 3
            tokens = mx.array(draw.integers(0, 90, (rows, width)))
            if valid:
                for cache in plain:
                    cache.prepare(lengths=valid)
            expected = model(tokens, cache=plain)
            for cache in plain:
                cache.finalize()
            done = forwards((tokens,), replayed, valid=valid or ())
            assert done is not None
            for i, n in enumerate(valid or [width] * rows):
                np.testing.assert_allclose(
                    done[0][i, :n], expected[i, :n], rtol=2e-4, atol=2e-4
                )
            for a, b in zip(members(plain), members(replayed), strict=True):
                assert a.offset.tolist() == b.offset.tolist()
                assert (a._longest, a._uniform) == (b._longest, b._uniform)
        before, built_before = built_before, forwards.new_shapes
    assert built_before == before > 0


def test_a_graph_is_built_once_for_each_shape(tiny_model: TinyModel) -> None:
    model = built(tiny_model, "full")
    caches = caches_of(model, 2, read_bucket=64)
    calls = []

    class Counted(nn.Module):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            calls.append(tokens.shape)
            result: mx.array = model(tokens, cache=cache)
            return result

    forwards = CompiledForwards(Counted())  # type: ignore[no-untyped-call]
    for width in (1, 3, 1, 3, 1, 1, 3):
        assert forwards((mx.zeros((2, width), mx.int32),), caches) is not None
    assert calls == [(2, 1), (2, 3)]


def test_graphs_for_other_capacities_count_too(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of other bounds have arrays of other sizes: each is a graph of its own."""
    monkeypatch.setattr(compiled, "MAX_GRAPHS", 2)
    model = built(tiny_model, "full")
    calls = []

    class Counted(nn.Module):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            calls.append(cache[0].capacity)
            result: mx.array = model(tokens, cache=cache)
            return result

    forwards = CompiledForwards(Counted())  # type: ignore[no-untyped-call]
    for max_length in (70, 80, 90, 70):
        caches = caches_of(model, 2, read_bucket=64, max_length=max_length)
        assert forwards((mx.zeros((2, 2), mx.int32),), caches) is not None
    assert calls == [70, 80, 90, 70]  # the first was let go
    assert forwards.new_shapes == 4
    assert len(forwards._functions) == 2


def test_a_cache_that_is_not_written_is_not_counted_as_written(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is that a fault, of which a user should hear."""
    model = built(tiny_model, "full")

    class Skips(nn.Module):
        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            return mx.zeros((*tokens.shape, 7))

    caches = caches_of(model, 2)
    forwards = CompiledForwards(Skips())  # type: ignore[no-untyped-call]
    with caplog.at_level(logging.DEBUG, "specdec"):
        for _ in range(2):
            assert forwards((mx.zeros((2, 2), mx.int32),), caches) is None
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "leaves a cache out: it is not compiled" in record.getMessage()


def test_one_query_of_one_row_reads_what_it_holds(tiny_model: TinyModel) -> None:
    """Its graph would be another for every length: it is not compiled."""
    model = built(tiny_model, "full")
    caches = caches_of(model, 1, read_bucket=64)
    token = mx.zeros((1, 1), mx.int32)
    assert caches[0].make_mask(1) is None
    assert CompiledForwards(model)((token,), caches) is None
    keys, _ = caches[0].update_and_fetch(*[mx.zeros((1, 2, 1, 8))] * 2)
    assert keys.shape[2] == 5
    assert caches[0].keys_and_values()[0].shape[2] == 5
    caches[0].trim_per_sequence(mx.array([0]), 1)  # no row's length is known
    assert caches[0].make_mask(1).shape[-1] == 64


def test_too_much_is_refused_as_always(tiny_model: TinyModel) -> None:
    model = built(tiny_model, "full")
    caches = caches_of(model, 2, max_length=6)
    with pytest.raises(CacheError):
        CompiledForwards(model)((mx.zeros((2, 5), mx.int32),), caches)


def test_a_model_that_is_not_compiled_decodes_the_same(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """In the engine, with CUDA's switches on: the rows go on, and one line says so."""

    class Reads(type(tiny_model("llama"))):  # type: ignore[misc]
        def __call__(self, tokens: mx.array, *args: Any, **named: Any) -> mx.array:
            mx.eval(tokens)
            result: mx.array = super().__call__(tokens, *args, **named)
            return result

    plain, reads = tiny_model("llama"), tiny_model("llama")
    reads.__class__ = Reads
    prompts = [[5, 6, 7], [8, 9]]
    params = [SamplingParams(max_tokens=9)] * 2
    rows = run_rows(reads, None, prompts, params, backend=BEHIND)
    assert [row.tokens for row in rows] == [greedy(plain, p, 9) for p in prompts]
    (record,) = caplog.records
    assert "cannot be compiled" in record.getMessage()
    caplog.clear()
    run_rows(plain, None, prompts, params, backend=BEHIND)
    assert not caplog.records


def test_a_graph_is_built_when_its_shapes_were_met_often_enough(
    tiny_model: TinyModel,
) -> None:
    """Each combination by itself; until then the forward is run as usual."""
    model = built(tiny_model, "full")
    caches = caches_of(model, 2)
    forwards = CompiledForwards(model, after=3)
    for width, expected in ((1, False), (2, False), (1, False), (1, False), (1, True)):
        tokens = mx.ones((2, width), mx.int32)
        assert (forwards((tokens,), caches) is not None) == expected
    assert forwards((mx.ones((2, 2), mx.int32),), caches) is None


def test_replaced_weights_may_have_another_type(tiny_model: TinyModel) -> None:
    """Catches masks of the type that earlier rows had, which attention refuses."""
    model = built(tiny_model, "gemma3")
    runner = ModelRunner(model, "it", EngineConfig(), replace(BEHIND, compile_after=0))
    for dtype in (mx.float32, mx.float16, mx.float32):
        model.set_dtype(dtype)
        mx.eval(model)
        rows = runner.rows([[1] * 40, [2] * 50], max_round=2, max_length=200)
        for _ in rows.prefill():
            pass
        rows.forward(mx.ones((2, 1), mx.int32))
        assert runner.compiled is not None
        assert not runner.compiled._refused


def test_replaced_weights_are_those_that_graphs_compute_with(
    tiny_model: TinyModel,
) -> None:
    """Catches graphs that outlive the weights that they were built with."""
    model, other = tiny_model(), tiny_model(seed=3)
    config = EngineConfig(batch_size=2, num_draft_tokens=0, prefill_step_size=16)
    runner = ModelRunner(model, "it", config, BEHIND)
    prompts = [[5, 6, 7, 8, 9], [3, 1, 4]]

    def decoded() -> list[list[int]]:
        engine = Engine(runner, None, config, BEHIND, frozenset())
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=20)
            engine.add(Request(i, "", tuple(prompt), params))
        tokens: list[list[int]] = [[], []]
        while engine.busy:
            for output in engine.step():
                tokens[output.request.index] += output.token_ids
        return tokens

    assert decoded() == [greedy(model, p, 20) for p in prompts]
    forwards = runner.compiled
    assert forwards is not None
    graphs = dict(forwards._functions)
    assert graphs
    decoded()
    assert all(forwards._functions[key] is graphs[key] for key in graphs)
    replaced = weakref.ref(model.layers[0].mlp.up_proj.weight)
    # One array alone is enough.
    model.layers[0].mlp.update(
        {"up_proj": {"weight": other.layers[0].mlp.up_proj.weight}}
    )
    assert replaced() is None  # nothing of ours keeps it
    assert decoded() == [greedy(model, p, 20) for p in prompts]
    model.update(other.parameters())
    assert decoded() == [greedy(other, p, 20) for p in prompts]


def test_steps_of_one_row_are_compiled_where_attention_takes_a_mask(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are read exactly: other shapes, and so no graph, in every step."""
    monkeypatch.setattr(runner_module, "takes_single", lambda model: True)
    made = []
    make = CompiledForwards._make

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(CompiledForwards, "_make", counted)
    model = built(tiny_model, "full")
    runner = ModelRunner(model, "it", EngineConfig(), BEHIND)
    assert not runner.backend.pad_single_token
    prompt = [3, 1, 4, 1, 5]
    rows = runner.rows([prompt], max_round=1, max_length=40)
    for _ in rows.prefill():
        pass
    for token in (7, 2, 8, 6):
        found = rows.forward(mx.array([[token]]))
        prompt.append(token)
        expected = model(mx.array([prompt]))[:, -1:]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert len(made) == 1


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_first_chunks_are_compiled_where_masks_have_a_type(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Earlier rows have shown the type of the scores."""
    dtypes = list[Any]()
    make = positions.additive_mask

    def noted(visible: mx.array, dtype: mx.Dtype) -> mx.array:
        dtypes.append(dtype)
        return make(visible, dtype)

    monkeypatch.setattr(core, "additive_mask", noted)
    model = built(tiny_model, kind)
    backend = replace(BEHIND, compile_after=0, pad_single_token=False)
    runner = ModelRunner(model, "it", EngineConfig(), backend)
    batch, checks = (
        runner.rows([[3, 1, 4], [1, 5]], max_round=1, max_length=40),
        [*dtypes],
    )
    for _ in batch.prefill():
        pass
    assert dtypes == checks
    for prompt in [9, 2, 6, 5], [3, 5]:
        rows, shapes = runner.rows([prompt], max_round=1, max_length=40), len(dtypes)
        before = rows.new_shapes
        for _ in rows.prefill():
            pass
        assert rows.new_shapes - before == (len(dtypes) > shapes)
        batch.place([0], rows)
        found = batch.forward(mx.array([[7], [7]]))[0]
        expected = model(mx.array([[*prompt, 7]]))[0, -1:]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        batch.trim_per_sequence([1, 1], 1)
    assert set(dtypes) == {mx.float32}
