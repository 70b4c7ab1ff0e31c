"""Applies LoRA adapters, as mlx-lm trains them, to a loaded model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_adapters

from ..errors import ModelError
from ..utils.data_files import DataError, read_json
from ..utils.files import NOT_PLAIN
from ..utils.printable import shorten
from ..utils.validation import Int, Number, check, table
from .layers import arrays_of

_KEYS = table({}, lora_parameters=table({}, rank=Int, scale=Number))
_CONFIG, _WEIGHTS = "adapter_config.json", "adapters.safetensors"
# Names of arrays that an adapter adds to a layer.
_ARRAYS = ("lora_a", "lora_b", "m")
# The largest rank that an adapter may have. Known adapters have a hundredth of it.
_MOST_RANK = 1 << 14
# A change of a layer's outputs, relative to the largest, that float32 does not show.
_NOTHING = 1e-9


def adapt(model: nn.Module, adapter_path: str | os.PathLike[str]) -> None:
    """Apply the adapter in a folder to ``model``, in place; nothing is computed.

    It may be LoRA, DoRA or a full fine-tune, as ``mlx_lm.lora`` writes them. It is not
    fused into the weights, so that the arithmetic is mlx-lm's own.

    Raises:
        ModelError: there is no adapter, it is damaged, or it was trained on another
            model.
    """
    folder = Path(os.path.expanduser(adapter_path))
    full = _check(folder).get("fine_tune_type") == "full"
    try:
        load_adapters(model, str(folder))
    except Exception as error:  # its files may say anything
        why = shorten(error) or type(error).__name__
        raise ModelError(
            f"adapter {folder} does not fit the model ({why}): give the model that it "
            "was trained on"
        ) from error
    model.eval()
    _check_whole(model, folder, whole=full)


def _check_whole(model: nn.Module, folder: Path, *, whole: bool) -> None:
    """Refuse weights that leave a part of the adapter, or all of it, untrained.

    mlx-lm loads any subset. Without ``lora_b`` a layer stays as it was; without
    ``lora_a`` it is multiplied by random numbers.
    """
    stored: Any = mx.load(str(folder / _WEIGHTS))
    wanted = [n for n, _ in arrays_of(model) if n.rpartition(".")[2] in _ARRAYS]
    lacking = [] if whole else sorted(set(wanted) - stored.keys())
    if lacking or not stored:
        what = f"{lacking[0]} is missing" if lacking else "it has none"
        raise ModelError(
            f"adapter {folder} does not hold what its {_CONFIG} names (of its arrays "
            f"{what}): train it again, or copy the whole folder"
        )
    for name, array in stored.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ModelError(
                f"adapter {folder}: {name} has no floating-point numbers: train it "
                "again"
            )
        if name in wanted and not mx.isfinite(array).all().item():
            raise ModelError(
                f"adapter {folder}: {name} holds NaN or infinity: train it again"
            )
    adapted = [layer for _, layer in model.named_modules() if "lora_b" in layer]
    if adapted and not any(map(_changes, adapted)):
        raise ModelError(
            f"adapter {folder} changes nothing (its scale or one matrix of each pair "
            "is 0 or too small): leave it out, or train it"
        )


def _changes(layer: Any) -> bool:
    """Whether a layer with an adapter computes other numbers than without."""
    if "embedding" in layer:
        base, arguments = layer.embedding, [mx.arange(8)]
    else:
        base, arguments = layer.linear, []
        shape: tuple[int, ...] = (8, layer.lora_a.shape[0])
        if layer.lora_a.ndim == 3:  # of experts
            experts, _, columns = layer.lora_a.shape
            shape, arguments = (experts, 1, 1, columns), [mx.arange(experts)[:, None]]
        numbers = mx.random.normal(shape, key=mx.random.key(0))
        dtype = base.get("scales", base.weight).dtype
        arguments = [numbers.astype(dtype), *arguments]
    try:
        without = base(*arguments).astype(mx.float32)
        change = layer(*arguments).astype(mx.float32) - without
        return bool((mx.abs(change).max() > _NOTHING * mx.abs(without).max()).item())
    except (RuntimeError, ValueError):  # the device cannot compute with its type
        return True


def _check(folder: Path) -> dict[str, Any]:
    """An adapter's configuration, if mlx-lm can read it and it changes the model."""
    for name in (_CONFIG, _WEIGHTS):
        path = folder / name
        if not path.exists():
            raise ModelError(
                f"no adapter in {folder}: there is no {name}; give the folder that "
                "mlx_lm.lora --adapter-path wrote"
            )
        if not path.is_file():
            raise ModelError(f"{path}: {NOT_PLAIN}: give a folder of mlx_lm.lora")
    path = folder / _CONFIG
    try:
        config: dict[str, Any] = check(_KEYS, read_json(path))
        lora = config.get("lora_parameters", {})
        rank = lora.get("rank", 1)
    except DataError as error:
        raise ModelError(f"{path} cannot be read ({error}): train it again") from error
    if not 1 <= rank <= _MOST_RANK:
        raise ModelError(f"{path} says rank is {rank}: train it again")
    return config
