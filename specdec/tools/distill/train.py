"""The training loop: a block, its divergence, a step of the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from ...utils.checks import require
from .blocks import Block, block_order
from .checkpoint import Progress
from .loss import ChunkedLoss, Divergence
from .packing import Packing
from .schedule import Budget, learning_rate
from .states import TargetStates
from .student import Parameters, Student

OPTIMIZERS = ("adamw", "muon")
# Muon's step has a spectral norm of 1 times its learning rate, AdamW's elements about
# their learning rate: for matrices of these widths so much more is alike.
_MUON_SCALE = 10.0
# Share of the budget after which weights are rounded as they will be stored.
PACKED_FROM = 0.7


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a draft learns.

    Args:
        optimizer: ``adamw``, or ``muon`` for matrices (Jordan et al. 2024).
        learning_rate: at its peak, AdamW's.
        warmup: share of the budget in which it rises.
        weight_decay: of matrices.
        clip: largest norm of a gradient.
        hard: share of the loss that is the target's arg-max alone.
        packing: how the weights will be stored; the last steps already compute with
            weights that are rounded to it.
        seed: of the order of the data.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.05
    clip: float = 1.0
    hard: float = 0.3
    packing: Packing | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        known = self.optimizer in OPTIMIZERS
        require(known, "optimizer", self.optimizer, " or ".join(OPTIMIZERS))


class Trainer:
    """A draft, its optimizer, and where they are.

    Args:
        student: the draft; its arrays are what computes, in ``dtype``.
        states: the target's.
        blocks: what is learnt.
        loss: the divergence.
        recipe: how.
        budget: how long.
        dtype: that forwards compute in; the weights that are learnt are float32.

    Attributes:
        whole: whether parameters, optimizer and progress are of one moment, which an
            interrupt within a step can prevent.
    """

    def __init__(
        self,
        student: Student,
        states: TargetStates,
        blocks: Sequence[Block],
        loss: ChunkedLoss,
        recipe: Recipe,
        budget: Budget,
        *,
        dtype: mx.Dtype,
    ):
        self.student = student
        self.progress = Progress()
        self.whole = True
        self.parameters: Parameters = student.parameters
        self._states = states
        self._blocks = blocks
        self._loss = loss
        self._recipe = recipe
        self._budget = budget
        self._dtype = dtype
        self._optimizer = _optimizer(recipe)
        self._matrix_scale = _MUON_SCALE if recipe.optimizer == "muon" else 1.0
        self._optimizer.init(self.parameters)
        mx.eval(self.parameters, self._optimizer.state)
        self._update = self._compiled()
        self._last: Divergence | None = None

    @property
    def optimizer_state(self) -> Any:
        """What the optimizer remembers, a tree of arrays."""
        return self._optimizer.state

    def restore(self, parameters: Parameters, state: Any, progress: Progress) -> None:
        """Go on from a checkpoint."""
        self.parameters = parameters
        self._optimizer.state = state
        self._optimizer.init(parameters)  # of which nothing is new
        self.progress = progress
        mx.eval(self.parameters, self._optimizer.state)
        self._update = self._compiled()

    @property
    def share(self) -> float:
        """The share of the budget that is used up."""
        progress = self.progress
        return self._budget.share(seconds=progress.seconds, tokens=progress.tokens)

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.share >= 1

    def step(self) -> None:
        """Learn one block. The device may still be at work when this returns."""
        start = time.perf_counter()
        recipe, progress = self._recipe, self.progress
        index = block_order(len(self._blocks), progress.step, seed=recipe.seed)
        block = self._blocks[index]
        target = self._states.of(index)
        share = self.share
        rate = learning_rate(recipe.learning_rate, share, warmup=recipe.warmup)
        matrices, vectors = self._optimizer.optimizers
        matrices.learning_rate = rate * self._matrix_scale
        vectors.learning_rate = rate
        packing = recipe.packing if share >= PACKED_FROM else None
        found, gradients = self._divergence(block, target, packing)
        self.whole = False
        self.parameters = self._update(self.parameters, gradients)
        progress.step += 1
        progress.tokens += block.num_tokens
        self.whole = True
        mx.async_eval(self.parameters, self._optimizer.state, found.loss, found.agreed)
        # One step behind, so that the host is never far ahead of the device.
        if self._last is not None:
            mx.eval(self._last.loss)
        self._last = found
        progress.seconds += time.perf_counter() - start

    def last(self) -> dict[str, float]:
        """Loss, KL and agreement of the last step; waits for it."""
        assert self._last is not None
        return means(self._last)

    def install(self, *, packed: bool = True) -> None:
        """Let the student compute with what was learnt.

        Args:
            packed: rounded as it will be stored, if it is already learnt so.
        """
        rounds = packed and self.share >= PACKED_FROM
        packing = self._recipe.packing if rounds else None
        self.student.load(_computed(self.parameters, self._dtype, packing))
        mx.eval(self.student.model.parameters())

    def _divergence(
        self, block: Block, target: mx.array, packing: Packing | None
    ) -> tuple[Divergence, Parameters]:
        """What a block's loss is, and its gradient by the parameters."""
        tokens, positions = mx.array(block.tokens), mx.array(block.positions)
        weights = mx.array(block.weights)
        total = max(float(block.weights.sum()), 1e-6)

        def surrogate(parameters: Parameters) -> tuple[mx.array, ...]:
            """Has the loss's gradient, of which the head's part is known already."""
            self.student.load(_computed(parameters, self._dtype, packing))
            states = self.student.hidden(tokens)
            flat = states.reshape(-1, states.shape[-1])
            found, gradient = self._loss.value_and_gradient(
                mx.stop_gradient(flat)[positions], target, weights / total
            )
            spread = mx.zeros(flat.shape, gradient.dtype).at[positions].add(gradient)
            value = (flat * mx.stop_gradient(spread)).sum()
            return value, found.loss, found.kl, found.agreed, found.weight

        (_, *sums), gradients = mx.value_and_grad(surrogate)(self.parameters)
        return Divergence(*sums), gradients

    def _compiled(self) -> Callable[..., Parameters]:
        state = [self._optimizer.state]

        @partial(mx.compile, inputs=state, outputs=state)
        def update(parameters: Parameters, gradients: Parameters) -> Parameters:
            bounded = clipped(gradients, self._recipe.clip)
            return self._optimizer.apply_gradients(bounded, parameters)

        return update


def means(found: Divergence) -> dict[str, float]:
    """A divergence by position."""
    weight = max(float(found.weight), 1e-9)
    return {
        "loss": float(found.loss) / weight,
        "kl": float(found.kl) / weight,
        "agreement": float(found.agreed) / weight,
    }


def _computed(
    parameters: Parameters, dtype: mx.Dtype, packing: Packing | None
) -> Parameters:
    """The weights that a forward computes with, made of those that are learnt."""

    def one(array: mx.array) -> mx.array:
        array = array.astype(dtype)
        if packing is not None and array.ndim == 2:
            array = packing.rounded(array)
        return array

    return tree_map(one, parameters)


def clipped(gradients: Parameters, most: float) -> Parameters:
    """Gradients whose norm, over all of them, is ``most`` or less.

    Summed in the order of their names: that of a tree's keys is not the same in every
    process, and rounding would not be.
    """
    leaves: Any = tree_flatten(gradients)
    squares = [g.square().sum() for _, g in sorted(leaves, key=lambda leaf: leaf[0])]
    scale = mx.minimum(most * mx.rsqrt(mx.stack(squares).sum() + 1e-12), 1.0)
    return tree_map(lambda gradient: gradient * scale, gradients)


def _optimizer(recipe: Recipe) -> Any:
    """For matrices, and for vectors (norms, biases), which do not decay."""

    def adamw(weight_decay: float) -> optim.AdamW:
        return optim.AdamW(
            learning_rate=recipe.learning_rate,
            betas=[0.9, 0.95],
            weight_decay=weight_decay,
            bias_correction=True,
        )

    matrices: Any = adamw(recipe.weight_decay)
    if recipe.optimizer == "muon":
        # MLX adds its decay to the gradient, of which only directions are used.
        matrices = optim.Muon(learning_rate=recipe.learning_rate, weight_decay=0.0)
    return optim.MultiOptimizer(
        [matrices, adamw(0.0)],
        [lambda name, array: array.ndim >= 2],
    )


def count(parameters: Parameters) -> int:
    """Numbers in a tree of arrays."""
    leaves: Any = tree_flatten(parameters)
    return sum(array.size for _, array in leaves)


def module_count(model: nn.Module) -> int:
    """Numbers in a model."""
    return count(model.parameters())
