"""The target's hidden states where there is something to learn, computed once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from .blocks import Block


def states_at(model: nn.Module, block: Block) -> mx.array:
    """Hidden states after the last norm at a block's positions, shape (N, D).

    Args:
        model: a text model.
    """
    states: mx.array = model["model"](mx.array(block.tokens))
    return states.reshape(-1, states.shape[-1])[mx.array(block.positions)]


class TargetStates:
    """What the target makes of blocks.

    A state is what the head turns into logits: with it, the distribution over the
    whole vocabulary costs one product, and takes as many bytes as a token's
    embedding. So the target runs once over the text, however often that is learnt.

    Args:
        model: the target's text model.
        blocks: in which it looks at tokens.
        budget: most bytes to keep; what is beyond is computed every time.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], *, budget: int):
        self._model = model
        self._blocks = blocks
        self._left = budget
        self._kept: dict[int, mx.array] = {}

    def of(self, index: int) -> mx.array:
        """The states of a block's positions, shape (N, D)."""
        if index in self._kept:
            return self._kept[index]
        found = states_at(self._model, self._blocks[index])
        if found.nbytes <= self._left:
            self._left -= found.nbytes
            mx.eval(found)
            self._kept[index] = found
        return found
