// Where threads wait for each other.
//
// Not at OpenMP's barrier: that of GCC spins for milliseconds before it sleeps.  Beside other programs the thread that
// is waited for may not be running at all, and who spins takes the processor from it, and from its own share.
#pragma once

#include "simd.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace FT_ISA {

FT_INLINE int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// All threads of a parallel region meet here, any number of times.
class Meeting {
 public:
  void wait() {
#if defined(_OPENMP) && defined(__linux__)
    unsigned now = __atomic_load_n(&round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == omp_get_num_threads()) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&round, now + 1, __ATOMIC_RELEASE);
      syscall(SYS_futex, &round, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
      return;
    }
    for (int i = 0; i < SPINS && __atomic_load_n(&round, __ATOMIC_ACQUIRE) == now; ++i) pause();
    while (__atomic_load_n(&round, __ATOMIC_ACQUIRE) == now)
      syscall(SYS_futex, &round, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
#elif defined(_OPENMP)
#pragma omp barrier
#endif
  }

 private:
  enum { SPINS = 1000 };  // tens of microseconds: what threads that end together are apart

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
  }

  int arrived = 0;
  unsigned round = 0;
};

}  // namespace FT_ISA
