"""Two texts of tokens, and when a difference is a tie. Pure: no mlx, no models.

Two shapes of one forward round differently. A *tie* is a difference that this
explains; everything else is a failure, and so is what cannot be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["tie", "failure"]

# Each of two scores moves by no more than the noise between the shapes, so the
# gap between them by no more than twice that.
NOISE_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the target alone says of one position, by forwards of one shape.

    A score is a logit in float32, plus temperature times the position's noise where
    the row samples: the largest is chosen.

    Args:
        batch_size, width: rows and tokens per row of the forwards.
        top2_gap: the best score less the second best.
        gap: score of the plain token minus score of the engine's; negative where this
            shape prefers the engine's.
    """

    batch_size: int
    width: int
    top2_gap: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was measured where the engine and plain decoding chose differently.

    Only mlx-lm's code takes part in ``step``, ``verify`` and ``noise``, and no
    draft: a fault of this engine cannot make the noise larger.

    Args:
        step: the prefix scored as plain decoding does, a token at a time.
        verify: the same prefix as a verification does, several rows and tokens.
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
    """What shows that a difference is no rounding; ``None`` for a tie.

    With noise ``n``, all of these must hold, and a NaN holds nothing:

    - ``n > 0``: where the two shapes agree in every bit, nothing can flip;
    - the gap between the two tokens is at most ``2 n`` in both shapes;
    - the engine's log-probability of its token is within ``2 n`` of the plain one's:
      it read what plain decoding reads.
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
    """A token, and how it reads."""

    id: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Where the engine's tokens first differ from the plain ones.

    Args:
        prompt: index of the prompt.
        position: of the generated token, 0 for the first.
        prefix_tokens: tokens before it, prompt included.
        plain, engine: the two tokens; ``None`` where one text has ended.
        evidence: ``None`` where nothing can be compared.
    """

    prompt: int
    position: int
    prefix_tokens: int
    plain: Token | None
    engine: Token | None
    evidence: Evidence | None

    @property
    def reason(self) -> str | None:
        """Why it is a failure; ``None`` for a tie."""
        if self.evidence is None:
            return "one of the two ended without a token that ends a row"
        return why_no_tie(self.evidence)

    @property
    def kind(self) -> Kind:
        """``tie`` or ``failure``."""
        return "tie" if self.reason is None else "failure"

    def to_dict(self) -> dict[str, object]:
        """Everything, for JSON."""
        fields = asdict(self)
        if self.evidence is not None:
            fields["evidence"]["gap_noise"] = self.evidence.gap_noise
        return {"kind": self.kind, "reason": self.reason, **fields}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference, the end of the shorter one included."""
    pairs = enumerate(zip(a, b, strict=False))
    found = next((i for i, (x, y) in pairs if x != y), None)
    if found is None and len(a) != len(b):
        return min(len(a), len(b))
    return found
