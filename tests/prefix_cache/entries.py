"""Entries without a model: a chain of blocks, with contents that differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from specdec.prefix_cache.disk import DiskTier, Job
from specdec.prefix_cache.entries import place_key
from specdec.prefix_cache.files import File, header_fields

SIGNATURE = "5" * 32
SIZE = 4


def container(fields: dict[str, str], payload: bytes) -> bytes:
    """A safetensors file with one array of bytes."""
    entry = {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}
    header = json.dumps({"__metadata__": fields, "0.0": entry}).encode()
    return len(header).to_bytes(8, "little") + header + payload


def payload_of(place: str, nbytes: int = 64) -> bytes:
    """Contents that follow from the place."""
    return (bytes.fromhex(place) * (nbytes // 16 + 1))[:nbytes]


def write_chain(
    disk: DiskTier, tokens: Sequence[int], *, nbytes: int = 64, model: str = "m"
) -> list[str]:
    """Have the blocks of ``tokens`` written, as a store would; their places."""
    parent, places = SIGNATURE, []
    for start in range(0, len(tokens), SIZE):
        block = tuple(tokens[start : start + SIZE])
        place = place_key(parent, block)
        below = parent if start else None
        if disk.takes("block", place, below):
            fields = header_fields(
                signature=SIGNATURE, model=model, parent=parent,
                start=start, slack=0, tokens=block,
            )  # fmt: skip
            data = container(fields, payload_of(place, nbytes))
            disk.write(Job("block", place, below, data))
        places.append(place)
        parent = place
    return places


def served(disk: DiskTier, tokens: Sequence[int]) -> list[File]:
    """The entries that a look-up of ``tokens`` would use, in order."""
    _, found = disk.find((SIGNATURE, *tokens))
    return sorted({file for file, _ in found}, key=lambda file: file.start)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
