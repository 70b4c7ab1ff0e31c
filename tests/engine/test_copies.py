"""Rounds copy no cache: bytes are counted on the CPU, which copies where a GPU does.

MLX copies an array that a command in flight still reads, instead of writing into it. On
the CPU it is at most some 50 operations ahead, so these models have few.

The kernel that writes in place on CUDA has a stand-in here, which writes at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from specdec import backend
from specdec.cache.core import FEW_TOKENS
from specdec.cache.storage import Storage
from specdec.config import EngineConfig
from specdec.cuda import cache_write
from specdec.cuda.attention_patch import usual_calls
from specdec.decoder import SpecDecoder
from specdec.models.precision import cast
from specdec.sampling_params import SamplingParams
from specdec.tools.decoding import token_level
from tests.cache.test_in_place import write_at_once
from tests.cuda.test_cache_write import attending

HEADS, SIZE, VOCAB, ROWS, LENGTH = 4, 64, 32, 8, 1000
LAYER = 2 * ROWS * LENGTH * HEADS * SIZE * mx.float32.size


class Layer(nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        rows, tokens, _ = x.shape
        q = x.reshape(rows, tokens, HEADS, SIZE).transpose(0, 2, 1, 3)
        keys, values = cache.update_and_fetch(q, q)
        y: mx.array = scaled_dot_product_attention(q, keys, values, cache, 0.1, mask)
        return y.transpose(0, 2, 1, 3).reshape(x.shape)


class Model(nn.Module):
    """Attention, and nothing else."""

    def __init__(self, num_layers: int):
        nn.Module.__init__(self)
        self.embed = nn.Embedding(VOCAB, HEADS * SIZE)
        self.layers = [Layer() for _ in range(num_layers)]

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        x = self.embed(tokens)
        mask = create_attention_mask(x, cache[0], return_array=True)
        for layer, each in zip(self.layers, cache, strict=True):
            x = layer(x, mask, each)
        logits: mx.array = self.embed.as_linear(x)
        return logits


def held(
    layers: int,
    k: int = 0,
    change: Callable[[nn.Module], object] = mx.eval,
    **options: Any,
) -> float:
    """The most bytes that six rounds hold, by those of a layer's keys and values.

    Args:
        k: with it, a draft of two layers proposes.
        change: changes both models.
        options: of the engine.
    """
    model, draft = Model(layers), Model(2)
    for each in (model, draft):
        change(each)
        mx.eval(each)
    gc.collect()  # what other tests have left is not freed during the rounds
    before, reset = mx.get_active_memory(), False
    config = EngineConfig(
        batch_size=ROWS, prefill_step_size=512, num_draft_tokens=k, **options
    )
    decoder = SpecDecoder(
        token_level(model), token_level(draft) if k else None, config=config
    )
    prompts = [[i % VOCAB for i in range(LENGTH + row)] for row in range(ROWS)]
    params = SamplingParams(max_tokens=60)
    for _ in decoder.stream(prompts, params):
        if decoder.stats.rounds == 2 and not reset:
            mx.reset_peak_memory()
            reset = True
        if decoder.stats.rounds == 8:
            break
    return (mx.get_peak_memory() - before) / LAYER


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Settings as on CUDA, and the tokens of each write that MLX does all the same."""
    seen: list[int] = []

    usual = Storage.write

    def write(self: Any, updates: Any, slots: mx.array) -> None:
        if len(slots) != 3:  # the rows with which a model is checked
            seen.append(slots.shape[1])
        usual(self, updates, slots)

    monkeypatch.setattr(cache_write, "write", write_at_once)
    monkeypatch.setattr(cache_write, "writes_in_place", lambda arrays: True)
    monkeypatch.setattr(Storage, "write", write)
    few = replace(
        backend.defaults("cpu"),
        kernels=True,
        costs_by_token=False,
        static_shapes=True,
        pad_single_token=True,
    )
    monkeypatch.setattr(backend, "defaults", lambda name=None: few)
    return seen


@pytest.mark.parametrize(("layers", "k"), [(1, 0), (1, 4), (12, 4)])
def test_target_and_draft_hold_each_cache_once(
    widths: list[int], layers: int, k: int
) -> None:
    """A draft's k writes in a round copied its caches k times."""
    own = (1 + 16 / LENGTH) * (layers + 2 * (k > 0))
    assert layers <= held(layers, k, attending) < 1.1 * own + 0.2
    assert all(width > FEW_TOKENS for width in widths)


@pytest.mark.parametrize(
    ("options", "share", "copied"),
    [({}, 1, 0), ({"max_kv_size": 200}, 0.21, 0), ({"kv_bits": 8}, 17 / 64, 1)],
    ids=["whole", "ring", "packed"],
)
def test_what_each_kind_of_cache_copies(
    widths: list[int], options: dict[str, int], share: float, copied: bool
) -> None:
    """Bytes of a target of four layers; a packed cache may be held twice."""
    most = (1 + copied) * 4 * share
    unpacked = 4 * copied  # for attention
    assert held(4, 0, attending, **options) < 1.1 * (most + unpacked) + 0.2
    assert any(width <= FEW_TOKENS for width in widths) is bool(copied)


def test_a_cache_that_something_holds_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault: arrays before a write of MLX's are kept, as in flight."""
    kept: list[Any] = []
    write = Storage.write

    def keeping(self: Any, *args: Any) -> None:
        kept[:] = [self.arrays]
        write(self, *args)

    monkeypatch.setattr(Storage, "write", keeping)
    assert held(1) > 1.9


@pytest.mark.parametrize("layers", [1, 8])
@pytest.mark.parametrize("k", [0, 4])
def test_tokens_are_the_same_if_caches_are_written_in_place(
    tiny_model: Callable[..., Any], widths: list[int], layers: int, k: int
) -> None:
    """With rounds in flight, joins, rows that end, and prefixes of earlier prompts.

    Whoever holds arrays of a cache until later would see what was written since.
    """
    target, draft = (
        cast_to_half(tiny_model("llama", num_hidden_layers=n, seed=n))
        for n in (layers, 2)
    )
    prompts = [
        [i % 30 for i in range(begin, begin + 20)] for begin in (0, 7, 3, 7, 0, 1)
    ]
    params = SamplingParams(max_tokens=24)
    config = EngineConfig(batch_size=4, num_draft_tokens=k, prefix_cache_memory=2**24)
    outputs = []
    for change in (attending, usual_calls):
        change(target)
        change(draft)
        decoder = SpecDecoder(
            token_level(target), token_level(draft) if k else None, config=config
        )
        for _ in range(2):  # the second time from prefixes
            outputs.append([o.token_ids for o in decoder.generate(prompts, params)])
        if change is attending:
            assert all(width > FEW_TOKENS for width in widths)
    assert outputs == [outputs[0]] * 4
    assert min(widths) <= FEW_TOKENS


def cast_to_half(model: nn.Module) -> nn.Module:
    cast(model, mx.bfloat16)
    return model
