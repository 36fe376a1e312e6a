// Included before the C++ code of fused_transducer by benchmarks/fused_parts.py: adds up how long each thread works on
// each part of a step.  A part is left every 50 microseconds or later, so the clock takes less than 0.2% of the time.
#pragma once

#include <omp.h>
#include <stdint.h>
#include <time.h>

namespace ft_parts {

enum Part { outside, preparing, activations, products, exponentials, lattice, adding, waiting, PARTS };
enum { THREADS = 1024 };

struct alignas(128) Thread {
  int64_t ns[PARTS], since;
  int part;
};

inline Thread threads[THREADS];
inline int64_t cells;

static inline void enter(Part part) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  int64_t ns = now.tv_sec * 1000000000LL + now.tv_nsec;
  Thread& thread = threads[omp_get_thread_num() % THREADS];
  thread.ns[thread.part] += ns - thread.since;
  thread.since = ns;
  thread.part = part;
}

}  // namespace ft_parts

#define FT_PART(part) ft_parts::enter(ft_parts::part)
#define FT_CELLS(count) __atomic_fetch_add(&ft_parts::cells, count, __ATOMIC_RELAXED)

// Cells whose logits forward computed since the library was loaded.
extern "C" __attribute__((used, visibility("default"))) inline int64_t fused_transducer_cells() {
  return ft_parts::cells;
}

// Nanoseconds of each part since the library was loaded, over all threads: PARTS numbers.
extern "C" __attribute__((used, visibility("default"))) inline void fused_transducer_parts(int64_t* to) {
  for (int part = 0; part < ft_parts::PARTS; ++part) {
    to[part] = 0;
    for (const ft_parts::Thread& thread : ft_parts::threads) to[part] += thread.ns[part];
  }
}
