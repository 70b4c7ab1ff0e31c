"""What a run would be: sizes, memory and time, reported before weights are loaded."""

from __future__ import annotations

import time

import mlx.core as mx

from ...errors import ModelError, UnsupportedModelError
from ...model_names import DEFAULT_TARGET
from ...models import load
from ...models.layers import layers_of
from ...models.loaded import Described
from ...models.model_outline import outline
from ...models.precision import DTYPES
from ...utils.sizes import format_size
from .material import Given
from .options import Options
from .plan import Sizes, computing_dtype, sizes_of
from .schedule import Budget
from .student import choose_layers, head_of, make_student, text_model
from .train import count

# Arrays of a chunk's logits that are held at once, about.
_LOGITS_COPIES = 6
# A step's products run at about this share of the rate of one large product.
_SHARE_OF_PEAK = 0.35
# Shapes of the product that is timed, and how long that has to take.
_FEWEST_ROWS, _MOST_ROWS, _TIMED_COLUMNS = 16, 16384, 4096
_TIMED_SECONDS = 0.04

# Tokens of training, by what four layers of SmolLM2-135M showed (docs/distill.md):
# below the first nothing is learnt that is of use, most by the third, all by the last.
USELESS_TOKENS, FEW_TOKENS = 1_000_000, 10_000_000
MOST_TOKENS, ALL_TOKENS = 20_000_000, 66_000_000


def check_target(options: Options) -> None:
    """Refuse a target that is not supported, as far as its files show.

    Raises:
        UnsupportedModelError: it is not.
        ConfigError: it has no such layers.
    """
    found = _outline(options)
    if found is not None:
        text_model(found)
        choose_layers(options.layers, len(layers_of(found.model)))


def describe(options: Options) -> list[str]:
    """What the run is, in lines.

    Raises:
        UnsupportedModelError: the target is not supported.
        ConfigError: it has no such layers.
        ModelError: it cannot be found or read.
        PromptError: a file of the user's cannot be read.
    """
    Given.read(options)  # as the run would
    target = _outline(options)
    dtype = computing_dtype(options)
    if target is None:  # on the hub, perhaps
        target = load(
            options.target or DEFAULT_TARGET,
            dtype=dtype,
            trust_remote_code=options.trust_remote_code,
        )
    source = text_model(target)
    layers = choose_layers(options.layers, len(layers_of(target.model)))
    student = make_student(target, layers, widen=options.widen)
    vocab_size, width = head_of(source).shape
    sizes = sizes_of(
        target.model,
        target.config,
        target.name,
        vocab_size=vocab_size,
        writers=options.writers,
        block_tokens=options.block_tokens,
    )
    whole, learnt = count(target.model.parameters()), count(student.parameters)
    itemsize = DTYPES[dtype].size
    memory = {
        "target": format_size(whole * itemsize),
        "draft and optimizer": format_size(learnt * (16 + itemsize)),
        "a chunk's logits": format_size(_LOGITS_COPIES * sizes.chunk * vocab_size * 4),
        "target states": f"{format_size(width * itemsize)} a position, up to "
        f"{format_size(sizes.states_bytes)}",
    }
    rate = _tokens_per_second(learnt, vocab_size, width, DTYPES[dtype])
    return [
        f"target:   {target.name}, {whole / 1e6:.1f} M parameters",
        f"draft:    layers {', '.join(map(str, layers))}, "
        f"{learnt / 1e6:.1f} M parameters to learn, computing in {dtype}",
        f"writing:  {sizes.writers} rows at once, up to {_writing(options)}",
        f"training: {_training(options, sizes)}",
        "memory:   " + ", ".join(f"{k} {v}" for k, v in memory.items()),
        f"time:     {_time(options, rate)}",
        *_notes(options.budget, rate),
    ]


def _outline(options: Options) -> Described | None:
    """The target without its weights; ``None`` where its files do not show it."""
    try:
        name = options.target or DEFAULT_TARGET
        return outline(
            name,
            dtype=computing_dtype(options),
            trust_remote_code=options.trust_remote_code,
        )
    except UnsupportedModelError:
        raise
    except ModelError:
        return None  # loading reports it


def _writing(options: Options) -> str:
    minutes, tokens = options.data_budget
    bounds = [f"{minutes:g} minutes"] * (minutes < float("inf"))
    bounds += [f"{tokens:.0f} tokens"] * (tokens < float("inf"))
    return " or ".join(bounds)


def _training(options: Options, sizes: Sizes) -> str:
    budget = options.budget
    length = f"{budget.tokens} tokens"
    if budget.minutes is not None:
        length = f"{budget.minutes:g} minutes"
    return f"{sizes.block_tokens} tokens a step, {length}"


def _time(options: Options, rate: float) -> str:
    budget = options.budget
    about = f"about {rate:.2g} tokens/s of training, by the time of one product"
    if budget.minutes is None:
        return f"{about}: {_span(_tokens(budget, rate) / rate)}, and writing"
    learnt = _amount(_tokens(budget, rate))
    return f"{about}: {learnt} tokens in {budget.minutes:g} minutes, and writing"


def _notes(budget: Budget, rate: float) -> list[str]:
    """What to know of a budget that is too small to be of use."""
    tokens = _tokens(budget, rate)
    if tokens >= FEW_TOKENS:
        return []
    use = "too little to be of use" if tokens < USELESS_TOKENS else "little"
    return [
        f"note:     {_amount(tokens)} tokens of training are {use}: four layers of "
        f"SmolLM2-135M learnt most of what they could from {_amount(MOST_TOKENS)}, "
        f"here {_span(MOST_TOKENS / rate)}, and nothing more behind "
        f"{_amount(ALL_TOKENS)}"
    ]


def _tokens(budget: Budget, rate: float) -> float:
    """Tokens of training, where they are not given by the rate."""
    if budget.tokens is not None:
        return budget.tokens
    assert budget.minutes is not None
    return 60 * budget.minutes * rate


def _amount(tokens: float) -> str:
    """A number of tokens, in two digits or so."""
    if tokens >= 1e6:
        return f"{tokens / 1e6:.3g} M"
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _span(seconds: float) -> str:
    """A time that people can picture."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _tokens_per_second(
    learnt: int, vocab_size: int, width: int, dtype: mx.Dtype
) -> float:
    """A guess: the operations of a token, at a share of this device's rate.

    Forward and backward take 6 operations a parameter; of the head, a product with
    the target's states, one with the draft's, and one for the gradient.
    """
    rate = _operations_per_second(min(vocab_size, _TIMED_COLUMNS), width, dtype)
    return _SHARE_OF_PEAK * rate / (6 * (learnt + vocab_size * width))


def _operations_per_second(columns: int, width: int, dtype: mx.Dtype) -> float:
    """The rate of products that are as large as this device takes to be timed.

    Rows, and then products in a row, double until a measurement takes long enough.
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
    """Seconds of so many products with a matrix, and as many with its transpose."""
    mx.eval(states, matrix)
    start = time.perf_counter()
    for _ in range(products):
        states = (states @ matrix.T) @ matrix
    mx.eval(states)
    return time.perf_counter() - start
