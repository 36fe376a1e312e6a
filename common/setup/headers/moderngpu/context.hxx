// The part of moderngpu's context that optimized_transducer's CUDA sources derive from: a stream, and memory for scratch.
// Written for this suite, so that no checkout of moderngpu is needed.
#pragma once

#include <cstddef>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
using cudaStream_t = void *;
#endif

namespace mgpu {

enum memory_space_t { memory_space_device, memory_space_host };

class standard_context_t {
 public:
  // print_properties: moderngpu prints the device's properties for true; here nothing is printed.
  standard_context_t(bool print_properties, cudaStream_t stream) : stream_(stream) { (void)print_properties; }
  virtual ~standard_context_t() = default;

  virtual void *alloc(std::size_t size, memory_space_t space) = 0;
  virtual void free(void *memory, memory_space_t space) = 0;
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
};

}  // namespace mgpu
