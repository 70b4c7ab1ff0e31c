"""Proves and times kernels on this device; a program for a child process.

A kernel may hang a GPU or end its process. So nothing here runs in the process that
decodes: ``specdec probe`` asks ``python -m specdec.metal.trial``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from itertools import islice
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.gated_delta import gated_delta_kernel

from ..cuda import gated_delta
from ..cuda.gated_delta import Form, Inputs, Results, reference, scan
from ..cuda.split_attention import Split
from ..utils.child import serve
from . import attention
from .few_rows import Kind, faults, product

# Bytes of the matrices of a chain, so that no cache holds them; the most products of a
# chain, and about how many seconds one takes.
_BYTES, _MOST_PRODUCTS, _SECONDS = 256 * 2**20, 64, 0.03
# Layers of a chain; keys of a row for attention, and for steps of a draft.
_LAYERS, COLUMNS = 16, 4096
# Steps and layers of a draft, and columns of its caches' tails.
_STEPS, _DRAFT_LAYERS, _TAIL = 4, 4, 64
_TIMES = 5  # how often each chain is timed at most
_MEMORY = 2**48  # what a GPU maps is no measure of what a trial takes

Product = Callable[[mx.array, Sequence[mx.array]], mx.array]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Time MLX's computation, and prove and time ours.

    Args:
        request: ``rows`` to time, the ``seconds`` after which a number of rows is not
            timed again, whether to try our kernel, ``ours``, and a matrix or
            a layer: ``kind`` of :meth:`Kind.wire`, ``form`` of :func:`form_wire`, or
            ``attention`` or ``tail`` of :meth:`attention.Form.wire`. Requests may have
            one number of rows each: matrices and proofs are there until another kind
            comes.

    Returns:
        ``fault``: what is wrong with our kernel, or an empty text; ``mlx`` and
        ``ours``: milliseconds by number of rows.
    """
    if "form" in request:
        return try_form(request)
    if "attention" in request:
        return try_attention(request)
    if "tail" in request:
        return try_tail(request)
    return try_kind(request)


def form_wire(form: Form) -> dict[str, Any]:
    """A form of gated delta layers in values for JSON."""

    def name(dtype: mx.Dtype) -> str:
        return str(dtype).rpartition(".")[2]

    types = [name(each) for each in form.types]
    return {**vars(form), "dtype": name(form.dtype), "types": types}


def read_form(wire: dict[str, Any]) -> Form:
    """The form that :func:`form_wire` described."""
    values = {each.name: wire[each.name] for each in fields(Form)}
    values["dtype"] = getattr(mx, wire["dtype"])
    values["types"] = tuple(getattr(mx, each) for each in wire["types"])
    return Form(**values)


def try_form(request: dict[str, Any]) -> dict[str, Any]:
    """Prove our kernel of gated delta layers, and time it and mlx-lm's operations.

    As many tokens of one row as there are rows in the request, layer after layer.
    """
    form = read_form(request["form"])
    if not form.known:
        return {"fault": "our kernel does not take this layer", "mlx": {}, "ours": {}}
    fault = ""
    if request["ours"] and not _layer_agrees(form):
        fault = "results differ from mlx-lm's"
    hows: dict[str, Callable[..., Results]] = {
        "mlx": partial(reference, rule=gated_delta_kernel)
    }
    if request["ours"] and not fault:
        hows["ours"] = scan
    times: dict[str, dict[int, float]] = {name: {} for name in hows}
    for tokens in request["rows"]:
        drawn = gated_delta.drawn(form, 1, tokens)
        mx.eval(drawn)
        chains = {
            n: partial(_layers, form, drawn, tokens, how) for n, how in hows.items()
        }
        _compile(chains)
        for name, seconds in _in_turns(chains, request["seconds"]).items():
            times[name][tokens] = 1e3 * seconds / _LAYERS
    return {"fault": fault, "mlx": {}, "ours": {}, **times}


def try_attention(request: dict[str, Any]) -> dict[str, Any]:
    """Prove our attention of few queries, and time it and MLX's with long rows."""
    form = attention.Form.read(request["attention"])
    hows: dict[str, Callable[..., mx.array]] = {"mlx": partial(_mlx_attention, form)}
    fault = _attention_faults(form) if request["ours"] else ""
    if request["ours"] and not fault:
        hows["ours"] = attention.attention
    caches = _caches(form)
    times: dict[str, dict[int, float]] = {"mlx": {}, "ours": {}}
    for tokens in request["rows"]:
        shape = 1, form.heads, tokens, form.size
        q = mx.random.normal(shape).astype(form.dtype)
        mx.eval(q)
        some = {n: h for n, h in hows.items() if n == "mlx" or tokens > 1}
        chains = {n: partial(_attended, how, q, caches) for n, how in some.items()}
        _compile(chains)
        for name, seconds in _in_turns(chains, request["seconds"]).items():
            times[name][tokens] = 1e3 * seconds / _LAYERS
    return {"fault": fault, **times}


def try_tail(request: dict[str, Any]) -> dict[str, Any]:
    """Compare and time steps of a draft, whose caches have a tail or have none."""
    form = attention.Form.read(request["tail"])
    times: dict[str, dict[int, float]] = {"mlx": {}, "ours": {}}
    fault = ""
    for rows in request["rows"]:
        draft = _Draft(form, rows)
        chains = {"mlx": draft.usual_steps, "ours": draft.steps_with_tails}
        if not request["ours"]:
            del chains["ours"]
        results = [chain() for chain in chains.values()]
        usual, ours = results[0].astype(mx.float32), results[-1].astype(mx.float32)
        off: Any = (mx.abs(ours - usual).max() / mx.abs(usual).max()).item()
        # Compared this way round, NaN is no agreement.
        if not off <= 0.02:
            fault = f"results are off by {off:.1e}"
            chains.pop("ours", None)
        timed = {name: partial(_seconds, chain) for name, chain in chains.items()}
        for name, seconds in _in_turns(timed, request["seconds"]).items():
            times[name][rows] = 1e3 * seconds / _STEPS / _DRAFT_LAYERS
    return {"fault": fault, **times}


def _seconds(compute: Callable[[], mx.array]) -> float:
    begin = time.perf_counter()
    compute()
    return time.perf_counter() - begin


class _Draft:
    """Attention of a draft's layers in some steps, one graph in all.

    Each layer waits for the one before, and writes what it was given.
    """

    def __init__(self, form: attention.Form, rows: int):
        def drawn(heads: int, tokens: int) -> mx.array:
            shape = rows, heads, tokens, form.size
            return mx.random.normal(shape, key=mx.random.key(tokens)).astype(form.dtype)

        self._form = form
        self._first = drawn(form.heads, 1)
        held, tail = (drawn(form.key_heads, n) for n in (COLUMNS, _TAIL))
        self._caches, self._tails = (
            [[array + 0, array + 0] for _ in range(_DRAFT_LAYERS)]
            for array in (held, tail)
        )
        # The caches' last columns are those of the tails.
        sees = mx.arange(COLUMNS) < COLUMNS - _TAIL + mx.arange(1, _STEPS + 1)[:, None]
        self._masks = [mx.tile(m, (rows, 1, 1, 1)) for m in sees]
        mx.eval(self._first, self._caches, self._tails, self._masks)

    def usual_steps(self) -> mx.array:
        """The last layer's result; MLX copies what it still reads."""

        def attend(y: mx.array, arrays: Sequence[mx.array], mask: mx.array) -> mx.array:
            keys, values = arrays
            return mx.fast.scaled_dot_product_attention(
                y, keys, values, scale=self._form.size**-0.5, mask=mask
            )

        return self._steps(self._caches, COLUMNS - _TAIL, attend)

    def steps_with_tails(self) -> mx.array:
        """The same, with writes to tails."""
        begin, bases = COLUMNS - _TAIL, iter(self._caches * _STEPS)

        def attend(y: mx.array, arrays: Sequence[mx.array], mask: mx.array) -> mx.array:
            base = tuple(array[:, :, :begin] for array in next(bases))
            split = Split(base, tuple(arrays))
            return split.attention(y, self._form.size**-0.5, mask)

        return self._steps(self._tails, 0, attend)

    def _steps(
        self, written: list[list[mx.array]], first: int, attend: Callable[..., mx.array]
    ) -> mx.array:
        y, pairs = self._first, self._form.key_heads
        for step, mask in enumerate(self._masks):
            at = mx.full((len(y), 1, 1, 1), first + step, mx.int32)
            for layer, arrays in enumerate(written):
                new = y[:, :pairs]
                written[layer] = [
                    mx.put_along_axis(array, at, new, axis=2) for array in arrays
                ]
                y = y + attend(y, written[layer], mask)
        mx.eval(y, written)
        return y


_attention_faults = lru_cache(1)(attention.faults)
_layer_agrees = lru_cache(1)(gated_delta._agrees)


@lru_cache(1)
def _caches(form: attention.Form) -> list[list[Any]]:
    """Keys and values of a chain of layers, evaluated."""
    shape, count = (1, form.key_heads, COLUMNS, form.size), 2 * _LAYERS
    drawn = [
        form.packed(mx.random.normal(shape, key=mx.random.key(i)).astype(form.dtype))
        for i in range(count)
    ]
    mx.eval(drawn)
    return [drawn[i : i + 2] for i in range(0, count, 2)]


def _mlx_attention(
    form: attention.Form, q: mx.array, k: Any, v: Any, scale: float, mask: str
) -> mx.array:
    if not form.bits:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    # mlx-lm's function scales the queries in place, and takes a text for a mask, too.
    how: Any = {"mask": mask, "group_size": form.group_size, "bits": form.bits}
    result: mx.array = quantized_scaled_dot_product_attention(
        mx.array(q), k, v, scale, **how
    )
    return result


def _attended(
    how: Callable[..., mx.array], q: mx.array, caches: Sequence[Any]
) -> float:
    """The seconds of a chain of layers, each of which waits for the one before."""
    y, scale = q, q.shape[-1] ** -0.5
    begin = time.perf_counter()
    for keys, values in caches:
        y = q + how(y, keys, values, scale, "causal") * 0
    mx.eval(y)
    return time.perf_counter() - begin


def _layers(form: Form, drawn: Any, tokens: int, how: Callable[..., Results]) -> float:
    """The seconds of a chain of layers, each of which waits for the one before."""
    weights, inputs, past, after = drawn
    begin = time.perf_counter()
    for _ in range(_LAYERS):
        nothing = after[0, 0, 0, 0] * 0
        waiting = Inputs(*(x + nothing.astype(x.dtype) for x in inputs))
        layer = how(form, weights, waiting, past, after)
        past, after = layer.log.joined[:, tokens:], layer.after
    mx.eval(after, layer.y)
    return time.perf_counter() - begin


def _compile(chains: Mapping[str, Callable[[], float]]) -> None:
    """Run each once: kernels are compiled, and CUDA's graphs built."""
    for chain in chains.values():
        chain()


def _in_turns(
    chains: Mapping[str, Callable[[], float]], patience: float
) -> dict[str, float]:
    """The median seconds of chains that take turns, the last begun within patience."""
    seconds: dict[str, list[float]] = {name: [] for name in chains}
    begin = time.perf_counter()
    for _ in range(_TIMES):
        for name, chain in chains.items():
            seconds[name].append(chain())
        if time.perf_counter() - begin > patience:
            break
    return {name: median(each) for name, each in seconds.items()}


def try_kind(request: dict[str, Any]) -> dict[str, Any]:
    """Time MLX's products with a kind of matrix, and prove and time ours."""
    kind, rows = Kind.read(request["kind"]), list(request["rows"])
    timed: dict[str, Product] = {"mlx": partial(_by_mlx, kind)}
    fault = ""
    if request["ours"]:
        fault = faults(kind, [n for n in rows if n <= 16])
        if not fault:
            timed["ours"] = partial(_by_ours, kind)
    times = _times(kind, rows, timed, request["seconds"])
    return {"fault": fault, "mlx": {}, "ours": {}, **times}


def _by_mlx(kind: Kind, x: mx.array, packed: Sequence[mx.array]) -> mx.array:
    if not kind.bits:
        return x @ packed[0].T
    weight, scales, biases = packed
    size, bits = kind.group_size, kind.bits
    return mx.quantized_matmul(x, weight, scales, biases, group_size=size, bits=bits)


def _by_ours(kind: Kind, x: mx.array, packed: Sequence[mx.array]) -> mx.array:
    return product(x, packed, bits=kind.bits, group_size=kind.group_size)


def _times(
    kind: Kind, rows: Sequence[int], timed: dict[str, Product], patience: float
) -> dict[str, dict[int, float]]:
    """Milliseconds of a product, by product and number of rows.

    Medians of chains of dependent products, which take turns.
    """
    matrices = _matrices(kind)
    times: dict[str, dict[int, float]] = {name: {} for name in timed}
    for number in rows:
        x = _input(kind, number)
        # One row, and more than 16, are MLX's.
        some = {n: p for n, p in timed.items() if n == "mlx" or 1 < number <= 16}
        once = {n: _chain(p, matrices, 1, x) for n, p in some.items()}
        _compile(once)
        length = _length(once["mlx"])
        chains = {n: _chain(p, matrices, length, x) for n, p in some.items()}
        if length > 1:
            _compile(chains)
        for name, seconds in _in_turns(chains, patience).items():
            times[name][number] = 1e3 * seconds / length
    return times


@lru_cache(1)
def _matrices(kind: Kind) -> list[Sequence[mx.array]]:
    """The matrices of a chain."""
    matrices = [_matrix(kind, 0)]
    bytes_each = sum(array.nbytes for array in matrices[0])
    once = _chain(partial(_by_mlx, kind), matrices, 1, _input(kind, 1))
    once()  # kernels are compiled
    for i in range(1, min(_length(once), -(-_BYTES // bytes_each))):
        matrices.append(_matrix(kind, i))
    return matrices


def _length(once: Callable[[], float]) -> int:
    """How many products a chain has; ``once`` computes one, and returns the seconds."""
    return max(1, min(_MOST_PRODUCTS, int(_SECONDS / max(once(), 1e-6))))


def _input(kind: Kind, rows: int) -> mx.array:
    x = mx.random.normal((1, rows, kind.length), key=mx.random.key(rows))
    return x.astype(kind.dtype)


def _matrix(kind: Kind, seed: int) -> Sequence[mx.array]:
    """A matrix of random numbers, evaluated."""
    key, shape = mx.random.key(seed), (kind.columns, kind.length)
    if not kind.bits:
        arrays = [mx.random.normal(shape, scale=0.02, key=key).astype(kind.dtype)]
    else:
        packed = kind.columns, kind.length * kind.bits // 32
        groups = kind.columns, kind.length // kind.group_size
        numbers = mx.random.randint(0, 2**31 - 1, packed, mx.uint32, key=key)
        scales = mx.random.normal(groups, scale=0.001, key=key).astype(kind.dtype)
        arrays = [numbers, scales, scales * -(2 ** (kind.bits - 1))]
    mx.eval(arrays)
    return arrays


def _chain(
    product: Product, matrices: Sequence[Sequence[mx.array]], length: int, x: mx.array
) -> Callable[[], float]:
    """A function that computes dependent products, and returns the seconds."""
    turns = iter(int, 1)  # endless: each run goes on with the next matrices
    following = (m for _ in turns for m in matrices)

    def run() -> float:
        y = x
        begin = time.perf_counter()
        for packed in islice(following, length):
            y = y + product(y, packed)[..., :1] * 0
        mx.eval(y)
        return time.perf_counter() - begin

    return run


if __name__ == "__main__":
    serve(answer, memory=_MEMORY)
