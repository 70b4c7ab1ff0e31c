"""Applies LoRA adapters, as mlx-lm trains them, to a loaded model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_adapters

from ..errors import ModelError
from ..utils.data_files import DataError, check_shape, read_json
from ..utils.files import NOT_PLAIN
from ..utils.printable import shorten
from .layers import arrays_of

_CONFIG, _WEIGHTS = "adapter_config.json", "adapters.safetensors"
# Names of arrays that an adapter adds to a layer.
_ARRAYS = ("lora_a", "lora_b", "m")
# The largest rank that an adapter may have. Known adapters have a hundredth of it.
_MOST_RANK = 1 << 14


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
    _check_whole(model, folder, whole=full)
    model.eval()


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
    odd = [
        n for n, array in stored.items() if not mx.issubdtype(array.dtype, mx.floating)
    ]
    if odd:
        raise ModelError(
            f"adapter {folder}: {odd[0]} has no floating-point numbers: train it again"
        )
    ends = ("lora_a", "lora_b")
    pairs = {n.rpartition(".")[0] for n in wanted if n.endswith(ends)}
    if len(pairs) * 2 == len(wanted) and not any(
        mx.all(mx.stack([stored[f"{layer}.{end}"].any() for end in ends])).item()
        for layer in pairs
    ):
        raise ModelError(
            f"adapter {folder} changes nothing (one matrix of each pair is 0): leave "
            "it out, or train it"
        )


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
        shape = {"lora_parameters?": {"rank?": int, "scale?": float}}
        config: dict[str, Any] = check_shape(read_json(path), shape)
        lora = config.get("lora_parameters", {})
        rank = lora.get("rank", 1)
    except DataError as error:
        raise ModelError(f"{path} cannot be read ({error}): train it again") from error
    if not 1 <= rank <= _MOST_RANK:
        raise ModelError(f"{path} says rank is {rank}: train it again")
    if lora.get("scale") == 0:
        raise ModelError(
            f"{path} says scale is 0, so that the adapter changes nothing: leave the "
            "adapter out, or train it with another scale"
        )
    return config
