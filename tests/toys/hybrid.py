"""A small hybrid model that was trained on text: ``python -m tests.toys.hybrid``.

Random weights spread a recurrent state evenly. Trained ones do not: in a table or in
white space keys are alike, gates are near 1, and errors add up. It reads bytes of this
repository's documents and of Python's standard library. Training takes some minutes on
one core.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta
from mlx_lm.models.qwen3_5 import Model, ModelArgs

from specdec.cuda.attention_patch import calling_instead
from specdec.models import chunked_delta
from tests.toys.make import cross_entropy, train

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
FILE = HERE / "hybrid.safetensors"
LENGTH, ROWS, STEPS = 128, 12, 700
TRI_INV = mx.linalg.tri_inv
CONFIG = {
    "model_type": "qwen3_5", "hidden_size": 64, "num_hidden_layers": 3,
    "full_attention_interval": 3, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "vocab_size": 256, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-06, "max_position_embeddings": 8192,
    "rope_parameters": {
        "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def new_model() -> Model:
    """A model with random weights."""
    return Model(ModelArgs(model_type="qwen3_5", text_config=dict(CONFIG)))


def trained_model() -> Model:
    """The trained model, in float32."""
    model = new_model()
    arrays: Any = mx.load(str(FILE))
    model.load_weights([(name, a.astype(mx.float32)) for name, a in arrays.items()])
    model.eval()
    return model


def corpus() -> Any:
    """Bytes of documents and code."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    files += [*ROOT.glob("specdec/**/*.py"), *library.glob("*.py")]
    texts = [file.read_bytes() for file in sorted(files)]
    return np.frombuffer(b"\n".join(texts), np.uint8)


@mx.custom_function
def inverse(matrices: mx.array) -> mx.array:
    """The inverses of lower triangular matrices, with the gradient that MLX lacks."""
    return TRI_INV(matrices)


@inverse.vjp
def gradient(matrices: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    transposed = output.swapaxes(-1, -2)
    return -(transposed @ cotangent @ transposed)


class Shifted(nn.Conv1d):
    """A convolution of each channel, whose gradient takes half the time."""

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x.shape[1] - self.weight.shape[1] + 1
        parts = (x[:, j : j + tokens] * w for j, w in enumerate(self.weight[..., 0].T))
        return sum(parts, mx.zeros(()))


def update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803 - mlx-lm's name
    dt_bias: mx.array,
    *_: Any,
    **options: Any,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's ``gated_delta_update`` of whole rows, in products."""
    state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]))
    g = gated_delta.compute_g(A_log, a, dt_bias)
    return chunked_delta.gated_delta_chunks(q, k, v, g, mx.sigmoid(b), state)


def main() -> None:
    mx.random.seed(0)
    model, text = new_model(), corpus()
    linalg: Any = mx.linalg
    linalg.tri_inv = inverse
    for layer in model.layers:
        if layer.is_linear:
            kind: Any = type(layer.linear_attn)
            layer.linear_attn.__class__ = calling_instead(
                kind,
                "gated_delta_update",
                gated_delta.gated_delta_update,
                update,
            )
            layer.linear_attn.conv1d.__class__ = Shifted

    def loss(rng: np.random.Generator) -> mx.array:
        begins = rng.integers(0, len(text) - LENGTH - 1, size=ROWS)
        rows = mx.array(np.stack([text[b : b + LENGTH + 1] for b in begins]), mx.int32)
        return cross_entropy(model(rows[:, :-1]), rows[:, 1:]).mean()

    model.train()
    train(model, loss, STEPS)
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(
        str(FILE), {name: array.astype(mx.float16) for name, array in weights}
    )


if __name__ == "__main__":
    main()
