"""Toy targets, and a toy head of each kind for one of them: sizes and weights.

Weights lie beside this file, heads under their published names.
``python -m tests.toys.make`` trained them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec.models import LoadedModel
from specdec.models.draft_heads import load_head
from tests.models.architectures import arguments_of
from tests.models.draft_heads import mtp_checkpoints, published
from tests.models.gguf_files import random_model

HERE = Path(__file__).parent
VOCAB, LAYERS = 40, 4
READS = [0, 1, 2]
#: Of EAGLE's heads. Numbers of a list that begins with 1 are those of outputs.
EAGLE_READS = [1, 2, 3]
_TARGET: dict[str, Any] = {
    "hidden_size": published.WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": _TARGET,
    "gemma4_text": {
        **_TARGET,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "use_double_wide_mlp": False,
    },
    "muse_glimmer": {
        **_TARGET,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "output_multiplier": 1.0,
    },
    "glm4_moe": arguments_of(
        "glm4_moe", **_TARGET, first_k_dense_replace=LAYERS, use_qk_norm=False,
        rope_theta=5000.0,
    ),
}  # fmt: skip
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_target_layers": LAYERS}
_READS = {"target_layer_ids": READS, "mask_token_id": VOCAB - 1}
_EAGLE = {
    **_SIZES,
    "draft_vocab_size": None,
    "eagle_aux_hidden_state_layer_ids": EAGLE_READS,
}
#: Configurations by the names of files.
HEADS: dict[str, dict[str, Any]] = {
    "dflash": published.dflash_config(**_SIZES, dflash=_READS),
    "dflash2": published.dflash2_config(**_SIZES, dflash=_READS),
    "dspark": published.dspark_config(**_SIZES, **_READS),
    "dspark-gated": published.dspark_config(
        **_SIZES, **_READS, markov_head_type="gated"
    ),
    "dspark-rnn": published.dspark_config(**_SIZES, **_READS, markov_head_type="rnn"),
    "dspark-qwen35": published.qwen35_config(**_SIZES, **_READS),
    "dspark-sinks": published.nemotron_config(**_SIZES, **_READS),
    "dspark-gemma": published.gemma_config(
        **_SIZES, **_READS, final_logit_softcapping=30.0
    ),
    "muse": published.muse_config(**_READS),
    "eagle3": published.eagle_config(**_EAGLE),
    "peagle": published.peagle_config(**_EAGLE) | {"mask_token_id": VOCAB - 1},
    "assistant": published.assistant_config(vocab_size=VOCAB),
    "mtp": {"model_type": "glm4_moe_mtp"},
}
_TARGET_OF = {
    "dspark-gemma": "gemma4_text",
    "assistant": "gemma4_text",
    "muse": "muse_glimmer",
    "mtp": "glm4_moe",
}


def target_of(name: str) -> str:
    """The name of a head's target."""
    return _TARGET_OF.get(name, "qwen3")


def target_model(name: str, *, trained: bool = True) -> Any:
    """A toy target."""
    model = random_model(name, **TARGETS[name])
    if trained:
        model.load_weights(list(stored(name).items()))
        mx.eval(model.parameters())
    return model


def stored(name: str) -> dict[str, mx.array]:
    """Weights that were stored in 16 bits, in float32."""
    arrays: Any = mx.load(str(HERE / f"{name}.safetensors"))
    return {n: a.astype(mx.float32) for n, a in arrays.items()}


def random_weights(name: str) -> dict[str, mx.array]:
    """Random weights of a head, under their published names."""
    if name == "mtp":
        arch = target_of(name)
        model = target_model(arch, trained=False)
        mx.random.seed(0)
        parts = mtp_checkpoints.make_parts(arch, model)
        return mtp_checkpoints.head_arrays(arch, model, parts)
    assistant = name == "assistant"
    made = published.assistant_weights if assistant else published.random_weights
    return {n: mx.array(a) for n, a in made(HEADS[name]).items()}


def published_arrays(name: str, head: Any, model: Any) -> dict[str, mx.array]:
    """A head's weights, as they are published."""
    if name == "mtp":
        (one,) = head.heads
        norms = {"token": one.token_norm, "state": one.state_norm, "out": one.norm}
        parts: dict[str, Any] = {"layer": one.layer, "fc": one.fc.weight}
        parts |= {part: norm.weight for part, norm in norms.items()}
        return mtp_checkpoints.head_arrays(target_of(name), model, parts)
    arrays = dict(mtp_checkpoints.arrays_of(head))
    if name == "dspark-qwen35":
        for key, array in list(arrays.items()):
            if key.endswith("norm.weight"):
                arrays[key] = array - 1
            if ".g_proj." in key:  # each head's gate lies after its query
                query = key.replace("g_proj", "q_proj")
                each = [
                    a.reshape(-1, 1, 8, a.shape[-1])
                    for a in (arrays[query], arrays.pop(key))
                ]
                both = mx.concatenate(each, axis=1)
                arrays[query] = both.reshape(-1, array.shape[-1])
    return arrays


def load_toy(
    name: str, path: Path, model: nn.Module, arrays: Mapping[str, mx.array]
) -> Any:
    """A head for a target, from a folder that is written."""
    (path / "config.json").write_text(json.dumps(HEADS[name]), "utf-8")
    mx.save_safetensors(str(path / "model.safetensors"), dict(arrays))
    target = LoadedModel(model, None, {}, name)  # type: ignore[arg-type]
    return load_head(path, HEADS[name], name, target).model
