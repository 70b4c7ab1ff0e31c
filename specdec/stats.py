"""What a run counted and measured. No mlx here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import zip_longest

from .errors import DrafterError
from .request import (
    Sequence,
    acceptance_by_position,
    acceptance_length,
    acceptance_rate,
)


@dataclass(kw_only=True)
class RunStats:
    """Totals over the prompts of one ``generate`` or ``stream`` call, as it goes.

    Times are seconds of wall clock, and add up to what the engine took:
    ``calibration_seconds`` to measure what rounds of a draft cost, before the first
    one, ``prefill_seconds`` on prompts, for the first token of each row,
    ``decode_seconds`` on rounds, for the ``decode_tokens`` behind it. A prefill chunk
    that finds a round still running waits for it, so that with rows that join the two
    mix a little. ``rounds`` counts rounds of the batch, ``prefilled`` and
    ``prompt_tokens`` prompts that have been taken in, ``prefix_tokens`` what of them
    was found in the prefix store; ``prompts``, ``row_rounds``, ``drafted``,
    ``accepted`` and what they are by position
    (:class:`~specdec.results.GenerationResult`) add up the rows that have
    ended. ``draft_error`` is what ended drafting before its time, in a line.
    ``peak_memory_bytes`` is MLX's peak in this process so far, weights included.
    """

    prompts: int = 0
    prefilled: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    generated_tokens: int = 0
    decode_tokens: int = 0
    calibration_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_error: str | None = None
    peak_memory_bytes: int = 0

    def take_prefilled(self, sequences: Collection[Sequence]) -> None:
        """Count rows that have their first tokens."""
        self.prefilled += len(sequences)
        for s in sequences:
            self.prompt_tokens += len(s.request.prompt_tokens)
            self.prefix_tokens += s.prefix_tokens

    def take_ended(self, sequence: Sequence) -> None:
        """Count a row that has ended."""
        self.prompts += 1
        self.row_rounds += sequence.rounds
        self.drafted += sequence.drafted
        self.accepted += sequence.accepted
        self.drafted_at = _added(self.drafted_at, sequence.drafted_at)
        self.accepted_at = _added(self.accepted_at, sequence.accepted_at)

    def check_draft(self) -> None:
        """Refuse to go on where what was measured is not the draft that was asked for.

        Raises:
            DrafterError: drafting ended before its time.
        """
        if self.draft_error is not None:
            raise DrafterError(self.draft_error)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of rounds that drafted 1, 2, ... tokens, the share that accepted them all."""
        return acceptance_by_position(self.drafted_at, self.accepted_at)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens, reused ones too, over the time until the first tokens."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows behind their first, over decode time."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 when nothing was drafted."""
        return acceptance_rate(self.drafted, self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per row and round, the round's extra token included."""
        return acceptance_length(self.row_rounds, self.accepted)


def _added(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
