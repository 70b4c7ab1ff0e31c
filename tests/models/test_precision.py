"""``self:Nbit``: the target's weights in fewer bits, and the target as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from specdec.errors import UnsupportedModelError
from specdec.model_names import SELF_DRAFTS
from specdec.models import load, load_draft
from specdec.models.draft_folder import take_type
from specdec.models.precision import cast, quantized_copy
from specdec.tools.decoding import token_level

from .folders import write_folder
from .gguf_files import random_model

TOKENS = mx.array([[7, 300, 12, 44, 5, 91, 200, 7]])


def arrays(model: Any) -> dict[str, mx.array]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def same(left: dict[str, mx.array], right: dict[str, mx.array]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and mx.array_equal(left[name], right[name]).item()
        for name in left
    )


def mean(values: mx.array) -> float:
    """Of the sizes of the values."""
    return float(np.abs(np.array(values)).mean())


@pytest.mark.parametrize("name", SELF_DRAFTS)
@pytest.mark.parametrize("stored", [None, 8])
def test_the_draft_is_packed_and_the_target_as_it_was(
    name: str, stored: int | None, tmp_path: Path
) -> None:
    write_folder(tmp_path / "m", bits=stored)
    target = load(str(tmp_path / "m"))
    before, logits = arrays(target.model), target.model(TOKENS)
    draft = load_draft(name, target)
    bits = int(name[5])
    assert draft.name == name
    assert draft.tokenizer is target.tokenizer
    assert draft.model is not target.model
    assert draft.config["quantization"]["bits"] == bits
    layers = [m for _, m in draft.model.named_modules() if hasattr(m, "bits")]
    assert len(layers) == 2 * 7 + 1, "every projection and the tied embedding"
    assert {layer.bits for layer in layers} == {bits}
    assert isinstance(draft.model.model.embed_tokens, nn.QuantizedEmbedding)
    assert same(arrays(target.model), before)
    assert mx.array_equal(target.model(TOKENS), logits)
    assert target.config.get("quantization", {}).get("bits") == stored


def test_the_weights_are_mlx_quantizations_of_the_targets() -> None:
    model = random_model("llama")
    draft, entry = quantized_copy(model, 4)
    layer: Any = draft.layers[1].mlp.gate_proj
    expected = mx.quantize(model.layers[1].mlp.gate_proj.weight, 64, 4)
    got = (layer.weight, layer.scales, layer.biases)
    assert all(mx.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    # 96 columns: groups of 32; what is not in the entry has groups of 64.
    assert entry == {
        "group_size": 64,
        "bits": 4,
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 4},
        "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 4},
    }
    assert draft.layers[0].mlp.down_proj.group_size == 32


def test_biases_of_layers_are_kept() -> None:
    model = random_model("qwen2")
    draft, _ = quantized_copy(model, 8)
    ours = draft.layers[0].self_attn.q_proj.bias
    assert mx.array_equal(ours, model.layers[0].self_attn.q_proj.bias)


def test_a_layer_that_no_group_divides_stays() -> None:
    model = random_model("qwen2", intermediate_size=80)
    draft, entry = quantized_copy(model, 4)
    down = draft.layers[0].mlp.down_proj
    assert type(down) is nn.Linear
    assert entry["model.layers.0.mlp.down_proj"] is False
    assert mx.array_equal(down.weight, model.layers[0].mlp.down_proj.weight)
    assert isinstance(draft.layers[0].mlp.up_proj, nn.QuantizedLinear)


def test_an_odd_layer_is_refused_by_name() -> None:
    class Odd(nn.QuantizedLinear):
        """A quantized layer that nobody knows."""

    model = random_model("llama")
    model.layers[0].mlp.up_proj = Odd(64, 96, bias=False)
    with pytest.raises(UnsupportedModelError, match="type Odd"):
        cast(model, mx.float32)
    with pytest.raises(UnsupportedModelError, match="type Odd"):
        quantized_copy(model, 4)


def test_what_the_model_excludes_is_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    monkeypatch.setattr(
        type(model),
        "cast_predicate",
        property(lambda self: lambda path: "input_layernorm" not in path),
        raising=False,
    )
    cast(model, mx.bfloat16)
    kinds = {name: array.dtype for name, array in arrays(model).items()}
    assert kinds["model.layers.0.input_layernorm.weight"] == mx.float32
    assert kinds["model.norm.weight"] == mx.bfloat16


def test_memory_holds_no_third_copy() -> None:
    """Beside target and draft, what one layer needs; float32 to 8 bits."""
    model = random_model("llama", num_hidden_layers=24, hidden_size=256)
    mx.eval(model.parameters())
    mx.synchronize()
    gc.collect()  # what other tests left
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    draft, _ = quantized_copy(model, 8)
    added = mx.get_active_memory() - before
    extra = mx.get_peak_memory() - before - added
    total = sum(array.nbytes for array in arrays(model).values())
    assert 0.25 * total < added < 0.35 * total
    assert extra < 0.1 * total
    del draft


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_of_layers_takes_the_target_s_type(
    tiny_model: Callable[..., nn.Module], packed: bool
) -> None:
    """Of bfloat16 and float16 MLX makes float32, which no fast kernel computes."""
    for theirs, expected in (
        (mx.float16, mx.float16),
        (mx.bfloat16, mx.bfloat16),
        (mx.float32, mx.bfloat16),
    ):
        target, draft = tiny_model("llama"), tiny_model("llama")
        target.set_dtype(theirs)
        draft.set_dtype(mx.bfloat16)
        if packed:
            nn.quantize(draft, group_size=32, bits=4)
        take_type(draft, token_level(target))
        dtypes = {array.dtype for array in arrays(draft).values()}
        assert dtypes - {mx.uint32} == {expected}
