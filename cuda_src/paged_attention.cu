// Attention of one to four queries a request to keys and values in pages (decode), and the plan of a step.
//
// out = softmax(scale * q k^T) v over the tokens that a query attends to: query i of q_len stands at position
// p = length - q_len + i and attends to [p - window, p], or to [0, p] without a window. A request of length 0 is padding:
// its output is 0, its lse -inf, and nothing of its row of the block table is read.
//
// A warp-wide product has 16 tokens as its rows and 8 queries as its columns, so a group of few queries wastes little.

#include <cuda/std/type_traits>
#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/attention.cuh"
#include "dk/attention_plan.cuh"
#include "dk/memory_order.cuh"
#include "dk/mma.cuh"
#include "dk/paged.cuh"
#include "dk/vec.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = 4;

// grid: 1, block: 1024
// lengths: [requests]
// plan: [4 + 4 * blocks + 2 * requests], see dk/attention_plan.cuh
//
// capacity: tokens that a row of the block table has room for; heads: of the row of work; alone: a segment is one unit.
extern "C" __global__ void plan_paged_attention(const int* lengths, int* plan, int requests, int capacity, int heads,
                                                int q_len, int window, int unit_tiles, int alone, int blocks) {
  __shared__ int sums[32];
  __shared__ int before_chunk;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  dk::PlanHead* head = reinterpret_cast<dk::PlanHead*>(plan);
  dk::PlanStart* starts = reinterpret_cast<dk::PlanStart*>(head + 1);
  dk::PlanRequest* rows = reinterpret_cast<dk::PlanRequest*>(starts + blocks);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  // Units of all requests before each: a scan, 1024 requests at a time.
  if (thread == 0) before_chunk = 0;
  for (int chunk = 0; chunk < requests; chunk += 1024) {
    const int request = chunk + thread;
    int length = 0, units = 0;
    if (request < requests) {
      length = lengths[request];
      DK_CHECK(0 <= length && length <= capacity, "lengths[%d] is %d: the block table has room for %d tokens\n", request,
               length, capacity);
      length = min(max(length, 0), capacity);
      units = dk::Extent(length, q_len, window, unit_tiles).units;
    }
    int sum = units;
    for (int step = 1; step < 32; step *= 2) {
      const int lower = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += lower;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = before_chunk;
    for (int w = 0; w < warp; ++w) before += sums[w];
    if (request < requests) rows[request] = {length, before + sum - units};
    __syncthreads();
    if (thread == 1023) before_chunk = before + sum;
    __syncthreads();
  }

  const int units = heads * before_chunk;
  const int per_block = dk::ceil_div(units, blocks);
  if (thread == 0) *head = {per_block, unit_tiles, alone, units};

  // Where each block begins: the last request that begins no later.
  for (int block = thread; block < blocks; block += 1024) {
    const long long place = 1ll * block * per_block;
    if (place >= units) {
      starts[block] = {0, 0, 0, 0};
      continue;
    }
    const int begin = static_cast<int>(place);
    int low = 0, high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (1ll * heads * rows[middle].units_before <= begin) low = middle;
      else high = middle;
    }
    const int of_request = dk::Extent(rows[low].length, q_len, window, unit_tiles).units;
    const int within = begin - heads * rows[low].units_before;
    starts[block] = {low, within / of_request, within % of_request, min(per_block, units - begin)};
  }
}

// grid: as many blocks as are resident, block: 128, one-dimensional
// shared: kStages * (2 * 64 * kDim * sizeof(KV) + kRows * kDim * sizeof(T)) + kRows * 68 * 4 bytes
// q, out: [requests, q_len, kv_heads * group, kDim], lse: [requests, q_len, kv_heads * group]
// k, v: pools, see dk/paged.cuh
// partials: [2 * blocks or units, kRows * (kDim + 2)], arrivals: [requests * heads], all 0 before and after
// k_scale, v_scale: [kv_heads], sinks: [kv_heads * group]
//
// T is __half or __nv_bfloat16, KV is T or __nv_fp8_e4m3. The rows of a head are its q_len * group queries; where they are
// more than kRows, `parts` heads of the row of work share a KV head. lse is the natural logarithm of the sum of
// exp(logit), without the sink.
template <typename T, typename KV, int kDim, int kPage, int kRows, int kFlags, int kStages, int kResident>
__global__ __launch_bounds__(kThreads, kResident) void paged_attention(
    const T* q, const KV* k, const KV* v, const int* block_table, const int* plan_data, float* partials,
    unsigned* arrivals, T* out, float* lse, const float* k_scale, const float* v_scale, const float* sinks,
    long long page_stride, int head_stride, int token_stride, int pages, int table_width, int kv_heads, int group,
    int parts, int q_len, int window, float scale, float soft_cap) {
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "a head has 64, 128 or 256 dimensions");
  static_assert(kRows % 8 == 0, "8 queries are the columns of a product");
  constexpr bool k8Bit = sizeof(KV) == 1;
  using M = cuda::std::conditional_t<k8Bit, __half, T>;  // what is multiplied
  constexpr int kRowBytes = kDim * sizeof(KV), kQueryBytes = kDim * sizeof(T);
  constexpr int kTileBytes = dk::kTile * kRowBytes, kStageBytes = 2 * kTileBytes + kRows * kQueryBytes;
  constexpr int kBlocks = kRows / 8;        // of 8 queries
  constexpr int kSteps = kDim / 16;         // of a product over dimensions
  constexpr int kPanels = kDim / kWarps / 16;  // of 16 dimensions of the output, for each warp
  constexpr int kLogitStride = dk::kTile + 4;

  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ bool is_last;
  float* logits = reinterpret_cast<float*>(shared + kStages * kStageBytes);  // [kRows][kLogitStride]
  const unsigned stages = dk::shared_address(shared);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = lane % 4 * 2;  // see dk/mma.cuh
  const int q_heads = kv_heads * group, rows_of_head = q_len * group;
  const dk::Plan plan(plan_data, gridDim.x);

  dk::Cursor load(plan, kv_heads, parts, q_len, window);
  if (!load.left) return;
  dk::Cursor work = load;

  // Element 0 of query `row` of a head of the row of work; -1 for one that there is not.
  const auto query = [&](const dk::Cursor& at, int row) -> long long {
    const int index = at.part * kRows + row;
    if (index >= rows_of_head) return -1;
    return (1ll * at.request * q_len + index / group) * q_heads + at.kv_head * group + index % group;
  };

  // Where this thread's 16 bytes of row `row` of a tile begin, from the beginning of what its page has of the head.
  constexpr int kChunks = kRowBytes / 16, kRowStep = kThreads / kChunks, kTilePages = dk::ceil_div(dk::kTile, kPage);
  const int first_row = thread / kChunks, chunk = thread % kChunks;
  const auto within = [&](int row) -> int { return row * token_stride + chunk * (16 / sizeof(KV)); };

  // Lane i: the i-th page of the tile that is queued next, which is read one tile ahead; -1 for one with nothing to read.
  const auto next_page = [&]() -> int {
    const int number = load.tile * dk::kTile / kPage + lane, begin = number * kPage;
    if (lane >= kTilePages || begin >= load.length || begin + kPage <= load.first_token) return -1;
    return dk::page_of(block_table, load.request, number, table_width, pages);
  };
  int page = next_page();

  const auto queue_queries = [&](const dk::Cursor& at, unsigned to) {
    constexpr int kQueryChunks = kQueryBytes / 16;
#pragma unroll 1
    for (int i = thread; i < kRows * kQueryChunks; i += kThreads) {
      const int row = i / kQueryChunks, chunk = i % kQueryChunks;
      const long long place = query(at, row);
      const T* from = place < 0 ? q : q + place * kDim + chunk * (16 / sizeof(T));
      dk::copy_async_16(to + dk::swizzled<kQueryBytes>(row, chunk), from, place < 0 ? 0 : 16);
    }
  };
  // A kernel before this one may still write queries and the tokens that they stand at, but no older ones.
  bool waited = false;
  const auto wait = [&]() {
    if (waited) return;
    waited = true;
    dk::wait_for_kernels_before();
    dk::let_kernels_behind_start();
  };

  // Queue the copies of a tile, and with a segment's first one of its queries; rows that there are not become 0.
  const auto queue_tile = [&](int stage) {
    if (load.left) {
      if ((load.tile + 1) * dk::kTile > load.length - q_len) wait();
      const unsigned keys = stages + stage * kStageBytes, values = keys + kTileBytes, queries = values + kTileBytes;
      const int first = load.tile * dk::kTile;
      const long long base = page * page_stride + 1ll * load.kv_head * head_stride +
                             (kPage > dk::kTile ? first % kPage * token_stride : 0);
      const bool whole = first >= load.first_token && first + dk::kTile <= load.length;
      if (whole && __all_sync(~0u, page >= 0 || lane >= kTilePages)) {
#pragma unroll
        for (int i = 0; i < dk::kTile / kRowStep; ++i) {
          const int row = first_row + i * kRowStep, step = i * kRowStep;
          const long long at =
              kRowStep <= kPage
                  ? __shfl_sync(~0u, base, step / kPage) + within(first_row) + step % kPage * token_stride
                  : __shfl_sync(~0u, base, row / kPage) + within(row % kPage);
          dk::copy_async_16(keys + dk::swizzled<kRowBytes>(row, chunk), k + at);
          dk::copy_async_16(values + dk::swizzled<kRowBytes>(row, chunk), v + at);
        }
      } else {
#pragma unroll 1
        for (int row = first_row; row < dk::kTile; row += kRowStep) {
          const long long at = __shfl_sync(~0u, base, row / kPage) + within(row % kPage);
          const bool there = __shfl_sync(~0u, page, row / kPage) >= 0 && first + row < load.length &&
                             first + row >= load.first_token;
          dk::copy_async_16(keys + dk::swizzled<kRowBytes>(row, chunk), there ? k + at : k, there ? 16 : 0);
          dk::copy_async_16(values + dk::swizzled<kRowBytes>(row, chunk), there ? v + at : v, there ? 16 : 0);
        }
      }
      if (waited && load.opens()) queue_queries(load, queries);
      load.advance();
      if (load.left) page = next_page();
    }
    dk::commit_copies();
  };

  unsigned queries[kBlocks][kSteps][2];  // B fragments
  float o[kBlocks][kPanels][4];          // D fragments: dimensions by queries
  float maximum[kBlocks], sum[kBlocks];  // of query r of each block; a lane's part of the sum
  int from[kBlocks], to[kBlocks];        // tokens that query r of each block attends to
  float factor[kBlocks][2];              // of the logits of queries c and c + 1, in powers of two

  int queued = 0;  // the stage that is free
  for (int turn = 1 - kStages; work.left; ++turn) {
    const int stage = queued + 1 == kStages ? 0 : queued + 1;
    const unsigned keys = stages + stage * kStageBytes, values = keys + kTileBytes;
    if (turn == 0) {
      wait();
      // The queries of segments that were opened before.
      dk::Cursor before = work;
      for (int i = 0; i < kStages - 1 && before.left; ++i, before.advance())
        if (before.opens()) queue_queries(before, stages + (stage + i) % kStages * kStageBytes + 2 * kTileBytes);
      dk::commit_copies();
      dk::wait_for_copies<0>();
      __syncthreads();
    }
    if (turn > 0) {
      dk::wait_for_copies<kStages - 2>();
      __syncthreads();  // the tile is there, and nobody reads the stage before it any more
    }

    if (turn >= 0 && work.opens()) {
      const unsigned char* rows = shared + stage * kStageBytes + 2 * kTileBytes;
      float unit = scale * dk::kLog2e;
      if constexpr (kFlags & dk::kScales) unit *= k_scale[work.kv_head];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int row = b * 8 + r;
        float raise = 1.0f;  // of query r: what its halves are too small by
        if constexpr (k8Bit) {
          // A lane's 4 keys of 4 bytes go to two fragments: dimensions 2c, 2c + 1 to the first pair, 2c + 2, 2c + 3 to the
          // second. Queries get halves by a power of two that brings the largest into [2^14, 2^15).
          float largest = 0.0f, lower = 1.0f;
          if constexpr (!cuda::std::is_same_v<T, __half>) {
            for (int s = 0; s < kSteps; ++s) {
              const auto four = *reinterpret_cast<const dk::Vec<T, 4>*>(
                  rows + dk::swizzled<kQueryBytes>(row, 2 * s + c / 4) + c % 4 * 4);
              for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(dk::to_float(four.elements[j])));
            }
            for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
            if (largest > 0.0f && largest < CUDART_INF_F) {
              const int exponent = max((__float_as_int(largest) >> 23) - 127, -100) - 14;
              raise = __int_as_float((127 + exponent) << 23), lower = __int_as_float((127 - exponent) << 23);
            }
          }
#pragma unroll
          for (int s = 0; s < kSteps; ++s) {
            const auto four = *reinterpret_cast<const dk::Vec<T, 4>*>(
                rows + dk::swizzled<kQueryBytes>(row, 2 * s + c / 4) + c % 4 * 4);
            float x[4];
            for (int j = 0; j < 4; ++j) x[j] = dk::to_float(four.elements[j]) * lower;
            queries[b][s][0] = dk::pair<__half>(x[0], x[1]), queries[b][s][1] = dk::pair<__half>(x[2], x[3]);
          }
        } else {
#pragma unroll
          for (int s = 0; s < kSteps; ++s)
            for (int j = 0; j < 2; ++j)
              queries[b][s][j] =
                  *reinterpret_cast<const unsigned*>(rows + dk::swizzled<kQueryBytes>(row, 2 * s + j) + c * 2);
        }
        for (int j = 0; j < 2; ++j) factor[b][j] = unit * __shfl_sync(~0u, raise, (c + j) * 4);
        const int position = work.length - q_len + (work.part * kRows + row) / group;
        from[b] = window < 0 ? 0 : max(0, position - window), to[b] = position + 1;
        maximum[b] = -CUDART_INF_F, sum[b] = 0.0f;
        for (int p = 0; p < kPanels; ++p)
          for (int j = 0; j < 4; ++j) o[b][p][j] = 0.0f;
      }
    }
    queue_tile(queued);
    queued = stage;
    if (turn < 0) continue;  // the first turns only queue

    // Logits of 16 tokens for each warp, tokens by queries.
    float s[kBlocks][4] = {}, s_odd[kBlocks][4] = {};  // two sums: a product waits for the one before it in its own
    const int token_row = warp * 16 + lane % 16;
    if constexpr (k8Bit) {
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        unsigned bytes[4];
        dk::load_matrices(bytes, keys + dk::swizzled<kRowBytes>(token_row, step + lane / 16));
        for (int half = 0; half < 2; ++half) {
          const unsigned low = bytes[2 * half], high = bytes[2 * half + 1];
          const unsigned a[4] = {dk::halves(low), dk::halves(high), dk::halves(low >> 16), dk::halves(high >> 16)};
          for (int b = 0; b < kBlocks; ++b) dk::mma<M>(half ? s_odd[b] : s[b], a, queries[b][step + half]);
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        unsigned a[4];
        dk::load_matrices(a, keys + dk::swizzled<kRowBytes>(token_row, 2 * step + lane / 16));
        for (int b = 0; b < kBlocks; ++b) dk::mma<M>(step % 2 ? s_odd[b] : s[b], a, queries[b][step]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      for (int j = 0; j < 4; ++j) {
        float x = (s[b][j] + s_odd[b][j]) * factor[b][j % 2];
        if constexpr (kFlags & dk::kSoftCap) x = soft_cap * dk::kLog2e * dk::tanh_fast(x * (dk::kLn2 / soft_cap));
        logits[(b * 8 + c + j % 2) * kLogitStride + warp * 16 + r + j / 2 * 8] = x;
      }
    __syncthreads();

    // Every warp takes all tokens: probabilities as B fragments, tokens by queries.
    unsigned probabilities[kBlocks][dk::kTile / 16][2];
    const int first = work.tile * dk::kTile;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float x[dk::kTile / 8][2];
#pragma unroll
      for (int i = 0; i < dk::kTile / 8; ++i) {
        const float2 two = *reinterpret_cast<const float2*>(logits + (b * 8 + r) * kLogitStride + i * 8 + c);
        x[i][0] = two.x, x[i][1] = two.y;
      }
      if (first < from[b] || first + dk::kTile > to[b]) {
#pragma unroll
        for (int i = 0; i < dk::kTile / 8; ++i)
          for (int j = 0; j < 2; ++j) {
            const int token = first + i * 8 + c + j;
            if (token < from[b] || token >= to[b]) x[i][j] = -CUDART_INF_F;
          }
      }
      float above = maximum[b];
#pragma unroll
      for (int i = 0; i < dk::kTile / 8; ++i) above = fmaxf(above, fmaxf(x[i][0], x[i][1]));
      above = fmaxf(above, __shfl_xor_sync(~0u, above, 1));
      above = fmaxf(above, __shfl_xor_sync(~0u, above, 2));
      const float base = above == -CUDART_INF_F ? 0.0f : above;  // nothing attended to yet: (-inf) - (-inf) is NaN
      const float shrink = dk::exp2_approx(maximum[b] - base);
      maximum[b] = above;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < dk::kTile / 8; ++i) {
        const float low = dk::exp2_approx(x[i][0] - base), high = dk::exp2_approx(x[i][1] - base);
        added += low + high;
        probabilities[b][i / 2][i % 2] = dk::pair<M>(low, high);
      }
      sum[b] = sum[b] * shrink + added;
      if (__any_sync(~0u, shrink != 1.0f)) {
        const float even = __shfl_sync(~0u, shrink, c * 4), odd = __shfl_sync(~0u, shrink, c * 4 + 4);
#pragma unroll
        for (int p = 0; p < kPanels; ++p)
          for (int j = 0; j < 4; ++j) o[b][p][j] *= j % 2 ? odd : even;
      }
    }

    // The output's panels: dimensions by queries.
#pragma unroll
    for (int p = 0; p < kPanels; ++p) {
      const int panel = warp * kPanels + p;
      if constexpr (k8Bit) {
#pragma unroll
        for (int i = 0; i < dk::kTile / 32; ++i) {
          unsigned bytes[4];
          dk::load_matrices_transposed(bytes, values + dk::swizzled<kRowBytes>(i * 32 + lane, panel));
          for (int half = 0; half < 2; ++half) {
            // A lane has two tokens by two dimensions; a fragment's pair is two tokens of one dimension. Row r is
            // dimension 2r, row r + 8 is 2r + 1.
            const unsigned low = __byte_perm(bytes[2 * half], 0, 0x3120);
            const unsigned high = __byte_perm(bytes[2 * half + 1], 0, 0x3120);
            const unsigned a[4] = {dk::halves(low), dk::halves(low >> 16), dk::halves(high), dk::halves(high >> 16)};
            for (int b = 0; b < kBlocks; ++b) dk::mma<M>(o[b][p], a, probabilities[b][2 * i + half]);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < dk::kTile / 16; ++i) {
          unsigned a[4];
          const int row = i * 16 + lane / 16 * 8 + lane % 8;
          dk::load_matrices_transposed(a, values + dk::swizzled<kRowBytes>(row, 2 * panel + lane / 8 % 2));
          for (int b = 0; b < kBlocks; ++b) dk::mma<M>(o[b][p], a, probabilities[b][i]);
        }
      }
    }

    if (work.closes()) {
      const dk::Slots slots(plan, work);
      const int kv_head = work.kv_head;
      const int rows = min(kRows, rows_of_head - work.part * kRows);
      float v_unit = 1.0f;
      if constexpr (kFlags & dk::kScales) v_unit = v_scale[kv_head];
      // What the sums of a query are divided by, once they are complete.
      const auto finish = [&](int row, float m, float l) -> float {
        float below = l;
        if constexpr (kFlags & dk::kSinks) {
          const int index = work.part * kRows + row;
          if (m > -CUDART_INF_F) below += dk::exp2_approx(sinks[kv_head * group + index % group] * dk::kLog2e - m);
        }
        return below > 0.0f || below != below ? v_unit / below : 0.0f;
      };
      constexpr int kSlot = kRows * (kDim + 2);
      float* slot = partials + 1ll * slots.mine * kSlot;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        sum[b] += __shfl_xor_sync(~0u, sum[b], 1);
        sum[b] += __shfl_xor_sync(~0u, sum[b], 2);
        if (warp == 0 && c == 0 && b * 8 + r < rows) {
          if (slots.count > 1) {
            *reinterpret_cast<float2*>(slot + kRows * kDim + 2 * (b * 8 + r)) = {maximum[b], sum[b]};
          } else if constexpr (kFlags & dk::kLse) {
            lse[query(work, b * 8 + r)] = (maximum[b] + log2f(sum[b])) * dk::kLn2;
          }
        }
        for (int j = 0; j < 2; ++j) {
          const int row = b * 8 + c + j;
          const float m = __shfl_sync(~0u, maximum[b], (c + j) * 4), l = __shfl_sync(~0u, sum[b], (c + j) * 4);
          if (row >= rows) continue;
          const float by = slots.count > 1 ? 1.0f : finish(row, m, l);
          const long long at = query(work, row) * kDim;
          for (int p = 0; p < kPanels; ++p)
            for (int i = 0; i < 2; ++i) {
              const int dim = (warp * kPanels + p) * 16 + (k8Bit ? 2 * r + i : r + 8 * i);
              const float x = o[b][p][2 * i + j] * by;
              if (slots.count > 1) slot[row * kDim + dim] = x;
              else out[at + dim] = dk::from_float<T>(x);
            }
        }
      }
      if (slots.count > 1) {
        __syncthreads();
        if (thread == 0) {
          unsigned* arrived = arrivals + work.request * work.heads + work.head;
          is_last = dk::count_acq_rel_gpu(arrived, slots.count - 1) == slots.count - 1;
        }
        __syncthreads();
        if (is_last) {
          // A warp for each row: lane i has the weight of part i, and kDim / 32 dimensions.
          constexpr int kDims = kDim / 32, kAtOnce = kDim > 128 ? 4 : kResident > 2 ? 8 : 16;
          for (int row = warp; row < rows; row += kWarps) {
            float m = -CUDART_INF_F, l = 0.0f, x[kDims] = {};
            for (int part = 0; part < slots.count; part += 32) {
              float2 mine = {-CUDART_INF_F, 0.0f};
              if (part + lane < slots.count)
                mine = reinterpret_cast<const float2*>(partials + 1ll * slots[part + lane] * kSlot + kRows * kDim)[row];
              float above = fmaxf(m, mine.x);
              for (int step = 1; step < 32; step *= 2) above = fmaxf(above, __shfl_xor_sync(~0u, above, step));
              const float base = above == -CUDART_INF_F ? 0.0f : above;
              const float old = dk::exp2_approx(m - base), weight = dk::exp2_approx(mine.x - base);
              m = above, l *= old;
              for (int j = 0; j < kDims; ++j) x[j] *= old;
#pragma unroll 1
              for (int first = part; first < slots.count && first < part + 32; first += kAtOnce) {
                float y[kAtOnce][kDims];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {  // again the last one where there are no more: its weight is 0
                  const int slot = slots[min(first + i, slots.count - 1)];
                  const float* from = partials + 1ll * slot * kSlot + row * kDim + lane * kDims;
                  if constexpr (kDims == 2) *reinterpret_cast<float2*>(y[i]) = *reinterpret_cast<const float2*>(from);
                  else
                    for (int j = 0; j < kDims; j += 4)
                      *reinterpret_cast<float4*>(y[i] + j) = *reinterpret_cast<const float4*>(from + j);
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                  const float by = __shfl_sync(~0u, weight, first - part + i);
                  l += __shfl_sync(~0u, mine.y, first - part + i) * by;
                  for (int j = 0; j < kDims; ++j) x[j] += y[i][j] * by;
                }
              }
            }
            const float by = finish(row, m, l);
            const long long at = query(work, row);
            dk::Vec<T, kDims> results;
            for (int j = 0; j < kDims; ++j) results.elements[j] = dk::from_float<T>(x[j] * by);
            results.store(out + at * kDim + lane * kDims);
            if constexpr (kFlags & dk::kLse) {
              if (lane == 0) lse[at] = (m + log2f(l)) * dk::kLn2;
            }
          }
        }
      }
    }
    work.advance();
  }
}

// grid: ceil(rows / (block / 32)), block: any multiple of 32, both one-dimensional
// outs: [parts, rows, dim], lses: [parts, rows], out: [rows, dim], lse: [rows]; dim is a multiple of 8
// lse[r] = log(sum over parts of exp(lses[p][r])), out[r] = sum over parts of exp(lses[p][r] - lse[r]) * outs[p][r]
//
// A warp for each row. Parts of lse -inf are not read; a row of which all are gets 0 and -inf.
template <typename T>
__global__ void merge_attention(const T* outs, const float* lses, T* out, float* lse, int parts, int rows, int dim) {
  const long long row = dk::thread_in_grid() / 32;
  const int lane = threadIdx.x % 32;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  if (row >= rows) return;
  float m = -CUDART_INF_F, l = 0.0f;
  for (int part = 0; part < parts; ++part) m = fmaxf(m, lses[1ll * part * rows + row]);
  const float base = m == -CUDART_INF_F ? 0.0f : m;
  for (int part = 0; part < parts; ++part) l += dk::exp2_approx((lses[1ll * part * rows + row] - base) * dk::kLog2e);
  if (lane == 0) lse[row] = m + log2f(l) * dk::kLn2;
  for (int d = lane * 8; d < dim; d += 256) {
    float x[8] = {};
    for (int part = 0; part < parts; ++part) {
      const float here = lses[1ll * part * rows + row];
      if (here == -CUDART_INF_F) continue;
      const float weight = dk::exp2_approx((here - base) * dk::kLog2e) / l;
      for (int j = 0; j < 8; j += 4) {
        const auto four = dk::Vec<T, 4>::load(outs + (1ll * part * rows + row) * dim + d + j);
        for (int i = 0; i < 4; ++i) x[j + i] += dk::to_float(four.elements[i]) * weight;
      }
    }
    for (int j = 0; j < 8; j += 4) {
      dk::Vec<T, 4> four;
      for (int i = 0; i < 4; ++i) four.elements[i] = dk::from_float<T>(x[j + i]);
      four.store(out + row * dim + d + j);
    }
  }
}
