// Metal's shading language as C++, by what Apple's specification says of it.
//
// g++ knows no address spaces: emulation.py checks that each pointer names one. Where the
// language leaves an order open (sums of a SIMD group, of a matrix product), one is taken.

#define device
#define constant
#define threadgroup
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
// The place of an operation; two in one line are two for the reader only.
#define MSL_LINE int line = __builtin_LINE()

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

// -- numbers of 16 bits ----------------------------------------------------------

// Each is converted by a cast. Metal also takes a float for a half without one.
template <uint16_t (*NARROW)(float), float (*WIDE)(uint16_t)>
struct Short {
  uint16_t bits;
  Short() = default;
  template <class X, class = std::enable_if_t<std::is_arithmetic_v<X>>>
  explicit Short(X value) : bits(NARROW(static_cast<float>(value))) {}
  template <uint16_t (*N)(float), float (*W)(uint16_t)>
  explicit Short(Short<N, W> value) : Short(static_cast<float>(value)) {}
  operator float() const { return WIDE(bits); }
  friend Short operator+(Short a, Short b) { return Short(float(a) + float(b)); }
  friend Short operator-(Short a, Short b) { return Short(float(a) - float(b)); }
  friend Short operator*(Short a, Short b) { return Short(float(a) * float(b)); }
  friend Short operator/(Short a, Short b) { return Short(float(a) / float(b)); }
  friend Short operator-(Short a) { return Short(-float(a)); }
  Short& operator+=(Short b) { return *this = *this + b; }
  Short& operator*=(Short b) { return *this = *this * b; }
};
using half = Short<simt::to_half, simt::from_half>;
using bfloat = Short<simt::to_bfloat16, simt::from_bfloat16>;
using float16_t = half;
using bfloat16_t = bfloat;

// -- vectors ---------------------------------------------------------------------

namespace metal {

template <class T, int N>
struct Elements;
template <class T>
struct alignas(2 * sizeof(T)) Elements<T, 2> { T x, y; };
template <class T>
struct alignas(4 * sizeof(T)) Elements<T, 3> { T x, y, z; };
template <class T>
struct alignas(4 * sizeof(T)) Elements<T, 4> { T x, y, z, w; };

template <class T, int N>
struct vec : Elements<T, N> {
  vec() = default;
  explicit vec(T all) {
    for (int i = 0; i < N; ++i) (*this)[i] = all;
  }
  template <class... U, class = std::enable_if_t<sizeof...(U) == N && N != 1>>
  vec(U... each) {
    int i = 0;
    ((at(i++) = T(each)), ...);
  }
  template <class U>
  explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; ++i) (*this)[i] = T(other[i]);
  }
  T& at(int i) { return reinterpret_cast<T*>(this)[i]; }
  T& operator[](int i) { return check(i), reinterpret_cast<T*>(this)[i]; }
  T operator[](int i) const { return check(i), reinterpret_cast<const T*>(this)[i]; }
  static void check(int i) {
    if (i < 0 || i >= N) simt::fault(0, "element %d of a vector of %d", i, N);
  }
};
#define MSL_EACH(op)                                            \
  template <class T, int N>                                     \
  vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> c;                                                \
    for (int i = 0; i < N; ++i) c[i] = T(a[i] op b[i]);         \
    return c;                                                   \
  }                                                             \
  template <class T, int N>                                     \
  vec<T, N> operator op(const vec<T, N>& a, T b) {              \
    return a op vec<T, N>(b);                                   \
  }                                                             \
  template <class T, int N>                                     \
  vec<T, N> operator op(T a, const vec<T, N>& b) {              \
    return vec<T, N>(a) op b;                                   \
  }                                                             \
  template <class T, int N, class U>                            \
  vec<T, N>& operator op##=(vec<T, N>& a, const U& b) {         \
    return a = a op b;                                          \
  }
MSL_EACH(+) MSL_EACH(-) MSL_EACH(*) MSL_EACH(/)
#undef MSL_EACH

template <class T, int N>
T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum = T(sum + a[i] * b[i]);
  return sum;
}

}  // namespace metal

#define MSL_VECTORS(T)           \
  using T##2 = metal::vec<T, 2>; \
  using T##3 = metal::vec<T, 3>; \
  using T##4 = metal::vec<T, 4>;
MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort)
MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(long) MSL_VECTORS(ulong)
MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(float) MSL_VECTORS(bool)
#undef MSL_VECTORS

template <class To, class From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// -- numbers ---------------------------------------------------------------------

namespace metal {

template <class T> METAL_FUNC T min(T a, T b) { return b < a ? b : a; }
template <class T> METAL_FUNC T max(T a, T b) { return a < b ? b : a; }
template <class T> METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> METAL_FUNC T select(T a, T b, bool c) { return c ? b : a; }
template <class T> METAL_FUNC bool isnan(T x) { return x != x; }
METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); }
METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
template <class T> METAL_FUNC T abs(T x) { return x < T(0) ? T(-x) : x; }
// Metal allows more error than libm has.
#define MSL_MATH(name) \
  METAL_FUNC float name(float x) { return __builtin_##name##f(x); }
#define MSL_ALL                                                                       \
  MSL_MATH(ceil) MSL_MATH(cos) MSL_MATH(exp) MSL_MATH(exp2) MSL_MATH(fabs)            \
  MSL_MATH(floor) MSL_MATH(log) MSL_MATH(log2) MSL_MATH(rint) MSL_MATH(round)         \
  MSL_MATH(sin) MSL_MATH(sqrt) MSL_MATH(tanh) MSL_MATH(trunc)                         \
  METAL_FUNC float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }               \
  METAL_FUNC float divide(float a, float b) { return a / b; }                         \
  METAL_FUNC float pow(float a, float b) { return __builtin_powf(a, b); }
MSL_ALL
namespace fast { MSL_ALL }
namespace precise { MSL_ALL }
#undef MSL_ALL
#undef MSL_MATH

// -- barriers, and what a SIMD group does together ---------------------------------

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

METAL_FUNC void threadgroup_barrier(mem_flags, MSL_LINE) { simt::all_together(line); }
METAL_FUNC void simdgroup_barrier(mem_flags, MSL_LINE) {
  simt::together(simt::SYNC, ~0u, line);
}

// Of a lane that there is not, or that has ended, the value is undefined: all ones.
template <class T>
METAL_FUNC T simd_shuffle(T value, int from, MSL_LINE) {
  static_assert(sizeof(T) <= sizeof(simt::Fiber::given));
  memcpy(simt::me().given, &value, sizeof value);
  simt::together(simt::SHUFFLE, ~0u, line);
  memset(&value, 0xff, sizeof value);
  if (from >= 0 && from < 32 && simt::me().met >> from & 1)
    memcpy(&value, simt::peer(from).seen, sizeof value);
  return value;
}
template <class T>
METAL_FUNC T simd_broadcast(T value, int from, MSL_LINE) {
  return simd_shuffle(value, from, line);
}
template <class T>
METAL_FUNC T simd_shuffle_xor(T value, int mask, MSL_LINE) {
  return simd_shuffle(value, simt::lane() ^ mask, line);
}
template <class T>
METAL_FUNC T simd_shuffle_down(T value, int by, MSL_LINE) {
  return simd_shuffle(value, simt::lane() + by, line);
}
template <class T>
METAL_FUNC T simd_shuffle_up(T value, int by, MSL_LINE) {
  return simd_shuffle(value, simt::lane() - by, line);
}

// Each lane joins in the same order of lanes, so that all get the same bits.
template <class T, class Join>
METAL_FUNC T all_lanes(T value, Join join, int line, int lanes = 32) {
  for (int by = lanes / 2; by; by /= 2) {
    const T other = simd_shuffle_xor(value, by, line);
    value = simt::lane() & by ? join(other, value) : join(value, other);
  }
  return value;
}
template <class T>
METAL_FUNC T simd_sum(T value, MSL_LINE) {
  return all_lanes(value, [](T a, T b) { return T(a + b); }, line);
}
template <class T>
METAL_FUNC T quad_sum(T value, MSL_LINE) {
  return all_lanes(value, [](T a, T b) { return T(a + b); }, line, 4);
}
template <class T>
METAL_FUNC T simd_max(T value, MSL_LINE) {
  return all_lanes(value, [](T a, T b) { return a < b ? b : a; }, line);
}
template <class T>
METAL_FUNC T simd_min(T value, MSL_LINE) {
  return all_lanes(value, [](T a, T b) { return b < a ? b : a; }, line);
}

// -- matrices of a SIMD group -------------------------------------------------------

// Two neighbours in each lane, at the places that MLX's kernels count on
// (steel/gemm/mma.h); Apple does not document them.
template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8);
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T value) : elements(value) {}
  vec<T, 2>& thread_elements() { return elements; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

inline int matrix_row() { return (simt::lane() & 16) / 4 + (simt::lane() / 2 & 3); }
inline int matrix_column() { return (simt::lane() & 8) / 2 + (simt::lane() & 1) * 2; }
inline int holder(int row, int column) {
  return (row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2;
}

// Apple specifies no order of a matrix product's sums.
#ifdef SUMS_BACKWARDS
constexpr bool sums_backwards = true;
#else
constexpr bool sums_backwards = false;
#endif

// d = a b + c, each product fused with the sum.
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
    const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c, MSL_LINE) {
  const float given[4] = {float(a.elements[0]), float(a.elements[1]),
                          float(b.elements[0]), float(b.elements[1])};
  memcpy(simt::me().given, given, sizeof given);
  if (simt::running / 32 * 32 + 32 > simt::threads)
    simt::fault(line, "an mma of part of a SIMD group");
  simt::me().multiply = nullptr;
  simt::together(simt::MMA, ~0u, line);
  auto element = [](int row, int column, int which) {
    const uint32_t* seen = simt::peer(holder(row, column)).seen;
    return as_type<float>(seen[which + (column & 1)]);
  };
  const int row = matrix_row();
  for (int i = 0; i < 2; ++i) {
    const int column = matrix_column() + i;
    float sum = float(c.elements[i]);
    for (int j = 0; j < 8; ++j) {
      const int k = sums_backwards ? 7 - j : j;
      sum = fma(element(row, k, 0), element(k, column, 2), sum);
    }
    d.elements[i] = D(sum);
  }
}

}  // namespace metal

// -- what MLX puts before every kernel ----------------------------------------------

using namespace metal;
