"""Whole runs under the settings of Metal, which nobody has to have for that.

Shapes are as they come, and rounds that draft are read one round late: no other backend
has both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from specdec.cache.factory import make_batch_caches
from specdec.config import EngineConfig
from specdec.engine import engine
from specdec.models import runner
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import NgramDrafter
from tests.plain import BEHIND, METAL, VOCAB, drafts_of, exact
from tests.scripted import Script

_rng = random.Random(7)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(n)] for n in (1, 40, 7, 30, 2, 70, 3)]


@pytest.mark.parametrize(
    ("draft", "batch_size"),
    [("perfect", 3), ("near", 1), ("near", 3), ("ngram", 3), ("none", 3)],
)
def test_rows_that_join_and_leave_are_decoded_as_alone(
    target: Any, drafts: dict[str, Any], draft: str, batch_size: int
) -> None:
    """Greedy and drawn rows, k that changes, a draft that rests and catches up.

    Catches a row's length that the host knows only once rounds are read, and a batch
    that shrinks while rounds are in flight.
    """
    rng = random.Random(3)
    script = Script(lambda number: rng.choice((0, 0, 0, 1, 2, 4)))
    params = [
        SamplingParams(max_tokens=n, temperature=0.8 * (n % 2), seed=n)
        for n in (20, 31, 9, 26, 2, 33, 14)
    ]
    rows = exact(
        target, drafts.get(draft), PROMPTS, params,
        batch_size=batch_size, num_draft_tokens=4, backend=METAL,
        drafter=NgramDrafter() if draft == "ngram" else None,
        length=None if draft == "none" else script,
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert (drafted > 0) == (draft != "none")
    assert draft != "perfect" or accepted > 0.5 * drafted


def test_rows_of_a_sliding_window_are_decoded_as_alone(
    tiny_model: Callable[..., Any],
) -> None:
    """Rings give back what is rejected, at any length."""
    model = tiny_model(
        "gemma3_text", seed=1, sliding_window=24, sliding_window_pattern=2
    )
    other = tiny_model("llama", seed=5, num_hidden_layers=1)
    exact(model, other, PROMPTS, 30, batch_size=3, num_draft_tokens=3, backend=METAL)


def test_masks_are_boolean_and_of_all_heads(target: Any) -> None:
    """An added mask has twice the bytes; each layer would copy one of one head."""
    options = ModelRunner(target, "target", EngineConfig(), METAL).options
    cache = make_batch_caches(target, 2, options, "target")
    target(mx.array([[1, 2], [3, 4]]), cache=cache)
    masks = [each.make_mask(2, return_array=True) for each in cache]
    assert all(mask is masks[0] for mask in masks)
    assert masks[0].dtype == mx.bool_
    assert masks[0].shape[:3] == (2, target.args.num_attention_heads, 2)
    wide = cache[0].make_mask(9, return_array=True)
    assert wide.shape[:3] == (2, 1, 9)


def test_a_model_that_takes_masks_of_one_head_gets_them(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with another number of heads would end the first step."""
    monkeypatch.setattr(runner, "query_heads", lambda model: 3)
    model = tiny_model("llama", seed=0)
    options = ModelRunner(model, "target", EngineConfig(), METAL).options
    assert options.mask_heads == 1


def test_memory_for_reuse_is_limited_while_rows_decode(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX would keep what rows free up to all memory, which the system needs."""
    limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    monkeypatch.setattr(engine, "memory_size", lambda: 2**34)
    exact(target, None, PROMPTS[:1], 2, batch_size=1, backend=METAL)
    exact(target, None, PROMPTS[:1], 2, batch_size=1, backend=BEHIND)
    assert limits == [2**30]
