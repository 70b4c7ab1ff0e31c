"""The CUDA source of products with packed weights, see :mod:`.packed_matmul`.

A warp computes 32 columns of the result, for 8 * WIDE rows of x, from a piece of K: a
number of turns of TURN columns. With WIDE = 1 the warps of a block have the same
columns and a piece each; they add up their sums in shared memory. Otherwise they have
their own columns and share the rows of x, and gridDim.y blocks have a piece each: their
sums lie in ``out`` as float32, and a second kernel adds them up. Both add up pieces in
the same order, so a row has the same bits with either.

In a tensor core's product (m16n8k16) the 16 are rows of the matrix and the 8 are rows
of x. A thread loads 16 bytes of a row, and unpacks eight numbers at a time: each weight
becomes scale * q + bias, rounded to 16 bits, as when a matrix is unpacked. The order of
k does not matter as long as weights and x agree, so every thread multiplies the columns
that it has loaded, and x is held in that order.

On Hopper, of many rows, four warps multiply their columns together (wgmma, m64nNk16):
the same products of 16 k, added in the same order, have the same bits.
"""

HEADER = """
// Of weights, which are read once. No branch may lie between these loads: what comes
// after it would wait for what was asked for before.
__device__ __forceinline__ void specdec_weights(uint4 (&words)[2][2],
                                                const unsigned* const (&rows)[2][2],
                                                int at) {
  #pragma unroll
  for (int t = 0; t < 2; ++t)
    #pragma unroll
    for (int i = 0; i < 2; ++i)
      SPECDEC_LOAD(words[t][i], reinterpret_cast<const uint4*>(rows[t][i] + at));
}

// Eight numbers of x in the order in which numbers of so many bits are unpacked.
template <int BITS>
__device__ __forceinline__ uint4 specdec_arranged(const uint4& v) {
  return BITS == 8 ? v
                   : make_uint4(__byte_perm(v.x, v.z, 0x5410),
                                __byte_perm(v.x, v.z, 0x7632),
                                __byte_perm(v.y, v.w, 0x5410),
                                __byte_perm(v.y, v.w, 0x7632));
}

// The i-th of eight numbers of 16 bits.
__device__ __forceinline__ unsigned specdec_of_eight(const uint4& v, int i) {
  const unsigned a = i & 2 ? v.y : v.x, b = i & 2 ? v.w : v.z, c = i & 4 ? b : a;
  return i & 1 ? c >> 16 : c & 0xffffu;
}
"""

# How a word of eight packed numbers, or two words of four, become four pairs of 16-bit
# numbers. SPECDEC_LESS takes off what was added to them; 0 if nothing was.
_UNPACK = """
#define SPECDEC_ONE {one}u
#define SPECDEC_LESS {less}u
__device__ __forceinline__ void specdec_unpack(unsigned a, unsigned b, unsigned* out) {{
{body}
}}
"""
_NIBBLES = """
  // Of eight numbers the i-th and the (i + 4)-th; the four bits become the last of a
  // mantissa.
  #pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = (a >> 4 * i & 0x000F000Fu) | MAGICu;
"""
_BYTES = """
  // 2^23 + q in float32; less 2^23, the upper 16 bits hold q.
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = i < 2 ? a : b;
    const float low = __uint_as_float(
        __byte_perm(word, 0x4B000000u, i % 2 ? 0x7442 : 0x7440)) - 8388608.0f;
    const float high = __uint_as_float(
        __byte_perm(word, 0x4B000000u, i % 2 ? 0x7443 : 0x7441)) - 8388608.0f;
    out[i] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
"""
_BYTES_HALF = """
  // The lower byte of 1024 + q.
  #pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = __byte_perm(i < 2 ? a : b, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
"""


# What BY_FOUR_WARPS calls. A product's x lies in shared memory without gaps: a row's
# eight k, 16 bytes, are followed by the next row's.
_TOGETHER = r"""
#define SPECDEC_SHARED(at) static_cast<unsigned>(__cvta_generic_to_shared(at))
#define SPECDEC_BARRIER(barrier, arrivals)                                  \
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"                    \
               "fence.proxy.async.shared::cta;"                             \
               :: "r"(SPECDEC_SHARED(&barrier)), "r"(arrivals) : "memory")
#define SPECDEC_COPY(to, from, barrier)                                     \
  asm volatile(                                                             \
      "{.reg .b64 t;"                                                       \
      "mbarrier.arrive.expect_tx.shared::cta.b64 t, [%2], %3;"              \
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "  \
      "[%0], [%1], %3, [%2];}"                                              \
      :: "r"(SPECDEC_SHARED(to)), "l"(from), "r"(SPECDEC_SHARED(&barrier)), \
         "n"(sizeof(to)) : "memory")
#define SPECDEC_BARRIER_WAIT(barrier, turn)                                 \
  asm volatile(                                                             \
      "{.reg .pred p;AGAIN:"                                                \
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"               \
      "@!p bra AGAIN;}"                                                     \
      :: "r"(SPECDEC_SHARED(&barrier)), "r"(turn) : "memory")
#define SPECDEC_PRODUCTS_BEGIN() asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define SPECDEC_PRODUCTS_END()                                              \
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define SPECDEC_PRODUCTS_WAIT(n)                                            \
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(n) : "memory")
#define SPECDEC_WRITTEN(d) asm volatile("" : @SUMS@ :: "memory")
#define SPECDEC_PRODUCT(d, a, b)                                            \
  asm volatile(                                                             \
      "{.reg .pred p;setp.eq.u32 p, 0, 0;"                                  \
      "wgmma.mma_async.sync.aligned.m64n@ROWS@k16.f32.@TYPE@.@TYPE@ {@OPERANDS@}, " \
      "{@A@}, %@B@, p, 1, 1, 0;}"                                           \
      : @SUMS@                                                              \
      : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]),                 \
        "l"(static_cast<unsigned long long>(                                \
                (SPECDEC_SHARED(b) & 0x3FFFF) >> 4) |                       \
            static_cast<unsigned long long>(@ROWS@) << 16 |                 \
            static_cast<unsigned long long>(8) << 32))
"""


def together(dtype: str, wide: int) -> str:
    """The header of BY_FOUR_WARPS, for numbers of PTX's type ``dtype``."""
    sums = 4 * wide
    operands = {
        "@ROWS@": str(8 * wide),
        "@TYPE@": dtype,
        "@OPERANDS@": ",".join(f"%{i}" for i in range(sums)),
        "@A@": ",".join(f"%{sums + i}" for i in range(4)),
        "@B@": str(sums + 4),
        "@SUMS@": ",".join(f'"+f"((d)[{i // 4}][{i % 4}])' for i in range(sums)),
    }
    header = _TOGETHER
    for name, text in operands.items():
        header = header.replace(name, text)
    return header


# How 16 bytes of weights are loaded. A warp loads 64 bytes of a row at a time. With 8
# bits, whole lines of L2 take up to a fifth less time; with 4 bits a little more.
_LOAD = """
#define SPECDEC_LOAD(words, at) words = __ldcs(at)
"""
_LOAD_LINES = r"""
#define SPECDEC_LOAD(words, at)                                             \
  asm volatile(                                                             \
      "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" \
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(at))
"""


def unpacking(bits: int, half: bool) -> str:
    """The header that loads and unpacks ``bits`` a number, to float16 if ``half``."""
    one, less, magic = (
        ("0x3C003C00", "0xE400E400", "0x64006400")
        if half
        else ("0x3F803F80", "0xC300C300", "0x43004300")
    )
    if bits == 8:
        body, less = (_BYTES_HALF, less) if half else (_BYTES, "0")
    else:
        body = _NIBBLES.replace("MAGIC", magic)
    load = _LOAD_LINES if bits == 8 else _LOAD
    return load + _UNPACK.format(one=one, less=less, body=body)


SOURCE = """
  constexpr int TURN = 512 / BITS;  // columns of 16 bytes, of four threads
  // Turns are unpacked in steps: eight of a thread's columns, two products.
  constexpr int STEPS = TURN / 32, GROUPS = GROUP < TURN ? TURN / GROUP : 1;
  // Turns whose weights are asked for ahead of their use.
  constexpr int TOGETHER = WIDE == 1 ? 1 : 2, AHEAD = WIDE == 1 ? 2 : 1;
  static_assert(8 * GROUP >= AHEAD * TURN, "scales would be overwritten too early");

  // A warp has 32 columns of a matrix, or 16 of each of two: GATED.
  constexpr bool GATED = @GATED@, SHARED = @SHARED@;
  constexpr int COLUMNS = GATED ? 16 : 32;
  const int K = x_shape[x_ndim - 1];
  const int N = scales_shape[scales_ndim - 2], groups = scales_shape[scales_ndim - 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int of_eight = lane / 4, part = lane % 4;
  // Which piece of K is the warp's, of how many; and the block's columns of the result.
  // With IN_TURN pieces, a warp computes them one after the other.
  int piece = WIDE == 1 ? warp : IN_TURN ? 0 : blockIdx.y;
  const int pieces = WIDE == 1 ? blockDim.x / 32 : IN_TURN ? IN_TURN : gridDim.y;
  const int columns = WIDE == 1 ? COLUMNS : blockDim.x / 32 * COLUMNS;
  const long long turns = (K + TURN - 1) / TURN;
  int begin = turns * piece / pieces, end = turns * (piece + 1) / pieces;
  const int leftmost = blockIdx.x * columns;
  const int first = leftmost + (WIDE == 1 ? 0 : warp * COLUMNS);
  @ROWS@
  int used = (count + 7) / 8;
  // Where blocks share K, a block's sums.
  const bool shared = gridDim.y > 1;
  float* const parts =
      reinterpret_cast<float*>(out) + static_cast<size_t>(blockIdx.y) * M * N;
  const unsigned short* const numbers = reinterpret_cast<const unsigned short*>(x);
  // Where 16 bytes cannot be loaded at once, each thread computes some of the result.
  size_t starts = reinterpret_cast<size_t>(x);
  #pragma unroll
  for (int i = 0; i < 1 + GATED; ++i)
    starts |= reinterpret_cast<size_t>(weights_of[i]) |
              reinterpret_cast<size_t>(scales_of[i]) |
              reinterpret_cast<size_t>(biases_of[i]);
  if (starts % 16) {
    // Pieces are summed one by one, as everywhere.
    const bool by_blocks = WIDE > 1 && !IN_TURN;
    const int lowest = by_blocks ? piece : 0, highest = by_blocks ? piece + 1 : pieces;
    const int there = min(columns, N - leftmost);
    for (int one = threadIdx.x; one < there * count; one += blockDim.x) {
      const int at = leftmost + one % there, m = row_of(one / there);
      float both[2];
      for (int i = 0; i < 1 + GATED; ++i) {
        float whole = 0.0f;
        for (int p = lowest; p < highest; ++p) {
          float its = 0.0f;
          const int from = turns * p / pieces * TURN;
          const int until = turns * (p + 1) / pieces * TURN;
          for (int k = from; k < min(until, K); ++k) {
            const size_t word = (matrix + at) * (K / 32 * BITS) + k * BITS / 32;
            const unsigned q =
                weights_of[i][word] >> k % (32 / BITS) * BITS & ((1 << BITS) - 1);
            const size_t g = (matrix + at) * groups + k / GROUP;
            const T w = static_cast<T>(fmaf(static_cast<float>(scales_of[i][g]),
                                            static_cast<float>(q),
                                            static_cast<float>(biases_of[i][g])));
            its = fmaf(static_cast<float>(x[static_cast<size_t>(x_row(m)) * K + k]),
                       static_cast<float>(w), its);
          }
          whole = p == lowest ? its : whole + its;
        }
        both[i] = whole;
      }
      if (shared) {
        parts[static_cast<size_t>(m) * N + at] = both[0];
        continue;
      }
      float sum = both[0], up = both[GATED];
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
      rows[t][i] = weights_of[GATED && t] +
          (matrix + min(first + (GATED ? 0 : t * 16) + i * 8 + of_eight, N - 1)) *
              (K / 32 * BITS);
  // Of the four rows of four threads, each reads the scales of one.
  const int second = GATED && part > 1, own_row = (part - 2 * second) * 8 + of_eight;
  const size_t scaled = (matrix + min(first + own_row, N - 1)) * groups;
  const unsigned short* const its_scales =
      reinterpret_cast<const unsigned short*>(scales_of[second]) + scaled;
  const unsigned short* const its_biases =
      reinterpret_cast<const unsigned short*>(biases_of[second]) + scaled;

  float sums[2][WIDE][4];
  const int own = part * TURN / 4;  // a thread's columns of a turn
  uint4 next[AHEAD][2][2], scales8[2], scales8_next[2];
  unsigned both_next[AHEAD][GROUPS];
  // Loads a turn's weights and scales. Scales are loaded for eight groups at a time,
  // where the next eight begin, if all rows allow that (EIGHTS).
  auto load = [&](int asked, int slot) {
    const int column = asked * TURN + own, first_group = asked * TURN / GROUP;
    specdec_weights(next[slot], rows, (column < K ? column : 0) * BITS / 32);
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
        both_next[slot][i] = __ldg(its_scales + at) |
            static_cast<unsigned>(__ldg(its_biases + at)) << 16;
      }
    }
  };
  auto start = [&] {
    load(begin, 0);
    scales8[0] = scales8_next[0];
    scales8[1] = scales8_next[1];
    #pragma unroll
    for (int i = 1; i < AHEAD; ++i) load(min(begin + i, end - 1), i);
    #pragma unroll
    for (int t = 0; t < 2; ++t)
      #pragma unroll
      for (int j = 0; j < WIDE; ++j)
        #pragma unroll
        for (int c = 0; c < 4; ++c) sums[t][j][c] = 0.0f;
  };

  // Unpacks a turn's weights, for take(step, w): fragments of two products.
  auto unpack = [&](int turn, auto&& take) {
    uint4 now[2][2];
    unsigned both[GROUPS];
    #pragma unroll
    for (int t = 0; t < 2; ++t)
      #pragma unroll
      for (int i = 0; i < 2; ++i) now[t][i] = next[0][t][i];
    const int g = turn * TURN / GROUP;
    // Eight groups are at least AHEAD turns, so only one set of scales is ahead.
    if (EIGHTS && g % 8 == 0) {
      scales8[0] = scales8_next[0];
      scales8[1] = scales8_next[1];
    }
    #pragma unroll
    for (int i = 0; i < GROUPS; ++i)
      both[i] = !EIGHTS ? both_next[0][i]
                        : specdec_of_eight(scales8[0], (g + i) % 8) |
                              specdec_of_eight(scales8[1], (g + i) % 8) << 16;
    #pragma unroll
    for (int a = 1; a < AHEAD; ++a) {
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int i = 0; i < 2; ++i) next[a - 1][t][i] = next[a][t][i];
      #pragma unroll
      for (int i = 0; i < GROUPS; ++i) both_next[a - 1][i] = both_next[a][i];
    }
    load(min(turn + AHEAD, end - 1), AHEAD - 1);
    // Scale and bias of each of the thread's rows, for its columns: twice each. Of
    // the rows of four threads, each thread has loaded the scales of one.
    unsigned scale[2][2], added[2][2];
    #pragma unroll
    for (int t = 0; t < 2; ++t)
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned its = 0;
        #pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          const unsigned given = __shfl_sync(~0u, both[group], t * 2 + i, 4);
          if (group == 0 || part * GROUPS / 4 == group) its = given;
        }
        scale[t][i] = __byte_perm(its, 0u, 0x1010);
        added[t][i] = __byte_perm(its, 0u, 0x3232);
      }
    #pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      unsigned w[2][2][4];
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = now[t][i];
          unsigned pairs_of[4];
          if (BITS == 4) {
            specdec_unpack(step == 0 ? v.x : step == 1 ? v.y : step == 2 ? v.z : v.w,
                           0u, pairs_of);
          } else {
            specdec_unpack(step == 0 ? v.x : v.z, step == 0 ? v.y : v.w, pairs_of);
          }
          #pragma unroll
          for (int c = 0; c < 4; ++c) {
            unsigned q = pairs_of[c];
            if (SPECDEC_LESS != 0)
              SPECDEC_FMA(q, pairs_of[c], SPECDEC_ONE, SPECDEC_LESS);
            // PTX's order: the upper eight rows, the lower, then eight columns on.
            SPECDEC_FMA(w[t][c / 2][c % 2 * 2 + i], q, scale[t][i], added[t][i]);
          }
        }
      take(step, w);
    }
  };
@PRODUCTS@"""

# Of up to 64 rows, and of experts.
BY_WARPS = """
  // Multiplies a turn's weights. of_x(j, step): eight numbers of the thread's row of x,
  // of the j-th eight rows, in the columns of a step.
  auto multiply = [&](int turn, auto&& of_x) {
    unpack(turn, [&](int step, const unsigned (&w)[2][2][4]) {
      #pragma unroll
      for (int some = 0; some < WIDE; some += TOGETHER) {
        if (WIDE > 1 && some >= used) continue;
        #pragma unroll
        for (int j = some; j < some + TOGETHER; ++j) {
          const uint4 v = of_x(j, step);
          #pragma unroll
          for (int t = 0; t < 2; ++t) {
            const unsigned (&a)[2][4] = w[t];
            SPECDEC_MMA(sums[t][j], a[0][0], a[0][1], a[0][2], a[0][3], v.x, v.y);
            SPECDEC_MMA(sums[t][j], a[1][0], a[1][1], a[1][2], a[1][3], v.z, v.w);
          }
        }
      }
    });
  };

  if constexpr (WIDE == 1) {
    __shared__ float found[WARPS][8][32];
    for (int tile = 0; tile < count; tile += 8) {
      start();
      // x is loaded as the weights are: few rows stay in the multiprocessor's cache.
      const bool there = tile + of_eight < count;
      const unsigned short* const its_x = numbers +
          static_cast<size_t>(x_row(row_of(there ? tile + of_eight : 0))) * K;
      uint4 taken[STEPS];
      auto take = [&](int turn) {
        #pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int from = turn * TURN + own + step * 8;
          taken[step] = make_uint4(0u, 0u, 0u, 0u);
          if (from < K && there)
            taken[step] = __ldg(reinterpret_cast<const uint4*>(its_x + from));
        }
      };
      take(begin);
      for (int turn = begin; turn < end; ++turn) {
        uint4 held[STEPS];
        #pragma unroll
        for (int step = 0; step < STEPS; ++step)
          held[step] = specdec_arranged<BITS>(taken[step]);
        take(min(turn + 1, end - 1));
        multiply(turn, [&](int, int step) { return held[step]; });
      }
      // The warps' sums are added up in the order of their pieces.
      if (tile > 0) __syncthreads();
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int c = 0; c < 4; ++c)
          found[warp][part * 2 + c % 2][t * 16 + c / 2 * 8 + of_eight] = sums[t][0][c];
      __syncthreads();
      for (int one = threadIdx.x; one < 8 * COLUMNS; one += blockDim.x) {
        const int column = one % COLUMNS, its_row = one / COLUMNS;
        const int at = first + column, i = tile + its_row;
        if (at >= N || i >= count) continue;
        const int m = row_of(i);
        float sum = found[0][its_row][column];
        for (int p = 1; p < pieces; ++p) sum += found[p][its_row][column];
        float up = 0.0f;
        if (GATED) {
          up = found[0][its_row][16 + column];
          for (int p = 1; p < pieces; ++p) up += found[p][its_row][16 + column];
        }
        @WRITE@
      }
    }
  } else {
    // Turns of which x is laid out at a time, and what of it each warp lays out: a unit
    // is eight rows in the columns of a step.
    constexpr int TURNS = (IN_TURN ? 512 : 1024) / TURN / WIDE;
    constexpr int UNITS = TURNS * WIDE * STEPS, OWN = (UNITS + WARPS - 1) / WARPS;
    __shared__ uint4 laid[2][UNITS][32];
    float before[IN_TURN ? 2 : 1][WIDE][4];  // sums of the pieces before
    const int passes = IN_TURN ? (count + 8 * WIDE - 1) / (8 * WIDE) * IN_TURN : 1;
    for (int pass = 0; pass < passes; ++pass) {
      const int tile = IN_TURN ? pass / pieces * 8 * WIDE : 0;
      if (IN_TURN) {
        piece = pass % pieces;
        begin = turns * piece / pieces;
        end = turns * (piece + 1) / pieces;
        used = (min(count - tile, 8 * WIDE) + 7) / 8;
      }
      start();
      int side = 1;
      for (int chunk = begin - TURNS; chunk < end; chunk += TURNS, side ^= 1) {
        // The next turns' x: asked for here, laid out when these are done.
        uint4 taken[OWN];
        #pragma unroll
        for (int o = 0; o < OWN; ++o) {
          const int unit = o * WARPS + warp, j = unit / STEPS % WIDE;
          const int turn = chunk + TURNS + unit / STEPS / WIDE;
          const int i = tile + j * 8 + of_eight, m = row_of(min(i, count - 1));
          const int from = turn * TURN + own + unit % STEPS * 8;
          const unsigned short* const at =
              numbers + static_cast<size_t>(x_row(m)) * K + (from < K ? from : 0);
          taken[o] = make_uint4(0u, 0u, 0u, 0u);
          if (unit < UNITS && turn < end && from < K && i < count)
            taken[o] = __ldg(reinterpret_cast<const uint4*>(at));
        }

        const int until = chunk < begin ? chunk : min(chunk + TURNS, end);
        for (int turn = chunk; turn < until; ++turn) {
          multiply(turn, [&](int j, int step) {
            return laid[side][((turn - chunk) * WIDE + j) * STEPS + step][lane];
          });
        }

        #pragma unroll
        for (int o = 0; o < OWN; ++o) {
          const int unit = o * WARPS + warp, j = unit / STEPS % WIDE;
          if (unit < UNITS && j < used)
            laid[side ^ 1][unit][lane] = specdec_arranged<BITS>(taken[o]);
        }
        __syncthreads();
      }

      #pragma unroll
      for (int t = 0; t < (IN_TURN ? 2 : 0); ++t)
        #pragma unroll
        for (int j = 0; j < WIDE; ++j)
          #pragma unroll
          for (int c = 0; c < 4; ++c) {
            if (piece > 0) sums[t][j][c] = before[t][j][c] + sums[t][j][c];
            before[t][j][c] = sums[t][j][c];
          }
      if (IN_TURN && piece + 1 < pieces) continue;
      @SUMS@
    }
  }
"""

# Writes a warp's sums: of the rows that begin with ``tile``.
SUMS = """
      #pragma unroll
      for (int t = 0; t < (GATED ? 1 : 2); ++t)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = first + t * 16 + half * 8 + of_eight;
          if (at >= N) continue;
          @COLUMN@
          #pragma unroll
          for (int j = 0; j < WIDE; ++j)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int i = tile + j * 8 + part * 2 + c;
              if (i >= count) continue;
              const int m = row_of(i);
              float sum = sums[t][j][half * 2 + c], up = sums[GATED][j][half * 2 + c];
              if (shared) {
                parts[static_cast<size_t>(m) * N + at] = sum;
                continue;
              }
              @CELL@
            }
        }
"""

# Of more rows, on Hopper: four warps multiply their columns together (wgmma), and read
# x from shared memory. It lies there as ``arranged`` does: for each step of two
# products, the first and the second eight k of each, in 16 bytes for each row.
BY_FOUR_WARPS = """
  constexpr int SLOTS = 4;
  __shared__ uint4 laid[SLOTS][4][8 * WIDE];
  __shared__ unsigned long long arrived[SLOTS];
  const int steps = (end - begin) * STEPS;
  const uint4* const its_x =
      reinterpret_cast<const uint4*>(arranged) +
      (blockIdx.z * turns + begin) * STEPS * (32 * WIDE);
  auto fetch = [&](int one) {
    if (threadIdx.x == 0 && one < steps)
      SPECDEC_COPY(laid[one % SLOTS], its_x + static_cast<size_t>(one) * (32 * WIDE),
                   arrived[one % SLOTS]);
  };
  if (threadIdx.x == 0)
    for (int i = 0; i < SLOTS; ++i) SPECDEC_BARRIER(arrived[i], 1);
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < SLOTS - 2; ++i) fetch(i);
  start();
  unsigned held[2][2][2][4];
  int one = 0;
  for (int turn = begin; turn < end; ++turn) {
    unpack(turn, [&](int step, const unsigned (&w)[2][2][4]) {
      // Weights of the step before are multiplied still.
      auto& its = held[step % 2];
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
          #pragma unroll
          for (int c = 0; c < 4; ++c) its[t][half][c] = w[t][half][c];
      __syncthreads();
      // All have multiplied the step before the last, in whose place comes another.
      fetch(one + SLOTS - 2);
      SPECDEC_BARRIER_WAIT(arrived[one % SLOTS], one / SLOTS % 2);
      SPECDEC_PRODUCTS_BEGIN();
      #pragma unroll
      for (int t = 0; t < 2; ++t)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
          SPECDEC_PRODUCT(sums[t], its[t][half], laid[one % SLOTS][2 * half]);
      SPECDEC_PRODUCTS_END();
      SPECDEC_PRODUCTS_WAIT(1);
      ++one;
    });
  }
  SPECDEC_PRODUCTS_WAIT(0);
  SPECDEC_WRITTEN(sums[0]);
  SPECDEC_WRITTEN(sums[1]);
  constexpr int tile = 0;
  @SUMS@
"""

# x as BY_FOUR_WARPS reads it. Columns beyond the last are zero, and rows beyond the
# last are the last.
ARRANGE = """
  constexpr int TURN = 512 / BITS, STEPS = TURN / 32, ROWS = 8 * WIDE;
  const int K = x_shape[x_ndim - 1], steps = (K + TURN - 1) / TURN * STEPS;
  int M = 1;
  for (int i = 0; i + 1 < x_ndim; ++i) M *= x_shape[i];
  // A warp takes eight rows, four steps or twice two of each: whole lines of x.
  const int lane = threadIdx.x % 32, its = lane / 8;
  const int step = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * 4 + its;
  const int row = blockIdx.x * 8 + lane % 8, m = blockIdx.z * ROWS + row;
  if (step >= steps) return;
  const unsigned short* const from = reinterpret_cast<const unsigned short*>(x) +
                                     static_cast<size_t>(min(m, M - 1)) * K;
  const bool together = reinterpret_cast<size_t>(x) % 16 == 0;
  uint4 of_parts[4];
  #pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int at = step / STEPS * TURN + part * TURN / 4 + step % STEPS * 8;
    uint4& v = of_parts[part];
    v = make_uint4(0u, 0u, 0u, 0u);
    if (at >= K) continue;
    if (together) {
      v = __ldg(reinterpret_cast<const uint4*>(from + at));
    } else {
      auto pair = [&](int i) {
        return __ldg(from + at + i) |
               static_cast<unsigned>(__ldg(from + at + i + 1)) << 16;
      };
      v = make_uint4(pair(0), pair(2), pair(4), pair(6));
    }
  }
  #pragma unroll
  for (int part = 0; part < 4; ++part)
    of_parts[part] = specdec_arranged<BITS>(of_parts[part]);
  uint4* const to =
      reinterpret_cast<uint4*>(out) +
      (static_cast<size_t>(blockIdx.z) * steps + step) * (4 * ROWS) + row;
  const uint4 (&v)[4] = of_parts;
  to[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
  to[ROWS] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
  to[2 * ROWS] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
  to[3 * ROWS] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
"""

# Which rows a block computes: count of them, the i-th being row_of(i) of the result,
# which is row x_row(m) of x; and where its matrix begins in weights.
ROWS = """
  int M = 1;
  for (int i = 0; i + 1 < x_ndim; ++i) M *= x_shape[i];
  constexpr size_t matrix = 0;
  const unsigned* const weights_of[2] = {weight, weight};
  const T* const scales_of[2] = {scales, scales};
  const T* const biases_of[2] = {biases, biases};
  const int top = blockIdx.z * 8 * WIDE, count = min(8 * WIDE, M - top);
  auto row_of = [&](int i) { return top + i; };
  auto x_row = [](int m) { return m; };
"""

# With experts, a row of the result is a pair of a token and an expert. A block computes
# the pairs of one expert: of the one whose number it has, or, where there are fewer
# pairs than experts, of the pair whose number it has, if that is the expert's first.
# After these come blocks of the shared expert, for some tokens each. The shared
# expert's pair is a token's last.
EXPERT_ROWS = """
  const int experts = scales_shape[0];
  int all = 1, M = 1;
  for (int i = 0; i < indices_ndim; ++i) all *= indices_shape[i];
  for (int i = 0; i + 1 < x_ndim; ++i) M *= x_shape[i];
  const int used_experts = indices_shape[indices_ndim - 1];
  const int stride = used_experts + SHARED;  // pairs of a token in the result
  const int blocks = min(all, experts);  // before the shared expert's
  const bool by_pair = all < experts, of_shared = SHARED && blockIdx.z >= blocks;
  const int expert = of_shared ? 0
                     : by_pair ? static_cast<int>(indices[blockIdx.z])
                               : blockIdx.z;
  __shared__ unsigned short pairs[@MOST_PAIRS@];
  __shared__ int number;
  if (warp == 0 && !of_shared) {
    int before = 0;
    for (int from = 0; from < all; from += 32) {
      const int at = from + lane;
      const bool its = at < all && static_cast<int>(indices[at]) == expert;
      const unsigned those = __ballot_sync(~0u, its);
      if (its) pairs[before + __popc(those & ((1u << lane) - 1u))] = at;
      before += __popc(those);
    }
    if (lane == 0) number = before;
  }
  __syncthreads();
  const int top = of_shared ? (blockIdx.z - blocks) * 8 * WIDE : 0;
  const int count =
      of_shared ? min(8 * WIDE, all / used_experts - top) : number;
  if (count == 0 || (by_pair && !of_shared && pairs[0] != blockIdx.z)) return;
  const size_t matrix = static_cast<size_t>(expert) * N;
  @MATRICES@
  auto row_of = [&](int i) {
    if (of_shared) return (top + i + 1) * stride - 1;
    const int pair = pairs[i];
    return SHARED ? pair / used_experts * stride + pair % used_experts : pair;
  };
  // Rows of x are tokens, or pairs.
  const int of_row = all / used_experts * stride / M;
  auto x_row = [&](int m) { return m / of_row; };
"""
ONE_MATRIX = """
  const unsigned* const weights_of[2] = {SHARED_OF(weight), weight};
  const T* const scales_of[2] = {SHARED_OF(scales), scales};
  const T* const biases_of[2] = {SHARED_OF(biases), biases};
"""
TWO_MATRICES = """
  const unsigned* const weights_of[2] = {SHARED_OF(weight), SHARED_OF(up_weight)};
  const T* const scales_of[2] = {SHARED_OF(scales), SHARED_OF(up_scales)};
  const T* const biases_of[2] = {SHARED_OF(biases), SHARED_OF(up_biases)};
"""
EXPERT_WRITE = """
        out[static_cast<size_t>(m) * N + at] = static_cast<T>(sum);
"""
# The activation, rounded where MLX's operations round.
GATED_WRITE = """
        auto rounded = [](float v) { return static_cast<float>(static_cast<T>(v)); };
        const float gate = rounded(sum);
        const float silu = rounded(gate * rounded(1.0f / (1.0f + expf(-gate))));
        out[static_cast<size_t>(m) * N + at] = static_cast<T>(silu * rounded(up));
"""

# Adds up the sums of a product's blocks, in the order of the blocks.
GATHER = """
  const float* const sums = reinterpret_cast<const float*>(pieces);
  const int count = pieces_shape[0], M = pieces_shape[1], N = pieces_shape[2];
  const int at = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y;
  if (at < N) {
    float sum = sums[static_cast<size_t>(m) * N + at];
    for (int i = 1; i < count; ++i)
      sum += sums[(static_cast<size_t>(i) * M + m) * N + at];
    @WRITE@
  }
"""
