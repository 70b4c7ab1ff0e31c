"""Lets mlx-lm's attention modules compute few queries by our kernel.

mlx-lm's modules call its function ``scaled_dot_product_attention`` as a global of their
own file. A module gets a derived class whose ``__call__`` is the same code with another
function by that name. mlx-lm itself stays as it is, and so do modules that compute
attention in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import base

from . import cache_write, decode_attention
from .cache_write import Unwritten
from .kernels import TYPES
from .modules import Derived
from .split_attention import Split

_NAME = "scaled_dot_product_attention"
_USUAL: Any = getattr(base, _NAME)


@cache
def attending_by(kernel: Any) -> Callable[..., mx.array]:
    """What mlx-lm's function computes, by a kernel where possible.

    Args:
        kernel: a module with ``takes(queries, keys, values, mask)`` and
            ``attention(queries, keys, values, scale, mask)``.
    """

    def attend(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(keys, Split):
            return keys.attention(queries, scale, mask, sinks)
        unwritten = keys if isinstance(keys, Unwritten) else None
        if unwritten is not None:
            queries, keys, values = unwritten.written(queries)
        # Without a cache the model may be training, and the kernel has no gradient.
        usual = cache is None or sinks is not None
        result: mx.array
        if usual or not kernel.takes(queries, keys, values, mask):
            result = _USUAL(
                queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
            )
        else:
            result = kernel.attention(queries, keys, values, scale, mask)
        if unwritten is not None:
            unwritten.read_by(result)
        return result

    return attend


attend = attending_by(decode_attention)


@cache
def calling_instead(kind: Any, name: str, usual: Any, ours: Any) -> Any:
    """``kind`` with ``ours`` as the function that its file calls ``name``.

    Returns:
        The derived class; ``None`` if its call does not use ``usual`` by that name.
    """
    call = kind.__call__
    if (
        not isinstance(call, FunctionType)
        or name not in call.__code__.co_names
        or call.__globals__.get(name) is not usual
    ):
        return None
    names = {**call.__globals__, name: ours}
    twin = FunctionType(
        call.__code__, names, call.__name__, call.__defaults__, call.__closure__
    )
    twin.__kwdefaults__ = call.__kwdefaults__
    # ``__module__`` still names mlx-lm's file.
    also = {"__call__": twin, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return Derived(kind.__name__, (kind,), also)


def attending_kind(kind: Any, kernel: Any = decode_attention) -> Any:
    """``kind`` with a kernel's attention; ``None`` if it does not call mlx-lm's."""
    return calling_instead(kind, _NAME, _USUAL, attending_by(kernel))


def take_few_queries(model: nn.Module) -> None:
    """Let the kernel compute the model's attention of few queries, in place.

    This tries the kernel, and writes in place before it, for the head sizes and types
    that the model has.
    """
    for module in _attending(model):
        forms = [form for form in _forms(module) if decode_attention.proven(form)]
        kind = attending_kind(module.__class__)
        if forms and kind is not None:
            module.__class__ = kind
        for form in forms:
            cache_write.proven(form)


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_few_queries` asks for: one for each form."""
    forms = [form for module in _attending(model) for form in _forms(module)]
    return [*decode_attention.proven.of(forms), *cache_write.proven.of(forms)]


def _attending(model: nn.Module) -> list[Any]:
    """Modules that call mlx-lm's attention, or :func:`attend`."""
    modules: list[tuple[str, Any]] = model.named_modules()
    kinds: set[Any] = {type(module) for _, module in modules}
    ours = {k for k in kinds if hasattr(k, "attend") or attending_kind(k) is not None}
    return [module for _, module in modules if type(module) in ours]


def _forms(module: nn.Module) -> Iterable[tuple[int, mx.Dtype]]:
    """Forms of an attention module: the head sizes and types that it may have."""
    size = size_of(module)
    return product(decode_attention.SIZES if size is None else (size,), _halves(module))


def takes_single(model: nn.Module) -> bool:
    """Whether the kernel computes the model's attention of one query with a mask."""
    modules: list[tuple[str, Any]] = model.named_modules()
    kinds: set[Any] = {type(module) for _, module in modules}
    attending = {
        kind
        for kind in kinds
        if any(attending_kind(k.__base__) is k for k in kind.__mro__[:-1])
    }
    return bool(attending) and all(
        kind in attending or attending_kind(kind) is None for kind in kinds
    )


def attends_by_ours(model: nn.Module) -> bool:
    """Whether :func:`attend` computes attention of the model, now or once it may."""
    return takes_single(model) or bool(_attending(model))


def _halves(module: nn.Module) -> list[mx.Dtype]:
    """The 16-bit types of its weights or their scales, which its queries have too."""
    arrays: Any = tree_flatten(module.parameters())
    dtypes = {array.dtype for _, array in arrays}
    return [dtype for dtype in TYPES if dtype in dtypes]


def size_of(module: Any) -> int | None:
    """The head size of an attention module, as far as it is known."""
    size: int | None = getattr(module, "head_dim", None)
    heads, queries = getattr(module, "n_heads", 0), getattr(module, "q_proj", {})
    if size is None and heads and "weight" in queries:
        size = queries["weight"].shape[0] // heads
    return size


def usual_calls(model: nn.Module) -> None:
    """Give modules that call our functions mlx-lm's classes again, in place."""
    modules: list[tuple[str, Any]] = model.named_modules()
    for _, module in modules:
        while isinstance(type(module), Derived):
            module.__class__ = type(module).__base__
