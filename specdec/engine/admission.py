"""Checks whether a run fits in memory before it begins. No mlx here.

Models are checked before they are loaded, requests when they are added, and rows before
they join. A request that can never fit is refused, and the message has the numbers. A
row that does not fit yet waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from ..backend import MANY_TOKENS
from ..errors import MemoryLimitError
from ..memory import MemoryPlan, RowNeeds
from ..prompts.images import PlacedImage
from ..request import Request
from ..sampling_params import SamplingParams
from ..utils.sizes import format_size


@dataclass(frozen=True)
class Preflight:
    """Compares what a run needs with what the device has.

    Args:
        plan: what the run needs.
        limit: bytes for everything that MLX holds.
    """

    plan: MemoryPlan
    limit: int
    # By what else decides: prompt tokens and tokens in all of a request that fits.
    _fitting: dict[Hashable, tuple[int, int]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def check_models(self, image_tokens: int = 0) -> None:
        """Refuse models that leave no room for the smallest request.

        Args:
            image_tokens: tokens of an image that comes with the models.

        Raises:
            MemoryLimitError: they do not fit; the message has both numbers.
        """
        smallest = RowNeeds(1, SamplingParams(max_tokens=1), image_tokens)
        needed, weights = self.plan.peak([smallest]), self.plan.weight_bytes
        if needed <= self.limit:
            return
        share, way = self._prefix_share(smallest)
        if self.plan.draft is not None or self.plan.lookup_bytes:
            way = "leave the draft out, " + way
        raise MemoryLimitError(
            f"the models need {format_size(needed)} ({format_size(weights)} of "
            f"weights{share}) and the memory limit is {format_size(self.limit)}: take "
            f"models of fewer bits, {way}or raise --memory-limit"
        )

    def check(
        self,
        prompt_tokens: int,
        params: SamplingParams,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Refuse a request that does not fit even alone.

        Raises:
            MemoryLimitError: it does not fit; the message has the numbers.
        """
        row = RowNeeds(prompt_tokens, params, _largest(images))
        if self._fits_like_another(row):
            return
        needed = self.plan.peak([row])
        if needed <= self.limit:
            return
        share, way = self._prefix_share(row)
        of_images = sum(len(image.places) for image in images)
        shown = f" ({of_images} of images)" if images else ""
        raise MemoryLimitError(
            f"{prompt_tokens} prompt tokens{shown} and up to {params.max_tokens} more "
            f"need {format_size(needed)}{share} and the memory limit is "
            f"{format_size(self.limit)}: shorten it, lower --max-tokens or "
            f"--prefill-step-size, {way}add --kv-bits, or raise --memory-limit"
        )

    def _fits_like_another(self, row: RowNeeds) -> bool:
        """Whether a like request of as many tokens or more fits.

        More tokens need more memory, unless their chunk is so wide that fewer layers
        are under way at once.
        """
        scored = row.params.prompt_logprobs is not None
        kind = row.steps, row.filters, row.image_tokens, scored
        prompt, context = self._fitting.get(kind, (0, 0))
        if row.prompt_tokens <= prompt and row.context <= context:
            return True
        prompt, context = max(row.prompt_tokens, prompt), max(row.context, context)
        more = context - prompt
        least = min(row.params.min_tokens, more)
        params = replace(row.params, max_tokens=more, min_tokens=least)
        most = RowNeeds(prompt, params, row.image_tokens)
        fits = prompt < MANY_TOKENS // 2 and self.plan.peak([most]) <= self.limit
        if fits:
            if len(self._fitting) >= 64:
                self._fitting.clear()
            self._fitting[kind] = prompt, context
        return fits

    def _prefix_share(self, row: RowNeeds) -> tuple[str, str]:
        """The prefix store's share of a row's peak and how to lower it, as text."""
        size = self.plan.prefix_bytes
        if self.plan.peak([row]) <= replace(self.plan, prefix_bytes=0).peak([row]):
            return "", ""
        return (
            f", {format_size(size)} for --prefix-cache-memory",
            "lower --prefix-cache-memory, ",
        )

    def cost(self, requests: Sequence[Request]) -> int:
        """The most bytes that these requests need when they have rows together."""
        return self.plan.peak([_needs_of(r) for r in requests])


def _needs_of(request: Request) -> RowNeeds:
    """The memory that a request needs; cached, as every join of rows asks for it."""
    if not isinstance(request.needs, RowNeeds):
        request.needs = RowNeeds(
            len(request.prompt_tokens), request.params, _largest(request.images)
        )
    return request.needs


def _largest(images: Sequence[PlacedImage]) -> int:
    """Tokens of the largest image."""
    return max((len(image.places) for image in images), default=0)
