// Runs a kernel: its threads, what they wait for, its memory, its faults.
//
// Each thread of a warp runs until it waits or ends; then those whose peers are all
// there go on, then the next warp runs. Where nobody goes on, the kernel hangs: a fault.

#include "simt.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

simt::Place threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr size_t STACK = 64 << 10;
// Memory beside an array's pages that is no one's, on each side.
constexpr size_t GUARD = 256 << 20;
constexpr unsigned MOST_THREADS = 1024;

Fiber* fibers;
unsigned threads, running;
const Array* arrays;

size_t page_size() { return sysconf(_SC_PAGESIZE); }

// -- faults -------------------------------------------------------------------

sigjmp_buf failed;
char message[512];

void fault(int line, const char* format, ...) {
  int n = snprintf(message, sizeof message, "block (%u, %u, %u), thread (%u, %u, %u)",
                   blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y,
                   threadIdx.z);
  if (line > 0)
    n += snprintf(message + n, sizeof message - n, ", line %d", line);
  n += snprintf(message + n, sizeof message - n, ": ");
  va_list values;
  va_start(values, format);
  vsnprintf(message + n, sizeof message - n, format, values);
  va_end(values);
  siglongjmp(failed, 1);
}

void on_signal(int number, siginfo_t*, void*) {
  fault(0, number == SIGFPE ? "a division by zero"
                            : "memory that is not its own, or not to be written");
}

// -- threads and what they wait for -------------------------------------------

struct Context {
  jmp_buf where;
  ucontext_t start;
  bool started;
};
Context* contexts;
jmp_buf sweep_on;
ucontext_t outside;
void (*body)();

// Not inlined: what returns twice is kept apart from the kernel.
__attribute__((noinline)) void pause() {
  if (!_setjmp(contexts[running].where)) _longjmp(sweep_on, 1);
}

void main_of_fiber() {
  for (;;) {
    body();
    me().wait = ENDED;
    pause();
  }
}

__attribute__((noinline)) void resume(unsigned thread) {
  running = thread;
  threadIdx.x = thread % blockDim.x;
  threadIdx.y = thread / blockDim.x % blockDim.y;
  threadIdx.z = thread / blockDim.x / blockDim.y;
  if (_setjmp(sweep_on)) return;
  Context& own = contexts[thread];
  if (own.started) _longjmp(own.where, 1);
  own.started = true;
  setcontext(&own.start);
}

constexpr const char* NAMES[] = {"__syncwarp", "a shuffle", "a ballot", "an mma"};

void all_together(int line) {
  me().wait = BLOCK;
  me().line = line;
  pause();
}

void until(const unsigned* phase, unsigned parity, int line) {
  if (*phase % 2 != parity) return;
  me().wait = PHASE;
  me().phase = phase;
  me().parity = parity;
  me().line = line;
  pause();
}

// Whether a thread goes on whose barrier's phase has ended.
bool free_phases() {
  bool any = false;
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& one = fibers[i];
    if (one.wait != PHASE || *one.phase % 2 == one.parity) continue;
    one.wait = NOTHING;
    any = true;
  }
  return any;
}

void together(Kind kind, unsigned mask, int line) {
  if (!(mask >> lane() & 1)) fault(line, "%s without its own lane", NAMES[kind]);
  me().wait = WARP;
  me().kind = kind;
  me().mask = mask;
  me().line = line;
  pause();
}

// Lanes that have ended are waited for no more.
bool free_warp(unsigned first) {
  bool any = false;
  const unsigned end = first + 32 < threads ? first + 32 : threads;
  for (unsigned at = first; at < end; ++at) {
    const Fiber& one = fibers[at];
    if (one.wait != WARP) continue;
    unsigned met = 0, missing = 0;
    for (unsigned i = first; i < end; ++i) {
      const Fiber& other = fibers[i];
      const unsigned bit = one.mask & 1u << (i - first);
      if (other.wait == WARP && other.kind == one.kind && other.line == one.line &&
          other.mask == one.mask)
        met |= bit;
      else if (other.wait != ENDED)
        missing |= bit;
    }
    if (missing) continue;
    if (one.kind == MMA && met != ~0u)
      fault(one.line, "an mma of a warp with lanes that have ended");
    any = true;
    for (unsigned i = first; i < end; ++i)
      if (met >> (i - first) & 1) {
        memcpy(fibers[i].seen, fibers[i].given, sizeof fibers[i].seen);
        fibers[i].met = met;
        fibers[i].wait = NOTHING;
      }
    if (one.kind == MMA && one.multiply) one.multiply(fibers + first);
  }
  return any;
}

// Whether the block's threads wait for no other any more; where none lives, not.
bool free_block() {
  int line = 0;
  bool all = true;
  for (unsigned i = 0; i < threads; ++i) {
    const Fiber& one = fibers[i];
    if (one.wait == ENDED) continue;
    all = all && one.wait == BLOCK && (!line || line == one.line);
    line = one.line;
  }
  if (!line) return false;
  if (all) {
    for (unsigned i = 0; i < threads; ++i)
      if (fibers[i].wait == BLOCK) fibers[i].wait = NOTHING;
    return true;
  }
  char text[160];
  int n = 0, shown[2] = {-1, -1};
  for (unsigned i = 0; i < threads && n < 120; ++i) {
    const Fiber& one = fibers[i];
    if (one.wait == ENDED || (one.line == shown[0] && one.wait == shown[1])) continue;
    shown[0] = one.line, shown[1] = one.wait;
    n += snprintf(text + n, sizeof text - n, "%s%u at %s of line %d", n ? ", " : "", i,
                  one.wait == BLOCK   ? "__syncthreads"
                  : one.wait == PHASE ? "a barrier's phase"
                                      : NAMES[one.kind],
                  one.line);
  }
  fault(0, "a deadlock: thread %s", text);
}

extern "C" char __start_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_simt_shared[] __attribute__((weak, visibility("hidden")));

Shared* shared;

Shared::Shared(void* at, size_t size) : at(at), size(size), next(shared) {
  shared = this;
  memset(at, 0xff, size);
}

// Shared memory holds nothing yet: NaN, where it is read as floats.
void poison() {
  for (Shared* one = shared; one; one = one->next) memset(one->at, 0xff, one->size);
  if (__start_simt_shared)
    memset(__start_simt_shared, 0xff, __stop_simt_shared - __start_simt_shared);
}

// A warp goes as far as it can before the next one does anything: of what they share
// without a barrier, one order or the other finds too little.
void run_block(bool backwards) {
  poison();
  for (unsigned i = 0; i < threads; ++i) fibers[i].wait = NOTHING;
  const unsigned warps = (threads + 31) / 32;
  do {
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned first = 32 * (backwards ? warps - 1 - i : i);
      const unsigned size = threads - first < 32 ? threads - first : 32;
      do {
        for (unsigned j = 0; j < size; ++j) {
          const unsigned at = first + (backwards ? size - 1 - j : j);
          if (fibers[at].wait == NOTHING) resume(at);
        }
      } while (free_warp(first));
    }
  } while (free_phases() || free_block());
}

// -- memory of arrays ---------------------------------------------------------

// A copy that ends where memory ends: what is read or written after it is a fault.
struct Mapping {
  char *base, *start;
  size_t size, room;  // of all, and of what is not guard

  void map(const Array& array) {
    const size_t page = page_size();
    // CUDA's arrays begin at multiples of 256; of 16 is what loads ask for. A view may
    // begin after one, and does here as it does in Python's copy.
    const size_t lead =
        array.writable ? 0 : reinterpret_cast<uintptr_t>(array.data) % 16;
    const size_t held = (lead + array.bytes + 15) / 16 * 16;
    room = (held + page - 1) / page * page;
    size = room + 2 * GUARD;
    const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    base = static_cast<char*>(mmap(nullptr, size, PROT_NONE, kind, -1, 0));
    char* pages = base + GUARD;
    mprotect(pages, room, PROT_READ | PROT_WRITE);
    memset(pages, 0xff, room);
    start = pages + room - held + lead;
    memcpy(start, array.data, array.bytes);
    if (!array.writable) mprotect(pages, room, PROT_READ);
  }
  // Whether what surrounds it on its pages is as it was.
  bool whole(const Array& array) const {
    const char* pages = base + GUARD;
    for (const char* at = pages; at < pages + room; ++at)
      if ((at < start || at >= start + array.bytes) && *at != '\xff') return false;
    return true;
  }
};

Mapping* mappings;

char* start_of(int i) { return mappings[i].start; }

// -- a launch -----------------------------------------------------------------

void run_grid(const Launch& launch) {
  const uint64_t blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t at = launch.backwards ? blocks - 1 - i : i;
    blockIdx.x = at % gridDim.x;
    blockIdx.y = at / gridDim.x % gridDim.y;
    blockIdx.z = at / gridDim.x / gridDim.y;
    run_block(launch.backwards);
  }
}

// Signals that the kernel's faults raise, caught while it runs.
struct Signals {
  static constexpr int NUMBERS[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction before[3];
  stack_t stack_before;
  char* stack;

  void take() {
    stack = static_cast<char*>(malloc(STACK));
    stack_t own{};
    own.ss_sp = stack;
    own.ss_size = STACK;
    sigaltstack(&own, &stack_before);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; ++i) sigaction(NUMBERS[i], &action, &before[i]);
  }
  void give_back() {
    for (int i = 0; i < 3; ++i) sigaction(NUMBERS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
    free(stack);
  }
};

size_t stack_step() { return STACK + page_size(); }

void* new_stacks() {
  const size_t size = stack_step() * MOST_THREADS;
  char* stacks = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  // What outgrows a stack reaches no other.
  for (unsigned i = 0; i < MOST_THREADS; ++i)
    mprotect(stacks + i * stack_step(), page_size(), PROT_NONE);
  return stacks;
}

const char* message_of() { return message; }

template <class T>
T* zeros(size_t count) {
  return static_cast<T*>(calloc(count, sizeof(T)));
}

int launch(const Launch& wanted, const Array* given, void (*kernel)()) {
  gridDim = {wanted.grid[0], wanted.grid[1], wanted.grid[2]};
  blockDim = {wanted.block[0], wanted.block[1], wanted.block[2]};
  threads = blockDim.x * blockDim.y * blockDim.z;
  body = kernel;
  arrays = given;
  mappings = zeros<Mapping>(wanted.count);
  for (int i = 0; i < wanted.count; ++i) mappings[i].map(given[i]);
  fibers = zeros<Fiber>(threads);
  contexts = zeros<Context>(threads);
  char* stacks = static_cast<char*>(wanted.stacks);
  for (unsigned i = 0; i < threads; ++i) {
    ucontext_t& start = contexts[i].start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks + i * stack_step() + page_size();
    start.uc_stack.ss_size = STACK;
    start.uc_link = &outside;
    makecontext(&start, main_of_fiber, 0);
  }
  static Signals signals;
  signals.take();
  const int broken = sigsetjmp(failed, 1);
  if (!broken) run_grid(wanted);
  signals.give_back();
  int result = broken;
  for (int i = 0; i < wanted.count; ++i) {
    if (!result && given[i].writable && !mappings[i].whole(given[i])) {
      snprintf(message, sizeof message, "array %d was written beyond its ends", i);
      result = 1;
    }
    if (given[i].writable) memcpy(given[i].data, mappings[i].start, given[i].bytes);
    munmap(mappings[i].base, mappings[i].size);
  }
  free(fibers);
  free(contexts);
  free(mappings);
  return result;
}

// -- tensor cores -------------------------------------------------------------

template <class T>
float half_of(uint32_t word, int which) {
  T value;
  value.bits = word >> 16 * which;
  return static_cast<float>(value);
}

template <class T>
__attribute__((optimize("O3"))) void multiply(Fiber* warp) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 6; ++i)
      for (int which = 0; which < 2; ++which) {
        const float value = half_of<T>(warp[lane].seen[i], which);
        const int group = lane / 4, k = lane % 4 * 2 + which;
        if (i < 4)
          a[i % 2 * 8 + group][i / 2 * 8 + k] = value;
        else
          b[(i - 4) * 8 + k][group] = value;
      }
  for (int row = 0; row < 16; ++row) {
    // Products are exact; hardware rounds their sum, in an order of its own.
    double sums[8] = {};
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column)
        sums[column] += double{a[row][k]} * double{b[k][column]};
    for (int column = 0; column < 8; ++column)
      warp[row % 8 * 4 + column / 2].products[row / 8 * 2 + column % 2] = sums[column];
  }
}

template void multiply<__nv_bfloat16>(Fiber*);
template void multiply<__half>(Fiber*);

}  // namespace simt

// What -fsanitize calls; the place comes first in what it hands over.
struct SanitizedPlace {
  const char* file;
  uint32_t line, column;
};
extern "C" __attribute__((visibility("hidden"))) void
__ubsan_handle_out_of_bounds(SanitizedPlace* place, uintptr_t index) {
  simt::fault(place->line, "index %ld beyond an array's end", static_cast<long>(index));
}
extern "C" __attribute__((visibility("hidden"))) void
__ubsan_handle_type_mismatch_v1(SanitizedPlace* place, uintptr_t at) {
  simt::fault(place->line, "an address that is not aligned: ...%02x",
              static_cast<unsigned>(at % 256));
}
extern "C" __attribute__((visibility("hidden"))) void
__ubsan_handle_divrem_overflow(SanitizedPlace* place, uintptr_t, uintptr_t) {
  simt::fault(place->line, "a division by zero");
}
