"""What a run counted and measured. No mlx here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """Totals over the prompts of one ``generate`` or ``stream`` call.

    Times are seconds of wall clock spent in the engine: ``prefill_seconds`` up to
    each row's first token, ``decode_seconds`` for the ``decode_tokens`` behind it.
    ``rounds`` counts rounds of the batch. ``prompts``, ``prompt_tokens``,
    ``row_rounds``, ``drafted`` and ``accepted`` add up the rows that have ended.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds: int = 0
    row_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    peak_memory_bytes: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over the time until the rows' first tokens."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows behind their first, over decode time."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per row and round, the round's extra token included."""
        return 1.0 + self.accepted / self.row_rounds if self.row_rounds else 1.0
