"""The engine with a prefix store: the same tokens as without one, sooner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import EngineConfig, SamplingParams
from specdec.backend import BackendDefaults
from specdec.engine.engine import Engine
from specdec.models.runner import ModelRunner
from specdec.request import Request
from tests.cache.small_models import MODELS
from tests.models import architectures
from tests.plain import AT_ONCE, BEHIND, greedy

from .harness import (
    NEW_TOKENS,
    STEP,
    Prompt,
    TinyModel,
    decode,
    memory_store,
)

STEM = [(7 * i + i * i) % 97 for i in range(60)]


def other(n: int, seed: int) -> Prompt:
    return [(11 * i + 5 * seed + 3) % 97 for i in range(n)]


#: One list after the other with the same store; each list decodes at once.
CALLS: list[list[Prompt]] = [
    [STEM[:30]],
    [STEM[:30]],  # exactly the same
    [STEM[:19]],  # what is stored is longer
    [STEM[:44]],  # and shorter
    [STEM[:26] + other(9, 1)],  # and partly the same
    # several rows at once, which share with different ones to different lengths
    [STEM[:30], STEM[:30], STEM[:26] + other(30, 2), other(21, 3), STEM[:2], [5]],
    [STEM[:26] + other(12, 4), STEM[:60], other(21, 3) + STEM[:20], STEM[:3]],
]
#: Tokens reused, prompt by prompt. The last one of a prompt is always computed.
LINEAR = [[0], [29], [18], [29], [26], [29, 29, 26, 0, 1, 0], [26, 43, 20, 2]]
#: A ring serves its end and a few ends before it: not 18 of 29 (the window is 8).
RINGS = [[0], [29], [0], [29], [26], [29, 29, 26, 0, 0, 0], [26, 43, 20, 1]]
WITHOUT_RINGS = ("full", "latent", "list")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_decoding(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Every kind of layer, from disk; some from memory, too."""
    arch, arguments = MODELS[name]
    target, draft = tiny_model(arch, **arguments), tiny_model("llama", seed=1)
    wanted = [[greedy(target, p, NEW_TOKENS) for p in prompts] for prompts in CALLS]
    on_disk = {"memory": 0, "folder": tmp_path, "disk": 1 << 30}
    cases: list[tuple[BackendDefaults, dict[str, Any]]] = [(BEHIND, on_disk)]
    if name in ("full", "gemma3", "list", "shared-kv"):
        cases.append((AT_ONCE, {}))
    for backend, where in cases:
        store = memory_store(**where)
        reused, reused_by_draft = [], []
        for prompts, tokens in zip(CALLS, wanted, strict=True):
            got = decode(target, draft, prompts, store, backend=backend)
            assert got[0] == tokens
            reused.append(got[1])
            reused_by_draft.append(got[2])
        assert reused == (LINEAR if name in WITHOUT_RINGS else RINGS)
        assert reused_by_draft == LINEAR
        store.close()


def test_salts_keep_prompts_apart(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A request finds another's prefix: of target or draft, in memory or on disk."""
    arch, arguments = MODELS["sliding"]
    target, draft = tiny_model(arch, **arguments), tiny_model("llama", seed=1)
    prompt, longer = STEM[:30], STEM[:26] + other(9, 1)
    calls: list[tuple[list[Prompt], list[str | None], list[int]]] = [
        ([prompt], ["a"], [0]),
        ([prompt, prompt, prompt], ["b", None, "a"], [0, 0, 29]),
        ([prompt, longer], ["c", "d"], [0, 0]),
        ([longer, longer], ["a", "e"], [26, 0]),
        ([prompt, prompt, prompt], ["b", "c", None], [29, 29, 29]),
    ]
    wanted = {len(p): greedy(target, p, NEW_TOKENS) for p in (prompt, longer)}
    on_disk: dict[str, Any] = {"memory": 0, "folder": tmp_path, "disk": 1 << 30}
    for where in ({}, on_disk):
        store = memory_store(**where)
        for prompts, salts, reused in calls:
            got = decode(target, draft, prompts, store, salts=salts)
            assert got[0] == [wanted[len(p)] for p in prompts]
            assert got[1:] == (reused, reused)
        store.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", {"kv_bits": 4, "kv_group_size": 32}),
        ("sliding", {"kv_bits": 8, "kv_group_size": 32}),
        ("full", {"max_kv_size": 16}),
        ("sliding", {"max_kv_size": 16, "kv_bits": 8, "kv_group_size": 32}),
    ],
    ids=["4-bit", "8-bit", "bounded", "bounded-8-bit"],
)
def test_quantized_and_bounded_caches(
    name: str, options: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The same tokens as without a store, which plain decoding does not give."""
    arch, arguments = MODELS[name]
    target = tiny_model(arch, **{**arguments, "hidden_size": 128, "head_dim": 32})
    store = memory_store(memory=0, folder=tmp_path, disk=1 << 30)
    reused = []
    for prompts in CALLS:
        got = decode(target, None, prompts, store, **options)
        assert got[0] == decode(target, None, prompts, None, **options)[0]
        reused.append(got[1])
    if name == "full" and "max_kv_size" not in options:
        assert reused == LINEAR
    else:
        assert reused[1:4:2] == [[29], [29]]
        assert reused[6][1:3] == [43, 20]


def test_sampled_rows_and_rows_that_join(tiny_model: TinyModel) -> None:
    """Prompts wait for places, so rows begin with prefixes while others decode."""
    arch, arguments = MODELS["sliding"]
    target, draft = tiny_model(arch, **arguments), tiny_model("llama", seed=1)
    prompts = [prompt for prompts in CALLS for prompt in prompts]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=3)
    wanted, _, _ = decode(target, draft, prompts, None, params=params)
    store = memory_store()
    for batch_size in (1, 3):
        got = decode(
            target, draft, prompts, store, batch_size=batch_size, params=params
        )
        assert got[0] == wanted
        assert sum(got[1]) > 200


def test_another_model_or_cache_finds_nothing(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Other weights, other arguments, other bits: each has prefixes of its own."""
    wide = {"head_dim": 64}
    target = tiny_model("llama", **wide)
    folder: dict[str, Any] = {"folder": tmp_path, "disk": 1 << 30}
    store = memory_store(**folder)
    decode(target, None, [STEM[:30]], store)
    touched = tiny_model("llama", **wide)
    weight = touched.layers[-1].mlp.down_proj.weight
    weight[0, :2] = weight[0, 1::-1]  # two values have changed places
    others: list[tuple[Any, dict[str, Any]]] = [
        (tiny_model("llama", seed=1, **wide), {}),
        (tiny_model("llama", rope_theta=9999.0, **wide), {}),
        (touched, {}),
        (target, {"kv_bits": 8}),
        (target, {"kv_bits": 8, "kv_group_size": 32}),
        (target, {"kv_bits": 4}),
        (target, {"max_kv_size": 64}),
        (target, {"max_kv_size": 65}),
    ]
    for model, options in others:
        got = decode(model, None, [STEM[:30]], store, **options)
        assert got[1] == [0], options
    assert decode(target, None, [STEM[:30]], store)[1] == [29]
    store.close()
    again = memory_store(**folder)
    assert decode(target, None, [STEM[:30]], again)[1] == [29]


def test_replaced_weights_are_those_of_another_model(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Catches keys of new weights that go by the name of the old ones."""
    folder: dict[str, Any] = {"memory": 0, "folder": tmp_path, "disk": 1 << 30}
    prompt = [STEM[:40]]
    old, new = tiny_model(), tiny_model(seed=3)
    store = memory_store(**folder)
    config = EngineConfig(batch_size=1, num_draft_tokens=0, prefill_step_size=6)
    runner = ModelRunner(old, "target", config, AT_ONCE, store)

    def run() -> tuple[list[int], int]:
        engine = Engine(runner, None, config, AT_ONCE, frozenset())
        params = SamplingParams(max_tokens=NEW_TOKENS)
        engine.add(Request(0, "", tuple(prompt[0]), params))
        tokens: list[int] = []
        while engine.busy:
            for output in engine.step():
                tokens += output.token_ids
        store.flush()
        return tokens, engine.stats.prefix_tokens

    first = old.parameters()
    wanted, others = (greedy(m, prompt[0], NEW_TOKENS) for m in (old, new))
    assert wanted != others
    assert [run(), run()] == [(wanted, 0), (wanted, 39)]
    old.update(new.parameters())
    assert [run(), run()] == [(others, 0), (others, 39)]
    old.update(first)
    assert run() == (wanted, 39)
    store.close()
    # Another process, with either of them.
    for model, tokens in ((tiny_model(), wanted), (new, others)):
        got = decode(model, None, prompt, memory_store(**folder))
        assert got[:2] == ([tokens], [39])


def test_weights_replaced_during_a_prefill(tiny_model: TinyModel) -> None:
    """What a row holds then is of two models: nothing more of it is stored."""
    target, new = tiny_model(), tiny_model(seed=3)
    store = memory_store()
    config = EngineConfig(batch_size=1, num_draft_tokens=0, prefill_step_size=STEP)
    runner = ModelRunner(target, "target", config, AT_ONCE, store)
    first = target.parameters()
    rows = runner.rows([STEM[:40]], max_round=1, max_length=60)
    for chunk, _ in enumerate(rows.prefill()):
        if chunk == 2:  # two blocks are stored
            target.update(new.parameters())
    for weights, wanted, reused in (
        (first, tiny_model(), [16]),
        (new.parameters(), new, [0]),
    ):
        target.update(weights)
        got = decode(target, None, [STEM[:40]], store)
        assert got[:2] == ([greedy(wanted, STEM[:40], NEW_TOKENS)], reused)


LINEAR_BLOCK = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
NO_BLOCK = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}
BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}


@pytest.mark.parametrize(
    ("blocks", "backend"),
    [
        ([BLOCK, LINEAR_BLOCK, BLOCK], BEHIND),
        ([LINEAR_BLOCK, BLOCK], AT_ONCE),
        ([NO_BLOCK, BLOCK, NO_BLOCK], BEHIND),
    ],
    ids=["in-between", "first", "nothing"],
)
def test_layers_without_keys(
    blocks: list[Any], backend: BackendDefaults, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The mask may be asked of a cache that is never written; nothing of it is stored.

    Catches rows of different lengths that are masked as if they had no token yet.
    """
    target = tiny_model(
        "nemotron-nas", block_configs=blocks, num_hidden_layers=len(blocks)
    )
    draft = tiny_model(seed=1)
    store = memory_store(memory=0, folder=tmp_path, disk=1 << 30)
    for prompts, expected in zip(CALLS, LINEAR, strict=True):
        wanted = [greedy(target, p, NEW_TOKENS) for p in prompts]
        assert decode(target, draft, prompts, None, backend=backend)[0] == wanted
        got = decode(target, draft, prompts, store, backend=backend)
        assert got[:2] == (wanted, expected)
    store.close()


@pytest.mark.parametrize("arch", ["qwen3_5", "mamba", "baichuan_m1"])
def test_states_are_reused_at_the_ends_of_chunks(arch: str, tmp_path: Path) -> None:
    """States of other tokens, or of a chunk's padding, would give other tokens.

    What is shared is reused up to the newest end of a chunk within it; and chunks end
    where a prompt parts from what is stored.
    """
    target = architectures.build(arch)
    stem = [n % architectures.VOCABULARY for n in STEM]
    calls = [
        [stem[:30]],
        [stem[:30]],  # exactly the same
        [stem[:19]],  # shorter: up to a chunk's end
        [stem[:44], [*stem[:26], 5, 6, 7], [1, 2], [9]],
        [[*stem[:44], 3, 4], [*stem[:26], 8, 9]],  # parts where another has parted
    ]
    wanted = [[greedy(target, p, NEW_TOKENS) for p in prompts] for prompts in calls]
    reused = [[0], [29], [18], [29, 24, 0, 0], [43, 26]]
    on_disk = {"memory": 0, "folder": tmp_path, "disk": 1 << 30}
    cases: list[tuple[BackendDefaults, dict[str, Any]]] = [(AT_ONCE, {})]
    padded = replace(BEHIND, compile_after=None)
    cases.append((padded, on_disk))
    for backend, where in cases:
        store = memory_store(**where)
        for prompts, tokens, n in zip(calls, wanted, reused, strict=True):
            got = decode(target, target, prompts, store, backend=backend)
            assert got[0] == tokens
            # Chunks are as wide as what attention reads, where shapes repeat.
            assert got[1] == n or backend is padded
        store.close()
