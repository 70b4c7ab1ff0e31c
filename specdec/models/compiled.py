"""Forwards of a model as compiled functions.

If launches and Python limit the speed of a decode step, most of the avoidable time goes
into building the same graph for every token. ``mx.compile`` builds the graph once,
fuses the operations between matrix products, and replays it. A graph fixes shapes and
every other decision that the host made while building it, so each combination of these
has its own graph. If shapes repeat, there are few.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache import BatchCache, BatchCacheList, Memo, members
from ..prefix_cache.signature import KnownWeights
from ..utils.printable import shorten
from .layers import HiddenStates

log = logging.getLogger("specdec.models")

# The last used graphs of a model are kept: a few thousand small objects each.
MAX_GRAPHS = 256
# Combinations whose uses are counted. Beyond this number all counts restart.
MAX_COUNTED = 4096

Held = list[tuple[mx.array, ...]]
_FORWARD = "__call__"


@dataclass
class Function:
    """A compiled forward.

    Args:
        forms: the form of what it leaves in each cache; known once it is traced.
    """

    call: Callable[
        [list[mx.array], list[mx.array], Held],
        tuple[Any, mx.array | None, list[mx.array], Held],
    ]
    forms: list[Any]


class _CannotCompileError(Exception):
    """A forward did not write to all caches as a decode step does."""


class CompiledForwards:
    """Forwards of ``model``, compiled if possible.

    Args:
        model: an mlx-lm model.
        recorder: records the outputs of its layers.
        after: how often a combination of shapes is met before its graph is built.
            Building takes longer than a forward.
    """

    _at_once = 0

    def __init__(
        self, model: nn.Module, recorder: HiddenStates | None = None, *, after: int = 0
    ):
        #: Forwards so far that were slower than later ones of the same shapes will be:
        #: they built a graph, or ran as usual because it is not built yet.
        self.new_shapes = 0
        #: Types of each cache's masks, as earlier rows have shown; empty: unknown.
        self.dtypes: list[mx.Dtype | None] = []
        self._after = after
        self._met: Counter[Hashable] = Counter()
        self._model = model
        self._weights = KnownWeights([model, *getattr(model, "lenders", ())])
        self._recorder = recorder
        self._functions: OrderedDict[Hashable, Function] = OrderedDict()
        self._refused = False

    def __call__(
        self,
        inputs: Sequence[mx.array],
        caches: Sequence[Any],
        *,
        name: str = _FORWARD,
        padding: int = 0,
        options: tuple[Hashable, ...] = (),
        keeps: bool = True,
        valid: Sequence[int] = (),
    ) -> tuple[Any, mx.array | None] | None:
        """Call the model, or a method of it, with arrays and the caches.

        Args:
            inputs: its arguments before the caches. It writes a token to every cache
                for each column of the first one, (B, S) or (B, S, D).
            name: the method's name.
            padding: how often a single token (S = 1) is computed again and taken back.
            options: further arguments of the method, after the caches.
            keeps: whether rows keep what is written; otherwise it is taken back.
            valid: how many of the written tokens each row keeps; empty: all.

        Returns:
            Its result (logits of shape (B, S, V), for the model), and hidden states if
            layers are recorded; ``None`` if this forward must run as usual, and
            nothing was written.

        Raises:
            CacheError: the tokens do not fit.
        """
        if self._refused:
            return None
        parts = members(caches)
        width = inputs[0].shape[1] + padding
        keys = [cache.reserve(width, padded=bool(valid)) for cache in parts]
        if None in keys:
            return None
        states = [cache.given(width) for cache in parts]
        keys += [form for form, _ in states]
        # Caches in lockstep hold the same offsets.
        known = {id(cache.offset): cache.offset for cache in parts}
        places = {key: place for place, key in enumerate(known)}
        offsets = list(known.values())
        groups = [places[id(cache.offset)] for cache in parts]
        # Operations belong to the stream that was current when they were made.
        stream = mx.default_stream(mx.default_device())
        shapes = tuple((array.shape, array.dtype) for array in inputs)
        how = (options, shapes, padding, keeps, bool(valid))
        key = (name, how, tuple(groups), tuple(keys), str(stream))
        function = self._functions.get(key)
        if function is None:
            if len(self._met) > MAX_COUNTED:
                self._met.clear()
            self._met[key] += 1
            self.new_shapes += 1
            if self._met[key] <= self._after and not CompiledForwards._at_once:
                return None
            function = self._make(
                name, options, caches, parts, groups, padding, keeps, bool(valid)
            )
        held = [arrays for _, arrays in states]
        counts = [mx.array(list(valid), mx.int32)] if valid else []
        try:
            result, hidden, offsets, held = function.call(
                list(inputs), [*counts, *offsets], held
            )
        except _CannotCompileError:
            self._refused = True
            log.debug("%s leaves a cache out: it is not compiled", self._called)
            return None
        except Exception as error:
            # The model's code may read an array, for example. The usual forward works,
            # or reports what is wrong.
            self._refused = True
            log.warning(
                "%s cannot be compiled (%s: %s): it decodes the same, only slower; "
                "please report this line",
                self._called,
                type(error).__name__,
                shorten(error),
            )
            return None
        for cache, group, form, arrays in zip(
            parts, groups, function.forms, held, strict=True
        ):
            taken_back = padding if keeps else width
            cache.take(form, arrays, offsets[group], width, taken_back, valid)
        self._functions[key] = function
        self._functions.move_to_end(key)
        if len(self._functions) > MAX_GRAPHS:
            self._functions.popitem(last=False)
        return result, hidden

    def look_at_weights(self) -> None:
        """Forget graphs and types of masks if weights were replaced."""
        if self._weights.replaced():
            self._functions.clear()
            self.dtypes.clear()

    @classmethod
    @contextmanager
    def at_once(cls) -> Iterator[None]:
        """Build graphs when shapes are first met, to measure what will run."""
        CompiledForwards._at_once += 1
        try:
            yield
        finally:
            CompiledForwards._at_once -= 1

    def of(self, model: nn.Module, recorder: HiddenStates | None) -> CompiledForwards:
        """Compiled forwards of another model, with the same settings."""
        return CompiledForwards(model, recorder, after=self._after)

    @property
    def _called(self) -> str:
        """The model's architecture: the name of its module in mlx-lm."""
        return type(self._model).__module__

    def _make(
        self,
        name: str,
        options: tuple[Hashable, ...],
        caches: Sequence[Any],
        parts: list[BatchCache],
        groups: list[int],
        padding: int,
        keeps: bool,
        padded: bool,
    ) -> Function:
        model, recorder = self._model, self._recorder
        bare = [cache.without_arrays() for cache in parts]
        forms: list[Any] = []
        sizes = [
            len(c.caches) if isinstance(c, BatchCacheList) else None for c in caches
        ]

        def forward(
            inputs: list[mx.array], offsets: list[mx.array], held: Held
        ) -> tuple[Any, mx.array | None, list[mx.array], Held]:
            memo = Memo()
            memo.valid = offsets.pop(0) if padded else None
            twins = [
                cache.holding(tuple(arrays), offsets[group], memo)
                for cache, group, arrays in zip(bare, groups, held, strict=True)
            ]
            rest = iter(twins)
            rows, num_tokens = inputs[0].shape[:2]
            if padding:
                twice = mx.broadcast_to(inputs[0], (rows, 1 + padding))
                inputs = [twice, *inputs[1:]]
                for twin in twins:
                    twin.prepare(lengths=[1] * rows)
            layer_caches = [
                next(rest) if n is None else BatchCacheList(*islice(rest, n))
                for n in sizes
            ]
            if name == _FORWARD:
                result = model(*inputs, cache=layer_caches)
            else:
                result = getattr(model, name)(*inputs, layer_caches, *options)
            hidden = None if recorder is None else recorder.take()
            after: list[mx.array] = list(offsets)
            for twin, group in zip(twins, groups, strict=True):
                if after[group] is offsets[group]:
                    after[group] = twin.offset
                if twin.offset is offsets[group] or twin.offset is not after[group]:
                    raise _CannotCompileError
            if padding:
                result = result[:, :num_tokens]
                hidden = None if hidden is None else hidden[:, :num_tokens]
            left = [twin.left() for twin in twins]
            forms[:] = [form for form, _ in left]
            if not keeps:
                after = list(offsets)
            return result, hidden, after, [arrays for _, arrays in left]

        return Function(mx.compile(forward), forms)
