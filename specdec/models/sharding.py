"""A rank's shard of a model, as mlx-lm's own ``shard()`` makes it."""

from __future__ import annotations

import copyreg
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.utils import tree_unflatten

from ..cuda.modules import as_kind, leaves_of, modules_of
from ..errors import UnsupportedModelError
from ..utils.printable import first_line
from .layers import architecture_of

# A copy of a model keeps its group: ``copy.deepcopy`` does not copy an object that
# reduces to a name.
copyreg.pickle(mx.distributed.Group, lambda group: "group")


class SummedLinear(nn.Module):
    """A linear layer whose columns are divided between ranks; their results are added.

    Args:
        part: this rank's columns, without a bias.
        bias: the whole layer's bias, added once.
    """

    def __init__(
        self, part: nn.Module, bias: mx.array | None, group: mx.distributed.Group
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part
        if bias is not None:
            self.bias = bias
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        """The whole product with x of shape (..., D / ranks)."""
        summed = mx.distributed.all_sum(self.part(x), group=self._group)
        return summed + self.bias if "bias" in self else summed


def shard(model: nn.Module, group: mx.distributed.Group, name: str) -> None:
    """Reduce ``model`` in place to what one rank computes; nothing is evaluated.

    Layers that need no sum become plain layers with fewer rows. So packing, casting and
    kernels work for a shard as for a whole model.

    Args:
        model: its weights are as stored, not yet fitted to a backend.
        name: for messages.

    Raises:
        UnsupportedModelError: mlx-lm does not shard the architecture, or the number of
            ranks does not divide its sizes.
    """
    size = group.size()
    sharded: Any = getattr(model, "shard", None)
    if sharded is None:
        raise UnsupportedModelError(
            f"{name}: mlx-lm cannot shard {architecture_of(model)} models: run it on "
            "one device, or take a model of another architecture"
        )
    before, heads = _numbers(model), _heads(model)
    counts = _attention_heads(model)
    try:
        sharded(group)
    except Exception as error:  # layers report in their own ways what does not divide
        raise _indivisible(name, size, counts or first_line(error)) from error
    after = _numbers(model)
    for key, number in before.items():
        rest = after.get(key, number)
        # For some models, mlx-lm repeats heads if there are fewer than ranks.
        repeated = rest == 1 and number < size and size % number == 0
        if rest not in (number, number / size) and not repeated:
            raise _indivisible(name, size, counts or f"{key[1]} is {number}")
    for module, head in heads:
        # Drafts are whole on each rank and borrow the output head, so it stays whole.
        if module["lm_head"] is not head:
            module["lm_head"] = head
            module.sharding_group = None  # a whole output needs no gathering
    for path, layer in leaves_of(model):
        if type(layer) in _PLAIN:
            model.update_modules(tree_unflatten([(path, _plain(layer, group))]))
    # New layers begin in training, and those that train use no kernels of ours.
    model.train(model.training)


def _indivisible(name: str, size: int, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} cannot be divided between {size} ranks ({why}): take a number of "
        "ranks that divides its heads"
    )


def _attention_heads(model: nn.Module) -> str:
    """The number of a model's heads in words; empty: its configuration has none."""
    # For a model that also reads images, the text part's number.
    for args in (vars(each).get("args") for _, each in modules_of(model)):
        heads = getattr(args, "num_attention_heads", None)
        if heads is not None:
            pairs = getattr(args, "num_key_value_heads", None) or heads
            return f"it has {heads} attention heads and {pairs} key-value heads"
    return ""


def _heads(model: nn.Module) -> list[tuple[Any, nn.Module]]:
    """The modules that have an output head, each with its head."""
    return [(m, m["lm_head"]) for _, m in modules_of(model) if "lm_head" in m]


def _numbers(model: nn.Module) -> dict[tuple[str, str], int]:
    """Whole numbers that modules hold, by the module's path and the attribute."""
    return {
        (path, key): number
        for path, module in modules_of(model)
        for key, number in vars(module).items()
        if type(number) is int
    }


# mlx's layer of a shard -> a layer with the same product, and whether it is summed.
_PLAIN: dict[type, tuple[type, bool]] = {
    AllToShardedLinear: (nn.Linear, False),
    QuantizedAllToShardedLinear: (nn.QuantizedLinear, False),
    ShardedToAllLinear: (nn.Linear, True),
    QuantizedShardedToAllLinear: (nn.QuantizedLinear, True),
}


def _plain(layer: Any, group: mx.distributed.Group) -> nn.Module:
    kind, is_summed = _PLAIN[type(layer)]
    plain: Any = as_kind(layer, kind)
    vars(plain).pop("group", None)
    if not is_summed:
        module: nn.Module = plain
        return module
    return SummedLinear(plain, plain.pop("bias", None), group)
