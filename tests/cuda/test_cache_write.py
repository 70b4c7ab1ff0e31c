"""Writes into caches in place: the kernel's source in the emulator, and who uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec import EngineConfig
from specdec.cache import BatchKVCache, CacheOptions, check_caches, make_batch_caches
from specdec.cuda import attention_patch, cache_write, decode_attention
from specdec.cuda.attention_patch import attending_kind
from specdec.cuda.kernels import cuda_kernel
from specdec.models.runner import ModelRunner
from tests.models.architectures import build
from tests.plain import BEHIND

from .emulation.cuda import KernelFault, emulated, needs_compiler, needs_cuda, plant

TinyModel = Callable[..., nn.Module]
FORM = 64, mx.bfloat16


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from emulated(monkeypatch, cuda_kernel, decode_attention._kernel)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
def test_it_writes_what_mlx_writes() -> None:
    assert cache_write._agrees(FORM)


@needs_compiler
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b * slots_strides[0] + s", "s"),
        ("if (h >= k_shape[1]) return;", ""),
        ("h * new_v_strides[1]", "s * new_v_strides[1]"),
        ("i / D % S", "i / D % H"),
        ("out[i] = q[b", "out[i] = q[0"),
    ],
)
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    """By the emulator, or by the proof that a machine runs."""
    plant(monkeypatch, cache_write, "SOURCE", old, new)
    try:
        found = not cache_write._agrees(FORM)
    except KernelFault:
        found = True
    assert found


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_it_is_right_on_this_gpu(dtype: mx.Dtype) -> None:
    for _ in range(20):
        assert cache_write._agrees((128, dtype))


# -- who writes so ---------------------------------------------------------------


def written(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """A stand-in for the kernel, by MLX's operations; the queries that it returns."""
    outs: list[mx.array] = []

    def write(queries: Any, cache: Any, new: Any, slots: Any, after: Any = None) -> Any:
        index = slots[:, None, :, None]
        pairs = zip(cache, new, strict=True)
        outs.append(queries + 0)
        return outs[-1], tuple(mx.put_along_axis(a, index, b, axis=2) for a, b in pairs)

    monkeypatch.setattr(cache_write, "write", write)
    monkeypatch.setattr(cache_write, "writes_in_place", lambda arrays: True)
    return outs


def attending(model: nn.Module) -> nn.Module:
    """The model, whose attention takes what is not written yet."""
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        if (kind := attending_kind(type(module))) is not None:
            module.__class__ = kind
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_attention_writes_and_reads_what_was_written(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Windows, too.

    It reads the queries that the kernel returned: nothing else makes it wait.
    """
    outs, model = written(monkeypatch), attending(build(kind))
    asked: list[mx.array] = []
    usual = attention_patch._USUAL

    def shown(queries: mx.array, *arguments: Any, **how: Any) -> Any:
        asked.append(queries)
        return usual(queries, *arguments, **how)

    monkeypatch.setattr(attention_patch, "_USUAL", shown)
    results = []
    for in_place in (False, True):
        options = CacheOptions(max_write=30, in_place=in_place)
        caches = make_batch_caches(model, 2, options)
        found = []
        for width in (20, 3, 1, 16, 17):
            tokens = mx.arange(2 * width).reshape(2, width)
            found.append(model(tokens, cache=caches))
            for cache in caches:
                cache.trim_per_sequence([0, 1] if width > 1 else [0, 0])
        results.append(found)
    assert len(outs) == 3 * len(model.layers)  # the first write allocates, 17 are many
    assert all(any(out is each for each in asked) for out in outs)
    for one, other in zip(*results, strict=True):
        assert mx.array_equal(one, other)


def test_compiled_forwards_write_so(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has the write, and leaves what waits for it."""
    outs, usual = written(monkeypatch), tiny_model("llama")
    model = attending(tiny_model("llama"))
    defaults = replace(BEHIND, kernels=True, compile_after=0)
    made = ModelRunner(model, "it", EngineConfig(), defaults)
    prompt = [i % 30 for i in range(249)]
    rows = made.rows([prompt], max_round=2, max_length=400)
    for _ in rows.prefill():
        pass
    assert made.compiled is not None
    before = made.compiled.new_shapes
    outs.clear()  # those of the check of the model
    for i in range(8):
        tokens = [i, i + 1]
        found = rows.forward(mx.array([tokens]))
        prompt += tokens
        wanted = usual(mx.array([prompt]))[:, -2:]
        assert mx.allclose(found, wanted, 1e-4, 1e-5)
    assert made.compiled.new_shapes == before + 2
    assert len(outs) == 2 * len(model.layers)


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("llama", {"max_kv_size": 40}),
        ("llama", {"kv_bits": 8, "kv_group_size": 32}),
        ("gemma3_text", {}),
        ("qwen3_next", {}),
    ],
    ids=["whole", "ring", "packed", "windows", "states"],
)
def test_graphs_write_few_and_many_tokens_in_turn(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any], proven: bool
) -> None:
    """Chunks of prompts, and rounds of more tokens than are written in place.

    Nothing can be handed to the device while a graph is traced. So what was written in
    place is handed over before MLX writes in a graph.
    """
    handed_over: list[Any] = []
    hand_over: Any = mx.async_eval

    def begin(*arrays: Any) -> None:
        handed_over.extend(arrays)
        hand_over(*arrays)

    monkeypatch.setattr(mx, "async_eval", begin)
    outs = written(monkeypatch) if proven else []
    head = {"head_dim": 32} if "kv_bits" in options else {}
    model, prompts = attending(build(kind, **head)), [[1] * 50, [2] * 61]
    runs = []
    for after in (None, 0):
        defaults = replace(BEHIND, kernels=True, compile_after=after)
        config = EngineConfig(prefill_step_size=32, **options)
        runner = ModelRunner(model, "it", config, defaults)
        assert runner.options.in_place
        rows = runner.rows(prompts, max_round=24, max_length=400)
        for _ in rows.prefill():
            pass
        found = []
        for width in (2, 17, 2, 1, 24, 5, 17, 2):
            before = [c._storage._arrays for c in rows._caches if c.is_dense]
            handed_over.clear()
            found.append(rows.forward(mx.arange(2 * width).reshape(2, width) % 30))
            if proven and after == 0 and width == 17 and "kv_bits" not in options:
                assert all(any(a is b for b in handed_over) for a in before)
            rows.trim_per_sequence([0, width // 2], width)
        runs.append(found)
    assert runner.compiled is not None
    assert not runner.compiled._refused
    assert bool(outs) is (proven and "kv_bits" not in options)
    for one, other in zip(*runs, strict=True):
        assert mx.allclose(one, other, 1e-4, 1e-4)


def test_models_that_read_their_caches_are_not_written_so(
    tiny_model: TinyModel,
) -> None:
    """Every forward would copy them, since what was read stays as it is."""
    model = attending(tiny_model("llama"))
    options = CacheOptions(max_write=8, in_place=True)
    assert check_caches(model, "it", options).in_place
    attention = type(model.layers[0].self_attn)

    class Reads(attention):  # type: ignore[misc, valid-type]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            usual: Any = super()
            result: mx.array = usual.__call__(x, mask, cache)
            cache.keys = mx.depends(cache.keys, [result])
            return result

    model.layers[1].self_attn.__class__ = Reads
    assert not check_caches(model, "it", options).in_place


def test_packed_caches_are_not_written_so(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What unpacks them would not wait for the write."""
    outs, model = written(monkeypatch), attending(tiny_model("llama", head_dim=32))
    for bits, calls in ((8, 0), (None, 1)):
        options = CacheOptions(8, in_place=True, kv_bits=bits, kv_group_size=32)
        caches = make_batch_caches(model, 2, options)
        for _ in range(2):
            model(mx.zeros((2, 4), mx.int32), cache=caches)
        assert len(outs) == calls * len(model.layers)


def test_code_that_does_more_with_keys_gets_them_written(
    tiny_model: TinyModel,
) -> None:
    """The check of a model tries it, and nothing is left out then."""
    options = CacheOptions(max_write=8, in_place=True)
    model = attending(tiny_model("llama"))
    assert check_caches(model, "it", options) == options
    usual = tiny_model("llama")  # its attention is MLX's
    assert not check_caches(usual, "it", options).in_place


@pytest.mark.parametrize(("kind", "in_place"), [("llama", True), ("cohere2", False)])
def test_queries_of_another_type_leave_forwards_compiled(
    monkeypatch: pytest.MonkeyPatch, kind: str, in_place: bool
) -> None:
    """Cohere2 has queries in float32 then: nothing is written in place for them."""
    written(monkeypatch)
    model = attending(build(kind))
    model.set_dtype(mx.float16)
    defaults = replace(BEHIND, kernels=True, compile_after=0)
    runner = ModelRunner(model, "it", EngineConfig(), defaults)
    assert runner.options.in_place is in_place
    rows = runner.rows([[1] * 20, [2] * 30], max_round=4, max_length=200)
    for _ in rows.prefill():
        pass
    for width in (2, 1, 3):
        rows.forward(mx.ones((2, width), mx.int32))
    assert runner.compiled is not None
    assert not runner.compiled._refused


def test_what_is_not_proven_is_written_by_mlx() -> None:
    """Other types than were proven, and heads of other sizes."""
    cache, new = ((mx.zeros((1, 2, n, 64)),) * 2 for n in (8, 2))
    assert not cache_write.writes_in_place(cache)
    assert cache_write.takes(mx.zeros((1, 4, 2, 64)), cache, new)
    assert not cache_write.takes(mx.zeros((1, 4, 2, 64), mx.float16), cache, new)


@pytest.mark.parametrize("asked", ["state", "keys"])
def test_what_no_attention_asked_for_is_written(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A draft head writes its context, and attends later; layers may share keys."""
    outs, cache = written(monkeypatch), BatchKVCache(1, in_place=True)
    more = mx.ones((1, 2, 3, 64))
    cache.update_and_fetch(more, more)
    unwritten, _ = cache.update_and_fetch(2 * more, 2 * more)
    if asked == "keys":
        for _ in range(2):
            _, keys, _ = unwritten.written(mx.zeros((1, 2, 3, 64)))
    else:
        keys = cache.arrays[0]
    assert len(outs) == 1
    assert mx.array_equal(keys[0, 0, :6, 0], mx.array([1, 1, 1, 2, 2, 2]))


def test_only_models_that_attend_by_ours_are_written_so(tiny_model: TinyModel) -> None:
    kernels, model = replace(BEHIND, kernels=True), tiny_model("llama")
    found = []
    for defaults in (kernels, kernels, BEHIND):
        runner = ModelRunner(model, "it", EngineConfig(), defaults)
        found.append(runner.options.in_place)
        attending(model)
    assert found == [False, True, False]
