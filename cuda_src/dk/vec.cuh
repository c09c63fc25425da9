// Several elements in one access, and float <-> T for the types that kernels store.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace dk {

// N elements that one load or one store moves; an access of 16 bytes is the widest of every architecture.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert(N > 0 && (N & (N - 1)) == 0, "an access has a power of two of elements");
  static_assert(sizeof(T) * N <= 16, "an access has at most 16 bytes");

  T elements[N];

  // Whether an access at p is aligned; load and store fault where it is not.
  static __device__ bool fits(const T* p) { return reinterpret_cast<unsigned long long>(p) % alignof(Vec) == 0; }

  static __device__ Vec load(const T* p) { return *reinterpret_cast<const Vec*>(p); }

  __device__ void store(T* p) const { *reinterpret_cast<Vec*>(p) = *this; }
};

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// The nearest T, ties to even; beyond the largest one, infinity.
template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) { return value; }
template <>
__device__ inline __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// This thread's number in a one-dimensional grid. 64-bit: the grid may reach past the last int.
__device__ inline long long thread_in_grid() { return 1ll * blockIdx.x * blockDim.x + threadIdx.x; }

}  // namespace dk
