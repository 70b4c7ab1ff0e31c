"""Models to measure: loaded by name, or of a real size with random weights."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from ...errors import ConfigError
from ...models import LoadedModel, load, load_draft
from ...models.layers import arrays_of
from ...models.loading import fit
from ...utils.printable import quoted, shorten

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

_SIZES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "70b": (8192, 80, 28672, 64, 8, 128, 128256, False),
        "32b": (5120, 64, 25600, 64, 8, 128, 151936, False),
        "8b": (4096, 32, 14336, 32, 8, 128, 128256, False),
        "1b": (2048, 16, 8192, 32, 8, 64, 128256, True),
        "10m": (256, 8, 768, 8, 4, 32, 8192, True),
        "tiny": (64, 2, 128, 4, 2, 16, 256, False),
        "qwen3-30b-a3b": (2048, 48, 6144, 32, 4, 128, 151936, False),
        "qwen3.5-4b": (2560, 32, 9216, 16, 4, 256, 248320, True),
        "qwen3.5-35b-a3b": (2048, 40, 6144, 16, 2, 256, 248320, False),
        "tiny-moe": (64, 2, 128, 4, 2, 16, 256, False),
        "tiny-hybrid": (64, 4, 128, 4, 2, 16, 256, False),
        "tiny-hybrid-moe": (64, 4, 128, 4, 2, 16, 256, False),
    }.items()
}
_LINEAR = (
    "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip
for _names, _sizes in (
    (("qwen3.5-4b", "qwen3.5-35b-a3b"), (16, 32, 128, 128)),
    (("tiny-hybrid", "tiny-hybrid-moe"), (2, 4, 32, 32)),
):
    for _name in _names:
        _added = dict(zip(_LINEAR, _sizes, strict=True))
        SHAPES[_name] |= {"model_type": "qwen3_5"} | _added
# Experts: all, those that a token uses, their size, and that of the shared one.
for _name, *_experts in (
    ("qwen3-30b-a3b", 128, 8, 768, 0),
    ("qwen3.5-35b-a3b", 256, 8, 512, 512),
    ("tiny-moe", 8, 2, 64, 0),
    ("tiny-hybrid-moe", 8, 2, 64, 64),
):
    _keys = (
        "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size",
    )  # fmt: skip
    SHAPES[_name] = {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **SHAPES[_name],
        **dict(zip(_keys, _experts, strict=True)),
    }


def random_model(
    shape: str,
    dtype: str = "bfloat16",
    *,
    num_layers: int | None = None,
    packing: tuple[int, int] | None = None,
    fitted: bool = True,
    seed: int = 0,
) -> nn.Module:
    """A model of a real size with random weights, drawn on the device.

    It is a Llama, a Qwen3 with experts or a Qwen3.5.

    A weight depends only on its name and the seed, so a model with fewer layers has
    the first layers of the deeper one.

    Args:
        shape: a key of ``SHAPES``.
        num_layers: the number of layers, if not that of the shape.
        packing: (group size, bits) with which weights are quantized.
        fitted: compute the model's products in the way that is fast on this backend.
    """
    model, _ = undrawn_model(shape, num_layers=num_layers, packing=packing)
    modules: list[tuple[str, Any]] = model.named_modules()
    packings = {
        path: (module.group_size, module.bits)
        for path, module in modules
        if hasattr(module, "bits")
    }
    for name, array in arrays_of(model):
        # The layers' own arrays are lazy and are never computed, since they are
        # replaced. Weights are uniform: the tails of normal ones overflow in half
        # precision.
        if array.ndim == 1:
            drawn = mx.ones(array.shape, DTYPES[dtype])
        elif (packed := packings.get(name.rpartition(".")[0])) is not None:
            drawn = _packed(name, array, *packed).astype(
                mx.uint32 if array.dtype == mx.uint32 else DTYPES[dtype]
            )
        else:
            bound = (3 / array.shape[-1]) ** 0.5
            key = mx.random.key(zlib.crc32(name.encode()) ^ seed)
            drawn = mx.random.uniform(
                -bound, bound, array.shape, dtype=DTYPES[dtype], key=key
            )
        mx.eval(drawn)
        model.update(tree_unflatten([(name, drawn)]))
    mx.clear_cache()
    if fitted:
        fit(model)
    return model.eval()


def undrawn_model(
    shape: str, *, num_layers: int | None = None, packing: tuple[int, int] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A model none of whose weights is computed, and its configuration.

    Args: as for :func:`random_model`.
    """
    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        **SHAPES[shape],
    }
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if packing is not None:
        quantized = getattr(model, "quant_predicate", None) or _any_layer
        nn.quantize(model, *packing, class_predicate=partial(_packs, quantized))
    return model, config


def _any_layer(path: str, module: nn.Module) -> bool:
    return True


def _packs(quantized: Callable[[str, nn.Module], Any], path: str, module: Any) -> Any:
    """How a layer is packed: as mlx-lm's conversion does it."""
    return hasattr(module, "to_quantized") and quantized(path, module)


def _packed(name: str, array: mx.array, group_size: int, bits: int) -> mx.array:
    """Random packed weights, or their scales or biases; weights are uniform, too."""
    if array.dtype == mx.uint32:
        key = mx.random.key(zlib.crc32(name.encode()))
        low, high = -(2**31), 2**31 - 1
        return mx.random.randint(low, high, array.shape, key=key).view(mx.uint32)
    bound = (3 / (array.shape[-1] * group_size)) ** 0.5
    is_scale = name.endswith(".scales")
    return mx.full(array.shape, 2 * bound / (2**bits - 1) if is_scale else -bound)


def load_model(
    source: str,
    dtype: str | None,
    target: LoadedModel | None = None,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """A model by name, or ``random:SHAPE[:LAYERS]``, which has no tokenizer.

    Args:
        target: the target, if the model is its draft (``self:4bit`` and so on).
    """
    if source.startswith("random:"):
        shape, num_layers = random_shape(source)
        model = random_model(shape, dtype or "bfloat16", num_layers=num_layers)
        no_tokenizer: Any = None
        return LoadedModel(model, no_tokenizer, {}, source)
    if target is not None:
        return load_draft(
            source, target, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return load(source, dtype=dtype, trust_remote_code=trust_remote_code)


def random_shape(source: str) -> tuple[str, int | None]:
    """Shape and number of layers of ``random:SHAPE[:LAYERS]``."""
    shape, colon, layers = source.removeprefix("random:").partition(":")
    if shape not in SHAPES:
        raise ConfigError(
            f"{shorten(source)}: no shape {quoted(shape)}; shapes are "
            f"{', '.join(SHAPES)}"
        )
    if not colon:
        return shape, None
    if not re.fullmatch("0*[1-9][0-9]{0,2}", layers):
        raise ConfigError(
            f"{shorten(source)}: {quoted(layers)} is no number of layers: write "
            f"random:{shape}:4, 999 at most, or random:{shape} for all; shapes are "
            f"{', '.join(SHAPES)}"
        )
    return shape, int(layers)


def random_prompts(number: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, of ``length`` down to ``length - 7`` tokens."""
    draw = np.random.default_rng(0)
    lengths = [max(1, length - i % 8) for i in range(number)]
    return [draw.integers(0, vocab_size, n).tolist() for n in lengths]
