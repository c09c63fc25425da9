// Queries and the latent row of keys and values of a step, normalised and turned by position; the row into its window.
//
// Of each head's query x, and of the token's row of keys and values, which has a weight besides:
//   y = x / sqrt(mean(x^2) + eps),  y = y * weight
// and the last 64 elements of y are turned by the token's position (dk/rope.cuh). All of it in float, and rounded to
// bfloat16 once.
//
// The row of position p is entry p of its request's window. Where the table is a ring (dk/records.cuh), a step may have
// more rows of a request than the ring has places: the last ones go there, so that no two of a step go to one place.

#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/records.cuh"
#include "dk/rope.cuh"
#include "dk/step_tokens.cuh"
#include "dk/vec.cuh"

namespace {

constexpr int kDim = 512;
constexpr int kPart = kDim / 2;  // of a row: 8 elements for each lane, in one access
constexpr int kPerPart = 8;
constexpr int kWarps = 8;

// bfloat16 in words of two: as arrays of elements the compiler may load and store them one by one.
__device__ uint4 load(const __nv_bfloat16* from) { return *reinterpret_cast<const uint4*>(from); }
__device__ void store(void* to, uint4 row) { *static_cast<uint4*>(to) = row; }

__device__ uint4 rounded(const float (&x)[kPerPart]) {
  using dk::pair;
  return {pair<__nv_bfloat16>(x[0], x[1]), pair<__nv_bfloat16>(x[2], x[3]), pair<__nv_bfloat16>(x[4], x[5]),
          pair<__nv_bfloat16>(x[6], x[7])};
}

// Elements [first, first + 8) of a row into its record. All of a warp come here, eight lanes with the elements of a block.
template <int kFormat>
__device__ void store_record(uint4 row, int first, unsigned char* values, unsigned char* scales) {
  if constexpr (kFormat == dk::kKvBf16) {
    store(values + 2 * first, row);
  } else {
    static_assert(kFormat == dk::kKvFp8, "a row of the window is e4m3 or bfloat16");
    constexpr int kNarrow = kDim - dk::kRotary;  // elements that become e4m3
    float x[kPerPart];
    dk::floats_of(row, x);
    float largest = fabsf(x[0]);  // not from 0: where all are NaN it is NaN, as the reference has it
    for (int j = 1; j < kPerPart; ++j) largest = fmaxf(largest, fabsf(x[j]));
    for (int step = 4; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const unsigned exponent = dk::exponent_of_e4m3(largest);
    const bool is_narrow = first < kNarrow;
    if (is_narrow) {
      const float by = dk::inverse_power_of_two(exponent);
      *reinterpret_cast<uint2*>(values + first) = {dk::e4m3_of(x[0] * by, x[1] * by, x[2] * by, x[3] * by),
                                                   dk::e4m3_of(x[4] * by, x[5] * by, x[6] * by, x[7] * by)};
    } else {
      store(values + kNarrow + 2 * (first - kNarrow), row);
    }
    if (first % 64 == 0) scales[first / 64] = is_narrow ? exponent : 0;  // the last one is the byte that has no block
  }
}

}  // namespace

// grid: (max_tokens, ceil((heads + 1) / 8)), block: 256
// tokens: [max_tokens, 4], of dk::StepToken
// q, out: [max_tokens, heads, 512], kv: [max_tokens, 512], rows of a token contiguous, token by token `_row` elements on
// weight: [512], of kv
// cos_sin: [max_position, 64], in each row first the cosines of all pairs, then the sines
// pool, block_table: see dk::PagesOf
//
// out = turned(normalised(q)), the window's entry = record(turned(normalised(kv) * weight)). Of padding out is 0.
//
// All addresses and strides are multiples of 16 bytes. out may be q itself.
template <int kFormat>
__global__ void __launch_bounds__(32 * kWarps)
    query_kv(const int* tokens, const __nv_bfloat16* q, const __nv_bfloat16* kv, const float* weight,
             const float* cos_sin, __nv_bfloat16* out, unsigned char* pool, const int* block_table, int pages,
             int table_width, int page_bits, long long page_bytes, int heads, int max_position, long long q_row,
             long long kv_row, long long out_row, float eps) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  // A warp for each row of the token: first keys and values, which take longest, then the heads.
  const int t = blockIdx.x, head = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32) - 1;
  const int first = threadIdx.x % 32 * kPerPart;  // element of each part
  if (head >= heads) return;
  const bool is_query = head >= 0;
  const dk::StepToken token = dk::StepToken::load(tokens, t);
  __nv_bfloat16* const to = out + t * out_row + head * kDim + first;  // of a query
  if (token.is_padding()) {
    if (is_query) store(to, uint4{}), store(to + kPart, uint4{});
    return;
  }
  const long long places = static_cast<long long>(table_width) << page_bits;
  if (!is_query && token.position + places < token.end) return;  // its place is that of a later row of this step

  // All that is read, before any of it is used.
  const __nv_bfloat16* const from = (is_query ? q + t * q_row + head * kDim : kv + t * kv_row) + first;
  const uint4 low = load(from), high = load(from + kPart);
  DK_CHECK(0 <= token.position && token.position < max_position, "row %d is at position %d: cos_sin has %d rows\n", t,
           token.position, max_position);
  const int element = first + kPart - (kDim - dk::kRotary);  // of the high part, among those that are turned
  dk::Vec<float, 4> c = {}, s = {};
  if (element >= 0) {
    const int position = min(max(token.position, 0), max_position - 1);
    const float* const cosines = cos_sin + 1ll * position * dk::kRotary + element / 2;
    c = dk::Vec<float, 4>::load(cosines), s = dk::Vec<float, 4>::load(cosines + dk::kRotary / 2);
  }
  dk::Vec<float, 4> scale[4];  // of 4 elements each
  const dk::PagesOf<kFormat, unsigned char> window{pool, block_table, pages, table_width, page_bits, page_bytes};
  int page = -1;
  if (!is_query) {
    for (int i = 0; i < 4; ++i) scale[i] = dk::Vec<float, 4>::load(weight + i / 2 * kPart + first + i % 2 * 4);
    page = window.page_of(token.request, token.position);
  }

  float x[kPerPart], y[kPerPart];  // of the low part and the high one
  dk::floats_of(low, x), dk::floats_of(high, y);
  float squares[2] = {};
  for (int j = 0; j < kPerPart; ++j) {
    squares[0] = __fmaf_rn(x[j], x[j], squares[0]);
    squares[1] = __fmaf_rn(y[j], y[j], squares[1]);
  }
  float sum = squares[0] + squares[1];
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const float by = __frsqrt_rn(__fmaf_rn(sum, 1.0f / kDim, eps));
  for (int j = 0; j < kPerPart; ++j) x[j] = __fmul_rn(x[j], by), y[j] = __fmul_rn(y[j], by);
  if (!is_query) {
    for (int j = 0; j < kPerPart; ++j) {
      x[j] = __fmul_rn(x[j], scale[j / 4].elements[j % 4]);
      y[j] = __fmul_rn(y[j], scale[2 + j / 4].elements[j % 4]);
    }
  }
  if (element >= 0)
    for (int i = 0; i < 4; ++i) dk::turn(y[2 * i], y[2 * i + 1], c.elements[i], s.elements[i]);

  if (is_query) {
    store(to, rounded(x)), store(to + kPart, rounded(y));
  } else if (page >= 0) {
    const int place = window.place_of(token.position);
    unsigned char* const values = window.values(page, place);
    unsigned char* const scales = window.scales(page, place);
    store_record<kFormat>(rounded(x), first, values, scales);
    store_record<kFormat>(rounded(y), first + kPart, values, scales);
  }
}
