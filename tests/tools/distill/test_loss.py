"""The chunked loss: values and gradients of the whole one, by MLX's own autograd."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from specdec.tools.distill.loss import ChunkedLoss

N, D, V = 24, 8, 41


def whole(
    states: mx.array, target: mx.array, weights: mx.array, head: mx.array, hard: float
) -> mx.array:
    """The definition, all logits at once."""
    log_q = mx.log(mx.softmax(states @ head.T, axis=-1))
    p = mx.softmax(target @ head.T, axis=-1)
    kl = (p * (mx.log(p) - log_q)).sum(axis=-1)
    best = mx.argmax(p, axis=-1)
    chosen = -log_q[mx.arange(len(best)), best]
    return (((1 - hard) * kl + hard * chosen) * weights).sum()


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 8, 24])
def test_chunks_add_up_to_the_whole(chunk: int, hard: float) -> None:
    keys = mx.random.split(mx.random.key(3), 4)
    states, target = (mx.random.normal((N, D), key=k) for k in keys[:2])
    head = mx.random.normal((V, D), key=keys[2])
    weights = mx.random.uniform(shape=(N,), key=keys[3])
    weights[5] = 0.0
    loss = ChunkedLoss(head, hard=hard, chunk=chunk)
    divergence, (gradient,) = loss.value_and_gradients(states, target, weights)
    wanted, wanted_gradient = mx.value_and_grad(whole)(
        states, target, weights, head, hard
    )
    np.testing.assert_allclose(divergence.loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-5)
    assert not np.any(np.array(gradient[5]))
    np.testing.assert_allclose(
        divergence.kl, whole(states, target, weights, head, 0.0), rtol=1e-5
    )
    same = mx.argmax(states @ head.T, axis=-1) == mx.argmax(target @ head.T, axis=-1)
    np.testing.assert_allclose(divergence.agreed, (same * weights).sum(), rtol=1e-6)
    alone = loss.value(states, target, weights)
    np.testing.assert_allclose(alone.kl, divergence.kl, rtol=1e-6)


def test_nothing_is_lost_between_equals() -> None:
    states = mx.random.normal((8, D), key=mx.random.key(0))
    head = mx.random.normal((V, D), key=mx.random.key(1))
    loss = ChunkedLoss(head, hard=0.0, chunk=4)
    divergence, (gradient,) = loss.value_and_gradients(states, states, mx.ones(8))
    np.testing.assert_allclose(divergence.kl, 0.0, atol=1e-5)
    np.testing.assert_allclose(gradient, np.zeros((8, D)), atol=1e-5)
    assert float(divergence.agreed) == 8
