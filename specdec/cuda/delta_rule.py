"""The gated delta rule of many tokens by one CUDA kernel, with a gate for each channel.

mlx-lm's layers of Kimi Linear, Kimi K3, Bailing 3 and OLMo Hybrid call its function
``gated_delta_update``, which outside Metal is a loop of six operations a token. Here
that is one launch after the gates. Qwen's layers have a kernel that computes more:
:mod:`.gated_delta`.

Every token's arithmetic is the same whatever else is in a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta

from .attention_patch import calling_instead
from .gated_delta_source import HEADER
from .kernels import cuda_kernel
from .modules import modules_of
from .proofs import Proofs, close

# As in :mod:`.gated_delta`: threads that share rows of the state, these rows, and
# tokens that a block takes at a time.
LANES, ROWS, TILE = 8, 4, 16
MOST_KEY_SIZE, MOST_VALUE_SIZE = 192, 128
#: Modules of mlx-lm whose layers these are.
_MODULES = ("bailing_moe_v3", "kimi_k3", "kimi_linear", "olmo_hybrid")
_TYPES = (mx.bfloat16, mx.float16, mx.float32)
_NAME = "gated_delta_update"
_USUAL: Any = getattr(gated_delta, _NAME)

SOURCE = """
  constexpr int FOURS = Dk / 4 / LANES, THREADS = Dv / ROWS * LANES;
  const int S = q_shape[1], HK = q_shape[2], HV = v_shape[2];
  const int head = blockIdx.x % HV, group = head / (HV / HK);
  const size_t row = blockIdx.x / HV;
  const int dv = threadIdx.x / LANES * ROWS, part = threadIdx.x % LANES;

  // This thread's numbers of its rows of the state: each LANES-th four.
  float4 held[ROWS][FOURS];
  const size_t own = ((row * HV + head) * Dv + dv) * Dk / 4 + part;
  #pragma unroll
  for (int r = 0; r < ROWS; ++r)
    #pragma unroll
    for (int j = 0; j < FOURS; ++j)
      held[r][j] = reinterpret_cast<const float4*>(state)[own + r * Dk / 4 + j * LANES];

  __shared__ float4 queries[TILE][Dk / 4], keys[TILE][Dk / 4];
  __shared__ float4 decays[TILE][VECTOR ? Dk / 4 : 1];
  __shared__ float values[TILE][Dv], betas[TILE];
  for (int begin = 0; begin < S; begin += TILE) {
    const int count = min(TILE, S - begin);
    __syncthreads();
    for (int i = threadIdx.x; i < count * Dk; i += THREADS) {
      const int t = i / Dk, d = i % Dk;
      const size_t token = row * S + begin + t;
      reinterpret_cast<float*>(queries[t])[d] =
          static_cast<float>(q[(token * HK + group) * Dk + d]);
      reinterpret_cast<float*>(keys[t])[d] =
          static_cast<float>(k[(token * HK + group) * Dk + d]);
      if (VECTOR)
        reinterpret_cast<float*>(decays[t])[d] = g[(token * HV + head) * Dk + d];
    }
    for (int i = threadIdx.x; i < count * Dv; i += THREADS)
      values[i / Dv][i % Dv] = static_cast<float>(
          v[((row * S + begin + i / Dv) * HV + head) * Dv + i % Dv]);
    if (threadIdx.x < count) {
      const size_t token = row * S + begin + threadIdx.x;
      betas[threadIdx.x] = static_cast<float>(beta[token * HV + head]);
      if (!VECTOR) decays[threadIdx.x][0] = four_of(g[token * HV + head]);
    }
    __syncthreads();

    for (int t = 0; t < count; ++t) {
      const size_t token = row * S + begin + t;
      T* const its = y + (token * HV + head) * Dv + dv;
      @MASKED@
      float4 key[FOURS];
      #pragma unroll
      for (int j = 0; j < FOURS; ++j) key[j] = keys[t][j * LANES + part];
      #pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float4 sum = four_of(0.0f);
        #pragma unroll
        for (int j = 0; j < FOURS; ++j) {
          multiply(held[r][j], decays[t][VECTOR ? j * LANES + part : 0]);
          add_product(sum, held[r][j], key[j]);
        }
        const float known = sum_of_row(sum, LANES);
        const float4 delta = four_of((values[t][dv + r] - known) * betas[t]);
        sum = four_of(0.0f);
        #pragma unroll
        for (int j = 0; j < FOURS; ++j) {
          add_product(held[r][j], key[j], delta);
          add_product(sum, held[r][j], queries[t][j * LANES + part]);
        }
        const float product = sum_of_row(sum, LANES);
        if (part == 0) its[r] = static_cast<T>(product);
      }
    }
  }
  #pragma unroll
  for (int r = 0; r < ROWS; ++r)
    #pragma unroll
    for (int j = 0; j < FOURS; ++j)
      reinterpret_cast<float4*>(after)[own + r * Dk / 4 + j * LANES] = held[r][j];
"""
# A token that does not count changes no state.
MASKED = """
      if (!mask[token]) {
        if (part < ROWS) its[part] = static_cast<T>(0.0f);
        continue;
      }
"""


class Form(NamedTuple):
    """All that the kernel is compiled for: types of q and beta, sizes, and the gate."""

    dtype: mx.Dtype
    beta: mx.Dtype
    key_size: int
    value_size: int
    vector: bool

    @property
    def known(self) -> bool:
        """Whether the kernel supports this form."""
        return (
            self.dtype in _TYPES
            and self.beta in _TYPES
            and self.key_size % (4 * LANES) == 0
            and self.value_size % (32 // LANES * ROWS) == 0
            and self.key_size <= MOST_KEY_SIZE
            and self.value_size <= MOST_VALUE_SIZE
        )


class Inputs(NamedTuple):
    """What ``mlx_lm.models.gated_delta.gated_delta_ops`` takes, without a mask.

    Args:
        q, k: shape (B, S, HK, DK).
        v: shape (B, S, HV, DV).
        g: the decay, shape (B, S, HV) or (B, S, HV, DK), float32.
        beta: shape (B, S, HV).
        state: shape (B, HV, DV, DK), float32.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array


@cache
def _kernel(masked: bool) -> Any:
    return cuda_kernel(
        "delta_rule" + "_masked" * masked,
        SOURCE.replace("@MASKED@", MASKED if masked else ""),
        ("q", "k", "v", "g", "beta", "state", *(("mask",) if masked else ())),
        ("y", "after"),
        header=HEADER,
    )


def scan(inputs: Inputs, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Compute the rule for every token.

    Args:
        mask: which tokens count, shape (B, S); ``None``: all.

    Returns:
        The output, shape (B, S, HV, DV), 0 for tokens that do not count, and the state
        after the tokens.
    """
    q, _, v, g, beta, state = inputs
    rows, heads, (value_size, key_size) = v.shape[0], v.shape[2], state.shape[2:]
    threads = value_size // ROWS * LANES
    y, after = _kernel(mask is not None)(
        inputs=[*inputs, *([] if mask is None else [mask])],
        template=[
            ("T", q.dtype),
            # MLX distinguishes kernels by these, so they include all types of inputs.
            ("TB", beta.dtype),
            ("Dk", key_size),
            ("Dv", value_size),
            ("VECTOR", g.ndim > 3),
            ("LANES", LANES),
            ("ROWS", ROWS),
            ("TILE", TILE),
        ],
        grid=(rows * heads * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return y, after


def update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803 - mlx-lm's name
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """What mlx-lm's function of this signature computes, by the kernel if it can."""
    form = Form(q.dtype, b.dtype, q.shape[-1], v.shape[-1], a.ndim > 3)
    fits = k.dtype == v.dtype == q.dtype and q.size > 0
    fits = fits and (state is None or state.dtype == mx.float32)
    if not use_kernel or not fits or not proven.reached(form):
        usual: tuple[mx.array, mx.array] = _USUAL(
            q, k, v, a, b, A_log, dt_bias, state, mask,
            use_kernel=use_kernel,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )  # fmt: skip
        return usual
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = beta * 2.0
    if lower_bound is None:
        g = gated_delta.compute_g(A_log, a, dt_bias)
    else:
        g = gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[-1]), mx.float32)
    return scan(Inputs(q, k, v, g.astype(mx.float32), beta, state), mask)


def take_delta_rules(model: nn.Module) -> None:
    """Let the kernel compute the model's delta rules, in place.

    This tries the kernel for the sizes and types that the model has.
    """
    for layer, form in _layers(model):
        if proven(form):
            layer.__class__ = _updating(type(layer))


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_delta_rules` asks for."""
    return proven.of(form for _, form in _layers(model))


def _updating(kind: type) -> Any:
    """``kind`` with :func:`update`; ``None`` if it does not call mlx-lm's function."""
    return calling_instead(kind, _NAME, _USUAL, update)


def _layers(model: nn.Module) -> Iterator[tuple[Any, Form]]:
    """The model's layers with a delta rule, and the forms of their calls."""
    for _, layer in modules_of(model):
        name = type(layer).__module__.rpartition(".")[2]
        if name in _MODULES and _updating(type(layer)) is not None:
            yield layer, _form_of(layer, name)


def _form_of(layer: Any, module: str) -> Form:
    if module == "olmo_hybrid":
        dtype = layer.q_conv1d.weight.dtype
        return Form(dtype, dtype, layer.head_k_dim, layer.head_v_dim, False)
    convolutions = [n for n in layer if "conv" in n]
    convolution: Any = layer[convolutions[0]]
    dtype = convolution.get("conv", convolution)["weight"].dtype
    beta = mx.float32 if module == "bailing_moe_v3" else dtype
    return Form(dtype, beta, layer.head_dim, layer.head_dim, True)


def drawn(form: Form, rows: int, tokens: int, key_heads: int = 1) -> Inputs:
    """Random inputs of :func:`scan`, with two heads of values for each of keys."""
    keys = iter(mx.random.split(mx.random.key(tokens), 6))

    def some(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    heads = 2 * key_heads
    q, k = (some(rows, tokens, key_heads, form.key_size) for _ in range(2))
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = some(rows, tokens, heads, form.value_size)
    gate = (rows, tokens, heads, form.key_size)[: 4 if form.vector else 3]
    g, beta = mx.sigmoid(2 + some(*gate)), 2 * mx.sigmoid(some(rows, tokens, heads))
    state = some(rows, heads, form.value_size, form.key_size) * 0.1
    q, k, v = (x.astype(form.dtype) for x in (q, k, v))
    return Inputs(q, k, v, g, beta.astype(form.beta), state)


def _agrees(form: Form) -> bool:
    """Whether the kernel agrees with mlx-lm's loop, of whole rows and masked ones."""
    inputs = drawn(form, 3, TILE + 4)
    mask = mx.arange(TILE + 4) < mx.array([[TILE + 4], [7], [0]])
    most = 1e-4 if form.dtype == mx.float32 else 0.02
    for each in (None, mask):
        # Where MLX's fused functions need no kernel that is compiled for them.
        with mx.stream(mx.cpu):
            y, after = looped(inputs, each)
            mx.eval(y, after)
        ours = scan(inputs, each)
        for output, exact in zip(ours, (y, after), strict=True):
            if not close(output, exact, most):
                return False
    return True


proven = Proofs("delta rule", _agrees, attrgetter("known"))


def looped(inputs: Inputs, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """What :func:`scan` computes, in float32, token by token."""
    q, k, v, g, beta, state = inputs
    repeats = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(x.astype(mx.float32), repeats, axis=2) for x in (q, k))
    v, beta = v.astype(mx.float32), beta.astype(mx.float32)
    g = g if g.ndim > 3 else g[..., None]
    outputs = []
    for t in range(q.shape[1]):
        before, key = state, k[:, t, :, None]
        state = state * g[:, t, :, None]
        delta = (v[:, t] - (state * key).sum(axis=-1)) * beta[:, t, :, None]
        state = state + delta[..., None] * key
        y = (state * q[:, t, :, None]).sum(axis=-1)
        if mask is not None:
            counts = mask[:, t, None, None]
            state = mx.where(counts[..., None], state, before)
            y = mx.where(counts, y, 0)
        outputs.append(y)
    return mx.stack(outputs, axis=1), state
