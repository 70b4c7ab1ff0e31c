"""Models that ask for caches which they never write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ..cache import CacheOptions, make_batch_caches
from .layer_skip import shown, stand_ins


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
    return WithoutIdle(model, written), logits


class WithoutIdle(nn.Module):
    """A model with caches for just those layers that store keys.

    A cache that is never written does not know how long rows are, and the model may
    take its mask from it. In its place the model is shown one that is written.

    Args:
        model: an mlx-lm model; shared, never changed.
        written: places of the caches that it writes, ascending.
    """

    def __init__(self, model: nn.Module, written: Sequence[int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self._make_cache = partial(make_prompt_cache, model)
        self._written = tuple(written)
        #: As mlx-lm's models have it.
        self.args = getattr(model, "args", None)
        self._shown = stand_ins(self._make_cache(), self._written)

    @property
    def layers(self) -> Any:
        """The layers of the model."""
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """One cache of mlx-lm's for each that is written."""
        caches = self._make_cache()
        return [caches[i] for i in self._written]

    def of_all(self, caches: Sequence[Any]) -> list[Any]:
        """Of one cache for each that the model asks for, those that are written."""
        return [cache for i, cache in enumerate(caches) if i in self._written]

    def among_all(self, written: Sequence[Any]) -> list[Any]:
        """The inverse of :meth:`of_all`: the others are empty ones of mlx-lm's."""
        caches = self._make_cache()
        for i, cache in zip(self._written, written, strict=True):
            caches[i] = cache
        return caches

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        """Logits of shape (B, S, V).

        Args:
            inputs: shape (B, S).
            cache: those that are written.
        """
        every = None if cache is None else shown(cache, self._shown)
        logits: mx.array = self.model(inputs, cache=every)
        return logits
