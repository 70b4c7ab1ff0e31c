"""Whether a run fits in memory, asked before it begins. No mlx here.

Models are checked before they are loaded, a request when it is added, and rows
before they get a place: what cannot fit is refused with the numbers, what does not
fit yet waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import MemoryLimitError
from .memory import MemoryPlan, RowNeeds, format_size
from .params import SamplingParams
from .sequence import Request


@dataclass(frozen=True)
class Preflight:
    """A plan and what the device has.

    Args:
        plan: of the run.
        limit: bytes for everything that MLX holds.
    """

    plan: MemoryPlan
    limit: int

    def check_models(self) -> None:
        """Refuse models that leave no room for the smallest request.

        Raises:
            MemoryLimitError: with both numbers.
        """
        needed = self.plan.peak([RowNeeds(1, 1)])
        if needed > self.limit:
            weights = format_size(self.plan.weight_bytes)
            raise MemoryLimitError(
                f"the models need {format_size(needed)} ({weights} of weights) and the "
                f"memory limit is {format_size(self.limit)}: take models of fewer "
                "bits, leave the draft out, or raise --memory-limit (memory_limit)"
            )

    def check(self, prompt_tokens: int, params: SamplingParams) -> None:
        """Refuse a request that does not fit even alone.

        Raises:
            MemoryLimitError: with the numbers.
        """
        needed = self.plan.peak([_needs(prompt_tokens, params)])
        if needed > self.limit:
            raise MemoryLimitError(
                f"{prompt_tokens} prompt tokens and up to {params.max_tokens} more "
                f"need {format_size(needed)} and the memory limit is "
                f"{format_size(self.limit)}: shorten it, lower --max-tokens or "
                "--prefill-step-size, add --kv-bits, or raise --memory-limit"
            )

    def cost(self, requests: Iterable[Request]) -> int:
        """Most bytes that these requests hold when they have rows together."""
        return self.plan.peak(
            [_needs(len(r.prompt_tokens), r.params) for r in requests]
        )


def _needs(prompt_tokens: int, params: SamplingParams) -> RowNeeds:
    filtered = params.top_p < 1 or params.min_p > 0 or params.top_k > 0
    return RowNeeds(prompt_tokens, params.max_tokens, params.temperature > 0, filtered)
