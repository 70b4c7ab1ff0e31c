"""Attention of few queries that reads keys and values once for a group, for Metal.

MLX's kernel for few queries reads a row's keys and values again for each query head and
each token of a verification. Here a threadgroup computes 8 or 16 queries that share
them: the heads of a key head, token after token. Its SIMD groups split the keys, 8 in
turn. Each has its own maximum and sum (the online softmax of Milakov and Gimelshein
2018), and then they are combined. Rows of more than SPAN keys are split between
threadgroups, and combined by MLX's operations.

Scores are K (8, D) times Q transposed, in matrices of 8 x 8, and the result is V (8, D)
transposed times their softmax: what a product gives has the layout that the next one
takes. The order of D within a matrix is chosen so that each lane loads neighbours. A
query's sums run in an order that depends on the positions of its keys alone. No speed
was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from math import e, log2
from typing import Any, NamedTuple

import mlx.core as mx

from ..cuda.to_metal import metal_kernel

#: Head sizes, and queries of a row, that the kernel takes.
SIZES, MOST_TOKENS = (64, 128, 192, 256), 8
#: The numbers of queries of which each is on or off, by :mod:`.trial`.
BANDS = ((2, 4), (5, 8))
#: With fewer columns, MLX's kernel is used.
FEWEST_COLUMNS = 2048
# SIMD groups of a threadgroup; the most keys of one.
GROUPS, SPAN = 4, 1024

HEADER = """
// Four neighbours, which may lie apart.
template <typename T>
METAL_FUNC metal::vec<float, 4> four_at(const device T* from, size_t step, bool near) {
  if (near) {
    const metal::vec<T, 4> v = *reinterpret_cast<const device metal::vec<T, 4>*>(from);
    return metal::vec<float, 4>(float(v[0]), float(v[1]), float(v[2]), float(v[3]));
  }
  return metal::vec<float, 4>(float(from[0]), float(from[step]), float(from[2 * step]),
                              float(from[3 * step]));
}

// The largest or the sum of what eight lanes hold, those of a column of a matrix.
METAL_FUNC float top_of(float value) {
  value = metal::max(value, metal::simd_shuffle_xor(value, 2));
  value = metal::max(value, metal::simd_shuffle_xor(value, 4));
  return metal::max(value, metal::simd_shuffle_xor(value, 16));
}
METAL_FUNC float sum_of(float value) {
  value += metal::simd_shuffle_xor(value, 2);
  value += metal::simd_shuffle_xor(value, 4);
  return value + metal::simd_shuffle_xor(value, 16);
}
"""
SOURCE = """
  constexpr int TILE = 8 * QT, WIDE = D + 4, EIGHTH = D / 8;
  constexpr int ROOM = TILE * WIDE > P * TILE * 64 ? TILE * WIDE : P * TILE * 64;
  const float NONE = -INFINITY;
  const int S = q_shape[2], H = q_shape[1], L = k_shape[2];
  const int heads = H / k_shape[1], rows = heads * S;
  const int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
  // What a lane holds of a matrix: two neighbours, at (row, column).
  const int row = (lane & 16) / 4 + ((lane / 2) & 3);
  const int column = (lane & 8) / 2 + (lane & 1) * 2;
  const int first = threadgroup_position_in_grid.x * TILE;
  const int kv = threadgroup_position_in_grid.y;
  const int pieces = threadgroups_per_grid.z / q_shape[0];
  const int piece = threadgroup_position_in_grid.z % pieces;
  const size_t batch = threadgroup_position_in_grid.z / pieces;
  const int end = metal::min(L, (piece + 1) * SPAN);

  threadgroup float room[ROOM];  // queries; later, the results of SIMD groups
  threadgroup float tops[P][TILE];
  threadgroup float totals[P][TILE];

  // Queries beyond the last are read as the last, and not written.
  for (int i = 32 * group + lane; i < TILE * D; i += 32 * P) {
    const int r = metal::min(first + i / D, rows - 1), d = i % D;
    const device T* from = q + batch * q_strides[0] + r / heads * q_strides[2] +
                           (kv * heads + r % heads) * q_strides[1];
    room[i / D * WIDE + d] = @SCALE@f * float(from[d * q_strides[3]]);
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  int tokens[QT][2];
  float best[QT][2], total[QT][2];
  metal::simdgroup_matrix<float, 8, 8> results[EIGHTH][QT];
  for (int r = 0; r < QT; ++r) {
    for (int i = 0; i < 2; ++i) {
      tokens[r][i] = metal::min(first + 8 * r + column + i, rows - 1) / heads;
      best[r][i] = NONE;
      total[r][i] = 0.0f;
    }
    for (int u = 0; u < EIGHTH; ++u)
      results[u][r] = metal::simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const bool near = k_strides[3] == 1 && v_strides[3] == 1 &&
                    (k_strides[0] | k_strides[1] | k_strides[2] | v_strides[0] |
                     v_strides[1] | v_strides[2]) % 4 == 0;
  const device T* keys = k + batch * k_strides[0] + kv * k_strides[1] +
                         column / 2 * (D / 4) * k_strides[3];
  const device T* values = v + batch * v_strides[0] + kv * v_strides[1] +
                           row * EIGHTH * v_strides[3];

  for (int begin = piece * SPAN + 8 * group; begin < end; begin += 8 * P) {
    // Keys beyond the last are read as the last, and hidden.
    const device T* key = keys + metal::min(begin + row, L - 1) * k_strides[2];
    metal::simdgroup_matrix<float, 8, 8> scores[QT];
    for (int r = 0; r < QT; ++r)
      scores[r] = metal::simdgroup_matrix<float, 8, 8>(0.0f);
    for (int f = 0; f < D / 16; ++f) {
      const metal::vec<float, 4> four =
          four_at(key + 4 * f * k_strides[3], k_strides[3], near);
      for (int pair = 0; pair < 2; ++pair) {
        metal::simdgroup_matrix<float, 8, 8> a, b;
        a.thread_elements()[0] = four[2 * pair];
        a.thread_elements()[1] = four[2 * pair + 1];
        const int d = (row >> 1) * (D / 4) + 4 * f + 2 * pair + (row & 1);
        for (int r = 0; r < QT; ++r) {
          b.thread_elements()[0] = room[(8 * r + column) * WIDE + d];
          b.thread_elements()[1] = room[(8 * r + column + 1) * WIDE + d];
          metal::simdgroup_multiply_accumulate(scores[r], a, b, scores[r]);
        }
      }
    }
    const int at = begin + row;
    metal::simdgroup_matrix<float, 8, 8> chances[QT];
    for (int r = 0; r < QT; ++r)
      for (int i = 0; i < 2; ++i) {
        bool sees = at < end;
        if (sees && CAUSAL) sees = at <= L - S + tokens[r][i];
        if (sees && !CAUSAL)
          sees = mask[(mask_shape[0] > 1 ? batch * mask_strides[0] : 0) +
                      tokens[r][i] * mask_strides[2] + at * mask_strides[3]];
        const float score = sees ? scores[r].thread_elements()[i] : NONE;
        const float top = metal::max(best[r][i], top_of(score));
        const float from = top == NONE ? 0.0f : top;  // where nothing is visible
        const float shrunk = metal::precise::exp2(best[r][i] - from);
        const float chance = metal::precise::exp2(score - from);
        best[r][i] = top;
        total[r][i] = metal::fma(total[r][i], shrunk, chance);
        chances[r].thread_elements()[i] = chance;
        for (int u = 0; u < EIGHTH; ++u) results[u][r].thread_elements()[i] *= shrunk;
      }
    const device T* one = values + metal::min(begin + column, L - 1) * v_strides[2];
    const device T* two = values + metal::min(begin + column + 1, L - 1) * v_strides[2];
    for (int f = 0; f < EIGHTH / 4; ++f) {
      const metal::vec<float, 4> left =
          four_at(one + 4 * f * v_strides[3], v_strides[3], near);
      const metal::vec<float, 4> right =
          four_at(two + 4 * f * v_strides[3], v_strides[3], near);
      for (int c = 0; c < 4; ++c) {
        metal::simdgroup_matrix<float, 8, 8> a;
        a.thread_elements()[0] = left[c];
        a.thread_elements()[1] = right[c];
        for (int r = 0; r < QT; ++r)
          metal::simdgroup_multiply_accumulate(results[4 * f + c][r], a, chances[r],
                                               results[4 * f + c][r]);
      }
    }
  }

  for (int r = 0; r < QT; ++r)
    for (int i = 0; i < 2; ++i) {
      const float sum = sum_of(total[r][i]);
      if (row == 0) {
        tops[group][8 * r + column + i] = best[r][i];
        totals[group][8 * r + column + i] = sum;
      }
    }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int r = 0; r < QT; ++r)
    for (int i = 0; i < 2; ++i) {
      float top = NONE;
      for (int p = 0; p < P; ++p) top = metal::max(top, tops[p][8 * r + column + i]);
      const float share =
          metal::precise::exp2(best[r][i] - (top == NONE ? 0.0f : top));
      for (int u = 0; u < EIGHTH; ++u) results[u][r].thread_elements()[i] *= share;
    }
  // 64 of D numbers in turn: eight of each row of the matrices.
  for (int chunk = 0; chunk < EIGHTH / 8; ++chunk) {
    for (int u = 0; u < 8; ++u)
      for (int r = 0; r < QT; ++r)
        for (int i = 0; i < 2; ++i)
          room[(group * TILE + 8 * r + column + i) * 64 + row * 8 + u] =
              results[8 * chunk + u][r].thread_elements()[i];
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = 32 * group + lane; i < TILE * 64; i += 32 * P) {
      const int tile = i / 64, d = i % 64 / 8 * EIGHTH + 8 * chunk + i % 8;
      const int r = first + tile;
      float top = NONE, whole = 0.0f, sum = 0.0f;
      for (int p = 0; p < P; ++p) top = metal::max(top, tops[p][tile]);
      for (int p = 0; p < P; ++p) {
        const float share =
            metal::precise::exp2(tops[p][tile] - (top == NONE ? 0.0f : top));
        whole = metal::fma(totals[p][tile], share, whole);
        sum += room[(p * TILE + tile) * 64 + i % 64];
      }
      if (r >= rows) continue;
      const size_t query = (batch * S + r / heads) * H + kv * heads + r % heads;
      if (pieces == 1) {
        // Not a number stays so; a query that sees nothing has nothing.
        out[query * D + d] = O(sum / (whole == 0.0f ? 1.0f : whole));
        continue;
      }
      const size_t queries = size_t(q_shape[0]) * S * H;
      device O* part = out + (piece * queries + query) * (D + 2);
      part[d] = O(sum);
      if (d == 0) {
        part[D] = O(top);
        part[D + 1] = O(whole);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
"""


class Form(NamedTuple):
    """What the kernel is compiled and timed for."""

    size: int
    heads: int
    key_heads: int
    dtype: mx.Dtype

    @property
    def known(self) -> bool:
        """Whether the kernel takes such heads."""
        return self.size in SIZES and self.heads % self.key_heads == 0

    @property
    def name(self) -> str:
        """A name for verdicts and reports."""
        size, heads, pairs, dtype = self.wire()
        return f"attention, {dtype}, {heads} / {pairs} heads of {size}"

    @classmethod
    def read(cls, wire: Sequence[Any]) -> Form:
        """The form that :meth:`wire` described."""
        size, heads, pairs, dtype = wire
        return cls(size, heads, pairs, getattr(mx, dtype))

    def wire(self) -> list[int | str]:
        """The form in values for JSON."""
        dtype = str(self.dtype).rpartition(".")[2]
        return [self.size, self.heads, self.key_heads, dtype]


@cache
def _kernel(scale: float) -> Any:
    # The kernel computes powers of two, so scores are scaled by log2(e).
    source = SOURCE.replace("@SCALE@", f"{scale * log2(e):.9e}")
    arrays = "q", "k", "v", "mask"
    return metal_kernel(
        "attention", source, arrays, ("out",), header=HEADER, copies_views=False
    )


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str,
) -> mx.array:
    """Scaled dot-product attention of few queries.

    Args:
        queries: shape (B, H, S, D).
        keys, values: shape (B, KV, L, D), KV a divisor of H.
        scale: factor of the products of queries and keys.
        mask: boolean, of shape (B or 1, any, S, L), the same for all heads; or
            ``"causal"``: the last query sees all keys, the one before it one fewer.

    Returns:
        Shape (B, H, S, D), the heads of a token one after the other in memory.
    """
    rows, heads, tokens, size = queries.shape
    columns, pairs = keys.shape[2], keys.shape[1]
    pieces = -(-columns // SPAN)
    tiles = 1 if size > 128 or heads // pairs * tokens <= 8 else 2
    blocks = -(-(heads // pairs * tokens) // (8 * tiles))
    count = rows * tokens * heads
    dtype = queries.dtype if pieces == 1 else mx.float32
    causal, nothing = isinstance(mask, str), mx.ones((1, 1, 1, 8), mx.bool_)
    (out,) = _kernel(float(scale))(
        inputs=[queries, keys, values, nothing if causal else mask],
        template=[
            ("T", queries.dtype),
            ("O", dtype),
            ("D", size),
            ("QT", tiles),
            ("P", GROUPS),
            ("SPAN", SPAN),
            ("CAUSAL", causal),
        ],
        grid=(blocks * 32 * GROUPS, pairs, rows * pieces),
        threadgroup=(32 * GROUPS, 1, 1),
        output_shapes=[
            (rows, tokens, heads, size) if pieces == 1 else (pieces, count, size + 2)
        ],
        output_dtypes=[dtype],
    )
    if pieces > 1:
        sums, tops, totals = mx.split(out, [size, size + 1], axis=-1)
        top = tops.max(axis=0)
        share = mx.exp((tops - mx.where(top == -mx.inf, 0, top)) * (1 / log2(e)))
        whole = (totals * share).sum(axis=0)
        out = (sums * share).sum(axis=0) / mx.where(whole == 0, 1, whole)
        out = out.astype(queries.dtype).reshape(rows, tokens, heads, size)
    result: mx.array = out.transpose(0, 2, 1, 3)
    return result


def faults(form: Form, tokens: tuple[int, ...] = (1, 2, 5, 8)) -> str:
    """What is wrong with the kernel on this device; empty: nothing.

    Rows of different lengths, with masks of one head and of all, in one piece and in
    several, are compared with MLX's attention in float32.
    """
    size, heads, pairs, dtype = form
    allowed, scale = 1e-4 if dtype == mx.float32 else 0.02, size**-0.5
    for number, columns in product(tokens, (SPAN // 2 - 3, SPAN + 100)):
        shapes = (heads, number), (pairs, columns), (pairs, columns)
        q, k, v = (
            mx.random.normal((2, h, n, size), key=mx.random.key(i)).astype(dtype)
            for i, (h, n) in enumerate(shapes)
        )
        lengths = mx.array([columns - 30, columns])[:, None, None, None]
        later = mx.arange(1 - number, 1)[:, None]
        sees = mx.arange(columns) < lengths + later
        for mask in (sees, mx.repeat(sees, heads, axis=1), "causal"):
            with mx.stream(mx.cpu):
                wide = (x.astype(mx.float32) for x in (q, k, v))
                exact = mx.fast.scaled_dot_product_attention(
                    *wide, scale=scale, mask=mask
                )
                mx.eval(exact)
            ours = attention(q, k, v, scale, mask).astype(mx.float32)
            off: Any = (mx.abs(ours - exact).max() / mx.abs(exact).max()).item()
            # Compared this way round, NaN is no agreement.
            if not off <= allowed:
                return f"{number} queries of {columns} keys are off by {off:.1e}"
    return ""


#: The numbers of queries that the kernel computes, of forms that were proven and timed.
tokens_of: dict[Form, frozenset[int]] = {}


def takes(queries: mx.array, keys: Any, values: Any, mask: Any) -> bool:
    """Whether this attention is left to :func:`attention`: it is proven and faster."""
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return False
    _, heads, tokens, size = queries.shape
    form = Form(size, heads, keys.shape[1], queries.dtype)
    return (
        tokens in tokens_of.get(form, ())
        and keys.shape[2] >= FEWEST_COLUMNS
        and keys.shape == values.shape
        and queries.dtype == keys.dtype == values.dtype
        and (mask == "causal" if isinstance(mask, str) else _shown(mask, queries, keys))
    )


def _shown(mask: Any, queries: mx.array, keys: mx.array) -> bool:
    """Whether the mask is an array that the kernel reads, the same for all heads."""
    return (
        isinstance(mask, mx.array)
        and mask.dtype == mx.bool_
        and mask.ndim == 4
        and mask.shape[0] in (1, queries.shape[0])
        and mask.shape[1] in (1, queries.shape[1])
        and mask.shape[2:] == (queries.shape[2], keys.shape[2])
    )
