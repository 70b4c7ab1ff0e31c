"""The target's states, how near a draft is to the target, and rounds of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ...config import EngineConfig
from ...decoder import SpecDecoder
from ...models import LoadedModel
from ...prompts import Prompt
from ...sampling_params import SamplingParams
from .blocks import Block
from .loss import ChunkedLoss
from .options import Check, go_on
from .student import Student


class TargetStates:
    """The target's states of blocks, kept for later epochs.

    The output head turns a state into logits. A state takes as many bytes as a token's
    embedding, and one product gives the distribution over the whole vocabulary. So the
    target runs over a kept block only once, however often the block is learnt.

    Args:
        student: the draft, which chooses the states that it needs.
        blocks: the blocks that the target reads.
        budget: most bytes to keep; further states are computed every time.
    """

    def __init__(self, student: Student, blocks: Sequence[Block], *, budget: int):
        self._student = student
        self._blocks = blocks
        self._left = budget
        self._kept: dict[int, mx.array] = {}

    def of(self, index: int) -> mx.array:
        """The states that the student needs for a block."""
        if index in self._kept:
            return self._kept[index]
        states = self._student.see(self._blocks[index])
        if states.nbytes <= self._left:
            self._left -= states.nbytes
            mx.eval(states)
            self._kept[index] = states
        return states


class HeldOut:
    """A set of the target's texts that the draft does not learn from.

    Args:
        name: name of the set.
        student: the draft.
        blocks: the texts; their positions are those of answers.
        budget: most bytes of the target's states to keep.
    """

    def __init__(
        self, name: str, student: Student, blocks: Sequence[Block], *, budget: int
    ):
        self.name = name
        self._student = student
        self._blocks = blocks
        self._states = TargetStates(student, blocks, budget=budget)

    def measure(self, loss: ChunkedLoss, check: Check = go_on) -> dict[str, float]:
        """Mean KL and agreement per position, each after the target's own text."""
        sums = [mx.array(0.0)] * 3
        student = self._student
        for index, block in enumerate(self._blocks):
            check()
            # Every measurement has the same draws.
            rng = np.random.default_rng(index)
            lesson = student.lesson(block, self._states.of(index), rng)
            divergence = loss.value(
                lesson.states(),
                lesson.target,
                mx.array(lesson.weights),
                student.bias_head,
            )
            new = (divergence.kl, divergence.agreed, divergence.weight)
            sums = [a + b for a, b in zip(sums, new, strict=True)]
            mx.eval(sums)
        kl, agreed, weight = (float(each) for each in sums)
        weight = max(weight, 1e-9)
        return {"kl": kl / weight, "agreement": agreed / weight, "positions": weight}


def measure_rounds(
    target: LoadedModel,
    draft: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    num_draft_tokens: int,
    max_tokens: int,
    batch_size: int,
    check: Check = go_on,
) -> dict[str, Any]:
    """Decode prompts with a fixed draft length, and count draft tokens.

    Returns:
        The settings, the counts, and ``acceptance_rate``, ``acceptance_length`` and
        ``acceptance_by_position`` as in :class:`specdec.RunStats`.
    """
    config = EngineConfig(batch_size=batch_size, num_draft_tokens=num_draft_tokens)
    decoder = SpecDecoder(target, draft, config=config)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    for _ in decoder.stream(prompts, params):
        check()
    stats = decoder.stats
    return {
        "prompts": len(prompts),
        "temperature": temperature,
        "num_draft_tokens": num_draft_tokens,
        "max_tokens": max_tokens,
        "rounds": stats.row_rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "acceptance_by_position": stats.acceptance_by_position,
    }
