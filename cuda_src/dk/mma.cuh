// Products of 16-bit fragments on the tensor cores, and how fragments come out of shared memory.
//
// D[16, 8] += A[16, 16] B[16, 8] for a warp. With r = lane / 4 and c = lane % 4 * 2, a lane holds of
//   A: [r][c, c+1], [r+8][c, c+1], [r][c+8, c+9], [r+8][c+8, c+9]
//   B: [c, c+1][r], [c+8, c+9][r]
//   D: [r][c], [r][c+1], [r+8][c], [r+8][c+1]

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace dk {

// Four 8 x 8 matrices of 16-bit elements; lanes 8i..8i+7 give the addresses of the rows of matrix i.
__device__ inline void load_matrices(unsigned (&m)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&m)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// An 8 x 8 matrix of 16-bit elements of which a lane has row r, columns c and c + 1: that of its transposed one.
__device__ inline unsigned transposed(unsigned pair) {
  unsigned result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Of four words that each of four lanes has, lane i gets the i-th ones, in the order of the lanes.
__device__ inline void transpose_four_lanes(unsigned (&words)[4]) {
  const unsigned lane = threadIdx.x;
#pragma unroll
  for (unsigned step = 1; step < 4; step *= 2)
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = lane & step;
      const unsigned got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + step], step);
      words[i] = upper ? got : words[i];
      words[i + step] = upper ? words[i + step] : got;
    }
}

template <typename T>
__device__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ inline void mma<__half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace dk
