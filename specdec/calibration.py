"""Times forwards of a target and steps of its drafter, before the first round."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from . import backend
from .backend import BackendDefaults
from .config import EngineConfig
from .drafters import Drafter, Round, check_proposals
from .drafters.guarded import described
from .lengths import AutoLength, DraftLength, FixedLength, Forwards
from .lengths.store import CostStore, default_path
from .models.runner import ModelRunner
from .params import SamplingParams
from .rounds import RowRules
from .sequence import Request, Sequence
from .verification import Verdict

# Numbers of tokens of verify forwards, in the order of their use, and when to stop.
VERIFIED = (1, 2, 5, 3, 9)
BUDGET_SECONDS = 1.5


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

    Each is run once before it is timed, ``repeats`` times, of which the fastest
    counts. A plain step, a draft step and one verify forward are always measured;
    of the latter no more than the budget allows.

    Raises:
        DrafterError: the drafter raised something.
    """
    begun = clock()
    widest = max_draft_tokens + 1
    most = 4 * widest
    # Without prompts, nothing is looked up in a prefix store, nor kept there.
    rows = target.rows([()] * num_rows, max_round=widest, max_length=most)
    for _ in rows.prefill():
        pass

    def fastest(run: Callable[[], AbstractSequence[mx.array]], likely: float) -> float:
        times: list[float] = []
        for number in range(repeats + 1):
            start = clock()
            mx.eval(*run())
            took = clock() - start
            # The first builds and compiles. It counts where it did not take long
            # for that, and repeating it would.
            if number or budget_seconds / 8 < took < likely:
                times.append(took)
            if times and clock() - begun + took > budget_seconds:
                break
        return min(times)

    def verify(num_tokens: int) -> list[mx.array]:
        logits = rows.forward(mx.ones((num_rows, num_tokens), mx.int32))
        chosen = mx.argmax(logits, axis=-1)
        counts = mx.full((num_rows,), num_tokens, mx.int32)
        rows.trim_per_sequence(counts, num_tokens)
        return [chosen, rows.offset]

    plain = fastest(lambda: verify(1), 0.0)
    hidden = None
    if drafter.hidden_layers:
        verify(2)
        hidden = rows.hidden
    try:
        draft_step = _draft_step(
            target, drafter, num_rows, hidden, lambda f: fastest(f, 2 * plain)
        )
    except Exception as error:  # a drafter of the user's may raise anything
        raise described(error, drafter) from error
    verified = {1: plain}
    for s in VERIFIED[1:]:
        # At worst, tokens cost as much together as one by one.
        likely = s * plain
        late = clock() - begun + likely > budget_seconds
        if s <= widest and (s == 2 or not late):
            verified[s] = fastest(lambda s=s: verify(s), 1.5 * likely)  # type: ignore[misc]
    return Forwards(num_rows, verified, draft_step)


def _draft_step(
    target: ModelRunner,
    drafter: Drafter,
    num_rows: int,
    hidden: mx.array | None,
    fastest: Callable[[Callable[[], AbstractSequence[mx.array]]], float],
) -> float:
    """Seconds of a proposed token of each row: of a round that proposes one."""
    prompt, params = (1,), SamplingParams()
    sequences = [
        Sequence(Request(i, "", prompt, params), frozenset()) for i in range(num_rows)
    ]
    rules = RowRules.of(sequences, target.vocab_size)
    request_length = sequences[0].request.max_length
    rows = drafter.rows([prompt] * num_rows, max_length=request_length)
    for _ in rows.prefill():
        pass
    active = mx.ones((num_rows,), mx.bool_)
    state = {
        "recent": mx.ones((num_rows, 2), mx.int32),
        "length": mx.full((num_rows,), 2, mx.int32),
    }

    def propose() -> list[mx.array]:
        recent, length = state["recent"], state["length"]
        draws = rules.draws(length, 2)
        round_ = Round(1, recent, active, rules.sampling, draws)
        proposals = rows.propose(round_)
        check_proposals(rows, round_, proposals)
        proposed = proposals.tokens
        chosen = mx.concatenate([proposed, proposed], axis=1)
        kept = mx.ones((num_rows,), mx.int32)
        rows.commit(round_, Verdict(chosen, kept, hidden))
        state["recent"] = mx.concatenate([recent[:, 1:], proposed], axis=1)
        state["length"] = length + 1
        return [state["recent"], state["length"]]

    return fastest(propose)


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
