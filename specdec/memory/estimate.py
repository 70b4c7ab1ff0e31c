"""The estimate of ``specdec estimate``: a table, and what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from ..config import MAX_BATCH_SIZE
from ..sampling_params import SamplingParams
from ..utils.sizes import format_size
from ..utils.tables import text_table
from .formulas import recommend_quantization
from .plan import (
    MAX_CONTEXT,
    PARTS,
    MemoryPlan,
    Moment,
    largest_fitting,
)
from .rows import RowNeeds

# A chunk of fewer tokens takes long to prefill, and little less memory.
LEAST_STEP = 32


@dataclass(frozen=True)
class Change:
    """Settings with which a run fits that does not fit as it was asked for.

    Args:
        batch: rows.
        prefill_step_size: prompt tokens per row in one forward.
        kv_bits: bits of keys and values; ``None``: not quantized.
        changes_tokens: the keys and values are others than was asked for.
    """

    batch: int
    prefill_step_size: int
    kv_bits: int | None
    changes_tokens: bool


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a batch of equal rows, and what else would fit.

    Args:
        plan: the plan of the run, with keys and values as ``kv_bits`` says.
        context: tokens of each row, prompt and generated. All but one count as the
            prompt, which needs most memory.
        batch: rows.
        limit: bytes that the device has; ``None``: unknown.
        plan_with: makes the plan with keys and values in a number of bits (``None``:
            as they are) and a prefill step; returns ``None`` if the models refuse it.
        command: the command of a run with other settings.
        params: how the rows choose their tokens.
        context_length: positions that the target can serve; ``None``: unknown.
        kv_bits: bits of keys and values; ``None``: not quantized.
        image_tokens: tokens of the largest image.
    """

    plan: MemoryPlan
    context: int
    batch: int
    limit: int | None
    plan_with: Callable[[int | None, int], MemoryPlan | None]
    command: Callable[[Change], str]
    params: SamplingParams = field(default_factory=SamplingParams)
    context_length: int | None = None
    kv_bits: int | None = None
    image_tokens: int = 0

    def _rows(self, batch: int, context: int) -> list[RowNeeds]:
        # At least one token is generated.
        prompt = max(1, context - 1)
        params = replace(self.params, max_tokens=max(1, context - prompt))
        return [RowNeeds(prompt, params, min(self.image_tokens, prompt))] * batch

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The moments of the run, each at its peak."""
        return self.plan.moments(self._rows(self.batch, self.context))

    @property
    def total(self) -> int:
        """The most bytes held at any moment."""
        return max(moment.total for moment in self.moments)

    @property
    def fits(self) -> bool | None:
        """Whether :attr:`total` is within the limit; ``None`` without a limit."""
        return None if self.limit is None else self.total <= self.limit

    def largest_context(self) -> int:
        """Most tokens per row at this batch that the target serves.

        0 when not even two fit.
        """
        longest = largest_fitting(
            lambda n: self.plan.peak(self._rows(self.batch, n)) <= (self.limit or 0),
            min(self.context_length or MAX_CONTEXT, MAX_CONTEXT),
        )
        return longest if longest > 1 else 0

    def largest_batch(self) -> int:
        """Most rows at this context."""
        return self._most_rows(self.plan)

    def suggested_kv_bits(self) -> int | str | None:
        """The most bits for keys and values with which the run fits.

        Returns:
            ``"as they are"``, 8 or 4; ``None`` when none fits.
        """
        rows = self._rows(self.batch, self.context)
        for bits in (None, 8, 4):
            plan = self.plan_with(bits, self.plan.prefill_step_size)
            if plan is not None and plan.peak(rows) <= (self.limit or 0):
                return "as they are" if bits is None else bits
        return None

    def changes(self) -> list[Change]:
        """What to change so that the run fits, the least first.

        At the asked batch, first a smaller prefill step, then packed keys and values.
        If only these help, which change tokens, or nothing does: fewer rows, too.
        """
        if self.limit is None or self.fits:
            return []
        asked = self.plan.prefill_step_size
        steps = [asked]
        while steps[-1] // 2 >= LEAST_STEP:
            steps.append(steps[-1] // 2)
        rows = self._rows(self.batch, self.context)
        changes = list[Change]()
        fewer = [bits for bits in (8, 4) if bits < (self.kv_bits or 16)]
        for bits in (self.kv_bits, *fewer):
            for step in steps:
                plan = self.plan_with(bits, step)
                if plan is not None and plan.peak(rows) <= self.limit and not changes:
                    other = bits != self.kv_bits
                    changes.append(Change(self.batch, step, bits, other))
        if changes and not changes[0].changes_tokens:
            return changes
        for bits in (self.kv_bits, 4):
            for step in steps:
                plan = self.plan_with(bits, step)
                if plan is not None and (most := self._most_rows(plan)):
                    other = bits != self.kv_bits
                    return [*changes, Change(most, step, bits, other)]
            if changes:
                break
        return changes

    def _most_rows(self, plan: MemoryPlan) -> int:
        """Most rows at this context that a plan has room for; 0 if there is none."""

        def fits(n: int) -> bool:
            return plan.peak(self._rows(n, self.context)) <= (self.limit or 0)

        most = 1  # a plan takes as long as it has rows
        while most < MAX_BATCH_SIZE and fits(most):
            most *= 2
        return largest_fitting(fits, most)

    def suggested_weight_bits(self) -> int | str | None:
        """Bits for the target's weights, with all else unchanged.

        Returns:
            ``"as they are"`` if the run fits, else the most bits that would fit, or
            ``None``.
        """
        if self.fits:
            return "as they are"
        weights = self.plan.target.weight_bytes
        rest = max(m.total for m in self.moments if m.name != "loading") - weights
        return recommend_quantization(
            self.plan.target.num_parameters, self.limit or 0, rest
        )

    # -- as text and JSON ----------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The whole estimate for JSON, with sizes in bytes."""
        fields: dict[str, Any] = {
            "target": self.plan.target.name,
            "draft": self.plan.draft.name if self.plan.draft else None,
            "context": self.context,
            "context_length": self.context_length,
            "batch": self.batch,
            "num_draft_tokens": self.plan.num_draft_tokens,
            "kv_bits": self.kv_bits,
            "num_parameters": self.plan.target.num_parameters,
            "moments": {m.name: {**m.parts, "total": m.total} for m in self.moments},
            "total": self.total,
            "memory_limit": self.limit,
            "fits": self.fits,
        }
        if self.limit is not None:
            fields |= {
                "largest_context": self.largest_context(),
                "largest_batch": self.largest_batch(),
                "suggested_kv_bits": self.suggested_kv_bits(),
                "suggested_weight_bits": self.suggested_weight_bits(),
                "changes": [
                    {**asdict(change), "command": self.command(change)}
                    for change in self.changes()
                ],
            }
        return fields

    def table(self) -> str:
        """The parts of each moment in columns, and what fits, as text."""
        moments = self.moments
        cells = [["", *(m.name for m in moments)]]
        for part in PARTS:
            sizes = [m.parts.get(part, 0) for m in moments]
            if any(sizes):
                cells.append([part, *(format_size(n) if n else "-" for n in sizes)])
        cells.append(["total", *(format_size(m.total) for m in moments)])
        table = text_table(cells, align="right")
        return "\n".join([self._heading(), "", table, "", *self._conclusions()])

    def _heading(self) -> str:
        draft = self.plan.draft
        with_draft = f", draft {draft.name}" if draft else ""
        k = f", {self.plan.num_draft_tokens} draft tokens" if draft else ""
        rows = f"{self.batch} row" + "s" * (self.batch != 1)
        return (
            f"{self.plan.target.name}{with_draft}: {rows} of {self.context} tokens{k}"
        )

    def _conclusions(self) -> list[str]:
        if self.limit is None:
            return [
                f"at most {format_size(self.total)}; the device does not say what it "
                "has: give --memory-limit"
            ]
        size = f"{format_size(self.total)} of {format_size(self.limit)}"
        verdict = "fits" if self.fits else "does not fit"
        kv, weights = self.suggested_kv_bits(), self.suggested_weight_bits()
        context, batch = self.largest_context(), self.largest_batch()
        return [
            f"at most {size}: {verdict}",
            f"largest context at this batch: {_most(context, MAX_CONTEXT, 'tokens')}",
            f"largest batch at this context: {_most(batch, MAX_BATCH_SIZE, 'rows')}",
            f"suggested KV cache bits: {'none fits' if kv is None else kv}",
            f"suggested weight bits: {'none fits' if weights is None else weights}",
            *(
                f"to fit{' (changes tokens)' * change.changes_tokens}: "
                f"{self.command(change)}"
                for change in self.changes()
            ),
        ]


def _most(n: int, limit: int, what: str) -> str:
    if n == 0:
        return "none fits"
    return f"{n} {what}" + " or more" * (n == limit)
