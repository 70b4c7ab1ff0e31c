"""The weights of a GGUF file under mlx-lm's names, and the model made of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import ModelError, UnsupportedModelError
from ...utils.printable import shorten
from .config import architecture_of, half_dtype, stored_dtype
from .header import GGUFFile, TensorInfo
from .tensors import (
    GROUP_SIZE,
    PACKED_BITS,
    is_packed,
    read_float,
    read_float_rows,
    read_packed,
)

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA3_BLOCK = {
    **_BLOCK,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Layers with a bias, beside the weight.
_BIASES = {"qwen2": ("attn_q", "attn_k", "attn_v")}
# Read for the configuration, or of no use to a model in MLX.
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """What the weights become.

    Args:
        dtype: floats of this type, nothing packed.
        bits: 16 for floats of 16 bits, nothing packed; fewer to quantize every
            matrix to so many. Without ``dtype`` and ``bits``, what MLX can keep
            packed stays so, and the rest is in floats that lose least of it.
        group_size: columns that share a scale then; 32 where it does not divide
            a matrix, and one that 32 does not divide either stays in floats.
    """

    dtype: mx.Dtype | None = None
    bits: int | None = None
    group_size: int = 64


@dataclass(frozen=True)
class Quantization:
    """How one layer is packed."""

    group_size: int
    bits: int


def mlx_name(file: GGUFFile, name: str) -> str:
    """mlx-lm's name of a tensor.

    Raises:
        UnsupportedModelError: no layer of the architecture has such a tensor.
    """
    architecture = architecture_of(file)
    block = _GEMMA3_BLOCK if architecture == "gemma3" else _BLOCK
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    known = layer is not None and layer[2] in block
    if layer and layer[3] == "bias":
        known = layer[2] in _BIASES.get(architecture, ())
    if layer and known:
        return f"model.layers.{layer[1]}.{block[layer[2]]}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.weight", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.weight"
    raise UnsupportedModelError(
        f"{file.path} has the tensor {shorten(name)}, which is not supported for "
        f"{architecture}: use an MLX folder"
    )


def _used_tensors(file: GGUFFile, tied: bool) -> Iterator[tuple[str, TensorInfo]]:
    """Each weight's name in mlx-lm and where to read it."""
    for name, info in file.tensors.items():
        if name in _NOT_WEIGHTS or (tied and name == "output.weight"):
            continue
        yield mlx_name(file, name), info


def read_weights(
    file: GGUFFile, config: dict[str, Any], form: WeightFormat
) -> tuple[dict[str, mx.array], dict[str, Quantization]]:
    """Every weight, evaluated, and how the packed layers are packed.

    One tensor is in float32 at a time, and of a large one only a part.

    Raises:
        UnsupportedModelError: a tensor or its quantization is not supported.
    """
    as_stored = form.dtype is None and form.bits is None
    dtype = form.dtype or (stored_dtype if as_stored else half_dtype)(file)
    weights: dict[str, mx.array] = {}
    packed: dict[str, Quantization] = {}
    for name, info in _used_tensors(file, config["tie_word_embeddings"]):
        if as_stored and is_packed(info):
            stored = read_packed(file, info, dtype)
            layer = name.removesuffix(".weight")
            weights[name] = stored.weight
            weights[f"{layer}.scales"] = stored.scales
            weights[f"{layer}.biases"] = stored.biases
            packed[layer] = Quantization(GROUP_SIZE, stored.bits)
            continue
        # Gemma's norms hold 1 + w; mlx-lm adds the 1 itself.
        shift = -1.0 if "gemma3" in config["model_type"] and "norm" in name else 0.0
        array = read_float(file, info, dtype, add=shift)
        group_size = _group_size(array, form)
        if form.bits is None or form.bits == 16 or group_size is None:
            weights[name] = array
            continue
        layer = name.removesuffix(".weight")
        quantized = mx.quantize(array, group_size=group_size, bits=form.bits)
        mx.eval(quantized)
        for part, value in zip(("weight", "scales", "biases"), quantized, strict=True):
            weights[f"{layer}.{part}"] = value
        packed[layer] = Quantization(group_size, form.bits)
    return weights, packed


def _group_size(array: mx.array, form: WeightFormat) -> int | None:
    """Of the group sizes to try, the first that divides a matrix's rows."""
    if array.ndim != 2:
        return None
    sizes = (form.group_size, GROUP_SIZE)
    return next((size for size in sizes if array.shape[-1] % size == 0), None)


def quantization_entry(packed: dict[str, Quantization]) -> dict[str, Any]:
    """``config["quantization"]``: the commonest kind, and the layers that differ."""
    common = Counter(packed.values()).most_common(1)[0][0]
    entry: dict[str, Any] = {"group_size": common.group_size, "bits": common.bits}
    for layer, kind in packed.items():
        if kind != common:
            entry[layer] = {"group_size": kind.group_size, "bits": kind.bits}
    return entry


def describe_weights(
    file: GGUFFile, config: dict[str, Any], form: WeightFormat
) -> tuple[dict[str, mx.array], dict[str, Quantization]]:
    """What :func:`read_weights` reads, in shapes and types alone: zeros, not computed.

    Only for a form without ``bits``.

    Raises:
        UnsupportedModelError: a tensor or its quantization is not supported.
    """
    dtype = form.dtype or stored_dtype(file)
    weights: dict[str, mx.array] = {}
    packed: dict[str, Quantization] = {}
    readable: set[str] = set()
    for name, info in _used_tensors(file, config["tie_word_embeddings"]):
        if form.dtype is not None or not is_packed(info):
            if info.type_name not in readable:  # a row reports it
                read_float_rows(file, info, 0, min(1, info.rows))
                readable.add(info.type_name)
            weights[name] = mx.zeros(info.shape, dtype)
            continue
        layer, bits = name.removesuffix(".weight"), PACKED_BITS[info.type_name]
        rows, columns = info.shape
        weights[name] = mx.zeros((rows, columns * bits // 32), mx.uint32)
        for part in ("scales", "biases"):
            weights[f"{layer}.{part}"] = mx.zeros((rows, columns // GROUP_SIZE), dtype)
        packed[layer] = Quantization(GROUP_SIZE, bits)
    return weights, packed


def build_model(
    file: GGUFFile, config: dict[str, Any], form: WeightFormat, *, lazy: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The file's model, evaluated, and its configuration with how it is packed.

    Args:
        file: where the weights are.
        config: what :func:`~specdec.models.gguf.config.build_config` made of it.
        form: what the weights become.
        lazy: read no weight; shapes and types are those of the model.

    Raises:
        UnsupportedModelError: a part of the model is not supported.
        ModelError: the file lacks weights or has some of a wrong shape.
    """
    weights, packed = (describe_weights if lazy else read_weights)(file, config, form)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if packed:
        config = {**config, "quantization": quantization_entry(packed)}
        nn.quantize(
            model,
            class_predicate=lambda path, _: (
                vars(packed[path]) if path in packed else False
            ),
        )
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelError(
            f"{file.path} does not hold the weights of its own configuration "
            f"({shorten(error)}): download it again"
        ) from error
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    return model, config
