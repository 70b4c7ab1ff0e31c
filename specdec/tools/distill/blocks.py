"""Documents as blocks of fixed shapes, and the order in which blocks are learnt.

Each document has a row of its own, as in decoding. Rows are padded on the right, which
a causal model does not see. They are padded to a multiple of 128 tokens, so that there
are few shapes, all of which have fast attention kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .corpus import GREEDY, TEXT, Document
from .options import ROW_MULTIPLE

#: The longest row; longer documents lose their end.
LONGEST_ROW = 512
# Weight of a prompt's position; an answer's position has weight 1.
_PROMPT_WEIGHT = 0.2


@dataclass(frozen=True, eq=False)
class Block:
    """Rows that are learnt together.

    Args:
        tokens: shape (B, L), int32.
        positions: positions to learn from, as indices in the flattened rows, shape
            (N,), int32; padding of weight 0 follows the last one.
        weights: weights of the positions, shape (N,), float32.
        num_tokens: tokens of documents, without padding.
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    num_tokens: int


def make_blocks(
    documents: Sequence[Document],
    block_tokens: int,
    chunk: int,
    *,
    seed: int,
    prompt_weight: float = _PROMPT_WEIGHT,
) -> list[Block]:
    """Put all documents, in random order, into blocks of rows of similar length.

    Args:
        block_tokens: about the number of rows of a block times their length.
        chunk: positions whose loss is computed together; the number of a block's
            positions is a multiple of it.
    """
    common = _common_prefix(documents)
    order = np.random.default_rng(seed).permutation(len(documents))
    buckets: dict[int, list[Document]] = {}
    for index in order:
        document = documents[index]
        length = min(len(document.tokens) - 1, LONGEST_ROW)
        if length < 1:
            continue
        row = -(-length // ROW_MULTIPLE) * ROW_MULTIPLE
        buckets.setdefault(min(row, LONGEST_ROW), []).append(document)
    # Longest first: the last block of a bucket is filled with shorter documents.
    queue = [(row, d) for row in sorted(buckets, reverse=True) for d in buckets[row]]
    blocks = []
    first = 0
    while first < len(queue):
        row = queue[first][0]
        num_rows = max(1, block_tokens // row)
        part = [document for _, document in queue[first : first + num_rows]]
        blocks.append(_block(part, (num_rows, row), chunk, prompt_weight, common))
        first += num_rows
    return blocks


def block_order(num_blocks: int, step: int, *, seed: int) -> int:
    """The index of a step's block; each epoch has all blocks once, in random order."""
    epoch, index = divmod(step, num_blocks)
    return int(np.random.default_rng((seed, epoch)).permutation(num_blocks)[index])


def _block(
    documents: Sequence[Document],
    shape: tuple[int, int],
    chunk: int,
    prompt_weight: float,
    common: int,
) -> Block:
    tokens, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    total = 0
    for i, document in enumerate(documents):
        inputs = document.tokens[:-1][: shape[1]]
        tokens[i, : len(inputs)] = inputs
        total += len(inputs)
        # The state at a position predicts the token after it.
        answer = document.prompt_length - 1
        weights[i, answer : len(inputs)] = 1
        if document.kind in (GREEDY, TEXT):  # sampled ones repeat a greedy one's prompt
            weights[i, common - 1 : answer] = prompt_weight
    positions = np.flatnonzero(weights.reshape(-1)).astype(np.int32)
    padding = -len(positions) % chunk
    # Padding points at position 0, with weight 0.
    padded = np.concatenate([positions, np.zeros(padding, np.int32)])
    padded_weights = np.concatenate(
        [weights.reshape(-1)[positions], np.zeros(padding, np.float32)]
    )
    return Block(tokens, padded, padded_weights, total)


def _common_prefix(documents: Sequence[Document]) -> int:
    """The length, at least 1, of the beginning that all documents but texts share."""
    chats = [d.tokens[: d.prompt_length] for d in documents if d.kind != TEXT]
    if not chats:
        return 1
    low, high = min(chats), max(chats)
    same = next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
        min(len(low), len(high)),
    )
    return max(same, 1)
