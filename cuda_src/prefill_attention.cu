// Causal attention of many queries a request to keys and values in pages (prefill), and the plan of a step.
//
// out = softmax(scale * q k^T) v over the tokens that a query attends to. The queries of request r are the rows
// [q_starts[r], q_starts[r + 1]) and its last tokens: query i of q_len stands at position p = length - q_len + i and
// attends to [p - window, p], or to [0, p] without a window. Rows behind the last request's are padding: their output
// is 0, their lse -inf.
//
// A block has a tile of queries of one head, whose tokens go by in tiles. A warp has kWarpRows of the queries, all
// tokens and all dimensions, so that probabilities stay in its registers, and nobody waits but for the next tile.

#include <cuda_fp8.h>
#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/attention.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/mma.cuh"
#include "dk/vec.cuh"
#include "dk/warp.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = 4;
constexpr int kBuckets = 1024;

// A tile of queries, as it lies in the plan.
struct alignas(16) Tile {
  int request;   // -1: padding
  int row;       // of the first query
  int rows;      // 0: no tile
  int position;  // of the first query, in its request

  // The tokens that it attends to.
  __device__ int begin(int reach) const { return max(0, position - reach); }
  __device__ int end() const { return position + rows; }
};

// The thread and its heads. Each phase asks anew: then the compiler does not keep in registers what follows from them,
// of which the products leave none.
struct Thread {
  unsigned number, lane;
  int r, c;  // see dk/mma.cuh

  __device__ Thread() {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    lane = number % 32, r = lane / 4, c = lane % 4 * 2;
  }
  __device__ int row_of_warp(int rows) const { return number / 32 * rows; }
  static __device__ int kv_head() {
    int y;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
    return y;
  }
  static __device__ int head() {
    int x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return kv_head() * gridDim.x + x;
  }
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

// grid: 1, block: 1024
// q_starts: [requests + 1], lengths: [requests], read where a request has queries
// plan: [tiles] of four ints
//
// Tiles of `rows` queries, those with the most tokens first: the last blocks to start are the shortest. Tiles that
// attend to nearly as many tokens come in any order. capacity: tokens that a row of the block table has room for.
extern "C" __global__ void plan_prefill_attention(const int* q_starts, const int* lengths, int* plan, int requests,
                                                  int max_tokens, int capacity, int window, int rows, int tiles) {
  __shared__ int buckets[kBuckets];  // tiles of a bucket, then the number of its next one
  __shared__ int sums[32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  buckets[thread] = 0;
  for (int request = thread; request <= requests; request += 1024) {
    const int first = q_starts[request], last = request < requests ? q_starts[request + 1] : max_tokens;
    DK_CHECK(request > 0 || first == 0, "q_starts[0] is %d: the first request begins at row 0\n", first);
    DK_CHECK(first <= last, "q_starts[%d] is %d, behind it is %d: starts do not decrease, and end with %d rows\n",
             request, first, last, max_tokens);
    if (request == requests || first == last) continue;
    DK_CHECK(lengths[request] <= capacity, "lengths[%d] is %d: the block table has room for %d tokens\n", request,
             lengths[request], capacity);
    DK_CHECK(last - first <= lengths[request], "lengths[%d] is %d: the request has %d queries\n", request,
             lengths[request], last - first);
  }
  __syncthreads();

  const int most = window < 0 ? capacity : min(capacity, window) + rows;
  const int tokens_of_bucket = most / kBuckets + 1;
  const auto bound = [&](int row) -> int { return min(max(row, 0), max_tokens); };
  Tile* of_plan = reinterpret_cast<Tile*>(plan);
  // Count the tiles into their buckets, and put them into the plan if it is known where. Lane i has request 32 * i +
  // warp of 1024, and behind the last one the padding; its warp takes the tiles of each.
  const auto take_tiles = [&](bool placed) {
    for (int chunk = 0; chunk <= requests; chunk += 1024) {
      const int request = chunk + lane * 32 + warp;
      int begin = 0, end = 0, length = 0;
      if (request <= requests) {
        const int first = q_starts[request], last = request < requests ? q_starts[request + 1] : max_tokens;
        begin = bound(first), end = bound(last);
        if (request < requests && begin < end) length = min(lengths[request], capacity);
      }
      for (unsigned left = __ballot_sync(~0u, begin < end); left; left &= left - 1) {
        const int from = __ffs(left) - 1, of = chunk + from * 32 + warp;
        const int first = __shfl_sync(~0u, begin, from), last = __shfl_sync(~0u, end, from);
        const int before = __shfl_sync(~0u, length, from) - (last - first);  // tokens before the first query
        for (int row = first + lane * rows; row < last; row += 32 * rows) {
          const bool padding = of == requests;
          const Tile tile = {padding ? -1 : of, row, min(rows, last - row), padding ? 0 : before + row - first};
          const int tokens = padding ? 0 : min(most, max(0, tile.position + tile.rows));
          const int number = atomicAdd(buckets + kBuckets - 1 - tokens / tokens_of_bucket, 1);
          if (placed && number < tiles) of_plan[number] = tile;  // there are more only where starts decrease
        }
      }
    }
  };
  take_tiles(false);
  __syncthreads();

  // Tiles of all buckets before each.
  const int count = buckets[thread], sum = dk::sum_up_to_lane(count);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < 32; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  buckets[thread] = before + sum - count;
  __syncthreads();

  take_tiles(true);
  for (int number = all + thread; number < tiles; number += 1024) of_plan[number] = {-1, 0, 0, 0};
}

// grid: (queries of a KV head, KV heads, tiles), block: 128
// shared: (kRows + 4 * kTokens) * kDim * sizeof(T) bytes, and for 8 bits 2 * kTokens * kDim more
// q, out: [max_tokens, q_heads, kDim], q_stride elements from token to token in q, and none between in out
// lse: [max_tokens, q_heads]
// k, v: pools, see dk/paged.cuh
// plan: [tiles] of four ints, by plan_prefill_attention with kRows
// k_scale, v_scale: [kv_heads], sinks: [q_heads]
//
// T is __half or __nv_bfloat16, KV is T or __nv_fp8_e4m3. lse is the natural logarithm of the sum of exp(logit),
// without the sink.
template <typename T, typename KV, int kDim, int kPage, int kFlags>
__global__ __launch_bounds__(kThreads, 2) void prefill_attention(
    const T* q, const KV* k, const KV* v, const int* block_table, const int* plan, T* out, float* lse,
    const float* k_scale, const float* v_scale, const float* sinks, long long page_stride, int head_stride,
    int token_stride, int pages, int table_width, int q_stride, int window, float scale, float soft_cap) {
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "a head has 64, 128 or 256 dimensions");
  constexpr bool k8Bit = sizeof(KV) == 1;
  constexpr int kRows = kDim == 256 ? 64 : 128, kTokens = kDim == 256 ? 32 : 64;  // sums of 128 registers a thread
  constexpr int kWarpRows = kRows / kWarps, kBlocks = kWarpRows / 16;             // of 16 queries
  constexpr int kColumns = kTokens / 8, kPanels = kDim / 16;
  constexpr int kRowBytes = kDim * sizeof(T), kRowChunks = kRowBytes / 16;
  constexpr int kTileBytes = kTokens * kRowBytes;

  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned queries = dk::shared_address(shared), stages = queries + kRows * kRowBytes;
  constexpr int kStaged = (kRows + 4 * kTokens) * kRowBytes;  // where bytes wait that are not widened yet

  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const Tile& planned = reinterpret_cast<const Tile*>(plan)[blockIdx.z];
  const Tile tile = planned;
  if (tile.rows == 0) return;
  // The block's part of the first of the tile's rows in [max_tokens, q_heads]; they follow each other in steps of
  // q_heads.
  const int q_heads = gridDim.y * gridDim.x;
  const auto part_of_first_row = [&]() -> long long { return 1ll * planned.row * q_heads + Thread::head(); };

  if (tile.request < 0) {
    const long long part = part_of_first_row();
    const dk::Vec<T, 8> zeros = {};
    for (unsigned i = threadIdx.x; i < tile.rows * kRowChunks; i += kThreads)
      zeros.store(out + (part + i / kRowChunks * q_heads) * kDim + i % kRowChunks * 8);
    if constexpr (kFlags & dk::kLse) {
      for (int row = threadIdx.x; row < tile.rows; row += kThreads) lse[part + row * q_heads] = -CUDART_INF_F;
    }
    return;
  }

  const int reach = window < 0 ? 1 << 30 : min(window, 1 << 30);

  // Lane i: the i-th page of a tile, as the table has it. Whether the pool has it is looked at when it is used, so that
  // nobody waits for it here; -1 for one with nothing to read.
  constexpr int kTilePages = ceil_div(kTokens, kPage);
  const auto is_read = [&](const Tile& tile, int number, unsigned lane) -> bool {
    return lane < kTilePages && number * kPage < tile.end() && number * kPage + kPage > tile.begin(reach);
  };
  const auto page_of_tile = [&](const Tile& tile, int first) -> int {
    const unsigned lane = Thread().lane;
    const int number = first / kPage + lane;
    return is_read(tile, number, lane) ? block_table[1ll * tile.request * table_width + number] : -1;
  };

  // Queue the copies of a tile; rows that there are not become 0.
  constexpr int kChunks = kDim * sizeof(KV) / 16, kRowStep = kThreads / kChunks, kSteps = kTokens / kRowStep;
  const auto stage_of = [](int first) -> int { return static_cast<unsigned>(first) / kTokens % 2; };
  const auto queue_tile = [&](const Tile& tile, int first, int page) {
    const int begin = tile.begin(reach), end = tile.end(), stage = stage_of(first);
    const unsigned thread = Thread().number, lane = thread % 32;
    const bool in_pool = 0 <= page && page < pages;
    DK_CHECK(in_pool || !is_read(tile, first / kPage + lane, lane),
             "block_table[%d][%d] is %d: the pool has %d pages\n", tile.request, first / kPage + lane, page, pages);
    const int first_row = thread / kChunks, chunk = thread % kChunks;
    const auto within = [&](int row) -> int { return row * token_stride + chunk * (16 / sizeof(KV)); };
    const auto to = [&](int row, int which) -> unsigned {
      if constexpr (k8Bit) return queries + kStaged + ((row / kRowStep * 2 + which) * kThreads + thread) * 16;
      return stages + (2 * stage + which) * kTileBytes + dk::swizzled<kRowBytes>(row, chunk);
    };
    const long long base = page * page_stride + 1ll * Thread::kv_head() * head_stride +
                           (kPage > kTokens ? first % kPage * token_stride : 0);
    const bool whole = first >= begin && first + kTokens <= end;
    if (whole && __all_sync(~0u, in_pool || lane >= kTilePages)) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int row = first_row + i * kRowStep, step = i * kRowStep;
        const long long at = kRowStep <= kPage
                                 ? __shfl_sync(~0u, base, step / kPage) + within(first_row + step % kPage)
                                 : __shfl_sync(~0u, base, row / kPage) + within(row % kPage);
        dk::copy_async_16(to(row, 0), k + at);
        dk::copy_async_16(to(row, 1), v + at);
      }
    } else {
#pragma unroll 1
      for (int row = first_row; row < kTokens; row += kRowStep) {
        const long long at = __shfl_sync(~0u, base, row / kPage) + within(row % kPage);
        const bool there = __shfl_sync(~0u, in_pool, row / kPage) && first + row < end && first + row >= begin;
        dk::copy_async_16(to(row, 0), there ? k + at : k, there ? 16 : 0);
        dk::copy_async_16(to(row, 1), there ? v + at : v, there ? 16 : 0);
      }
    }
    dk::commit_copies();
  };
  // What this thread itself has copied, as T.
  const auto widen_tile = [&](int stage) {
    const unsigned thread = Thread().number;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const auto bytes = dk::Vec<unsigned, 4>::load(
          reinterpret_cast<const unsigned*>(shared + kStaged + (i * kThreads + thread) * 16));
      unsigned char* tiles = shared + kRows * kRowBytes + (2 * stage + i % 2) * kTileBytes;
      for (int half = 0; half < 2; ++half) {
        dk::Vec<unsigned, 4> wide;
        for (int j = 0; j < 4; ++j) wide.elements[j] = dk::widen<T>(bytes.elements[2 * half + j / 2] >> j % 2 * 16);
        const int row = thread / kChunks + i / 2 * kRowStep, chunk = thread % kChunks;
        wide.store(reinterpret_cast<unsigned*>(tiles + dk::swizzled<kRowBytes>(row, 2 * chunk + half)));
      }
    }
  };

  // Each warp its own queries.
  const Thread loading;
  const T* tile_q = q + 1ll * planned.row * q_stride + Thread::head() * kDim;
#pragma unroll 4
  for (unsigned i = loading.lane; i < kWarpRows * kRowChunks; i += 32) {
    const int row = loading.row_of_warp(kWarpRows) + i / kRowChunks, chunk = i % kRowChunks;
    const bool there = row < tile.rows;
    const T* from = there ? tile_q + row * q_stride + chunk * 8 : q;
    dk::copy_async_16(queries + dk::swizzled<kRowBytes>(row, chunk), from, there ? 16 : 0);
  }
  int first = tile.begin(reach) / kTokens * kTokens;  // token of the tile
  if (first < tile.end()) queue_tile(tile, first, page_of_tile(tile, first));
  int page = page_of_tile(tile, first + kTokens);  // of the next one

  // Logits in powers of two are `unit` times what is in s. Row 8 * h + r of a block of queries has index h.
  float unit = scale * dk::kLog2e, uncapped = 0.0f;
  if constexpr (kFlags & dk::kScales) unit *= dk::scale_of(k_scale, Thread::kv_head());
  if constexpr (kFlags & dk::kSoftCap) uncapped = unit * dk::kLn2 / soft_cap, unit = soft_cap * dk::kLog2e;
  float o[kBlocks][2 * kPanels][4] = {};  // D fragments: queries by dimensions
  float base[kBlocks][2], sum[kBlocks][2] = {};  // a lane's part of the sum
  for (int b = 0; b < kBlocks; ++b)
    for (int h = 0; h < 2; ++h) base[b][h] = -CUDART_MAX_NORMAL_F;  // no infinity: (-inf) - (-inf) is NaN

  // The place of another panel, which is two chunks wide, of a row of matrices.
  const auto of_panel = [](unsigned row, int panel) -> unsigned { return (row ^ panel % 4 * 32) + panel / 4 * 128; };

#pragma unroll 1
  for (;; first += kTokens) {
    const Tile tile = planned;  // again: the products leave no registers to keep it
    if (first >= tile.end()) break;
    const int stage = stage_of(first);
    dk::wait_for_copies<0>();
    if constexpr (k8Bit) widen_tile(stage);
    __syncthreads();  // the tile is there, and nobody reads the one before it any more
    if (first + kTokens < tile.end()) {
      queue_tile(tile, first + kTokens, page);
      page = page_of_tile(tile, first + 2 * kTokens);
    }
    // Positions of the warp's first and last query.
    const Thread thread;
    const unsigned lane = thread.lane;
    const int warp_row = thread.row_of_warp(kWarpRows);
    const int low = tile.position + warp_row, high = min(low + kWarpRows, tile.end()) - 1;
    if (low > high || first > high || first + kTokens <= low - reach) continue;  // nobody attends to the tile

    // Rows of matrices that this lane gives the addresses of.
    const unsigned keys = stages + 2 * stage * kTileBytes, values = keys + kTileBytes;
    const unsigned query_row = queries + dk::swizzled<kRowBytes>(warp_row + lane % 16, lane / 16);
    const unsigned key_row = keys + dk::swizzled<kRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const unsigned value_row = values + dk::swizzled<kRowBytes>(lane % 16, lane / 16);

    float s[kBlocks][kColumns][4] = {};  // queries by tokens
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      unsigned a[kBlocks][4];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) dk::load_matrices(a[b], of_panel(query_row, panel) + b * 16 * kRowBytes);
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        unsigned m[4];
        dk::load_matrices(m, of_panel(key_row, panel) + i * 16 * kRowBytes);
        const unsigned left[2] = {m[0], m[1]}, right[2] = {m[2], m[3]};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          dk::mma<T>(s[b][2 * i], a[b], left);
          dk::mma<T>(s[b][2 * i + 1], a[b], right);
        }
      }
    }

    if constexpr (kFlags & dk::kSoftCap) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        for (int i = 0; i < kColumns; ++i)
          for (int j = 0; j < 4; ++j) s[b][i][j] = dk::tanh_fast(s[b][i][j] * uncapped);
    }
    if (first + kTokens - 1 > low || first < high - reach) {  // not every query attends to the whole tile
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        for (int h = 0; h < 2; ++h) {
          const int last = low + b * 16 + h * 8 + thread.r - first - thread.c, earliest = last - reach;
#pragma unroll
          for (int i = 0; i < kColumns; ++i)
            for (int j = 0; j < 2; ++j)
              if (i * 8 + j > last || i * 8 + j < earliest) s[b][i][2 * h + j] = -CUDART_INF_F;
        }
    }

    float shrink[kBlocks][2];
    bool grows = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      for (int h = 0; h < 2; ++h) {
        float above = fmaxf(s[b][0][2 * h], s[b][0][2 * h + 1]);
#pragma unroll
        for (int i = 1; i < kColumns; ++i) above = fmaxf(above, fmaxf(s[b][i][2 * h], s[b][i][2 * h + 1]));
        above = fmaxf(above, __shfl_xor_sync(~0u, above, 1));
        above = fmaxf(above, __shfl_xor_sync(~0u, above, 2));
        shrink[b][h] = 1.0f;
        above *= unit;
        if (above - base[b][h] > dk::kSlack) {
          shrink[b][h] = dk::exp2_approx(base[b][h] - above);
          base[b][h] = above;
          grows = true;
        }
      }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        for (int h = 0; h < 2; ++h) {
          sum[b][h] *= shrink[b][h];
#pragma unroll
          for (int p = 0; p < 2 * kPanels; ++p)
            for (int j = 0; j < 2; ++j) o[b][p][2 * h + j] *= shrink[b][h];
        }
    }

    unsigned probabilities[kColumns / 2][kBlocks][4];  // where a D fragment has them, an A fragment wants them
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        for (int j = 0; j < 4; ++j) {
          const float* x = s[b][2 * i + j / 2] + j % 2 * 2;
          const float left = dk::exp2_approx(__fmaf_rn(x[0], unit, -base[b][j % 2]));
          const float right = dk::exp2_approx(__fmaf_rn(x[1], unit, -base[b][j % 2]));
          sum[b][j % 2] += left + right;
          probabilities[i][b][j] = dk::pair<T>(left, right);
        }
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        unsigned m[4];
        dk::load_matrices_transposed(m, of_panel(value_row, panel) + i * 16 * kRowBytes);
        const unsigned left[2] = {m[0], m[1]}, right[2] = {m[2], m[3]};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          dk::mma<T>(o[b][2 * panel], probabilities[i][b], left);
          dk::mma<T>(o[b][2 * panel + 1], probabilities[i][b], right);
        }
      }
  }

  // The output takes the place of the warp's queries, and goes from there in whole rows.
  const Thread thread;
  const long long part = part_of_first_row();
  const int rows = planned.rows, r = thread.r, c = thread.c, warp_row = thread.row_of_warp(kWarpRows);
  dk::wait_for_copies<0>();
  __syncwarp();
  float v_unit = 1.0f;
  if constexpr (kFlags & dk::kScales) v_unit = dk::scale_of(v_scale, Thread::kv_head());
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + b * 16 + h * 8 + r;
      float l = sum[b][h];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      if constexpr (kFlags & dk::kLse) {
        if (c == 0 && row < rows) lse[part + row * q_heads] = (base[b][h] + log2f(l)) * dk::kLn2;
      }
      if constexpr (kFlags & dk::kSinks) {
        if (l > 0.0f) l += dk::exp2_approx(sinks[Thread::head()] * dk::kLog2e - base[b][h]);
      }
      const float by = l > 0.0f || l != l ? v_unit / l : 0.0f;
#pragma unroll
      for (int p = 0; p < 2 * kPanels; ++p)
        *reinterpret_cast<unsigned*>(shared + dk::swizzled<kRowBytes>(row, p) + c * 2) =
            dk::pair<T>(o[b][p][2 * h] * by, o[b][p][2 * h + 1] * by);
    }
  __syncwarp();
#pragma unroll 4
  for (unsigned i = thread.lane; i < kWarpRows * kRowChunks; i += 32) {
    const int row = warp_row + i / kRowChunks, chunk = i % kRowChunks;
    if (row >= rows) continue;
    const auto* from = reinterpret_cast<const T*>(shared + dk::swizzled<kRowBytes>(row, chunk));
    dk::Vec<T, 8>::load(from).store(out + (part + row * q_heads) * kDim + chunk * 8);
  }
}
