"""mlx-lm's recurrent layers in a batch whose rows keep different numbers of tokens.

No other module knows these layers. A recurrent layer is a module of a model that reads
and writes an ``ArraysCache``. A forward that is built but not computed shows which
modules do, and what states they keep. A twin of the model shares its weights; in it,
each recurrent layer has a subclass that hands its calls to the cache. The cache repeats
a call on the same inputs for the tokens that a row has kept. mlx-lm's code computes all
of it, with the states in an ``ArraysCache``. Only gated delta layers have their own
kernel on CUDA (on Metal for rounds, if it was proven), and on a CPU products of
matrices for prompts.

Projections and convolutions do not depend on what a row keeps. Their outputs are
taped, so that repeating a call computes only the recurrence.
"""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from ..backend import defaults
from ..cache import BatchCacheList, BatchRecurrentCache
from ..cache.recurrent import Kept, Slots, Write, select
from ..cuda import gated_delta
from ..cuda.modules import as_kind, modules_of
from .chunked_delta import gated_delta_chunks
from .layers import calling

# Tokens that a CPU computes one by one, as in a round: chunks round otherwise.
LOOPED = 16
# More tokens than a window of any convolution has.
_PROBE = 16

#: Layers that leave masked tokens out of their states, and take windows that end at
#: ``lengths``. One call serves rows with different counts. Other layers are called
#: token by token.
_MASKED = {
    "bailing_hybrid.LinearAttention",
    "bailing_moe_v3.BailingKDA",
    "falcon_h1.FalconH1Mixer",
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer",
    "kimi_k3.KimiK3DeltaAttention",
    "kimi_linear.KimiDeltaAttention",
    "lfm2.ShortConv",
    "lfm2_moe.ShortConv",
    "mamba2.Mamba2Block",
    "plamo2.Mamba",
    "qwen3_5.GatedDeltaNet",
    "qwen3_next.Qwen3NextGatedDeltaNet",
}
#: Copies of a layer's states that its scan holds for each token of a forward, measured
#: on MLX's CPU backend. Masked layers that are not listed hold none, others 2.
_SCANNED = {
    "jamba.JambaMambaMixer": 14,
    "nemotron_h.NemotronHMamba2Mixer": 1,
    "olmo_hybrid.GatedDeltaNet": 0,
    "recurrent_gemma.RecurrentBlock": 3,
}
#: Layers whose scan scores the tokens of a part with each other, head by head. It holds
#: ``_PAIR_COPIES`` copies of these scores in float32, measured in the same way.
_PAIRED = {
    "falcon_h1.FalconH1Mixer",
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer",
    "mamba2.Mamba2Block",
    "nemotron_h.NemotronHMamba2Mixer",
    "plamo2.Mamba",
}
_PAIR_COPIES = 8
#: Layers that compute differently without states than with states of zeros.
_BEGIN_OTHERWISE = {"recurrent_gemma.RecurrentBlock"}


@dataclass(frozen=True)
class _States:
    """The states that one layer keeps.

    Args:
        blank: by place, a state's shape without the rows, and its type.
    """

    blank: dict[int, tuple[tuple[int, ...], mx.Dtype]]

    def begun(self, slots: Slots, rows: int) -> Slots:
        """``slots``, with zeros where this layer has nothing written yet."""
        filled = list(slots)
        for place, (shape, dtype) in self.blank.items():
            if filled[place] is None:
                filled[place] = mx.zeros((rows, *shape), dtype)
        return filled


# -- the tape ----------------------------------------------------------------


class _Tape:
    """The outputs of projections and convolutions in one call of a layer.

    Args:
        width: tokens of each row in that call.
    """

    def __init__(self, width: int):
        self._width = width
        self._outputs: dict[int, list[mx.array]] = {}
        self._part: tuple[int, int] | None = None
        self._asked: dict[int, int] = {}

    @property
    def form(self) -> Hashable:
        """The modules that were recorded, and how often."""
        return tuple((name, len(each)) for name, each in self._outputs.items())

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The recorded outputs."""
        return tuple(a for each in self._outputs.values() for a in each)

    def holding(self, arrays: tuple[mx.array, ...]) -> _Tape:
        """A tape like this one, with other arrays."""
        twin, rest = _Tape(self._width), iter(arrays)
        twin._outputs = {
            name: [next(rest) for _ in each] for name, each in self._outputs.items()
        }
        return twin

    def play(self, start: int, stop: int) -> _Tape:
        """Play back the outputs for tokens ``start`` to ``stop``."""
        self._part, self._asked = (start, stop), {}
        return self

    def output(self, module: Any, compute: Callable[[], mx.array]) -> mx.array:
        """The output of ``module``, which is recorded or played back."""
        known = self._outputs.setdefault(id(module), [])
        if self._part is None:
            known.append(compute())
            return known[-1]
        start, stop = self._part
        turn = self._asked.get(id(module), 0)
        self._asked[id(module)] = turn + 1
        # A layer asks once for all tokens, or token by token.
        if turn < len(known) and known[turn].ndim > 2:
            if known[turn].shape[1] == self._width:
                return known[turn][:, start:stop]
        elif len(known) == self._width and turn < stop - start:
            return known[start + turn]
        return compute()


class _Current(threading.local):
    tape: _Tape | None = None


_current = _Current()


class _Taped:
    """A projection or convolution of a recurrent layer."""

    def __call__(self, x: mx.array) -> mx.array:
        usual: Any = super()
        if _current.tape is None:
            output: mx.array = usual.__call__(x)
            return output
        return _current.tape.output(self, lambda: usual.__call__(x))


@cache
def _taped(kind: type) -> type:
    also = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Taped, kind), also)


# -- calls -------------------------------------------------------------------


class _KeysAsGiven:
    """Stands in for a key cache next to the states when only the states matter."""

    def __init__(self, offset: mx.array):
        self.offset = offset

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        return keys, values


class _Call:
    """One call of a recurrent layer: a :class:`~specdec.cache.recurrent.Write`."""

    def __init__(self, layer: Any, arguments: dict[str, Any], states: _States):
        self.layer = layer
        self._states = states
        # The layer is called with the states instead. A repeated call reads no keys.
        self._cache = arguments.pop("cache")
        self._members: tuple[bool, ...] | None = None
        if isinstance(self._cache, BatchCacheList):
            members = self._cache.caches
            self._members = tuple(isinstance(c, BatchRecurrentCache) for c in members)
        self._arguments = arguments
        first = next(a for a in arguments.values() if isinstance(a, mx.array))
        self._rows, self.width = first.shape[:2]
        self._tape = _Tape(self.width)
        self._code = _code(type(layer).__mro__[1])

    def run(
        self, slots: Slots, offset: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots]:
        done = self._run(slots, offset, lengths)
        # Repeating the call needs neither the keys nor the given mask.
        self._cache = None
        if "mask" in self._arguments:
            self._arguments["mask"] = None
        return done

    def _run(
        self, slots: Slots, offset: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots]:
        fewest, most = min(lengths, default=0), max(lengths, default=0)
        if fewest < most and self._code in _MASKED:
            kept = mx.array(list(lengths))
            slots = self._states.begun(slots, self._rows)
            return self._layer(slots, offset, self._masked(kept), None, lengths=kept)
        if 0 < fewest == most < self.width and self._members is None:
            # The output for padding is never read.
            width, self.width = self.width, most
            self._arguments, self._tape = self._part(0, most, width), _Tape(most)
            output, after = self._begin(slots, offset, self._arguments, self._tape)
            return _widened(output, most, width), after
        output, after = self._begin(slots, offset, self._arguments, self._tape)
        if fewest < self.width:
            after = self.again(slots, offset, lengths)
        return output, after

    @property
    def form(self) -> Hashable:
        shapes = [(name, _shape(a)) for name, a in self._arguments.items()]
        return id(self.layer), self.width, tuple(shapes), self._tape.form

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        inputs = [a for a in self._arguments.values() if isinstance(a, mx.array)]
        return (*inputs, *self._tape.arrays)

    def holding(self, arrays: tuple[mx.array, ...]) -> _Call:
        twin, rest = copy.copy(self), iter(arrays)
        twin._cache = None
        twin._arguments = {
            name: next(rest) if isinstance(a, mx.array) else a
            for name, a in self._arguments.items()
        }
        twin._tape = self._tape.holding(tuple(rest))
        return twin

    def again(self, slots: Slots, offset: mx.array, kept: Kept) -> Slots:
        slots = self._states.begun(slots, self._rows)
        tape = self._tape
        if self._code in _MASKED and isinstance(kept, mx.array):
            arguments = self._masked(kept)
            whole = tape.play(0, self.width)
            after = self._layer(slots, offset, arguments, whole, lengths=kept)[1]
            # Masked or not, an input that is not finite may reach the states.
            return select(kept, 1, after, slots)
        if isinstance(kept, mx.array):
            stops = list(range(1, self.width + 1))
        else:
            stops = sorted({n for n in kept if n})
        start = 0
        for stop in stops:
            arguments = self._part(start, stop, self.width)
            part = tape.play(start, stop)
            _, after = self._begin(slots, offset + start, arguments, part, again=True)
            slots, start = select(kept, stop, after, slots), stop
        return slots

    @property
    def logged(self) -> bool:
        return False

    def takes_in(self, before: Write, lengths: Sequence[int]) -> bool:
        return False

    def run_after(
        self, before: Write, slots: Slots, kept: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots, Slots]:
        raise NotImplementedError

    def _masked(self, kept: mx.array) -> dict[str, Any]:
        """The arguments, with a mask for ``kept[i]`` tokens of row ``i``."""
        mask = mx.arange(self.width) < kept[:, None]
        return {**self._arguments, "mask": mask}

    def _part(self, start: int, stop: int, width: int) -> dict[str, Any]:
        """The arguments of tokens ``start`` to ``stop`` of ``width``."""
        part: dict[str, Any] = {}
        for name, value in self._arguments.items():
            if name == "mask":
                value = None
            elif name == "offset":
                value = value + start
            elif _shape(value)[:2] == (self._rows, width):
                value = value[:, start:stop]
            part[name] = value
        return part

    def _begin(
        self,
        slots: Slots,
        offset: mx.array,
        arguments: dict[str, Any],
        tape: _Tape | None,
        **how: Any,
    ) -> tuple[Any, Slots]:
        """Like :meth:`_layer`, for rows that may have no tokens before this call."""
        filled = self._states.begun(slots, self._rows)
        output, after = self._layer(filled, offset, arguments, tape, **how)
        if self._code not in _BEGIN_OTHERWISE:
            return output, after
        none: Slots = [None] * len(slots)
        first, states = self._layer(none, offset, arguments, None, **how)
        begins = (offset == 0).astype(mx.int32)
        output = mx.where(begins[:, None, None] == 1, first, output)
        return output, select(begins, 1, states, after)

    def _layer(
        self,
        slots: Slots,
        offset: mx.array,
        arguments: dict[str, Any],
        tape: _Tape | None,
        *,
        lengths: mx.array | None = None,
        again: bool = False,
    ) -> tuple[Any, Slots]:
        """The layer's output, and its states afterwards."""
        held = mlx_lm_cache.ArraysCache(len(slots))
        held.cache = list(slots)  # type: ignore[arg-type]
        if lengths is not None:
            # A new array, because layers count it down.
            held.lengths = mx.maximum(lengths, 0)  # type: ignore[assignment]
        cache_argument: Any = held
        if self._members is not None:
            others: list[Any] = [_KeysAsGiven(offset) for _ in self._members]
            if self._cache is not None and not again:
                others = self._cache.caches
            pairs = zip(self._members, others, strict=True)
            members: list[Any] = [held if ours else c for ours, c in pairs]
            cache_argument = BatchCacheList(*members)
        _current.tape = tape
        try:
            usual: Any = super(type(self.layer), self.layer)
            output = usual.__call__(**{**arguments, "cache": cache_argument})
        finally:
            _current.tape = None
        return output, list(held.cache)


class _Scan(_Call):
    """A call of a gated delta layer, run by our kernel if the kernel supports it.

    The call then holds only the kernel's log. The first state of such a layer is the
    window, the second is the delta rule's state. On a CPU, more than ``LOOPED`` tokens
    are computed in chunks.
    """

    def __init__(self, layer: Any, arguments: dict[str, Any], states: _States):
        super().__init__(layer, arguments, states)
        self._kernel = gated_delta.form_of(layer)
        self._log: gated_delta.Log | None = None

    def _how(self, lengths: Sequence[int]) -> Callable[..., gated_delta.Results] | None:
        """What computes these lengths; ``None``: mlx-lm's layer."""
        tokens = max(lengths, default=0)
        if self._states.blank[1][1] != mx.float32:
            return None
        if gated_delta.takes(self._kernel, self._arguments["inputs"], tokens):
            return gated_delta.scan
        if self._kernel is not None and tokens > LOOPED and defaults().name == "cpu":
            return partial(gated_delta.reference, rule=gated_delta_chunks)
        return None

    def _run(
        self, slots: Slots, offset: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots]:
        how = self._how(lengths)
        if how is None:
            return super()._run(slots, offset, lengths)
        window, state = self._begun(slots)
        output, _, after = self._scanned(how, window, state, None, lengths)
        return output, after

    @property
    def logged(self) -> bool:
        return self._log is not None

    def takes_in(self, before: Write, lengths: Sequence[int]) -> bool:
        return (
            isinstance(before, _Scan)
            and before.logged
            and before.layer is self.layer
            and len(set(lengths)) == 1
            and self._how(lengths) is gated_delta.scan
        )

    def run_after(
        self, before: Any, slots: Slots, kept: mx.array, lengths: Sequence[int]
    ) -> tuple[Any, Slots, Slots]:
        state = self._begun(slots)[1]
        return self._scanned(gated_delta.scan, before._log, state, kept, lengths)

    def again(self, slots: Slots, offset: mx.array, kept: Kept) -> Slots:
        if self._log is None or self._kernel is None:
            return super().again(slots, offset, kept)
        counts = kept if isinstance(kept, mx.array) else mx.array(list(kept), mx.int32)
        weights = gated_delta.weights_of(self.layer)
        before, state = self._begun(slots)
        window, after = gated_delta.again(
            self._kernel, weights, self._log, state, counts
        )
        # The log's window includes the whole previous write, even if a row keeps less.
        return [*select(kept, 1, [window], [before]), after]

    def _begun(self, slots: Slots) -> list[Any]:
        return self._states.begun(slots, self._rows)

    def _scanned(
        self,
        how: Callable[..., gated_delta.Results],
        past: mx.array | gated_delta.Log,
        state: mx.array,
        kept: mx.array | None,
        lengths: Sequence[int],
    ) -> tuple[Any, Slots, Slots]:
        """The output for each row's tokens; the states before and after them."""
        layer, width, form = self.layer, self.width, self._kernel
        assert form is not None
        tokens = max(lengths)
        hidden = self._arguments["inputs"][:, :tokens]
        inputs = gated_delta.projected(layer, hidden)
        weights = gated_delta.weights_of(layer)
        ragged = mx.array(list(lengths)) if len(set(lengths)) > 1 else None
        results = how(form, weights, inputs, past, state, kept, ragged)
        output = layer.out_proj(results.y)
        group = getattr(layer, "sharding_group", None)
        if group is not None:
            output = mx.distributed.all_sum(output, group=group)
        if tokens < width:
            output = _widened(output, tokens, width)
        if how is gated_delta.scan:
            self._log, self._arguments = results.log, {}
        else:
            self._arguments = self._part(0, tokens, width)
        self._cache, self.width = None, tokens
        joined, size = results.log.joined, form.kernel_size - 1
        before: Slots = [joined[:, :size], results.before]
        if ragged is None:
            return output, before, [joined[:, tokens:], results.after]
        # A row without tokens has no part in the joined inputs. Prompts begin with a
        # window, not with a log.
        assert isinstance(past, mx.array)
        # An index of rows, as embeddings have: for another kind of index MLX compiles
        # for seconds on CUDA.
        rows, length, channels = joined.shape
        places = mx.arange(rows)[:, None] * length + ragged[:, None] + mx.arange(size)
        after = joined.reshape(-1, channels)[places]
        after = mx.where((ragged > 0)[:, None, None], after, past)
        return output, before, [after, results.after]

    @property
    def form(self) -> Hashable:
        if self._log is None:
            return super().form
        return id(self.layer), self.width, self._kernel

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return super().arrays if self._log is None else tuple(self._log)

    def holding(self, arrays: tuple[mx.array, ...]) -> _Call:
        if self._log is None:
            return super().holding(arrays)
        twin = copy.copy(self)
        twin._log = gated_delta.Log(*arrays)
        return twin


def _shape(value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, mx.array) else ()


def _widened(output: Any, part: int, width: int) -> Any:
    """A layer's output for ``part`` tokens; the last repeats up to ``width``."""
    if isinstance(output, tuple):
        return tuple(_widened(o, part, width) for o in output)
    last = mx.repeat(output[:, -1:], width - part, axis=1)
    return mx.concatenate([output, last], axis=1)


def _code(kind: type) -> str:
    """A layer's class with its module in mlx-lm, such as ``lfm2.ShortConv``."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


@cache
def _recurrent(kind: type) -> type:
    """A subclass of a layer's class that hands its calls to the cache."""
    signature = inspect.signature(kind.__call__)
    call = _Scan if gated_delta.is_layer(kind) else _Call

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        arguments.pop("self")
        states = _cache_of(arguments.get("cache"))
        if states is None:
            return kind.__call__(self, *args, **kwargs)
        return states.write(call(self, arguments, vars(self)["_recurrent_states"]))

    also = {
        "__call__": __call__,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), also)


def _cache_of(argument: Any) -> BatchRecurrentCache | None:
    """The cache of states in a layer's ``cache`` argument; ``None``: there is none."""
    members = argument.caches if isinstance(argument, BatchCacheList) else [argument]
    return next((c for c in members if isinstance(c, BatchRecurrentCache)), None)


# -- the twin ----------------------------------------------------------------


# Modules that are being called, each with its ``cache``; the innermost one is last.
_Calls = list[tuple[nn.Module, Any]]


class _Watched(mlx_lm_cache.ArraysCache):
    """An ``ArraysCache`` that notes which layer writes which state.

    A state's layer is the innermost module that is called with this cache as its
    ``cache``. What helps the layer, and gets states or nothing, is a part of it.

    Args:
        size: number of states.
        calls: modules that are being called, each with its ``cache``.
    """

    def __init__(self, size: int, calls: Sequence[tuple[nn.Module, Any]]):
        super().__init__(size)
        self._calls = calls
        self.writers: dict[int, nn.Module] = {}

    def __setitem__(self, place: int, value: mx.array) -> None:
        super().__setitem__(place, value)  # type: ignore[no-untyped-call]
        for module, cache_argument in reversed(self._calls):
            if any(
                c is self for c in getattr(cache_argument, "caches", [cache_argument])
            ):
                self.writers[place] = module
                return


def _watched(cache: Any, calls: _Calls, watched: list[_Watched]) -> Any:
    if isinstance(cache, mlx_lm_cache.CacheList):
        return mlx_lm_cache.CacheList(
            *(_watched(c, calls, watched) for c in cache.caches)
        )
    if type(cache) is not mlx_lm_cache.ArraysCache:
        return cache
    watched.append(_Watched(len(cache.cache), calls))
    return watched[-1]


def _noting_calls(part: Any, calls: _Calls) -> Any:
    """A twin of ``part`` of a model whose modules note their calls with a cache."""
    if isinstance(part, list | tuple):
        return type(part)(_noting_calls(each, calls) for each in part)
    if not isinstance(part, dict):
        return part
    items = {name: _noting_calls(value, calls) for name, value in part.items()}
    if not isinstance(part, nn.Module):
        return items
    signature = inspect.signature(type(part).__call__)

    def noted(usual: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache_argument = signature.bind(part, *args, **kwargs).arguments.get("cache")
        calls.append((part, cache_argument))
        output = usual(*args, **kwargs)
        calls.pop()
        return output

    reads = "cache" in signature.parameters
    twin = calling(part, noted) if reads else as_kind(part, type(part))
    dict.update(twin, items)
    return twin


def with_recurrent_rows(model: nn.Module) -> nn.Module:
    """A twin whose recurrent layers serve rows of a batch, or the model if it has none.

    The twin shares the model's weights; the model does not change. If its recurrent
    layers are not found, the model is returned, and its caches refuse it. Weights that
    are replaced later reach the twin through :func:`share_weights`.
    """
    watched_caches: list[_Watched] = []
    calls: _Calls = []
    caches = [
        _watched(c, calls, watched_caches)
        for c in mlx_lm_cache.make_prompt_cache(model)
    ]
    if not watched_caches:
        return model
    _noting_calls(model, calls)(mx.zeros((1, _PROBE), mx.int32), cache=caches)
    blank: dict[int, dict[int, tuple[tuple[int, ...], mx.Dtype]]] = {}
    for watched in watched_caches:
        for place, layer in watched.writers.items():
            array: Any = watched.cache[place]
            blank.setdefault(id(layer), {})[place] = (array.shape[1:], array.dtype)
    states = {key: _States(places) for key, places in blank.items()}
    twin: nn.Module = _with(model, states)
    return twin


def twins_within(model: nn.Module) -> list[nn.Module]:
    """The twin modules within a model; none if no layer is recurrent."""
    return [module for _, module in modules_of(model) if "_twin_of" in vars(module)]


def share_weights(twins: Iterable[nn.Module]) -> None:
    """Copy weights, and scales of adapters, that the original modules have now."""
    for module in twins:
        source: Any = vars(module)["_twin_of"]
        if "lora_a" in source:
            module.scale = source.scale
        for name, value in source.items():
            if isinstance(value, mx.array) and module[name] is not value:
                dict.__setitem__(module, name, value)


def scan_bytes(twin: nn.Module) -> tuple[int, int]:
    """The most bytes that the scan of any recurrent layer holds.

    Returns:
        The bytes for each token that it scans, and for each pair of tokens.
    """
    by_token = by_pair = 0
    for _, module in twin.named_modules():
        states: _States | None = vars(module).get("_recurrent_states")
        if states is None:
            continue
        code = _code(type(module).__mro__[1])
        held = _SCANNED.get(code, 0 if code in _MASKED else 2)
        sizes = [
            math.prod(shape) * dtype.size for shape, dtype in states.blank.values()
        ]
        by_token = max(by_token, held * sum(sizes))
        if code in _PAIRED:
            heads = max(shape[0] for shape, _ in states.blank.values() if shape[2:])
            by_pair = max(by_pair, _PAIR_COPIES * 4 * heads)
    return by_token, by_pair


def _with(part: Any, states: dict[int, _States], within: bool = False) -> Any:
    """``part`` of a model, with mlx-lm's recurrent layers replaced by twins."""
    if isinstance(part, list | tuple):
        parts = [_with(p, states, within) for p in part]
        if all(a is b for a, b in zip(parts, part, strict=True)):
            return part
        return type(part)(parts)
    if not isinstance(part, dict):
        return part
    layer_states = states.get(id(part))
    inside = within or layer_states is not None
    items = {name: _with(value, states, inside) for name, value in part.items()}
    changed = any(items[name] is not value for name, value in part.items())
    if not isinstance(part, nn.Module):
        return items if changed else part
    kind: type = type(part)
    if layer_states is not None:
        kind = _recurrent(kind)
    elif within and isinstance(part, nn.Linear | nn.QuantizedLinear | nn.Conv1d):
        kind = _taped(kind)
    elif not changed:
        return part
    twin = as_kind(part, kind)
    dict.update(twin, items)
    vars(twin)["_twin_of"] = part
    if layer_states is not None:
        vars(twin)["_recurrent_states"] = layer_states
    return twin
