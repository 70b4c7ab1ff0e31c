"""Entries as files: their names, and what their headers say.

A file is a safetensors container, ``KIND-PLACE-DIGEST.safetensors``. PLACE is the
hash of the signature and all tokens (:func:`specdec.prefix_cache.entries.place_key`),
DIGEST the hash of the whole file, checked before anything of it is used. The
header says what the hashes were made of. No mlx here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..utils.files import open_plain, replace_file
from .entries import KINDS, Kind, place_key

FORMAT = "specdec prefix"
VERSION = "1"

_NAME = re.compile(
    rf"({'|'.join(KINDS)})-([0-9a-f]{{32}})-([0-9a-f]{{32}})\.safetensors"
)
_MAX_HEADER = 100_000_000  # as in the safetensors library


class DamagedError(Exception):
    """A file is not what its name says; the message says why."""


@dataclass(frozen=True)
class File:
    """An entry on disk.

    ``parent`` names the place where its tokens begin, ``slack`` is 0 for a block.
    """

    name: str
    kind: Kind
    place: str
    parent: str
    signature: str
    model: str
    tokens: tuple[int, ...]
    start: int
    slack: int
    nbytes: int

    @property
    def end(self) -> int:
        """Tokens from the first one to the end of this entry."""
        return self.start + len(self.tokens)

    @property
    def is_first(self) -> bool:
        """Whether nothing stands before it."""
        return self.parent == self.signature


def header_fields(
    *,
    signature: str,
    model: str,
    parent: str,
    start: int,
    slack: int,
    tokens: Sequence[int],
) -> dict[str, str]:
    """The metadata of an entry's file, as :func:`read_header` expects it."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "signature": signature,
        "model": model,
        "parent": parent,
        "start": str(start),
        "slack": str(slack),
        "tokens": " ".join(map(str, tokens)),
    }


def is_entry(name: str) -> bool:
    """Whether a file of that name is one of ours."""
    return _NAME.fullmatch(name) is not None


def digest(data: bytes) -> str:
    """The hash of a whole file (SHA-256: what processors do fastest)."""
    return hashlib.sha256(data).hexdigest()[:32]


def read_header(path: Path) -> File:
    """What the file at ``path`` says of itself; its arrays are not looked at.

    Raises:
        DamagedError: it is not an entry of this format and version, or its tokens
            do not lead to the place in its name.
        OSError: it cannot be read.
    """
    parts = _NAME.fullmatch(path.name)
    if parts is None:
        raise DamagedError("its name is not that of an entry")
    with open_plain(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(nbytes - 8, _MAX_HEADER):
            raise DamagedError("it is cut short, or no safetensors file")
        header = file.read(length)
    try:
        fields = json.loads(header)["__metadata__"]
        known = fields["format"] == FORMAT and fields["version"] == VERSION
        if known:
            found = File(
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError("its header is not one of specdec's") from error
    if not known:
        raise DamagedError("it is of another format or version")
    if place_key(found.parent, found.tokens) != found.place or not found.tokens:
        raise DamagedError("its tokens do not lead to its place")
    return found


def read_verified(path: Path) -> bytes:
    """The whole file, after a check against the digest in its name.

    Raises:
        DamagedError: it holds something else.
        OSError: it cannot be read.
    """
    with open_plain(path) as file:
        data = file.read()
    parts = _NAME.fullmatch(path.name)
    if parts is None or digest(data) != parts[3]:
        raise DamagedError("its contents do not match its name")
    return data


def write_entry(folder: Path, kind: Kind, place: str, data: bytes) -> str:
    """Write an entry; it is there whole, or not at all. Returns its name.

    Raises:
        OSError: it could not be written; nothing is left.
    """
    name = f"{kind}-{place}-{digest(data)}.safetensors"
    replace_file(folder / name, data)
    return name
