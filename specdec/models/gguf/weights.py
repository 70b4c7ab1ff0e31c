"""The weights of a GGUF file under mlx-lm's names, and the model made of them."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import ModelError, UnsupportedModelError
from ...utils.printable import shorten
from .architectures import Architecture, architecture, architecture_of
from .config import half_dtype, stored_dtype
from .header import GGUFFile, TensorInfo
from .tensors import (
    GROUP_SIZE,
    PACKED_BITS,
    REPACKED_BITS,
    SAME_BITS,
    is_packed,
    packed_zeros,
    read_float,
    read_float_rows,
    read_packed,
)

log = logging.getLogger("specdec.models")

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Tensors that are read for the configuration, or that mlx-lm's models do not use.
_NOT_WEIGHTS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """The format into which weights are read.

    Without ``dtype`` and ``bits``, what MLX can keep packed stays packed. The rest
    becomes floats, of the type that loses least.

    Args:
        dtype: floats of this type, nothing packed.
        bits: 16 for floats of 16 bits, nothing packed; a smaller number to quantize
            every matrix to that many bits.
        group_size: columns that share a scale in matrices quantized to ``bits``; 32
            for a matrix that it does not divide. A matrix that 32 does not divide
            stays in floats.
    """

    dtype: mx.Dtype | None = None
    bits: int | None = None
    group_size: int = 64

    @property
    def as_stored(self) -> bool:
        """Whether weights that can stay packed do so."""
        return self.dtype is None and self.bits is None


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
    kind = architecture(file)
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    known = layer is not None and layer[2] in kind.names
    if layer and layer[3] == "bias":
        known = layer[2] in kind.biases
    if layer and known:
        return f"model.layers.{layer[1]}.{kind.names[layer[2]]}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.weight", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.weight"
    raise UnsupportedModelError(
        f"{file.path} has the tensor {shorten(name)}, which is not supported for "
        f"{architecture_of(file)}: use an MLX folder"
    )


def _used_tensors(file: GGUFFile, tied: bool) -> Iterator[tuple[str, TensorInfo]]:
    """The name in mlx-lm and the tensor of each weight."""
    for name, info in file.tensors.items():
        if name in _NOT_WEIGHTS or (tied and name == "output.weight"):
            continue
        yield mlx_name(file, name), info


def read_weights(
    file: GGUFFile, config: dict[str, Any], form: WeightFormat, *, lazy: bool = False
) -> tuple[dict[str, mx.array], dict[str, Quantization]]:
    """Every weight, evaluated, and how the packed layers are packed.

    Only one tensor, or a part of a large one, is in float32 at a time. ``lazy`` reads
    no weights and returns zeros of the same shapes and types, which are not computed.

    Raises:
        UnsupportedModelError: a tensor or its quantization is not supported.
    """
    dtype = form.dtype or (stored_dtype if form.as_stored else half_dtype)(file)
    kind = architecture(file)
    weights: dict[str, mx.array] = {}
    packed: dict[str, Quantization] = {}
    readable = set(SAME_BITS)

    def pack(name: str, bits: int, group_size: int, parts: Iterable[mx.array]) -> None:
        layer = name.removesuffix(".weight")
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            weights[f"{layer}.{part}"] = array
        packed[layer] = Quantization(group_size, bits)

    for name, info in _used_tensors(file, config["tie_word_embeddings"]):
        if lazy and info.type_name not in readable:  # reading a row reports it
            read_float_rows(file, info, 0, min(1, info.rows))
            readable.add(info.type_name)
        order = None if lazy else _row_order(kind, info, config)
        if form.as_stored and stays_packed(name, info):
            read = packed_zeros if lazy else read_packed
            stored = (_ordered(part, order) for part in read(file, info, dtype))
            pack(name, PACKED_BITS[info.type_name], GROUP_SIZE, stored)
            continue
        if lazy:
            array = mx.zeros(info.shape, dtype)
        else:
            shift = -1.0 if kind.norms_hold_one and "norm" in name else 0.0
            array = _ordered(read_float(file, info, dtype, add=shift), order)
        group_size = _group_size(array, form)
        if form.bits in (None, 16) or group_size is None or not _may_quantize(name):
            weights[name] = array
            continue
        quantized = mx.quantize(array, group_size=group_size, bits=form.bits)
        if not lazy:
            mx.eval(quantized)
        pack(name, form.bits, group_size, quantized)
    return weights, packed


def stays_packed(name: str, info: TensorInfo) -> bool:
    """Whether a tensor stays packed; mlx-lm does not pack what chooses experts."""
    return is_packed(info) and _may_quantize(name)


def _may_quantize(name: str) -> bool:
    routers = (".mlp.gate.weight", "_expert_gate.weight", "_sparse_moe.gate.weight")
    return not name.endswith(routers)


def _row_order(
    kind: Architecture, info: TensorInfo, config: dict[str, Any]
) -> mx.array | None:
    """The order that undoes the interleaving of q or k; ``None``: rows stay."""
    part = re.fullmatch(r"blk\.\d+\.(attn_[qk])\.(weight|bias)", info.name)
    if part is None or not kind.interleaved or kind.traditional:
        return None
    size = config["head_dim"]
    within = mx.concatenate([mx.arange(0, size, 2), mx.arange(1, size, 2)])
    rows = info.shape[0] if part[2] == "weight" else info.shape[-1]
    return (mx.arange(0, rows, size)[:, None] + within).reshape(-1)


def _ordered(array: mx.array, order: mx.array | None) -> mx.array:
    if order is None:
        return array
    array = array[order]
    mx.eval(array)
    return array


def _group_size(array: mx.array, form: WeightFormat) -> int | None:
    """The first group size to try that divides a matrix's rows; ``None``: none does."""
    if array.ndim not in (2, 3):
        return None
    sizes = (form.group_size, GROUP_SIZE)
    return next((size for size in sizes if array.shape[-1] % size == 0), None)


def quantization_entry(packed: dict[str, Quantization]) -> dict[str, Any]:
    """``config["quantization"]``: the commonest packing, and layers with another."""
    common = Counter(packed.values()).most_common(1)[0][0]
    entry: dict[str, Any] = {"group_size": common.group_size, "bits": common.bits}
    for layer, kind in packed.items():
        if kind != common:
            entry[layer] = {"group_size": kind.group_size, "bits": kind.bits}
    return entry


def packing_note(file: GGUFFile) -> str | None:
    """A note on the types that change; ``None``: all stay as they are in the file."""
    types = {
        info.type_name for info in file.tensors.values() if len(info.shape) in (2, 3)
    }
    changed = [
        f"{name} is packed in {REPACKED_BITS[name]} bits"
        for name in sorted(types & REPACKED_BITS.keys())
    ]
    quantized = types - PACKED_BITS.keys() - {"F32", "F16", "BF16"}
    changed += [f"{name} becomes floats" for name in sorted(quantized)]
    if not changed:
        return None
    if same := sorted(types & SAME_BITS.keys()):
        changed.append(f"as in the file: {', '.join(same)}")
    return "; ".join(changed)


def build_model(
    file: GGUFFile, config: dict[str, Any], form: WeightFormat, *, lazy: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The file's model, evaluated, and its configuration with its packing.

    Args:
        file: the file that has the weights.
        config: as :func:`~specdec.models.gguf.config.build_config` returns it.
        form: the format of the model's weights.
        lazy: read no weights; shapes and types are the same.

    Raises:
        UnsupportedModelError: a part of the model is not supported.
        ModelError: the file lacks weights or has some of a wrong shape.
    """
    if not lazy and form.as_stored and (note := packing_note(file)):
        log.info("%s: %s", file.path, note)
    weights, packed = read_weights(file, config, form, lazy=lazy)
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
