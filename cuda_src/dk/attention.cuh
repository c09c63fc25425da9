// What the attention kernels compute with.
//
// Shared memory is 16 bytes a chunk; chunk c of row r stands where c ^ (r & 7) would, which spares bank conflicts.

#pragma once

#include <cuda_fp8.h>

#include "check.cuh"
#include "mma.cuh"
#include "vec.cuh"

namespace dk {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The maximum that probabilities are taken by is raised only for a logit that is above it by more than this, in powers of
// two: sums, and halves, have the room.
constexpr float kSlack = 8.0f;

// Flags of an instance.
constexpr int kSoftCap = 1, kSinks = 2, kScales = 4, kLse = 8;

// The scale of a head, which multiplies its keys or its values.
__device__ inline float scale_of(const float* scales, int head) {
  DK_CHECK(scales[head] > 0.0f, "the scale of head %d is %f: wanted a positive one\n", head, scales[head]);
  return scales[head];
}

// <cuda/std/type_traits> has such, and takes NVRTC one and a half seconds.
template <typename T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<__half> = true;

// What products are made of: the queries' type, but halves for keys of 8 bits.
template <typename T, typename KV>
struct Factor {
  using type = T;
};
template <typename T>
struct Factor<T, __nv_fp8_e4m3> {
  using type = __half;
};

// 2^x; 0 for -inf.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x) by an exponential and an approximate quotient: off by some 1e-7, where tanh.approx is by 5e-4.
__device__ inline float tanh_fast(float x) { return 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(2.0f * kLog2e * x)); }

// Two e4m3, the first in the low byte, as two halves, exactly: for architectures without the instruction. The bits of an
// e4m3, moved to where a half has its exponent, are a half of 2^-8 of the value.
__device__ inline unsigned halves_by_bits(unsigned pair) {
  const unsigned bytes = __byte_perm(pair, 0, 0x1404);  // each in the upper byte of its half
  const unsigned magnitudes = bytes >> 1 & 0x3f803f80, small = (bytes & 0x80008000) | magnitudes;
  const __half2 both = __hmul2(reinterpret_cast<const __half2&>(small), __float2half2_rn(256.0f));
  const unsigned nan = (magnitudes + 0x00800080) >> 14 & 0x00010001;  // all bits of the magnitude are set
  return reinterpret_cast<const unsigned&>(both) | ((nan << 15) - nan);
}
__device__ inline unsigned halves(unsigned pair) {
#if __CUDA_ARCH__ >= 890
  unsigned both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<unsigned short>(pair)));
  return both;
#else
  return halves_by_bits(pair);
#endif
}

// Two e4m3 as a pair of T, exactly.
template <typename T>
__device__ unsigned widen(unsigned two) {
  const unsigned both = halves(two);
  if constexpr (kIsHalf<T>) return both;
  const float2 floats = __half22float2(reinterpret_cast<const __half2&>(both));
  return pair<T>(floats.x, floats.y);
}

// The byte in which chunk `chunk` of row `row` of kRowBytes begins.
template <int kRowBytes>
__device__ unsigned swizzled(int row, int chunk) {
  if constexpr (kRowBytes == 64) return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

}  // namespace dk
