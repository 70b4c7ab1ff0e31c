"""Requests in, tokens out: prefill of joining rows between rounds of running ones.

admit -> prefill, a chunk a step -> join -> round after round -> finish
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults
from ..config import EngineConfig
from ..errors import reason_of
from ..models.runner import ModelRunner
from ..outputs import EngineLoad, RunStats
from ..request import Request
from ..sampling_params import SamplingParams
from ..spec_decode import Drafter, DraftGuard
from ..spec_decode.draft_length import BatchState, DraftLength, FixedLength
from ..utils.output_text import Detokenizer, OutputText
from .admission import Preflight
from .decode_batch import DecodeBatch
from .in_flight import InFlight, StepOutput
from .observer import RoundObserver
from .rehearsal import Rehearsal
from .scheduler import Scheduler

Models = tuple[ModelRunner, Drafter | None]


@dataclass(frozen=True)
class _Joining:
    """Rows whose prompts are being taken in.

    Args:
        chunks: hands a chunk of them over whenever it is asked for the next.
        slots: of all rows, once these have joined.
    """

    batch: DecodeBatch
    chunks: Iterator[None]
    slots: int


class Engine:
    """Decodes requests as rows become free, ``config.batch_size`` at a time.

    Prefill chunks of the rows that are joining alternate with rounds of the running
    rows: nobody waits for longer than a chunk.

    Args:
        target: runs the target model.
        drafter: proposes; ``None`` decodes plainly, as does an engine whose drafter
            has raised.
        config: rows, draft tokens.
        backend: how to shape rounds.
        eos_token_ids: tokens that end a row.
        detokenizer: makes a new streaming detokenizer; without it results have
            tokens and no text, and stop texts are not found.
        observer: sees every round.
        preflight: rows wait while those that run leave no memory for them.
        length: chooses how many tokens rounds draft; ``None``: the most that the
            config allows.
        rehearsal: of what decodes; another engine with the same models may have it.
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
        rehearsal: Rehearsal | None = None,
    ):
        share = None if drafter is None else drafter.vocabulary_share
        self.stats = RunStats(vocabulary_share=share)
        #: What a step emitted, until its caller has it.
        self.unreported: list[StepOutput] = []
        self._guard = DraftGuard()
        self._models = self._guarded((target, drafter))
        self._backend = backend
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._observer = observer or RoundObserver()
        self._length = self._guard.length(
            length or FixedLength(config.max_draft_tokens)
        )
        self._rehearsal = rehearsal or Rehearsal(backend)
        self._scheduler = Scheduler(
            config.batch_size,
            join_rounds=backend.join_rounds,
            budget=None if preflight is None else preflight.limit,
            cost=None if preflight is None else preflight.cost,
        )
        self._alive: dict[int, Request] = {}
        # Cancelled, or not to be decoded: the next step reports them.
        self._ended_early: list[Request] = []
        # Rows that decode, those whose prompts are being taken in, and rounds of both
        # that the host has not read.
        self._running: DecodeBatch | None = None
        self._joining: _Joining | None = None
        self._in_flight: deque[InFlight] = deque()
        self._lapped: float | None = None  # None: no request is there

    def _guarded(self, models: Models) -> Models:
        target, drafter = models
        return target, drafter and self._guard.drafter(drafter)

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet, or its end was not reported."""
        return bool(self._alive)

    @property
    def load(self) -> EngineLoad:
        """Rows, requests that wait for one, and bytes of the rows' caches."""
        joining = None if self._joining is None else self._joining.batch
        batches = [b for b in (self._running, joining) if b is not None]
        return EngineLoad(
            running=sum(len(b.unfinished) for b in batches),
            waiting=self._scheduler.waiting,
            cache_bytes=sum(b.cache_bytes for b in batches),
        )

    def add(self, request: Request) -> None:
        """Queue a request; it gets a row as soon as one is free.

        ``request.index`` must not be that of a request which has not ended; none is
        decoded twice.
        """
        assert request.index not in self._alive
        assert request.finish_reason is None
        request.eos_token_ids = self._eos_token_ids
        if self._detokenizer is not None:
            request.output = OutputText(self._detokenizer(), request.params.stop)
        request.queued = time.perf_counter()
        # In this order: one that never gets a row would be waited for.
        self._scheduler.add(request)
        self._alive[request.index] = request

    def abandon(self) -> list[StepOutput]:
        """Decode no more, after a step that did not end.

        Returns:
            What the step emitted, and rows that had ended: the same ones until they
            were :meth:`reported`.
        """
        self._running = self._joining = None
        self._in_flight.clear()
        held = {id(o.request) for o in self.unreported if o.ended}
        self.unreported = [
            *self.unreported,
            *(
                StepOutput.of(s)
                for s in self._alive.values()
                if s.finish_reason is not None and id(s) not in held
            ),
        ]
        self._count([o for o in self.unreported if o.ended])
        return self.unreported

    def reported(self) -> None:
        """Forget what was emitted last: its caller has it."""
        self.unreported = []

    def cancel(self, index: int) -> bool:
        """End a request as it is; the next step reports its result.

        Returns:
            Whether it had not ended yet.
        """
        sequence = self._alive.get(index)
        if sequence is None or sequence.finish_reason is not None:
            return False
        sequence.cancel()
        self._ended_early.append(sequence)
        return True

    def step(self) -> list[StepOutput]:
        """Hand a chunk of prefill and a round to the device; read the round before.

        Returns:
            What rows emitted: nothing while first rounds are on their way. It is
            held until it is :meth:`reported`, at the latest by the next step.
        """
        self.reported()
        self.stats.other_seconds += self._lap()
        if self._ended_early:
            outputs = self._leave()
        else:
            self._admit()
            self._prefill_chunk()
            self.stats.prefill_seconds += self._lap()
            outputs = [] if self._dispatch() else self._read()
        # Counting takes rows that have ended off the list of those alive.
        self.unreported = outputs
        self._count(outputs)
        self.stats.decode_seconds += self._lap()
        if not self.busy:
            self._lapped = None
        return outputs

    def _lap(self) -> float:
        """Seconds since it was last asked, or nothing since requests came."""
        now = time.perf_counter()
        before, self._lapped = self._lapped, now
        return 0.0 if before is None else now - before

    def warm_up(self) -> None:
        """Compile what requests will need, before the first one comes.

        Without it that is done for the first ones, by their parameters.
        """
        if self._rehearsal.due:
            drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
            begun = time.perf_counter()
            self._rehearse(self._scheduler.batch_size, [SamplingParams(), drawn])
            self.stats.warmup_seconds += time.perf_counter() - begun

    def _rehearse(self, num_rows: int, params: Sequence[SamplingParams]) -> None:
        slots = self._backend.rows_to_keep(self._scheduler.batch_size, num_rows)
        row = Request(-1, "", (0,), SamplingParams())
        while slots > 1 and not self._scheduler.affords([row], slots):
            slots //= 2
        most = self._length.max_draft_tokens
        self._rehearsal.run(*self._models, slots, most, params)

    def _leave(self) -> list[StepOutput]:
        """Let go of rows that ended outside a round, wherever they are."""
        outputs = [StepOutput.of(s) for s in self._ended_early]
        self._ended_early = []
        self._scheduler.ended()
        if self._joining is not None and not self._joining.batch.unfinished:
            self._joining = None
        self._retire()
        return outputs

    def _count(self, outputs: list[StepOutput]) -> None:
        stats, now = self.stats, time.perf_counter()
        for output in outputs:
            sequence = output.request
            if sequence.ended is not None:  # counted before an interrupt
                continue
            stats.generated_tokens += len(output.token_ids)
            stats.decode_tokens += len(output.token_ids)
            if sequence.began is None and sequence.tokens:
                sequence.began = now
                stats.decode_tokens -= bool(output.token_ids)
            if output.ended:
                sequence.ended = now
                stats.take_ended(sequence)
        stats.draft_error = self._guard.error
        stats.peak_memory_bytes = mx.get_peak_memory()
        # In one go, as an interrupt may come at any time.
        if any(output.ended for output in outputs):
            alive = {i: s for i, s in self._alive.items() if s.ended is None}
            self._alive = alive

    def _prefill_chunk(self) -> None:
        """Hand a chunk of the joining rows' prompts over; after the last they join."""
        if self._joining is None:
            return
        joining, slots = self._joining.batch, self._joining.slots
        if self._running is not None:
            self._running.note_interruption()
        joining.alone = self._running is None
        more = next(self._joining.chunks, _DONE) is not _DONE
        if self._running is None:
            # Nothing is drained by waiting, and what is held meanwhile has a bound.
            mx.synchronize()
            mx.clear_cache()
        if more and joining.unfinished:
            return
        # The generator holds caches that are about to be copied.
        self._joining = None
        if not joining.unfinished:
            return
        if self._running is None:
            self._running = joining
            self._retire()
        else:
            self._running.join(joining, slots)

    def _admit(self) -> None:
        """Give rows that wait a place, where there is one and no others are joining."""
        if self._joining is not None or not self._scheduler.waiting:
            return
        running = [] if self._running is None else self._running.unfinished
        if not running:
            if self._rehearsal.due:
                first = self._scheduler.first.params
                self._rehearse(self._scheduler.together(), [first])
                self.stats.warmup_seconds += self._lap()
            self._length.prepare(self._scheduler.together())
            self.stats.calibration_seconds += self._lap()
        sequences = self._scheduler.admit(running)
        if not sequences:
            return
        try:
            self._begin(sequences, running)
        except Exception as error:
            self._begin_apart(sequences, running, error)

    def _begin_apart(
        self, sequences: list[Request], running: list[Request], error: Exception
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
        self._joining = None
        if len(fit) == len(sequences):
            raise error
        if fit:
            self._begin(fit, running)

    def _begin(self, sequences: list[Request], running: list[Request]) -> None:
        target, drafter = self._models
        drafts = drafter is not None and self._may_draft(drafter, running, sequences)
        for sequence in sequences:
            sequence.kv_bits, sequence.drafts = target.options.kv_bits, drafts
        own, slots = self._room(running, sequences)
        batch = DecodeBatch(
            target,
            drafter,
            sequences,
            self._length,
            self._backend,
            self._observer,
            self._in_flight,
            own,
        )
        self._joining = _Joining(batch, batch.prefill(), slots)

    def _room(self, running: list[Request], joining: list[Request]) -> tuple[int, int]:
        """Slots for rows while they join, and for all once they have.

        Idle slots, and two places for a row that joins, are there where memory allows.
        """

        def slots(rows: int) -> int:
            return self._backend.rows_to_keep(self._scheduler.batch_size, rows)

        rows = [*running, *joining]
        own, then = slots(len(joining)), slots(len(rows))
        if self._running is None:
            held = own
        else:
            then = max(then, len(self._running.slots))
            held = then + own
        if held > len(rows) and not self._scheduler.affords(rows, held):
            if self._running is not None:
                self._running.compact()
            return len(joining), len(rows)
        return own, then

    def _may_draft(
        self, drafter: Drafter, running: list[Request], sequences: list[Request]
    ) -> bool:
        """Whether rows that begin are drafted for; that holds until they end.

        They are if the running rows draft, and otherwise if a draft may pay for taking
        in their prompts.
        """
        if drafter.hidden_layers:  # of these it is shown every row's
            return True
        if running and self._running is not None and self._running.drafts:
            return True
        k, rows = self._length.max_draft_tokens, [*running, *sequences]
        n = len(rows)
        room = [k * s.drafts for s in running] + [k] * len(sequences)
        tokens = sum(s.remaining for s in rows) / n
        prompts = sum(len(s.prompt_tokens) for s in sequences) // n
        return self._length.may_pay(BatchState(n, room, tokens, prompts))

    def _dispatch(self) -> bool:
        """Hand a round of the running rows over, if one is of use and its turn.

        Returns:
            Whether the rounds before it can wait to be read.
        """
        batch, ahead = self._running, len(self._in_flight)
        if batch is None or ahead > LOOKAHEAD:
            return False
        batch.expected = self._scheduler.expected
        if self._joining is not None:
            batch.expected += len(self._joining.batch.unfinished)
        if not batch.needs_a_round():
            return False
        k = batch.choose_k()
        lookahead = batch.lookahead(k)
        if ahead <= lookahead:
            self._in_flight.append(batch.dispatch(k))
        return ahead < lookahead

    def _read(self) -> list[StepOutput]:
        """Read the oldest round in flight; what its rows emitted."""
        if not self._in_flight:
            return []
        self.stats.decode_seconds += self._lap()
        round_ = self._in_flight.popleft()
        rows = round_.running
        kept = round_.read()
        if round_.first:
            self.stats.take_prefilled(rows)
            self.stats.prefill_seconds += self._lap()
        else:
            assert self._running is not None
            self._running.learn(round_, kept)
            self.stats.rounds += 1
        self._observer.read(round_.num_draft_tokens, rows)
        self._retire()
        return [StepOutput.of(s) for s in rows]

    def _retire(self) -> None:
        """Let go of running rows that have ended, and of what is in flight of them."""
        if self._running is None:
            return
        self._running.retire()
        if not self._running.unfinished:
            self._running = None
            left = [r for r in self._in_flight if r.running]
            self._in_flight.clear()
            self._in_flight.extend(left)


_DONE = object()
