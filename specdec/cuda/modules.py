"""MLX's modules without their parts, and the same modules as another class.

A class of ours names the class of MLX or mlx-lm that it stands for as its ``plain``.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten


class Derived(type):
    """The metaclass of classes made here of mlx-lm's, with the same names.

    Pickle cannot find them by name, so a pickled module has mlx-lm's class, which is
    their ``__base__``.
    """


def _pickled(kind: type) -> tuple[Any, ...]:
    # The copy of a class is the class itself, so files need only mlx-lm.
    return copy.copy, (kind.__base__,)


copyreg.pickle(Derived, _pickled)


@cache
def derived(mixin: type, kind: Any) -> Any:
    """A class of mlx-lm's, after ``mixin``."""
    also = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return Derived(kind.__name__, (mixin, kind), also)


def modules_of(model: nn.Module) -> list[tuple[str, Any]]:
    """A model's modules, the model itself included, and their paths."""
    modules: Any = model.named_modules()
    return list(modules)


def leaves_of(model: nn.Module) -> list[tuple[str, Any]]:
    """A model's modules that hold no others, and their paths."""
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return list(leaves)


def as_kind(layer: nn.Module, kind: Any) -> Any:
    """A layer of another class, with the same arrays and attributes."""
    layer_of_kind = kind.__new__(kind)
    # Arrays are items of a module, everything else attributes.
    dict.update(layer_of_kind, layer)
    vars(layer_of_kind).update(vars(layer))
    return layer_of_kind


def change_kinds(
    model: nn.Module,
    kinds: Mapping[type, Any],
    suits: Callable[[Any], bool] = lambda layer: True,
) -> None:
    """Give the model's modules of some classes other ones, in place.

    Args:
        kinds: the class to give, by the exact class that a module has.
        suits: whether to change a module.
    """
    for path, layer in modules_of(model):
        kind = kinds.get(type(layer))
        if kind is not None and suits(layer):
            model.update_modules(tree_unflatten([(path, as_kind(layer, kind))]))
