// Tokens of a step into entries of a compressed cache: pooled, normalised, turned by position, encoded, into their
// pages; and what later steps need of the tokens into their requests' rings.
//
// A token has a value u and a score g for each of c * dim columns. Entry j is of the tokens from ratio * j on, and is
// made in the step that has the last one of them. Of 128 tokens it pools the columns of each (c = 1). Of 4 tokens it
// pools (c = 2) the first half of the columns of the 4 tokens before them, as far as there are any, and the second half
// of theirs:
//   p = sum over slots i of softmax_i(g_i + ape[i % ratio]) * u_i, each channel by itself
//   y = p / sqrt(mean(p^2) + eps) * weight, its last 64 elements turned by position ratio * j (dk/rope.cuh)
// then, for keys of 128 if kHadamard, y = H y / sqrt(128), H in Sylvester's order. All in float, rounded to bfloat16
// once, and encoded (dk/records.cuh). The order of sums depends on slots and channels alone.
//
// A request's ring has the rows [u | g] of its tokens so far, of position p at place p % cap; those that a later one of
// the step would replace are not written. Tokens of this step are read from ug, older ones from the ring. Nothing
// orders the blocks of a launch, and yet nothing is replaced before it was read: each half of an old row is read for
// one entry at most, by one thread a channel. If that entry is made in this step, that thread writes what comes to the
// place, when it has read it; if not, whoever saves the new token's row does.

#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/records.cuh"
#include "dk/rope.cuh"
#include "dk/step_tokens.cuh"
#include "dk/vec.cuh"

namespace {

using Four = dk::Vec<float, 4>;

constexpr int kPerThread = 8;  // slots, of four channels each: 16 loads of 16 bytes in flight

// A team of threads has some rows of the step, and makes the entries that end there one after the other.
template <int kRatio, int kDim>
struct Team {
  static constexpr int kHalves = kRatio == 4 ? 2 : 1;
  static constexpr int kSlots = kHalves * kRatio;
  static constexpr int kColumns = kHalves * kDim;         // of u, and of g
  static constexpr int kWidth = kRatio == 4 ? kDim : 64;  // channels that it pools at a time
  static constexpr int kLanes = kWidth / 4;               // threads for a slot
  static constexpr int kGroups = kSlots / kPerThread;
  static constexpr int kThreads = kLanes * kGroups;
  static constexpr int kBlock = kThreads == 32 ? 128 : kThreads;
};

// Which token's row is at which place of its request's ring.
template <int kRatio>
struct Ring {
  float* rows;  // [cap, width]
  int width, cap;

  __device__ float* at(int position) const { return rows + static_cast<long long>(position % cap) * width; }

  // Of a token before this step: the one whose row is at its place when the step is over, which may be itself.
  __device__ int successor(dk::StepToken token, int old) const { return old + (token.end - 1 - old) / cap * cap; }
  // Whether this half of a token of this step has to wait until an entry of this step was made of what is at its place.
  __device__ bool waits(dk::StepToken token, int half) const {
    const int old = token.position - ((token.position - token.start) / cap + 1) * cap;
    const int entry = old / kRatio + (kRatio == 4 && half == 0);
    return old >= 0 && token.has((entry + 1) * kRatio - 1);
  }
};

// That of a token's request; without rows if there is none.
template <int kRatio>
__device__ Ring<kRatio> ring_of(dk::StepToken token, float* state, const int* rings, int ring_count, int cap,
                                int width) {
  const int ring = rings[token.request];
  const bool exists = 0 <= ring && ring < ring_count;
  DK_CHECK(exists, "rings[%d] is %d: there are %d\n", token.request, ring, ring_count);
  return {exists ? state + static_cast<long long>(ring) * cap * width : nullptr, width, cap};
}

// Four elements of a row, from `channel` on, into its record. All of a warp come here; those that own theirs store.
template <int kFormat>
__device__ void store_record(const float (&x)[4], int channel, bool owns, unsigned char* values,
                             unsigned char* scales) {
  using Record = dk::Record<kFormat>;
  const __nv_bfloat162 low = __floats2bfloat162_rn(x[0], x[1]), high = __floats2bfloat162_rn(x[2], x[3]);
  const uint2 wide = {reinterpret_cast<const unsigned&>(low), reinterpret_cast<const unsigned&>(high)};
  if constexpr (kFormat == dk::kKvBf16 || kFormat == dk::kKeyBf16) {
    if (owns) *reinterpret_cast<uint2*>(values + 2 * channel) = wide;
    return;
  }
  constexpr int kBlock = kFormat == dk::kKvFp8 ? 64 : kFormat == dk::kKeyMxfp4 ? 32 : Record::kDim;
  float largest = fabsf(x[0]);  // not from 0: where all are NaN it is NaN, as the reference has it
  for (int j = 1; j < 4; ++j) largest = fmaxf(largest, fabsf(x[j]));
  for (int step = kBlock / 8; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  const unsigned exponent = kFormat == dk::kKeyMxfp4 ? dk::exponent_of_e2m1(largest) : dk::exponent_of_e4m3(largest);
  const float by = dk::inverse_power_of_two(exponent);
  const bool speaks = owns && channel % kBlock == 0;  // for the block
  if constexpr (kFormat == dk::kKvFp8) {
    constexpr int kNarrow = Record::kDim - dk::kRotary;
    const bool is_narrow = channel < kNarrow;
    if (owns && is_narrow)
      *reinterpret_cast<unsigned*>(values + channel) = dk::e4m3_of(x[0] * by, x[1] * by, x[2] * by, x[3] * by);
    if (owns && !is_narrow) *reinterpret_cast<uint2*>(values + kNarrow + 2 * (channel - kNarrow)) = wide;
    if (speaks) scales[channel / kBlock] = is_narrow ? exponent : 0;
  } else if constexpr (kFormat == dk::kKeyMxfp4) {
    unsigned nibbles = 0;
    for (int j = 0; j < 4; ++j) nibbles |= dk::e2m1_of(x[j] * by) << 4 * j;
    if (owns) *reinterpret_cast<unsigned short*>(values + channel / 2) = nibbles;
    if (speaks) scales[channel / kBlock] = exponent;
  } else {
    if (owns) *reinterpret_cast<unsigned*>(values + channel) = dk::e4m3_of(x[0] * by, x[1] * by, x[2] * by, x[3] * by);
    if (speaks) *reinterpret_cast<float*>(scales) = dk::power_of_two(exponent);
  }
}

}  // namespace

// grid: kCluster blocks for every team_rows * (teams of a block) rows of the step, one-dimensional; cluster: kCluster
// blocks; block: Team::kBlock, 4 teams for keys of 128, else one
// tokens: [max_tokens, 4], of dk::StepToken; ug: [max_tokens, 2 * c * dim]; state: [ring_count, cap, 2 * c * dim]
// rings: [requests]; ape: [kRatio, c * dim]; weight: [dim]; cos_sin: [max_position, 64], 32 cosines, then 32 sines
// pool, ...: of dk::PagesOf
//
// kRatio is 4 or 128, a row of 128 elements is of 4 tokens, team_rows is at most 32, cap at least c * kRatio. A cluster
// of 8 shares the channels of an entry of 128 tokens; without one (kCluster 1) a block takes them in 8 turns, to the
// same bits.
template <int kRatio, int kFormat, bool kHadamard, int kCluster>
__global__ void __launch_bounds__(Team<kRatio, dk::Record<kFormat>::kDim>::kBlock)
    kv_compress(const int* tokens, const float* ug, float* state, const int* rings, const float* ape,
                const float* weight, const float* cos_sin, unsigned char* pool, const int* block_table, int pages,
                int table_width, int page_bits, long long page_bytes, int max_tokens, int team_rows, int ring_count,
                int cap, int max_position, float eps) {
  constexpr int kDim = dk::Record<kFormat>::kDim;
  using Team = Team<kRatio, kDim>;
  constexpr int kHalves = Team::kHalves, kLanes = Team::kLanes, kGroups = Team::kGroups, kColumns = Team::kColumns;
  constexpr int kChannels = kDim / kCluster;  // of a block
  constexpr int kOwners = kChannels / 4;      // threads that each end with four channels of the row
  constexpr int kSums = kDim / 64;            // of squares
  static_assert(kRatio == 4 || (kRatio == 128 && kDim == 512), "a key of 128 elements is of 4 tokens");
  static_assert(kCluster == 1 || (kRatio == 128 && kCluster == kSums), "each block of a cluster has one sum");
  static_assert(!kHadamard || kDim == 128, "a warp has the row");
  __shared__ Four most_of[kGroups > 1 ? 8 : 1][16], sums_of[2][kGroups > 1 ? 8 : 1][16];  // of each warp
  __shared__ float squares_of[2][kSums];
  __shared__ Four bias_of[kPerThread][Team::kBlock];  // each thread's own: in registers there is no room

  if constexpr (kCluster > 1) dk::arrive_relaxed_cluster();
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  const int thread = threadIdx.x % Team::kThreads, lane = threadIdx.x % 32, warp = thread / 32;
  const int lane_of_group = thread % kLanes, group = thread / kLanes;
  const int part = blockIdx.x % kCluster, first_channel = part * kChannels;
  const int team = blockIdx.x / kCluster * (Team::kBlock / Team::kThreads) + threadIdx.x / Team::kThreads;
  const int first_row = team * team_rows;

  // A lane for each row of the team; in every warp, and in every block of a cluster, the same.
  dk::StepToken of_lane = {-1, 0, 0, 0};
  if (lane < team_rows && first_row + lane < max_tokens) of_lane = dk::StepToken::load(tokens, first_row + lane);
  const auto token_of = [&](int row) -> dk::StepToken {
    return {__shfl_sync(~0u, of_lane.request, row), __shfl_sync(~0u, of_lane.position, row),
            __shfl_sync(~0u, of_lane.start, row), __shfl_sync(~0u, of_lane.end, row)};
  };
  const bool ends = (of_lane.position + 1) % kRatio == 0;  // not of padding, whose position is 0
  const unsigned ending = __ballot_sync(~0u, ends);
  const unsigned saved = __ballot_sync(~0u, !of_lane.is_padding() && !ends && of_lane.position >= of_lane.end - cap);
  // Nobody writes to the shared memory of a block that has not begun.
  if constexpr (kCluster > 1) dk::wait_acquire_cluster();

  // Rows that end nothing: a warp for each.
  for (int row = warp; row < team_rows; row += Team::kThreads / 32) {
    if (!(saved >> row & 1)) continue;
    const dk::StepToken token = token_of(row);
    const auto ring = ring_of<kRatio>(token, state, rings, ring_count, cap, 2 * kColumns);
    if (!ring.rows) continue;
    const float* from = ug + static_cast<long long>(first_row + row) * 2 * kColumns;
    float* to = ring.at(token.position);
    // u, then g of a half.
    constexpr int kCopies = 2 * kOwners / 32;
    const auto column = [&](int half, int i) {
      const int which = (i * 32 + lane) / kOwners, four = (i * 32 + lane) % kOwners;
      return which * kColumns + half * kDim + first_channel + 4 * four;
    };
    Four four[kHalves][kCopies];
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int i = 0; i < kCopies; ++i) four[half][i] = Four::load(from + column(half, i));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (ring.waits(token, half)) continue;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) four[half][i].store(to + column(half, i));
    }
  }

  // Rows that end an entry.
  int turn = 0;
  for (unsigned left = ending; left; left &= left - 1, turn ^= 1) {
    const int row = __ffs(left) - 1;
    const dk::StepToken token = token_of(row);
    const int entry = token.position / kRatio, anchor = token.position + 1 - kRatio;
    const int first = token.position + 1 - Team::kSlots;  // position of the first slot
    const float* const own = ug + static_cast<long long>(first_row + row) * 2 * kColumns;
    const dk::PagesOf<kFormat, unsigned char> cache = {pool, block_table, pages, table_width, page_bits, page_bytes};
    // In a table that is a ring, a later entry of the step may come to the same place.
    const bool is_last = entry + (static_cast<long long>(table_width) << page_bits) >= token.end / kRatio;
    const int page = is_last ? cache.page_of(token.request, entry) : -1;

    // What the owners need in the end.
    const bool owns = thread < kOwners;
    const int channel = first_channel + 4 * thread;
    const bool is_turned = owns && channel >= kDim - dk::kRotary;
    Four scale = {};
    float2 cosines = {}, sines = {};
    if (owns) scale = Four::load(weight + channel);
    if (is_turned) {
      DK_CHECK(anchor < max_position, "request %d has an entry at position %d: cos_sin has %d rows\n", token.request,
               anchor, max_position);
      const float* angles = cos_sin + static_cast<long long>(min(anchor, max_position - 1)) * dk::kRotary;
      const int pair = (channel - (kDim - dk::kRotary)) / 2;
      cosines = *reinterpret_cast<const float2*>(angles + pair);
      sines = *reinterpret_cast<const float2*>(angles + dk::kRotary / 2 + pair);
    }

    const bool is_kept = token.position >= token.end - cap, needs_old = max(first, 0) < token.start;
    Ring<kRatio> ring = {nullptr, 2 * kColumns, cap};
    if (is_kept || needs_old) {
      ring = ring_of<kRatio>(token, state, rings, ring_count, cap, 2 * kColumns);
      if (!ring.rows) continue;
    }
    const int first_place = (first + cap) % cap;

    Four p = {};
#pragma unroll 1
    for (int pooled = 0; pooled < kChannels; pooled += Team::kWidth) {
      const int at = first_channel + pooled + 4 * lane_of_group;
      // All loads first.
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int slot = group * kPerThread + i, column = (kHalves == 2 && slot >= kRatio ? kDim : 0) + at;
        dk::copy_async_16(dk::shared_address(&bias_of[i][threadIdx.x]), ape + slot % kRatio * kColumns + column);
      }
      dk::commit_copies();
      Four u[kPerThread], g[kPerThread], u_ahead = {}, g_ahead = {};
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int slot = group * kPerThread + i, position = first + slot;
        const int column = (kHalves == 2 && slot >= kRatio ? kDim : 0) + at;
        // Before the first token there is nothing: of such a slot this row is read, and gets a weight of exactly 0.
        const bool exists = kHalves == 1 || position >= 0;
        const int place = first_place + slot;
        const float* from = exists && position < token.start
                                ? ring.rows + static_cast<long long>(place < cap ? place : place - cap) * 2 * kColumns
                                : own + static_cast<long long>(exists ? position - token.position : 0) * 2 * kColumns;
        u[i] = Four::load(from + column), g[i] = Four::load(from + kColumns + column);
      }
      if (kHalves == 2 && is_kept) u_ahead = Four::load(own + at), g_ahead = Four::load(own + kColumns + at);

      // This row, of which the last slot has the last half; and what comes to the places of old rows that were read.
      if (is_kept && group == kGroups - 1) {
        float* to = ring.at(token.position) + at;
        if (!ring.waits(token, kHalves - 1)) {
          u[kPerThread - 1].store(to + kColumns - kDim), g[kPerThread - 1].store(to + 2 * kColumns - kDim);
        }
        if (kHalves == 2 && !ring.waits(token, 0)) u_ahead.store(to), g_ahead.store(to + kColumns);
      }
      if (needs_old) {
#pragma unroll 1
        for (int i = 0; i < kPerThread; ++i) {
          const int slot = group * kPerThread + i, position = first + slot;
          if (position < 0 || position >= token.start) continue;
          const int successor = ring.successor(token, position);
          if (successor == position) continue;
          const int column = (kHalves == 2 && slot >= kRatio ? kDim : 0) + at;
          const float* from = own + static_cast<long long>(successor - token.position) * 2 * kColumns + column;
          float* to = ring.at(successor) + column;
          Four::load(from).store(to), Four::load(from + kColumns).store(to + kColumns);
        }
      }

      // Of each channel the largest score, then the sums of weights and of weighted values.
      Four most = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
      dk::wait_for_copies<0>();
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const Four bias = bias_of[i][threadIdx.x];
        const bool exists = kHalves == 1 || first + group * kPerThread + i >= 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          g[i].elements[j] = exists ? g[i].elements[j] + bias.elements[j] : -CUDART_INF_F;
          u[i].elements[j] = exists ? u[i].elements[j] : 0.0f;
          most.elements[j] = fmaxf(most.elements[j], g[i].elements[j]);
        }
      }
      if constexpr (kGroups > 1) {
        static_assert(kLanes == 16 && kGroups == 16, "a warp has two groups, a block eight warps");
#pragma unroll
        for (float& x : most.elements) x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
        if (lane < 16) most_of[warp][lane] = most;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < 8; ++w)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            most.elements[j] = fmaxf(most.elements[j], most_of[w][lane_of_group].elements[j]);
      }
      Four total = {}, sum = {};
#pragma unroll
      for (int i = 0; i < kPerThread; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float by = expf(g[i].elements[j] - most.elements[j]);
          total.elements[j] += by;
          sum.elements[j] = fmaf(by, u[i].elements[j], sum.elements[j]);
        }
      if constexpr (kGroups > 1) {
#pragma unroll
        for (float& x : total.elements) x += __shfl_xor_sync(~0u, x, 16);
#pragma unroll
        for (float& x : sum.elements) x += __shfl_xor_sync(~0u, x, 16);
        if (lane < 16) sums_of[0][warp][lane] = total, sums_of[1][warp][lane] = sum;
        __syncthreads();
        total = sum = {};
        if (group == pooled / Team::kWidth)
#pragma unroll
          for (int w = 0; w < 8; ++w)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              total.elements[j] += sums_of[0][w][lane_of_group].elements[j];
              sum.elements[j] += sums_of[1][w][lane_of_group].elements[j];
            }
      }
      if (group == pooled / Team::kWidth)
#pragma unroll
        for (int j = 0; j < 4; ++j) p.elements[j] = sum.elements[j] / total.elements[j];
    }

    // Of the squares a sum for every 64 channels, then the sum of these: in the same order for any number of blocks.
    float squares = 0.0f;
    for (int j = 0; j < 4; ++j) squares = fmaf(p.elements[j], p.elements[j], squares);
    for (int step = 8; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if constexpr (kDim == 128) {
      squares += __shfl_xor_sync(~0u, squares, 16);
    } else {
      if constexpr (kCluster > 1) {
        if (thread < kCluster) dk::store_shared_cluster(&squares_of[turn][part], thread, squares);
        dk::meet_acq_rel_cluster();
      } else {
        if (owns && lane % 16 == 0) squares_of[turn][thread / 16] = squares;
        __syncthreads();
      }
      if (warp * 32 >= kOwners) continue;
      squares = 0.0f;
      for (int i = 0; i < kSums; ++i) squares += squares_of[turn][i];
    }
    const float by = rsqrtf(squares / kDim + eps);

    // Products rounded by themselves: of instances that differ in the format alone, all give the same row.
    float y[4];
    for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(__fmul_rn(p.elements[j], by), scale.elements[j]);
    if (is_turned) {
      dk::turn(y[0], y[1], cosines.x, sines.x);
      dk::turn(y[2], y[3], cosines.y, sines.y);
    }
    if constexpr (kHadamard) {
      for (int j = 0; j < 4; j += 2) {
        const float a = y[j], b = y[j + 1];
        y[j] = a + b, y[j + 1] = a - b;
      }
      for (int j = 0; j < 2; ++j) {
        const float a = y[j], b = y[j + 2];
        y[j] = a + b, y[j + 2] = a - b;
      }
      for (int step = 1; step < 32; step *= 2)
        for (float& x : y) {
          const float other = __shfl_xor_sync(~0u, x, step);
          x = lane & step ? other - x : x + other;
        }
      for (float& x : y) x = __fmul_rn(x, 0.0883883476f);  // 128^-0.5
    }
    for (float& x : y) x = dk::as_bf16(x);
    if (page < 0) continue;
    const int place = cache.place_of(entry);
    store_record<kFormat>(y, channel, owns, cache.values(page, place), cache.scales(page, place));
  }
}

// grid: ceil(max_tokens * 2^row_bits / block), block: any, both one-dimensional; a thread has 16 bytes of a row
// tokens, ug, state, rings: of kv_compress; a row has 2^row_bits times 16 bytes
//
// The rings' part of a step in which no entry ends: nothing is read of them.
extern "C" __global__ void kv_save(const int* tokens, const float* ug, float* state, const int* rings, int max_tokens,
                                   int row_bits, int ring_count, int cap) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const long long thread = dk::thread_in_grid();
  if (thread >> row_bits >= max_tokens) return;
  const int row = static_cast<int>(thread >> row_bits), column = (thread & ((1 << row_bits) - 1)) * 4;
  const int width = 4 << row_bits;
  const dk::StepToken token = dk::StepToken::load(tokens, row);
  if (token.is_padding() || token.position < token.end - cap) return;
  const Four four = Four::load(ug + static_cast<long long>(row) * width + column);
  const auto ring = ring_of<4>(token, state, rings, ring_count, cap, width);
  if (ring.rows) four.store(ring.at(token.position) + column);
}
