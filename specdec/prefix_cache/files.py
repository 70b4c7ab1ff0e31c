"""Entries as files: their names and headers.

A file is a safetensors container, ``KIND-PLACE-DIGEST.safetensors``. PLACE is the
hash of the signature and all tokens (:func:`specdec.prefix_cache.entries.place_key`),
DIGEST the hash of the whole file, which is checked before its arrays are used. The
header holds what PLACE was made of. This module needs no mlx.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.files import open_plain, replace_file
from .entries import KINDS, Kind, place_key

FORMAT = "specdec prefix"
VERSION = "1"

_HASH = re.compile("[0-9a-f]{32}")
_NAME = re.compile(
    rf"({'|'.join(KINDS)})-([0-9a-f]{{32}})-([0-9a-f]{{32}})\.safetensors"
)
_MAX_HEADER = 1 << 24  # hundreds of layers need a hundredth of it

_NOT_OURS = "its header is not one of specdec's"


class DamagedError(Exception):
    """A file is not what its name says; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """An array in a file: its type, its shape and the range of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What an entry's file says about it.

    ``parent`` names the place where its tokens begin. ``slack`` is 0 for a block.
    """

    signature: str
    model: str
    parent: str
    tokens: tuple[int, ...]
    start: int
    slack: int

    @property
    def end(self) -> int:
        """Tokens from the first one to the end of this entry."""
        return self.start + len(self.tokens)

    @property
    def is_first(self) -> bool:
        """Whether it begins at the first token."""
        return self.parent == self.signature

    def fields(self) -> dict[str, str]:
        """The header as metadata of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "signature": self.signature,
            "model": self.model,
            "parent": self.parent,
            "start": str(self.start),
            "slack": str(self.slack),
            "tokens": " ".join(map(str, self.tokens)),
        }


@dataclass(frozen=True, kw_only=True)
class File(Header):
    """An entry on disk."""

    name: str
    kind: Kind
    place: str
    nbytes: int


def is_entry(name: str) -> bool:
    """Whether ``name`` is the file name of an entry."""
    return _NAME.fullmatch(name) is not None


def digest(data: bytes) -> str:
    """The hash of a whole file (SHA-256, which processors compute fastest)."""
    return hashlib.sha256(data).hexdigest()[:32]


def read_header(path: Path) -> File:
    """Read the header of the file at ``path``; its arrays are not read.

    Raises:
        DamagedError: it is not an entry of this format and version, or its tokens
            do not lead to the place in its name.
        OSError: it cannot be read, or is no plain file.
    """
    parts = _NAME.fullmatch(path.name)
    if parts is None:
        raise DamagedError("its name is not that of an entry")
    with open_plain(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(nbytes - 8, _MAX_HEADER):
            raise DamagedError("it is cut short, or not a safetensors file")
        header = file.read(length)
    fields, arrays = _parsed(header)
    if fields.get("format") != FORMAT or fields.get("version") != VERSION:
        raise DamagedError("it is of another format or version")
    try:
        entry = File(
            name=path.name,
            kind="block" if parts[1] == "block" else "ring",
            place=parts[2],
            parent=fields["parent"],
            signature=fields["signature"],
            model=fields["model"],
            tokens=tuple(map(int, fields["tokens"].split())),
            start=int(fields["start"]),
            slack=int(fields["slack"]),
            nbytes=nbytes,
        )
    except (ValueError, KeyError) as error:
        raise DamagedError(_NOT_OURS) from error
    if fields != entry.fields():  # numbers in another form, or more fields
        raise DamagedError(_NOT_OURS)
    if not _is_possible(entry):
        raise DamagedError("it cannot lie where it says")
    # A client's first entry after shared ones says whose it is.
    ways: tuple[tuple[int | str, ...], ...] = (), (entry.signature,)
    keys = [place_key(entry.parent, (*way, *entry.tokens)) for way in ways]
    if entry.place not in keys or not entry.tokens:
        raise DamagedError("its tokens do not lead to its place")
    if nbytes != 8 + length + max((a.end for a in arrays.values()), default=0):
        raise DamagedError("it is cut short, or longer than it says")
    return entry


def tensors(data: bytes) -> dict[str, Tensor]:
    """The arrays in the contents of an entry, by name.

    They follow each other without a gap. The caller compares their types and shapes
    with their bytes.

    Raises:
        DamagedError: the contents do not describe their arrays.
    """
    first = 8 + int.from_bytes(data[:8], "little")
    _, entries = _parsed(data[8:first])
    arrays = {
        name: Tensor(a.dtype, a.shape, first + a.begin, first + a.end)
        for name, a in entries.items()
    }
    if max((a.end for a in arrays.values()), default=first) != len(data):
        raise DamagedError("it is cut short, or longer than it says")
    return arrays


def _is_possible(file: File) -> bool:
    """Whether an entry of its kind can have its hashes, start and slack."""
    most = file.end if file.kind == "ring" else 0
    return (
        _HASH.fullmatch(file.parent) is not None
        and _HASH.fullmatch(file.signature) is not None
        and file.start >= 0
        and file.is_first == (file.start == 0)
        and 0 <= file.slack <= most
    )


def _parsed(header: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and arrays of a safetensors header; bytes count from its end.

    Raises:
        DamagedError: it is not a safetensors header.
    """
    try:
        # A file may hold any text, nested to any depth.
        named = json.loads(header)
        fields = named.pop("__metadata__")
        entries = {name: _tensor(entry) for name, entry in named.items()}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise DamagedError(_NOT_OURS) from error
    if not isinstance(fields, dict):
        raise DamagedError(_NOT_OURS)
    if not all(isinstance(text, str) for text in fields.values()):
        raise DamagedError(_NOT_OURS)
    end = 0
    for tensor in sorted(entries.values(), key=lambda a: (a.begin, a.end)):
        if tensor.begin != end or tensor.end < end:
            raise DamagedError("its arrays do not follow each other")
        end = tensor.end
    return fields, entries


def _tensor(entry: Any) -> Tensor:
    dtype, shape = entry["dtype"], entry["shape"]
    begin, end = entry["data_offsets"]
    numbers = [*shape, begin, end]
    if type(dtype) is not str or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError("not an array")
    return Tensor(dtype, tuple(shape), begin, end)


def read_verified(path: Path) -> bytes:
    """The whole file, after a check against the digest in its name.

    Raises:
        DamagedError: its contents do not match the digest.
        OSError: it cannot be read, or is no plain file.
    """
    with open_plain(path) as file:
        data = file.read()
    parts = _NAME.fullmatch(path.name)
    if parts is None or digest(data) != parts[3]:
        raise DamagedError("its contents do not match its name")
    return data


def write_entry(folder: Path, kind: Kind, place: str, data: bytes) -> str:
    """Write an entry whole or not at all, for its owner alone; return its name.

    Raises:
        OSError: it could not be written; nothing is left.
    """
    name = f"{kind}-{place}-{digest(data)}.safetensors"
    replace_file(folder / name, data, private=True)
    return name
