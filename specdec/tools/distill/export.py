"""Write a draft's folder: a whole model that mlx-lm loads too, or its layers alone."""

from __future__ import annotations

import copy
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...models import LoadedModel
from ...models.draft_folder import CARD
from ...models.layers import arrays_of
from .card import readme
from .storage import write_file, write_model
from .student import Student

# The numbers of columns that can share a scale; the first is named for all layers.
_GROUP_SIZES = (64, 32)
# The embedding and the head, which choose tokens, are kept in more bits than layers.
_EMBEDDING_BITS = 8


def export(
    folder: Path,
    student: Student,
    target: LoadedModel,
    card: dict[str, Any],
    *,
    bits: int | None = None,
    alone: bool = True,
) -> None:
    """Write a draft; an earlier one in the folder is replaced.

    See :func:`specdec.tools.distill.storage.write_model` for what a kill can leave.

    Args:
        folder: the draft's folder.
        student: the draft, with weights that are not rounded.
        target: the target, whose tokenizer the draft has.
        card: the draft's card, for ``distill.json`` and ``README.md``.
        bits: bits of the layers' matrices; ``None`` leaves them unpacked.
        alone: store embedding, head and tokenizer too. Otherwise
            :func:`specdec.models.load_draft` takes them from the target.

    Raises:
        ModelError: a file cannot be written.
    """
    model, quantization = packed(student.model, bits, student.prefix)
    config = dict(student.config)
    if quantization is not None:
        config["quantization"] = quantization
        config["quantization_config"] = quantization
    weights = dict(arrays_of(model))
    if not alone:
        weights = {k: v for k, v in weights.items() if not _is_target_s(k)}
    weights = {student.prefix + k: v for k, v in weights.items()}
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, weights, {"format": "mlx"})
    # The card comes first, so that a half-replaced folder can be recognized.
    files = {**_card_files(card), "model.safetensors": buffer.getvalue()}
    if alone:
        with tempfile.TemporaryDirectory() as work:
            target.tokenizer.save_pretrained(work)
            for file in sorted(Path(work).rglob("*")):
                if file.is_file():
                    files[str(file.relative_to(work))] = file.read_bytes()
    files["config.json"] = _json(config)
    write_model(folder, files)


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """Write the card of a draft, for programs and for people.

    Raises:
        ModelError: a file cannot be written.
    """
    for name, data in _card_files(card).items():
        write_file(folder / name, data)


def _card_files(card: dict[str, Any]) -> dict[str, bytes]:
    return {CARD: _json(card), "README.md": readme(card).encode()}


def packed(
    model: nn.Module, bits: int | None, prefix: str = ""
) -> tuple[nn.Module, dict[str, Any] | None]:
    """A copy with packed matrices, and its ``quantization`` entry for ``config.json``.

    Without ``bits``, the model itself and ``None``.

    Args:
        prefix: prefix of the weights' names in that entry.
    """
    if bits is None:
        return model, None
    packed_model: nn.Module = copy.deepcopy(model)
    entry: dict[str, Any] = {"group_size": _GROUP_SIZES[0], "bits": bits}

    def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized"):
            return False
        layer_bits = max(bits, _EMBEDDING_BITS) if _is_target_s(path) else bits
        size = _group_size(layer["weight"].shape[-1])
        chosen: bool | dict[str, Any] = False
        if size is not None:
            chosen = {"group_size": size, "bits": layer_bits}
        if chosen != {"group_size": entry["group_size"], "bits": entry["bits"]}:
            entry[prefix + path] = chosen
        return chosen

    nn.quantize(packed_model, class_predicate=choose)
    return packed_model, entry


def _group_size(columns: int) -> int | None:
    """The number of columns that share a scale, or ``None``.

    It is ``None`` if none of MLX's group sizes divides the number of columns.
    """
    return next((size for size in _GROUP_SIZES if columns % size == 0), None)


def rounded(matrix: mx.array, bits: int) -> mx.array:
    """The matrix as packing rounds it, with the gradient of the matrix itself.

    This is the straight-through estimator (Bengio et al. 2013): the backward pass
    treats rounding as the identity.
    """
    size = _group_size(matrix.shape[-1])
    if size is None:
        return matrix
    packed = mx.quantize(mx.stop_gradient(matrix), group_size=size, bits=bits)
    read = mx.dequantize(*packed, group_size=size, bits=bits)
    return matrix + (read - mx.stop_gradient(matrix))


def _is_target_s(path: str) -> bool:
    return path.startswith(("model.embed_tokens", "lm_head"))


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
