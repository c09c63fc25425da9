// Keys and values of a step into pages, on their way rotated by position (RoPE) and rounded to 8 bits; and where they go.
//
// Token t goes to slot slots[t]: place slot % page_size of page slot / page_size. A negative slot is padding: nothing of
// the token is read, nothing is written.
//
// The rotation turns the pair (a, b) of a row's first rotary_dim elements by the angle of the pair and the position:
//   a' = a * cos - b * sin,  b' = b * cos + a * sin
// in float, every product and sum rounded by itself: a compiler that fuses them would change bits from device to device.

#include "dk/check.cuh"
#include "dk/fp8.cuh"
#include "dk/memory_order.cuh"
#include "dk/vec.cuh"

namespace {

// kRotation of an instance: which elements are pairs.
constexpr int kNone = 0, kHalves = 1, kNeighbours = 2;  // (i, i + rotary_dim / 2), (2i, 2i + 1)

constexpr int kPerThread = 8;

}  // namespace

// grid: ceil(tokens * (2 * kv_heads + q_heads) * dim / 8 / block), block: a multiple of 32, both one-dimensional
// k, v: [tokens, kv_heads, dim], q, q_out: [tokens, q_heads, dim], rows of heads contiguous, token by token `_row` on
// k_pool, v_pool: [pages, kv_heads, page_size, dim] of any strides but the last; all strides in elements
// slots, positions: [tokens]
// k_scale, v_scale: [kv_heads], if KV is __nv_fp8_e4m3
// cos_sin: [max_position, rotary_dim], in each row first the cosines of all pairs, then the sines, if kRotation
//
// k_pool[slot] = KV(rotated(k) / k_scale), v_pool[slot] = KV(v / v_scale), q_out = T(rotated(q)); of padding q_out is 0.
//
// T is __half or __nv_bfloat16, KV is T or __nv_fp8_e4m3. dim is 64, 128 or 256, page_size 2^page_bits; rotary_dim is a
// multiple of 16. All addresses and strides are multiples of 16 bytes. q_out may be q itself. Elements that are neither
// rotated nor made narrower keep their bits.
template <typename T, typename KV, int kRotation>
__global__ void kv_write(const T* k, const T* v, KV* k_pool, KV* v_pool, const long long* slots, const T* q, T* q_out,
                         const float* k_scale, const float* v_scale, const int* positions, const float* cos_sin,
                         int tokens, int kv_heads, int q_heads, int dim, long long k_row, long long v_row,
                         long long q_row, long long q_out_row, long long page_stride, long long head_stride,
                         long long token_stride, int pages, int page_bits, int rotary_dim, int max_position) {
  static_assert(sizeof(T) == 2, "a thread takes its elements in one access of 16 bytes");
  constexpr bool kNarrow = sizeof(KV) == 1;
  using Elements = dk::Vec<T, kPerThread>;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  // Some lanes of a warp for each row: keys, then values, then queries. A warp stays together, for rows exchange elements.
  const int lane_bits = __ffs(dim / kPerThread) - 1;
  const int first = (threadIdx.x & ((1 << lane_bits) - 1)) * kPerThread;  // element of the row
  const unsigned row = blockIdx.x * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  const unsigned rows_of_token = 2 * kv_heads + q_heads;
  const int token = row / rows_of_token;
  const int row_of_token = row % rows_of_token;
  const bool is_key = row_of_token < kv_heads, is_query = row_of_token >= 2 * kv_heads;
  const int head = is_key ? row_of_token : is_query ? row_of_token - 2 * kv_heads : row_of_token - kv_heads;

  const bool exists = token < tokens;
  const long long slot = exists ? slots[token] : -1;
  const bool is_real = slot >= 0;
  [[maybe_unused]] const bool speaks = row_of_token == 0 && first == 0;  // for its token
  const bool has_place = slot < static_cast<long long>(pages) << page_bits;
  DK_CHECK(!speaks || has_place, "slots[%d] is %lld: the pool has %d pages of %d tokens\n", token, slot, pages,
           1 << page_bits);

  const T* from = is_key ? k + token * k_row : is_query ? q + token * q_row : v + token * v_row;
  Elements raw = {};
  if (is_real) raw = Elements::load(from + head * dim + first);

  float x[kPerThread];
  for (int j = 0; j < kPerThread; ++j) x[j] = dk::to_float(raw.elements[j]);
  if constexpr (kRotation != kNone) {
    const bool is_rotated = is_real && (is_key || is_query) && first < rotary_dim;
    const int half = rotary_dim / 2;
    const bool is_second = first >= half;  // of kHalves: its partners stand `half` before, and not behind
    const int partner = is_rotated ? (is_second ? -half : half) / kPerThread : 0;
    float other[kPerThread];
    for (int j = 0; j < kPerThread; ++j)
      other[j] = kRotation == kHalves ? __shfl_sync(~0u, x[j], threadIdx.x % 32 + partner) : x[j ^ 1];
    if (is_rotated) {
      int position = positions[token];
      DK_CHECK(!speaks || (0 <= position && position < max_position), "positions[%d] is %d: cos_sin has %d rows\n", token,
               position, max_position);
      position = min(max(position, 0), max_position - 1);
      // Angles of this thread's elements: eight, or four that two each share.
      constexpr int kAngles = kRotation == kHalves ? kPerThread : kPerThread / 2;
      const int angle = kRotation == kHalves ? (is_second ? first - half : first) : first / 2;
      const float* cosines = cos_sin + 1ll * position * rotary_dim + angle;
      float c[kAngles], s[kAngles];
      for (int j = 0; j < kAngles; j += 4) {
        const auto four_cosines = dk::Vec<float, 4>::load(cosines + j);
        const auto four_sines = dk::Vec<float, 4>::load(cosines + half + j);
        for (int i = 0; i < 4; ++i) c[j + i] = four_cosines.elements[i], s[j + i] = four_sines.elements[i];
      }
      for (int j = 0; j < kPerThread; ++j) {
        const int i = kRotation == kHalves ? j : j / 2;
        const bool is_b = kRotation == kHalves ? is_second : j % 2;
        const float across = __fmul_rn(other[j], s[i]);
        x[j] = __fadd_rn(__fmul_rn(x[j], c[i]), is_b ? across : -across);
      }
      for (int j = 0; j < kPerThread; ++j) raw.elements[j] = dk::from_float<T>(x[j]);
    }
  }

  if (is_query) {
    if (exists) raw.store(q_out + token * q_out_row + head * dim + first);
    return;
  }
  if (!is_real || !has_place) return;
  const long long page = slot >> page_bits, place = slot & ((1ll << page_bits) - 1);
  KV* to = (is_key ? k_pool : v_pool) + page * page_stride + head * head_stride + place * token_stride + first;
  if constexpr (kNarrow) {
    *reinterpret_cast<dk::E4m3<kPerThread>*>(to) = dk::quantised(x, (is_key ? k_scale : v_scale)[head]);
  } else {
    raw.store(to);
  }
}

// grid: ceil(tokens / block), block: any, both one-dimensional
// positions, requests: [tokens], lengths: [table_rows], block_table: [table_rows, table_width], real: [1], slots: [tokens]
//
// slots[t] = block_table[request][position / page_size] * page_size + position % page_size; -1, without a look at the
// table, if the position is negative, or if t >= *real.
//
// Without `requests` tokens stand request by request, as many of each. With `lengths`, in place of `positions`, they are
// the last ones of each request; one that is not long enough has padding for the rest. What is null is not given.
extern "C" __global__ void slot_mapping(const int* positions, const int* requests, const int* lengths,
                                        const int* block_table, const int* real, long long* slots, int tokens,
                                        int table_rows, int table_width, int page_bits) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const long long thread = dk::thread_in_grid();
  if (thread >= tokens) return;
  const int token = static_cast<int>(thread);

  long long slot = -1;
  if (!real || token < *real) {
    const int of_request = requests ? 1 : tokens / table_rows;
    int request = token / of_request;
    const int position = lengths ? lengths[request] - of_request + token % of_request : positions[token];
    if (position >= 0) {
      if (requests) request = requests[token];
      const int number = position >> page_bits;
      DK_CHECK(0 <= request && request < table_rows, "requests[%d] is %d: the block table has %d rows\n", token, request,
               table_rows);
      DK_CHECK(number < table_width, "token %d is at position %d: the block table has room for %d\n", token, position,
               table_width << page_bits);
      if (0 <= request && request < table_rows && number < table_width) {
        const int page = block_table[1ll * request * table_width + number];
        DK_CHECK(page >= 0, "block_table[%d][%d] is %d\n", request, number, page);
        if (page >= 0) slot = (static_cast<long long>(page) << page_bits) + (position & ((1 << page_bits) - 1));
      }
    }
  }
  slots[token] = slot;
}
