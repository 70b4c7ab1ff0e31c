"""Attention of few queries that reads keys and values once for a group, for Metal.

MLX's kernel for few queries reads a row's keys and values again for each query head and
each token of a verification. Here a threadgroup computes 8 or 16 queries that share
them: the heads of a key head, token after token. Its SIMD groups split the keys, 8 in
turn. Each has its own maximum and sum (the online softmax of Milakov and Gimelshein
2018), and then they are combined. Rows of more than SPAN keys are split between
threadgroups, and combined by MLX's operations.

Scores are K (8, D) times Q transposed, in matrices of 8 x 8, and the result is V (8, D)
transposed times their softmax: what a product gives has the layout that the next one
takes. The order of D within a matrix is chosen so that each lane loads neighbours,
which it unpacks where keys and values are packed. A query's sums run in an order that
depends on the positions of its keys alone. No speed was measured.
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
// Four neighbours from the d-th on, which may lie apart, or are packed in BITS each,
// with a scale and a bias for GROUP of them.
template <int BITS, int GROUP, typename K, typename T>
METAL_FUNC metal::vec<float, 4> four_at(
    const device K* from, const device T* scales, const device T* biases, int d,
    size_t step, bool near) {
  if (BITS > 0) {
    const uint four = uint(from[d * BITS / 32 * step]) >> (d * BITS % 32);
    const uint ones = (1u << BITS) - 1;
    const float scale = float(scales[d / GROUP]), bias = float(biases[d / GROUP]);
    return metal::vec<float, 4>(
        metal::fma(float(four & ones), scale, bias),
        metal::fma(float(four >> BITS & ones), scale, bias),
        metal::fma(float(four >> 2 * BITS & ones), scale, bias),
        metal::fma(float(four >> 3 * BITS & ones), scale, bias));
  }
  from += d * step;
  if (near) {
    const metal::vec<K, 4> v = *reinterpret_cast<const device metal::vec<K, 4>*>(from);
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
  const device K* keys = k + batch * k_strides[0] + kv * k_strides[1];
  const device K* values = v + batch * v_strides[0] + kv * v_strides[1];
  // Scales and biases are stored alike. Where nothing is packed, nothing reads them.
  const size_t k_at = batch * k_scales_strides[0] + kv * k_scales_strides[1];
  const size_t v_at = batch * v_scales_strides[0] + kv * v_scales_strides[1];
  const device T *key_scales = k_scales + k_at, *key_biases = k_biases + k_at;
  const device T *value_scales = v_scales + v_at, *value_biases = v_biases + v_at;

  for (int begin = piece * SPAN + 8 * group; begin < end; begin += 8 * P) {
    // Keys beyond the last are read as the last, and hidden.
    const size_t key = metal::min(begin + row, L - 1);
    metal::simdgroup_matrix<float, 8, 8> scores[QT];
    for (int r = 0; r < QT; ++r)
      scores[r] = metal::simdgroup_matrix<float, 8, 8>(0.0f);
    for (int f = 0; f < D / 16; ++f) {
      const metal::vec<float, 4> four = four_at<BITS, GROUP>(
          keys + key * k_strides[2], key_scales + key * k_scales_strides[2],
          key_biases + key * k_scales_strides[2], column / 2 * (D / 4) + 4 * f,
          k_strides[3], near);
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
    const size_t one = metal::min(begin + column, L - 1);
    const size_t two = metal::min(begin + column + 1, L - 1);
    for (int f = 0; f < EIGHTH / 4; ++f) {
      const int d = row * EIGHTH + 4 * f;
      const metal::vec<float, 4> left = four_at<BITS, GROUP>(
          values + one * v_strides[2], value_scales + one * v_scales_strides[2],
          value_biases + one * v_scales_strides[2], d, v_strides[3], near);
      const metal::vec<float, 4> right = four_at<BITS, GROUP>(
          values + two * v_strides[2], value_scales + two * v_scales_strides[2],
          value_biases + two * v_scales_strides[2], d, v_strides[3], near);
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


# Packed numbers, and scales and biases of groups.
Packed = tuple[mx.array, mx.array, mx.array]


class Form(NamedTuple):
    """What the kernel is compiled and timed for."""

    size: int
    heads: int
    key_heads: int
    dtype: mx.Dtype
    #: Of packed keys and values; 0: they are not packed.
    bits: int = 0
    group_size: int = 0

    @classmethod
    def of(cls, queries: mx.array, keys: mx.array | Packed) -> Form:
        """The form of this attention."""
        _, heads, _, size = queries.shape
        if isinstance(keys, mx.array):
            return cls(size, heads, keys.shape[1], queries.dtype)
        packed, scales, _ = keys
        packing = packed.shape[3] * 32 // size, size // scales.shape[3]
        return cls(size, heads, packed.shape[1], queries.dtype, *packing)

    @property
    def variants(self) -> tuple[Form, ...]:
        """This form, and the packed ones that are tried: by the usual group size."""
        packed = (self._replace(bits=bits, group_size=64) for bits in (8, 4))
        return (self, *packed)

    @property
    def known(self) -> bool:
        """Whether the kernel takes such heads."""
        return self.size in SIZES and self.heads % self.key_heads == 0

    @property
    def name(self) -> str:
        """A name for verdicts and reports."""
        size, heads, pairs, dtype, bits, group = self.wire()
        packed = f", {bits} bits by {group}" if bits else ""
        return f"attention, {dtype}, {heads} / {pairs} heads of {size}{packed}"

    @classmethod
    def read(cls, wire: Sequence[Any]) -> Form:
        """The form that :meth:`wire` described."""
        size, heads, pairs, dtype, *packing = wire
        return cls(size, heads, pairs, getattr(mx, dtype), *packing)

    def wire(self) -> list[int | str]:
        """The form in values for JSON."""
        dtype = str(self.dtype).rpartition(".")[2]
        return [
            *(self.size, self.heads, self.key_heads, dtype),
            *(self.bits, self.group_size),
        ]

    def packed(self, array: mx.array) -> mx.array | Packed:
        """Keys or values as the kernel gets them."""
        if not self.bits:
            return array
        packed, scales, biases = mx.quantize(
            array, group_size=self.group_size, bits=self.bits
        )
        return packed, scales, biases

    def unpacked(self, arrays: mx.array | Packed) -> mx.array:
        """What :meth:`packed` stores, in float32."""
        if isinstance(arrays, mx.array):
            return arrays.astype(mx.float32)
        packed, scales, biases = arrays
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(packed, *wide, group_size=self.group_size, bits=self.bits)


@cache
def _kernel(scale: float) -> Any:
    # The kernel computes powers of two, so scores are scaled by log2(e).
    source = SOURCE.replace("@SCALE@", f"{scale * log2(e):.9e}")
    packed = "k_scales", "k_biases", "v_scales", "v_biases"
    arrays = "q", "mask", "k", "v", *packed
    return metal_kernel(
        "attention", source, arrays, ("out",), header=HEADER, copies_views=False
    )


def attention(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    scale: float,
    mask: mx.array | str,
) -> mx.array:
    """Scaled dot-product attention of few queries.

    Args:
        queries: shape (B, H, S, D).
        keys, values: shape (B, KV, L, D), KV a divisor of H; or packed by
            ``mx.quantize``, with scales and biases.
        scale: factor of the products of queries and keys.
        mask: boolean, of shape (B or 1, any, S, L), the same for all heads; or
            ``"causal"``: the last query sees all keys, the one before it one fewer.

    Returns:
        Shape (B, H, S, D), the heads of a token one after the other in memory.
    """
    rows, heads, tokens, size = queries.shape
    form = Form.of(queries, keys)
    # Where nothing is packed, the kernel reads no scales.
    nothing = queries, queries
    k, *k_more = (keys, *nothing) if isinstance(keys, mx.array) else keys
    v, *v_more = (values, *nothing) if isinstance(values, mx.array) else values
    columns, pairs = k.shape[2], k.shape[1]
    pieces = -(-columns // SPAN)
    tiles = 1 if size > 128 or heads // pairs * tokens <= 8 else 2
    blocks = -(-(heads // pairs * tokens) // (8 * tiles))
    count = rows * tokens * heads
    dtype = queries.dtype if pieces == 1 else mx.float32
    causal, all_seen = isinstance(mask, str), mx.ones((1, 1, 1, 8), mx.bool_)
    (out,) = _kernel(float(scale))(
        inputs=[queries, all_seen if causal else mask, k, v, *k_more, *v_more],
        template=[
            ("T", queries.dtype),
            ("K", k.dtype),
            ("O", dtype),
            ("D", size),
            ("QT", tiles),
            ("P", GROUPS),
            ("SPAN", SPAN),
            ("CAUSAL", causal),
            ("BITS", form.bits),
            ("GROUP", form.group_size or 1),
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
    size, heads, pairs, dtype, *_ = form
    allowed, scale = 1e-4 if dtype == mx.float32 else 0.02, size**-0.5
    for number, columns in product(tokens, (SPAN // 2 - 3, SPAN + 100)):
        shapes = (heads, number), (pairs, columns), (pairs, columns)
        q, *dense = (
            mx.random.normal((2, h, n, size), key=mx.random.key(i)).astype(dtype)
            for i, (h, n) in enumerate(shapes)
        )
        k, v = map(form.packed, dense)
        lengths = mx.array([columns - 30, columns])[:, None, None, None]
        later = mx.arange(1 - number, 1)[:, None]
        sees = mx.arange(columns) < lengths + later
        for mask in (sees, mx.repeat(sees, heads, axis=1), "causal"):
            with mx.stream(mx.cpu):
                wide = q.astype(mx.float32), form.unpacked(k), form.unpacked(v)
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
    all_keys, all_values = (
        (x,) if isinstance(x, mx.array) else tuple(x) for x in (keys, values)
    )
    if len(all_keys) not in (1, 3) or len(all_keys) != len(all_values):
        return False
    tokens, key = queries.shape[2], all_keys[0]
    form = Form.of(queries, keys)
    return (
        tokens in tokens_of.get(form, ())
        and key.shape[2] >= FEWEST_COLUMNS
        and all(k.shape == v.shape for k, v in zip(all_keys, all_values, strict=True))
        and queries.dtype == all_keys[-1].dtype == all_values[-1].dtype
        and (mask == "causal" if isinstance(mask, str) else _shown(mask, queries, key))
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
