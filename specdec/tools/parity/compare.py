"""Compare two texts of tokens, and tell ties from failures. No mlx, no models.

A forward rounds differently in different shapes. A *tie* is a difference that rounding
explains. Every other difference is a failure, also one that cannot be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["tie", "failure"]

# Between shapes a score changes by the noise at most, so the gap between two scores
# changes by twice the noise at most.
NOISE_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Gaps between the target's scores at one position, by forwards of one shape.

    A score is a logit in float32, plus temperature times the position's noise if the
    row samples. The token of the largest score is chosen.

    Args:
        batch_size, width: rows and tokens per row of the forwards.
        top2_gap: the best score minus the second best.
        gap: score of the plain token minus score of the engine's token; negative if
            this shape prefers the engine's.
    """

    batch_size: int
    width: int
    top2_gap: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements at a position where the engine and plain decoding chose differently.

    ``step``, ``verify`` and ``noise`` are computed by mlx-lm's code alone, without a
    draft. So a fault of this engine cannot make the noise larger.

    Args:
        step: scores after the prefix as in plain decoding, one token at a time.
        verify: the same as in a verify forward, with several rows and tokens.
        noise: the largest difference of any logit between the two.
        logprob_difference: log-probability of the engine's token in the engine's own
            forward, minus the one in plain decoding; ``None`` for a token that ends a
            row, for which the engine reports none.
    """

    step: Scores
    verify: Scores
    noise: float
    logprob_difference: float | None

    @property
    def gap_noise(self) -> float:
        """How much the gap between the two tokens differs between the shapes."""
        return abs(self.step.gap - self.verify.gap)


def why_no_tie(evidence: Evidence) -> str | None:
    """Why rounding does not explain a difference; ``None`` for a tie.

    With noise ``n``, a tie must meet all of these conditions, and a NaN meets none:

    - ``n > 0``: if the two shapes agree in every bit, rounding changes no choice;
    - the gap between the two tokens is at most ``2 n`` in both shapes;
    - the log-probability of the engine's token differs by at most ``2 n`` between the
      engine and plain decoding, so both read the same prefix.
    """
    noise, most = evidence.noise, NOISE_FACTOR * evidence.noise
    if not noise > 0:
        return f"the two shapes agree (noise {noise:.3g})"
    for name, scores in (("step", evidence.step), ("verify", evidence.verify)):
        if not abs(scores.gap) <= most:
            return f"{name} gap {scores.gap:.3g} is beyond twice the noise, {most:.3g}"
    difference = evidence.logprob_difference
    if difference is not None and not abs(difference) <= most:
        return (
            f"the engine's log-probability is {difference:+.3g} off, "
            f"beyond twice the noise, {most:.3g}"
        )
    return None


@dataclass(frozen=True)
class Token:
    """A token and its text."""

    id: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where the engine's tokens first differ from the plain ones.

    Args:
        prompt: index of the prompt.
        position: index of the generated token, 0 for the first.
        prefix_tokens: number of tokens before it, including the prompt.
        plain, engine: the two tokens; ``None`` for a text that has ended.
        evidence: the measurements; ``None`` if one of the texts has ended.
    """

    prompt: int
    position: int
    prefix_tokens: int
    plain: Token | None
    engine: Token | None
    evidence: Evidence | None

    @property
    def reason(self) -> str | None:
        """Why the divergence is a failure; ``None`` for a tie."""
        if self.evidence is None:
            return "one of the two ended without a token that ends a row"
        return why_no_tie(self.evidence)

    @property
    def kind(self) -> Kind:
        """``tie`` or ``failure``."""
        return "tie" if self.reason is None else "failure"

    def to_dict(self) -> dict[str, object]:
        """All fields and derived values, for JSON."""
        fields = asdict(self)
        if self.evidence is not None:
            fields["evidence"]["gap_noise"] = self.evidence.gap_noise
        return {"kind": self.kind, "reason": self.reason, **fields}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, or the shorter length if one begins the other.

    ``None`` if both are equal.
    """
    pairs = enumerate(zip(a, b, strict=False))
    index = next((i for i, (x, y) in pairs if x != y), None)
    if index is None and len(a) != len(b):
        return min(len(a), len(b))
    return index
