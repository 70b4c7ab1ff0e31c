"""Begin with the weights of a draft that was made before, and train them further."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from ...errors import ConfigError, ModelError
from ...model_names import ModelDraft
from ...models.draft_folder import read_card
from ...models.layers import leaves_of
from ...utils.data_files import DataError, read_json, read_table
from ...utils.validation import Int, Number, check, table
from .options import DistillOptions
from .storage import read_arrays
from .student import Student

_WEIGHTS = "model.safetensors"
# The keys of a card that say what the draft looks like.
_KEYS = table(
    {
        "layers": list[Int],
        "widen": Int,
        "training": table({"tokens": Int, "seconds": Number}),
    },
    kind=str,
    form=str,
    block_size=Int,
)


def as_begun(options: DistillOptions) -> DistillOptions:
    """The options, with kind, form, block size and layers of the draft to begin with.

    Raises:
        ConfigError: ``specdec distill`` did not make the draft, or ``out`` is its
            folder.
    """
    if options.begin_with is None:
        return options
    folder = _folder(options.begin_with)
    card = read_card(folder)
    if card is None:
        raise ConfigError(
            f"{options.begin_with} is no draft that specdec distill made, and training "
            "can begin with no other: name its folder"
        )
    if options.out is not None and options.out.expanduser().resolve() == folder:
        raise ConfigError(f"out is {folder}, which training begins with: name another")
    try:
        check(_KEYS, card)
        config = read_table(folder / "config.json")
    except (OSError, DataError) as error:
        raise ModelError(f"{folder} cannot be read ({error}): make it again") from error
    layers = card["layers"]
    # A single layer, and layers that began at random, are given by their number.
    listed = ",".join(map(str, layers)) if len(layers) > 1 else ""
    of_block: dict[str, Any] = {
        n: card[n] for n in ("kind", "form", "block_size") if n in card
    }
    return replace(
        options,
        **({"kind": "layers"} | of_block),
        layers=listed or str(config.get("num_hidden_layers", 1)),
        widen=card["widen"],
    )


def take_weights(student: Student, source: str) -> dict[str, Any]:
    """Put the weights of a draft into a student of the same shape.

    Returns:
        What the new draft's card says about the old one.

    Raises:
        ModelError: the weights cannot be read, or have other shapes.
    """
    folder = _folder(source)
    arrays, _ = read_arrays(folder / _WEIGHTS)
    card: dict[str, Any] = read_card(folder) or {}
    packing = read_json(folder / "config.json").get("quantization") or {}
    arrays_of_draft = []
    for name, array in leaves_of(student.parameters):
        stored = _unpacked(arrays, student.stored_prefix + name, packing)
        if stored is None or stored.shape != array.shape:
            raise ModelError(
                f"{source} cannot be trained further: its {name} does not fit the "
                "target: name the target that it was made for"
            )
        arrays_of_draft.append((name, stored))
    student.load(tree_unflatten(arrays_of_draft))
    mx.eval(student.model.parameters())
    fields = ("command", "data", "began_with")
    earlier: dict[str, Any] = {key: card[key] for key in fields if key in card}
    earlier |= {key: card["training"][key] for key in ("tokens", "seconds")}
    digest = hashlib.sha256((folder / _WEIGHTS).read_bytes()).hexdigest()
    return {"name": Path(source).name, "digest": digest[:16], **earlier}


def _folder(source: str) -> Path:
    return Path(ModelDraft.of(source).source).expanduser().resolve()


def _unpacked(arrays: dict[str, mx.array], name: str, packing: Any) -> mx.array | None:
    """A stored array; a packed matrix is unpacked."""
    path = name.removesuffix(".weight")
    if f"{path}.scales" not in arrays:
        return arrays.get(name)
    entry = packing.get(path)
    chosen = entry if isinstance(entry, dict) else packing
    return mx.dequantize(
        arrays[name],
        arrays[f"{path}.scales"],
        arrays[f"{path}.biases"],
        group_size=chosen.get("group_size", 64),
        bits=chosen.get("bits", 4),
    )
