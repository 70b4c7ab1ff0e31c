"""Times forwards of a target and steps of its drafter, before the first round."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from .. import backend
from ..backend import BackendDefaults
from ..config import EngineConfig
from ..models.compiled import CompiledForwards
from ..models.layers import arrays_of
from ..models.runner import ModelRows, ModelRunner
from ..parallel import Ranks
from ..request import Request
from ..sampling_params import SamplingParams
from ..spec_decode import Drafter
from ..spec_decode.commit import Accepted, Committed
from ..spec_decode.draft_length import (
    LADDER,
    AutoLength,
    CostStore,
    Forwards,
)
from ..spec_decode.drafter import most_proposed
from ..spec_decode.guard import as_drafter_error, vetted
from ..spec_decode.verifier import Verifier

log = logging.getLogger("specdec.engine")

# How many tokens are proposed to time a draft step.
PROPOSED = 3
BUDGET_SECONDS = 1.5
# Runs that take less than the share QUICK of the budget are timed overlapping, as
# rounds run: MANY in each of SWEEPS sweeps.
QUICK, MANY, SWEEPS = 1 / 16, 7, 4
# The machine was busy if the usual sweep took so many times the fastest one.
BUSY = 1.2
# A run that takes less than the share SETTLED of the one before may still be compiling.
# It is run again, MOST_SETTLING times at most, unless it takes too many seconds.
SETTLED, MOST_SETTLING, MOST_SETTLING_SECONDS = 0.7, 4, 6.0
# Where kernels are compiled, which takes seconds each, slow runs are timed this many
# times more after all others: a plain step that included a kernel's compilation would
# make drafting look free.
SECOND_LOOKS = 2

Run = Callable[[], Sequence[mx.array]]


class _Stopwatch:
    """Times runs within a budget of seconds."""

    def __init__(self, clock: Callable[[], float], budget: float):
        self._clock, self._budget = clock, budget
        self._begun = clock()

    def late(self, seconds: float) -> bool:
        """Whether ``seconds`` more would exceed the budget."""
        return self._clock() - self._begun + seconds > self._budget

    def once(self, run: Run) -> float:
        """Seconds of one run, until its result is computed."""
        start = self._clock()
        mx.eval(run())
        return self._clock() - start

    def settled(self, run: Run, likely: float) -> float:
        """Seconds of a run, once it no longer compiles anything.

        Compiling does not count against the budget, since rounds would compile the
        same.

        Args:
            likely: seconds expected without compiling. A slow first run that is faster
                than this counts.
        """
        times = [self.once(run)]
        if self._budget / 8 < times[0] < likely:
            return times[0]
        times.append(self.once(run))
        while times[-1] < SETTLED * times[-2] and len(times) <= MOST_SETTLING:
            if not self._budget * QUICK < times[-1] <= MOST_SETTLING_SECONDS:
                break
            times.append(self.once(run))
        self._begun += sum(max(0.0, t - times[-1]) for t in times)
        return min(times[1:])

    def again(self, run: Run, known: float) -> float:
        """Median seconds of runs that overlap, as rounds do.

        Waiting for each run would add launching and reading, which on a GPU take as
        long as a draft step. For a slow run, and beyond the budget, this returns the
        ``known`` time.
        """
        if known > self._budget * QUICK or self.late((MANY + 2) * known):
            return known
        return statistics.median(pipelined(run, MANY, self._clock))


def pipelined(
    run: Callable[[], Any], repeat: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of ``repeat`` runs, from the end of one to the end of the next.

    Each run is built while the one before is computed, as rounds are.

    Args:
        run: builds arrays, or lists of arrays.
    """
    waiting = run()
    mx.async_eval(waiting)
    ends = []
    for _ in range(repeat + 1):
        following = run()
        mx.async_eval(following)
        mx.eval(waiting)
        ends.append(clock())
        waiting = following
    mx.eval(waiting)
    return [b - a for a, b in itertools.pairwise(ends)]


@CompiledForwards.at_once()
def measure_forwards(
    target: ModelRunner,
    drafter: Drafter,
    num_rows: int,
    *,
    max_draft_tokens: int,
    context: int = 0,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Forwards:
    """Time a plain step, a draft step, and verify forwards of more tokens.

    With a ``context``, the target's forwards are timed once more with so many tokens in
    every row, as far as the budget allows. They are zeros, which are read as others.

    All tokens differ, so that experts are spread as in rounds. Each forward runs until
    it no longer compiles anything. Then all are timed as rounds run, in several sweeps,
    and the fastest time counts, as other load may slow a sweep down. Slow forwards run
    once or twice, and the last verify forward only if there is time.

    Raises:
        DrafterError: the drafter raised an error.
    """
    watch = _Stopwatch(clock, budget_seconds)
    widest = max_draft_tokens + 1
    # Without prompts, nothing is looked up in the prefix store, or kept there.
    rows = target.rows(
        [()] * num_rows,
        max_round=widest,
        max_length=context + 4 * widest,
        single_stays=True,
    )
    for _ in rows.prefill():
        mx.synchronize()

    tokens = SpreadTokens(target.vocab_size)

    def verify(num_tokens: int) -> list[mx.array]:
        logits = rows.forward(tokens.next(num_rows, num_tokens))
        chosen = mx.argmax(logits, axis=-1)
        counts = mx.full((num_rows,), num_tokens, mx.int32)
        rows.trim_per_sequence(counts, num_tokens)
        return [chosen, rows.offset]

    # Runs by what they time: 0 is drafting, -1 is drafting one token (a block head
    # drafts more at nearly the same cost); others are a verify forward's tokens.
    runs: dict[int, Run] = {1: lambda: verify(1)}
    plain = watch.settled(runs[1], 0.0)
    seconds = {1: plain}
    hidden, proposed = None, min(PROPOSED, max_draft_tokens)
    if drafter.hidden_layers:
        verify(proposed + 1)
        hidden = rows.hidden
        mx.eval(hidden)  # else the first round that reads it computes the forward
    try:
        runs[0] = _Drafting(rows, drafter, num_rows, hidden, proposed).propose
        seconds[0] = watch.settled(runs[0], 2 * plain)
        if hidden is not None and proposed > 1:
            alone = _Drafting(rows, drafter, num_rows, hidden[:, :2], 1)
            runs[-1] = alone.propose
            seconds[-1] = watch.settled(runs[-1], 2 * plain)
        widths = {*target.backend.verify_widths[1:]}
        if -1 in runs:  # a block is verified whole
            widths.add(widest)
        for s in sorted(widths):
            # At worst, S tokens take as long as S forwards of one token.
            if s <= widest and (s == 2 or not watch.late(s * plain)):
                runs[s] = partial(verify, s)
                seconds[s] = watch.settled(runs[s], 1.5 * s * plain)
        if target.backend.new_shape_seconds:
            for what, run in [*runs.items()] * SECOND_LOOKS:
                if seconds[what] > budget_seconds * QUICK:
                    seconds[what] = min(seconds[what], watch.settled(run, 0.0))
        sweeps = [
            {what: watch.again(run, seconds[what]) for what, run in runs.items()}
            for _ in range(SWEEPS)
        ]
        longer = dict[int, float]()
        if context:
            rows.skip(context)
            for s in sorted(s for s in runs if s > 0):
                if s == 1 or not watch.late(4 * seconds[s]):
                    known = watch.settled(runs[s], 2 * seconds[s])
                    times = [watch.again(runs[s], known) for _ in range(SWEEPS // 2)]
                    longer[s] = min(times)
    except Exception as error:  # a user's drafter may raise anything
        raise as_drafter_error(error, drafter) from error
    seconds = {what: min(sweep[what] for sweep in sweeps) for what in runs}
    sums = [sum(sweep.values()) for sweep in sweeps]
    busy = statistics.median(sums) > BUSY * min(sums)
    several, one = seconds.pop(0), seconds.pop(-1, 0.0)
    step, once = several / proposed, 0.0
    if one:
        step = max(0.0, several - one) / (proposed - 1)
        once = max(0.0, min(one, several) - step)
    pairs = itertools.combinations(sorted(seconds), 2)
    fall = max((seconds[n] / max(seconds[m], 1e-9) for n, m in pairs), default=0.0)
    return Forwards(
        num_rows,
        without_noise(seconds),
        step,
        once,
        busy,
        fall,
        context,
        without_noise(longer),
    )


def without_noise(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds by number of tokens, corrected so that they never fall.

    Other load only adds time, so a number of tokens cannot take longer than a larger
    one. A single token's time stays: some backends compute it in a slower way.
    """
    cleared: dict[int, float] = {}
    least = math.inf
    for s in sorted(seconds, reverse=True):
        least = min(least, seconds[s])
        cleared[s] = seconds[s] if s == 1 else least
    return cleared


class SpreadTokens:
    """Tokens far apart in the vocabulary, all different.

    In a mixture of experts, a repeated token would only read the same experts again.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        stride = max(1, round(0.618 * vocab_size))
        while math.gcd(stride, vocab_size) > 1:
            stride += 1
        self._stride, self._made = stride, 0

    def next(self, num_rows: int, num_tokens: int) -> mx.array:
        """Tokens of shape (num_rows, num_tokens); all are used before one repeats."""
        first, n = self._made, num_rows * num_tokens
        self._made += n
        ids = [i * self._stride % self._vocab_size for i in range(first, first + n)]
        return mx.array(ids, mx.int32).reshape(num_rows, num_tokens)


class _Drafting:
    """Rows of a drafter that go through rounds without a target.

    Args:
        target: as many rows of the target.
        hidden: the target's hidden states of a round, if the drafter reads them.
        num_tokens: tokens proposed in a round.
    """

    def __init__(
        self,
        target: ModelRows,
        drafter: Drafter,
        num_rows: int,
        hidden: mx.array | None,
        num_tokens: int,
    ):
        vocab_size = target.runner.vocab_size
        tokens, params = SpreadTokens(vocab_size), SamplingParams()
        recent = tokens.next(num_rows, 2)
        # Each row has a prompt of one token, and a newest token after it.
        prompts: Any = recent[:, :1].tolist()
        requests = [
            Request(i, "", tuple(prompt), params, frozenset())
            for i, prompt in enumerate(prompts)
        ]
        self._rules = Verifier.of(requests, vocab_size)
        self._target = target
        most = requests[0].max_length
        self._rows = drafter.rows(prompts, max_length=most)
        for _ in self._rows.prefill():
            mx.synchronize()
        self._hidden, self._num_tokens = hidden, num_tokens
        self._active = mx.ones((num_rows,), mx.bool_)
        self._kept = mx.ones((num_rows,), mx.int32)
        self._committed = Committed(recent, mx.full((num_rows,), 2, mx.int32))

    def propose(self) -> list[mx.array]:
        """Build one round; its first forward takes two tokens, as in decoding."""
        committed, limits = self._committed, [self._num_tokens] * len(self._kept)
        round_ = self._rules.round_of(limits, committed, self._active, self._target)
        proposals = vetted(self._rows, round_, self._rows.propose(round_))
        proposed = proposals.tokens
        chosen = mx.concatenate([proposed, proposed[:, :1]], axis=1)
        self._rows.commit(round_, Accepted(chosen, self._kept, self._hidden))
        recent = mx.concatenate([committed.recent[:, 1:], chosen[:, :1]], axis=1)
        self._committed = Committed(recent, committed.lengths + 1)
        return [recent, self._committed.lengths]


def draft_length(
    config: EngineConfig,
    target: ModelRunner,
    drafter: Drafter | None,
    defaults: BackendDefaults,
    *,
    store: CostStore | None = None,
    ranks: Ranks | None = None,
) -> AutoLength | None:
    """The policy for ``auto``; ``None`` if the config asks for a number or no draft.

    Args:
        store: keeps costs on disk; ``None``: in the user's cache folder.
        ranks: the target's ranks. Costs, clock and choice are rank 0's.
    """
    asked = config.max_draft_tokens
    k = most_proposed(drafter, asked)
    if drafter is None:
        return None
    if config.num_draft_tokens != "auto":
        if k < asked:
            log.info("the draft proposes up to %d tokens in a round, not %d", k, asked)
        return None
    store = store or CostStore()
    key = cost_key(config, target, drafter, defaults)
    clock, save = time.perf_counter, partial(store.save, key)
    leads = ranks is None or ranks.leads
    if ranks is not None:
        clock = partial(ranks.decide, "clock", clock)
    return AutoLength(
        *store.load(
            key,
            new_shape=defaults.new_shape_seconds,
            join_rounds=defaults.join_rounds,
        ),
        ladder=defaults.draft_lengths or LADDER,
        max_draft_tokens=k,
        forwards=partial(
            measure_forwards, target, drafter, max_draft_tokens=k, clock=clock
        ),
        # If time grows with tokens, costs of one row give those of any number.
        measured_rows=1 if defaults.costs_by_token else None,
        save=save if leads else None,
    )


def cost_key(
    config: EngineConfig,
    target: ModelRunner,
    drafter: Drafter,
    defaults: BackendDefaults,
) -> str:
    """A hash of all that costs depend on: models, caches, device, versions."""
    described = backend.describe()
    facts = [
        _model_facts(target),
        _drafter_facts(drafter),
        (config.kv_bits, config.kv_group_size, config.max_kv_size),
        defaults,
        [described[name] for name in ("specdec", "mlx", "backend", "blas", "device")],
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _model_facts(runner: ModelRunner) -> object:
    return type(runner.model).__module__, [
        (name, array.shape, str(array.dtype))
        for name, array in sorted(arrays_of(runner.model))
    ]


def _drafter_facts(drafter: Drafter) -> object:
    """The drafter's kind, and the attributes that a step's cost may depend on."""
    facts: list[object] = [type(drafter).__qualname__]
    for name, value in sorted(vars(drafter).items()):
        if isinstance(value, ModelRunner):
            facts.append((name, _model_facts(value)))
        elif isinstance(value, int | str | tuple | None) or is_dataclass(value):
            facts.append((name, value))
        elif hasattr(value, "context_length"):  # one drafter within another
            facts.append((name, _drafter_facts(value)))
    return facts
