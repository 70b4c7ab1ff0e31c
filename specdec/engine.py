"""Requests in, tokens out: prefill of joining rows between rounds of running ones.

admit -> prefill, a chunk a step -> join -> round after round -> finish
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .backend import BackendDefaults
from .batch import RowBatch, RowOutput
from .config import EngineConfig
from .drafters import Drafter
from .models.runner import ModelRunner
from .scheduler import Scheduler
from .sequence import Request, Sequence


@dataclass
class Counters:
    """What the engine has done so far; times in seconds."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    rounds: int = 0


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
        self.counters = Counters()
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
        if not self._round_is_due:
            self._round_is_due = True
            start = time.perf_counter()
            outputs = self._prefill_chunk()
            self.counters.prefill_seconds += time.perf_counter() - start
            # First tokens do not wait for a round.
            if outputs:
                return outputs
        self._round_is_due = False
        start = time.perf_counter()
        outputs = self._round()
        self.counters.decode_seconds += time.perf_counter() - start
        self.counters.decode_tokens += sum(len(o.token_ids) for o in outputs)
        self.counters.rounds += bool(outputs)
        return outputs

    def _prefill_chunk(self) -> list[RowOutput]:
        if self._joining is None:
            self._admit()
        if self._joining is None:
            return []
        outputs = next(self._chunks)
        if not outputs:
            return []
        # Its first tokens: prefill is over, for some rows everything.
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
