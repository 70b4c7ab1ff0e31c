"""What a run would be: sizes, memory and time, told before weights are loaded."""

from __future__ import annotations

import time

import mlx.core as mx

from ..errors import ModelError, UnsupportedModelError
from ..memory.sizes import format_size
from ..models import load
from ..models.loaded import Described
from ..models.outline import outline
from ..models.precision import DTYPES
from ..models.trunk import layers_of
from ..names import DEFAULT_TARGET
from .material import clock
from .options import Options
from .plan import Sizes, computing_dtype, sizes_of
from .student import choose_layers, head_of, make_student, text_model
from .train import count

# Arrays of a chunk's logits that are held at once, about.
_LOGITS_COPIES = 6
# A step's products run at about this share of the rate of one large product.
_SHARE_OF_PEAK = 0.35
_TIMED_ROWS, _TIMED_PRODUCTS = 1024, 5


def check_target(options: Options) -> None:
    """Refuse a target that is not supported, as far as its files tell.

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
    """
    target = _outline(options)
    dtype = computing_dtype(options)
    if target is None:  # on the hub, perhaps
        target = load(options.target or DEFAULT_TARGET, dtype=dtype)
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
    ]


def _outline(options: Options) -> Described | None:
    """The target without its weights; ``None`` where its files do not tell."""
    try:
        name = options.target or DEFAULT_TARGET
        return outline(name, dtype=computing_dtype(options))
    except UnsupportedModelError:
        raise
    except ModelError:
        return None  # loading tells


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
    if budget.tokens is not None:
        return f"{about}: {clock(budget.tokens / rate)} (minutes:seconds) and writing"
    assert budget.minutes is not None
    learnt = 60 * budget.minutes * rate / 1e6
    return f"{about}: {learnt:.2g} M tokens in {budget.minutes:g} minutes, and writing"


def _tokens_per_second(
    learnt: int, vocab_size: int, width: int, dtype: mx.Dtype
) -> float:
    """A guess: the operations of a token, at a share of this device's rate.

    Forward and backward take 6 operations a parameter; of the head, a product with
    the target's states, one with the draft's, and one for the gradient.
    """
    states = mx.zeros((_TIMED_ROWS, width), dtype)
    head = mx.zeros((vocab_size, width), dtype)
    mx.eval(states @ head.T)
    start = time.perf_counter()
    for _ in range(_TIMED_PRODUCTS):
        mx.eval(states @ head.T)
    seconds = (time.perf_counter() - start) / _TIMED_PRODUCTS
    rate = 2 * _TIMED_ROWS * vocab_size * width / seconds
    return _SHARE_OF_PEAK * rate / (6 * (learnt + vocab_size * width))
