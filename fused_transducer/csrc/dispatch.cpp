// The functions that Python calls: each goes to the best instruction set that this processor has.
#include <stdlib.h>
#include <string.h>

#include "problem.h"

#define FT_DECLARE(isa)                                        \
  void fused_transducer_forward_##isa(const Problem*);         \
  void fused_transducer_backward_##isa(const Problem*);        \
  int64_t fused_transducer_forward_bytes_##isa(const Problem*); \
  int64_t fused_transducer_backward_bytes_##isa(const Problem*);
#define FT_KERNELS(isa)                                                                                          \
  {#isa, fused_transducer_forward_##isa, fused_transducer_backward_##isa, fused_transducer_forward_bytes_##isa, \
   fused_transducer_backward_bytes_##isa}

extern "C" {
FT_DECLARE(baseline)
#if defined(__x86_64__)
FT_DECLARE(avx2)
FT_DECLARE(avx512)
#endif
}

namespace {

struct Kernels {
  const char* name;
  void (*forward)(const Problem*);
  void (*backward)(const Problem*);
  int64_t (*forward_bytes)(const Problem*);
  int64_t (*backward_bytes)(const Problem*);
};

// The best that this processor has, but none above FUSED_TRANSDUCER_ISA where that is set (for tests).
Kernels chosen() {
#if defined(__x86_64__)
  const char* wanted = getenv("FUSED_TRANSDUCER_ISA");
  bool any = !wanted || !*wanted || !strcmp(wanted, "avx512");
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && any) return FT_KERNELS(avx512);
  if (avx2 && (any || !strcmp(wanted, "avx2"))) return FT_KERNELS(avx2);
#endif
  return FT_KERNELS(baseline);
}

const Kernels& kernels() {
  static const Kernels found = chosen();
  return found;
}

}  // namespace

#define FT_EXPORT extern "C" __attribute__((visibility("default")))

FT_EXPORT const char* fused_transducer_isa() { return kernels().name; }
FT_EXPORT int64_t fused_transducer_forward_bytes(const Problem* p) { return kernels().forward_bytes(p); }
FT_EXPORT int64_t fused_transducer_backward_bytes(const Problem* p) { return kernels().backward_bytes(p); }
FT_EXPORT void fused_transducer_forward(const Problem* p) { kernels().forward(p); }
FT_EXPORT void fused_transducer_backward(const Problem* p) { kernels().backward(p); }
