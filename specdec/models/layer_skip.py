"""The target with some of its layers skipped: a draft that shares its weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..errors import ConfigError
from .layers import InPlace, check_layers, layers_of, with_layers
from .row_positions import with_row_positions


class Skipped(InPlace):
    """In the place of a layer that is skipped."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.given(args, kwargs)


class SkippingModel(nn.Module):
    """A model of which only some layers run, with caches for just those.

    Layers keep their places, and so their kind where it goes by the place (every
    sixth of Gemma 3 sees everything). The model takes its masks from a cache of
    each kind, at a place of its choice: where the layer there is skipped, it is shown
    the cache of a layer of the same kind that runs.

    Args:
        model: an mlx-lm model; shared, never changed.
        layers: those that run, ascending.
        name: of the model, for messages.

    Raises:
        UnsupportedModelError: of its architecture layers cannot be skipped.
        ConfigError: it has no such layer, or those do not suffice.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], name: str = "model"):
        super().__init__()  # type: ignore[no-untyped-call]
        model = with_row_positions(model)
        places = check_layers(model, name, "skipping layers")
        every = layers_of(model)
        if not layers or max(layers) >= len(every):
            raise ConfigError(
                f"{name} has {len(every)} layers, 0 to {len(every) - 1}: "
                f"there is no layer {max(layers, default=0)}"
            )
        running = set(layers)
        self.model = with_layers(
            model, [e if i in running else Skipped(e) for i, e in enumerate(every)]
        )
        self._make_cache = partial(make_prompt_cache, model)
        caches = self._make_cache()
        skipped = {p for i, p in enumerate(places) if i not in running}
        self._kept = tuple(i for i in range(len(caches)) if i not in skipped)
        _check_attention(caches, self._kept, places, name)
        self._running = tuple(layers)
        #: As mlx-lm's models have it.
        self.args = getattr(model, "args", None)
        self._shown = stand_ins(caches, self._kept)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that run."""
        every = layers_of(self.model)
        return [every[i] for i in self._running]

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of the layers that run."""
        caches = self._make_cache()
        return [caches[i] for i in self._kept]

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits of shape (B, S, V).

        Args:
            inputs: shape (B, S).
            cache: those of the layers that run.
        """
        every = None if cache is None else shown(cache, self._shown)
        logits: mx.array = self.model(inputs, cache=every)
        return logits


def _check_attention(
    caches: Sequence[Any],
    kept: Sequence[int],
    places: Sequence[int | None],
    name: str,
) -> None:
    """Refuse layers that leave no positions, which a cache of attention knows."""
    attention = [i for i, c in enumerate(caches) if not isinstance(c, ArraysCache)]
    if not kept or (attention and not set(attention) & set(kept)):
        wanted = attention or range(len(caches))
        layers = ", ".join(str(i) for i, p in enumerate(places) if p in wanted)
        raise ConfigError(
            f"the layers that run of {name} do not attend to earlier tokens: name at "
            f"least one of {layers}"
        )


def stand_ins(caches: Sequence[Any], running: Sequence[int]) -> tuple[int | None, ...]:
    """For the place of each cache, which of those at ``running`` to show there.

    ``None``: none, since those keep keys and this one states, or the reverse.
    """
    kinds = [_kind(cache) for cache in caches]
    return tuple(_stand_in(i, running, kinds) for i in range(len(kinds)))


def shown(caches: Sequence[Any], which: Sequence[int | None]) -> list[Any]:
    """What :func:`stand_ins` chose, of caches of what is running."""
    return [None if i is None else caches[i] for i in which]


def _kind(cache: Any) -> tuple[type, int | None]:
    return type(cache), getattr(cache, "max_size", None)


def _stand_in(
    place: int, running: Sequence[int], kinds: Sequence[tuple[type, int | None]]
) -> int | None:
    """Index in ``running`` of the layer itself, else of the nearest of its kind."""

    def recurrent(i: int) -> bool:
        return kinds[i][0] is ArraysCache

    alike = [
        i for i, other in enumerate(running) if recurrent(other) == recurrent(place)
    ]
    return min(
        alike,
        key=lambda i: (kinds[running[i]] != kinds[place], abs(running[i] - place)),
        default=None,
    )
