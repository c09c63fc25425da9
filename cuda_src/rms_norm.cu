// Rows over the root of their mean square (RMSNorm), each element times its weight.

#include "dk/memory_order.cuh"
#include "dk/vec.cuh"

namespace {

constexpr int kPiece = 8;  // elements of one access
constexpr int kMostWarps = 32;

}  // namespace

// grid: tokens, block: ceil(dim / (8 * kPieces)) rounded up to whole warps
// x, out: [tokens, dim], token by token `_row` elements on; weight: [dim]
//
// out = weight * x / sqrt(mean(x^2) + eps), in float, rounded once. Squares are added up by threads, lanes, then warps.
//
// dim is a multiple of 8, all addresses and strides of 16 bytes. out may be x itself.
template <int kPieces>
__global__ void __launch_bounds__(32 * kMostWarps)
    rms_norm(const __nv_bfloat16* x, const float* weight, __nv_bfloat16* out, int dim, long long x_row,
             long long out_row, float eps) {
  static_assert(kPieces <= 2, "a thread has registers for two pieces, and their weights");
  __shared__ float squares[kMostWarps];
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const int thread = threadIdx.x, warps = blockDim.x / 32;
  const __nv_bfloat16* const row = x + blockIdx.x * x_row;

  // All that is read, before any of it is used.
  uint4 pieces[kPieces];
  dk::Vec<float, 4> scales[kPieces][2];
  for (int i = 0; i < kPieces; ++i) {
    const int first = (i * blockDim.x + thread) * kPiece;
    const bool exists = first < dim;
    pieces[i] = exists ? *reinterpret_cast<const uint4*>(row + first) : uint4{};
    for (int j = 0; j < 2; ++j)
      scales[i][j] = exists ? dk::Vec<float, 4>::load(weight + first + 4 * j) : dk::Vec<float, 4>{};
  }

  float elements[kPieces][kPiece], sum = 0.0f;
  for (int i = 0; i < kPieces; ++i) {
    dk::floats_of(pieces[i], elements[i]);
    for (int j = 0; j < kPiece; ++j) sum = __fmaf_rn(elements[i][j], elements[i][j], sum);
  }
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (thread % 32 == 0) squares[thread / 32] = sum;
  __syncthreads();
  sum = thread % 32 < warps ? squares[thread % 32] : 0.0f;
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float by = __frsqrt_rn(__fdiv_rn(sum, static_cast<float>(dim)) + eps);

  for (int i = 0; i < kPieces; ++i) {
    const int first = (i * blockDim.x + thread) * kPiece;
    if (first >= dim) break;
    unsigned words[kPiece / 2];
    for (int j = 0; j < kPiece; j += 2) {
      const float* const two = &scales[i][j / 4].elements[j % 4];
      words[j / 2] = dk::pair<__nv_bfloat16>(__fmul_rn(__fmul_rn(elements[i][j], by), two[0]),
                                             __fmul_rn(__fmul_rn(elements[i][j + 1], by), two[1]));
    }
    *reinterpret_cast<uint4*>(out + blockIdx.x * out_row + first) = {words[0], words[1], words[2], words[3]};
  }
}
