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
from ..errors import reason_of
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

# Rounds without a draft after which rows that join ask whether it is to be let go.
IDLE = 64


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
        # Cancelled, or not to be decoded: the next step reports them.
        self._ended_early: list[Sequence] = []
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
        # In this order: one that never gets a row would be waited for.
        self._scheduler.add(sequence)
        self._alive[request.index] = sequence

    def abandon(self) -> list[RowOutput]:
        """Decode no more, after a step that did not end; its rows that had ended."""
        self._running, self._joining, self._chunks = None, None, iter(())
        ended = [s for s in self._alive.values() if s.finish_reason is not None]
        outputs = [RowOutput.of(s) for s in ended]
        self._count(outputs)
        return outputs

    def cancel(self, index: int) -> bool:
        """End a request as it is; the next step tells its result.

        Returns:
            Whether it had not ended yet.
        """
        sequence = self._alive.get(index)
        if sequence is None or sequence.finish_reason is not None:
            return False
        sequence.cancel()
        self._ended_early.append(sequence)
        return True

    def step(self) -> list[RowOutput]:
        """One chunk of prefill, one round, or both; what the rows emitted."""
        outputs = self._leave() if self._ended_early else []
        if self._running is None and self._joining is None and self._scheduler.waiting:
            waiting = min(self._scheduler.waiting, self._config.batch_size)
            self._length.prepare(waiting)
        start = time.perf_counter()
        if not outputs and not self._round_is_due:
            self._round_is_due = True
            outputs = self._prefill_chunk()
            elapsed = time.perf_counter() - start
            self.stats.prefill_seconds += elapsed
            start += elapsed
            if outputs:
                self.stats.prefilled += len(outputs)
                sequences = [o.sequence for o in outputs]
                self.stats.prompt_tokens += sum(
                    len(s.request.prompt_tokens) for s in sequences
                )
                self.stats.prefix_tokens += sum(s.prefix_tokens for s in sequences)
        # First tokens do not wait for a round.
        if not outputs:
            self._round_is_due = False
            outputs = self._round()
            self.stats.decode_seconds += time.perf_counter() - start
            self.stats.decode_tokens += sum(len(o.token_ids) for o in outputs)
            self.stats.rounds += bool(outputs)
        self._count(outputs)
        return outputs

    def _leave(self) -> list[RowOutput]:
        """Take rows that ended outside a round out of wherever they are."""
        outputs = [RowOutput.of(s) for s in self._ended_early]
        self._ended_early = []
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
            if output.ended and sequence.ended is None:
                sequence.ended = now
                stats.take_ended(sequence)
        stats.draft_error = self._guard.error
        stats.peak_memory_bytes = mx.get_peak_memory()
        # In one go, as an interrupt may come at any time.
        if any(output.ended for output in outputs):
            alive = {i: s for i, s in self._alive.items() if s.ended is None}
            self._alive = alive

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
        # Rows that join others get a drafter where these have one, chunk by chunk too.
        drafts = self._running is not None and self._running.drafts
        if drafts and self._joining.unfinished and not self._joining.begin_drafting():
            return outputs or []
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
        try:
            self._begin(sequences, running)
        except Exception as error:
            self._begin_apart(sequences, running, error)

    def _begin_apart(
        self, sequences: list[Sequence], running: list[Sequence], error: Exception
    ) -> None:
        """Begin the rows without those that raise ``error`` alone too: these end."""
        fit = []
        for sequence in sequences:
            try:
                self._begin([sequence], running)
                fit.append(sequence)
            except Exception as own:
                self._ended_early.append(sequence)
                sequence.fail(f"it cannot be decoded ({reason_of(own)})")
        self._joining, self._chunks = None, iter(())
        if len(fit) == len(sequences):
            raise error
        if fit:
            self._begin(fit, running)

    def _begin(self, sequences: list[Sequence], running: list[Sequence]) -> None:
        models, kv_bits = self._models, sequences[0].request.kv_bits
        if kv_bits is not None and self._packed is not None:
            models = self._guarded(self._packed(kv_bits))
        for sequence in sequences:
            sequence.kv_bits = models[0].options.kv_bits
        target, drafter = models
        self._joining = RowBatch(
            target,
            drafter,
            sequences,
            self._length,
            self._backend,
            self._observer,
            late=drafter is not None and self._may_wait(drafter, running, sequences),
        )
        self._chunks = self._joining.prefill()

    def _may_wait(
        self, drafter: Drafter, running: list[Sequence], sequences: list[Sequence]
    ) -> bool:
        """Whether a drafter's share of prefill may wait until it is to propose.

        Rows that join do as those that they join, whose drafter is let go where it has
        proposed nothing for long and may not pay. Hidden states are there but once.
        """
        if drafter.hidden_layers:
            return False
        joined = self._running if running else None
        if joined is not None and (not joined.drafts or joined.idle < IDLE):
            return not joined.drafts
        n = len(sequences)
        k = self._length.max_draft_tokens
        tokens = sum(s.remaining for s in sequences) / n
        known = sum(len(s.request.prompt_tokens) for s in sequences) // n
        if self._length.may_pay(BatchState(n, [k] * n, tokens, known)):
            return False
        if joined is not None:
            joined.let_go_of_draft()
        return True

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
