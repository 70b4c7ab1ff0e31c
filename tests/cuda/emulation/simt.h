// A GPU's threads as fibers of one thread: what kernels see of it; simt.cpp runs them.
// Named by CUDA's words; Metal calls a block a threadgroup, a warp a SIMD group.

// The C headers as they are: libstdc++'s wrappers take longer than all the rest.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

namespace simt {
struct Place {
  unsigned x, y, z;
};
}  // namespace simt

extern simt::Place threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr int MAX_NDIM = 10, WORDS = 6;

[[noreturn]] void fault(int line, const char* format, ...);

// -- threads and what they wait for -------------------------------------------

enum Wait : int { NOTHING, ENDED, BLOCK, WARP, PHASE };
enum Kind : int { SYNC, SHUFFLE, BALLOT, MMA };

struct Fiber {
  Wait wait;
  int kind, line;  // of what it waits for: which operation, and of which line
  unsigned mask;   // of the lanes that are to take part
  unsigned met;    // of those that last did: some may have ended before
  // What the lane gave, as it was when all were there; of a product, its share.
  uint32_t given[WORDS], seen[WORDS];
  double products[4];
  void (*multiply)(Fiber* warp);
  const unsigned* phase;  // of a barrier, which is to be of the other parity
  unsigned parity;
};

extern Fiber* fibers;
extern unsigned threads, running;

inline Fiber& me() { return fibers[running]; }
inline int lane() { return running % 32; }
inline Fiber& peer(int lane) { return fibers[running / 32 * 32 + lane]; }

// Wait for the block's threads, or the lanes of mask; then seen has what each gave.
void all_together(int line);
void together(Kind kind, unsigned mask, int line);
// Wait until a barrier's phase of a parity has ended.
void until(const unsigned* phase, unsigned parity, int line);

// -- memory of arrays ---------------------------------------------------------

// What Python hands over, see cuda.py; offset in bytes.
struct Array {
  void* data;
  int64_t bytes, offset;
  int32_t writable, ndim;
  int32_t shape[MAX_NDIM];
  int64_t strides[MAX_NDIM];
};

// Sizes beyond an array's dimensions are none.
template <class T>
struct Sizes {
  T values[MAX_NDIM];
  int ndim;
  T operator[](int i) const {
    if (i < 0 || i >= ndim) fault(0, "dimension %d of an array of %d", i, ndim);
    return values[i];
  }
};

extern const Array* arrays;
char* start_of(int i);

template <class T>
T* pointer(int i) {
  return reinterpret_cast<T*>(start_of(i) + arrays[i].offset);
}
inline Sizes<int32_t> shape(int i) {
  Sizes<int32_t> sizes{{}, arrays[i].ndim};
  memcpy(sizes.values, arrays[i].shape, sizeof sizes.values);
  return sizes;
}
inline Sizes<int64_t> strides(int i) {
  Sizes<int64_t> sizes{{}, arrays[i].ndim};
  memcpy(sizes.values, arrays[i].strides, sizeof sizes.values);
  return sizes;
}

// -- numbers of 16 bits --------------------------------------------------------

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_bfloat16(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

inline uint16_t to_half(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000;
  const float size = float_of(bits & 0x7fffffff);
  if (value != value) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  // Added to that, float's own rounding leaves half's: its smallest are 2^-24 apart.
  if (size < 0x1p-14f) return sign | (bits_of(size + 0.5f) - bits_of(0.5f));
  const uint32_t own = bits_of(size) - (112u << 23);
  return sign | (own + 0xfff + (own >> 13 & 1)) >> 13;
}
inline float from_half(uint16_t bits) {
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  const uint32_t power = bits >> 10 & 31, rest = bits & 0x3ff;
  if (power == 31) return sign * (rest ? NAN : INFINITY);
  if (power == 0) return sign * rest * 0x1p-24f;
  return sign * float_of((power + 112) << 23 | rest << 13);
}

// -- shared memory that is no section ------------------------------------------

// Metal's threadgroup memory, which may belong to a template: known to poison().
struct Shared {
  void* at;
  size_t size;
  Shared* next;
  Shared(void* at, size_t size);
};

// -- a launch -----------------------------------------------------------------

struct Launch {
  uint32_t grid[3], block[3];
  int32_t count, backwards;
  void* stacks;
};

int launch(const Launch& wanted, const Array* given, void (*kernel)());
const char* message_of();
// For the fibers of all launches, one after the other.
void* new_stacks();

}  // namespace simt

using Shape = simt::Sizes<int32_t>;
using Strides = simt::Sizes<int64_t>;

#ifdef SIMT_METAL
#include "metal.h"
#else
#include "device.h"
#endif
