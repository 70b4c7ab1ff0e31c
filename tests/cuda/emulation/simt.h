// CUDA's threads as fibers of one thread: what kernels see of it; simt.cpp runs them.

// The C headers as they are: libstdc++'s wrappers take longer than all the rest.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
// Sections named so have a start and an end, see poison().
#define __shared__ static __attribute__((section("simt_shared")))

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
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

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

constexpr int MAX_NDIM = 10, WORDS = 6;

[[noreturn]] void fault(int line, const char* format, ...);

// -- threads and what they wait for -------------------------------------------

enum Wait : int { NOTHING, ENDED, BLOCK, WARP };
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
};

extern Fiber* fibers;
extern unsigned threads, running;

inline Fiber& me() { return fibers[running]; }
inline int lane() { return running % 32; }
inline Fiber& peer(int lane) { return fibers[running / 32 * 32 + lane]; }

// Wait for the block's threads, or the lanes of mask; then seen has what each gave.
void all_together(int line);
void together(Kind kind, unsigned mask, int line);

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

#include "device.h"
