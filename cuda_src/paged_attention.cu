// Attention of one to four queries a request to keys and values in pages (decode), and the plan of a step.
//
// out = softmax(scale * q k^T) v over the tokens that a query attends to: query i of q_len stands at position
// p = length - q_len + i and attends to [p - window, p], or to [0, p] without a window. A request of length 0 is padding:
// its output is 0, its lse -inf, and nothing of its row of the block table is read.
//
// A warp-wide product has 16 tokens as its rows and 8 queries as its columns, so a group of few queries wastes little.

#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/attention.cuh"
#include "dk/attention_plan.cuh"
#include "dk/memory_order.cuh"
#include "dk/mma.cuh"
#include "dk/paged.cuh"
#include "dk/vec.cuh"
#include "dk/warp.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = 4;
constexpr int kStrip = 16;  // tokens

// grid: 1, block: 1024
// lengths: [requests]
// plan: [4 + 6 * teams + 2 * requests], see dk/attention_plan.cuh
//
// capacity: tokens that a row of the block table has room for; sets: of heads; alone: a segment is one unit.
extern "C" __global__ void plan_paged_attention(const int* lengths, int* plan, int requests, int capacity, int sets,
                                                int q_len, int window, int unit_tiles, int alone, int teams) {
  __shared__ int sums[32];
  __shared__ int before_chunk;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  dk::PlanHead* head = reinterpret_cast<dk::PlanHead*>(plan);
  dk::PlanStart* starts = reinterpret_cast<dk::PlanStart*>(head + 1);
  dk::PlanRequest* rows = reinterpret_cast<dk::PlanRequest*>(starts + teams);
  dk::wait_for_kernels_before();  // nobody is let start before the end: attention reads the plan before it waits

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
    const int sum = dk::sum_up_to_lane(units);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = before_chunk;
    for (int w = 0; w < warp; ++w) before += sums[w];
    if (request < requests) rows[request] = {length, before + sum - units};
    __syncthreads();
    if (thread == 1023) before_chunk = before + sum;
    __syncthreads();
  }

  const int units = sets * before_chunk;
  const int per_team = dk::ceil_div(units, teams);
  if (thread == 0) *head = {per_team, unit_tiles, alone, units};

  // Where each team begins: the last request that begins no later.
  for (int team = thread; team < teams; team += 1024) {
    const long long place = 1ll * team * per_team;
    if (place >= units) {
      starts[team] = {};
      continue;
    }
    const int begin = static_cast<int>(place);
    int low = 0, high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (1ll * sets * rows[middle].units_before <= begin) low = middle;
      else high = middle;
    }
    const int of_request = dk::Extent(rows[low].length, q_len, window, unit_tiles).units;
    const int within = begin - sets * rows[low].units_before;
    const int left = min(per_team, units - begin);
    starts[team] = {low, within / of_request, within % of_request, left, rows[low]};
  }
}

// grid: as many blocks as are resident, block: 128, one-dimensional
// shared: kStages * kTiles * 2 * 64 * kDim * sizeof(KV) + kWarps * 4 * (kDim + 10) * 4 bytes
// q, out: [requests, q_len, kv_heads * group, kDim], q_stride elements from token to token in q, and none between in out
// lse: [requests, q_len, kv_heads * group]
// k, v: pools, see dk/paged.cuh
// partials: [2 * blocks or units, kRows * (kDim + 2)], arrivals: [requests * heads], all 0 before and after
// k_scale, v_scale: [kv_heads], sinks: [kv_heads * group]
//
// T is __half or __nv_bfloat16, KV is T or __nv_fp8_e4m3. The rows of a head are its q_len * group queries; where they are
// more than kRows, `parts` heads of the row of work share a KV head. lse is the natural logarithm of the sum of
// exp(logit), without the sink.
//
// Of each tile a warp takes a strip of 16 tokens, with copies, a maximum and sums of its own: warps meet only where a
// segment closes, and add up there what they have.
template <typename T, typename KV, int kDim, int kPage, int kRows, int kFlags, int kTiles, int kStages, int kResident>
__global__ __launch_bounds__(kThreads, kResident) void paged_attention(
    const T* q, const KV* k, const KV* v, const int* block_table, const int* plan_data, float* partials,
    unsigned* arrivals, T* out, float* lse, const float* k_scale, const float* v_scale, const float* sinks,
    long long page_stride, int head_stride, int token_stride, int pages, int table_width, int kv_heads, int group,
    int parts, int abreast, int q_len, int q_stride, int window, float scale, float soft_cap) {
  static_assert(kDim == 64 || kDim == 128 || kDim == 256, "a head has 64, 128 or 256 dimensions");
  static_assert(kRows % 8 == 0, "8 queries are the columns of a product");
  static_assert(dk::kTile == kWarps * kStrip, "a tile is a strip for each warp");
  constexpr bool k8Bit = sizeof(KV) == 1;
  using M = typename dk::Factor<T, KV>::type;
  constexpr int kRowBytes = kDim * sizeof(KV), kStripBytes = kStrip * kRowBytes;  // of keys or of values
  constexpr int kStageBytes = kWarps * kTiles * 2 * kStripBytes;
  constexpr int kBlocks = kRows / 8;  // of 8 queries
  constexpr int kSteps = kDim / 16;   // of 16 dimensions

  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ bool is_last;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = lane % 4 * 2;  // see dk/mma.cuh
  const unsigned strips = dk::shared_address(shared) + warp * kTiles * 2 * kStripBytes;  // of this warp, in stage 0
  const int out_stride = kv_heads * group * kDim, rows_of_head = q_len * group;
  const dk::Plan plan(plan_data, abreast);

  dk::Cursor<kTiles> load(plan, kv_heads, parts, q_len, window);
  if (!load.left) return;
  dk::Cursor<kTiles> work = load;

  // Which of a request's tokens a row of a head is a query of: index / group, which is at most 3.
  const auto token_of = [&](int index) -> int {
    return (index >= group) + (index >= 2 * group) + (index >= 3 * group);
  };
  // Where row `row` of a head of the work begins in an array with so many elements a token; -1 for one that there is not.
  const auto place_of = [&](const dk::Cursor<kTiles>& at, int row, int of_token) -> long long {
    const int index = at.part() * kRows + row, token = token_of(index);
    if (index >= rows_of_head) return -1;
    return (1ll * at.request * q_len + token) * of_token + (at.kv_head * group + index - token * group) * kDim;
  };
  // The first token of this warp's strip in tile i of those of a turn; whether there are tokens in any of its strips.
  const auto strip = [&](const dk::Cursor<kTiles>& at, int i) -> int {
    return (at.tile + i) * dk::kTile + warp * kStrip;
  };
  const auto has_tokens = [&](const dk::Cursor<kTiles>& at) -> bool {
    bool has = false;
    for (int i = 0; i < kTiles; ++i) has |= strip(at, i) < at.end_token() && strip(at, i) + kStrip > at.first_token;
    return has;
  };

  // The pages of the strips that are queued next, which are read one turn ahead; -1 for one with nothing to read.
  constexpr int kStripPages = dk::ceil_div(kStrip, kPage);
  int page[kTiles][kStripPages];
  const auto read_pages = [&]() {
    for (int i = 0; i < kTiles; ++i)
      for (int j = 0; j < kStripPages; ++j) {
        const int number = strip(load, i) / kPage + j, begin = number * kPage;
        const bool there = begin < load.end_token() && begin + kPage > load.first_token;
        page[i][j] = there ? dk::page_of(block_table, load.request, number, table_width, pages) : -1;
      }
  };
  read_pages();

  // A kernel before this one may still write queries and the tokens that they stand at, but no older ones.
  bool waited = false;
  const auto wait = [&]() {
    if (waited) return;
    waited = true;
    dk::wait_for_kernels_before();
    dk::let_kernels_behind_start();
  };

  // Queue the copies of the strips of a turn; rows that there are not become 0.
  constexpr int kChunks = kRowBytes / 16, kRowStep = 32 / kChunks;
  const int chunk = lane % kChunks;
  const int within = lane / kChunks * token_stride + chunk * (16 / sizeof(KV));
  const unsigned long long once = dk::evict_first();
  const auto queue_strips = [&](int stage) {
    if (load.left) {
      if (has_tokens(load)) {
        if (min(strip(load, kTiles - 1) + kStrip, load.end_token()) > load.length - q_len) wait();
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const unsigned keys = strips + stage * kStageBytes + i * 2 * kStripBytes, values = keys + kStripBytes;
          const int first = strip(load, i);
          const int begin = load.first_token - first, end = load.end_token() - first;  // rows that are there
          long long base[kStripPages];
          for (int j = 0; j < kStripPages; ++j)
            base[j] = page[i][j] * page_stride + 1ll * load.kv_head * head_stride +
                      (kPage > kStrip ? first % kPage * token_stride : 0) + within;
#pragma unroll
          for (int step = 0; step < kStrip; step += kRowStep) {
            const int row = step + lane / kChunks;
            const unsigned to = dk::swizzled<kRowBytes>(row, chunk);
            const long long at = base[step / kPage] + step % kPage * token_stride;
            const bool there = page[i][step / kPage] >= 0 && row >= begin && row < end;
            dk::copy_async_16(keys + to, there ? k + at : k, there ? 16 : 0, once);
            dk::copy_async_16(values + to, there ? v + at : v, there ? 16 : 0, once);
          }
        }
      }
      load.advance();
      if (load.left) read_pages();
    }
    dk::commit_copies();
  };

  for (int stage = 0; stage < kStages - 1; ++stage) queue_strips(stage);
  wait();
  int stage = 0;
  for (; work.left; work.advance()) {  // a segment
    unsigned queries[kBlocks][kSteps][2];        // B fragments
    float o[kBlocks][kSteps][4];                 // D fragments: dimensions by queries
    float maximum[kBlocks][2], sum[kBlocks][2];  // of queries c and c + 1 of each block of 8; a lane's part of the sum
    float factor[kBlocks][2];                    // of their logits, in powers of two
    int position[kBlocks][2];

    float unit = scale * dk::kLog2e;
    if constexpr (kFlags & dk::kScales) unit *= dk::scale_of(k_scale, work.kv_head);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const long long place = place_of(work, b * 8 + r, q_stride);
      float raise = 1.0f;  // of query r: what its halves are too small by
      if constexpr (k8Bit) {
        // A lane's 4 keys of 4 bytes go to two fragments: dimensions 2c, 2c + 1 to the first pair, 2c + 2, 2c + 3 to the
        // second. Queries get halves by a power of two that brings the largest into [2^14, 2^15).
        dk::Vec<T, 4> fours[kSteps] = {};
        float largest = 0.0f, lower = 1.0f;
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          if (place >= 0) fours[s] = dk::Vec<T, 4>::load(q + place + s * 16 + c * 2);
        if constexpr (!dk::kIsHalf<T>) {
#pragma unroll
          for (int s = 0; s < kSteps; ++s)
            for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(dk::to_float(fours[s].elements[j])));
          for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
          if (largest > 0.0f && largest < CUDART_INF_F) {
            const int exponent = max((__float_as_int(largest) >> 23) - 127, -100) - 14;
            raise = __int_as_float((127 + exponent) << 23), lower = __int_as_float((127 - exponent) << 23);
          }
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float x[4];
          for (int j = 0; j < 4; ++j) x[j] = dk::to_float(fours[s].elements[j]) * lower;
          queries[b][s][0] = dk::pair<__half>(x[0], x[1]), queries[b][s][1] = dk::pair<__half>(x[2], x[3]);
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          for (int j = 0; j < 2; ++j)
            queries[b][s][j] =
                place < 0 ? 0u : *reinterpret_cast<const unsigned*>(q + place + s * 16 + j * 8 + c);
      }
      for (int j = 0; j < 2; ++j) {
        factor[b][j] = unit * __shfl_sync(~0u, raise, (c + j) * 4);
        position[b][j] = work.length - q_len + token_of(work.part() * kRows + b * 8 + c + j);
        maximum[b][j] = -CUDART_INF_F, sum[b][j] = 0.0f;
      }
      for (int p = 0; p < kSteps; ++p)
        for (int j = 0; j < 4; ++j) o[b][p][j] = 0.0f;
    }

    for (;; work.advance()) {  // a turn
      __syncwarp();  // all lanes have read the strips whose stage is filled again
      queue_strips(stage == 0 ? kStages - 1 : stage - 1);
      dk::wait_for_copies<kStages - 1>();
      __syncwarp();  // the strips are there

      if (has_tokens(work)) {
        const unsigned keys = strips + stage * kStageBytes, values = keys + kStripBytes;

        // Logits, tokens by queries.
        float s[kTiles][kBlocks][4] = {}, s_odd[kTiles][kBlocks][4] = {};  // two sums: a product waits for the one before
#pragma unroll
        for (int step = 0; step < kSteps; step += 2)
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            const unsigned rows = keys + i * 2 * kStripBytes;
            unsigned a[2][4];
            if constexpr (k8Bit) {
              unsigned bytes[4];
              dk::load_matrices(bytes, rows + dk::swizzled<kRowBytes>(lane % 16, step + lane / 16));
              for (int odd = 0; odd < 2; ++odd) {
                const unsigned low = bytes[2 * odd], high = bytes[2 * odd + 1];
                a[odd][0] = dk::halves(low), a[odd][1] = dk::halves(high);
                a[odd][2] = dk::halves(low >> 16), a[odd][3] = dk::halves(high >> 16);
              }
            } else {
              for (int odd = 0; odd < 2; ++odd)
                dk::load_matrices(a[odd], rows + dk::swizzled<kRowBytes>(lane % 16, 2 * (step + odd) + lane / 16));
            }
            for (int b = 0; b < kBlocks; ++b) {
              dk::mma<M>(s[i][b], a[0], queries[b][step]);
              dk::mma<M>(s_odd[i][b], a[1], queries[b][step + 1]);
            }
          }

        // Probabilities as B fragments. Element j of a lane: token r + j / 2 * 8, query c + j % 2.
        unsigned probabilities[kTiles][kBlocks][2];
        const bool all_attend = strip(work, 0) >= (window < 0 ? 0 : work.length - 1 - window) &&
                                strip(work, kTiles - 1) + kStrip <= min(work.length - q_len + 1, work.end_token());
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          float x[kTiles][4];
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
            for (int j = 0; j < 4; ++j) {
              float y = (s[i][b][j] + s_odd[i][b][j]) * factor[b][j % 2];
              if constexpr (kFlags & dk::kSoftCap) y = soft_cap * dk::kLog2e * dk::tanh_fast(y * (dk::kLn2 / soft_cap));
              x[i][j] = y;
            }
          if (!all_attend) {
#pragma unroll
            for (int i = 0; i < kTiles; ++i)
              for (int j = 0; j < 4; ++j) {
                const int token = strip(work, i) + r + j / 2 * 8, at = position[b][j % 2];
                if (token > at || token >= work.end_token() || (window >= 0 && token < at - window))
                  x[i][j] = -CUDART_INF_F;
              }
          }
          bool above = false;
#pragma unroll
          for (int i = 0; i < kTiles; ++i)
            for (int j = 0; j < 4; ++j) above |= x[i][j] > maximum[b][j % 2] + dk::kSlack;
          if (__any_sync(~0u, above)) {
            for (int j = 0; j < 2; ++j) {
              float most = maximum[b][j];
              for (int i = 0; i < kTiles; ++i) most = fmaxf(most, fmaxf(x[i][j], x[i][j + 2]));
              for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
              // Nothing attended to yet: (-inf) - (-inf) would be NaN.
              const float shrink = most == -CUDART_INF_F ? 1.0f : dk::exp2_approx(maximum[b][j] - most);
              maximum[b][j] = most, sum[b][j] *= shrink;
#pragma unroll
              for (int p = 0; p < kSteps; ++p) o[b][p][j] *= shrink, o[b][p][j + 2] *= shrink;
            }
          }
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            for (int j = 0; j < 4; ++j) {
              const float base = maximum[b][j % 2];
              x[i][j] = dk::exp2_approx(x[i][j] - (base == -CUDART_INF_F ? 0.0f : base));
              sum[b][j % 2] += x[i][j];
            }
            for (int j = 0; j < 2; ++j)
              probabilities[i][b][j] = dk::transposed(dk::pair<M>(x[i][2 * j], x[i][2 * j + 1]));
          }
        }

        // The output, dimensions by queries.
#pragma unroll
        for (int p = 0; p < kSteps; p += 2)
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            const unsigned rows = values + i * 2 * kStripBytes;
            unsigned a[2][4];
            if constexpr (k8Bit) {
              unsigned bytes[4];
              dk::load_matrices_transposed(bytes, rows + dk::swizzled<kRowBytes>(lane % 16, p + lane / 16));
              for (int odd = 0; odd < 2; ++odd) {
                // A lane has two tokens by two dimensions; a fragment's pair is two tokens of one dimension. Row r is
                // dimension 2r, row r + 8 is 2r + 1.
                const unsigned low = __byte_perm(bytes[2 * odd], 0, 0x3120);
                const unsigned high = __byte_perm(bytes[2 * odd + 1], 0, 0x3120);
                a[odd][0] = dk::halves(low), a[odd][1] = dk::halves(low >> 16);
                a[odd][2] = dk::halves(high), a[odd][3] = dk::halves(high >> 16);
              }
            } else {
              for (int odd = 0; odd < 2; ++odd) {
                const int row = lane / 16 * 8 + lane % 8, chunk = 2 * (p + odd) + lane / 8 % 2;
                dk::load_matrices_transposed(a[odd], rows + dk::swizzled<kRowBytes>(row, chunk));
              }
            }
            for (int b = 0; b < kBlocks; ++b)
              for (int odd = 0; odd < 2; ++odd) dk::mma<M>(o[b][p + odd], a[odd], probabilities[i][b]);
          }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (work.closes()) break;
    }

    const dk::Slots slots(plan, work);
    const int rows = min(kRows, rows_of_head - work.part() * kRows);
    float v_unit = 1.0f;
    if constexpr (kFlags & dk::kScales) v_unit = dk::scale_of(v_scale, work.kv_head);
    // What the sums of a query are divided by, once they are complete.
    const auto finish = [&](int row, float m, float l) -> float {
      float below = l;
      if constexpr (kFlags & dk::kSinks) {
        const int index = work.part() * kRows + row, head = work.kv_head * group + index - token_of(index) * group;
        if (m > -CUDART_INF_F) below += dk::exp2_approx(sinks[head] * dk::kLog2e - m);
      }
      return below > 0.0f || below != below ? v_unit / below : 0.0f;
    };
    constexpr int kSlot = kRows * (kDim + 2);
    float* slot = partials + 1ll * slots.mine * kSlot;

    // The warps' parts of 4 queries: outputs and, behind all of those, maxima and sums.
    constexpr int kPart = kDim + 8;
    float* part_sums = reinterpret_cast<float*>(shared + kStages * kStageBytes);  // [kWarps][4][kPart]
    float2* part_tops = reinterpret_cast<float2*>(part_sums + kWarps * 4 * kPart);  // [kWarps][4]
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      for (int j = 0; j < 2; ++j)
        for (int step = 4; step < 32; step *= 2) sum[b][j] += __shfl_xor_sync(~0u, sum[b][j], step);
#pragma unroll
    for (int four = 0; four < 2 * kBlocks; ++four) {
      if (four * 4 >= rows) break;
      const int b = four / 2, first = four % 2 * 4;  // of the block's queries
      __syncthreads();  // nobody reads the last parts any more
      if (c / 4 == four % 2) {
        for (int j = 0; j < 2; ++j) {
          const int at = warp * 4 + c - first + j;
          if (r == 0) part_tops[at] = {maximum[b][j], sum[b][j]};
          float* part = part_sums + at * kPart;
#pragma unroll
          for (int p = 0; p < kSteps; ++p) {
            if constexpr (k8Bit) *reinterpret_cast<float2*>(part + p * 16 + 2 * r) = {o[b][p][j], o[b][p][j + 2]};
            else part[p * 16 + r] = o[b][p][j], part[p * 16 + r + 8] = o[b][p][j + 2];
          }
        }
      }
      __syncthreads();
      // A warp for each query, a lane for 2 dimensions of 64.
      const int row = four * 4 + warp;
      if (row >= rows) continue;
      constexpr int kPairs = kDim / 64;
      float m = -CUDART_INF_F, l = 0.0f;
      for (int w = 0; w < kWarps; ++w) m = fmaxf(m, part_tops[w * 4 + warp].x);
      float2 x[kPairs] = {};
      for (int w = 0; w < kWarps; ++w) {
        const float2 top = part_tops[w * 4 + warp];
        const float by = m == -CUDART_INF_F ? 1.0f : dk::exp2_approx(top.x - m);
        l += top.y * by;
        for (int i = 0; i < kPairs; ++i) {
          const float2 y = *reinterpret_cast<const float2*>(part_sums + (w * 4 + warp) * kPart + i * 64 + lane * 2);
          x[i].x += y.x * by, x[i].y += y.y * by;
        }
      }
      if (slots.count > 1) {
        for (int i = 0; i < kPairs; ++i) *reinterpret_cast<float2*>(slot + row * kDim + i * 64 + lane * 2) = x[i];
        if (lane == 0) reinterpret_cast<float2*>(slot + kRows * kDim)[row] = {m, l};
      } else {
        const float by = finish(row, m, l);
        const long long at = place_of(work, row, out_stride);
        for (int i = 0; i < kPairs; ++i)
          *reinterpret_cast<unsigned*>(out + at + i * 64 + lane * 2) = dk::pair<T>(x[i].x * by, x[i].y * by);
        if constexpr (kFlags & dk::kLse) {
          if (lane == 0) lse[at / kDim] = (m + log2f(l)) * dk::kLn2;
        }
      }
    }
    if (slots.count > 1) {
      __syncthreads();
      if (thread == 0) {
        unsigned* arrived = arrivals + work.request * work.heads + work.head();
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
          const long long at = place_of(work, row, out_stride);
          dk::Vec<T, kDims> results;
          for (int j = 0; j < kDims; ++j) results.elements[j] = dk::from_float<T>(x[j] * by);
          results.store(out + at + lane * kDims);
          if constexpr (kFlags & dk::kLse) {
            if (lane == 0) lse[at / kDim] = (m + log2f(l)) * dk::kLn2;
          }
        }
      }
    }
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
