"""The engine over every kind of layer, far past the window: plain greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from specdec.backend import BackendDefaults
from specdec.sampling_params import SamplingParams
from tests.plain import AT_ONCE, BACKENDS, BEHIND, drafts_of, exact, greedy, run_rows

from .small_models import (
    AFM7,
    MODELS,
    PLAMO3,
    WINDOW,
    ChunkedModel,
)

TinyModel = Callable[..., nn.Module]

PROMPTS = [[(5 * i + 3 * j + i * j) % 97 for j in range(n)]
           for i, n in enumerate([3, 30, 2, 17, 8, 9, 22, 5])]  # fmt: skip
NEW_TOKENS = 3 * WINDOW


def slightly_off(target: Any, arch: str, arguments: Any, tiny: TinyModel) -> Any:
    """The target's own weights but in the last layer: some guesses are right."""
    draft: Any = tiny(arch, seed=1, **arguments)
    other: Any = tiny(arch, seed=1, **arguments)
    draft.update(target.parameters())
    if "mlp" in draft.layers[-1]:
        draft.layers[-1].update({"mlp": other.layers[-1]["mlp"]})
    return draft


# Both ways of shaping and reading rounds, with few rows and many, few drafts and many.
HALVES = [pytest.param(AT_ONCE, [(1, 4), (8, 1)], id="at-once"),
          pytest.param(BEHIND, [(3, 7)], id="behind")]  # fmt: skip


# tests/models/test_architectures.py has exact shapes of the others.
KINDS = [*((name, *HALVES[0].values) for name in ("full", "sliding")),
         *((name, *HALVES[1].values) for name in MODELS)]  # fmt: skip


@pytest.mark.parametrize(("name", "backend", "cells"), KINDS)
def test_greedy_equals_plain_decoding(
    name: str,
    backend: BackendDefaults,
    cells: list[tuple[int, int]],
    tiny_model: TinyModel,
) -> None:
    arch, arguments = MODELS[name]
    target = tiny_model(arch, **arguments)
    draft = slightly_off(target, arch, arguments, tiny_model)
    for rows, k in cells:
        got = exact(
            target, draft, PROMPTS[:rows], NEW_TOKENS, batch_size=rows,
            num_draft_tokens=k, backend=backend, prefill_step_size=6,
        )  # fmt: skip
        assert drafts_of(got)[1] > 0


@BACKENDS
def test_layers_without_keys_see_their_rows_positions(
    backend: BackendDefaults, tiny_model: TinyModel
) -> None:
    """Afm7's turn their queries by the columns read: those of the longest row."""
    target: Any = tiny_model("afm7", **AFM7)
    draft: Any = tiny_model("afm7", **AFM7)
    other: Any = tiny_model("afm7", seed=1, **AFM7)
    draft.model.layers[0].update({"mlp": other.model.layers[0]["mlp"]})
    for k in (0, 3):
        got = exact(
            target, draft if k else None, PROMPTS, NEW_TOKENS,
            batch_size=8, num_draft_tokens=k, backend=backend, prefill_step_size=6,
        )  # fmt: skip
        assert (drafts_of(got)[1] > 0) is (k > 0)


@BACKENDS
def test_a_prompt_sees_the_window_that_decoding_sees(
    backend: BackendDefaults, tiny_model: TinyModel
) -> None:
    """Plamo3's mask asks for one token more than its cache keeps.

    In mlx-lm a token written with others sees one more than a token written alone, so
    that its output depends on the size of a chunk. Here every query sees as many as one
    that decodes: what mlx-lm gives for a prompt written token by token.
    """
    target: Any = tiny_model("plamo3", **PLAMO3)
    draft: Any = tiny_model("plamo3", **PLAMO3)
    other: Any = tiny_model("plamo3", seed=1, **PLAMO3)
    draft.model.layers.layers[-1].update({"mlp": other.model.layers.layers[-1].mlp})

    def by_token(prompt: list[int]) -> list[int]:
        steps = generate_step(
            mx.array(prompt), target, max_tokens=NEW_TOKENS, prefill_step_size=1
        )
        return [int(token) for token, _ in steps]

    wanted = [by_token(prompt) for prompt in PROMPTS]
    at_once = [greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    longer = [i for i, prompt in enumerate(PROMPTS) if len(prompt) > WINDOW + 1]
    assert any(wanted[i] != at_once[i] for i in longer)
    params = [SamplingParams(max_tokens=NEW_TOKENS)] * len(PROMPTS)
    for chunk in (6, 64):
        got = run_rows(
            target, draft, PROMPTS, params, batch_size=8, num_draft_tokens=3,
            backend=backend, prefill_step_size=chunk,
        )  # fmt: skip
        assert [row.tokens for row in got] == wanted
        assert sum(row.accepted for row in got) > 0


@pytest.mark.parametrize(("backend", "cells"), HALVES)
def test_greedy_in_attention_chunks(
    backend: BackendDefaults, cells: list[tuple[int, int]]
) -> None:
    """A model of llama4's kind; its reference attends by a mask of its own."""
    mx.random.seed(3)
    target, draft = ChunkedModel(), ChunkedModel()
    draft.update(target.parameters())  # type: ignore[no-untyped-call]
    other = ChunkedModel()
    draft.layers[-1].update({"mlp": other.layers[-1]["mlp"]})
    wanted = [without_cache(target, prompt) for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=NEW_TOKENS)] * len(PROMPTS)
    for rows, k in cells:
        got = run_rows(
            target, draft, PROMPTS[:rows], params[:rows], batch_size=rows,
            num_draft_tokens=k, backend=backend, prefill_step_size=6,
        )  # fmt: skip
        assert [row.tokens for row in got] == wanted[:rows]
        assert sum(row.accepted for row in got) > 0


def without_cache(model: ChunkedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {"kv_bits": 4, "kv_group_size": 32}),
        ("sliding", {"kv_bits": 8, "kv_group_size": 32}),
        ("full", {"max_kv_size": 16}),
        ("gemma3", {"max_kv_size": 16, "kv_bits": 8, "kv_group_size": 32}),
    ],
    ids=["4-bit", "8-bit", "bounded", "bounded-8-bit"],
)
def test_options_do_not_depend_on_the_draft(
    name: str, options: dict[str, Any], tiny_model: TinyModel
) -> None:
    """One row at a time without a draft, or all with one: the same tokens."""
    arch, arguments = MODELS[name]
    arguments = {**arguments, "hidden_size": 128, "head_dim": 32}
    target = tiny_model(arch, **arguments)
    draft = slightly_off(target, arch, arguments, tiny_model)
    params = [SamplingParams(max_tokens=NEW_TOKENS - i) for i in range(5)]
    alone = run_rows(
        target, None, PROMPTS[:5], params, batch_size=1, num_draft_tokens=0,
        prefill_step_size=6, **options,
    )  # fmt: skip
    rows = run_rows(
        target, draft, PROMPTS[:5], params, batch_size=3, num_draft_tokens=4,
        prefill_step_size=6, **options,
    )  # fmt: skip
    assert [r.tokens for r in rows] == [r.tokens for r in alone]


@pytest.mark.parametrize("start", [1, 12, 25, 1000])
def test_rows_that_join_across_a_later_start(start: int, tiny_model: TinyModel) -> None:
    """Dense rows meet quantized ones, either way around."""
    arch, arguments = MODELS["sliding"]
    target = tiny_model(arch, **{**arguments, "hidden_size": 128, "head_dim": 32})
    prompts = [PROMPTS[i] for i in (0, 2, 1, 7, 4, 3)]  # 3, 2, 30, 5, 8, 17 tokens
    params = [SamplingParams(max_tokens=n) for n in (2, 40, 30, 3, 9, 20)]
    rows = run_rows(
        target, target, prompts, params, batch_size=2, num_draft_tokens=2,
        prefill_step_size=64, kv_bits=8, kv_group_size=32, quantized_kv_start=start,
    )  # fmt: skip
    if start == 1000:  # never reached
        assert [r.tokens for r in rows] == [
            greedy(target, prompt, p.max_tokens)
            for prompt, p in zip(prompts, params, strict=True)
        ]
    else:
        # Which tokens a row had when the batch was quantized depends on the rounds;
        # 8 bits move the logits of so small a model by little.
        exact = sum(
            r.tokens == greedy(target, prompt, p.max_tokens)
            for r, prompt, p in zip(rows, prompts, params, strict=True)
        )
        assert exact >= 3


@pytest.mark.parametrize(
    ("name", "size"),
    [("full", 5), ("full", 16), ("gemma3", 5), ("gemma3", 16), ("smollm3", 16)],
)
def test_max_kv_size_is_that_of_a_prompt_written_by_token(
    name: str, size: int, tiny_model: TinyModel
) -> None:
    """The 4 first tokens are seen by every query, however wide a prompt's chunks are.

    Mlx-lm's ring hides them from tokens that are written together; and in a layer with
    a window of its own (smollm3's), where mlx-lm has such a ring too, it loses count
    of its slots. Here that layer sees its window.
    """
    sliding = {"sliding_window": WINDOW, "tie_word_embeddings": False,
               "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    arch, arguments = {**MODELS, "smollm3": ("smollm3", sliding)}[name]
    target: Any = tiny_model(arch, **arguments)
    draft = slightly_off(target, arch, arguments, tiny_model)
    own = [getattr(layer, "use_sliding", False) for layer in target.layers]

    def by_token(prompt: list[int]) -> list[int]:
        caches = [
            RotatingKVCache(size, keep=4) if type(c) is KVCache and not windowed else c
            for c, windowed in zip(make_prompt_cache(target), own, strict=True)
        ]
        steps = generate_step(
            mx.array(prompt), target, max_tokens=NEW_TOKENS, prefill_step_size=1,
            prompt_cache=caches,
        )  # fmt: skip
        return [int(token) for token, _ in steps]

    prompts = PROMPTS[:5]
    wanted = [by_token(prompt) for prompt in prompts]
    params = [SamplingParams(max_tokens=NEW_TOKENS)] * len(prompts)
    for chunk in (7, 64):
        got = run_rows(
            target, draft, prompts, params, batch_size=3, num_draft_tokens=3,
            prefill_step_size=chunk, max_kv_size=size,
        )  # fmt: skip
        assert [row.tokens for row in got] == wanted
