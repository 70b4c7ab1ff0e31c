"""Rounds copy no cache: bytes are counted on the CPU, which copies where a GPU does.

MLX copies an array that a command in flight still reads, instead of writing into it. On
the CPU it is at most some 50 operations ahead, so these models have few.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from specdec import backend
from specdec.cache.storage import Storage
from specdec.config import EngineConfig
from specdec.decoder import SpecDecoder
from specdec.sampling_params import SamplingParams
from specdec.tools.decoding import token_level

HEADS, SIZE, VOCAB, ROWS, LENGTH = 8, 64, 32, 8, 1000
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


@pytest.fixture(autouse=True)
def _waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's settings, but for copies: they are as on a GPU with large caches."""
    waiting = replace(backend.defaults("cpu"), most_copied=0)
    monkeypatch.setattr(backend, "defaults", lambda name=None: waiting)


def held(layers: int) -> float:
    """The most bytes that six rounds hold, by those of a layer's keys and values."""
    model = Model(layers)
    mx.eval(model)
    before, reset = mx.get_active_memory(), False
    config = EngineConfig(batch_size=ROWS, prefill_step_size=512)
    decoder = SpecDecoder(token_level(model), config=config)
    prompts = [[i % VOCAB for i in range(LENGTH + row)] for row in range(ROWS)]
    params = SamplingParams(max_tokens=60)
    for _ in decoder.stream(prompts, params):
        if decoder.stats.rounds == 2 and not reset:
            mx.reset_peak_memory()
            reset = True
        if decoder.stats.rounds == 8:
            break
    return (mx.get_peak_memory() - before) / LAYER


@pytest.mark.parametrize("layers", [1, 4])
def test_no_cache_is_copied(layers: int) -> None:
    """One round ahead copied the target's."""
    assert layers <= held(layers) < 1.1 * layers + 0.2


def test_a_cache_that_something_holds_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault: arrays of former writes are kept, as by a forgotten name."""
    kept: list[Any] = []
    write = Storage.write

    def keeping(self: Any, *args: Any) -> None:
        kept[:] = [self.arrays]
        write(self, *args)

    monkeypatch.setattr(Storage, "write", keeping)
    assert held(1) > 1.9
