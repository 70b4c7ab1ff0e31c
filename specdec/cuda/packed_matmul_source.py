"""The CUDA source of products with packed weights, see :mod:`.packed_matmul`.

A warp computes 32 columns of the result, for 8 * WIDE rows of x; a block's warps have
their own columns and share the rows of x. gridDim.y blocks split K, in turns of TURN
columns, and a second kernel adds up their sums: these lie in ``out`` as float32.

In a tensor core's product (m16n8k16) the 16 are rows of the matrix and the 8 are rows
of x. A weight is scale * q + bias: the tensor cores multiply q, which 16 bits hold
exactly, and every 32 or 64 columns, all of one group, the sum is scaled in float32.
The bias, and the number that q was added to, multiply the sum of x over those columns,
which is a product with ones.

A thread loads 16 bytes of a row. The four threads of a row then exchange words, so that
at any time they hold columns of the same 32. The order of k does not matter as long as
weights and x agree; x is laid out in that order in shared memory.
"""

HEADER = """
template <class T>
__device__ __forceinline__ float specdec_float(unsigned bits) {
  const unsigned short half = static_cast<unsigned short>(bits);
  return static_cast<float>(*reinterpret_cast<const T*>(&half));
}

// Of weights, which are read once. No branch may lie between loads, here or elsewhere:
// what comes after it would wait for what was asked for before.
__device__ __forceinline__ void specdec_weights(uint4 (&words)[2][2],
                                                const unsigned* const (&rows)[2][2],
                                                int at) {
  #pragma unroll
  for (int t = 0; t < 2; ++t)
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      words[t][i] = __ldcs(reinterpret_cast<const uint4*>(rows[t][i] + at));
}

// The i-th of eight numbers of 16 bits.
__device__ __forceinline__ unsigned specdec_of_eight(const uint4& v, int i) {
  const unsigned a = i & 2 ? v.y : v.x, b = i & 2 ? v.w : v.z, c = i & 4 ? b : a;
  return i & 1 ? c >> 16 : c & 0xffffu;
}

// Of four threads with four words each: word j of the i-th becomes word i of the j-th.
__device__ __forceinline__ uint4 specdec_exchange(uint4 v, int part) {
  const bool upper = part & 2, odd = part & 1;
  unsigned a = upper ? v.x : v.z, b = upper ? v.y : v.w;
  a = __shfl_xor_sync(~0u, a, 2);
  b = __shfl_xor_sync(~0u, b, 2);
  if (upper) { v.x = a; v.y = b; } else { v.z = a; v.w = b; }
  a = odd ? v.x : v.y;
  b = odd ? v.z : v.w;
  a = __shfl_xor_sync(~0u, a, 1);
  b = __shfl_xor_sync(~0u, b, 1);
  if (odd) { v.x = a; v.z = b; } else { v.y = a; v.w = b; }
  return v;
}
"""

# How a word of packed numbers becomes pairs of 16-bit numbers; what has been added to
# each of them; and in which order a thread's four or eight columns are paired.
_NIBBLES = """
  // Of eight numbers the i-th and the (i + 4)-th; the four bits become the first of a
  // mantissa, whose number is 16 plus what they were.
  out[0] = (word << {0} & {mask}u) | {sixteen}u;
  out[1] = (word {1} & {mask}u) | {sixteen}u;
  out[2] = (word >> {2} & {mask}u) | {sixteen}u;
  out[3] = (word >> {3} & {mask}u) | {sixteen}u;
"""
_UNPACK = """
#define SPECDEC_ADDED {added}
#define SPECDEC_ONES {ones}u
__device__ __forceinline__ void specdec_unpack(unsigned word, unsigned* out) {{
{body}
}}
"""
_BYTES = """
  // 2^23 + q in float32; less 2^23, the upper 16 bits hold q.
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = __uint_as_float(
        __byte_perm(word, 0x4B000000u, i ? 0x7442 : 0x7440)) - 8388608.0f;
    const float b = __uint_as_float(
        __byte_perm(word, 0x4B000000u, i ? 0x7443 : 0x7441)) - 8388608.0f;
    out[i] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
  }
"""
_BYTES_HALF = """
  // The lower byte of 1024 + q.
  out[0] = __byte_perm(word, 0x64646464u, 0x4140);
  out[1] = __byte_perm(word, 0x64646464u, 0x4342);
"""


def unpacking(bits: int, half: bool) -> str:
    """The header that unpacks words of ``bits`` a number, to float16 if ``half``."""
    ones = "0x3C003C00" if half else "0x3F803F80"
    if bits == 8:
        body = _BYTES_HALF if half else _BYTES
        return _UNPACK.format(added="1024.0f" if half else "0.0f", ones=ones, body=body)
    if half:
        body = _NIBBLES.format(6, "<< 2", 2, 6, mask="0x03C003C0", sixteen="0x4C004C00")
    else:
        body = _NIBBLES.format(3, ">> 1", 5, 9, mask="0x00780078", sixteen="0x41804180")
    return _UNPACK.format(added="16.0f", ones=ones, body=body)


SOURCE = """
  constexpr int TURN = 512 / BITS;  // columns of 16 bytes, of four threads
  // Blocks of 32 columns that are scaled together, and such steps in a turn.
  constexpr int FOLD = GROUP == 32 ? 1 : 2, STEPS = TURN / 32 / FOLD;
  constexpr int GROUPS = GROUP < TURN ? TURN / GROUP : 1;  // in a turn
  // Turns of which x is held at a time, and what of it the warps lay out: a unit is
  // eight rows in the columns of a step.
  constexpr int TURNS = WIDE == 1 ? 512 / TURN : 1024 / TURN / WIDE;
  constexpr int UNITS = TURNS * WIDE * STEPS, OWN = (UNITS + WARPS - 1) / WARPS;
  constexpr int TOGETHER = WIDE == 1 ? 1 : 2;

  const int K = x_shape[x_ndim - 1], N = weight_shape[0], groups = scales_shape[1];
  int M = 1;
  for (int i = 0; i + 1 < x_ndim; ++i) M *= x_shape[i];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int of_eight = lane / 4, part = lane % 4;
  const long long turns = (K + TURN - 1) / TURN;
  const int begin = turns * blockIdx.y / gridDim.y;
  const int end = turns * (blockIdx.y + 1) / gridDim.y;
  const int first = (blockIdx.x * WARPS + warp) * 32, top = blockIdx.z * 8 * WIDE;
  const int used = min(WIDE, (M - top + 7) / 8);
  // Where blocks share K, a block's sums.
  float* const pieces =
      reinterpret_cast<float*>(out) + static_cast<size_t>(blockIdx.y) * M * N;
  const unsigned short* const numbers = reinterpret_cast<const unsigned short*>(x);
  // Where 16 bytes cannot be loaded at once, each thread computes some of the result.
  if ((reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(weight) |
       reinterpret_cast<size_t>(scales) | reinterpret_cast<size_t>(biases)) % 16) {
    const int columns = min(WARPS * 32, N - static_cast<int>(blockIdx.x) * WARPS * 32);
    for (int one = threadIdx.x; one < columns * used * 8; one += WARPS * 32) {
      const int at = blockIdx.x * WARPS * 32 + one % columns, m = top + one / columns;
      if (m >= M) break;
      float sum = 0.0f;
      for (int k = begin * TURN; k < min(end * TURN, K); ++k) {
        const size_t word = static_cast<size_t>(at) * (K / 32 * BITS) + k * BITS / 32;
        const unsigned q = weight[word] >> k % (32 / BITS) * BITS & ((1 << BITS) - 1);
        const size_t g = static_cast<size_t>(at) * groups + k / GROUP;
        const float w = fmaf(static_cast<float>(scales[g]), static_cast<float>(q),
                             static_cast<float>(biases[g]));
        sum = fmaf(static_cast<float>(x[static_cast<size_t>(m) * K + k]), w, sum);
      }
      if (gridDim.y > 1) {
        pieces[static_cast<size_t>(m) * N + at] = sum;
        continue;
      }
      @WRITE@
    }
    return;
  }

  // Rows beyond the last are read as the last, and not written.
  const unsigned* rows[2][2];
  #pragma unroll
  for (int t = 0; t < 2; ++t)
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      rows[t][i] = weight +
          static_cast<size_t>(min(first + t * 16 + i * 8 + of_eight, N - 1)) *
              (K / 32 * BITS);
  // Of the four rows of four threads, each reads the scales of one.
  const size_t scaled =
      static_cast<size_t>(min(first + part * 8 + of_eight, N - 1)) * groups;
  const unsigned short* const its_scales =
      reinterpret_cast<const unsigned short*>(scales) + scaled;
  const unsigned short* const its_biases =
      reinterpret_cast<const unsigned short*>(biases) + scaled;

  __shared__ uint4 laid[2][UNITS][FOLD][32];
  __shared__ float2 totals[2][UNITS][4];

  float sums[2][WIDE][4];
  #pragma unroll
  for (int t = 0; t < 2; ++t)
    #pragma unroll
    for (int j = 0; j < WIDE; ++j)
      #pragma unroll
      for (int c = 0; c < 4; ++c) sums[t][j][c] = 0.0f;

  const int own = part * TURN / 4;  // a thread's columns of a turn
  uint4 now[2][2], next[2][2], scales8[2], scales8_next[2];
  unsigned both[GROUPS], both_next[GROUPS];
  // Loads a turn's weights and scales. Scales are loaded for eight groups at a time,
  // where the next eight begin, if all rows allow that (EIGHTS).
  auto load = [&](int asked) {
    const int column = asked * TURN + own, first_group = asked * TURN / GROUP;
    specdec_weights(next, rows, (column < K ? column : 0) * BITS / 32);
    if (EIGHTS) {
      const int at = first_group / 8 * 8;
      if (first_group % 8 == 0 || asked == begin) {
        scales8_next[0] = __ldg(reinterpret_cast<const uint4*>(its_scales + at));
        scales8_next[1] = __ldg(reinterpret_cast<const uint4*>(its_biases + at));
      }
    } else {
      #pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const int at = min(first_group + i, groups - 1);
        both_next[i] = __ldg(its_scales + at) |
            static_cast<unsigned>(__ldg(its_biases + at)) << 16;
      }
    }
  };
  load(begin);

  int side = 1;
  for (int chunk = begin - TURNS; chunk < end; chunk += TURNS, side ^= 1) {
    // The next turns' x: asked for here, laid out when these are done.
    uint4 taken[OWN][FOLD];
    #pragma unroll
    for (int o = 0; o < OWN; ++o) {
      const int unit = o * WARPS + warp, j = unit / STEPS % WIDE;
      const int turn = chunk + TURNS + unit / STEPS / WIDE;
      const int m = top + j * 8 + of_eight;
      const unsigned short* const row =
          numbers + static_cast<size_t>(min(m, M - 1)) * K;
      #pragma unroll
      for (int f = 0; f < FOLD; ++f) {
        const int from = turn * TURN + (unit % STEPS * FOLD + f) * 32;
        const unsigned short* const at = row + (from < K ? from : 0);
        taken[o][f] = make_uint4(0u, 0u, 0u, 0u);
        if (unit < UNITS && turn < end && from < K && m < M) {
          if (BITS == 4) {
            taken[o][f] = __ldg(reinterpret_cast<const uint4*>(at + part * 8));
          } else {
            const uint2 a = __ldg(reinterpret_cast<const uint2*>(at + part * 4));
            const uint2 b = __ldg(reinterpret_cast<const uint2*>(at + 16 + part * 4));
            taken[o][f] = make_uint4(a.x, a.y, b.x, b.y);
          }
        }
      }
    }

    const int until = chunk < begin ? chunk : min(chunk + TURNS, end);
    for (int turn = chunk; turn < until; ++turn) {
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int i = 0; i < 2; ++i) now[t][i] = specdec_exchange(next[t][i], part);
      const int g = turn * TURN / GROUP;
      if (EIGHTS && (g % 8 == 0 || turn == begin)) {
        scales8[0] = scales8_next[0];
        scales8[1] = scales8_next[1];
      }
      #pragma unroll
      for (int i = 0; i < GROUPS; ++i)
        both[i] = !EIGHTS ? both_next[i]
                          : specdec_of_eight(scales8[0], (g + i) % 8) |
                                specdec_of_eight(scales8[1], (g + i) % 8) << 16;
      load(min(turn + 1, end - 1));
      #pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        // The matrix: two products of 16 columns for every 32.
        unsigned q[2][FOLD][2][4];
        #pragma unroll
        for (int t = 0; t < 2; ++t)
          #pragma unroll
          for (int f = 0; f < FOLD; ++f)
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint4 v = now[t][i];
              const int b = step * FOLD + f;
              unsigned pairs_of[4];
              if (BITS == 4) {
                specdec_unpack(b == 0 ? v.x : b == 1 ? v.y : b == 2 ? v.z : v.w,
                               pairs_of);
              } else {
                specdec_unpack(b == 0 ? v.x : v.z, pairs_of);
                specdec_unpack(b == 0 ? v.y : v.w, pairs_of + 2);
              }
              // PTX's order: the upper eight rows, the lower, then eight columns on.
              #pragma unroll
              for (int c = 0; c < 4; ++c) q[t][f][c / 2][c % 2 * 2 + i] = pairs_of[c];
            }
        float scale[2][2], added[2][2];
        #pragma unroll
        for (int t = 0; t < 2; ++t)
          #pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned its = __shfl_sync(
                ~0u, both[GROUPS == 1 ? 0 : step * FOLD * 32 / GROUP], t * 2 + i, 4);
            scale[t][i] = specdec_float<T>(its & 0xffffu);
            added[t][i] =
                fmaf(-SPECDEC_ADDED, scale[t][i], specdec_float<T>(its >> 16));
          }
        #pragma unroll
        for (int some = 0; some < WIDE; some += TOGETHER) {
          if (WIDE > 1 && some >= used) continue;
          #pragma unroll
          for (int j = some; j < some + TOGETHER; ++j) {
            const int unit = ((turn - chunk) * WIDE + j) * STEPS + step;
            float found[2][4];
            #pragma unroll
            for (int t = 0; t < 2; ++t)
              #pragma unroll
              for (int c = 0; c < 4; ++c) found[t][c] = 0.0f;
            #pragma unroll
            for (int f = 0; f < FOLD; ++f) {
              const uint4 v = laid[side][unit][f][lane];
              #pragma unroll
              for (int t = 0; t < 2; ++t) {
                const unsigned (&a)[2][4] = q[t][f];
                SPECDEC_MMA(found[t], a[0][0], a[0][1], a[0][2], a[0][3], v.x, v.y);
                SPECDEC_MMA(found[t], a[1][0], a[1][1], a[1][2], a[1][3], v.z, v.w);
              }
            }
            const float2 total = totals[side][unit][part];
            #pragma unroll
            for (int t = 0; t < 2; ++t)
              #pragma unroll
              for (int c = 0; c < 4; ++c)
                sums[t][j][c] = fmaf(
                    scale[t][c / 2], found[t][c],
                    fmaf(added[t][c / 2], c % 2 ? total.y : total.x, sums[t][j][c]));
          }
        }
      }
    }

    #pragma unroll
    for (int o = 0; o < OWN; ++o) {
      const int unit = o * WARPS + warp, j = unit / STEPS % WIDE;
      if (unit < UNITS && j < used && chunk + TURNS + unit / STEPS / WIDE < end) {
        const unsigned one = SPECDEC_ONES;
        float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int f = 0; f < FOLD; ++f) {
          uint4 v = taken[o][f];
          if (BITS == 4)  // in the order of the matrix's pairs
            v = make_uint4(
                __byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
          SPECDEC_MMA(total, one, one, one, one, v.x, v.y);
          SPECDEC_MMA(total, one, one, one, one, v.z, v.w);
          laid[side ^ 1][unit][f][lane] = v;
        }
        if (of_eight == 0)
          totals[side ^ 1][unit][part] = make_float2(total[0], total[1]);
      }
    }
    __syncthreads();
  }

  #pragma unroll
  for (int t = 0; t < 2; ++t)
    #pragma unroll
    for (int j = 0; j < WIDE; ++j)
      #pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int at = first + t * 16 + c / 2 * 8 + of_eight;
        const int m = top + j * 8 + part * 2 + c % 2;
        if (at >= N || m >= M) continue;
        float sum = sums[t][j][c];
        if (gridDim.y > 1) {
          pieces[static_cast<size_t>(m) * N + at] = sum;
          continue;
        }
        @WRITE@
      }
"""

# Adds up the sums of a product's blocks, in the order of the blocks.
GATHER = """
  const float* const sums = reinterpret_cast<const float*>(pieces);
  const int count = pieces_shape[0], M = pieces_shape[1], N = pieces_shape[2];
  const int at = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
  if (at < N) {
    float sum = 0.0f;
    for (int i = 0; i < count; ++i)
      sum += sums[(static_cast<size_t>(i) * M + m) * N + at];
    @WRITE@
  }
"""
