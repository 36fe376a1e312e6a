// load_balance_search of moderngpu, the one function of it that optimized_transducer calls: which segment has each item?
// One thread searches for one item, in log2(segments) steps.
#pragma once

#include "moderngpu/context.hxx"

#ifdef __CUDACC__
#define MGPU_HOST_DEVICE __host__ __device__
#else
#define MGPU_HOST_DEVICE
#endif

namespace mgpu {

// The last segment that begins at `item` or before: empty segments have no item.  starts[0] must be 0.
template <typename Index>
MGPU_HOST_DEVICE Index segment_of(Index item, const Index *starts, Index segments) {
  Index low = 0, high = segments;  // starts[low] <= item, and starts[high] > item where there is one
  while (high - low > 1) {
    Index middle = low + (high - low) / 2;
    if (starts[middle] <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

#ifdef __CUDACC__

template <typename Index>
__global__ void write_segments(Index items, const Index *starts, Index segments, Index *output) {
  for (Index item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
    output[item] = segment_of(item, starts, segments);
  }
}

// output (items): the segment of each item; starts (segments): the first item of each, on the device.
template <typename Index>
void load_balance_search(Index items, const Index *starts, Index segments, Index *output, standard_context_t &context) {
  if (items == 0) return;
  constexpr int kThreads = 256, kMostBlocks = 65535;
  Index blocks = (items - 1) / kThreads + 1;
  write_segments<<<blocks < kMostBlocks ? blocks : kMostBlocks, kThreads, 0, context.stream()>>>(items, starts, segments,
                                                                                              output);
}

#endif

}  // namespace mgpu
