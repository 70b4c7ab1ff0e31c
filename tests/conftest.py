"""Fixtures for every test: real weights, and small random models without files."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from specdec.utils.process import prepare_process

if TYPE_CHECKING:
    import mlx.nn as nn

    from specdec.models import LoadedModel

# No test uses the network; a hub id that is not in the cache fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# As commands do, before MLX is imported. A worker has about one core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
prepare_process()

# MLX compiles on first use, so one slow example says nothing. Every run has the same
# examples, so that a failure comes from a change.
settings.register_profile("specdec", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("specdec")

_REAL_FIXTURES = {"smollm2", "smollm2_path"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use real weights, so that none is forgotten.

    If workers share the tests, long tests come first, so that no worker waits for one
    at the end. Tests with real weights come together, so that one worker loads them.
    """
    for item in items:
        if _REAL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.real)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("real") is None)
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Exclude objects that live until the end from garbage collection.

    Scanning thousands of tests and their modules takes a fifth of a second, and many
    tests, and the engine's own benchmarks, collect often.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do the same with what a file of tests leaves: libraries that it has imported."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _own_cache_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep tests from writing to the user's cache folder, and from reading it."""
    base = tmp_path_factory.getbasetemp() / "cache-home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))


@pytest.fixture(autouse=True)
def draft_failures() -> Iterator[list[str]]:
    """Errors that ended drafting in a test, which fails if any are left on the list.

    Rows go on without a drafter that fails, so their tokens do not show its failure.
    """
    failures: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: failures.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("specdec.spec_decode")
    logger.addHandler(handler)
    yield failures
    logger.removeHandler(handler)
    assert failures == []


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Path of the default target's GGUF file; the test fails if it is missing."""
    from specdec.errors import ModelNotFoundError
    from specdec.model_names import default_target

    try:
        return Path(default_target())
    except ModelNotFoundError as error:
        pytest.fail(
            f"{error}; scripts/test does it; -m 'not real' leaves these tests out",
            pytrace=False,
        )


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32, loaded once."""
    from specdec.models import load

    return load(str(smollm2_path), dtype="float32")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., nn.Module]:
    """Builds small random float32 models of mlx-lm: ``tiny_model("llama", seed=1)``.

    Further keywords replace the model's arguments, by mlx-lm's names.
    """
    return _tiny_model


@pytest.fixture(scope="session")
def target() -> nn.Module:
    """The model that most tests decode with; it is never changed."""
    return _tiny_model("llama", seed=0)


@pytest.fixture(scope="session")
def drafts(target: nn.Module) -> dict[str, Any]:
    """Drafts for ``target``: right always, half of the time, or hardly ever; none."""
    import mlx.core as mx

    near: Any = _tiny_model("llama", seed=0)
    embedding = near.model.embed_tokens
    noise = mx.random.normal(embedding.weight.shape, key=mx.random.key(1))
    embedding.weight = embedding.weight + 0.15 * noise
    unrelated = _tiny_model("llama", seed=5, num_hidden_layers=1)
    return {"perfect": target, "near": near, "unrelated": unrelated, "none": None}


#: Arguments of small models, by mlx-lm's names.
SMALLEST: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def _tiny_model(arch: str = "llama", seed: int = 0, **overrides: Any) -> nn.Module:
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_map

    module = importlib.import_module(f"mlx_lm.models.{arch}")
    arguments: dict[str, Any] = {
        "model_type": arch,
        **SMALLEST,
        **overrides,
    }
    mx.random.seed(seed)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(arguments))

    def draw(weight: mx.array) -> mx.array:
        # Wider than the default, so that logits lie far apart; norms do not change.
        if weight.ndim < 2:
            return weight
        scale: float = 2 * weight.shape[-1] ** -0.5
        return mx.random.normal(weight.shape) * scale

    model.update(tree_map(draw, model.parameters()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model.eval()
