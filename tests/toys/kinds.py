"""Toy targets, and a toy head of each kind for one of them: sizes and weights.

Weights lie beside this file. ``python -m tests.toys.make`` trained them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from specdec.models import LoadedModel
from tests.models.draft_heads import published
from tests.models.gguf_files import random_model

HERE = Path(__file__).parent
VOCAB, LAYERS = 40, 4
READS = [0, 1, 2]
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
}
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "num_target_layers": LAYERS}
_READS = {"target_layer_ids": READS, "mask_token_id": VOCAB - 1}
_EAGLE = {
    **_SIZES,
    "draft_vocab_size": None,
    "eagle_aux_hidden_state_layer_ids": [i + 1 for i in READS],
}
#: Configurations by the names of files; those of Gemma name their target.
HEADS: dict[str, dict[str, Any]] = {
    "dflash": published.dflash_config(**_SIZES, dflash=_READS),
    "dflash2": published.dflash2_config(**_SIZES, dflash=_READS),
    "dspark-gated": published.dspark_config(
        **_SIZES, **_READS, markov_head_type="gated"
    ),
    "dspark-rnn": published.dspark_config(**_SIZES, **_READS, markov_head_type="rnn"),
    "dspark-sinks": published.nemotron_config(**_SIZES, **_READS),
    "dspark-gemma": published.gemma_config(
        **_SIZES, **_READS, final_logit_softcapping=30.0
    ),
    "eagle3": published.eagle_config(**_EAGLE),
    "peagle": published.peagle_config(**_EAGLE) | {"mask_token_id": VOCAB - 1},
    "assistant": published.assistant_config(vocab_size=VOCAB),
}


def target_of(name: str) -> str:
    """The name of a head's target."""
    return "gemma4_text" if name in ("dspark-gemma", "assistant") else "qwen3"


def target_model(name: str, *, trained: bool = True) -> Any:
    """A toy target."""
    model = random_model(name, **TARGETS[name])
    if trained:
        load(model, name)
    return model


def load(model: nn.Module, name: str) -> None:
    """Load weights that were stored in 16 bits, in float32."""
    stored: Any = mx.load(str(HERE / f"{name}.safetensors"))
    model.load_weights([(n, a.astype(mx.float32)) for n, a in stored.items()])
    mx.eval(model.parameters())


def random_weights(name: str) -> dict[str, np.ndarray]:
    """Random weights of a head, under their published names."""
    config = HEADS[name]
    made = (
        published.assistant_weights if name == "assistant" else published.random_weights
    )
    return made(config)


def loaded(model: Any, name: str) -> LoadedModel:
    """A toy target, as heads are bound to it."""
    return LoadedModel(model, None, {}, name)  # type: ignore[arg-type]
