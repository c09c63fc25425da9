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

// Two floats as a pair of T, `low` in the low half.
template <typename T>
__device__ unsigned pair(float low, float high);
template <>
__device__ inline unsigned pair<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}
template <>
__device__ inline unsigned pair<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}

// bfloat16 in words of two, the first in the low half: as arrays of elements the compiler may load them one by one.
__device__ inline float2 floats_of(unsigned pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ inline void floats_of(uint4 eight, float (&x)[8]) {
  const unsigned words[] = {eight.x, eight.y, eight.z, eight.w};
  for (int i = 0; i < 4; ++i) x[2 * i] = floats_of(words[i]).x, x[2 * i + 1] = floats_of(words[i]).y;
}

// This thread's number in a one-dimensional grid. 64-bit: the grid may reach past the last int.
__device__ inline long long thread_in_grid() { return 1ll * blockIdx.x * blockDim.x + threadIdx.x; }

}  // namespace dk
