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
from specdec.models.runner import ModelRunner
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import NgramDrafter
from tests.plain import METAL, VOCAB, drafts_of, exact
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


def test_masks_are_boolean(target: Any) -> None:
    """A mask that is added has twice the bytes and takes one more operation."""
    runner = ModelRunner(target, "target", EngineConfig(), METAL)
    cache = make_batch_caches(target, 2, runner.options, "target")
    target(mx.array([[1, 2], [3, 4]]), cache=cache)
    mask = cache[0].make_mask(2, return_array=True)
    assert isinstance(mask, mx.array)
    assert mask.dtype == mx.bool_
