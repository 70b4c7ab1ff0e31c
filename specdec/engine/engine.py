"""Requests in, tokens out: prefill of joining rows between rounds of running ones.

admit -> prefill, a chunk a step -> join -> round after round -> finish
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet

import mlx.core as mx

from ..backend import BackendDefaults
from ..config import EngineConfig
from ..models.runner import ModelRunner
from ..output_text import Detokenizer, OutputText
from ..request import Request, Sequence
from ..spec_decode import Drafter, DraftGuard
from ..spec_decode.draft_length import BatchState, DraftLength, FixedLength
from ..stats import RunStats
from .admission import Preflight
from .decode_batch import RowBatch
from .in_flight import RowOutput
from .observer import RoundObserver
from .scheduler import Scheduler

Models = tuple[ModelRunner, Drafter | None]


class Engine:
    """Decodes requests as rows become free, ``config.batch_size`` at a time.

    Prefill chunks of the rows that are joining alternate with rounds of the running
    rows: nobody waits for longer than a chunk.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly, and so it goes on behind what a
            drafter raises.
        config: rows, draft tokens.
        backend: how to shape rounds.
        eos_token_ids: tokens that end a row.
        detokenizer: makes a new streaming detokenizer; without it results have
            tokens and no text, and stop texts are not found.
        observer: is told of every round.
        preflight: rows wait while those that run leave no memory for them.
        length: chooses how many tokens rounds draft; ``None``: the most that the
            config allows.
        packed: a target and a drafter that keep keys and values in so many bits, for
            requests that ask for it (``Request.kv_bits``).
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        config: EngineConfig,
        backend: BackendDefaults,
        eos_token_ids: AbstractSet[int],
        detokenizer: Callable[[], Detokenizer] | None = None,
        observer: RoundObserver | None = None,
        preflight: Preflight | None = None,
        length: DraftLength | None = None,
        packed: Callable[[int], Models] | None = None,
    ):
        self.stats = RunStats()
        self._guard = DraftGuard()
        self._models = self._guarded((target, drafter))
        self._packed = packed
        self._config = config
        self._backend = backend
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._observer = observer or RoundObserver()
        self._length = self._guard.length(
            length or FixedLength(config.max_draft_tokens)
        )
        self._scheduler = Scheduler(config.batch_size)
        if preflight is not None:
            self._scheduler = Scheduler(
                config.batch_size, budget=preflight.limit, cost=preflight.cost
            )
        self._alive: dict[int, Sequence] = {}
        self._cancelled: list[Sequence] = []
        self._running: RowBatch | None = None
        self._joining: RowBatch | None = None
        self._chunks: Iterator[list[RowOutput]] = iter(())
        self._round_is_due = False

    def _guarded(self, models: Models) -> Models:
        target, drafter = models
        return target, drafter and self._guard.drafter(drafter)

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet, or its end was not told."""
        return bool(self._alive)

    def add(self, request: Request) -> None:
        """Queue a request; it gets a row as soon as one is free.

        ``request.index`` must not be that of a request which has not ended.
        """
        assert request.index not in self._alive
        output = None
        if self._detokenizer is not None:
            output = OutputText(self._detokenizer(), request.params.stop)
        sequence = Sequence(request, self._eos_token_ids, output)
        sequence.queued = time.perf_counter()
        self._alive[request.index] = sequence
        self._scheduler.add(sequence)

    def cancel(self, index: int) -> bool:
        """End a request as it is; the next step tells its result.

        Returns:
            Whether it had not ended yet.
        """
        sequence = self._alive.get(index)
        if sequence is None or sequence.finish_reason is not None:
            return False
        sequence.cancel()
        self._cancelled.append(sequence)
        return True

    def step(self) -> list[RowOutput]:
        """One chunk of prefill, one round, or both; what the rows emitted."""
        start, stats = time.perf_counter(), self.stats
        outputs = self._leave() if self._cancelled else []
        if self._running is None and self._joining is None and self._scheduler.waiting:
            self._length.prepare(self._scheduler.together())
            now = time.perf_counter()
            stats.calibration_seconds += now - start
            start = now
        if not outputs and not self._round_is_due:
            self._round_is_due = True
            outputs = self._prefill_chunk()
            now = time.perf_counter()
            stats.prefill_seconds += now - start
            start = now
            if outputs:
                stats.prefilled += len(outputs)
                sequences = [o.sequence for o in outputs]
                stats.prompt_tokens += sum(
                    len(s.request.prompt_tokens) for s in sequences
                )
                stats.prefix_tokens += sum(s.prefix_tokens for s in sequences)
        # First tokens do not wait for a round.
        if not outputs:
            self._round_is_due = False
            outputs = self._round()
            stats.decode_tokens += sum(len(o.token_ids) for o in outputs)
            stats.rounds += bool(outputs)
        self._count(outputs)
        stats.decode_seconds += time.perf_counter() - start
        return outputs

    def _leave(self) -> list[RowOutput]:
        """Take rows that were cancelled out of wherever they are."""
        outputs = [RowOutput.of(s) for s in self._cancelled]
        self._cancelled = []
        self._scheduler.ended()
        if self._joining is not None and not self._joining.unfinished:
            self._joining, self._chunks = None, iter(())
        if self._running is not None:
            self._running.retire()
            self._drop_idle()
        return outputs

    def _count(self, outputs: list[RowOutput]) -> None:
        stats, now = self.stats, time.perf_counter()
        for output in outputs:
            sequence = output.sequence
            stats.generated_tokens += len(output.token_ids)
            if sequence.began is None and sequence.tokens:
                sequence.began = now
            if output.ended:
                sequence.ended = now
                del self._alive[sequence.request.index]
                stats.take_ended(sequence)
        stats.draft_error = self._guard.error
        stats.peak_memory_bytes = mx.get_peak_memory()

    def _prefill_chunk(self) -> list[RowOutput]:
        if self._joining is None:
            self._admit()
        if self._joining is None:
            return []
        outputs = next(self._chunks, None)
        if self._running is not None:
            self._running.note_interruption()
        if outputs is not None and self._joining.unfinished:
            return outputs
        # Prefill is over. The generator holds caches that are about to be copied.
        self._chunks = iter(())
        joining, self._joining = self._joining, None
        if joining.unfinished:
            if self._running is None or not self._running.unfinished:
                self._running = joining
            else:
                self._running.extend(joining)
        return outputs or []

    def _admit(self) -> None:
        running = [] if self._running is None else self._running.unfinished
        sequences = self._scheduler.admit(running)
        if not sequences:
            return
        if self._running is not None:  # what it takes was not counted
            self._running.drop_ended()
        models, kv_bits = self._models, sequences[0].request.kv_bits
        if kv_bits is not None and self._packed is not None:
            models = self._guarded(self._packed(kv_bits))
        target, drafter = models
        drafts = drafter is not None and self._may_draft(drafter, running, sequences)
        for sequence in sequences:
            sequence.kv_bits, sequence.drafts = target.options.kv_bits, drafts
        self._joining = RowBatch(
            target,
            drafter,
            sequences,
            self._length,
            self._backend,
            self._observer,
        )
        self._chunks = self._joining.prefill()

    def _may_draft(
        self, drafter: Drafter, running: list[Sequence], sequences: list[Sequence]
    ) -> bool:
        """Whether rows that begin are drafted for; that holds until they end.

        They are where rows that they join draft, and otherwise where that may pay for
        what the drafter takes for their prompts.
        """
        if drafter.hidden_layers:  # of these it is shown every row's
            return True
        if running and self._running is not None and self._running.drafts:
            return True
        k, rows = self._length.max_draft_tokens, [*running, *sequences]
        n = len(rows)
        room = [k * s.drafts for s in running] + [k] * len(sequences)
        tokens = sum(s.remaining for s in rows) / n
        prompts = sum(len(s.request.prompt_tokens) for s in sequences) // n
        return self._length.may_pay(BatchState(n, room, tokens, prompts))

    def _round(self) -> list[RowOutput]:
        if self._running is None:
            return []
        waiting = self._scheduler.waiting or self._joining is not None
        self._running.replaced = bool(waiting)
        outputs = self._running.step()
        self._drop_idle()
        return outputs

    def _drop_idle(self) -> None:
        # What is still in flight then is of rows that have ended.
        if self._running is not None and not self._running.unfinished:
            self._running = None
