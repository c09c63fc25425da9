"""The CUDA text of the kernels that the tests launch, what the host must know of them, and short ways to use them."""

from __future__ import annotations

from typing import Any

import numpy as np

from drvkit.device import Device, Stream
from drvkit.graph import Graph
from drvkit.memory import Buffer
from drvkit.module import Module
from drvkit.source import Source

SOURCE = Source.from_text(
    r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ int counters[4] = {1, 2, 3, 4};
__constant__ float factor = 2.0f;

__device__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
  return now;
}

// Busy for so long, at most 200 ms.
__device__ void wait(unsigned milliseconds) {
  const unsigned long long end = nanoseconds() + 1000000ull * min(milliseconds, 200u);
  while (nanoseconds() < end) {}
}

__global__ void spin(unsigned milliseconds) { wait(milliseconds); }

__global__ void nothing() {}

__global__ void scale(const float* x, float* y, int n, float alpha) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * alpha;
}

__global__ void add(const float* x, float* y, int n, float value) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + value;
}

// The threads that it ran with, by what they add up to.
__global__ void count_threads(int* count) { atomicAdd(count, 1); }

// log[0] values were logged; this is one more. One thread.
__global__ void append(int* log, int value) {
  const int at = ++log[0];
  log[at] = value;
}

__global__ void store(int* to, int value) { *to = value; }

__global__ void set(cudaGraphConditionalHandle handle, unsigned value) { cudaGraphSetConditional(handle, value); }

// True as long as *left is above 0 after counting down.
__global__ void count_down(cudaGraphConditionalHandle handle, int* left) {
  cudaGraphSetConditional(handle, --*left > 0);
}

struct Triple { int a; float b; short c; };

struct Out {
  bool b; signed char i8; unsigned char u8; short i16; unsigned short u16; int i32; unsigned u32; long long i64;
  unsigned long long u64; float f32; double f64; __half f16; __nv_bfloat16 bf16; Triple triple; int pointed;
};

__global__ void every_type(bool b, signed char i8, unsigned char u8, short i16, unsigned short u16, int i32,
                           unsigned u32, long long i64, unsigned long long u64, float f32, double f64, __half f16,
                           __nv_bfloat16 bf16, Triple triple, const int* pointed, Out* out) {
  *out = {b, i8, u8, i16, u16, i32, u32, i64, u64, f32, f64, f16, bf16, triple, *pointed};
}

// y is x backwards, by way of dynamic shared memory of n ints. One block.
__global__ void reverse(const int* x, int* y, int n) {
  extern __shared__ int shared[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) shared[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = shared[n - 1 - i];
}

__global__ void __launch_bounds__(128) static_shared(int* y) {
  __shared__ int hundred[100];
  for (int i = threadIdx.x; i < 100; i += blockDim.x) hundred[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) *y = hundred[y[0] % 100];
}

__global__ void cluster_extents(int* extents) {
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(extents[0]));
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(extents[1]));
  asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(extents[2]));
}

// How many blocks, of one thread, each has seen arrive: all, if all are resident at once. Gives up after 200 ms.
__global__ void meet(int* arrived, int* seen) {
  atomicAdd(arrived, 1);
  const unsigned long long end = nanoseconds() + 200000000ull;
  while (atomicAdd(arrived, 0) < gridDim.x && nanoseconds() < end) {}
  seen[blockIdx.x] = atomicAdd(arrived, 0);
}

// Lets its dependents start, and only then, late, writes what they read.
__global__ void early_trigger(int* to, int value) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  wait(5);
  *to = value;
}

__global__ void late_reader(const int* from, int* to) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  *to = *(volatile const int*)from + 1;
}

__global__ void use_variables(float* y) { *y = counters[1] * factor; }

extern "C" __global__ void plain(const float* x, float* y, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1;
}
""",
    "kernels.cu",
)

TRIPLE = np.dtype([("a", "i4"), ("b", "f4"), ("c", "i2")], align=True)
OUT = np.dtype(
    [
        *(("b", "?"), ("i8", "i1"), ("u8", "u1"), ("i16", "i2"), ("u16", "u2"), ("i32", "i4"), ("u32", "u4")),
        *(("i64", "i8"), ("u64", "u8"), ("f32", "f4"), ("f64", "f8"), ("f16", "f2"), ("bf16", "u2")),
        *(("triple", TRIPLE), ("pointed", "i4")),
    ],
    align=True,
)


def replay(graph: Graph, stream: Stream, launches: int = 1) -> None:
    """Run it once, or several times, and wait."""
    with graph.instantiate() as exe:
        for _ in range(launches):
            exe.launch(stream)
        stream.synchronize()


def ints(device: Device, *values: int) -> Buffer:
    """Device memory with these int32."""
    return device.array(np.array(values, np.int32))


def scaled(graph: Graph, module: Module, x: Any, y: Any, alpha: float, **how: Any) -> Any:
    """A node that sets ``y = alpha * x``, for at most 1024 elements."""
    return graph.kernel(module.kernel("scale"), grid=4, block=256, args=(x, y, x.size, alpha), **how)
