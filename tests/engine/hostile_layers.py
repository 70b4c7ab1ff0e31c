"""Layers of a model that make numbers of one token that are not finite.

They are in a module of their own: a model with code that reads masks, as some tests do,
gets boolean masks.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

#: The token with an embedding that is not finite. No prompt has it.
BAD = 50


class Poisoned(nn.Embedding):
    """Has another embedding for the bad token; logits are as before."""

    value = float("nan")

    def __call__(self, x: mx.array) -> mx.array:
        usual = super().__call__(x)  # type: ignore[no-untyped-call]
        return mx.where((x == BAD)[..., None], mx.array(self.value), usual)


class Infinite(Poisoned):
    value = float("inf")


class Treacherous(nn.Module):
    """Stands for a rotary embedding; a bad token's key is infinite, and harms others.

    The product of the token's own query with it is minus infinity. That of a later
    query may be plus infinity, which nothing that is added hides.
    """

    bad: mx.array
    queries: mx.array | None = None

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self.queries is None:
            vars(self)["queries"] = x
            return x
        queries = self.queries
        vars(self)["queries"] = None
        worst = mx.where(queries > 0, -mx.inf, mx.inf)
        one = mx.arange(x.shape[1] * x.shape[3]).reshape(-1, 1, x.shape[3]) == 0
        return mx.where(one & type(self).bad[:, None, :, None], worst, x)


class Noting(nn.Embedding):
    """Tells the layers where the bad token is."""

    def __call__(self, x: mx.array) -> mx.array:
        Treacherous.bad = x == BAD
        return super().__call__(x)  # type: ignore[no-untyped-call, no-any-return]
