// One instruction set's forward, backward and sizes of workspaces; the build compiles this file once for each.
#include "drivers.h"

#define FT_JOIN_(a, b) a##b
#define FT_JOIN(a, b) FT_JOIN_(a, b)
#define FT_NAME(name) FT_JOIN(fused_transducer_##name##_, FT_ISA)

extern "C" {

__attribute__((visibility("hidden"))) void FT_NAME(forward)(const Problem* p) {
  p->is_double ? FT_ISA::forward<double>(*p) : FT_ISA::forward<float>(*p);
}

__attribute__((visibility("hidden"))) void FT_NAME(backward)(const Problem* p) {
  p->is_double ? FT_ISA::backward<double>(*p) : FT_ISA::backward<float>(*p);
}

__attribute__((visibility("hidden"))) int64_t FT_NAME(forward_bytes)(const Problem* p) {
  return p->is_double ? FT_ISA::ForwardSpace<double>(*p).bytes : FT_ISA::ForwardSpace<float>(*p).bytes;
}

__attribute__((visibility("hidden"))) int64_t FT_NAME(backward_bytes)(const Problem* p) {
  return p->is_double ? FT_ISA::BackwardSpace<double>(*p).bytes : FT_ISA::BackwardSpace<float>(*p).bytes;
}

}
