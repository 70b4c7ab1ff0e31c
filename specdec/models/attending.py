"""mlx-lm's attention modules, with few queries left to a kernel of ours.

mlx-lm's modules call one function of its own, ``scaled_dot_product_attention``, by a
name of the file that they are in. A module is given a class of its own whose
``__call__`` is the same code with another function by that name; mlx-lm itself stays as
it is, and so do modules that compute attention in another way.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from . import few_queries

_NAME = "scaled_dot_product_attention"
_USUAL: Any = getattr(base, _NAME)


def _attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """What mlx-lm's function computes, by the kernel where that takes it."""
    # Without a cache it may be training, and the kernel has no gradient.
    usual = cache is None or sinks is not None
    if usual or not few_queries.takes(queries, keys, values, mask):
        theirs: mx.array = _USUAL(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return theirs
    return few_queries.attention(queries, keys, values, scale, mask)


@cache
def _attending(kind: Any) -> Any:
    """The class whose attention is ``_attend``; ``None`` where it is not asked for."""
    call = kind.__call__
    if (
        not isinstance(call, FunctionType)
        or _NAME not in call.__code__.co_names
        or call.__globals__.get(_NAME) is not _USUAL
    ):
        return None
    names = {**call.__globals__, _NAME: _attend}
    twin = FunctionType(
        call.__code__, names, call.__name__, call.__defaults__, call.__closure__
    )
    twin.__kwdefaults__ = call.__kwdefaults__
    # Whoever asks where a module comes from is told mlx-lm's file.
    also = {"__call__": twin, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), also)


def take_few_queries(model: nn.Module) -> None:
    """Let the model's attention of few queries be computed by the kernel, in place."""
    if not few_queries.proven():
        return
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        kind = _attending(module.__class__)
        if kind is not None:
            module.__class__ = kind


def usual_attention(model: nn.Module) -> None:
    """Let its modules be mlx-lm's again, in place."""
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        kind: Any = type(module)
        usual: Any = kind.__base__
        if _attending(usual) is kind:
            module.__class__ = usual
