"""What is kept of a prefix, as both tiers know it, and which of it serves a prompt.

Two kinds. A *block* holds, of every linear cache, the columns of the tokens
``start .. end - 1``; it serves any prefix that ends within it, by slicing. A
*ring* holds the rings of every ring cache as they are after ``end`` tokens; it
serves that end, and the ``slack`` ends before it, for which it still holds the
window. No mlx here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Literal, Protocol, TypeVar

from .radix import Match

Kind = Literal["block", "ring"]
KINDS: tuple[Kind, ...] = ("block", "ring")

# One of the nearest entries after a point has its block; rings may be further.
_BENEATH = 64


class Entry(Protocol):
    """A block or a ring, wherever it lies."""

    @property
    def kind(self) -> Kind: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def slack(self) -> int: ...


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True)
class Plan(Generic[E]):
    """The entries from which the first ``length`` tokens can be restored."""

    length: int
    blocks: tuple[E, ...] = ()
    ring: E | None = None


def plan(found: Iterable[tuple[E, int]], *, linear: bool, rings: bool) -> Plan[E]:
    """The longest prefix that entries serve.

    Args:
        found: entries, each with the number of tokens that it shares with the
            prompt, counted from the first token on. Of those that serve equally
            well the first is taken.
        linear, rings: which kinds of caches the model has; one or both.
    """
    found = list(found)
    chain: list[E] = []
    length = 0
    if linear:
        length, chain = chained(found)
    ring = None
    if rings:
        longest, length = length, 0
        for entry, shared in found:
            end = min(shared, entry.end)
            if linear:
                end = min(end, longest)
            if entry.kind == "ring" and end > length and end >= entry.end - entry.slack:
                ring, length = entry, end
    blocks = tuple(entry for entry in chain if entry.start < length)
    return Plan(length, blocks, ring)


def chained(found: Iterable[tuple[E, int]]) -> tuple[int, list[E]]:
    """How far blocks follow each other from the first token on, and which."""
    best: dict[int, tuple[int, E]] = {}
    for entry, shared in found:
        end = min(shared, entry.end)
        if entry.kind != "block" or end <= entry.start:
            continue
        if entry.start not in best or end > best[entry.start][0]:
            best[entry.start] = end, entry
    chain: list[E] = []
    length = 0
    while length in best:
        length, entry = best.pop(length)
        chain.append(entry)
    return length, chain


def reached(match: Match[dict[Kind, E]]) -> Iterator[tuple[E, int]]:
    """Entries that a tier has along a path, each with the tokens that it shares.

    Paths are (signature, token, token, ...); the entries that end at a place are
    its node's value. After the point where the path leaves the tree, every entry
    shares as much as the next, and only the nearest are looked at.
    """
    for node in match.passed:
        for entry in (node.value or {}).values():
            yield entry, entry.end
    if match.length <= 1:  # no token
        return
    for node in islice(match.beneath(), _BENEATH):
        for entry in (node.value or {}).values():
            yield entry, match.length - 1


def block_start(end: int, block_size: int) -> int:
    """Where the block that ends with ``end`` tokens begins."""
    return (end - 1) // block_size * block_size


def salted(signature: str, salt: str | None) -> str:
    """What the entries of requests with a salt begin with: their own signature."""
    if salt is None:
        return signature
    text = f"{signature} salt {salt}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def place_key(parent: str, tokens: Sequence[int | str]) -> str:
    """The name of a place: a hash of the one before it and of the tokens between.

    The first parent is the signature of the model, so that a key names all
    tokens up to a place, and the model.
    """
    text = f"{parent} {' '.join(map(str, tokens))}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
