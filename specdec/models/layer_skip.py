"""The target with some of its layers skipped: a draft that shares its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..errors import ConfigError
from .layers import check_trunk, layers_of, with_layers


class Skipped(nn.Module):
    """In the place of a layer that is skipped."""

    #: Llama asks every layer, and gives this one a mask that it does not look at.
    use_sliding = False

    def __call__(self, h: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return h


class SkippingModel(nn.Module):
    """A model of which only some layers run, with caches for just those.

    Layers keep their places, and so their kind where it goes by the place (every
    sixth of Gemma 3 sees everything). The model takes its masks from a cache of
    each kind, at a place of its choice: a layer that is skipped shows it the cache
    of a layer of its kind that runs.

    Args:
        model: an mlx-lm model; shared, never changed.
        layers: those that run, ascending.
        name: of the model, for messages.

    Raises:
        UnsupportedModelError: of its architecture layers cannot be skipped.
        ConfigError: it has no such layer.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], name: str = "model"):
        super().__init__()  # type: ignore[no-untyped-call]
        check_trunk(model, name, "skipping layers")
        every = layers_of(model)
        if not layers or max(layers) >= len(every):
            raise ConfigError(
                f"{name} has {len(every)} layers, 0 to {len(every) - 1}: "
                f"there is no layer {max(layers, default=0)}"
            )
        running = set(layers)
        skipped = Skipped()  # type: ignore[no-untyped-call]
        self.model = with_layers(
            model, [e if i in running else skipped for i, e in enumerate(every)]
        )
        self._make_cache = partial(make_prompt_cache, model)
        self._running = tuple(layers)
        #: As mlx-lm's models have it.
        self.args = getattr(model, "args", None)
        self._shown = stand_ins(self._make_cache(), self._running)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that run."""
        every = layers_of(self.model)
        return [every[i] for i in self._running]

    def make_cache(self) -> list[Any]:
        """One cache of mlx-lm's for each layer that runs."""
        caches = self._make_cache()
        return [caches[i] for i in self._running]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits of shape (B, S, V).

        Args:
            inputs: shape (B, S).
            cache: those of the layers that run.
        """
        every = None if cache is None else [cache[i] for i in self._shown]
        logits: mx.array = self.model(inputs, cache=every)
        return logits


def stand_ins(caches: Sequence[Any], running: Sequence[int]) -> tuple[int, ...]:
    """For the place of each cache, which of those at ``running`` to show there."""
    kinds = [_kind(cache) for cache in caches]
    return tuple(_stand_in(i, running, kinds) for i in range(len(kinds)))


def _kind(cache: Any) -> tuple[type, int | None]:
    return type(cache), getattr(cache, "max_size", None)


def _stand_in(
    place: int, running: Sequence[int], kinds: Sequence[tuple[type, int | None]]
) -> int:
    """Index in ``running`` of the layer itself, else of the nearest of its kind."""
    return min(
        range(len(running)),
        key=lambda i: (kinds[running[i]] != kinds[place], abs(running[i] - place)),
    )
