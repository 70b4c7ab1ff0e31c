"""Requests in, tokens out: prefill of joining rows between rounds of running ones.

admit -> prefill, a chunk a step -> join -> round after round -> finish
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import mlx.core as mx

from .backend import BackendDefaults
from .batch import RowBatch, RowOutput
from .config import EngineConfig
from .drafters import Drafter
from .models.runner import ModelRunner
from .scheduler import Scheduler
from .sequence import Request, Sequence
from .stats import RunStats


class Engine:
    """Decodes requests as rows become free, ``config.batch_size`` at a time.

    Prefill chunks of the rows that are joining alternate with rounds of the running
    rows: nobody waits for longer than a chunk.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly.
        config: rows, draft tokens.
        backend: how to shape rounds.
        eos_token_ids: tokens that end a row.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        config: EngineConfig,
        backend: BackendDefaults,
        eos_token_ids: AbstractSet[int],
    ):
        self.stats = RunStats()
        self._target = target
        self._drafter = drafter
        self._config = config
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._scheduler = Scheduler(config.batch_size)
        self._running: RowBatch | None = None
        self._joining: RowBatch | None = None
        self._chunks: Iterator[list[RowOutput]] = iter(())
        self._round_is_due = False

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return (
            self._scheduler.waiting > 0
            or self._joining is not None
            or self._running is not None
        )

    def add(self, request: Request) -> None:
        """Queue a request; it gets a row as soon as one is free."""
        self._scheduler.add(request)

    def step(self) -> list[RowOutput]:
        """One chunk of prefill, one round, or both; what the rows emitted."""
        stats, start = self.stats, time.perf_counter()
        if not self._round_is_due:
            self._round_is_due = True
            outputs = self._prefill_chunk()
            elapsed = time.perf_counter() - start
            stats.prefill_seconds += elapsed
            start += elapsed
            # First tokens do not wait for a round.
            if outputs:
                stats.prefilled += len(outputs)
                stats.prompt_tokens += sum(
                    len(o.sequence.request.prompt_tokens) for o in outputs
                )
                self._count(outputs)
                return outputs
        self._round_is_due = False
        outputs = self._round()
        stats.decode_seconds += time.perf_counter() - start
        stats.decode_tokens += sum(len(o.token_ids) for o in outputs)
        stats.rounds += bool(outputs)
        self._count(outputs)
        return outputs

    def _count(self, outputs: list[RowOutput]) -> None:
        stats = self.stats
        for output in outputs:
            stats.generated_tokens += len(output.token_ids)
            if output.ended:
                stats.prompts += 1
                stats.row_rounds += output.sequence.rounds
                stats.drafted += output.sequence.drafted
                stats.accepted += output.sequence.accepted
        stats.peak_memory_bytes = mx.get_peak_memory()

    def _prefill_chunk(self) -> list[RowOutput]:
        if self._joining is None:
            self._admit()
        if self._joining is None:
            return []
        outputs = next(self._chunks)
        if not outputs:
            return []
        # Its first tokens: prefill is over, for some rows everything. The
        # generator holds caches that are about to be copied.
        self._chunks = iter(())
        joining, self._joining = self._joining, None
        if self._running is None or not self._running.unfinished:
            self._running = joining
        elif joining.unfinished:
            self._running.extend(joining)
        return outputs

    def _admit(self) -> None:
        running = 0 if self._running is None else len(self._running.unfinished)
        requests = self._scheduler.admit(running)
        if not requests:
            return
        self._joining = RowBatch(
            self._target,
            self._drafter,
            [Sequence(r, self._eos_token_ids) for r in requests],
            self._config.num_draft_tokens,
            self._backend,
        )
        self._chunks = self._joining.prefill()

    def _round(self) -> list[RowOutput]:
        if self._running is None:
            return []
        outputs = self._running.step()
        # What is still in flight then is of rows that have ended.
        if not self._running.unfinished:
            self._running = None
        return outputs
