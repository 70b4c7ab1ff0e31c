// Functions and types of CUDA's device code, by what its guide and PTX's say of them.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
// Sections named so have a start and an end, see poison().
#define __shared__ static __attribute__((section("simt_shared")))

using uint3 = simt::Place;
using dim3 = simt::Place;
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr int warpSize = 32;

// MLX defines it in front of every kernel.
#define inf INFINITY

// -- half precision ------------------------------------------------------------

// CUDA's convert implicitly as well; what is written out compiles with both.
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) : bits(simt::to_bfloat16(value)) {}
  explicit operator float() const { return simt::from_bfloat16(bits); }
};
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float value) : bits(simt::to_half(value)) {}
  explicit operator float() const { return simt::from_half(bits); }
};
using nv_bfloat16 = __nv_bfloat16;
using half = __half;
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __half __float2half(float value) { return __half(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }

// -- numbers -------------------------------------------------------------------

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}
inline float abs(float value) { return fabsf(value); }
inline float exp(float value) { return expf(value); }
inline float exp2(float value) { return exp2f(value); }
inline float log(float value) { return logf(value); }
inline float sqrt(float value) { return sqrtf(value); }
inline float __expf(float value) { return expf(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline unsigned __float_as_uint(float value) { return simt::bits_of(value); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline float __uint_as_float(unsigned bits) { return simt::float_of(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Each four bits of s choose a byte of x (0 to 3) or y (4 to 7), or its sign (8 up).
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = s >> 4 * i & 15;
    unsigned byte = bytes >> 8 * (which & 7) & 255;
    if (which & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

// -- loads, which have to be aligned -------------------------------------------

namespace simt {
template <class T>
T load(const T* at, int line) {
  if (reinterpret_cast<uintptr_t>(at) % alignof(T))
    fault(line, "a load that is not aligned to its %zu bytes", alignof(T));
  return *at;
}
}  // namespace simt

#define SIMT_LOAD(name)                              \
  template <class T>                                 \
  T name(const T* at, int line = __builtin_LINE()) { \
    return simt::load(at, line);                     \
  }
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldlu)
#undef SIMT_LOAD

#define SPECDEC_LOAD(words, at) words = __ldcs(at)

// -- barriers and what a warp does together ------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) {
  simt::all_together(line);
}
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
  simt::together(simt::SYNC, mask, line);
}

namespace simt {

template <class T>
T shuffle(unsigned mask, T value, int from, int line) {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8);
  memcpy(me().given, &value, sizeof value);
  together(SHUFFLE, mask, line);
  // What a lane gives that takes no part, CUDA leaves open.
  T found;
  memset(&found, 0xff, sizeof found);
  if (me().met >> from & 1) memcpy(&found, peer(from).seen, sizeof found);
  return found;
}

inline int first_of(int width) { return lane() & ~(width - 1); }

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32,
              int line = __builtin_LINE()) {
  from = simt::first_of(width) | (from & (width - 1));
  return simt::shuffle(mask, value, from, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                  int line = __builtin_LINE()) {
  const int from = simt::lane() ^ lanes;
  // Of later groups of lanes nothing is read, of earlier ones it is.
  const bool later = from >= simt::first_of(width) + width;
  return simt::shuffle(mask, value, later ? simt::lane() : from, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32,
                 int line = __builtin_LINE()) {
  const int from = simt::lane() - static_cast<int>(by);
  const bool there = from >= simt::first_of(width);
  return simt::shuffle(mask, value, there ? from : simt::lane(), line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32,
                   int line = __builtin_LINE()) {
  const int from = simt::lane() + static_cast<int>(by);
  const bool there = from < simt::first_of(width) + width;
  return simt::shuffle(mask, value, there ? from : simt::lane(), line);
}
inline unsigned __ballot_sync(unsigned mask, int value, int line = __builtin_LINE()) {
  simt::me().given[0] = value != 0;
  simt::together(simt::BALLOT, mask, line);
  unsigned found = 0;
  for (int i = 0; i < 32; ++i)
    if (simt::me().met >> i & 1) found |= simt::peer(i).seen[0] << i;
  return found;
}
inline int __any_sync(unsigned mask, int value, int line = __builtin_LINE()) {
  return __ballot_sync(mask, value, line) != 0;
}
inline int __all_sync(unsigned mask, int value, int line = __builtin_LINE()) {
  return __ballot_sync(mask, !value, line) == 0;
}

// -- pairs of 16 bits -----------------------------------------------------------

namespace simt {

// fma.rn.bf16x2 or fma.rn.f16x2: a * b + c for both pairs of numbers. Rounded to float
// first, which a GPU does not do: very rarely the last bit is another.
template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    auto number = [shift](uint32_t pair) {
      return static_cast<float>(
          __builtin_bit_cast(T, static_cast<uint16_t>(pair >> shift)));
    };
    const T sum(fmaf(number(a), number(b), number(c)));
    result |= uint32_t{sum.bits} << shift;
  }
  return result;
}

}  // namespace simt

#define SPECDEC_FMA(d, a, b, c) d = simt::fma2<SPECDEC_MMA_TYPE>(a, b, c)

// -- tensor cores ----------------------------------------------------------------

namespace simt {

// What lanes gave of mma.sync.m16n8k16.row.col: a (16, 16) b (16, 8), in PTX's fragments.
template <class T>
void multiply(Fiber* warp);

template <class T, class D>
void mma(D&& d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
         uint32_t b1, int line = __builtin_LINE()) {
  const uint32_t given[WORDS] = {a0, a1, a2, a3, b0, b1};
  memcpy(me().given, given, sizeof given);
  me().multiply = multiply<T>;
  if (running / 32 * 32 + 32 > threads) fault(line, "an mma of part of a warp");
  together(MMA, ~0u, line);
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(d[i] + me().products[i]);
}

}  // namespace simt

#define SPECDEC_MMA(d, a0, a1, a2, a3, b0, b1) \
  simt::mma<SPECDEC_MMA_TYPE>(d, a0, a1, a2, a3, b0, b1)

// -- barriers of phases, and copies that end one -----------------------------------

namespace simt {

// A phase ends with the last arrival, of a thread or a copy. What was copied is there
// for those who wait for it; until then nothing is.
struct Barrier {
  const void* at;
  unsigned expected, arrived, phase;
  void* to;
  const void* from;
  size_t size;
};
inline Barrier barriers[16];

inline Barrier& barrier_at(const void* at, int line) {
  for (Barrier& one : barriers)
    if (one.at == at) return one;
  fault(line, "a barrier that is none");
}
inline void begin_barrier(const void* at, unsigned expected) {
  for (Barrier& one : barriers)
    if (!one.at || one.at == at) {
      one = {at, expected};
      return;
    }
}
inline void arrive(const void* at, int line) {
  Barrier& one = barrier_at(at, line);
  if (++one.arrived < one.expected) return;
  one.arrived = 0;
  ++one.phase;
}
inline void copy(void* to, const void* from, size_t size, const void* at, int line) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16)
    fault(line, "a copy that is not aligned to 16 bytes");
  Barrier& one = barrier_at(at, line);
  memset(to, 0xff, size);
  one.to = to;
  one.from = from;
  one.size = size;
  arrive(at, line);
}
inline void wait_barrier(const void* at, unsigned parity, int line) {
  Barrier& one = barrier_at(at, line);
  until(&one.phase, parity, line);
  if (one.from) memcpy(one.to, one.from, one.size);
  one.from = nullptr;
}

}  // namespace simt

#define SPECDEC_BARRIER(barrier, arrivals) simt::begin_barrier(&barrier, arrivals)
#define SPECDEC_ARRIVE(barrier) simt::arrive(&barrier, __LINE__)
#define SPECDEC_BARRIER_WAIT(barrier, parity) \
  simt::wait_barrier(&barrier, parity, __LINE__)
#define SPECDEC_COPY(to, from, barrier) \
  simt::copy(to, from, sizeof(to), &barrier, __LINE__)

// -- products of four warps: done at once ------------------------------------------

#define SPECDEC_PRODUCTS_BEGIN()
#define SPECDEC_PRODUCTS_END()
#define SPECDEC_PRODUCTS_WAIT(n)
#define SPECDEC_WRITTEN(d)
// Which half of the warps is first changes no result.
#define SPECDEC_FOLLOW()
#define SPECDEC_LEAD()

namespace simt {

// A warp's part of wgmma.mma_async.m64nNk16: b are the first eight k of all N, then the
// others, without gaps.
template <class T, int TILES>
void together_multiply(float (&d)[TILES][4], const uint32_t (&a)[4], const uint4* b) {
  const int row = lane() / 4, part = lane() % 4;
  for (int j = 0; j < TILES; ++j) {
    auto pair = [&](int half) {
      uint32_t words[4];
      memcpy(words, b + (half * TILES + j) * 8 + row, sizeof words);
      return words[part];
    };
    mma<T>(d[j], a[0], a[1], a[2], a[3], pair(0), pair(1));
  }
}

}  // namespace simt

#define SPECDEC_PRODUCT(d, a, b) simt::together_multiply<SPECDEC_MMA_TYPE>(d, a, b)
