"""Rounds without requests, which compile the kernels that requests will need."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from ..backend import BackendDefaults
from ..models.compiled import CompiledForwards
from ..models.runner import ModelRunner
from ..request import Request
from ..sampling_params import SamplingParams
from ..spec_decode import Drafter
from ..utils.warm_up import warm_up
from .batch import DecodeBatch
from .round import BatchRound, DraftChoice

log = logging.getLogger("specdec.engine")


class Rehearsal:
    """Runs everything that a batch does once, before the first request.

    MLX's CUDA backend compiles a kernel when it first needs it, which takes seconds. On
    other backends nothing is rehearsed. A rehearsal is not timed, counted or kept. Its
    errors are ignored: a request that has the same error reports it.

    Args:
        backend: says whether new shapes take time.
        alone: no other rank computes with this one. Ranks do not rehearse.
    """

    def __init__(self, backend: BackendDefaults, *, alone: bool = True):
        #: Whether a rehearsal is needed and has not been run.
        self.due = alone and backend.new_shape_seconds > 0
        self.alone = alone
        self._backend = backend

    @CompiledForwards.at_once()
    def run(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        num_slots: int,
        max_draft_tokens: int,
        params: Sequence[SamplingParams],
        *,
        shrinks: bool = False,
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Rehearse with batches of ``num_slots`` rows.

        Args:
            max_draft_tokens: largest k of a round.
            params: settings of the rows, one for each batch; the user's functions in
                them are not called.
            shrinks: also rehearse the smaller batches that are left when rows end.
            needed: it ends early once this says no.
        """
        self.due = False
        batches = [(num_slots, p) for p in params]
        while shrinks and num_slots > 1:
            num_slots = (num_slots + 1) // 2
            batches.append((num_slots, params[0]))
        shows = [
            _Show(target, drafter, self._backend, n, max_draft_tokens, p)
            for n, p in batches
        ]
        try:
            warm_up.run([step for show in shows for step in show.steps()], needed)
        except Exception as error:
            log.debug("the rehearsal ended early", exc_info=error)
        mx.synchronize()
        mx.clear_cache()


class _Show:
    """A rehearsal of one batch, from its prompts to a row that joins."""

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        backend: BackendDefaults,
        num_slots: int,
        max_draft_tokens: int,
        params: SamplingParams,
    ):
        self._target = target.without_prefixes()
        self._drafter, self._backend = drafter, backend
        self._most = max_draft_tokens if drafter is not None else 0
        # Enough tokens for several rounds, none of them a row's last.
        self._params = replace(
            params.seeded(),
            max_tokens=8 * (self._most + 2),
            min_tokens=0,
            logits_processors=(),
            sampler=None,
            stop=(),
            grammar=None,
            num_draft_tokens=None,
        )
        self._in_flight: deque[BatchRound] = deque()
        self._rows = [self._row() for _ in range(num_slots)]
        self._batch: DecodeBatch | None = None

    def steps(self) -> Iterator[Callable[[], None]]:
        """The parts of the rehearsal, in order."""
        yield self._prompts
        yield self._begin
        for k in sorted({0, self._most}):
            yield partial(self._round, k)
        if len(self._rows) > 1:
            yield self._join

    def _row(self) -> Request:
        # A prompt of one token is not looked up in the prefix store, nor kept there.
        return Request(-1, "", (0,), self._params)

    def _prompts(self) -> None:
        prompts = [(0, 0)] * len(self._rows)
        rows = self._target.rows(prompts, max_round=self._most + 1, max_length=2)
        for _ in rows.prefill():
            pass
        mx.synchronize()

    def _begin(self) -> None:
        self._batch = self._begun(self._rows)

    def _begun(self, rows: Sequence[Request]) -> DecodeBatch:
        """A batch whose rows have their first tokens."""
        batch = DecodeBatch(
            self._target,
            self._drafter,
            rows,
            DraftChoice(self._most),
            self._backend,
            None,
            self._in_flight,
            len(rows),
        )
        for _ in batch.prefill():
            pass
        self._in_flight.popleft().read()
        return batch

    def _round(self, k: int) -> None:
        assert self._batch is not None
        plan = self._batch.plan(k)
        assert plan is not None
        self._batch.dispatch(plan)
        self._in_flight.popleft().read()

    def _join(self) -> None:
        """Have a row leave and, a round later, another take its place."""
        assert self._batch is not None
        self._rows[0].cancel()
        self._batch.expected = 1
        self._batch.retire()
        self._round(self._most)
        self._batch.join(self._begun([self._row()]), len(self._rows))
        self._round(self._most)
