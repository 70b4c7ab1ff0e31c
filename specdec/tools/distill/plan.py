"""The plan of a run: sizes, memory and time, known before training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ... import backend
from ...cache.capacity import grown_capacity
from ...errors import ModelError, UnsupportedModelError
from ...memory.planning import geometry_of
from ...model_names import DEFAULT_TARGET
from ...models import LoadedModel, load
from ...models.layers import layers_of, leaves_of
from ...models.loaded import Described
from ...models.model_outline import outline
from ...models.precision import DTYPES
from ...utils.sizes import format_size
from .beginning import as_begun
from .block_student import make_block_student
from .loss import ChunkedLoss
from .material import Sources
from .options import Budget, DistillOptions
from .student import Student, choose_layers, ends_of, head_of, make_student, text_model

# Most bytes of one chunk's logits in float32, one copy.
_CHUNK_BYTES = 500_000_000
_LARGEST_CHUNK, _SMALLEST_CHUNK = 2048, 64
# Rows that write together, and tokens of a block, by backend. They are many if launches
# cost more than work.
_WRITERS = {"cuda": 2048, "metal": 64, "cpu": 16}
_BLOCK_TOKENS = {"cuda": 32768, "metal": 8192, "cpu": 2048}
# A block head agreed more with smaller steps, in one comparison (docs/distill.md).
_MOST_OF_A_HEAD = 8192
# Shares of the memory for keys and values of rows that write, and for target states.
_WRITING_SHARE, _STATES_SHARE = 0.4, 0.4

# About the number of arrays of a chunk's logits that are held at once.
_LOGITS_COPIES = 6
# A step's products run at about this share of the rate of one large product.
_SHARE_OF_PEAK = 0.35
# Shapes of the timed product, and the least time that a measurement must take.
_FEWEST_ROWS, _MOST_ROWS, _TIMED_COLUMNS = 16, 16384, 4096
_TIMED_SECONDS = 0.04

# Tokens of training, from four layers of SmolLM2-135M (docs/distill.md): below the
# first number the draft is of no use, by the third it has learnt most of what it can,
# by the last all of it.
USELESS_TOKENS, FEW_TOKENS = 1_000_000, 10_000_000
MOST_TOKENS, ALL_TOKENS = 20_000_000, 66_000_000


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The draft to be made of a target, and the sizes to work with.

    Args:
        student: the draft.
        head: matrix of the output head that both models share, shape (V, D).
        writers: rows that write together.
        block_tokens: tokens of a training step.
        chunk: positions whose logits are held at the same time.
        states_bytes: most bytes of target states to keep.
    """

    student: Student
    head: mx.array
    writers: int
    block_tokens: int
    chunk: int
    states_bytes: int

    @classmethod
    def of(cls, target: Described, options: DistillOptions) -> TrainingPlan:
        """Plan a run, with sizes below the defaults if those would not fit in memory.

        Raises:
            UnsupportedModelError: the target's architecture is not supported.
            ConfigError: the target does not have the layers asked for.
        """
        layers = _layers(target, options)
        head = head_of(target)
        vocab_size = head.shape[0]
        memory = backend.memory_size() or 8 << 30
        chunk = _LARGEST_CHUNK
        while chunk > _SMALLEST_CHUNK and chunk * vocab_size * 4 > _CHUNK_BYTES:
            chunk //= 2
        writers = options.writers
        if writers is None:
            writers = _WRITERS[options.where]
            geometry = geometry_of(target.model, target.config, target.name)
            slots = grown_capacity(options.longest_document)
            per_row = slots * sum(cache.slot_bytes for cache in geometry.caches)
            per_row += 4 * vocab_size * 4  # logits and noise
            while writers > 1 and writers * per_row > _WRITING_SHARE * memory:
                writers //= 2
        block_tokens = options.block_tokens
        if block_tokens is None:
            block_tokens = _BLOCK_TOKENS[options.where]
            if options.kind == "block":
                block_tokens = min(block_tokens, _MOST_OF_A_HEAD)
        return cls(
            student=_student(target, layers, options),
            head=head,
            writers=writers,
            block_tokens=block_tokens,
            chunk=min(chunk, block_tokens),
            states_bytes=int(_STATES_SHARE * memory),
        )

    def loss(self, hard: float) -> ChunkedLoss:
        """The loss that is minimised, see :class:`.loss.ChunkedLoss`."""
        slots = self.student.slots
        return ChunkedLoss(self.head, hard=hard, chunk=self.chunk, slots=slots)


def _layers(target: Described, options: DistillOptions) -> tuple[int, ...]:
    if options.kind == "layers":
        text_model(target)  # raises for an unsupported target
    else:
        ends_of(target)
    return choose_layers(options.layers, layers_of(target.model))


def _student(
    target: Described, layers: tuple[int, ...], options: DistillOptions
) -> Student:
    if options.kind == "layers":
        return make_student(target, layers, widen=options.widen)
    return make_block_student(
        target,
        layers,
        widen=options.widen,
        form=options.form,
        block_size=options.block_size,
        seed=options.seed,
    )


def load_target(options: DistillOptions) -> LoadedModel:
    """Load the target in the type that training computes in.

    Raises:
        ModelError: the target cannot be loaded.
    """
    return load(
        options.target or DEFAULT_TARGET,
        dtype=options.computing,
        trust_remote_code=options.trust_remote_code,
    )


def outlined(options: DistillOptions) -> Described | None:
    """The target without its weights; ``None`` if its files do not describe it."""
    try:
        return outline(
            options.target or DEFAULT_TARGET,
            dtype=options.computing,
            trust_remote_code=options.trust_remote_code,
        )
    except UnsupportedModelError:
        raise
    except ModelError:
        return None  # loading reports the error


def check_target(options: DistillOptions) -> None:
    """Check that the target is supported, as far as its files show.

    Raises:
        UnsupportedModelError: the target is not supported.
        ConfigError: the target does not have the layers asked for.
    """
    options = as_begun(options)
    outline = outlined(options)
    if outline is not None:
        _layers(outline, options)


def describe(options: DistillOptions) -> list[str]:
    """Describe the run, in lines.

    Raises:
        UnsupportedModelError: the target is not supported.
        ConfigError: the target does not have the layers asked for.
        ModelError: the target cannot be found or read.
        PromptError: a user's file cannot be read.
    """
    options = as_begun(options)
    Sources.read(options)  # raises as the run would
    target = outlined(options) or load_target(options)  # it may be on the hub
    plan, dtype = TrainingPlan.of(target, options), DTYPES[options.computing]
    vocab_size, width = plan.head.shape
    whole = count(target.model.parameters())
    learnt = count(plan.student.parameters)
    block, seen_width = options.kind == "block", plan.student.seen_width
    logits = _LOGITS_COPIES * plan.chunk * vocab_size * 4
    memory = {
        "target": format_size(whole * dtype.size),
        "draft and optimizer": format_size(learnt * (16 + dtype.size)),
        "logits": format_size(logits),
        "target states": f"up to {format_size(plan.states_bytes)}, "
        f"{format_size(seen_width * dtype.size)} a position",
    }
    budget, (minutes, tokens) = options.budget, options.data_budget
    writing = [f"{minutes:g} minutes"] * (minutes < float("inf"))
    writing += [f"{tokens:.0f} tokens"] * (tokens < float("inf"))
    length = (
        f"{budget.tokens} tokens" if budget.tokens else f"{budget.minutes:g} minutes"
    )
    # A block head's features are too large to keep, so the target reads texts again.
    rate = _tokens_per_second(learnt, vocab_size, width, dtype, whole if block else 0)
    layers = ", ".join(map(str, plan.student.layers))
    layers = f"layers {layers}, " if layers else ""
    return [
        f"target:   {target.name}, {whole / 1e6:.1f} M parameters",
        f"draft:    {f'{options.form}, {plan.student.name}, ' if block else ''}"
        f"{layers}{learnt / 1e6:.1f} M parameters to learn, computing in "
        f"{options.computing}",
        f"writing:  {plan.writers} rows at once, up to {' or '.join(writing)}, about "
        f"{', '.join(options.topics)}",
        f"training: {plan.block_tokens} tokens a step, {length}",
        *_under("memory:", [f"{what}: {size}" for what, size in memory.items()]),
        f"time:     {_time(budget, rate)}",
        *_notes(budget, rate, plan.block_tokens, options),
    ]


def _time(budget: Budget, rate: float) -> str:
    about = f"about {_amount(rate)} tokens/s of training, by the time of one product"
    if budget.minutes is None:
        return f"{about}: {_span(_tokens(budget, rate) / rate)}, and writing"
    learnt = _amount(_tokens(budget, rate))
    return f"{about}: {learnt} tokens in {budget.minutes:g} minutes, and writing"


def _notes(
    budget: Budget, rate: float, step: int, options: DistillOptions
) -> list[str]:
    """Notes on a budget that is too small to be of use, with the way out."""
    tokens, block = _tokens(budget, rate), options.kind == "block"
    ways = ["raise --minutes or --tokens"]
    if tokens < step:
        small = f"less than one step, of {step}"
        ways.append("lower --block-tokens")
    elif tokens >= FEW_TOKENS:
        return []
    else:
        small = "too little to be of use" if tokens < USELESS_TOKENS else "little"
    if options.where == "cpu":
        ways.insert(0, "train on a GPU")
    notes = [f"{_amount(tokens)} tokens of training are {small}"]
    if not block:
        notes.append(
            "four layers of SmolLM2-135M learnt most of what they could from "
            f"{_amount(MOST_TOKENS)}, here {_span(MOST_TOKENS / rate)}, and nothing "
            f"more after {_amount(ALL_TOKENS)}"
        )
    notes.append(f"way out: {', or '.join(ways)}")
    return _under("note:", notes)


def _under(title: str, lines: Sequence[str]) -> list[str]:
    """Lines in a column of their own, the first of them after a title."""
    titles = [title] + [""] * (len(lines) - 1)
    return [f"{each:10}{line}" for each, line in zip(titles, lines, strict=True)]


def _tokens(budget: Budget, rate: float) -> float:
    """Tokens of training: as given, or from minutes and the rate."""
    if budget.tokens is not None:
        return budget.tokens
    assert budget.minutes is not None
    return 60 * budget.minutes * rate


def _amount(tokens: float) -> str:
    """A number of tokens, rounded to two or three digits."""
    if tokens >= 1e6:
        return f"{tokens / 1e6:.3g} M"
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _span(seconds: float) -> str:
    """A time in the unit that is easiest to read."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _tokens_per_second(
    learnt: int, vocab_size: int, width: int, dtype: mx.Dtype, read: int
) -> float:
    """Estimate the rate from a token's operations and a share of this device's rate.

    Forward and backward take 6 operations for each learnt parameter. So does each
    parameter of the head: 2 for the target's states, 2 for the draft's and 2 for the
    gradient. The ``read`` parameters of a target that reads the text in every step take
    2 each.
    """
    rate = _operations_per_second(min(vocab_size, _TIMED_COLUMNS), width, dtype)
    return _SHARE_OF_PEAK * rate / (6 * (learnt + vocab_size * width) + 2 * read)


def _operations_per_second(columns: int, width: int, dtype: mx.Dtype) -> float:
    """Operations per second of products that are large enough to be timed.

    The number of rows, then of products, doubles until a measurement takes long enough.
    """
    matrix = mx.zeros((columns, width), dtype)
    rows, products = _FEWEST_ROWS, 1
    while True:
        states = mx.zeros((rows, width), dtype)
        seconds = min(_timed(states, matrix, products) for _ in range(2))
        if seconds >= _TIMED_SECONDS:
            return 4 * products * rows * columns * width / seconds
        if rows < _MOST_ROWS:
            rows *= 2
        else:
            products *= 2


def _timed(states: mx.array, matrix: mx.array, products: int) -> float:
    """Seconds of ``products`` products with the matrix and with its transpose."""
    mx.eval(states, matrix)
    start = time.perf_counter()
    for _ in range(products):
        states = (states @ matrix.T) @ matrix
    mx.eval(states)
    return time.perf_counter() - start


def count(parameters: Any) -> int:
    """The number of elements in a tree of arrays."""
    return sum(array.size for _, array in leaves_of(parameters))
