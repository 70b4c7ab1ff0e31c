"""The divergence from the target's distribution, a chunk of positions at a time.

The logits of a whole batch are never held. The gradient with respect to the hidden
states has a closed form (softmax minus the wanted distribution, times the head). It is
computed together with the value, so nothing is kept for a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Divergence:
    """Sums over positions, each a scalar, float32.

    Args:
        loss: the minimised loss, weighted.
        kl: KL(target || draft) in nats, weighted.
        agreed: weight of positions at which both have the same arg-max.
        weight: weight of all positions.
    """

    loss: mx.array
    kl: mx.array
    agreed: mx.array
    weight: mx.array


# Each chunk returns this many sums first: loss, KL and agreement.
_SUMS = 3
# The constant a of _paced: the part of a slot's chance that its q does not decide.
_REACHED = 0.5


def _paced(surprise: mx.array, weights: mx.array, slots: int) -> mx.array:
    """Weight each slot by the number of tokens of its block that need it (D-PACE).

    Slot j counts ``sum over m >= j of prod over i <= m of ((1 - a) q_i + a)``, where
    q_i is the draft's probability of the right token. So a slot counts as much as the
    tokens from it on are reached, and training moves to later slots by itself.

    Args:
        surprise: ``-log q``, shape (N,), with the slots of a block in order.
        weights: weights of positions, shape (N,). A slot of weight 0 and all later ones
            of its block count nothing.
    """
    reached = (1 - _REACHED) * mx.exp(-surprise) + _REACHED
    reached = mx.where(weights > 0, reached, 0.0).reshape(-1, slots)
    counted = mx.cumsum(mx.cumprod(reached, axis=1), axis=1, reverse=True)
    return weights * counted.reshape(-1)


def _distances(
    zs: mx.array, zt: mx.array, weights: mx.array, hard: float, slots: int | None
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Weighted sums of loss, KL and agreement, and the gradient for each logit."""
    zs, zt = zs.astype(mx.float32), zt.astype(mx.float32)
    log_q = zs - mx.logsumexp(zs, axis=-1, keepdims=True)
    log_p = zt - mx.logsumexp(zt, axis=-1, keepdims=True)
    p = mx.exp(log_p)
    best = mx.argmax(zt, axis=-1, keepdims=True)
    kl = (p * (log_p - log_q)).sum(axis=-1)
    surprise = -mx.take_along_axis(log_q, best, axis=-1)[:, 0]
    is_best = (mx.arange(zt.shape[-1]) == best).astype(mx.float32)
    wanted = (1 - hard) * p + hard * is_best
    counted = weights if slots is None else _paced(surprise, weights, slots)
    gradient = (mx.exp(log_q) - wanted) * counted[:, None]
    agreed = (mx.argmax(zs, axis=-1, keepdims=True) == best)[:, 0]
    loss = (1 - hard) * kl + hard * surprise
    return (
        (loss * counted).sum(),
        (kl * weights).sum(),
        (agreed * weights).sum(),
        gradient,
    )


class ChunkedLoss:
    """``(1 - hard) KL(target || draft) + hard (-log draft(target's arg-max))``.

    Args:
        weight: matrix of the head that target and draft share, shape (V, D).
        hard: share of the second term.
        chunk: most positions whose logits are held at the same time.
        slots: number of slots that a block predicts, which are weighted as in
            :func:`_paced`; ``None`` if each position stands alone.
    """

    def __init__(
        self, weight: mx.array, *, hard: float, chunk: int, slots: int | None = None
    ):
        self.weight = weight
        self.chunk = chunk // (slots or 1) * (slots or 1)

        def distances(
            hs: mx.array,
            ht: mx.array,
            weights: mx.array,
            head: mx.array,
            bias_head: Sequence[mx.array],
        ) -> tuple[mx.array, mx.array, mx.array, mx.array]:
            both = mx.concatenate([head, *bias_head], axis=1)
            return _distances(hs @ both.T, ht @ head.T, weights, hard, slots)

        def with_gradients(
            hs: mx.array,
            ht: mx.array,
            weights: mx.array,
            head: mx.array,
            *bias_head: mx.array,
        ) -> tuple[mx.array, ...]:
            *sums, gradient = distances(hs, ht, weights, head, bias_head)
            gradient = gradient.astype(head.dtype)
            by_state = gradient @ mx.concatenate([head, *bias_head], axis=1)
            by_matrix = (gradient.T @ hs[:, head.shape[1] :] for _ in bias_head)
            summed = [each.astype(mx.float32) for each in by_matrix]
            return (*sums, by_state, *summed)

        def without(
            hs: mx.array,
            ht: mx.array,
            weights: mx.array,
            head: mx.array,
            *bias_head: mx.array,
        ) -> tuple[mx.array, ...]:
            return distances(hs, ht, weights, head, bias_head)[:_SUMS]

        self._with_gradients = mx.compile(with_gradients)
        self._without = mx.compile(without)

    def value_and_gradients(
        self,
        draft: mx.array,
        target: mx.array,
        weights: mx.array,
        bias_head: mx.array | None = None,
    ) -> tuple[Divergence, list[mx.array]]:
        """The sums, and the gradients of ``loss`` by ``draft`` and by ``bias_head``.

        Args:
            draft: the draft's hidden states after the last norm, shape (N, D); with a
                ``bias_head`` (N, D + r).
            target: the target's states after the last norm, shape (N, D).
            weights: weights of the positions, shape (N,), float32.
            bias_head: matrix of shape (V, r). Its product with the last r numbers of a
                state is added to the logits.
        """
        parts = self._chunks(self._with_gradients, draft, target, weights, bias_head)
        by_state = mx.concatenate([part[_SUMS] for part in parts])
        return _total(parts, weights), [by_state, *parts[-1][_SUMS + 1 :]]

    def value(
        self,
        draft: mx.array,
        target: mx.array,
        weights: mx.array,
        bias_head: mx.array | None = None,
    ) -> Divergence:
        """The sums without gradients."""
        parts = self._chunks(self._without, draft, target, weights, bias_head)
        return _total(parts, weights)

    def _chunks(
        self,
        function: Callable[..., Sequence[mx.array]],
        draft: mx.array,
        target: mx.array,
        weights: mx.array,
        bias_head: mx.array | None,
    ) -> list[tuple[mx.array, ...]]:
        matrices = [self.weight] if bias_head is None else [self.weight, bias_head]
        parts: list[tuple[mx.array, ...]] = []
        for first in range(0, draft.shape[0], self.chunk):
            part = slice(first, first + self.chunk)
            states = draft[part]
            before = parts[-1] if parts else ()
            if before:  # a chunk's logits are freed before the next one's are computed
                (states,) = mx.depends([states], list(before))
            results = function(states, target[part], weights[part], *matrices)
            # Gradients by matrices are summed over chunks.
            whole = zip(results[_SUMS + 1 :], before[_SUMS + 1 :], strict=False)
            more = [new + old for new, old in whole] or results[_SUMS + 1 :]
            parts.append((*results[: _SUMS + 1], *more))
        return parts


def _total(parts: Sequence[tuple[mx.array, ...]], weights: mx.array) -> Divergence:
    sums = zip(*(part[:_SUMS] for part in parts), strict=True)
    loss, kl, agreed = (mx.stack(list(each)).sum() for each in sums)
    return Divergence(loss, kl, agreed, weights.sum())
