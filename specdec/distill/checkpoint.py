"""Training as a file: everything that the next step depends on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import ModelError
from .storage import read_arrays, write_arrays

FORMAT = "specdec distill checkpoint"
NAME = "checkpoint.safetensors"


@dataclass
class Progress:
    """How far training is.

    Args:
        step: steps done; the data of the next one follow from it.
        tokens: of documents, so far.
        seconds: of training, so far.
        history: what was measured on the way.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def save(
    folder: Path,
    *,
    parameters: Any,
    optimizer: Any,
    progress: Progress,
    identity: dict[str, Any],
) -> None:
    """Replace the checkpoint of a folder.

    Args:
        parameters, optimizer: trees of arrays.
        identity: what must be the same when training goes on.

    Raises:
        ModelError: it cannot be written; the one before is whole.
    """
    arrays = dict(_flat("parameters", parameters) + _flat("optimizer", optimizer))
    meta = {
        "format": FORMAT,
        "identity": json.dumps(identity, sort_keys=True),
        "progress": json.dumps(progress.__dict__),
    }
    write_arrays(folder / NAME, arrays, meta)


def load(folder: Path, identity: dict[str, Any]) -> tuple[Any, Any, Progress] | None:
    """Parameters, optimizer state and progress; ``None`` where there is none.

    Raises:
        ModelError: it cannot be read, or is of other options or data.
    """
    path = folder / NAME
    if not path.exists():
        return None
    arrays, meta = read_arrays(path)
    if meta.get("format") != FORMAT:
        raise ModelError(f"{path} is no checkpoint of specdec distill: remove it")
    known = json.loads(meta["identity"])
    for key in sorted(known.keys() | identity.keys()):
        if known.get(key) != identity.get(key):
            raise ModelError(
                f"{path} was made with {key} {known.get(key)}, not "
                f"{identity.get(key)}: leave --resume out to begin anew, or use what "
                "it was made with"
            )
    trees = []
    for kind in ("parameters", "optimizer"):
        prefix = f"{kind}."
        trees.append(
            tree_unflatten(
                [
                    (name.removeprefix(prefix), array)
                    for name, array in arrays.items()
                    if name.startswith(prefix)
                ]
            )
        )
    return trees[0], trees[1], Progress(**json.loads(meta["progress"]))


def _flat(kind: str, tree: Any) -> list[tuple[str, mx.array]]:
    leaves: Any = tree_flatten(tree)
    return [(f"{kind}.{name}", array) for name, array in leaves]
