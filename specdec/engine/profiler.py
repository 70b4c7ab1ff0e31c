"""Times forwards of a target and steps of its drafter, before the first round."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import backend
from ..backend import BackendDefaults
from ..config import EngineConfig
from ..models.compiled import CompiledForwards
from ..models.runner import ModelRunner
from ..request import Request, Sequence
from ..sampling_params import SamplingParams
from ..spec_decode import Drafter, Round
from ..spec_decode.draft_length import (
    FEW,
    TAKEN_IN,
    AutoLength,
    DraftLength,
    FixedLength,
    Forwards,
)
from ..spec_decode.draft_length.store import CostStore, default_path
from ..spec_decode.guard import described
from ..spec_decode.rejection_sampler import Verdict
from ..spec_decode.verifier import RowRules
from ..spec_decode.vetting import vetted

# Numbers of tokens of verify forwards, in the order of their use, and when to stop.
VERIFIED = (1, 2, 5, 3, 9)
BUDGET_SECONDS = 1.5
# What takes less than this share of the budget is timed as rounds run, so often; all of
# that is gone through so many times, as far as the budget reaches.
QUICK, MANY, SWEEPS = 1 / 16, 8, 4
# What takes less than this share of the run before it may still be building; it is run
# again, so often at most, unless it is quick, or takes longer than so many seconds.
SETTLED, MOST_SETTLING, MOST_SETTLING_SECONDS = 0.7, 4, 6.0
# Where a plain step takes longer, it all may take so many plain steps.
MOST_STEPS = 8
# How often it is measured what a drafter takes for tokens that it missed.
MISSES = 2
# Tokens proposed by the round that tells what a draft step costs.
PROPOSED = 3

Run = Callable[[], AbstractSequence[mx.array]]


class _Stopwatch:
    """Times work that is built and handed to the device, within a budget.

    Args:
        repeats: how often it is timed, of which the fastest counts; what is slow is
            timed once.
    """

    def __init__(self, clock: Callable[[], float], repeats: int, budget: float):
        self._clock, self._repeats, self._budget = clock, repeats, budget
        self._quick = QUICK * budget
        self._begun = clock()

    def limit(self, plain: float) -> None:
        """Where a plain step is slow, spend no more than some of them."""
        if plain > self._quick:
            self._budget = min(self._budget, MOST_STEPS * plain)

    def late(self, seconds: float) -> bool:
        """Whether so many more would be beyond the budget."""
        return self._clock() - self._begun + seconds > self._budget

    def is_quick(self, seconds: float) -> bool:
        """Whether what takes so long may be timed again and again."""
        return seconds <= self._quick

    def __call__(self, run: Run, likely: float) -> float:
        """Seconds of one ``run``, which builds and compiles when it is first called.

        Args:
            likely: what it would take if nothing had to be built.
        """
        first = self.once(run)
        # The first counts where it did not take long for building, and repeating it
        # would.
        if self._budget / 8 < first < likely:
            times = [first]
        else:
            times = self._until_settled(run, first)
        while len(times) < self._repeats:
            if self.late(first) or not self.is_quick(min(times)):
                break
            times.append(self.once(run))
        return self.again(run, min(times))

    def _until_settled(self, run: Run, first: float) -> list[float]:
        """Seconds of runs behind the ``first``, on until one is hardly quicker.

        The second may still compile kernels, for seconds on a machine that has never
        run them. What that took is not taken off the budget: rounds would compile them.
        """
        times = [first, self.once(run)]
        while times[-1] < SETTLED * times[-2] and len(times) <= MOST_SETTLING:
            if self.is_quick(times[-1]) or times[-1] > MOST_SETTLING_SECONDS:
                break
            times.append(self.once(run))
        self._begun += sum(max(0.0, t - times[-1]) for t in times)
        return times[1:]

    def again(self, run: Run, known: float) -> float:
        """As rounds run, where that is quick; else what was ``known``."""
        if not self.is_quick(known) or self.late((MANY + 1) * known):
            return known
        return self._in_turn(run)

    def once(self, run: Run) -> float:
        """Seconds of one run, waited for."""
        start = self._clock()
        mx.eval(*run())
        return self._clock() - start

    def _in_turn(self, run: Run) -> float:
        """Median time from one end to the next, each built while one is running.

        So it is in rounds. Waited for one by one, launching and reading count too,
        which on a GPU take as long as a draft step.
        """
        waiting: AbstractSequence[mx.array] = run()
        mx.async_eval(*waiting)
        ends = []
        for _ in range(MANY):
            following = run()
            mx.async_eval(*following)
            mx.eval(*waiting)
            ends.append(self._clock())
            waiting = following
        mx.eval(*waiting)
        return statistics.median(b - a for a, b in itertools.pairwise(ends))


@CompiledForwards.at_once()
def measure_forwards(
    target: ModelRunner,
    drafter: Drafter,
    num_rows: int,
    *,
    max_draft_tokens: int,
    repeats: int = 2,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Forwards:
    """Time a plain step, a draft step, and verify forwards while time is left.

    Each is run once before it is timed, and then as rounds are: compiled where they
    will be, built while the one before runs. What takes long is waited for, once, and
    the budget is some plain steps then. A plain step, a draft step and one verify
    forward are always measured; of the latter no more than the budget allows. What is
    quick is measured in several sweeps, of which the fastest counts: other load may
    last for as long as one of them; then, where there is time left, what the drafter
    takes for tokens that it missed.

    Raises:
        DrafterError: the drafter raised something.
    """
    typical = _Stopwatch(clock, repeats, budget_seconds)
    widest = max_draft_tokens + 1
    most = 4 * widest
    # Without prompts, nothing is looked up in a prefix store, nor kept there.
    rows = target.rows([()] * num_rows, max_round=widest, max_length=most)
    for _ in rows.prefill():
        mx.synchronize()

    def verify(num_tokens: int) -> list[mx.array]:
        logits = rows.forward(mx.ones((num_rows, num_tokens), mx.int32))
        chosen = mx.argmax(logits, axis=-1)
        counts = mx.full((num_rows,), num_tokens, mx.int32)
        rows.trim_per_sequence(counts, num_tokens)
        return [chosen, rows.offset]

    # By what they measure: 0 is drafting, else the tokens of a verify forward.
    runs: dict[int, Run] = {}
    seconds: dict[int, float] = {}

    def measure(what: int, run: Run, likely: float) -> float:
        runs[what], seconds[what] = run, typical(run, likely)
        return seconds[what]

    plain = measure(1, lambda: verify(1), 0.0)
    typical.limit(plain)
    hidden, proposed = None, min(PROPOSED, max_draft_tokens)
    if drafter.hidden_layers:
        verify(proposed + 1)
        hidden = rows.hidden
    try:
        drafting = _Drafting(target, drafter, num_rows, hidden, proposed)
        measure(0, drafting.propose, 2 * plain)
        for s in VERIFIED[1:]:
            # At worst, tokens cost as much together as one by one.
            worst = s * plain
            likely = plain + (s - 1) * (seconds.get(2, worst) - plain)
            if s <= widest and (s == 2 or not typical.late(min(worst, likely))):
                measure(s, lambda s=s: verify(s), 1.5 * worst)  # type: ignore[misc]
        for _ in range(SWEEPS - 1):
            for what, run in runs.items():
                seconds[what] = min(seconds[what], typical.again(run, seconds[what]))
        taking_in = None
        if typical.is_quick(plain) and drafting.may_miss(typical):
            times = []
            runs.clear()  # and the caches of the rows that they are of
            # Shapes that are met first take many times as long, once per process.
            for _ in range(MISSES):
                drafting = _Drafting(target, drafter, num_rows, hidden, proposed)
                drafting.miss(TAKEN_IN)
                times.append(typical.once(drafting.propose))
            taking_in = max(0.0, min(times) - seconds[0])
    except Exception as error:  # a drafter of the user's may raise anything
        raise described(error, drafter) from error
    draft_step = seconds.pop(0) / proposed
    return Forwards(num_rows, without_noise(seconds), draft_step, taking_in)


def without_noise(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds by tokens, none of them more than what more tokens took.

    Other load only adds time. A single token keeps its own: on some backends it is
    computed in another way, which may take longer than two.
    """
    cleared: dict[int, float] = {}
    least = math.inf
    for s in sorted(seconds, reverse=True):
        least = min(least, seconds[s])
        cleared[s] = seconds[s] if s == 1 else least
    return cleared


class _Drafting:
    """Some rows of a drafter that go through rounds without a target.

    Args:
        hidden: what the target's layers say of a round, where that is asked for.
        num_tokens: proposed in a round.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter,
        num_rows: int,
        hidden: mx.array | None,
        num_tokens: int,
    ):
        prompt, params = (1,), SamplingParams()
        sequences = [
            Sequence(Request(i, "", prompt, params), frozenset())
            for i in range(num_rows)
        ]
        self._rules = RowRules.of(sequences, target.vocab_size)
        self._most = sequences[0].request.max_length + TAKEN_IN + FEW
        self._context = math.inf
        if drafter.context_length is not None:
            self._context = drafter.context_length
        self._rows = drafter.rows([prompt] * num_rows, max_length=self._most)
        for _ in self._rows.prefill():
            mx.synchronize()
        self._hidden, self._num_tokens = hidden, num_tokens
        self._active = mx.ones((num_rows,), mx.bool_)
        self._kept = mx.ones((num_rows,), mx.int32)
        self._recent = mx.ones((num_rows, 2), mx.int32)
        self._length = mx.full((num_rows,), 2, mx.int32)

    def propose(self) -> list[mx.array]:
        """A round. Its first forward takes two tokens, and what ends it is shared."""
        round_ = self._round(self._num_tokens)
        proposals = vetted(self._rows, round_, self._rows.propose(round_))
        proposed = proposals.tokens
        chosen = mx.concatenate([proposed, proposed[:, :1]], axis=1)
        return self._commit(round_, chosen)

    def may_miss(self, typical: _Stopwatch) -> bool:
        """Whether there is time, and room, to measure what tokens cost it missed."""
        if self._hidden is not None or self._context < self._most:
            return False
        few = typical.once(lambda: self.miss(FEW))
        # What it takes them in with may take as long again.
        return not typical.late(2 * MISSES * few * TAKEN_IN / FEW)

    def miss(self, num_rounds: int) -> AbstractSequence[mx.array]:
        """Rounds without proposals, of which the next one has to take in the tokens."""
        for _ in range(num_rounds):
            mx.eval(self._commit(self._round(0), self._recent[:, -1:]))
        return ()

    def _round(self, k: int) -> Round:
        draws = self._rules.draws(self._length, k + 1)
        rules, rows = self._rules, (self._recent, self._active)
        return Round(k, *rows, rules.sampling, draws, lengths=self._length)

    def _commit(self, round_: Round, chosen: mx.array) -> list[mx.array]:
        self._rows.commit(round_, Verdict(chosen, self._kept, self._hidden))
        self._recent = mx.concatenate([self._recent[:, 1:], chosen[:, :1]], axis=1)
        self._length = self._length + 1
        return [self._recent, self._length]


def draft_length(
    config: EngineConfig,
    target: ModelRunner,
    drafter: Drafter | None,
    defaults: BackendDefaults,
    *,
    store: CostStore | None = None,
) -> DraftLength:
    """What the config asks for: a fixed k, or ``auto`` with costs kept on disk.

    Args:
        store: where costs are kept; ``None``: the user's cache folder.
    """
    if config.num_draft_tokens != "auto" or drafter is None:
        return FixedLength(config.max_draft_tokens if drafter is not None else 0)
    kept = store or CostStore(default_path())
    key = signature(config, target, drafter, defaults)
    return AutoLength(
        kept.load(key, new_shape=defaults.new_shape_seconds),
        max_draft_tokens=config.max_draft_tokens,
        measure=lambda num_rows: measure_forwards(
            target, drafter, num_rows, max_draft_tokens=config.max_draft_tokens
        ),
        # Where tokens cost time, those of one row tell what any number costs.
        measured_rows=None if defaults.static_shapes else 1,
        save=lambda costs: kept.save(key, costs),
    )


def signature(
    config: EngineConfig,
    target: ModelRunner,
    drafter: Drafter,
    defaults: BackendDefaults,
) -> str:
    """What costs depend on: models, drafter, caches, backend, device and versions."""
    described = backend.describe()
    facts = [
        _model_facts(target),
        _drafter_facts(drafter),
        (config.kv_bits, config.kv_group_size, config.max_kv_size),
        defaults,
        [described[name] for name in ("specdec", "mlx", "backend", "device")],
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _model_facts(runner: ModelRunner) -> object:
    parameters: Any = tree_flatten(runner.model.parameters())
    return type(runner.model).__module__, [
        (name, array.shape, str(array.dtype)) for name, array in sorted(parameters)
    ]


def _drafter_facts(drafter: Drafter) -> object:
    """Its kind, and whatever it holds that says what a step costs."""
    facts: list[object] = [type(drafter).__qualname__]
    for name, value in sorted(vars(drafter).items()):
        if isinstance(value, ModelRunner):
            facts.append((name, _model_facts(value)))
        elif isinstance(value, int | str | tuple | None) or is_dataclass(value):
            facts.append((name, value))
        elif hasattr(value, "context_length"):  # one drafter within another
            facts.append((name, _drafter_facts(value)))
    return facts
