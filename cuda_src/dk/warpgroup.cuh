// Products of a warpgroup, four warps in step, out of shared memory (wgmma); sm_90a has them.
//
// D[64, N] (+)= A[64, 16] B[16, N] of two-byte T, with float sums. With r = lane / 4 and c = lane % 4 * 2, lane of warp
// w of the four has of D, for each block j of 8 columns, in d[4 * j]: [16w+r][8j+c], [16w+r][8j+c+1], [16w+r+8][8j+c],
// [16w+r+8][8j+c+1].
//
// A tile in shared memory is made of panels, 64 elements (128 bytes) wide, whose rows follow each other, and begins at
// a multiple of 1024 bytes; 16-byte chunk c of a panel's row r stands where c ^ (r & 7) would. Read by its rows it is
// A, or a B whose columns they are; read the other way, rows are the sums' index k and the panel's elements are columns
// of B.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DK_SM90A
#endif

namespace dk {

// What stands at `address` of shared memory, by rows: 8 of them are 1024 bytes. Advancing by 16 elements is 32 bytes
// more.
__device__ inline unsigned long long by_rows(unsigned address) {
  return (address & 0x3ffffu) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}
// The other way; panels are `panel_bytes` apart. Advancing by 16 rows is 2048 bytes more.
__device__ inline unsigned long long by_columns(unsigned address, unsigned panel_bytes) {
  return (address & 0x3ffffu) >> 4 | static_cast<unsigned long long>(panel_bytes >> 4) << 16 | 1024ull >> 4 << 32 |
         1ull << 62;
}

// What stands so many bytes later.
__device__ inline unsigned long long later(unsigned long long matrix, unsigned bytes) { return matrix + (bytes >> 4); }

// The byte of a tile where chunk `chunk` (of the whole row) of row `row` stands.
__device__ inline unsigned in_panels(int row, int chunk, unsigned panel_bytes) {
  return (chunk >> 3) * panel_bytes + row * 128 + (((chunk ^ row) & 7) << 4);
}

// Queue a product. With 64 columns B is read by rows, with 128 by columns. Without `adds` what d had is forgotten.
template <typename T, int kColumns>
__device__ void multiply_64_by(float (&d)[kColumns / 2], unsigned long long a, unsigned long long b, bool adds);
template <>
__device__ inline void multiply_64_by<__half, 64>(float (&d)[32],
                                                  unsigned long long a, unsigned long long b, bool adds) {
#ifdef DK_SM90A
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
#endif
}
template <>
__device__ inline void multiply_64_by<__nv_bfloat16, 64>(float (&d)[32],
                                                  unsigned long long a, unsigned long long b, bool adds) {
#ifdef DK_SM90A
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
#endif
}
template <>
__device__ inline void multiply_64_by<__half, 128>(float (&d)[64],
                                                  unsigned long long a, unsigned long long b, bool adds) {
#ifdef DK_SM90A
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 1;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
        "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
#endif
}
template <>
__device__ inline void multiply_64_by<__nv_bfloat16, 128>(float (&d)[64],
                                                  unsigned long long a, unsigned long long b, bool adds) {
#ifdef DK_SM90A
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
      "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
      "%59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 1;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
        "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
        "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)));
#endif
}

// Before the first of several products: what threads wrote to their registers is there.
__device__ inline void begin_products() {
#ifdef DK_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// What was queued since the last call is one group.
__device__ inline void commit_products() {
#ifdef DK_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all groups but the newest kLeft are done: only then d is there, and what was read may be written again.
template <int kLeft>
__device__ void wait_for_products() {
#ifdef DK_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#endif
}

// Registers of a thread, from here on: a warpgroup gives some back, or gets more.
template <int kRegisters>
__device__ void give_back_registers() {
#ifdef DK_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ void take_registers() {
#ifdef DK_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace dk
