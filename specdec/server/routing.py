"""Chooses the replica for a request: one that has its prefix and is not too busy.

No mlx here.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

#: A line of Claude Code's system prompt that differs in every request. It is meant for
#: Anthropic's service; with it, no two prompts would begin alike.
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")

#: Characters in a block, and the most blocks that are looked up of a prompt.
_BLOCK = 512
_MOST_BLOCKS = 256
#: Blocks that are remembered for each replica: 16 million characters.
_KEPT = 1 << 15
#: The most requests that a replica may run, as a multiple of the mean.
_IMBALANCE = 1.25
#: Keys of a body that hold its prompt, in the order of chat templates.
_PARTS = ("instructions", "system", "tools", "messages", "input", "prompt")

Blocks = Sequence[int]


@dataclass(frozen=True)
class Question:
    """What the router knows of a request.

    Args:
        blocks: of its prompt's beginning.
        model: the model that it names.
    """

    blocks: Blocks = ()
    model: str | None = None


def blocks_of(body: Any) -> Blocks:
    """Hashes of a prompt's beginning: one for each block and all blocks before it."""
    if not isinstance(body, Mapping):
        return ()
    text, size = [], 0
    for part in _PARTS:
        for piece in _pieces(body.get(part)):
            text.append(piece)
            size += len(piece) + 1
            if size > _BLOCK * _MOST_BLOCKS:
                break
    joined, blocks, number = "\0".join(text), [], 0
    for end in range(_BLOCK, min(len(joined), _BLOCK * _MOST_BLOCKS) + 1, _BLOCK):
        number = hash((number, joined[end - _BLOCK : end]))
        blocks.append(number)
    return blocks


def _pieces(value: Any) -> Iterator[str]:
    """The texts in a value, in a fixed order."""
    if isinstance(value, str):
        yield BILLING.sub("", value, 1)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield key
            yield from _pieces(value[key])
    elif isinstance(value, list):
        for each in value:
            yield from _pieces(each)
    elif value is not None:
        yield str(value)


class ReplicaLoad:
    """A replica's load, and the prompts that it has received.

    Attributes:
        running: how many requests it is answering.
        last: a counter that says how recently it was chosen.
    """

    def __init__(self) -> None:
        self.running = 0
        self.last = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def matching(self, blocks: Blocks) -> int:
        """How many blocks at a prompt's beginning it has received before."""
        matching = 0
        for block in blocks:
            if block not in self._blocks:
                break
            matching += 1
        return matching

    def note(self, blocks: Blocks) -> None:
        """Note a prompt that it receives, and forget the oldest blocks."""
        # The first block is noted last, as later blocks are useless without it.
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)

    def forget(self) -> None:
        """Note that it was restarted, and has no prompts."""
        self._blocks.clear()


P = TypeVar("P", bound=ReplicaLoad)


def choose(replicas: Sequence[P], blocks: Blocks) -> P:
    """The replica that has received most of a prompt's beginning, or the least busy.

    A replica that runs more than 1.25 times the mean is left out, so that a prefix that
    all requests share does not keep the other replicas idle.
    """
    total = sum(each.running for each in replicas)
    most = math.ceil(_IMBALANCE * (total + 1) / len(replicas))
    chosen = max(
        (each for each in replicas if each.running < most),
        key=lambda each: (
            each.matching(blocks),
            -each.running,
            -each.last,
        ),
    )
    chosen.note(blocks)
    chosen.last = 1 + max(each.last for each in replicas)
    return chosen
