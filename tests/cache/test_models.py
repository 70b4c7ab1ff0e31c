"""Greedy decoding through the batch caches, far past the window.

A round writes the last kept token and some guesses, keeps those that the model
agrees with, and takes the others back, row by row. Every row must get the tokens
that plain decoding of its prompt alone gets, with mlx-lm's own caches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from specdec.cache import CacheOptions, check_caches, make_batch_caches, maybe_quantize

from .small_models import MODELS, WINDOW, ChunkedModel

TinyModel = Callable[..., nn.Module]

PROMPTS = [[(7 * i + 3 * j + i * j) % 97 for j in range(n)]
           for i, n in enumerate([3, 30, 1, 17, 8, 9, 22, 5])]  # fmt: skip
NEW_TOKENS = 5 * WINDOW


def plain(model: Any, prompt: list[int]) -> list[int]:
    """mlx-lm's decoding of one sequence."""
    cache, inputs, tokens = make_prompt_cache(model), list(prompt), []
    for _ in range(NEW_TOKENS):
        logits = model(mx.array([inputs]), cache=cache)
        inputs = [int(logits[0, -1].argmax())]
        tokens += inputs
    return tokens


def plain_without_cache(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(mx.array([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def decode(
    model: Any,
    wanted: list[list[int]],
    width: int,
    *,
    options: CacheOptions | None = None,
    chunk: int = 6,
    seed: int = 0,
) -> list[list[int]]:
    """Rounds of ``width`` tokens per row; guesses are right half of the time."""
    rng = random.Random(seed)
    prompts = PROMPTS[: len(wanted)]
    options = options or CacheOptions(max_write=max(chunk, width), read_bucket=16)
    caches = make_batch_caches(model, len(prompts), options)
    # All but the last token of the prompts, in chunks padded on the right.
    lengths = [len(p) - 1 for p in prompts]
    for start in range(0, max(lengths, default=0), chunk):
        valid = [min(max(n - start, 0), chunk) for n in lengths]
        tokens = [
            p[start : start + n] + [0] * (chunk - n)
            for p, n in zip(prompts, valid, strict=True)
        ]
        model(mx.array(tokens), cache=caches)
        for cache in caches:
            cache.trim_per_sequence([chunk - n for n in valid])
        maybe_quantize(caches, options)
    for cache in caches:
        cache.resize(width)
    got: list[list[int]] = [[] for _ in prompts]
    while min(map(len, got)) < NEW_TOKENS:
        tokens = []
        for row, (prompt, tokens_so_far) in enumerate(zip(prompts, got, strict=True)):
            ahead = wanted[row][len(tokens_so_far) :][: width - 1]
            guesses = [t if rng.random() < 0.7 else rng.randrange(97) for t in ahead]
            guesses += [0] * (width - 1 - len(guesses))
            tokens.append([(prompt + tokens_so_far)[-1], *guesses])
        chosen: Any = model(mx.array(tokens), cache=caches).argmax(axis=-1).tolist()
        rejected = []
        for row, (line, answers) in enumerate(zip(tokens, chosen, strict=True)):
            kept = 0
            while kept < width - 1 and line[kept + 1] == answers[kept]:
                kept += 1
            got[row] = got[row] + answers[: kept + 1]
            rejected.append(width - 1 - kept)
        n = mx.array(rejected)
        for cache in caches:
            cache.trim_per_sequence(n, at_most=width - 1)
        maybe_quantize(caches, options)
    return [tokens[:NEW_TOKENS] for tokens in got]


def quantizable(model: nn.Module) -> nn.Module:
    mx.random.seed(3)

    def draw(w: mx.array) -> mx.array:
        return w if w.ndim == 1 else mx.random.normal(w.shape) * 2 * w.shape[-1] ** -0.5

    model.update(tree_map(draw, model.parameters()))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_plain_decoding(name: str, tiny_model: TinyModel) -> None:
    arch, arguments = MODELS[name]
    model = tiny_model(arch, **arguments)
    check_caches(model, name)
    wanted = [plain(model, prompt) for prompt in PROMPTS]
    for rows in (1, 3, 8):
        for width in (2, 5, 8):
            assert decode(model, wanted[:rows], width) == wanted[:rows]


def test_greedy_in_chunked_attention() -> None:
    model = quantizable(ChunkedModel())
    check_caches(model, "chunked")
    wanted = [plain_without_cache(model, prompt) for prompt in PROMPTS]
    for rows in (1, 3, 8):
        for width in (2, 5, 8):
            assert decode(model, wanted[:rows], width) == wanted[:rows]


@pytest.mark.parametrize("name", ["full", "sliding"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_rows_do_not_depend_on_guesses(
    name: str, bits: int, tiny_model: TinyModel
) -> None:
    """Quantized from the start: the same tokens, whatever is guessed."""
    arch, arguments = MODELS[name]
    model = tiny_model(arch, **{**arguments, "hidden_size": 128, "head_dim": 32})
    options = CacheOptions(max_write=8, kv_bits=bits, kv_group_size=32)
    check_caches(model, name, options)
    wanted = decode(model, [[0] * NEW_TOKENS] * 3, 2, options=options)
    assert decode(model, wanted, 2, options=options) == wanted
    assert decode(model, wanted, 8, options=options) == wanted


@pytest.mark.parametrize("name", ["full", "sliding", "gemma3"])
def test_max_kv_size(name: str, tiny_model: TinyModel) -> None:
    """Full layers keep 4 tokens and the newest, as mlx-lm's rings do."""
    arch, arguments = MODELS[name]
    model: Any = tiny_model(arch, **arguments)

    def bounded(prompt: list[int]) -> list[int]:
        cache = [
            RotatingKVCache(16, keep=4) if type(c) is KVCache else c
            for c in make_prompt_cache(model)
        ]
        tokens = list(prompt)
        for i in range(len(prompt) + NEW_TOKENS - 1):
            logits = model(mx.array([tokens[i : i + 1]]), cache=cache)
            if i >= len(prompt) - 1:
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    options = CacheOptions(max_write=8, max_kv_size=16)
    check_caches(model, name, options)
    wanted = [bounded(prompt) for prompt in PROMPTS[:3]]
    assert decode(model, wanted, 5, options=options) == wanted
    caches = make_batch_caches(model, 3, options)
    assert all(c.layout.num_slots <= 16 + 7 for c in caches)
