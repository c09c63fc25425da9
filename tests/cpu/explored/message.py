"""Rank 0 writes data and then says so; rank 1 waits for that and reads: ``message.py KERNEL``.

``nofence`` has no fence between data and flag, ``device_fence`` one that reaches rank 0 alone. ``one_word`` polls
16-byte messages by one of their words.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

import drvkit as dk

KERNEL = sys.argv[1]
SOURCE = """
template <int SCOPE> __device__ void flagged(float* data, volatile int* flag, float* out, const float* in, int rank) {
  int i = threadIdx.x;
  if (rank == 0) {
    data[i] = in[i];
    if (SCOPE == 1) __threadfence();
    if (SCOPE == 2) __threadfence_system();
    __syncthreads();
    if (i == 0) *flag = 1;
  } else {
    if (i == 0) while (*flag == 0);
    __syncthreads();
    out[i] = data[i];
  }
}
__global__ void nofence(float* data, int* flag, float* out, const float* in, int rank) {
  flagged<0>(data, flag, out, in, rank);
}
__global__ void device_fence(float* data, int* flag, float* out, const float* in, int rank) {
  flagged<1>(data, flag, out, in, rank);
}
__global__ void fence(float* data, int* flag, float* out, const float* in, int rank) {
  flagged<2>(data, flag, out, in, rank);
}
template <bool ALL> __device__ void words(float* data, float* out, const float* in, int rank) {
  float4* box = (float4*)data + threadIdx.x;
  if (rank == 0) {
    float4 v = ((const float4*)in)[threadIdx.x];
    asm volatile("st.volatile.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(box), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
  } else {
    float4 v;
    do asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                    : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(box) : "memory");
    while (v.x == 0.f || (ALL && (v.y == 0.f || v.z == 0.f || v.w == 0.f)));
    ((float4*)out)[threadIdx.x] = v;
  }
}
__global__ void one_word(float* data, int*, float* out, const float* in, int rank) {
  words<false>(data, out, in, rank);
}
__global__ void all_words(float* data, int*, float* out, const float* in, int rank) {
  words<true>(data, out, in, rank);
}
"""
N, BLOCK = (128, 32) if KERNEL.endswith(("word", "words")) else (32, 32)

devices = [dk.Device(f"cpu:{rank}") for rank in range(2)]
data, flag, out = devices[1].zeros(N, np.float32), devices[1].zeros(1, np.int32), devices[1].zeros(N, np.float32)
message = devices[0].array(np.arange(1, N + 1, dtype=np.float32))
streams = [device.stream() for device in devices]
for rank, device in enumerate(devices):
    kernel = device.module(dk.Source.from_text(SOURCE, "message.cu")).kernel(KERNEL)
    pointers = [ctypes.c_void_p(buffer.address) for buffer in (data, flag, out, message)]  # of both devices
    kernel.launch(streams[rank], grid=1, block=BLOCK, args=(*pointers, rank))
for stream in streams:
    stream.synchronize()
np.testing.assert_array_equal(out.numpy(), message.numpy())
