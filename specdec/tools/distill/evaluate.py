"""How good a draft is: agreement with the target's text, and rounds of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx
import mlx.nn as nn

from ...config import EngineConfig
from ...decoder import SpecDecoder
from ...models import LoadedModel
from ...prompts import Prompt
from ...sampling_params import SamplingParams
from .blocks import Block
from .cancellation import Check, go_on
from .loss import ChunkedLoss
from .states import TargetStates
from .student import Student


class HeldOut:
    """Texts of the target that nothing is learnt from.

    Args:
        name: of the set.
        model: the target's text model.
        blocks: the texts; their positions are those of answers.
        budget: bytes of the target's states to keep.
    """

    def __init__(
        self, name: str, model: nn.Module, blocks: Sequence[Block], *, budget: int
    ):
        self.name = name
        self._blocks = blocks
        self._states = TargetStates(model, blocks, budget=budget)

    def measure(
        self, student: Student, loss: ChunkedLoss, check: Check = go_on
    ) -> dict[str, float]:
        """KL and agreement by position, from the target's own text each time."""
        sums = [mx.array(0.0)] * 3
        for index, block in enumerate(self._blocks):
            check()
            states = student.hidden(mx.array(block.tokens))
            flat = states.reshape(-1, states.shape[-1])[mx.array(block.positions)]
            found = loss.value(flat, self._states.of(index), mx.array(block.weights))
            new = (found.kl, found.agreed, found.weight)
            sums = [a + b for a, b in zip(sums, new, strict=True)]
            mx.eval(sums)
        kl, agreed, weight = (float(each) for each in sums)
        weight = max(weight, 1e-9)
        return {"kl": kl / weight, "agreement": agreed / weight, "positions": weight}


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What rounds of the engine brought.

    Args:
        acceptance_rate: accepted over drafted.
        acceptance_length: tokens a round, the extra one included.
        acceptance_by_position: of rounds that drafted 1, 2, ... tokens, the share
            that accepted them all.
    """

    prompts: int
    temperature: float
    num_draft_tokens: int
    max_tokens: int
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float
    acceptance_length: float
    acceptance_by_position: list[float]

    def to_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


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
) -> Rounds:
    """Decode prompts with a draft of fixed length, and count what was accepted."""
    config = EngineConfig(batch_size=batch_size, num_draft_tokens=num_draft_tokens)
    decoder = SpecDecoder(target, draft, config=config)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    for _ in decoder.stream(prompts, params):
        check()
    stats = decoder.stats
    return Rounds(
        prompts=len(prompts),
        temperature=temperature,
        num_draft_tokens=num_draft_tokens,
        max_tokens=max_tokens,
        rounds=stats.row_rounds,
        drafted=stats.drafted,
        accepted=stats.accepted,
        acceptance_rate=stats.acceptance_rate,
        acceptance_length=stats.acceptance_length,
        acceptance_by_position=stats.acceptance_by_position,
    )
