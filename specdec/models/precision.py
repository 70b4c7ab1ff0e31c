"""The number format of a model's weights: casting, dequantizing, quantizing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..cuda.modules import leaves_of
from ..errors import ConfigError, UnsupportedModelError
from .layers import arrays_of

DTYPES = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
}
_GROUP_SIZES = (64, 32)
# Quantized layer -> the layer that holds the same matrix in floats.
_FLOAT_LAYERS: dict[type, type] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
}


def parse_dtype(name: str | None) -> mx.Dtype | None:
    """The float type of that name; ``None`` (as stored) stays ``None``.

    Raises:
        ConfigError: another name.
    """
    if name is None:
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}: it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cast(model: nn.Module, dtype: mx.Dtype, *, lazy: bool = False) -> None:
    """Cast every floating weight to ``dtype``, after dequantizing quantized layers.

    This happens in place and layer by layer. Other weights stay, and so do weights that
    the model itself excludes from casting. ``lazy``, here and below, computes nothing,
    but shapes and types are those of the result.

    Raises:
        UnsupportedModelError: a quantized layer of a kind that is not known.
    """
    layers = leaves_of(model)
    while layers:  # popped, so that each packed layer can go
        path, layer = layers.pop()
        if _is_quantized(layer):
            _replace(model, path, _dequantized(layer, dtype, lazy=lazy))
        del layer
    _cast_floats(model, dtype, lazy=lazy)


def widen_packed(model: nn.Module, *, lazy: bool = False) -> None:
    """Let a quantized model compute in float32, with unchanged packed weights.

    This is for MLX's CPU backend, whose product with packed weights takes 8 to 40 times
    as long with 16-bit scales. Widening 16-bit floats is exact, so the weights are
    the same as on every other backend.
    """
    if any(_is_quantized(layer) for _, layer in leaves_of(model)):
        _cast_floats(model, mx.float32, lazy=lazy)


def _cast_floats(model: nn.Module, dtype: mx.Dtype, *, lazy: bool) -> None:
    """Cast floating weights one by one, except those that the model excludes."""
    may_cast = predicate(model, "cast_predicate")
    arrays = arrays_of(model)
    while arrays:
        path, array = arrays.pop()
        floating = mx.issubdtype(array.dtype, mx.floating)
        if floating and array.dtype != dtype and may_cast(path):
            array = array.astype(dtype)
            if not lazy:
                mx.eval(array)
            model.update(tree_unflatten([(path, array)]))


def predicate(model: nn.Module, name: str) -> Callable[..., Any]:
    """The model's own choice of parts to cast or quantize; by default all parts."""
    return getattr(model, name, None) or (lambda *part: True)


def quantized_copy(
    model: nn.Module, bits: int, *, lazy: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """A second model with the same weights in ``bits`` bits, and how it is packed.

    It is made layer by layer: besides the two models, one layer is in memory at a time.
    Groups have 64 columns if that divides the rows, otherwise 32. Other layers stay as
    they are and share their arrays with ``model``, which does not change.

    Returns:
        The copy and its ``config["quantization"]``.

    Raises:
        UnsupportedModelError: a quantized layer of a kind that is not known.
    """
    draft: nn.Module = copy.deepcopy(model)  # MLX shares the arrays' memory
    entry: dict[str, Any] = {"group_size": _GROUP_SIZES[0], "bits": bits}
    may_quantize = predicate(model, "quant_predicate")
    for path, original in leaves_of(draft):
        layer = original
        if may_quantize(path, layer) is False:
            continue
        if _is_quantized(layer):
            layer = _dequantized(layer, _float_type(layer), lazy=lazy)
        elif not hasattr(layer, "to_quantized"):
            continue
        columns = layer.weight.shape[-1]
        group = next((size for size in _GROUP_SIZES if columns % size == 0), None)
        if group is None:
            entry[path] = False
        else:
            layer = layer.to_quantized(group_size=group, bits=bits)
            layer.train(original.training)  # MLX's new layers train
            if not lazy:
                mx.eval(layer.parameters())
            if group != _GROUP_SIZES[0]:
                entry[path] = {"group_size": group, "bits": bits}
        _replace(draft, path, layer)
    return draft, entry


def _is_quantized(layer: nn.Module) -> bool:
    return "scales" in layer and hasattr(layer, "bits")


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    model.update_modules(tree_unflatten([(path, layer)]))


def _dequantized(layer: Any, dtype: mx.Dtype, *, lazy: bool) -> Any:
    """The layer with its matrix in ``dtype``, evaluated unless ``lazy``.

    Raises:
        UnsupportedModelError: a quantized layer of a kind that is not known.
    """
    kind: Any = _FLOAT_LAYERS.get(getattr(type(layer), "plain", type(layer)))
    if kind is None:
        raise UnsupportedModelError(
            f"a quantized layer of type {type(layer).__name__} cannot be "
            "dequantized: load the model as stored (no dtype, no self: draft)"
        )
    scales, biases = layer.scales, layer.get("biases")
    if biases is not None:
        # In float32, so that the result is rounded once.
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    plain = kind.__new__(kind)
    nn.Module.__init__(plain)
    plain.weight = mx.dequantize(
        layer.weight,
        scales,
        biases,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    ).astype(dtype)
    if "bias" in layer:
        plain.bias = layer.bias.astype(dtype)
    plain.train(layer.training)
    if not lazy:
        mx.eval(plain.parameters())
    return plain


def _float_type(layer: Any) -> mx.Dtype:
    """The type that a quantized layer computes in."""
    dtype: mx.Dtype = layer.scales.dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16
