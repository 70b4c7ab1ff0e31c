"""Models that run with caches for only some of their layers.

A model may ask for caches that it never writes. A draft may be the target with some
layers skipped; it shares the target's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from ..cache import CacheOptions, make_batch_caches
from ..errors import ConfigError
from .layers import calling, check_layers, first_of, layers_of, with_layers
from .row_positions import with_row_positions


class FewerCaches(nn.Module):
    """A model with caches for only some of the places that it asks for.

    The model takes its masks from a cache of each kind, at a place of its choice. If
    there is no cache at that place, it gets the nearest cache of the same kind.

    Args:
        model: an mlx-lm model; shared, never changed.
        cached: the places that have caches, ascending.
    """

    def __init__(self, model: nn.Module, cached: Iterable[int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._kept = tuple(cached)
        self._shown = _stand_ins(make_prompt_cache(model), self._kept)
        #: Under the name that mlx-lm's models use.
        self.args = getattr(model, "args", None)

    @property
    def layers(self) -> Any:
        """The layers of the model."""
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches at the places that are kept."""
        return self.of_all(make_prompt_cache(self.model))

    def of_all(self, caches: Sequence[Any]) -> list[Any]:
        """The kept caches from a list that has one for each place."""
        return [caches[i] for i in self._kept]

    def among_all(self, cached: Sequence[Any]) -> list[Any]:
        """The inverse of :meth:`of_all`, with mlx-lm's empty caches at other places."""
        caches = make_prompt_cache(self.model)
        for i, cache in zip(self._kept, cached, strict=True):
            caches[i] = cache
        return caches

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits of shape (B, S, V).

        Args:
            inputs: shape (B, S).
            cache: the kept caches.
        """
        if cache is not None:
            cache = [None if i is None else cache[i] for i in self._shown]
        logits: mx.array = self.model(inputs, cache=cache)
        return logits


def without_idle(
    model: nn.Module, options: CacheOptions, name: str
) -> tuple[nn.Module, mx.array]:
    """The model, without caches that it asks for and never writes.

    Returns:
        ``model`` itself if it has none, and the logits of one token, shape (1, 1, V).
        A graph is built, nothing is computed.
    """
    caches = make_batch_caches(model, 1, options, name)
    logits: mx.array = model(mx.array([[0]]), cache=caches)
    written = [i for i, cache in enumerate(caches) if not cache.empty()]
    if not written or len(written) == len(caches):
        return model, logits
    return FewerCaches(model, written), logits


class SkippingModel(FewerCaches):
    """A model that runs only some of its layers, with caches for only these.

    Layers keep their places, and so keep a kind that depends on the place (every sixth
    layer of Gemma 3 sees everything).

    Args:
        model: an mlx-lm model; shared, never changed.
        layers: the layers that run, ascending.
        name: the model's name, for messages.

    Raises:
        UnsupportedModelError: layers of this architecture cannot be skipped.
        ConfigError: the model has no such layer, or the layers that run do not attend
            to earlier tokens.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], name: str = "model"):
        model = with_row_positions(model)
        places = check_layers(model, name, "skipping layers")
        every = layers_of(model)
        if not layers or max(layers) >= len(every):
            raise ConfigError(
                f"{name} has {len(every)} layers, 0 to {len(every) - 1}: "
                f"there is no layer {max(layers, default=0)}"
            )
        running = set(layers)
        caches = make_prompt_cache(model)
        skipped = {p for i, p in enumerate(places) if i not in running}
        cached = [i for i in range(len(caches)) if i not in skipped]
        _check_attention(caches, cached, places, name)
        some = [e if i in running else _skipped(e) for i, e in enumerate(every)]
        super().__init__(with_layers(model, some), cached)
        self._running = tuple(layers)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that run."""
        every = layers_of(self.model)
        return [every[i] for i in self._running]


def _skipped(layer: nn.Module) -> nn.Module:
    """A stand-in for a layer that returns its input, and has no weights."""
    twin: Any = calling(layer, lambda usual, args, kwargs: first_of(args, kwargs))
    # Models read the parts of their layers, so these stay as attributes.
    vars(twin).update(twin)
    twin.clear()
    module: nn.Module = twin
    return module


def _check_attention(
    caches: Sequence[Any],
    cached: Sequence[int],
    places: Sequence[int | None],
    name: str,
) -> None:
    """Refuse a choice without attention: only caches of attention know positions."""
    attention = [i for i, c in enumerate(caches) if not isinstance(c, ArraysCache)]
    if not cached or (attention and not set(attention) & set(cached)):
        wanted = attention or range(len(caches))
        layers = ", ".join(str(i) for i, p in enumerate(places) if p in wanted)
        raise ConfigError(
            f"the layers that run of {name} do not attend to earlier tokens: name at "
            f"least one of {layers}"
        )


def _stand_ins(caches: Sequence[Any], cached: Sequence[int]) -> tuple[int | None, ...]:
    """For each place, the index of the kept cache that the model gets there.

    ``None``: no kept cache will do, since they hold keys and this place has states, or
    the reverse.
    """
    kinds = [_kind(cache) for cache in caches]
    return tuple(_stand_in(i, cached, kinds) for i in range(len(kinds)))


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
