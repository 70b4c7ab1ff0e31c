"""The training step: a block, its divergence, an update by the optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from ...models.layers import leaves_of
from .blocks import Block, block_order
from .checkpoint import Progress
from .evaluate import TargetStates
from .export import rounded
from .loss import ChunkedLoss, Divergence
from .options import DistillOptions
from .student import Lesson, Parameters, Student

#: The optimizer's name in cards and checkpoints.
OPTIMIZER = "adamw"
# Share of the budget after which weights are rounded as they will be stored.
PACKED_FROM = 0.7
# Share of the budget in which the learning rate rises; weight decay of matrices;
# largest norm of the gradients.
WARMUP, _WEIGHT_DECAY, _CLIP = 0.03, 0.05, 1.0


def learning_rate(peak: float, share: float, *, warmup: float = WARMUP) -> float:
    """A linear warm-up over the first ``warmup`` of the budget, then a cosine to 0."""
    if share < warmup:
        return peak * max(share, 0.02 * warmup) / warmup
    done = (share - warmup) / (1 - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class Trainer:
    """A draft with its optimizer and its progress.

    Args:
        student: the draft; forwards compute with its arrays, in ``dtype``.
        states: the target's states.
        blocks: the blocks to learn from.
        loss: the divergence.
        options: the learning rate, budget, seed and bits.
        dtype: the type that forwards compute in; learnt weights are float32.

    Attributes:
        whole: whether parameters, optimizer and progress belong to the same step. An
            interrupt within a step can make it false.
    """

    def __init__(
        self,
        student: Student,
        states: TargetStates,
        blocks: Sequence[Block],
        loss: ChunkedLoss,
        options: DistillOptions,
        *,
        dtype: mx.Dtype,
    ):
        self.student = student
        self.progress = Progress(0, 0, 0.0, [])
        self.whole = True
        self.parameters: Parameters = student.parameters
        self._states = states
        self._blocks = blocks
        self._loss = loss
        self._options = options
        self._dtype = dtype
        self._optimizer = _optimizer(options)
        self._optimizer.init(self.parameters)
        mx.eval(self.parameters, self._optimizer.state)
        self._update = self._compiled()
        self._last: Divergence | None = None

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's state, a tree of arrays."""
        return self._optimizer.state

    def restore(self, parameters: Parameters, state: Any, progress: Progress) -> None:
        """Go on from a checkpoint."""
        self.parameters = parameters
        self._optimizer.state = state
        self._optimizer.init(parameters)  # the state has all of them already
        self.progress = progress
        mx.eval(self.parameters, self._optimizer.state)
        self._update = self._compiled()

    @property
    def share(self) -> float:
        """The share of the budget that is used up."""
        progress = self.progress
        return self._options.budget.share(
            seconds=progress.seconds, tokens=progress.tokens
        )

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.share >= 1

    def step(self) -> None:
        """Learn from one block. The device may still be at work when this returns."""
        start = time.perf_counter()
        options, progress = self._options, self.progress
        index = block_order(len(self._blocks), progress.step, seed=options.seed)
        block = self._blocks[index]
        # Every step has its own draws.
        rng = np.random.default_rng((options.seed, progress.step, 1))
        lesson = self.student.lesson(block, self._states.of(index), rng)
        share = self.share
        for each in self._optimizer.optimizers:
            each.learning_rate = learning_rate(options.learning_rate, share)
        bits = options.bits if share >= PACKED_FROM else None
        divergence, gradients = self._divergence(lesson, bits)
        self.whole = False
        self.parameters = self._update(self.parameters, gradients)
        progress.step += 1
        progress.tokens += block.num_tokens
        self.whole = True
        mx.async_eval(
            self.parameters, self._optimizer.state, divergence.loss, divergence.agreed
        )
        # Wait for the previous step, so that the host is never far ahead of the device.
        if self._last is not None:
            mx.eval(self._last.loss)
        self._last = divergence
        progress.seconds += time.perf_counter() - start

    def last(self) -> dict[str, float]:
        """Wait for the last step; return its loss, KL and agreement."""
        assert self._last is not None
        return means(self._last)

    def install(self, *, packed: bool = True) -> None:
        """Let the student compute with the learnt weights.

        Args:
            packed: round the weights as they will be stored, if training already does.
        """
        rounds = packed and self.share >= PACKED_FROM
        bits = self._options.bits if rounds else None
        self.student.load(_computed(self.parameters, self._dtype, bits))
        mx.eval(self.student.model.parameters())

    def _divergence(
        self, lesson: Lesson, bits: int | None
    ) -> tuple[Divergence, Parameters]:
        """The loss of a lesson, and its gradient by the parameters."""
        total = max(float(lesson.weights.sum()), 1e-6)
        weights = mx.array(lesson.weights) / total

        def surrogate(parameters: Parameters) -> tuple[mx.array, ...]:
            """A value that has the loss's gradient by ``parameters``, and the sums."""
            self.student.load(_computed(parameters, self._dtype, bits))
            inputs = [lesson.states()]
            if self.student.bias_head is not None:
                inputs.append(self.student.bias_head)
            divergence, gradients = self._loss.value_and_gradients(
                mx.stop_gradient(inputs[0]),
                lesson.target,
                weights,
                *map(mx.stop_gradient, inputs[1:]),
            )
            products = [
                (array * mx.stop_gradient(gradient)).sum()
                for array, gradient in zip(inputs, gradients, strict=True)
            ]
            value = products[0] + sum(products[1:], mx.array(0.0))
            return (
                value,
                divergence.loss,
                divergence.kl,
                divergence.agreed,
                divergence.weight,
            )

        (_, *sums), gradients = mx.value_and_grad(surrogate)(self.parameters)
        return Divergence(*sums), gradients

    def _compiled(self) -> Callable[..., Parameters]:
        state = [self._optimizer.state]

        @partial(mx.compile, inputs=state, outputs=state)
        def update(parameters: Parameters, gradients: Parameters) -> Parameters:
            bounded = clipped(gradients, _CLIP)
            return self._optimizer.apply_gradients(bounded, parameters)

        return update


def means(divergence: Divergence) -> dict[str, float]:
    """Mean loss, KL and agreement per position."""
    weight = max(float(divergence.weight), 1e-9)
    return {
        "loss": float(divergence.loss) / weight,
        "kl": float(divergence.kl) / weight,
        "agreement": float(divergence.agreed) / weight,
    }


def _computed(parameters: Parameters, dtype: mx.Dtype, bits: int | None) -> Parameters:
    """The weights that a forward computes with, made from the learnt weights."""

    def one(array: mx.array) -> mx.array:
        array = array.astype(dtype)
        return array if bits is None or array.ndim != 2 else rounded(array, bits)

    return tree_map(one, parameters)


def clipped(gradients: Parameters, most: float) -> Parameters:
    """The gradients, scaled so that their joint norm is at most ``most``.

    Squares are summed in the order of the gradients' names. The order of a tree's keys
    differs between processes, and the rounding would differ with it.
    """
    leaves = sorted(leaves_of(gradients), key=lambda leaf: leaf[0])
    squares = [g.square().sum() for _, g in leaves]
    scale = mx.minimum(most * mx.rsqrt(mx.stack(squares).sum() + 1e-12), 1.0)
    return tree_map(lambda gradient: gradient * scale, gradients)


def _optimizer(options: DistillOptions) -> Any:
    """AdamW with weight decay for matrices, without for vectors (norms, biases)."""
    matrices, vectors = (
        optim.AdamW(
            learning_rate=options.learning_rate,
            betas=[0.9, 0.95],
            weight_decay=weight_decay,
            bias_correction=True,
        )
        for weight_decay in (_WEIGHT_DECAY, 0.0)
    )
    return optim.MultiOptimizer(
        [matrices, vectors], [lambda name, array: array.ndim >= 2]
    )
