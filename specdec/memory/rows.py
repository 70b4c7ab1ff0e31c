"""What rows need of the memory, by their requests. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import cached_property

from ..sampling_params import SamplingParams

Step = tuple[Callable[[SamplingParams], bool], int, int]

#: Steps of choosing tokens that are computed once for all rows: whether a request has
#: the step, and the most float32 copies that it holds of all logits of a round, and of
#: one position's. Measured with MLX's CPU backend, steps one by one and together, in
#: float32 and bfloat16, for 1, 2, 4 and 8 positions, and rounded up.
STEPS: dict[str, Step] = {
    "noise": (lambda p: p.temperature > 0, 3, 0),
    "logit_bias": (lambda p: bool(p.logit_bias), 1, 2),
    "min_tokens": (lambda p: p.min_tokens > 0, 1, 2),
    "repetition_penalty": (lambda p: p.repetition_penalty not in (None, 1), 4, 0),
    "presence_penalty": (lambda p: bool(p.presence_penalty), 3, 0),
    "frequency_penalty": (lambda p: bool(p.frequency_penalty), 2, 0),
    "grammar": (lambda p: bool(p.grammar) or p.max_thinking_tokens is not None, 1, 0),
    "logprobs": (lambda p: p.logprobs or p.top_logprobs > 0, 2, 1),
    "top_logprobs": (lambda p: p.top_logprobs > 0, 1, 0),
    # What draft and target draw from, and the residual of the two.
    "ratio": (lambda p: p.temperature > 0 and p.verification != "coupled", 5, 3),
}
#: The same for filters, which are computed for each group of rows with equal settings.
FILTERS: dict[str, Step] = {
    "top_p": (lambda p: p.top_p < 1, 6, 0),
    "min_p": (lambda p: p.min_p > 0, 2, 0),
    "xtc": (lambda p: p.xtc_probability > 0, 5, 2),
    "top_k": (lambda p: p.top_k > 0, 4, 0),
}
#: Copies of all logits if some rows' filters differ, which are taken out and put back.
APART = 5


@dataclass(frozen=True)
class RowNeeds:
    """What decides how much memory one request needs.

    Args:
        prompt_tokens: tokens of its prompt.
        params: its parameters, of which the default chooses the largest logit.
        image_tokens: tokens of its largest image.
    """

    prompt_tokens: int
    params: SamplingParams
    image_tokens: int = 0

    @property
    def context(self) -> int:
        """Tokens, prompt and generated."""
        return self.prompt_tokens + self.params.max_tokens

    @cached_property
    def steps(self) -> frozenset[str]:
        """The keys of :data:`STEPS` that its tokens need."""
        return frozenset(n for n, (uses, *_) in STEPS.items() if uses(self.params))

    @cached_property
    def filters(self) -> frozenset[tuple[str, Hashable]]:
        """The keys of :data:`FILTERS` that its tokens need, with their settings."""
        p = self.params
        xtc = p.xtc_probability, p.xtc_threshold, p.xtc_special_tokens
        settings = {"top_p": p.top_p, "min_p": p.min_p, "xtc": xtc, "top_k": p.top_k}
        return frozenset(
            (n, settings[n]) for n, (uses, *_) in FILTERS.items() if uses(p)
        )


def choosing_bytes(
    rows: Collection[RowNeeds], num_draft_tokens: int, vocab_size: int
) -> int:
    """The most bytes that choosing the tokens of a round holds besides the logits."""
    steps = {name for row in rows for name in row.steps}
    copies = [(*STEPS[name][1:], len(rows)) for name in steps]
    copies += [(*FILTERS[name][1:], 1) for row in rows for name, _ in row.filters]
    if len({row.filters for row in rows}) > 1:
        copies.append((APART, 0, len(rows)))
    positions = sum(
        n * (of_round * (num_draft_tokens + 1) + of_one)
        for of_round, of_one, n in copies
    )
    return positions * vocab_size * 4
