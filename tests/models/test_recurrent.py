"""Models with recurrent layers in batches: every row keeps its own states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, make_prompt_cache

from specdec.backend import BackendDefaults
from specdec.cache import (
    BatchCacheList,
    BatchRecurrentCache,
    CacheOptions,
    make_batch_caches,
)
from specdec.config import EngineConfig
from specdec.cuda import gated_delta
from specdec.cuda.modules import as_kind
from specdec.engine.engine import Engine
from specdec.errors import CacheError
from specdec.models import recurrent
from specdec.models.chunked_delta import gated_delta_chunks
from specdec.models.compiled import CompiledForwards
from specdec.models.recurrent import with_recurrent_rows
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import Drafter
from specdec.spec_decode.ngram import NgramDrafter

from ..plain import AT_ONCE, BACKENDS, BEHIND, exact, greedy, run_rows
from ..prefix_cache.harness import decode, memory_store
from .architectures import VOCABULARY, Guesses, build

FAMILIES = (
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_linear",
    "bailing_moe_v3",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "lfm2-vl",
    "lfm2_moe",
    "longcat_flash_ngram",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv7",
)
# Masked windows and states; token by token; states beside keys in one list; a mixer of
# keys and states.
KINDS = ("qwen3_5", "mamba", "falcon_h1", "baichuan_m1")
KINDS_AND_KERNEL = pytest.mark.parametrize(
    ("arch", "kernel"), [*((arch, False) for arch in KINDS), ("qwen3_5", True)]
)

# Padded steps, read late; building graphs of every family takes minutes on a CPU.
PADDED = replace(BEHIND, compile_after=None)

LENGTHS = (3, 17, 1, 8, 1, 9)
PROMPTS = [
    [(5 * i + 3 * j + i * j) % VOCABULARY for j in range(n)]
    for i, n in enumerate(LENGTHS)
]
SHORT = [PROMPTS[i] for i in (5, 0, 2)]
NEW_TOKENS = 12
PARAMS = [SamplingParams(max_tokens=NEW_TOKENS)] * len(PROMPTS)


@cache
def model_of(arch: str) -> Any:
    return build(arch)


@cache
def slightly_off(arch: str) -> Any:
    """The same with some noise: right more often than not."""
    draft = build(arch)
    mx.random.seed(9)

    def shaken(weight: mx.array) -> mx.array:
        if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        return weight + mx.random.normal(weight.shape) * 0.02 * weight.std()

    draft.update(tree_map(shaken, draft.parameters()))
    mx.eval(draft.parameters())
    return draft


@cache
def wanted_of(arch: str) -> list[list[int]]:
    return [greedy(model_of(arch), prompt, NEW_TOKENS) for prompt in PROMPTS]


def left_to_the_kernel(patch: pytest.MonkeyPatch, arch: str) -> list[bool]:
    """Few tokens of gated delta layers go the kernel's way, by its reference.

    Returns:
        Of each call so far, whether it did the one before again.
    """
    calls: list[bool] = []

    def scan(
        form: Any,
        weights: Any,
        inputs: Any,
        past: Any,
        state: Any,
        kept: Any = None,
        lengths: Any = None,
    ) -> gated_delta.Results:
        calls.append(kept is not None)
        found = gated_delta.reference(form, weights, inputs, past, state, kept, lengths)
        if lengths is None:
            return found
        # The kernel writes nothing there.
        joined, window = found.log.joined, form.kernel_size - 1
        own = (
            mx.arange(joined.shape[1]) < mx.where(lengths, lengths + window, 0)[:, None]
        )
        joined = mx.where(own[..., None], joined, float("nan"))
        return found._replace(log=found.log._replace(joined=joined))

    forms = [gated_delta.form_of(layer) for _, layer in model_of(arch).named_modules()]
    patch.setattr(gated_delta, "scan", scan)
    patch.setattr(gated_delta.proven, "verdicts", dict.fromkeys(forms, True))
    return calls


def drafter_of(arch: str, name: str) -> dict[str, Any]:
    """Arguments of ``run_rows``."""
    if name == "model":
        return {"draft": slightly_off(arch)}
    if name == "perfect":
        return {"draft": model_of(arch)}
    texts = [[*p, *w] for p, w in zip(PROMPTS, wanted_of(arch), strict=True)]
    own: Drafter = Guesses(texts) if name == "wrong" else NgramDrafter()
    return {"draft": None, "drafter": own}


#: Prompts around the borders of chunks, of tiles and of what is looped over.
BORDERS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("how", ["chunks", "kernel"])
@pytest.mark.parametrize("step", [7, 64, 512])
@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_next"])
def test_prompts_of_all_lengths(
    arch: str, step: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows that join, and prompts whose beginnings are stored, as mlx-lm alone.

    Padding that counts, a window of another length, or a state of another row.
    """
    calls = left_to_the_kernel(monkeypatch, arch) if how == "kernel" else []
    chunks = mock.Mock(wraps=gated_delta_chunks)
    monkeypatch.setattr(recurrent, "gated_delta_chunks", chunks)
    text = [(3 * j + j * j // 5) % VOCABULARY for j in range(max(BORDERS))]
    prompts = [text[:n] for n in BORDERS] + [text[:70] + [5] * 50]
    wanted = [greedy(model_of(arch), prompt, 4) for prompt in prompts]
    tokens, reused, _ = decode(
        model_of(arch),
        slightly_off(arch),
        prompts,
        memory_store(),
        batch_size=3,
        params=SamplingParams(max_tokens=4),
        prefill_step_size=step,
    )
    assert tokens == wanted
    assert any(reused)
    assert bool(calls) == (how == "kernel")
    assert bool(chunks.call_count) == (how == "chunks" and step > recurrent.LOOPED)


@pytest.mark.parametrize("step", [7, 64])
@pytest.mark.parametrize(
    "arch", [a for a in FAMILIES if a not in ("qwen3_5", "qwen3_next")]
)
def test_families_take_prompts_of_all_lengths(arch: str, step: int) -> None:
    """A scan in parts that forgets a state at a border, or reads another row's."""
    text = [(3 * j + j * j // 5) % VOCABULARY for j in range(max(BORDERS))]
    prompts = [text[:n] for n in BORDERS] + [text[:70] + [5] * 50]
    tokens, _, _ = decode(
        model_of(arch),
        None,
        prompts,
        memory_store(),
        batch_size=4,
        params=SamplingParams(max_tokens=3),
        prefill_step_size=step,
    )
    assert tokens == [greedy(model_of(arch), prompt, 3) for prompt in prompts]


@pytest.mark.parametrize("arch", FAMILIES)
def test_families_draft_for_themselves(arch: str) -> None:
    """A recurrent draft writes token by token, and takes several writes back at once.

    Rows join, and a step of one token computes two.
    """
    model, few = model_of(arch), 8
    got = run_rows(
        model,
        slightly_off(arch),
        SHORT,
        [SamplingParams(max_tokens=few)] * len(SHORT),
        batch_size=2,
        num_draft_tokens=3,
        backend=PADDED,
        prefill_step_size=4,
    )
    assert [row.tokens for row in got] == [greedy(model, p, few) for p in SHORT]
    assert sum(row.accepted for row in got) > few


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize(
    ("name", "backend", "rows", "k", "step"),
    [
        ("perfect", AT_ONCE, 6, 4, 1),
        ("wrong", PADDED, 2, 5, 4),
        ("ngram", AT_ONCE, 1, 3, 16),
        ("none", PADDED, 4, 0, 3),
    ],
)
def test_any_draft_batch_and_chunk(
    arch: str, name: str, backend: BackendDefaults, rows: int, k: int, step: int
) -> None:
    """States of padded chunks, of idle slots, and after rounds of any width."""
    drafts = {"draft": None} if name == "none" else drafter_of(arch, name)
    got = run_rows(
        model_of(arch),
        prompts=PROMPTS,
        params=PARAMS,
        batch_size=rows,
        num_draft_tokens=k,
        backend=backend,
        prefill_step_size=step,
        **drafts,
    )
    assert [row.tokens for row in got] == wanted_of(arch)


@KINDS_AND_KERNEL
def test_rows_that_are_cancelled_leave_no_states(
    arch: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next row in a slot would begin with what another has left there."""
    if kernel:
        left_to_the_kernel(monkeypatch, arch)
    config = EngineConfig(batch_size=2, num_draft_tokens=3, prefill_step_size=6)
    runner = ModelRunner(model_of(arch), "target", config, PADDED)
    drafter: Drafter = drafter_of(arch, "wrong")["drafter"]
    engine = Engine(runner, drafter, config, PADDED, frozenset())
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(i, "", tuple(prompt), PARAMS[0]))
    done: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    while engine.busy:
        for output in engine.step():
            index = output.request.index
            done[index] = output.request.tokens
            if index % 2 == 0 and len(done[index]) > 3 and engine.cancel(index):
                cancelled.add(index)
    assert cancelled
    for index, want in enumerate(wanted_of(arch)):
        if index not in cancelled:
            assert done[index] == want


def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each forward from now on, whether it ran compiled."""
    used: list[bool] = []
    call = CompiledForwards.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = call(self, *args, **kwargs)
        used.append(done is not None)
        return done

    monkeypatch.setattr(CompiledForwards, "__call__", counted)
    return used


@pytest.mark.parametrize("arch", ["qwen3_5", "baichuan_m1"])
def test_compiled_forwards_undo_the_round_before(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that holds the first round's inputs would undo that one ever after."""
    used = compiled_calls(monkeypatch)
    for k in (0, 3):
        got = run_rows(
            model_of(arch),
            prompts=PROMPTS,
            params=PARAMS,
            batch_size=4,
            num_draft_tokens=k,
            backend=BEHIND,
            prefill_step_size=6,
            **(drafter_of(arch, "wrong") if k else {"draft": None}),
        )
        assert [row.tokens for row in got] == wanted_of(arch)
        assert used.count(True) > 5
        used.clear()


# -- the cache itself ----------------------------------------------------------


def states_of(caches: Sequence[Any]) -> list[mx.array]:
    """Of mlx-lm's caches of one sequence."""
    found: list[mx.array] = []
    for each in caches:
        if isinstance(each, CacheList):
            found += states_of(each.caches)
        elif hasattr(each, "lengths"):
            found += each.cache
    return found


def extracted(caches: Sequence[Any], row: int) -> list[mx.array]:
    found: list[mx.array] = []
    for each in caches:
        members = each.caches if isinstance(each, BatchCacheList) else [each]
        for member in members:
            if isinstance(member, BatchRecurrentCache):
                found += member.extract(row).cache
    return found


@KINDS_AND_KERNEL
@pytest.mark.parametrize("seed", [0, 1])
def test_any_history_ends_in_the_states_of_its_tokens(
    arch: str, kernel: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes, trims, rows that come, go and move: each as if it had been alone."""
    if kernel:
        left_to_the_kernel(monkeypatch, arch)
    rng = random.Random(seed)
    model = model_of(arch)
    twin: Any = with_recurrent_rows(model)
    options = CacheOptions(max_write=8)

    def fresh(rows: int) -> list[Any]:
        return make_batch_caches(twin, rows, options)

    def write(caches: list[Any], texts: list[list[int]], width: int) -> None:
        new = [[rng.randrange(VOCABULARY) for _ in range(width)] for _ in texts]
        padded = rng.random() < 0.4
        valid = [rng.randint(0, width) if padded else width for _ in texts]
        for each in caches:
            if padded:
                each.prepare(lengths=valid)
        twin(mx.array(new), cache=caches)
        for each in caches:
            each.finalize()
        dropped = [0 if padded else rng.randint(0, n) for n in valid]
        counts: Any = mx.array(dropped) if rng.random() < 0.5 else dropped
        for each in caches:
            if not padded:
                each.trim_per_sequence(counts, width)
        for text, tokens, n, d in zip(texts, new, valid, dropped, strict=True):
            text += tokens[: n - d]

    texts: list[list[int]] = [[], [], []]
    caches = fresh(3)
    for _ in range(14):
        act = rng.choice(["write", "write", "write", "filter", "place", "extend"])
        if act == "write" or len(texts) > 5:
            write(caches, texts, rng.choice([1, 2, 5]))
        elif act == "filter":
            rows = [rng.randrange(len(texts)) for _ in range(rng.randint(2, 4))]
            for each in caches:
                each.filter(rows)
            texts = [list(texts[i]) for i in rows]
        elif act == "extend":
            others = fresh(1)
            other_texts: list[list[int]] = [[]]
            write(others, other_texts, 3)
            for each, other in zip(caches, others, strict=True):
                each.extend(other)
            texts += other_texts
        else:
            others = fresh(1)
            other_texts = [[]]
            write(others, other_texts, 4)
            row = rng.randrange(len(texts))
            for each, other in zip(caches, others, strict=True):
                each.reset([row])
                each.place([row], other)
            texts[row] = other_texts[0]
    for row, text in enumerate(texts):
        alone = make_prompt_cache(model)
        if not text:
            continue
        for token in text:
            model(mx.array([[token]]), cache=alone)
        for got, want in zip(extracted(caches, row), states_of(alone), strict=True):
            # Left of a text that is shorter than a window there are zeros.
            want = mx.pad(
                want,
                [(0, 0), (got.shape[1] - want.shape[1], 0), *[(0, 0)] * (got.ndim - 2)],
            )
            # States grow to a thousand, and sums are rounded by the batch's shape.
            least = max(1e-4, 1e-6 * float(mx.abs(want).max()))
            assert mx.allclose(got, want, rtol=1e-3, atol=least), (row, text)


def test_state_and_merge_are_whole() -> None:
    """A copy by its state, or of mlx-lm's caches, would go on from other states."""
    twin: Any = with_recurrent_rows(model_of("mamba"))
    caches = make_batch_caches(twin, 2, CacheOptions(max_write=4))
    twin(mx.array([[1, 2, 3], [4, 5, 6]]), cache=caches)
    for each in caches:
        each.trim_per_sequence([1, 0])
    copies = [BatchRecurrentCache.from_state(each.state) for each in caches]
    merged = [
        BatchRecurrentCache.merge([each.extract(0), each.extract(1)]) for each in caches
    ]
    tokens = mx.array([[7], [8]])
    want = twin(tokens, cache=caches)
    for others in (copies, merged):
        assert mx.array_equal(twin(tokens, cache=others), want)
    assert all(c.nbytes >= sum(a.nbytes for a in c.arrays) for c in caches)


@pytest.mark.parametrize("given", [list, mx.array])
def test_a_trim_that_is_refused_or_takes_nothing_changes_nothing(given: Any) -> None:
    """Offsets and states would part: a row would go on with states of other tokens."""
    twin: Any = with_recurrent_rows(model_of("mamba"))
    (first, *_) = caches = make_batch_caches(twin, 2, CacheOptions(max_write=4))
    twin(mx.array([[1, 2, 3], [4, 5, 6]]), cache=caches)
    twin(mx.array([[1, 2], [4, 5]]), cache=caches)
    with pytest.raises(CacheError, match="3 tokens cannot be taken back: 2 were"):
        first.trim_per_sequence(given([3, 0]))
    first.trim_per_sequence(given([1, 0]))
    first.trim_per_sequence(given([1, 0]))
    with pytest.raises(CacheError, match="1 tokens cannot be taken back: 2 were"):
        first.trim_per_sequence(given([1, 0]))
    assert first.offset.tolist() == [3, 5]
    first.checkpoint()
    with pytest.raises(CacheError, match="1 tokens cannot be taken back: 0 were"):
        first.trim_per_sequence(given([0, 1]))
    first.filter([0, 1])
    states = [mx.array(a) for a in first.arrays]
    first.trim_per_sequence(given([0, 0]))
    assert all(map(mx.array_equal, first.arrays, states))


def test_windows_do_not_keep_the_chunk_that_they_are_of() -> None:
    """Views of it would: gigabytes, for long prompts, that no plan counts."""
    twin: Any = with_recurrent_rows(model_of("mamba2"))
    before = mx.get_active_memory()
    caches = make_batch_caches(twin, 2, CacheOptions(max_write=512))
    for each in caches:
        each.prepare(lengths=[512, 512])
    twin(mx.ones((2, 512), mx.int32), cache=caches)
    for each in caches:
        each.finalize()
    mx.eval([each.state for each in caches])
    assert mx.get_active_memory() - before < 2 * sum(c.nbytes for c in caches)


def test_a_model_is_not_changed() -> None:
    """Others who use it would find their layers asking for batch caches."""
    model = model_of("qwen3_5")
    kinds = [type(m) for _, m in model.named_modules()]
    twin: Any = with_recurrent_rows(model)
    assert [type(m) for _, m in model.named_modules()] == kinds
    own, shared = model.parameters(), twin.parameters()
    same = tree_map(lambda a, b: a is b, own, shared)
    flat: Any = tree_flatten(same)
    assert all(value for _, value in flat)


class _Store(nn.Module):
    """Helps a layer: writes a state."""

    def __call__(self, states: Any, place: int, value: mx.array) -> None:
        states[place] = value


class _Stored:
    """A cache whose states are written by a helper."""

    def __init__(self, cache: Any, store: _Store):
        self._cache, self._store = cache, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __getitem__(self, place: int) -> Any:
        return self._cache[place]

    def __setitem__(self, place: int, value: mx.array) -> None:
        self._store(self._cache, place, value)


def test_what_helps_a_layer_is_no_layer() -> None:
    """A module that a layer has write its states takes no part of a batch."""
    model, kinds = build("lfm2"), set[Any]()
    for layer in model.layers:
        if "conv" in layer:
            own: Any = type(layer.conv)

            class Helped(own):  # type: ignore[misc]
                def __call__(
                    self, x: mx.array, mask: Any = None, cache: Any = None
                ) -> Any:
                    if cache is not None:
                        cache = _Stored(cache, self.store)
                    return super().__call__(x, mask, cache)

            layer["conv"] = as_kind(layer.conv, Helped)
            layer.conv["store"] = _Store()  # type: ignore[no-untyped-call]
            kinds.add(Helped)
    twin: Any = with_recurrent_rows(model)
    layers = [m for _, m in twin.named_modules() if "_recurrent_states" in vars(m)]
    assert {type(layer).__mro__[1] for layer in layers} == kinds
    exact(
        model, None, SHORT, NEW_TOKENS,
        batch_size=2, num_draft_tokens=2, backend=AT_ONCE, drafter=NgramDrafter(),
    )  # fmt: skip


def test_weights_that_are_replaced_reach_the_rows() -> None:
    """Merged adapters would be half in use: the twin has modules of its own."""
    model, other = build("qwen3_5"), slightly_off("qwen3_5")
    config = EngineConfig(batch_size=2, num_draft_tokens=0)
    runner = ModelRunner(model, "target", config, AT_ONCE)
    model.update(other.parameters())
    rows = runner.rows([[], []], max_round=1, max_length=8)
    tokens = mx.array([[3], [7]])
    want = mx.concatenate([other(tokens[:1]), other(tokens[1:])])
    assert mx.allclose(rows.forward(tokens), want, atol=1e-4)


# -- gated delta layers by one kernel --------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_next"])
@BACKENDS
def test_a_kernel_takes_the_rollback_in(
    arch: str, backend: BackendDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows keep other tokens than are done again, or begin with another's state."""
    calls = left_to_the_kernel(monkeypatch, arch)
    for drafts in ("wrong", "model"):
        got = drafted(arch, drafts, backend)
        assert [row.tokens for row in got] == wanted_of(arch)
    assert calls.count(True) > calls.count(False) / 2


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("given", [list, mx.array])
def test_several_writes_by_a_kernel_are_taken_back_at_once(
    arch: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a draft does. A write of which nothing is kept began after others' tokens."""
    left_to_the_kernel(monkeypatch, arch)
    twin: Any = with_recurrent_rows(model_of(arch))
    caches = make_batch_caches(twin, 4, CacheOptions(max_write=8))
    texts = [[(7 * i + 3 * j + i * j) % VOCABULARY for j in range(9)] for i in range(4)]
    tokens = mx.array(texts)
    twin(tokens[:, :4], cache=caches)
    for each in caches:
        each.checkpoint()
    for part in (slice(4, 6), slice(6, 7), slice(7, 8)):
        twin(tokens[:, part], cache=caches)
    back = [0, 1, 3, 4]
    for each in caches:
        each.trim_per_sequence(given(back))
    got = twin(tokens[:, 8:], cache=caches)
    for row, count in enumerate(back):
        kept = mx.array([[*texts[row][: 8 - count], texts[row][8]]])
        assert mx.allclose(got[row, -1], model_of(arch)(kept)[0, -1], atol=1e-4)


def drafted(arch: str, drafts: str, backend: BackendDefaults) -> Any:
    return run_rows(
        model_of(arch),
        prompts=PROMPTS,
        params=PARAMS,
        batch_size=3,
        num_draft_tokens=3,
        backend=backend,
        prefill_step_size=20,
        **drafter_of(arch, drafts),
    )
