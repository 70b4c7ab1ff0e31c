"""The divergence to the target's distribution, a chunk of positions at a time.

Logits of a whole batch are never held. The gradient with respect to the hidden
states is known in closed form (softmax minus the wanted distribution, times the
head), so it is computed beside the value, and nothing is kept for a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Divergence:
    """Sums over positions, each a scalar, float32.

    Args:
        loss: what is minimised, weighted.
        kl: KL(target || draft) in nats, weighted.
        agreed: weight of positions at which both have the same arg-max.
        weight: of all positions.
    """

    loss: mx.array
    kl: mx.array
    agreed: mx.array
    weight: mx.array


def _distances(
    zs: mx.array, zt: mx.array, weights: mx.array, hard: float
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Weighted sums of loss, KL and agreement, and the gradient by logit."""
    zs, zt = zs.astype(mx.float32), zt.astype(mx.float32)
    log_q = zs - mx.logsumexp(zs, axis=-1, keepdims=True)
    log_p = zt - mx.logsumexp(zt, axis=-1, keepdims=True)
    p = mx.exp(log_p)
    best = mx.argmax(zt, axis=-1, keepdims=True)
    kl = (p * (log_p - log_q)).sum(axis=-1)
    surprise = -mx.take_along_axis(log_q, best, axis=-1)[:, 0]
    is_best = (mx.arange(zt.shape[-1]) == best).astype(mx.float32)
    wanted = (1 - hard) * p + hard * is_best
    gradient = (mx.exp(log_q) - wanted) * weights[:, None]
    agreed = (mx.argmax(zs, axis=-1, keepdims=True) == best)[:, 0]
    loss = (1 - hard) * kl + hard * surprise
    return (
        (loss * weights).sum(),
        (kl * weights).sum(),
        (agreed * weights).sum(),
        gradient,
    )


class ChunkedLoss:
    """``(1 - hard) KL(target || draft) + hard (-log draft(target's arg-max))``.

    Args:
        weight: matrix of the head that target and draft share, shape (V, D).
        hard: share of the second part.
        chunk: positions whose logits are held at a time.
    """

    def __init__(self, weight: mx.array, *, hard: float, chunk: int):
        self.weight = weight
        self.chunk = chunk

        def with_gradient(
            hs: mx.array, ht: mx.array, weights: mx.array, head: mx.array
        ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
            *sums, gradient = _distances(hs @ head.T, ht @ head.T, weights, hard)
            return (*sums, gradient.astype(head.dtype) @ head)  # type: ignore[return-value]

        def without(
            hs: mx.array, ht: mx.array, weights: mx.array, head: mx.array
        ) -> tuple[mx.array, ...]:
            return _distances(hs @ head.T, ht @ head.T, weights, hard)[:3]

        self._with_gradient = mx.compile(with_gradient)
        self._without = mx.compile(without)

    def value_and_gradient(
        self, draft: mx.array, target: mx.array, weights: mx.array
    ) -> tuple[Divergence, mx.array]:
        """The sums, and the gradient of ``loss`` with respect to ``draft``.

        Args:
            draft: its hidden states after the last norm, shape (N, D), N a multiple
                of the chunk.
            target: the target's, same shape.
            weights: of the positions, shape (N,), float32.
        """
        parts, gradients = self._chunks(self._with_gradient, draft, target, weights)
        return _total(parts, weights), mx.concatenate(gradients)

    def value(self, draft: mx.array, target: mx.array, weights: mx.array) -> Divergence:
        """The sums alone."""
        parts, _ = self._chunks(self._without, draft, target, weights)
        return _total(parts, weights)

    def _chunks(
        self,
        function: Callable[..., tuple[mx.array, ...]],
        draft: mx.array,
        target: mx.array,
        weights: mx.array,
    ) -> tuple[list[list[mx.array]], list[mx.array]]:
        parts: list[list[mx.array]] = []
        gradients: list[mx.array] = []
        for first in range(0, draft.shape[0], self.chunk):
            part = slice(first, first + self.chunk)
            states = draft[part]
            if parts:  # one chunk's logits are gone before the next one's come
                (states,) = mx.depends([states], [*parts[-1], *gradients[-1:]])
            *sums, last = function(states, target[part], weights[part], self.weight)
            if function is self._with_gradient:
                gradients.append(last)
            else:
                sums.append(last)
            parts.append(sums)
        return parts, gradients


def _total(parts: list[list[mx.array]], weights: mx.array) -> Divergence:
    loss, kl, agreed = (mx.stack(list(each)).sum() for each in zip(*parts, strict=True))
    return Divergence(loss, kl, agreed, weights.sum())
