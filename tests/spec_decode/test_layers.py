"""The target with layers skipped: shared weights, right kinds, right caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from specdec import ConfigError, UnsupportedModelError
from specdec.backend import BackendDefaults
from specdec.config import EngineConfig
from specdec.memory.planning import plan_memory
from specdec.models import LoadedModel
from specdec.models.layer_skip import SkippingModel
from specdec.sampling_params import SamplingParams
from tests.models.architectures import build as build_arch
from tests.plain import AT_ONCE, BEHIND, drafts_of, exact
from tests.spec_decode.by_hand import ARCHITECTURES, build, plain_forward
from tests.spec_decode.repetitive import make_prompts

ARCHITECTURE = pytest.mark.parametrize("name", ARCHITECTURES)
# For gemma3 and the llama with windows, 2 and 5 see everything.
TOKENS = mx.array([[(7 * i * i) % 97 for i in range(30)]])
LAYERS = [(0, 1, 2, 3, 4, 5), (1, 2, 4), (2, 3), (3, 5), (0, 1), (2,), (4,)]


def in_chunks(model: Any) -> mx.array:
    """Logits of chunks of several widths after each other."""
    caches = make_prompt_cache(model)
    done, logits = 0, []
    for width in (12, 1, 1, 10, 6):
        logits.append(model(TOKENS[:, done : done + width], cache=caches))
        done += width
    assert {cache.offset for cache in caches} == {TOKENS.shape[1]}
    return mx.concatenate(logits, axis=1)


@ARCHITECTURE
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_only_those_layers_run(
    name: str, layers: tuple[int, ...], tiny_model: Callable[..., Any]
) -> None:
    """Without caches, with mlx-lm's, and far past the window."""
    model = build(tiny_model, name)
    skipping = SkippingModel(model, layers)
    expected = np.array(plain_forward(model, layers, TOKENS))
    assert np.allclose(skipping(TOKENS), expected, atol=1e-4)
    assert len(make_prompt_cache(skipping)) == len(layers)
    assert np.allclose(in_chunks(skipping), expected, atol=1e-4)


@ARCHITECTURE
def test_no_weight_is_copied_and_the_target_stays(
    name: str, tiny_model: Callable[..., Any]
) -> None:
    model = build(tiny_model, name)
    tokens = mx.array([[1, 2, 3]])
    before, layers = model(tokens), list(model.layers)
    arrays: Any = tree_flatten(model.parameters())
    held = {id(array) for _, array in arrays}
    skipping = SkippingModel(model, (0, 4))
    shared: Any = tree_flatten(skipping.parameters())  # type: ignore[no-untyped-call]
    assert shared
    assert all(id(array) in held for _, array in shared)
    assert len(skipping.layers) == 2
    assert list(model.layers) == layers
    assert mx.array_equal(model(tokens), before)
    whole = SkippingModel(model, range(6))
    assert mx.array_equal(whole(tokens), before)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", AT_ONCE),
        ("llama-sliding", BEHIND),
        ("qwen2", AT_ONCE),
        ("qwen3", BEHIND),
        ("gemma3", AT_ONCE),
        ("gemma3", BEHIND),
    ],
)
def test_runs_equal_plain_decoding(
    name: str, backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    """Greedy and sampled rows, joining and leaving, past the window."""
    model = build(tiny_model, name)
    params = [
        SamplingParams(max_tokens=18 + i % 3, temperature=t, seed=i)
        for i, t in enumerate((0.0, 0.0, 0.7, 1.0, 0.0, 1.3, 0.0, 0.5))
    ]
    draft = SkippingModel(model, (0, 1, 2, 4, 5))
    rows = exact(model, draft, make_prompts(), params, batch_size=5, backend=backend)
    assert drafts_of(rows)[1] > 0


@pytest.mark.parametrize(
    ("k", "batch_size", "backend"), [(1, 8, BEHIND), (7, 1, AT_ONCE)]
)
def test_all_layers_are_always_accepted(
    k: int, batch_size: int, backend: BackendDefaults, tiny_model: Callable[..., Any]
) -> None:
    model = build(tiny_model, "gemma3")
    rows = exact(
        model, SkippingModel(model, range(6)), make_prompts(), 25,
        batch_size=batch_size, num_draft_tokens=k, backend=backend,
    )  # fmt: skip
    drafted, accepted = drafts_of(rows)
    assert accepted == drafted > 0


def test_memory_is_planned_for_its_caches_alone(tiny_model: Callable[..., Any]) -> None:
    """Shared weights are counted once, keys and values of layers that run twice."""
    model = build(tiny_model, "llama")
    none: Any = None
    target = LoadedModel(model, none, {"num_attention_heads": 4}, "target")
    draft = LoadedModel(SkippingModel(model, (0, 4)), none, target.config, "layers")
    plan = plan_memory(target, draft, EngineConfig(), BEHIND)
    assert plan.draft is not None
    assert plan.weight_bytes == plan.target.weight_bytes > 0
    assert plan.draft.caches == plan.target.caches[:2]
    alone = plan_memory(
        target, None, EngineConfig(num_draft_tokens=3), BEHIND, drafts=True
    )
    assert (alone.draft, alone.num_draft_tokens) == (None, 3)


def test_what_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = build(tiny_model, "llama")
    with pytest.raises(ConfigError, match=r"has 6 layers, 0 to 5: .* layer 6"):
        SkippingModel(model, (0, 6), "mine")
    hybrid = build_arch("qwen3_5", num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"of mine do not attend .* one of 1, 3"):
        SkippingModel(hybrid, (0, 2), "mine")
    with pytest.raises(
        UnsupportedModelError, match="mine: skipping layers of rwkv7 models"
    ):
        SkippingModel(build_arch("rwkv7"), (0,), "mine")
