// Floats by a number of 32 bits that is smaller for a larger one, and the same for -0 and +0.

#pragma once

namespace dk {

__device__ inline unsigned order_of(float value) {  // of all but NaN
  const unsigned bits = __float_as_uint(value + 0.0f);  // no -0
  return bits ^ (~(static_cast<int>(bits) >> 31) & 0x7fffffff);
}

__device__ inline float value_of(unsigned order) {
  return __uint_as_float(static_cast<int>(order) < 0 ? order : order ^ 0x7fffffff);
}

}  // namespace dk
