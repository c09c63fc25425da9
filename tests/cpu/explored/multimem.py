"""A two-shot all-reduce of four ranks through multicast memory: ``multimem.py VARIANT``.

Each rank reduces its part of what all have staged, and stores it to all. ``relaxed`` says that data are there without
a release; ``early`` does not wait until the others have staged theirs.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np

import drvkit as dk

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from team import Team

RELEASES, WAITS = (int(sys.argv[1] != name) for name in ("relaxed", "early"))
SOURCE = r"""
__device__ void meet(unsigned* all, const unsigned* own, unsigned target, int releases) {
  __syncthreads();
  if (threadIdx.x == 0) {
    if (releases) asm volatile("multimem.red.release.sys.global.add.u32 [%0], 1;" :: "l"(all) : "memory");
    else asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], 1;" :: "l"(all) : "memory");
    unsigned seen;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(own) : "memory");
    while (seen < target);
  }
  __syncthreads();
}
__global__ void reduce(float4* out, const float4* in, char* all, char* own, int rank, int ranks, unsigned epoch,
                       int releases, int waits) {
  const int n = blockDim.x, i = threadIdx.x, step = n * ranks;
  float4 *staged = (float4*)own, *result = staged + step;
  float4 *all_staged = (float4*)all, *all_results = all_staged + step;
  unsigned *flag = (unsigned*)(result + step), *all_flags = (unsigned*)(all_results + step);
#pragma unroll 1
  for (int p = 0; p < ranks; p++) staged[p * n + i] = in[p * n + i];
  if (waits) meet(all_flags, flag, (2 * epoch + 1) * ranks, releases);
  float4 v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(all_staged + rank * n + i) : "memory");
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(all_results + rank * n + i), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
  meet(all_flags, flag, (epoch + 1) * (1 + waits) * ranks, releases);
#pragma unroll 1
  for (int p = 0; p < ranks; p++) out[p * n + i] = result[p * n + i];
}"""
RANKS, THREADS, EPOCHS = 4, 8, 2
N = 4 * THREADS * RANKS

devices = [dk.Device(f"cpu:{rank}") for rank in range(RANKS)]
team = Team(RANKS)
given = np.random.default_rng(1).integers(-8, 8, (EPOCHS, RANKS, N)).astype(np.float32)
ins = [[device.array(given[epoch, rank]) for rank, device in enumerate(devices)] for epoch in range(EPOCHS)]
outs = [[device.zeros(N, np.float32) for device in devices] for _ in range(EPOCHS)]
streams = [device.stream() for device in devices]
for rank, device in enumerate(devices):
    kernel = device.module(dk.Source.from_text(SOURCE, "multimem.cu")).kernel("reduce")
    places = ctypes.c_void_p(team.address), ctypes.c_void_p(team.views[rank])
    for epoch in range(EPOCHS):
        args = (outs[epoch][rank], ins[epoch][rank], *places, rank, RANKS, epoch, RELEASES, WAITS)
        kernel.launch(streams[rank], grid=1, block=THREADS, args=args)
for stream in streams:
    stream.synchronize()
for epoch in range(EPOCHS):
    for out in outs[epoch]:
        np.testing.assert_array_equal(out.numpy(), given[epoch].sum(axis=0))
