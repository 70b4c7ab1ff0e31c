"""The source of the kernels of :mod:`.decode_attention`."""

from __future__ import annotations

from math import e, log2

# out = softmax(scale q k^T + mask) v; q is (B, H, S, D), k and v (B, KV, L, D), out
# (B, S, H, D).
#
# A block computes 16 queries that read the same keys, and up to SPAN of these keys. The
# queries are the H / KV heads of a token, token after token. Its warps split the keys,
# 16 in turn. Each warp has its own maximum and sum (the online softmax of Milakov and
# Gimelshein 2018), and the warps then combine their results. In a tensor core's product
# (m16n8k16) the queries are the 16 rows. The dimension that is summed may be in any
# order as long as both sides agree, and so may the columns of the result. So a thread
# always reads 8 neighbours of a row at once.
SOURCE = """
  constexpr int WIDE = 68;  // 64 numbers, and 4 for other banks
  const float NONE = __int_as_float(0xff800000);  // minus infinity
  const int S = q_shape[2], H = q_shape[1], L = k_shape[2];
  const int heads = H / k_shape[1], rows = heads * S;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, part = lane % 4;
  const int kv = blockIdx.y, first = blockIdx.x * 16;
  const int pieces = gridDim.z / q_shape[0], piece = blockIdx.z % pieces;
  const size_t batch = blockIdx.z / pieces;
  const int end = min(L, (piece + 1) * SPAN);

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

  for (int begin = piece * SPAN + warp * 16; begin < end; begin += WARPS * 16) {
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

  __shared__ float tops[WARPS][16], totals[WARPS][16], whole[16], peak[16];
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
    if (warp == 0 && part == 0) {
      whole[i * 8 + group] = sum;
      peak[i * 8 + group] = top;
    }
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
        if (pieces == 1) {
          // Not a number stays so; a query that sees nothing has nothing.
          const float all = whole[in_tile] == 0.0f ? 1.0f : whole[in_tile];
          out[row * D + c * 64 + d] = static_cast<T>(sum / all);
          continue;
        }
        // A block's part of the result; after all parts, each query's largest score
        // and sum.
        float* const results = reinterpret_cast<float*>(out);
        const size_t queries = static_cast<size_t>(q_shape[0]) * S * H;
        const size_t at_piece = piece * queries + row;
        results[at_piece * D + c * 64 + d] = sum;
        if (c * 64 + d == 0) {
          float* const seen = results + pieces * queries * D;
          seen[at_piece * 2] = peak[in_tile];
          seen[at_piece * 2 + 1] = whole[in_tile];
        }
      }
    }
    __syncthreads();
  }
"""
# What hides a key: a boolean mask, or a mask that is added.
_AT = "mask[(mask_shape[0] > 1 ? batch * mask_strides[0] : 0) + "
_AT += "asks * mask_strides[2] + at * mask_strides[3]]"
MASKS = {
    "bool": f"if (!{_AT}) score[t][i] = NONE;",
    "added": f"score[t][i] += {log2(e)!r}f * static_cast<float>({_AT});",
}

# Combines results (P, N, D) and seen (P, N, 2), both in found, into out (N, D).
GATHER = """
  const int pieces = found_shape[0];
  const size_t rows = found_shape[1];
  const float* const results = reinterpret_cast<const float*>(found);
  const float* const seen = results + pieces * rows * D;
  const size_t at = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (at >= rows * D) return;
  const size_t row = at / D;
  const float NONE = __int_as_float(0xff800000);  // minus infinity
  float top = NONE, total = 0.0f, sum = 0.0f;
  for (int p = 0; p < pieces; ++p) top = fmaxf(top, seen[(p * rows + row) * 2]);
  const float from = top == NONE ? 0.0f : top;
  for (int p = 0; p < pieces; ++p) {
    const float share = exp2f(seen[(p * rows + row) * 2] - from);
    total += share * seen[(p * rows + row) * 2 + 1];
    sum += share * results[p * rows * D + at];
  }
  out[at] = static_cast<T>(sum / (total == 0.0f ? 1.0f : total));
"""
