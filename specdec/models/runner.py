"""The one place that calls a model: forwards, chunked prefill, its caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..backend import BackendDefaults
from ..cache.adopt import CacheOptions, adopt_caches, check_caches, maybe_quantize
from ..cache.positions import round_up
from ..config import EngineConfig


class ModelRunner:
    """A model and the batch caches of the rows it is running.

    Args:
        model: an mlx-lm model.
        name: for messages.
        config: the prefill chunk, how keys and values are kept.
        backend: the columns that attention reads at a time.

    Raises:
        UnsupportedModelError: the batch caches cannot serve the model.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        config: EngineConfig,
        backend: BackendDefaults,
    ):
        self.model = model
        self.name = name
        self.prefill_step_size = config.prefill_step_size
        self.read_bucket = config.read_bucket or backend.read_bucket
        self._options = CacheOptions(
            max_write=config.prefill_step_size,
            read_bucket=self.read_bucket,
            kv_bits=config.kv_bits,
            kv_group_size=config.kv_group_size,
            quantized_kv_start=config.quantized_kv_start,
            max_kv_size=config.max_kv_size,
        )
        check_caches(model, name, self._options)
        # Builds a graph to read its shape; nothing is computed.
        self.vocab_size = int(model(mx.array([[0]])).shape[-1])
        self._caches: list[Any] = []
        self._max_round = 1

    @property
    def offset(self) -> mx.array:
        """Tokens kept by every row, shape (B,)."""
        offset: mx.array = self._caches[0].offset
        return offset

    @property
    def nbytes(self) -> int:
        """Bytes that the caches have allocated."""
        return sum(c.nbytes for c in self._caches)

    def start(self, batch_size: int, *, max_round: int, max_length: int) -> None:
        """Make empty caches for ``batch_size`` rows of up to ``max_length`` tokens.

        Args:
            max_round: most tokens that a decode round writes.
        """
        self._max_round = max_round
        options = replace(
            self._options,
            max_write=max(self.prefill_step_size, max_round),
            max_length=max_length,
        )
        self._caches = adopt_caches(self.model, batch_size, options, self.name)

    def prefill_slots(self, length: int) -> int:
        """Slots that :meth:`prefill` writes for a row of ``length`` tokens."""
        step = self.prefill_step_size
        whole = length // step * step
        return whole + min(step, round_up(length - whole, self.read_bucket))

    def prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """Write prompts of any lengths (0 too), one chunk at a time.

        Rows are padded on the right to the chunk's width; a row that has ended
        writes padding that is taken back at once. Logits are never computed.
        """
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        done = 0
        while done < longest:
            rest = round_up(longest - done, self.read_bucket)
            width = min(self.prefill_step_size, rest)
            valid = [min(max(n - done, 0), width) for n in lengths]
            chunk = [
                [*row[done : done + n], *([0] * (width - n))]
                for row, n in zip(rows, valid, strict=True)
            ]
            self.model(mx.array(chunk), cache=self._caches)
            padding = [width - n for n in valid]
            if any(padding):
                self.trim_per_sequence(padding, width)
            done += width
            maybe_quantize(self._caches, self._options, min(done, longest))
            mx.eval([c.state for c in self._caches])
            mx.clear_cache()
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
        maybe_quantize(self._caches, self._options, longest)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just the given rows, in that order."""
        for cache in self._caches:
            cache.filter(rows)

    def end_prefill(self) -> None:
        """Give back what only prefill needed (rings shrink to a round's width)."""
        for cache in self._caches:
            cache.resize(self._max_round)
