"""The one place that calls a model: forwards, chunked prefill, its caches."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..cache import BatchCache
from ..cache.adopt import CacheOptions, adopt_caches, check_caches
from ..cache.positions import round_up


def prefill_slots(length: int, step_size: int, read_bucket: int) -> int:
    """Slots that :meth:`ModelRunner.prefill` writes for ``length`` tokens."""
    whole = length // step_size * step_size
    return whole + min(step_size, round_up(length - whole, read_bucket))


class ModelRunner:
    """A model and the batch caches of the rows it is running.

    Args:
        model: an mlx-lm model.
        name: for messages.

    Raises:
        UnsupportedModelError: the model asks for a cache that is not supported.
    """

    def __init__(self, model: nn.Module, name: str):
        check_caches(model, name)
        self.model = model
        self.name = name
        # Builds a graph to read its shape; nothing is computed.
        self.vocab_size = int(model(mx.array([[0]])).shape[-1])
        self._caches: list[BatchCache] = []
        self._prefill_step_size = 1
        self._max_round = 1
        self._read_bucket = 1

    @property
    def offset(self) -> mx.array:
        """Tokens kept by every row, shape (B,)."""
        return self._caches[0].offset

    @property
    def nbytes(self) -> int:
        """Bytes that the caches have allocated."""
        return sum(c.nbytes for c in self._caches)

    def start(
        self,
        batch_size: int,
        *,
        prefill_step_size: int,
        max_round: int,
        max_length: int,
        read_bucket: int,
    ) -> None:
        """Make empty caches for ``batch_size`` rows of up to ``max_length`` tokens.

        Args:
            max_round: most tokens that a decode round writes.
        """
        self._prefill_step_size = prefill_step_size
        self._read_bucket = read_bucket
        self._max_round = max_round
        options = CacheOptions(
            max_write=max(prefill_step_size, max_round),
            read_bucket=read_bucket,
            max_length=max_length,
        )
        self._caches = adopt_caches(self.model, batch_size, options, self.name)

    def prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """Write prompts of any lengths (0 too), one chunk at a time.

        Rows are padded on the right to the chunk's width; a row that has ended
        writes padding that is taken back at once. Logits are never computed.
        """
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        done = 0
        while done < longest:
            step = self._prefill_step_size
            width = min(step, round_up(longest - done, self._read_bucket))
            valid = [min(max(n - done, 0), width) for n in lengths]
            chunk = [
                [*row[done : done + n], *([0] * (width - n))]
                for row, n in zip(rows, valid, strict=True)
            ]
            self.model(mx.array(chunk), cache=self._caches)
            padding = [width - n for n in valid]
            if any(padding):
                self.trim_per_sequence(padding, width)
            mx.eval([c.state for c in self._caches])
            mx.clear_cache()
            done += width
        self.note_lengths(longest, min(lengths))

    def forward(self, tokens: mx.array) -> mx.array:
        """Write ``tokens`` of shape (B, S) behind every row; logits (B, S, V)."""
        logits: mx.array = self.model(tokens, cache=self._caches)
        return logits

    def trim_per_sequence(self, n: mx.array | Sequence[int], at_most: int) -> None:
        """Take back ``n[i]`` tokens of row ``i``, at most ``at_most`` of any."""
        for cache in self._caches:
            cache.trim_per_sequence(n, at_most)

    def note_lengths(self, longest: int, shortest: int = 0) -> None:
        """Tell the caches what the host knows of the rows' lengths."""
        for cache in self._caches:
            cache.note_lengths(longest=longest, shortest=shortest)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows, in that order."""
        for cache in self._caches:
            cache.filter(rows)

    def end_prefill(self) -> None:
        """Give back what only prefill needed (rings shrink to a round's width)."""
        for cache in self._caches:
            cache.resize(self._max_round)
