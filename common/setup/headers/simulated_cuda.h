// CUDA kernels as plain C++ on the CPU: enough of CUDA to run the kernels of the losses that are compiled from source.
//
// Blocks run in turn.  Threads are fibres: one runs until it waits in __syncthreads, __syncwarp or a shuffle.  A warp goes
// on when its threads that have not returned wait, a block when all of its threads do; anything else ends the process with
// a line.  It is one order of many: no race is found by it.  Included before each source that simulated.py has rewritten.
#pragma once

#ifdef TORCH_EXTENSION_NAME
#include <torch/extension.h>
#endif
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __shared__ static thread_local  // blocks run in turn

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace simulated {

constexpr std::size_t kStack = 256 * 1024;
constexpr int kLongestValue = 8;
enum class State { idle, runs, waits_for_warp, waits_for_block };

struct Fibre {
  ucontext_t context;  // of its beginning; from then on _longjmp, which makes no system call
  jmp_buf here;
  bool begun = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
  unsigned thread = 0;
  State state = State::idle;
};

// What the threads of a block share.  Fibres are kept from block to block: a thread that never waits takes no new one.
struct Block {
  std::function<void()> kernel;
  unsigned threads = 0, begun = 0, ended = 0;
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<unsigned> running;  // threads of each warp that have not returned
  std::vector<char> given, taken;  // values of a shuffle, by thread: as they are given, and as all have given them
  Fibre *current = nullptr;
  jmp_buf scheduler;
};
inline thread_local Block block;

inline void place(unsigned thread) {
  threadIdx = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / (blockDim.x * blockDim.y));
}

inline void leave(State state) {
  block.current->state = state;
  if (!_setjmp(block.current->here)) _longjmp(block.scheduler, 1);
}

// The life of a fibre: one thread after the other, as long as there are some; then it waits for the next block.
inline void live() {
  for (Fibre *self = block.current;;) {
    while (block.begun < block.threads) {
      self->thread = block.begun++;
      self->state = State::runs;
      place(self->thread);
      block.kernel();
      --block.running[self->thread / warpSize];
      ++block.ended;
    }
    leave(State::idle);
  }
}

inline void resume(Fibre &fibre) {
  block.current = &fibre;
  if (fibre.state != State::idle) place(fibre.thread);
  if (_setjmp(block.scheduler)) return;
  if (fibre.begun) _longjmp(fibre.here, 1);
  fibre.begun = true;
  setcontext(&fibre.context);
}

inline Fibre &idle_fibre() {
  for (auto &fibre : block.fibres)
    if (fibre->state == State::idle) return *fibre;
  block.fibres.emplace_back(new Fibre);
  Fibre &fibre = *block.fibres.back();
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack.get();
  fibre.context.uc_stack.ss_size = kStack;
  makecontext(&fibre.context, live, 0);
  return fibre;
}

// Lets those go on whose warp, or whose block, waits as a whole; false where there are none.
inline bool release() {
  std::vector<unsigned> waiting(block.running.size());
  unsigned at_barrier = 0;
  for (auto &fibre : block.fibres) {
    if (fibre->state == State::waits_for_warp) ++waiting[fibre->thread / warpSize];
    at_barrier += fibre->state == State::waits_for_block;
  }
  bool whole = at_barrier == block.threads - block.ended, any = false;
  block.taken = block.given;
  for (auto &fibre : block.fibres) {
    unsigned warp = fibre->thread / warpSize;
    bool its_warp = fibre->state == State::waits_for_warp && waiting[warp] == block.running[warp];
    if (its_warp || (whole && fibre->state == State::waits_for_block)) fibre->state = State::runs, any = true;
  }
  return any;
}

inline void run_block() {
  block.begun = block.ended = 0;
  for (std::size_t warp = 0; warp < block.running.size(); ++warp)
    block.running[warp] = std::min<unsigned>(warpSize, block.threads - warp * warpSize);
  while (block.ended < block.threads) {
    while (block.begun < block.threads) resume(idle_fibre());
    for (std::size_t at = 0; at < block.fibres.size(); ++at)
      if (block.fibres[at]->state == State::runs) resume(*block.fibres[at]);
    if (block.ended < block.threads && !release()) {
      auto [x, y, z] = blockIdx;
      std::fprintf(stderr, "simulated CUDA: threads of block (%u, %u, %u) wait for each other for ever\n", x, y, z);
      std::abort();
    }
  }
}

// What a launch `kernel<<<grid, threads, shared bytes, stream>>>(arguments)` becomes: Launch(...).of(kernel, arguments).
struct Launch {
  dim3 grid, threads;
  template <typename... Further>
  Launch(dim3 grid, dim3 threads, Further...) : grid(grid), threads(threads) {}

  template <typename Kernel, typename... Arguments>
  void of(Kernel kernel, Arguments... arguments) {
    gridDim = grid, blockDim = threads;
    block.kernel = [&] { kernel(arguments...); };
    block.threads = threads.x * threads.y * threads.z;
    block.running.assign((block.threads + warpSize - 1) / warpSize, 0);
    block.given.assign(block.threads * kLongestValue, 0);
    for (unsigned at = 0; at < grid.x * grid.y * grid.z; ++at) {
      blockIdx = dim3(at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y);
      run_block();
    }
  }
};

}  // namespace simulated

inline void __syncthreads() { simulated::leave(simulated::State::waits_for_block); }
inline void __syncwarp(unsigned = ~0u) { simulated::leave(simulated::State::waits_for_warp); }
inline void __threadfence() {}

template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  static_assert(sizeof(T) <= simulated::kLongestValue);
  unsigned thread = simulated::block.current->thread;
  std::memcpy(&simulated::block.given[thread * simulated::kLongestValue], &value, sizeof(T));
  __syncwarp();
  if (thread % warpSize < distance) return value;
  std::memcpy(&value, &simulated::block.taken[(thread - distance) * simulated::kLongestValue], sizeof(T));
  return value;
}

template <typename T, typename U>
T atomicAdd(T *address, U value) {
  T before = *address;
  *address = before + static_cast<T>(value);
  return before;
}

using std::max;
using std::min;

// The host's side: one device, whose memory is this process's, and where every launch has ended when it returns.
using cudaError_t = int;
using cudaStream_t = void *;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
#ifdef TORCH_EXTENSION_NAME
namespace c10::cuda {
inline cudaStream_t getCurrentCUDAStream(int = 0) { return nullptr; }
struct CUDACachingAllocator {
  static c10::Allocator *get() { return c10::GetAllocator(c10::kCPU); }
};
}  // namespace c10::cuda
namespace at::cuda {
struct OptionalCUDAGuard {
  template <typename Device>
  explicit OptionalCUDAGuard(Device) {}
};
}  // namespace at::cuda
#endif
