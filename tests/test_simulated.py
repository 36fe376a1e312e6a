"""The simulator of CUDA: kernels of our own, whose answers are known, and what makes it stop."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from rnnt_bench.setup import extensions, simulated

KERNELS = """
#include <cuda_runtime.h>
#include <cstdio>

__global__ void scan(int *x) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, value = x[i];
  if (threadIdx.x >= 40) return;
  for (int distance = 1; distance < warpSize; distance *= 2) {
    int other = __shfl_up_sync(0xffffffff, value, distance);
    if (threadIdx.x % warpSize >= distance) value += other;
  }
  x[i] = value;
}

template <typename T, int N>
__global__ void reverse(T *x, int *count) {
  __shared__ T held[N];
  held[threadIdx.x + threadIdx.y * blockDim.x] = x[blockIdx.y * N + threadIdx.x + threadIdx.y * blockDim.x];
  __syncthreads();
  x[blockIdx.y * N + threadIdx.x + threadIdx.y * blockDim.x] = held[N - 1 - threadIdx.x - threadIdx.y * blockDim.x];
  atomicAdd(count, 2);
}

__global__ void stuck() {
  if (threadIdx.x) __syncwarp();
  else __syncthreads();
}

__global__ void beside(int *x) { x[threadIdx.x + 8] = 1; }

int main(int count, char **words) {
  int ones[128], calls = 0;
  double numbers[96];
  for (int i = 0; i < 128; ++i) ones[i] = 1;
  for (int i = 0; i < 96; ++i) numbers[i] = i;
  scan<<<2, 64>>>(ones);
  reverse<double, 48><<<dim3(1, 2), dim3(24, 2), 0, nullptr>>>(numbers, &calls);
  std::printf("%d %d %d %d %.0f %.0f %d\\n", ones[31], ones[32], ones[39], ones[40], numbers[0], numbers[95], calls);
  if (count > 1 && *words[1] == 's') stuck<<<1, 32>>>();
  if (count > 1) beside<<<1, 1>>>(new int[8]);
}
"""


def compiled(folder, *flags):
    (folder / "kernels.cc").write_text(simulated.rewritten(KERNELS))
    command = [os.environ.get("CXX", "c++"), "-std=c++17", *simulated.flags(), "-include", simulated.HEADER, *flags]
    subprocess.run([*command, folder / "kernels.cc", "-o", folder / "kernels"], check=True)
    return folder / "kernels"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("no C++ compiler")
    return compiled(tmp_path_factory.mktemp("simulated"))


def run(*words):
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)


def test_warps_blocks_shared_memory_and_atomics(program):
    done = run(program)
    assert done.returncode == 0 and done.stdout.split() == ["32", "1", "8", "1", "47", "48", "192"], done


def test_threads_that_wait_for_each_other_end_the_process(program):
    done = run(program, "stuck")
    assert done.returncode < 0 and "block (0, 0, 0) wait for each other" in done.stderr


def test_the_address_sanitizer_sees_what_a_kernel_writes_beside_its_array(program, tmp_path):
    done = run(compiled(tmp_path, "-fsanitize=address"), "beside")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr
    assert run(program, "beside").returncode == 0


def test_sources_for_a_gpu_take_tensors_of_the_cpu():
    source = "#include <c10/cuda/CUDAStream.h>\nif (x.is_cuda()) f<T, 32>\n   <<<n, 32, 0, stream()>>>(x, 1);"
    call = "simulated::Launch(n, 32, 0, stream()).of([](auto... values) { f<T, 32>(values...); }, x, 1);"
    assert simulated.rewritten(source) == f"\nif (x.is_cpu()) {call}"
    assert all(simulated.DEVICE in source.devices for source in extensions.SOURCE_PACKAGES.values())
