"""Computes the products of one input with several layers as one product.

Attention multiplies the same hidden states by three matrices, an MLP by two. Where
launching a product takes longer than computing it (CUDA, narrow batches), one product
with the stacked matrices saves three launches in every layer of a model::

    [ q | k | v ] = x [ Wq ; Wk ; Wv ]^T

Models call their layers one by one. The first layer that is called computes for all of
them. The others, called with the very same array, take their parts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from . import packed_matmul, skinny_matmul
from .attention_patch import usual_calls
from .flattened_matmul import FlattenedEmbedding, FlattenedLinear
from .modules import as_kind, leaves_of, modules_of
from .skinny_matmul import SkinnyEmbedding, SkinnyLinear

logger = logging.getLogger(__name__)

# Layers that read the same input, by their names in mlx-lm's models. A module of
# another kind names its own in ``siblings``.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)

# Layers are no longer joined after this many products in a row were not used whole. A
# single one can be cut off by Ctrl-C or another thread.
_PATIENCE = 3


class _Ready(NamedTuple):
    """The result of one product, without the parts that were taken."""

    by: _Product
    x: mx.array
    parts: dict[int, mx.array]


class _Slot:
    """The one product of a model whose parts are being taken."""

    ready: _Ready | None = None


class _Product:
    """The product with the stacked matrices of some layers.

    The layers' own arrays become views of the stacked ones: nothing is held twice, and
    each layer still has its weights.
    """

    def __init__(self, layers: Sequence[Any], slot: _Slot):
        kind: Any = type(layers[0])
        stacked: Any = kind.__new__(kind)
        vars(stacked).update(vars(layers[0]))
        stacked.eval()  # layers that train do not use it
        sizes = [layer["weight"].shape[0] for layer in layers]
        self._ends = tuple(accumulate(sizes))
        for name in layers[0]:
            dict.__setitem__(
                stacked, name, mx.concatenate([layer[name] for layer in layers])
            )
        mx.eval(stacked)
        self._whole, self._slot = stacked, slot
        self.lend(layers)
        self._wasted = 0  # in a row

    def lend(self, layers: Sequence[Any]) -> None:
        """Let the layers' arrays be views of the stacked ones."""
        self._views: list[dict[str, mx.array]] = []
        for layer, ends in zip(layers, pairwise((0, *self._ends)), strict=True):
            views = {name: self._whole[name][slice(*ends)] for name in layer}
            mx.eval(views)
            dict.update(layer, views)
            self._views.append(views)

    def lends(self, i: int, layer: nn.Module) -> bool:
        """Whether the ``i``-th layer still has the views.

        Weights that were replaced, as training does, or added (a bias) are not in the
        stacked matrices.
        """
        views = self._views[i]
        same = (layer.get(name) is array for name, array in views.items())
        return len(layer) == len(views) and all(same)

    @property
    def _useless(self) -> bool:
        """Whether its layers are no longer joined, for good."""
        return self._wasted >= _PATIENCE

    def serves(self, layers: Sequence[Any]) -> bool:
        """Whether it is the product of all these layers, and of no others."""
        own = (vars(layer).get("_product") is self for layer in layers)
        return (
            len(layers) == len(self._views)
            and all(own)
            and all(self.lends(layer._index, layer) for layer in layers)
        )

    def whole(self, x: mx.array) -> mx.array:
        """The whole product, (..., N)."""
        whole = self._whole
        if type(whole) is nn.Linear and "bias" in whole and x.size == x.shape[-1]:
            # MLX has a fast kernel for one row, which adds no bias.
            computed: mx.array = x @ whole["weight"].T + whole["bias"]
        else:
            computed = whole(x)
        return computed

    def _compute(self, x: mx.array) -> list[mx.array]:
        if isinstance(self._whole, SkinnyLinear | FlattenedLinear):
            return self._whole.split(x, self._ends)
        parts: Any = mx.split(self.whole(x), list(self._ends[:-1]), axis=-1)
        return list(parts)

    def part(self, i: int, layer: nn.Module, x: mx.array) -> mx.array | None:
        """The ``i``-th layer's part for ``x``; ``None``: it has to compute it alone."""
        if self._useless or not self.lends(i, layer):
            return None
        slot = self._slot
        ready = slot.ready
        if ready is None or ready.by is not self or ready.x is not x:
            if ready is not None:
                # Its other layers were not called, or were called with another array.
                ready.by._wasted += 1
                if ready.by._useless:
                    logger.debug("a joined product is not used whole: joined no more")
            parts = self._compute(x)
            # Another thread's input is another array: it computes its own parts.
            ready = slot.ready = _Ready(self, x, dict(enumerate(parts)))
        taken = ready.parts.pop(i, None)
        if not ready.parts:
            slot.ready, self._wasted = None, 0
        return taken


class _Joined:
    """A layer that takes its part of a product, if it can."""

    _product: _Product
    _index: int

    def __call__(self, x: mx.array) -> mx.array:
        part = self._product.part(self._index, self, x)  # type: ignore[arg-type]
        if part is None:
            alone: Any = super()
            part = alone.__call__(x)
        return part


class JoinedLinear(_Joined, nn.Linear):
    """A linear layer that shares its product with others of the same input."""

    plain = nn.Linear


class JoinedFlattened(_Joined, FlattenedLinear):
    """A packed, flattened layer that shares its product with others."""


class JoinedSkinny(_Joined, SkinnyLinear):
    """A layer that shares our kernel's product of few rows; alone while it trains."""

    def __call__(self, x: mx.array) -> mx.array:
        if self.training:
            alone: mx.array = SkinnyLinear.__call__(self, x)
            return alone
        return super().__call__(x)


_JOINED: dict[type, Any] = {
    nn.Linear: JoinedLinear,
    FlattenedLinear: JoinedFlattened,
    SkinnyLinear: JoinedSkinny,
}


def join_products(model: nn.Module) -> None:
    """Let layers of ``model`` that read the same input share a product, in place.

    It joins one group at a time, so that at most the largest group is held twice.
    """
    slot = _Slot()
    for module, names, layers in _groups(model, _JOINED):
        product = _Product(layers, slot)
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            module[name] = joined = as_kind(layer, _JOINED[type(layer)])
            joined._product, joined._index = product, i
        mx.clear_cache()
    for _, module in modules_of(model):
        if parts := _stackable(module):
            vars(module)["_stacked"] = Stacked(parts)
            mx.clear_cache()


def joined(x: mx.array, layers: Sequence[Any], width: int) -> mx.array | None:
    """One product of x (..., K) with layers that share it, if it is (..., width)."""
    product: _Product | None = vars(layers[0]).get("_product")
    if product is None or product._ends[-1] != width or not product.serves(layers):
        return None
    return None if layers[0].training else product.whole(x)


class Stacked:
    """One product of several joined ones, whose matrices become views of it.

    Args:
        layers: those of each joined product.
    """

    def __init__(self, layers: Sequence[Sequence[Any]]):
        self._parts = [(each[0]._product, each) for each in layers]
        wholes = [product._whole for product, _ in self._parts]
        self._product = _Product(wholes, _Slot())
        for product, each in self._parts:
            product.lend(each)

    @property
    def whole(self) -> nn.Module:
        """The layer of the whole product."""
        whole: nn.Module = self._product._whole
        return whole

    def __call__(self, x: mx.array) -> mx.array | None:
        """The product (..., N); ``None``: some layer has other weights by now."""
        for product, layers in self._parts:
            if not all(product.lends(i, layer) for i, layer in enumerate(layers)):
                return None
        return self._product.whole(x)


def stacked(module: nn.Module, x: mx.array) -> mx.array | None:
    """One product of x (..., K) with all layers that ``module.of_one_input`` names.

    Returns:
        Shape (..., N), one layer's part after the other; ``None``: they are not joined.
    """
    product: Stacked | None = vars(module).get("_stacked")
    return None if product is None or module.training else product(x)


def _stackable(module: Any) -> Sequence[Sequence[Any]]:
    """Joined layers of a module whose products can be one; empty: there are none."""
    layers: Sequence[Sequence[Any]] = getattr(module, "of_one_input", ())
    products = [vars(each[0]).get("_product") for each in layers]
    wholes = [
        product._whole
        for product, each in zip(products, layers, strict=True)
        if product is not None and product.serves(each)
    ]
    fits = 1 < len(wholes) == len(layers) and _alike(wholes, _JOINED)
    return layers if fits else ()


def joining_bytes(model: nn.Module) -> int:
    """Most bytes that :func:`join_products` will hold twice; nothing is computed.

    Packed layers may be flattened already, or not yet.
    """
    groups = [layers for *_, layers in _groups(model, (*_JOINED, nn.QuantizedLinear))]
    for _, module in modules_of(model):
        groups.append([a for each in getattr(module, "of_one_input", ()) for a in each])
    sizes = [
        sum(a.nbytes for each in layers for a in each.values()) for layers in groups
    ]
    return max(sizes, default=0)


def choices_of(model: nn.Module) -> list[Callable[[], None]]:
    """Functions that time kernels for the model's matrices, stacked as in use."""
    kinds: dict[Any, list[Any]] = {}
    products = [vars(module).get("_stacked") for _, module in modules_of(model)]
    layers = [layer for _, layer in leaves_of(model)]
    for layer in [*layers, *(each.whole for each in products if each)]:
        if isinstance(layer, _Joined):
            layer = layer._product._whole
        for kind, part in _TIMED.items():
            if isinstance(layer, kind):
                shape = layer["weight"].shape, layer["weight"].dtype
                of = part, shape, getattr(layer, "bits", None)
                if all(layer is not other for other in kinds.setdefault(of, [])):
                    kinds[of].append(layer)
    return [partial(part.choose, layers) for (part, *_), layers in kinds.items()]


_TIMED: dict[Any, Any] = {
    SkinnyLinear: skinny_matmul,
    SkinnyEmbedding: skinny_matmul,
    FlattenedLinear: packed_matmul,
    FlattenedEmbedding: packed_matmul,
}


def separated(model: nn.Module) -> nn.Module:
    """A second model with the same arrays and mlx-lm's own layers."""
    twin: nn.Module = copy.deepcopy(model)  # MLX shares the arrays' memory
    usual_calls(twin)
    for path, layer in modules_of(twin):
        kind = getattr(type(layer), "plain", None)
        if kind is not None:
            alone = as_kind(layer, kind)
            for name in ("_product", "_index"):
                vars(alone).pop(name, None)
            twin.update_modules(tree_unflatten([(path, alone)]))
    return twin


def _groups(
    model: nn.Module, kinds: Collection[type]
) -> Iterator[tuple[Any, Sequence[str], list[Any]]]:
    """Groups of layers that can be joined: module, names and layers."""
    for _, module in modules_of(model):
        for names in getattr(module, "siblings", SIBLINGS):
            layers = [module.get(name) for name in names]
            if _alike(layers, kinds):
                yield module, names, layers


def _alike(layers: Sequence[Any], kinds: Collection[type]) -> bool:
    """Whether the layers are of these kinds, and their matrices can be stacked."""
    first = layers[0]
    return type(first) in kinds and all(
        type(layer) is type(first)
        and vars(layer) == vars(first)
        and layer.keys() == first.keys()
        and all(
            layer[name].dtype == first[name].dtype
            and layer[name].shape[1:] == first[name].shape[1:]
            for name in first
        )
        for layer in layers
    )
