"""Products of few rows by a CUDA kernel of our own, launched as one node.

A round multiplies each matrix by a handful of rows: one per sequence, or k + 1.
Computing such a product takes less time than launching it in MLX's CUDA backend: cuBLAS
is captured call by call, which takes the host 15 to 20 microseconds, four times per
layer. A kernel that MLX launches itself is one node of its graph.

Each row is summed in an order that depends on the matrix alone. So a row's product has
the same bits alone, in a batch, or as one of the tokens of a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product as product_of
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import choices
from .kernels import (
    TYPES,
    WRITE,
    cuda_kernel,
    last_columns,
    parts_of,
    tensor_cores,
    whole_shape,
)
from .modules import change_kinds, leaves_of
from .proofs import Proofs, close

# Limits of the kernel: matrices of up to MOST_WEIGHTS numbers, up to MOST_ROWS rows, up
# to MOST_WORK products of two numbers. Beyond them, on one H200, cuBLAS is faster, and
# it computes longer than it takes to launch (benchmarks/results/skinny-h200.md).
MOST_ROWS, MOST_WEIGHTS, MOST_WORK = 256, 2**25, 2**29
# Numbers of rows at which our kernel and MLX's are timed. Up to the last of them, the
# faster kernel is taken.
TIMED_ROWS = (1, 8, 32)
# More tokens of a sequence at a time are a prompt's, and prompts differ in length.
MOST_TOKENS = 16
# A warp reads COLUMNS columns of ROWS rows of the matrix at a time. A tensor core's
# product takes TILE rows of x, a block at most WIDEST times as many.
COLUMNS, ROWS, TILE, WIDEST = 32, 16, 8, 4

# out = x weight^T + bias; x is (..., K) with M rows, weight (N, K). Where matrices are
# joined, their products lie in out one after the other.
#
# A block computes 16 columns of the result, TILES times, for 8 * WIDE rows of x. Its
# warps split K: each takes 32 columns in turn, with UNROLL turns in flight. They then
# add up their sums. In a tensor core's product (m16n8k16) the 16 are rows of the matrix
# and the 8 are rows of x. The order of k does not matter as long as both agree: a
# thread reads 8 neighbours at once and hands 4 of them to each of two products.
_SOURCE = """
  const int K = weight_shape[1], N = weight_shape[0];
  int M = 1;
  for (int i = 0; i + 1 < x_ndim; ++i) M *= x_shape[i];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, part = lane % 4;
  const bool together =
      (reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight)) % 16 == 0;
  const int first = blockIdx.x * 16 * TILES, top = blockIdx.y * 8 * WIDE;
  // Rows beyond the last are read as the last, and not written.
  const T* rows[TILES][2];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      rows[t][i] =
          weight + static_cast<size_t>(min(first + t * 16 + i * 8 + group, N - 1)) * K;

  const T* others[WIDE];
  #pragma unroll
  for (int j = 0; j < WIDE; ++j)
    others[j] = x + static_cast<size_t>(min(top + j * 8 + group, M - 1)) * K;

  float sums[TILES][WIDE][4];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    #pragma unroll
    for (int j = 0; j < WIDE; ++j)
      #pragma unroll
      for (int c = 0; c < 4; ++c) sums[t][j][c] = 0.0f;

  if (together)
    specdec_turns<true, WARPS, UNROLL>(rows, others, sums, K);
  else
    specdec_turns<false, WARPS, UNROLL>(rows, others, sums, K);

  // As many of the products' results at a time as 16 KB hold.
  constexpr int AT_ONCE = 32 / WARPS < WIDE ? 32 / WARPS : WIDE;
  __shared__ float found[AT_ONCE][WARPS][8][16];
  #pragma unroll
  for (int t = 0; t < TILES; ++t)
    #pragma unroll
    for (int begin = 0; begin < WIDE; begin += AT_ONCE) {
      #pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float* sum = sums[t][begin + i];
        found[i][warp][part * 2][group] = sum[0];
        found[i][warp][part * 2 + 1][group] = sum[1];
        found[i][warp][part * 2][8 + group] = sum[2];
        found[i][warp][part * 2 + 1][8 + group] = sum[3];
      }
      __syncthreads();
      for (int one = threadIdx.x; one < AT_ONCE * 128; one += WARPS * 32) {
        const int n = one % 16, in_tile = one / 16 % 8, i = one / 128;
        const int m = top + (begin + i) * 8 + in_tile, at = first + t * 16 + n;
        if (m < M && at < N) {
          float sum = 0.0f;
          #pragma unroll
          for (int w = 0; w < WARPS; ++w) sum += found[i][w][in_tile][n];
          @WRITE@
        }
      }
      __syncthreads();
    }
"""
# The turns of a block's warps. Eight neighbours are one load of 16 bytes, where both
# arrays begin at a multiple of 16 bytes. A view of one row may begin elsewhere, and MLX
# does not copy a view without gaps.
_TURNS = """
template <class T>
__device__ __forceinline__ uint4 specdec_singly(const T* at) {
  const unsigned short* one = reinterpret_cast<const unsigned short*>(at);
  unsigned pairs[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    pairs[i] = __ldg(one + 2 * i) | static_cast<unsigned>(__ldg(one + 2 * i + 1)) << 16;
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

template <bool TOGETHER, int WARPS, int UNROLL, int TILES, int WIDE, class T>
__device__ __forceinline__ void specdec_turns(const T* const (&rows)[TILES][2],
                                              const T* const (&others)[WIDE],
                                              float (&sums)[TILES][WIDE][4], int K) {
  const int warp = threadIdx.x / 32, part = threadIdx.x % 4;
  const uint4 zero = make_uint4(0u, 0u, 0u, 0u);
  for (int begin = warp * 32; begin < K; begin += UNROLL * WARPS * 32) {
    // All are asked for before one is waited for, so that no branch may lie between.
    uint4 a[UNROLL][TILES][2], b[UNROLL][WIDE];
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int k = begin + u * WARPS * 32 + part * 8, at = k < K ? k : part * 8;
      #pragma unroll
      for (int t = 0; t < TILES; ++t)
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const T* from = rows[t][i] + at;
          a[u][t][i] = TOGETHER ? __ldcs(reinterpret_cast<const uint4*>(from))
                                : specdec_singly(from);
        }
      #pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        const T* from = others[j] + at;
        b[u][j] = TOGETHER ? __ldg(reinterpret_cast<const uint4*>(from))
                           : specdec_singly(from);
      }
    }
    #pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const bool inside = begin + u * WARPS * 32 + part * 8 < K;
      #pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        const uint4 one = inside ? b[u][j] : zero;
        #pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const uint4 upper = inside ? a[u][t][0] : zero;
          const uint4 lower = inside ? a[u][t][1] : zero;
          SPECDEC_MMA(sums[t][j], upper.x, lower.x, upper.y, lower.y, one.x, one.y);
          SPECDEC_MMA(sums[t][j], upper.z, lower.z, upper.w, lower.w, one.z, one.w);
        }
      }
    }
  }
}
"""


@cache
def _kernel(dtype: mx.Dtype) -> Any:
    return cuda_kernel(
        f"skinny_{TYPES[dtype]}",
        _SOURCE.replace("@WRITE@", WRITE),
        ("x", "weight", "bias", "ends"),
        ("out",),
        header=tensor_cores(dtype) + _TURNS,
    )


def product(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N).

    Each sum, bias included, is in float32 and rounded once. :func:`takes` says what it
    can compute faster than MLX.
    """
    return parts(x, weight, bias, (weight.shape[0],))[0]


def parts(
    x: mx.array, weight: mx.array, bias: mx.array | None, ends: tuple[int, ...]
) -> list[mx.array]:
    """The products with stacked matrices, each without gaps between its rows.

    Some operations copy arrays with gaps first.

    Args:
        ends: the row of ``weight`` after which each matrix ends.
    """
    rows, columns = x.size // x.shape[-1], weight.shape[0]
    warps = _warps(*weight.shape)
    wide, tiles, unroll = _block(rows)
    threads = 32 * warps
    # A matrix in place of the bias stands for no bias, which saves compiling a kernel.
    added = weight if bias is None else bias
    (out,) = _kernel(x.dtype)(
        inputs=[x, weight, added, last_columns(ends)],
        template=[
            ("T", x.dtype),
            ("WARPS", warps),
            ("WIDE", wide),
            ("TILES", tiles),
            ("UNROLL", unroll),
        ],
        grid=(-(-columns // (ROWS * tiles)) * threads, -(-rows // (TILE * wide)), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[whole_shape(x.shape, ends)],
        output_dtypes=[x.dtype],
    )
    return parts_of(out, x.shape, ends)


def _warps(rows: int, columns: int) -> int:
    """Warps of a block, which share a row of the matrix: more for few, long rows.

    The number depends on the matrix alone, since it sets the order in which a row is
    summed.
    """
    return 4 if rows >= 4 * columns else 16


def _block(rows: int) -> tuple[int, int, int]:
    """WIDE, TILES and UNROLL of a block, for ``rows`` rows of x.

    These were fast on one H200 (benchmarks/results/skinny-blocks-h200.md).
    """
    wide = 1
    while wide < WIDEST and wide * TILE < rows:
        wide *= 2
    if wide == 1:
        return 1, 1, 4
    # Each block reads its rows of x again, so two tiles of the matrix share them. The
    # registers that this takes leave fewer turns in flight.
    return wide, 2, 2


def takes(x: mx.array, weight: mx.array, bias: mx.array | None) -> bool:
    """Whether x (..., K) times weight (N, K) is left to :func:`product`."""
    rows = x.size // x.shape[-1]
    ours = choices.chosen(_kind(weight))
    return (
        0 < rows <= MOST_ROWS
        and (x.ndim < 3 or x.shape[-2] <= MOST_TOKENS)
        and ours is not False
        and (_usual(weight, rows) or (bool(ours) and rows <= TIMED_ROWS[-1]))
        and weight.shape[-1] % COLUMNS == 0
        and x.dtype in TYPES
        and weight.shape[-1] == x.shape[-1]
        and weight.dtype == x.dtype
        and (bias is None or bias.dtype == x.dtype)
    )


def _usual(weight: mx.array, rows: int) -> bool:
    """Whether the kernel is taken where it was not timed."""
    return weight.size <= MOST_WEIGHTS and rows * weight.size <= MOST_WORK


def _kind(weight: mx.array) -> choices.Kind:
    return "skinny", TYPES.get(weight.dtype), *weight.shape


def choose(layers: Sequence[nn.Module]) -> None:
    """Time the kernel and MLX's for layers with matrices of one shape and type."""
    weights = [layer["weight"] for layer in layers[: choices.MATRICES]]
    if weights[0].shape[-1] % COLUMNS:
        return

    def runs(rows: int) -> tuple[choices.Run, choices.Run]:
        x = mx.ones((rows, weights[0].shape[-1]), weights[0].dtype)
        ours = [partial(product, weight=weight, bias=None) for weight in weights]
        theirs = [partial(_usual_product, weight=weight) for weight in weights]
        return choices.chained(ours, x), choices.chained(theirs, x)

    usual = _usual(weights[0], TIMED_ROWS[-1])
    choices.choose(_kind(weights[0]), list(map(runs, TIMED_ROWS)), usual=usual)


def _usual_product(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


class SkinnyLinear(nn.Linear):
    """A linear layer that computes few rows by the kernel.

    While it trains, MLX's product is used, which has a gradient.
    """

    plain = nn.Linear

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self["weight"], self.get("bias")
        if self.training or not takes(x, weight, bias):
            usual: mx.array = super().__call__(x)
            return usual
        return product(x, weight, bias)

    def split(self, x: mx.array, ends: tuple[int, ...]) -> list[mx.array]:
        """The product in parts, for stacked matrices, see :func:`parts`."""
        weight, bias = self["weight"], self.get("bias")
        if not takes(x, weight, bias):
            usual: Any = mx.split(self(x), list(ends[:-1]), axis=-1)
            return list(usual)
        return parts(x, weight, bias, ends)


class SkinnyEmbedding(nn.Embedding):
    """An embedding that, as an output layer, computes few rows by the kernel."""

    plain = nn.Embedding

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits (..., V) of x (..., D)."""
        weight = self["weight"]
        if self.training or not takes(x, weight, None):
            usual: Any = super().as_linear
            logits: mx.array = usual(x)
            return logits
        return product(x, weight, None)


_SKINNY: dict[type, Any] = {nn.Linear: SkinnyLinear, nn.Embedding: SkinnyEmbedding}


def take_few_rows(model: nn.Module) -> None:
    """Let the model's layers compute few rows by the kernel, in place."""
    change_kinds(model, _SKINNY, lambda layer: proven(layer["weight"].dtype))


def proofs_of(model: nn.Module) -> list[Callable[[], bool]]:
    """The proofs that :func:`take_few_rows` asks for: one for each type of weights."""
    layers = [layer for _, layer in leaves_of(model) if type(layer) in _SKINNY]
    types = {layer["weight"].dtype for layer in layers}
    return proven.of(dtype for dtype in TYPES if dtype in types)


def _agree(dtype: mx.Dtype) -> bool:
    """Whether the kernels for a type compute what MLX does.

    Every kernel that can be launched is tried: for matrices of either kind (see
    :func:`_warps`), whose rows are longer than all warps' first turn, each block (see
    :func:`_block`), with and without a bias, whole and in parts, and for an array that
    begins where 16 bytes cannot be loaded at once.
    """
    for columns, rows in product_of((40, 4 * 544), _HEIGHTS):
        for bias, offset in ((True, 0), (False, 4 if rows == _HEIGHTS[0] else 0)):
            if not _agrees(columns, rows, dtype, bias=bias, offset=offset):
                return False
    return True


proven = Proofs[mx.Dtype]("skinny", _agree, lambda dtype: dtype in TYPES)
# Rows of x for which the blocks differ: from the narrowest to the widest, which needs
# the most registers.
_HEIGHTS = tuple(TILE * wide // 2 + 1 for wide in (1, 2, WIDEST))


def _agrees(
    columns: int, rows: int, dtype: mx.Dtype, *, bias: bool, offset: int
) -> bool:
    """Whether one of the kernels computes what MLX does.

    Args:
        offset: numbers before x in its memory; with an offset, x has one row.
    """
    shapes = [(columns, 544), (1 if offset else rows, 544 + offset)]
    w, x = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(dtype)
        for i, shape in enumerate(shapes)
    )
    x = x[:, offset:]
    added = w[:, 0] if bias else None
    exact = x.astype(mx.float32) @ w.astype(mx.float32).T
    if added is not None:
        exact = exact + added.astype(mx.float32)
    some = parts(x, w, added, (8, 11, columns))
    results = product(x, w, added), mx.concatenate(some, axis=-1)
    return all(close(each, exact, 0.01) for each in results)
