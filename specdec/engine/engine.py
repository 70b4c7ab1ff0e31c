"""Requests in, tokens out: :meth:`Engine.step` shows a whole step.

A request waits, is admitted, and has its prompt prefilled, one chunk a step. Then it
joins the running batch as a row, decodes round after round, and leaves at its end.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..backend import LOOKAHEAD, BackendDefaults, memory_size
from ..cache.capacity import NARROWEST_CHUNK
from ..config import EngineConfig
from ..errors import reason_of
from ..models.pace import Pace
from ..models.runner import ModelRunner
from ..outputs import EngineLoad, RunStats
from ..parallel import Ranks
from ..request import Request
from ..sampling_params import SamplingParams
from ..spec_decode import Drafter, DraftGuard
from ..spec_decode.draft_length import BatchState, DraftLength
from ..spec_decode.drafter import most_proposed
from ..utils.output_text import Detokenizer, OutputText
from .admission import Preflight
from .batch import DecodeBatch
from .rehearsal import Rehearsal
from .round import BatchRound, DraftChoice, RoundObserver, StepOutput
from .scheduler import Scheduler

log = logging.getLogger("specdec.engine")

Models = tuple[ModelRunner, Drafter | None]

# What MLX may keep for reuse after a prompt, or at any time where the system needs the
# memory, as a share of the memory that it may hold.
# Freeing it took 18 ms on one H100 (benchmarks/results/joins-h100.md), and it has to be
# allocated again. One row alone would pay for that with every request.
_REUSED = 1 / 16


@dataclass(frozen=True)
class _Joining:
    """Rows whose prompts are being prefilled.

    Args:
        batch: the rows.
        chunks: each item hands one more chunk of prefill to the device.
        slots: how many slots the running batch needs once these rows have joined it.
        step: gives the most tokens of a row in a chunk.
    """

    batch: DecodeBatch
    chunks: Iterator[None]
    slots: int
    step: Callable[[], int]


class Engine:
    """Decodes up to ``config.batch_size`` requests at a time.

    Prefill chunks of joining rows alternate with rounds of the running rows, so that no
    running row waits for longer than one chunk.

    Args:
        target: runs the target model.
        drafter: proposes tokens. With ``None``, or once the drafter has raised an
            error, the engine decodes without a draft.
        config: batch size and draft length.
        backend: how to shape rounds.
        eos_token_ids: tokens that end a row.
        detokenizer: makes a new streaming detokenizer. Without it, results have
            tokens but no text, and stop texts are not found.
        observer: sees every round, if there is one.
        preflight: knows how much memory requests need; a request waits until there is
            enough. ``None``: memory is not checked.
        length: chooses how many tokens each round drafts; ``None``: always the most
            that the config allows.
        rehearsal: compiles kernels before the first request; engines with the same
            models share one.
        ranks: the target's ranks, if it is divided.
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
        ranks: Ranks | None = None,
    ):
        share = None if drafter is None else drafter.vocabulary_share
        self.stats = RunStats(vocabulary_share=share)
        #: Output of the last step, until the caller has taken it.
        self.unreported: list[StepOutput] = []
        most = most_proposed(drafter, config.max_draft_tokens)
        if length is not None:
            most = length.max_draft_tokens
        self._choice = DraftChoice(most, length, DraftGuard(), ranks)
        self._models = target, drafter and self._choice.guard.drafter(drafter)
        # Copies of ended rows, which are written to disk once they are computed.
        self._prefixes = None if target.prefixes is None else target.prefixes.store
        self._backend = backend
        self._pace = Pace(target.prefill_step_size)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detokenizer = detokenizer
        self._observer = observer
        self._rehearsal = rehearsal or Rehearsal(backend)
        self._scheduler = Scheduler(
            config.batch_size,
            join_rounds=backend.join_rounds,
            budget=None if preflight is None else preflight.limit,
            cost=None if preflight is None else preflight.cost,
        )
        memory = config.memory_limit or memory_size() or 0
        self._most_reused = int(_REUSED * memory)
        if backend.shares_memory and memory:
            mx.set_cache_limit(self._most_reused)
        self._alive: dict[int, Request] = {}
        # Requests that ended outside of a round, as by cancel(). The next step reports
        # them.
        self._ended_early: list[Request] = []
        # The rows that decode, those whose prompts are being prefilled, and the rounds
        # of both that the host has not read yet.
        self._running: DecodeBatch | None = None
        self._joining: _Joining | None = None
        self._in_flight: deque[BatchRound] = deque()
        self._lapped: float | None = None  # None: there is no request

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, or its end has not been reported."""
        return bool(self._alive)

    @property
    def load(self) -> EngineLoad:
        """Running rows, waiting requests, and the bytes of the rows' caches."""
        joining = None if self._joining is None else self._joining.batch
        batches = [b for b in (self._running, joining) if b is not None]
        return EngineLoad(
            running=sum(len(b.unfinished) for b in batches),
            waiting=self._scheduler.waiting,
            cache_bytes=sum(b.cache_bytes for b in batches),
        )

    def add(self, request: Request) -> None:
        """Queue a request; it gets a row first come, first served.

        The request must be new, and no unfinished request may have the same ``index``.
        """
        assert request.index not in self._alive
        assert request.finish_reason is None
        request.eos_token_ids = self._eos_token_ids
        if self._detokenizer is not None:
            request.output = OutputText(self._detokenizer(), request.params.stop)
        request.queued = time.perf_counter()
        # In the other order, an interrupt between the two would leave the engine busy
        # for ever with a request that is not queued.
        self._scheduler.add(request)
        self._alive[request.index] = request

    def abandon(self) -> list[StepOutput]:
        """Stop decoding, after a step that was interrupted.

        Returns:
            The output of the step, and the requests that had ended. Calls return the
            same until :meth:`reported` is called.
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
        """Drop the last output: the caller has taken it."""
        self.unreported = []

    def cancel(self, index: int) -> bool:
        """End a request with the tokens it has; the next step reports its result.

        Returns:
            Whether there was something to cancel: ``False`` if it had ended.
        """
        request = self._alive.get(index)
        if request is None or request.finish_reason is not None:
            return False
        request.cancel()
        self._ended_early.append(request)
        return True

    def step(self) -> list[StepOutput]:
        """Admit, prefill, propose, verify, accept, commit, emit.

        A prefill chunk and a round are handed to the device. While it computes them,
        the host reads the round before and emits that round's tokens.

        Returns:
            The rows' output, which is empty until the first round can be read. It stays
            in ``unreported`` until :meth:`reported` or the next step.
        """
        self.unreported = []
        self.stats.other_seconds += self._lap()
        if self._ended_early:
            outputs = self._leave()
        else:
            if self._joining is None and self._scheduler.waiting:
                self._admit()
            if self._joining is not None:
                self._prefill(self._joining)
            self.stats.prefill_seconds += self._lap()
            read_now = self._decode()  # propose, verify, accept, commit
            outputs = self._emit() if read_now and self._in_flight else []
        # Set before counting, which removes ended requests from those alive.
        self.unreported = outputs
        self._count(outputs)
        self.stats.decode_seconds += self._lap()
        if not self._alive:
            if self._prefixes is not None:
                self._prefixes.write_computed(None)
            self._lapped = None
        return outputs

    def _lap(self) -> float:
        """Seconds since the last call; 0 if there was no request then."""
        now = time.perf_counter()
        before, self._lapped = self._lapped, now
        return 0.0 if before is None else now - before

    def warm_up(self, needed: Callable[[], bool] = lambda: True) -> None:
        """Compile the kernels that requests will need, before the first one comes.

        Otherwise they are compiled when the first requests are admitted, for their
        settings. It ends early once ``needed`` says no.
        """
        if self._rehearsal.due:
            drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
            start = time.perf_counter()
            both = [SamplingParams(), drawn]
            rows = self._scheduler.batch_size
            self._rehearse(rows, both, shrinks=True, needed=needed)
            self.stats.warmup_seconds += time.perf_counter() - start

    def _rehearse(
        self, num_rows: int, params: Sequence[SamplingParams], **options: Any
    ) -> None:
        slots = self._backend.rows_to_keep(self._scheduler.batch_size, num_rows)
        row = Request(-1, "", (0,), SamplingParams())
        while slots > 1 and not self._scheduler.affords([row], slots):
            slots //= 2
        most = self._choice.most
        self._rehearsal.run(*self._models, slots, most, params, **options)

    def _leave(self) -> list[StepOutput]:
        """Remove requests that ended outside of a round, wherever they are."""
        outputs = [StepOutput.of(s) for s in self._ended_early]
        self._ended_early = []
        self._scheduler.ended()
        self._retire()
        return outputs

    def _count(self, outputs: list[StepOutput]) -> None:
        stats, now = self.stats, time.perf_counter()
        for output in outputs:
            request = output.request
            if request.ended is not None:  # counted before an interrupt
                continue
            stats.generated_tokens += len(output.token_ids)
            stats.decode_tokens += len(output.token_ids)
            if output.token_ids and request.shown == len(output.token_ids):
                stats.decode_tokens -= 1  # the first token
            if request.began is None and request.tokens:
                request.began = now
            if output.ended:
                request.ended = now
                stats.take_ended(request)
        stats.draft_error = self._choice.guard.error
        stats.peak_memory_bytes = mx.get_peak_memory()
        # For each that has ended, also if an interrupt came after it was counted. A new
        # request may have its index by then.
        for output in outputs:
            request = output.request
            if output.ended and self._alive.get(request.index) is request:
                del self._alive[request.index]

    def _prefill(self, prompts: _Joining) -> None:
        """Hand over a chunk of the joining rows' prompts; they join after the last."""
        joining, slots = prompts.batch, prompts.slots
        if self._running is not None:
            self._running.note_interruption()
        joining.alone = self._running is None
        before = joining.prefill_tokens
        try:
            more = next(prompts.chunks, _DONE) is not _DONE
            if self._running is None and not self._backend.prefills_by_layers:
                # Waiting bounds memory, and no round runs that it could delay.
                mx.synchronize()
        except Exception as error:
            self._part(joining.unfinished, error)
            return
        self.stats.prefill_tokens += joining.prefill_tokens - before
        if self._running is None and mx.get_cache_memory() > self._most_reused:
            mx.clear_cache()
        if more and joining.unfinished:
            return
        # Done first: the generator holds caches that are about to be copied.
        self._joining = None
        if not joining.unfinished:
            return
        if self._running is None:
            self._running = joining
            self._retire()
            if self._running is not None:
                self._running.widen(slots)
        else:
            self._running.join(joining, slots)

    def _admit(self) -> None:
        """Let waiting requests join, if rows are free; no others are joining."""
        running = [] if self._running is None else self._running.unfinished
        if not running:
            if self._rehearsal.due:
                first = self._scheduler.first.params
                self._rehearse(self._scheduler.together(), [first])
                self.stats.warmup_seconds += self._lap()
            self._choice.prepare(*self._scheduler.next_batch())
            self.stats.calibration_seconds += self._lap()
        requests = self._scheduler.admit(running)
        if not requests:
            return
        try:
            self._begin(requests, running)
        except Exception as error:
            self._part(requests, error)

    def _part(self, requests: list[Request], error: Exception) -> None:
        """Go on after an error of joining rows: each joins alone.

        A single one tries smaller chunks, and ends if the smallest fail. What the rows
        have allocated is freed; no running row is touched.

        Raises:
            Exception: ``error``, if the device fails at anything, or other ranks have
                not met it.
        """
        step = self._models[0].prefill_step_size
        if self._joining is not None:
            step, self._joining = self._joining.step(), None
        flying = [f for f in self._in_flight if not any(s in f.rows for s in requests)]
        self._in_flight.clear()
        self._in_flight.extend(flying)
        if not self._rehearsal.alone:
            raise error
        traceback.clear_frames(error.__traceback__)
        mx.clear_cache()
        try:
            mx.eval(mx.zeros(1) + 1)
        except Exception:
            raise error from None
        if len(requests) > 1:
            log.warning(
                "%d requests cannot join together (%s): each joins alone",
                len(requests),
                reason_of(error),
            )
            self._scheduler.part(requests)
            return
        for request in requests:
            most = min(request.prefill_step or step, step, len(request.prompt_tokens))
            request.prefill_step = max(most // 4, NARROWEST_CHUNK)
            if request.prefill_step < most:
                log.warning(
                    "a prompt cannot be prefilled in chunks of %d tokens (%s): it "
                    "tries %d",
                    most,
                    reason_of(error),
                    request.prefill_step,
                )
                self._scheduler.part(requests)
                return
            request.fail(f"it cannot be decoded ({reason_of(error)})")
            self._ended_early.append(request)

    def _begin(self, requests: list[Request], running: list[Request]) -> None:
        target, drafter = self._models
        if (step := requests[0].prefill_step) is not None:  # it joins alone
            target = target.in_steps(step)
        if running and self._backend.prefills_by_layers and self._rehearsal.alone:
            # Elsewhere nothing waits for a chunk, and ranks have clocks of their own.
            target = target.paced(self._pace)
        drafts = drafter is not None and self._may_draft(running, requests)
        for request in requests:
            request.kv_bits, request.drafts = target.options.kv_bits, drafts
        joining_slots, slots = self._room(running, requests)
        batch = DecodeBatch(
            target,
            drafter,
            requests,
            self._choice,
            self._backend,
            self._observer,
            self._in_flight,
            joining_slots,
        )
        step_now = partial(target.step, len(batch.slots))
        self._joining = _Joining(batch, batch.prefill(), slots, step_now)

    def _room(self, running: list[Request], joining: list[Request]) -> tuple[int, int]:
        """The number of slots for the joining rows, and for all rows after the join.

        With static shapes, requests that wait only for these rows' prefill have slots
        from the beginning, so that they join without a copy of all rows. Idle slots,
        and two copies of a joining row's cache, need memory. If there is not enough for
        all requests that wait, half of them get slots, a quarter, and so on. If there
        is not enough for any, there are as many slots as rows.
        """

        def slots(rows: int) -> int:
            return self._backend.rows_to_keep(self._scheduler.batch_size, rows)

        rows, joining_slots = [*running, *joining], slots(len(joining))
        now = 0 if self._running is None else len(self._running.slots)
        coming = min(self._scheduler.expected, self._scheduler.batch_size - len(rows))
        if not self._backend.static_shapes:
            coming = 0
        for halvings in range(coming.bit_length() + 1):  # the last one leaves none
            more = coming >> halvings
            then = max(now, slots(len(rows) + more))
            held = then if then == joining_slots and not now else then + joining_slots
            if held <= len(rows) or self._scheduler.affords(rows, held):
                return joining_slots, then
        if self._running is not None:
            self._running.compact()
        return len(joining), len(rows)

    def _may_draft(self, running: list[Request], requests: list[Request]) -> bool:
        """Whether to draft for joining rows; this is decided once for each row.

        The joining rows are drafted for if running rows are, or if drafting may save
        more time than the draft needs for their prompts.
        """
        if running and self._running is not None and self._running.drafts:
            return True
        k, n = self._choice.most, len(requests)
        free = self._scheduler.batch_size - len(running) - n
        # Those that wait for a row are like these: they join next.
        joining = n + min(self._scheduler.expected, free)
        room = [k * s.drafts for s in running] + [k] * joining
        tokens = sum(s.remaining for s in requests) / n * joining
        tokens = (tokens + sum(s.remaining for s in running)) / len(room)
        context = sum(len(s.prompt_tokens) for s in requests) // n
        prompts = context * joining // len(room)
        state = BatchState(len(room), room, tokens, prompts, context=context)
        return self._choice.may_pay(state)

    def _decode(self) -> bool:
        """Hand a round of the running rows to the device, if they need another.

        Returns:
            Whether the oldest round in flight is to be read now.
        """
        batch, ahead = self._running, len(self._in_flight)
        if batch is None or ahead > LOOKAHEAD:
            return True
        batch.expected = self._scheduler.expected
        if self._joining is not None:
            batch.expected += len(self._joining.batch.unfinished)
        plan = batch.plan()
        if plan is None:
            return True
        if ahead <= plan.lookahead:
            batch.dispatch(plan)
        return ahead >= plan.lookahead

    def _emit(self) -> list[StepOutput]:
        """Wait for the oldest round in flight; return its rows' tokens and text."""
        self.stats.decode_seconds += self._lap()
        round_ = self._in_flight.popleft()
        rows = [s for s in round_.rows if s is not None and s.finish_reason is None]
        kept = round_.read()
        if round_.first:
            self.stats.take_prefilled(rows)
            self.stats.prefill_seconds += self._lap()
        else:
            assert self._running is not None
            self._running.learn(round_, kept)
            self.stats.rounds += 1
        if self._observer is not None:
            self._observer.read(round_.num_draft_tokens, rows)
        if self._prefixes is not None:  # of rows that ended in earlier steps: computed
            self._prefixes.write_computed(1)
        self._retire()
        return [StepOutput.of(s) for s in rows]

    def _retire(self) -> None:
        """Remove rows that have ended, and rounds in flight that no row needs.

        When no request is left, this frees all caches: there may be no next step.
        """
        if self._joining is not None and not self._joining.batch.unfinished:
            self._joining = None
        if self._running is not None and not self._running.retire():
            self._running = None
        if self._running is None:
            left = [f for f in self._in_flight if any(map(_runs, f.rows))]
            self._in_flight.clear()
            self._in_flight.extend(left)


_DONE = object()


def _runs(row: Request | None) -> bool:
    return row is not None and row.finish_reason is None
