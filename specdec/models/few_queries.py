"""Attention of few queries by a CUDA kernel of our own, launched as one node.

A decode step has one query a row, or k + 1, and a mask, since rows differ in length.
MLX's CUDA backend leaves that to cuDNN, whose graph takes the host 15 to 20
microseconds to launch, once per layer, and which reads keys again for every head that
shares them; with heads of 256 it does not take it at all, and attention is six
operations. A kernel is one node.

Each query's result is summed in an order that depends on the positions of its keys
alone. So it has the same bits whatever is computed beside it (other rows, other tokens
of a verification) and however many columns are read behind its last one.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from math import e, log2
from typing import Any

import mlx.core as mx

from .skinny import MMA, TYPES

logger = logging.getLogger(__name__)

# What the kernel is given: up to MOST_TOKENS queries of a row (more are a prompt's),
# and heads of these sizes, with up to so many keys (``None``: any number). Of the
# widest, more take longer than MLX's operations (benchmarks/results/attention-h200.md).
MOST_TOKENS = 16
MOST_COLUMNS: dict[int, int | None] = {64: None, 128: None, 256: 768}
# Warps of a block; queries of a tile, and keys that a warp takes at a time: what a
# tensor core's products take.
WARPS, TILE = 8, 16

# out = softmax(scale q k^T + mask) v; q is (B, H, S, D), k and v (B, KV, L, D), out
# (B, S, H, D).
#
# A block computes 16 queries that read the same keys: the H / KV heads of a token, and
# the tokens, one behind the other. Its warps share the keys among themselves, 16 in
# turn, each with a maximum and a sum of its own (the online softmax of Milakov and
# Gimelshein 2018), and put together what they found. In a tensor core's product
# (m16n8k16) the queries are the 16 rows. What is summed over may be in any order as
# long as both sides agree, and so may the columns of the result: so a thread reads 8
# neighbours of a row at once, everywhere.
_SOURCE = """
  constexpr int WIDE = 68;  // 64 numbers, and 4 for other banks
  const float NONE = __int_as_float(0xff800000);  // minus infinity
  const int S = q_shape[2], H = q_shape[1], L = k_shape[2];
  const int heads = H / k_shape[1], rows = heads * S;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, part = lane % 4;
  const int kv = blockIdx.y, b = blockIdx.z, first = blockIdx.x * 16;
  const size_t batch = b;

  // Eight neighbours: at once, or one by one where something lies between them, or
  // where they begin anywhere. Caches are not so, but nobody says what a model does.
  auto at_once = [](const T* from, size_t, unsigned* into) {
    const uint4 found = __ldg(reinterpret_cast<const uint4*>(from));
    into[0] = found.x, into[1] = found.y, into[2] = found.z, into[3] = found.w;
  };
  auto singly = [](const T* from, size_t step, unsigned* into) {
    T found[8];
    for (int i = 0; i < 8; ++i) found[i] = from[i * step];
    memcpy(into, found, 16);
  };
  auto near = [](const T* from, const auto& strides) {
    size_t all = reinterpret_cast<size_t>(from) / sizeof(T);
    for (int i = 0; i < 3; ++i) all |= strides[i];
    return strides[3] == 1 && all % 8 == 0;
  };
  auto pair = [](float low, float high) {
    const T both[2] = {static_cast<T>(low), static_cast<T>(high)};
    unsigned packed;
    memcpy(&packed, both, 4);
    return packed;
  };

  // Queries beyond the last are read as the last, and not written.
  unsigned query[D / 32][2][4];
  int token[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = min(first + i * 8 + group, rows - 1);
    token[i] = r / heads;
    const T* from = q + batch * q_strides[0] + (kv * heads + r % heads) * q_strides[1] +
                    token[i] * q_strides[2];
    const bool together = near(q, q_strides);
    #pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const T* some = from + (c * 32 + part * 8) * q_strides[3];
      if (together) at_once(some, 1, query[c][i]);
      else singly(some, q_strides[3], query[c][i]);
    }
  }
  const T* keys = k + batch * k_strides[0] + kv * k_strides[1];
  const T* values = v + batch * v_strides[0] + kv * v_strides[1];
  const bool together = near(k, k_strides) && near(v, v_strides);

  float sums[D / 8][4];
  #pragma unroll
  for (int j = 0; j < D / 8; ++j)
    #pragma unroll
    for (int c = 0; c < 4; ++c) sums[j][c] = 0.0f;
  float best[2] = {NONE, NONE}, total[2] = {0.0f, 0.0f};

  for (int begin = warp * 16; begin < L; begin += WARPS * 16) {
    // Keys beyond the last are read as the last, and hidden.
    unsigned key[2][D / 32][4], value[D / 64][4][4];
    auto fetch = [&](auto read) {
      #pragma unroll
      for (int t = 0; t < 2; ++t) {
        const T* from = keys + min(begin + t * 8 + group, L - 1) * k_strides[2];
        #pragma unroll
        for (int c = 0; c < D / 32; ++c)
          read(from + (c * 32 + part * 8) * k_strides[3], k_strides[3], key[t][c]);
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = begin + i / 2 * 8 + 2 * part + i % 2;
        const T* from = values + min(at, L - 1) * v_strides[2];
        #pragma unroll
        for (int c = 0; c < D / 64; ++c)
          read(from + (c * 64 + group * 8) * v_strides[3], v_strides[3], value[c][i]);
      }
    };
    if (together) fetch(at_once);
    else fetch(singly);

    float score[2][4];
    #pragma unroll
    for (int t = 0; t < 2; ++t) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) score[t][i] = 0.0f;
      #pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        SPECDEC_MMA(score[t], query[c][0][0], query[c][1][0], query[c][0][1],
                    query[c][1][1], key[t][c][0], key[t][c][1]);
        SPECDEC_MMA(score[t], query[c][0][2], query[c][1][2], query[c][0][3],
                    query[c][1][3], key[t][c][2], key[t][c][3]);
      }
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = begin + t * 8 + 2 * part + i % 2, asks = token[i / 2];
        score[t][i] *= static_cast<float>(@SCALE@);
        if (at >= L) {
          score[t][i] = NONE;
        } else {
          @MASK@
        }
      }
    }

    // By row of the tile: two scores of this thread in each half, 16 of the quad.
    float chance[2][4];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = best[i];
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        top = fmaxf(top, fmaxf(score[t][2 * i], score[t][2 * i + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float from = top == NONE ? 0.0f : top;  // where nothing is visible
      const float shrunk = exp2f(best[i] - from);
      best[i] = top;
      total[i] *= shrunk;
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int c = 2 * i; c < 2 * i + 2; ++c) {
          chance[t][c] = exp2f(score[t][c] - from);
          total[i] += chance[t][c];
        }
      #pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        sums[j][2 * i] *= shrunk;
        sums[j][2 * i + 1] *= shrunk;
      }
    }

    // What a product gave has the layout that the next one takes.
    const unsigned a0 = pair(chance[0][0], chance[0][1]);
    const unsigned a1 = pair(chance[0][2], chance[0][3]);
    const unsigned a2 = pair(chance[1][0], chance[1][1]);
    const unsigned a3 = pair(chance[1][2], chance[1][3]);
    #pragma unroll
    for (int c = 0; c < D / 64; ++c)
      #pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned half = j % 2 ? 0x7632u : 0x5410u;
        SPECDEC_MMA(sums[c * 8 + j], a0, a1, a2, a3,
                    __byte_perm(value[c][0][j / 2], value[c][1][j / 2], half),
                    __byte_perm(value[c][2][j / 2], value[c][3][j / 2], half));
      }
  }

  __shared__ float tops[WARPS][16], totals[WARPS][16], whole[16];
  __shared__ float found[WARPS][16][WIDE];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
    total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
    if (part == 0) {
      tops[warp][i * 8 + group] = best[i];
      totals[warp][i * 8 + group] = total[i];
    }
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = NONE, sum = 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w][i * 8 + group]);
    const float from = top == NONE ? 0.0f : top;
    #pragma unroll
    for (int w = 0; w < WARPS; ++w)
      sum += totals[w][i * 8 + group] * exp2f(tops[w][i * 8 + group] - from);
    if (warp == 0 && part == 0) whole[i * 8 + group] = sum;
    const float share = exp2f(best[i] - from);
    #pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      sums[j][2 * i] *= share;
      sums[j][2 * i + 1] *= share;
    }
  }
  #pragma unroll
  for (int c = 0; c < D / 64; ++c) {
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      #pragma unroll
      for (int j = 0; j < 8; ++j)
        found[warp][i / 2 * 8 + group][part * 16 + i % 2 * 8 + j] = sums[c * 8 + j][i];
    __syncthreads();
    for (int at = threadIdx.x; at < 16 * 64; at += WARPS * 32) {
      const int in_tile = at / 64, d = at % 64, r = first + in_tile;
      float sum = 0.0f;
      #pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += found[w][in_tile][d];
      if (r < rows) {
        const size_t row = (batch * S + r / heads) * H + kv * heads + r % heads;
        // Not a number stays so; a query that sees nothing has nothing.
        const float all = whole[in_tile] == 0.0f ? 1.0f : whole[in_tile];
        out[row * D + c * 64 + d] = static_cast<T>(sum / all);
      }
    }
    __syncthreads();
  }
"""
# What hides a key: an array of booleans, one to be added, or that it comes later.
_AT = "mask[(mask_shape[0] > 1 ? batch * mask_strides[0] : 0) + "
_AT += "asks * mask_strides[2] + at * mask_strides[3]]"
_MASKS = {
    "bool": f"if (!{_AT}) score[t][i] = NONE;",
    "added": f"score[t][i] += {log2(e)!r}f * static_cast<float>({_AT});",
    "causal": "if (at > L - S + asks) score[t][i] = NONE;",
}


@cache
def _kernel(dtype: mx.Dtype, mask: str, scale: float) -> Any:
    header = MMA.format(TYPES[dtype])
    # Powers of two are computed, of which a score's logarithm is one.
    source = _SOURCE.replace("@MASK@", _MASKS[mask])
    source = source.replace("@SCALE@", f"{scale * log2(e)!r}")
    # MLX keeps what it compiled on disk by name.
    version = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"specdec_attention_{TYPES[dtype]}_{mask}_{version}",
        input_names=["q", "k", "v", *([] if mask == "causal" else ["mask"])],
        output_names=["out"],
        source=source,
        header=header,
        ensure_row_contiguous=False,
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
        scale: of the products of queries and keys.
        mask: shape (B or 1, 1, S, L), boolean, or of the queries' type and added; or
            ``"causal"``: the last query sees all keys, the one before it one fewer.

    Returns:
        Shape (B, H, S, D), the heads of a token one behind the other in memory. What
        it can compute :func:`takes` says.
    """
    rows, heads, tokens, size = queries.shape
    kind = "causal"
    inputs = [queries, keys, values]
    if not isinstance(mask, str):
        kind = "bool" if mask.dtype == mx.bool_ else "added"
        inputs.append(mask)
    threads = 32 * WARPS
    tiles = -(-heads // keys.shape[1] * tokens // TILE)
    out: mx.array = _kernel(queries.dtype, kind, float(scale))(
        inputs=inputs,
        template=[("T", queries.dtype), ("D", size), ("WARPS", WARPS)],
        grid=(tiles * threads, keys.shape[1], rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, tokens, heads, size)],
        output_dtypes=[queries.dtype],
    )[0]
    return out.transpose(0, 2, 1, 3)


def takes(queries: mx.array, keys: Any, values: Any, mask: Any) -> bool:
    """Whether this attention is left to :func:`attention`.

    Only of head sizes that :func:`proven` was asked about. The queries of one row with
    nothing to hide have a fast kernel of MLX's.
    """
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return False
    _, heads, tokens, size = queries.shape
    return (
        0 < tokens <= MOST_TOKENS
        and _proven.get(size, False)
        and 0 < keys.shape[2] <= (MOST_COLUMNS[size] or keys.shape[2])
        and keys.shape == values.shape
        and keys.shape[0] == queries.shape[0]
        and keys.shape[-1] == size
        and heads % keys.shape[1] == 0
        and queries.dtype in TYPES
        and queries.dtype == keys.dtype == values.dtype
        and (_shown(mask, queries, keys) or (mask == "causal" and tokens > 1))
    )


def _shown(mask: Any, queries: mx.array, keys: mx.array) -> bool:
    """Whether the mask is an array that the kernel reads."""
    return (
        isinstance(mask, mx.array)
        and mask.dtype in (mx.bool_, queries.dtype)
        and mask.ndim == 4
        and mask.shape[0] in (1, queries.shape[0])
        and mask.shape[1:] == (1, queries.shape[2], keys.shape[2])
    )


# Head sizes for which the kernel was tried, and whether it is right there. Functions
# that are traced ask for it, and nothing can be tried in them.
_proven: dict[int, bool] = {}


def proven(size: int) -> bool:
    """Whether the kernel runs on this device for heads of a size, and is right.

    It is tried when that is first asked, not within a function that is traced.
    """
    if size not in _proven:
        _proven[size] = size in MOST_COLUMNS and _agrees(size)
    return _proven[size]


def _agrees(size: int) -> bool:
    """Whether the kernel computes what MLX does."""
    columns = {64: 40, 128: 300}.get(size, 150)
    shapes = [(2, 6, 3, size), (2, 2, columns, size), (2, 2, columns, size)]
    q, k, v = (
        mx.random.normal(shape, key=mx.random.key(i)).astype(mx.bfloat16)
        for i, shape in enumerate(shapes)
    )
    lengths = mx.array([columns - 30, columns])[:, None, None, None]
    seen = mx.arange(columns) < lengths - 2 + mx.arange(3)[:, None]
    added = mx.where(seen, 0.0, -mx.inf).astype(mx.bfloat16)
    exact = mx.fast.scaled_dot_product_attention(
        *(x.astype(mx.float32) for x in (q, k, v)), scale=0.1, mask=seen
    )
    try:
        # What caches make; booleans are read in the same way.
        for mask in (added, seen) if size == 64 else (added,):
            found = attention(q, k, v, 0.1, mask).astype(mx.float32)
            # Not the other way round: NaN is no agreement.
            off = mx.abs(found - exact).max()
            if not (off <= 0.02 * mx.abs(exact).max()).item():
                return False
        return True
    except (RuntimeError, ValueError) as error:
        logger.debug("no kernel for attention of heads of %d: %s", size, error)
        return False
