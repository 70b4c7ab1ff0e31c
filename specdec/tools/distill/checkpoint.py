"""Checkpoints: files with everything that the next training step depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten

from ...errors import ModelError
from ...models.layers import leaves_of
from ...utils.data_files import first_difference, parse_json, parse_table
from ...utils.validation import read_record
from .storage import read_arrays, write_arrays

FORMAT = "specdec distill checkpoint"
NAME = "checkpoint.safetensors"
BEFORE = "checkpoint-before.safetensors"


@dataclass
class Progress:
    """The progress of training.

    Args:
        step: number of steps done, which decides the data of the next step.
        tokens: tokens of documents so far.
        seconds: seconds of training so far.
        history: measurements on held-out texts so far.
    """

    step: int
    tokens: int
    seconds: float
    history: list[dict[str, Any]]


def exists(folder: Path) -> bool:
    """Whether the folder has a checkpoint to go on from."""
    return any((folder / name).exists() for name in (NAME, BEFORE))


def save(
    folder: Path,
    *,
    parameters: Any,
    optimizer: Any,
    progress: Progress,
    identity: dict[str, Any],
) -> None:
    """Write a checkpoint; the previous one is kept, too.

    Args:
        parameters, optimizer: trees of arrays.
        identity: settings that must be the same when training goes on.

    Raises:
        ModelError: the checkpoint cannot be written; the previous one is whole.
    """
    arrays = _flat("parameters", parameters) | _flat("optimizer", optimizer)
    meta = {
        "format": FORMAT,
        "identity": json.dumps(identity, sort_keys=True),
        "progress": json.dumps(progress.__dict__),
    }
    meta["digest"] = _digest(arrays, meta)
    write_arrays(folder / NAME, arrays, meta, before=folder / BEFORE)


def load(
    folder: Path,
    identity: dict[str, Any],
    *,
    like: tuple[Any, Any],
    say: Callable[[str], None],
) -> tuple[Any, Any, Progress] | None:
    """Parameters, optimizer state and progress; ``None`` without a checkpoint.

    Args:
        like: trees of parameters and optimizer state with the same names and shapes.
        say: called if the last checkpoint is damaged and the previous one is taken.
    """
    if not exists(folder):
        return None
    path, before = folder / NAME, folder / BEFORE
    try:
        return _load(path, identity, like)
    except _DamagedError as error:
        reason = str(error)
    try:
        contents = _load(before, identity, like)
    except _DamagedError as error:
        raise ModelError(
            f"{path} is damaged ({reason}): leave --resume out to begin anew"
        ) from error
    if path.exists():  # if not, a kill came between the two renames
        say(f"warning: {path} is damaged ({reason}): going on from the one before it")
    return contents


class _DamagedError(Exception):
    """A file is not a whole checkpoint; the message says why."""


def _load(
    path: Path, identity: dict[str, Any], like: tuple[Any, Any]
) -> tuple[Any, Any, Progress]:
    try:
        arrays, meta = read_arrays(path)
    except ModelError as error:
        raise _DamagedError("it cannot be read") from error
    if meta.get("format") != FORMAT:
        raise _DamagedError("it is not a checkpoint of specdec distill")
    if meta.pop("digest", None) != _digest(arrays, meta):
        raise _DamagedError("it was changed after it was written")
    try:
        known = parse_table(meta["identity"])
        progress = read_record(Progress, parse_json(meta["progress"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _DamagedError("it is of another version") from error
    if difference := first_difference(known, identity):
        key, before, now = difference
        raise ModelError(
            f"{path} was made with {key} {before}, not {now}: leave --resume out to "
            "begin anew, or use what it was made with"
        )
    wanted = _flat("parameters", like[0]) | _flat("optimizer", like[1])
    if _shapes(arrays) != _shapes(wanted):
        raise _DamagedError("it is of another version")
    trees = (
        tree_unflatten(
            [
                (name.removeprefix(kind), array)
                for name, array in arrays.items()
                if name.startswith(kind)
            ]
        )
        for kind in ("parameters.", "optimizer.")
    )
    return next(trees), next(trees), progress


def _flat(kind: str, tree: Any) -> dict[str, mx.array]:
    return {f"{kind}.{name}": array for name, array in leaves_of(tree)}


def _shapes(arrays: Mapping[str, mx.array]) -> dict[str, tuple[object, ...]]:
    return {name: (array.dtype, array.shape) for name, array in arrays.items()}


def _digest(arrays: Mapping[str, mx.array], meta: Mapping[str, str]) -> str:
    """A hash of all contents of the file."""
    digest = hashlib.sha256(repr(sorted(meta.items())).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(np.array(array)).data)
    return digest.hexdigest()
