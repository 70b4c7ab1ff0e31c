"""Entries of both tiers, and the choice of entries that serve a prompt.

There are two kinds. A *block* holds the columns of the tokens ``start .. end - 1`` of
every linear cache. It serves any prefix that ends within it, by slicing. A *ring* holds
the rings of every ring cache as they are after ``end`` tokens. It serves that end, and
the ``slack`` ends before it, for which it still holds the window. This module needs no
mlx.
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

# Entries to look at beneath a point: one of the nearest has its block; rings may lie
# deeper.
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


def plan(entries: Iterable[tuple[E, int]], *, linear: bool, rings: bool) -> Plan[E]:
    """The longest prefix that entries serve.

    Args:
        entries: each with the number of first tokens that it shares with the
            prompt. The first of equally good entries is taken.
        linear, rings: which kinds of caches the model has; one or both.
    """
    entries = list(entries)
    chain: list[E] = []
    length = 0
    if linear:
        length, chain = chained(entries)
    ring = None
    if rings:
        longest, length = length, 0
        for entry, shared in entries:
            end = min(shared, entry.end)
            if linear:
                end = min(end, longest)
            if entry.kind == "ring" and end > length and end >= entry.end - entry.slack:
                ring, length = entry, end
    blocks = tuple(entry for entry in chain if entry.start < length)
    return Plan(length, blocks, ring)


def chained(entries: Iterable[tuple[E, int]]) -> tuple[int, list[E]]:
    """How many first tokens blocks hold without a gap, and those blocks."""
    best: dict[int, tuple[int, E]] = {}
    for entry, shared in entries:
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
    """Entries of a tier along a path, each with the number of tokens it shares.

    Paths are (signature, token, token, ...); the entries that end at a place are its
    node's value. Beneath the point where the path leaves the tree, all entries share
    equally many tokens, and only the nearest are looked at.
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
    """The start of the block that ends after ``end`` tokens."""
    return (end - 1) // block_size * block_size


def apart(signature: str, kind: Literal["salt", "client"], name: str | None) -> str:
    """The signature of entries that are apart from others.

    Those of a salt are apart from all prompts, a client's answers from the prompts that
    others share. Without a name it is ``signature`` itself.
    """
    if name is None:
        return signature
    text = f"{signature} {kind} {name}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def place_key(parent: str, tokens: Sequence[int | str]) -> str:
    """The name of a place: a hash of its parent's name and the tokens between.

    The first parent is the model's signature, so that a key identifies the model and
    all tokens up to the place.
    """
    text = f"{parent} {' '.join(map(str, tokens))}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
