// Rounding to 8 bits.

#pragma once

#include <cuda_fp8.h>

namespace dk {

// x / scale, to the nearest e4m3, ties to even; what is larger than 448 in size becomes 448. Four in each word.
template <int N>
struct alignas(N) E4m3 {
  static_assert(N % 4 == 0, "a word has four");
  unsigned words[N / 4];
};
template <int N>
__device__ E4m3<N> quantised(const float (&x)[N], float scale) {
  E4m3<N> made;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 y = {__fdiv_rn(x[i], scale), __fdiv_rn(x[i + 1], scale), __fdiv_rn(x[i + 2], scale),
                      __fdiv_rn(x[i + 3], scale)};
    made.words[i / 4] = __nv_fp8x4_e4m3(y).__x;
  }
  return made;
}

}  // namespace dk
