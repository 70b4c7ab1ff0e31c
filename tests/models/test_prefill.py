"""Prefill in chunks: their widths, and how far the host runs ahead of the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from specdec import EngineConfig
from specdec.backend import BackendDefaults
from specdec.cache.capacity import chunk_width
from specdec.models.runner import ModelRows, ModelRunner
from specdec.tools.bench.models import random_model, random_prompts

PLAIN = BackendDefaults("cpu", read_bucket=16, static_shapes=True)
BY_LAYERS = replace(PLAIN, prefills_by_layers=True, most_chunk_tokens=96)


def filled(backend: BackendDefaults, number: int) -> ModelRows:
    """Rows of a small hybrid model after prefill."""
    model = random_model("tiny-hybrid", "float32")
    runner = ModelRunner(model, "m", EngineConfig(prefill_step_size=64), backend)
    prompts = random_prompts(number, 90, runner.vocab_size)
    rows = runner.rows(prompts, max_round=1, max_length=128)
    for _ in rows.prefill():
        pass
    return rows


def arrays_of(rows: ModelRows) -> list[mx.array]:
    leaves: Any = tree_flatten([c.extract(1).state for c in rows._caches])
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def test_layer_by_layer_is_the_same() -> None:
    """States of another chunk, or chunks that are wider than their rows allow."""
    plain, ours = filled(PLAIN, 3), filled(BY_LAYERS, 3)
    assert ours.runner.step(3) == 32
    assert ours.runner.step(1) == 64
    assert ours.runner.step(1000) == 16
    pairs = list(zip(arrays_of(plain), arrays_of(ours), strict=True))
    assert pairs
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize(
    ("remaining", "width"),
    [(1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, 256),
     (256, 256), (257, 512), (700, 512)],
)  # fmt: skip
def test_short_prompts_are_padded_to_a_part_of_a_bucket(
    remaining: int, width: int
) -> None:
    """A prompt of 64 tokens is computed as one of 256."""
    assert chunk_width(remaining, 512, 256) == width
    assert chunk_width(remaining, 512, 1) == min(remaining, 512)
