"""What a run counted and measured. No mlx here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class RunStats:
    """Totals over the prompts of one ``generate`` or ``stream`` call, as it goes.

    Times are seconds of wall clock spent in the engine: ``prefill_seconds`` on
    prompts, for the first token of each row, ``decode_seconds`` on rounds, for the
    ``decode_tokens`` behind it. A prefill chunk that finds a round still running
    waits for it, so that with rows that join the two mix a little. ``rounds`` counts
    rounds of the batch, ``prefilled`` and ``prompt_tokens`` prompts that have been
    taken in; ``prompts``, ``row_rounds``, ``drafted`` and ``accepted`` add
    up the rows that have ended. ``peak_memory_bytes`` is MLX's peak in this process
    so far, weights included.
    """

    prompts: int = 0
    prefilled: int = 0
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
