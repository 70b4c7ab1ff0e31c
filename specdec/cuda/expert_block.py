"""Layers of experts in few launches: router, experts, shared expert and sum.

mlx-lm's block of experts (Qwen3 with experts, Qwen3-Next, Qwen3.5) is some twenty
operations: it normalises scores, sorts them, gathers and divides, multiplies by three
matrices, and sums. Here it is five launches: the product of the router, its choice, the
gated product of experts, the product that follows, and the sum. A shared expert of the
experts' shape is computed as one more of them.

A token's result does not depend on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from . import packed_matmul
from .kernels import TYPES, cuda_kernel
from .modules import derived, modules_of
from .packed_matmul import Kind
from .proofs import Proofs, close

#: The most experts: a thread of a warp holds the scores of each 32nd.
MOST_EXPERTS = 1024
# Threads of a block that sums up.
THREADS = 128

# A warp chooses the experts of a token. Of equal scores the later one is larger, and
# the largest is last, as if they were sorted. Results are rounded where MLX's
# operations round.
_ROUTE = """
  constexpr int EACH = (E + 31) / 32;
  const size_t token = blockIdx.x;
  const int lane = threadIdx.x;
  auto rounded = [](float v) { return static_cast<float>(static_cast<T>(v)); };
  float scores_of[EACH], most = -INFINITY, sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = i * 32 + lane;
    scores_of[i] = at < E ? static_cast<float>(logits[token * logits_strides[0] +
                                                      at * logits_strides[1]])
                          : -INFINITY;
    most = fmaxf(most, scores_of[i]);
  }
  #pragma unroll
  for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    scores_of[i] = expf(scores_of[i] - most);
    sum += scores_of[i];
  }
  #pragma unroll
  for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  #pragma unroll
  for (int i = 0; i < EACH; ++i)
    // NaN is 0 here, and 0 / 0 below.
    scores_of[i] =
        i * 32 + lane < E ? fmaxf(rounded(scores_of[i] * (1.0f / sum)), 0.0f) : -1.0f;
  float total = 0.0f, own = 0.0f;
  for (int place = K - 1; place >= 0; --place) {
    float best = -2.0f;
    int which = -1;
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (scores_of[i] >= best) best = scores_of[i], which = i * 32 + lane;
    #pragma unroll
    for (int i = 16; i; i /= 2) {
      const float other = __shfl_xor_sync(~0u, best, i);
      const int its = __shfl_xor_sync(~0u, which, i);
      if (other > best || (other == best && its > which)) best = other, which = its;
    }
    #pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i * 32 + lane == which) scores_of[i] = -2.0f;
    if (lane == place) {
      chosen[token * K + place] = which;
      own = best;
    }
    total += best;
  }
  if (NORMED) own = rounded(own / rounded(total));
  if (lane < K) scores[token * (K + SHARED) + lane] = static_cast<T>(own);
  @SHARED_SCORE@
"""
_SHARED_SCORE = """
  if (lane == 0) {
    const float by = static_cast<float>(shared[token * shared_strides[0]]);
    scores[token * (K + 1) + K] = static_cast<T>(1.0f / (1.0f + expf(-by)));
  }
"""
_SUM = """
  const int D = y_shape[y_ndim - 1], at = blockIdx.x * blockDim.x + threadIdx.x;
  const size_t token = blockIdx.y;
  auto rounded = [](float v) { return static_cast<float>(static_cast<T>(v)); };
  if (at < D) {
    float sum = 0.0f;
    auto part = [&](int i) {
      const size_t pair = token * (K + SHARED) + i;
      return rounded(static_cast<float>(y[pair * D + at]) *
                     static_cast<float>(scores[pair]));
    };
    #pragma unroll
    for (int i = 0; i < K; ++i) sum += part(i);
    if (SHARED) sum = rounded(sum) + part(K);
    out[token * D + at] = static_cast<T>(sum);
  }
"""


class Form(NamedTuple):
    """All that the kernels are compiled for.

    Args:
        product: of the experts' first products.
        after: of the products that follow.
        experts: how many there are.
        used: how many a token uses.
        normed: whether the scores of these are divided by their sum.
        shared: whether there is a shared expert.
    """

    product: packed_matmul.Form
    after: packed_matmul.Form
    experts: int
    used: int
    normed: bool
    shared: bool


@cache
def _routing(dtype: mx.Dtype, shared: bool) -> Any:
    return cuda_kernel(
        f"route_{TYPES[dtype]}" + "_shared" * shared,
        _ROUTE.replace("@SHARED_SCORE@", _SHARED_SCORE if shared else ""),
        ("logits", *(("shared",) if shared else ())),
        ("chosen", "scores"),
        copies_views=False,
    )


@cache
def _summing(dtype: mx.Dtype) -> Any:
    return cuda_kernel(f"sum_experts_{TYPES[dtype]}", _SUM, ("y", "scores"), ("out",))


def route(
    form: Form, logits: mx.array, shared: mx.array | None
) -> tuple[mx.array, mx.array]:
    """The experts that each token uses, and their scores.

    Args:
        logits: shape (T, E).
        shared: the logit of the shared expert, shape (T, 1).

    Returns:
        Experts (T, K), uint32, the best one last; scores (T, K), with a shared expert
        (T, K + 1).
    """
    tokens, used = logits.shape[0], form.used
    arrays = [logits] if shared is None else [logits, shared]
    chosen, scores = _routing(logits.dtype, form.shared)(
        inputs=arrays,
        template=[
            ("T", logits.dtype),
            ("E", form.experts),
            ("K", used),
            ("NORMED", form.normed),
            ("SHARED", int(form.shared)),
        ],
        grid=(32 * tokens, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(tokens, used), (tokens, used + form.shared)],
        output_dtypes=[mx.uint32, logits.dtype],
    )
    return chosen, scores


def weighted_sum(form: Form, y: mx.array, scores: mx.array) -> mx.array:
    """The sum of a token's experts: y (T, K, 1, D) times scores (T, K), shape (T, D).

    With a shared expert, which is the last, K is one more.
    """
    tokens, size = y.shape[0], y.shape[-1]
    (out,) = _summing(y.dtype)(
        inputs=[y, scores],
        template=[("T", y.dtype), ("K", form.used), ("SHARED", int(form.shared))],
        grid=(-(-size // THREADS) * THREADS, tokens, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(tokens, size)],
        output_dtypes=[y.dtype],
    )
    total: mx.array = out
    return total


class _FewLaunches:
    """A block of experts that our kernels compute."""

    siblings = (("gate", "shared_expert_gate"),)

    def __call__(self, x: mx.array) -> mx.array:
        block: Any = self
        form = form_of(block)
        if (
            form is None
            or block.training
            or not x.size
            or x.dtype != form.product.dtype
            or not proven.reached(form)
        ):
            usual: Any = super()
            computed: mx.array = usual.__call__(x)
            return computed
        flat = x.reshape(-1, x.shape[-1])
        logits = block.gate(flat)
        shared = block.shared_expert_gate(flat) if form.shared else None
        step = packed_matmul.MOST_PAIRS // form.used
        parts = [
            _computed(
                block,
                form,
                flat[begin : begin + step],
                logits[begin : begin + step],
                None if shared is None else shared[begin : begin + step],
            )
            for begin in range(0, flat.shape[0], step)
        ]
        whole = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return whole.reshape(x.shape)


def _computed(
    block: Any, form: Form, x: mx.array, logits: mx.array, shared: mx.array | None
) -> mx.array:
    chosen, scores = route(form, logits, shared)
    names = "gate_proj", "up_proj", "down_proj"
    gate, up, down = (_packed(block.switch_mlp[name]) for name in names)
    both: tuple[mx.array, ...] = ()
    last: tuple[mx.array, ...] = ()
    if form.shared:
        *pair, last = (_packed(block.shared_expert[name]) for name in names)
        both = (*pair[0], *pair[1])
    kind: Any = {"bits": form.product.bits, "group_size": form.product.group_size}
    hidden = packed_matmul.expert_product(
        x[:, None, None], gate, chosen, up=up, shared=both, **kind
    )
    y = packed_matmul.expert_product(hidden, down, chosen, shared=last, **kind)
    return weighted_sum(form, y, scores)


def _packed(layer: Any) -> tuple[mx.array, ...]:
    return layer["weight"], layer["scales"], layer["biases"]


# Blocks by name, so that only models that have them import their modules.
_BLOCKS = {
    ("mlx_lm.models.qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    ("mlx_lm.models.qwen3_next", "Qwen3NextSparseMoeBlock"),
}


def form_of(block: Any) -> Form | None:
    """The form of a block of experts; ``None``: the kernels do not support it."""
    experts = block.switch_mlp
    if not isinstance(experts, SwitchGLU) or not isinstance(experts.activation, SwiGLU):
        return None
    if block.sharding_group is not None:
        return None
    names = ("gate_proj", "up_proj", "down_proj")
    layers = [experts[name] for name in names]
    kinds = [_kind(layer) for layer in layers]
    shared = "shared_expert" in block
    if shared:
        kinds += [_kind(block.shared_expert[name]) for name in names]
    first, second, third, *others = kinds
    if first is None or third is None or second != first:
        return None
    if [*others] not in ([], [first, first, third]):
        return None
    form, after = (kind.form._replace(experts=True) for kind in (first, third))
    if form != after._replace(eights=form.eights) or block.num_experts > MOST_EXPERTS:
        return None
    if not 0 < block.top_k <= 32:
        return None
    normed = bool(block.norm_topk_prob)
    return Form(form, after, block.num_experts, block.top_k, normed, shared)


def _kind(layer: Any) -> Kind | None:
    """The kind of a packed layer without a bias, whether of an expert or of all."""
    if "bias" in layer or not hasattr(layer, "bits"):
        return None
    kind = Kind.of(layer)
    return None if kind is None else kind._replace(experts=False)


def take_few_launches(model: nn.Module) -> None:
    """Let the kernels compute the model's blocks of experts, in place.

    This tries the kernels for the blocks that the model has.
    """
    for block in _blocks(model):
        form = form_of(block)
        if form is not None and proven(form):
            kind: Any = type(block)
            block.__class__ = derived(_FewLaunches, kind)


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_few_launches` asks for."""
    return proven.of(map(form_of, _blocks(model)))


def layers_within(model: nn.Module) -> list[Any]:
    """The layers of experts in blocks that the kernels compute, or will if proven."""
    return [
        layer
        for block in _blocks(model, also_taken=True)
        if (form := form_of(block)) is not None and proven.verdicts.get(form, True)
        for layer in block.switch_mlp.values()
    ]


def _blocks(model: nn.Module, *, also_taken: bool = False) -> Iterator[Any]:
    for _, module in modules_of(model):
        known = (type(module).__module__, type(module).__name__) in _BLOCKS
        if known and (also_taken or not isinstance(module, _FewLaunches)):
            yield module


# How far results may be off, as a share of the largest.
MOST = 0.02


def _agrees(form: Form) -> bool:
    """Whether the kernels compute what MLX's operations do, of few pairs and many."""

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(sum(shape)))

    dtype, tokens, used = form.product.dtype, 40, form.used
    logits, shared = drawn(tokens, form.experts), drawn(tokens, 1)
    logits, shared = logits.astype(dtype), shared.astype(dtype)
    chosen, scores = route(form, logits, shared if form.shared else None)
    with mx.stream(mx.cpu):
        gates = mx.softmax(logits.astype(mx.float32), axis=-1)
        best = mx.sort(gates, axis=-1)[:, -used:]
        if not close(mx.take_along_axis(gates, chosen, axis=-1), best, MOST):
            return False
        if form.normed:
            best = best / best.sum(axis=-1, keepdims=True)
        if form.shared:
            last = mx.sigmoid(shared.astype(mx.float32))
            best = mx.concatenate([best, last], axis=-1)
        if not close(scores, best, MOST):
            return False
    # The products depend on the number of experts only by their grid.
    experts, columns = 3, 72
    chosen, every = chosen % experts, chosen % experts
    if form.shared:
        last = mx.full((tokens, 1), experts, every.dtype)
        every = mx.concatenate([every, last], axis=-1)
    for part in (form.product, form.after):
        gated = part is form.product
        # Where MLX's operations are compiled already: indexing, above all.
        with mx.stream(mx.cpu):
            length = part.group_size * (24 if part.eights else 25)
            x = drawn(tokens, 1, 1, length).astype(dtype)
            rows = x if gated else mx.broadcast_to(x, (*every.shape, 1, length))
            packed, wide = [], []
            for i in range(2 if gated else 1):
                dense = drawn(experts + 1, columns + i, length)[:, :columns]
                packed.append(
                    mx.quantize(dense.astype(dtype), part.group_size, part.bits)
                )
                scales, biases = (a.astype(mx.float32) for a in packed[-1][1:])
                matrices = mx.dequantize(
                    packed[-1][0], scales, biases, part.group_size, part.bits
                )
                wide.append(x.astype(mx.float32) @ matrices[every].swapaxes(-1, -2))
            exact = wide[0]
            if gated:
                exact = exact * mx.sigmoid(exact) * wide[1]
            experts_of = [[a[:-1] for a in each] for each in packed]
            alone = [a[-1] for each in packed for a in each] if form.shared else []
        for many in (False, True):
            y = packed_matmul.expert_product(
                rows,
                experts_of[0],
                chosen,
                bits=part.bits,
                group_size=part.group_size,
                up=experts_of[1] if gated else (),
                shared=alone,
                wide=many,
            )
            if not close(y, exact, MOST):
                return False
    with mx.stream(mx.cpu):
        exact = (y.astype(mx.float32) * scores[..., None, None]).sum(axis=1).squeeze(1)
    return close(weighted_sum(form, y, scores), exact, MOST)


proven = Proofs("experts", _agrees)
