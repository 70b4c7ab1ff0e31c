"""The draft's begin: the target's layers, joined MLPs, shared arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec.errors import ConfigError, UnsupportedModelError
from specdec.models import LoadedModel
from specdec.tools.distill.export import rounded
from specdec.tools.distill.student import (
    choose_layers,
    head_of,
    make_student,
    text_model,
)
from tests.models.gguf_files import arguments, random_model

TOKENS = mx.array([[5, 6, 7, 8, 9, 10, 11]])


def loaded(arch: str, **changes: Any) -> LoadedModel:
    model = random_model(arch, **changes)
    config = arguments(arch, **changes)
    return LoadedModel(model, None, config, arch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        (
            "llama",
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 4,
            },
        ),
        ("qwen2", {}),
        ("qwen3", {}),
        # The kinds of Gemma's layers go by places: here the sixth is global.
        ("gemma3", {"num_hidden_layers": 6}),
    ],
)
def test_all_layers_are_the_target(arch: str, changes: dict[str, Any]) -> None:
    """With none left out there is no difference; embedding and head are not copies."""
    target = loaded(arch, **changes)
    source = text_model(target)
    every = len(source["model"]["layers"])
    student = make_student(target, range(every))
    states = student.hidden(TOKENS)
    np.testing.assert_array_equal(states, source["model"](TOKENS))
    logits = states @ head_of(target).T
    np.testing.assert_allclose(logits, target.model(TOKENS), rtol=1e-5, atol=1e-5)
    assert student.model["model"]["embed_tokens"] is source["model"]["embed_tokens"]
    names = {name for name, _ in leaves(student.parameters)}
    assert not any("embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fewer_layers_stay_a_model_of_mlx_lm(arch: str) -> None:
    target = loaded(arch)
    student = make_student(target, (0, 1), widen=2)
    cache = student.model.make_cache() if hasattr(student.model, "make_cache") else None
    logits = student.model(TOKENS, cache=cache)
    assert logits.shape == (1, 7, 320)
    assert student.config["num_hidden_layers"] == 2
    assert student.config["intermediate_size"] == 2 * 96
    for module, copied in zip(
        text_model(target)["model"]["layers"][:2],
        student.model["model"]["layers"],
        strict=True,
    ):
        same = module["self_attn"]["q_proj"]["weight"]
        assert bool(mx.array_equal(copied["self_attn"]["q_proj"]["weight"], same))


def test_joined_mlps_add_up() -> None:
    target = loaded("llama", num_hidden_layers=6, mlp_bias=True)
    student = make_student(target, (0, 3), widen=3)
    source = text_model(target)["model"]["layers"]
    x = mx.random.normal((1, 4, 64), key=mx.random.key(0))
    for place, joined in ((0, (0, 1, 2)), (1, (3, 4, 5))):
        wanted = sum(source[i]["mlp"](x) for i in joined)
        output = student.model["model"]["layers"][place]["mlp"](x)
        np.testing.assert_allclose(output, wanted, rtol=2e-4, atol=2e-3)


def test_layers_to_choose() -> None:
    """Of a hybrid, layers whose scans nothing can be learnt through at length."""
    layers: list[Any] = [{"self_attn": None}] * 30
    assert choose_layers("4", layers) == (0, 10, 19, 29)
    assert choose_layers("1", layers) == (0,)
    assert choose_layers("0, 10,20,29", layers) == (0, 10, 20, 29)
    hybrid: list[Any] = [{}, {}, {"self_attn": None}] * 4
    assert choose_layers("3", hybrid) == (2, 8, 11)
    assert choose_layers("4", hybrid) == (2, 5, 8, 11)
    assert choose_layers("1", hybrid) == (2,)
    for text, message in (
        ("5", "the target has 4 of attention, take so many at most"),
        ("2,3", "layers of attention, which are 2, 5, 8, 11 of"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_layers(text, hybrid)
    for text, message in (
        ("30", "the target has 30, take fewer"),
        ("0", "at least 1"),
        ("0,30", "layers 0 to 29"),
        ("2,2", "once at most"),
        ("a", "write a number of layers"),
        ("", "write a number of layers"),
        ("-1", "write a number of layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            choose_layers(text, layers)


def test_others_are_refused_by_name(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("phi3", num_key_value_heads=4)
    other = LoadedModel(model, None, {}, "some-phi")  # type: ignore[arg-type]
    with pytest.raises(
        UnsupportedModelError,
        match="some-phi: distilling a draft of layers of phi3 models",
    ):
        make_student(other, (0,))


def test_rounding_is_that_of_storing() -> None:
    """And its gradient that of doing nothing."""
    matrix = mx.random.normal((8, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    stored = mx.dequantize(*mx.quantize(matrix, group_size=64, bits=4), 64, 4)
    assert bool(mx.array_equal(rounded(matrix, 4), stored))
    assert not bool(mx.array_equal(stored, matrix))
    gradient = mx.grad(lambda m: (rounded(m, 4) * 3).sum())(matrix)
    assert bool(mx.all(gradient == 3))
    narrow = mx.ones((3, 24))
    assert rounded(narrow, 4) is narrow


def leaves(tree: Any) -> list[tuple[str, mx.array]]:
    leaves: Any = tree_flatten(tree)
    return list(leaves)
