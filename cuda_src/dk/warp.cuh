// What the lanes of a warp compute together.

#pragma once

namespace dk {

// The sum of the values of this lane and of those below it.
template <typename T>
__device__ T sum_up_to_lane(T value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(~0u, value, step);
    if (threadIdx.x % 32 >= step) value += lower;
  }
  return value;
}

}  // namespace dk
