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
#include "dk/attention.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/records.cuh"
#include "dk/rope.cuh"
#include "dk/step_tokens.cuh"
#include "dk/vec.cuh"

namespace {

using Four = dk::Vec<float, 4>;

// A team of threads has some rows of the step, and makes the entries that end there one after the other.
//
// A strip is the 64 channels of half a warp, 4 a lane; of keys the 128 of a warp. A lane has kPerThread slots of its
// channels: as many loads of 16 bytes of u, and of g, all before the first is used. kGroups groups of lanes have all.
//   ratio 4, 512 channels: each of 8 warps has a strip; its halves have the 4 slots of a half of the columns each
//   ratio 4, 128 channels: a warp has all 8 slots
//   ratio 128: 8 warps share a strip, 8 slots for each half of them; a block of more strips takes them in turns
// Then what the groups have is merged, so that one warp has a strip, whose lanes own kOwn channels each.
template <int kRatio, int kDim>
struct Team {
  static constexpr int kHalves = kRatio == 4 ? 2 : 1;
  static constexpr int kSlots = kHalves * kRatio;
  static constexpr int kColumns = kHalves * kDim;  // of u, and of g
  static constexpr int kLanes = kDim == 128 ? 32 : 16;
  static constexpr int kStrip = 4 * kLanes;
  static constexpr int kPerThread = kRatio == 4 && kDim == 512 ? 4 : 8;
  static constexpr int kGroups = kSlots / kPerThread;    // of lanes that share a strip
  static constexpr int kSpread = kGroups * kLanes / 32;  // warps that do
  static constexpr int kWarps = kDim == 128 ? 1 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlock = kThreads == 32 ? 128 : kThreads;
  static constexpr int kOwn = kStrip / 32;
  // Of 128 tokens few blocks have much to read: u waits in shared memory, so that registers let three be resident.
  static constexpr bool kStaged = kRatio == 128;
  static_assert(kSpread == 1 || kSpread == kWarps, "a warp has a strip, or all share one");
};

// Which token's row is at which place of its request's ring.
template <int kRatio>
struct Ring {
  float* rows;  // [cap, width]
  int width, cap;

  __device__ float* row(int place) const { return rows + static_cast<long long>(place) * width; }
  __device__ float* at(int position) const { return row(position % cap); }

  // Of a token before this step: the one whose row is at its place when the step is over, which may be itself.
  __device__ int successor(dk::StepToken token, int old) const { return old + (token.end - 1 - old) / cap * cap; }
  // Whether that of any token from `first` on may be another: a division is slow.
  __device__ bool has_successors(dk::StepToken token, int first) const { return max(first, 0) + cap < token.end; }
  // Whether this half of a token of this step has to wait until an entry of this step was made of what is at its place.
  __device__ bool waits(dk::StepToken token, int half) const {
    const int since = token.position - token.start;
    const int old = token.position - ((since < cap ? 0 : since / cap) + 1) * cap;
    const int entry = old / kRatio + (kRatio == 4 && half == 0);
    return old >= 0 && token.has((entry + 1) * kRatio - 1);
  }
};

// That of a token's request, from its number; without rows if there is none.
template <int kRatio>
__device__ Ring<kRatio> ring_of(dk::StepToken token, float* state, int ring, int ring_count, int cap, int width) {
  const bool exists = 0 <= ring && ring < ring_count;
  DK_CHECK(exists, "rings[%d] is %d: there are %d\n", token.request, ring, ring_count);
  return {exists ? state + static_cast<long long>(ring) * cap * width : nullptr, width, cap};
}

// The largest of a warp's numbers, none negative; NaN if all are.
__device__ float largest_of_warp(float x) {
  const unsigned most = __reduce_max_sync(~0u, x == x ? __float_as_uint(x) + 1 : 0);
  return __uint_as_float(most - 1);
}

// Some elements of a row, from `channel` on, into its record. All of a warp come here.
template <int kFormat, int kOwn>
__device__ void store_record(const float (&y)[kOwn], int channel, unsigned char* values, unsigned char* scales) {
  using Record = dk::Record<kFormat>;
  dk::Vec<__nv_bfloat162, kOwn / 2> row;  // in pairs: to round one alone is slow
  float x[kOwn];
  for (int j = 0; j < kOwn; j += 2) {
    row.elements[j / 2] = __floats2bfloat162_rn(y[j], y[j + 1]);
    x[j] = __low2float(row.elements[j / 2]), x[j + 1] = __high2float(row.elements[j / 2]);
  }
  if constexpr (kFormat == dk::kKvBf16 || kFormat == dk::kKeyBf16) {
    row.store(reinterpret_cast<__nv_bfloat162*>(values + 2 * channel));
    return;
  }
  constexpr int kBlock = kFormat == dk::kKvFp8 ? 64 : kFormat == dk::kKeyMxfp4 ? 32 : Record::kDim;
  float largest = fabsf(x[0]);  // not from 0: where all are NaN it is NaN, as the reference has it
  for (int j = 1; j < kOwn; ++j) largest = fmaxf(largest, fabsf(x[j]));
  if constexpr (kBlock == 32 * kOwn) {
    largest = largest_of_warp(largest);
  } else {
    for (int step = kBlock / kOwn / 2; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  }
  const unsigned exponent = kFormat == dk::kKeyMxfp4 ? dk::exponent_of_e2m1(largest) : dk::exponent_of_e4m3(largest);
  const float by = dk::inverse_power_of_two(exponent);
  const bool speaks = channel % kBlock == 0;  // for the block
  if constexpr (kFormat == dk::kKvFp8) {
    constexpr int kNarrow = Record::kDim - dk::kRotary;
    const bool is_narrow = channel < kNarrow;
    if (is_narrow)
      *reinterpret_cast<unsigned short*>(values + channel) = __nv_fp8x2_e4m3(float2{x[0] * by, x[1] * by}).__x;
    else
      row.store(reinterpret_cast<__nv_bfloat162*>(values + kNarrow + 2 * (channel - kNarrow)));
    if (speaks) scales[channel / kBlock] = is_narrow ? exponent : 0;
  } else if constexpr (kFormat == dk::kKeyMxfp4) {
    const __nv_bfloat162 both = __float2bfloat162_rn(by);
    *reinterpret_cast<unsigned short*>(values + channel / 2) =
        dk::e2m1_of(__hmul2(row.elements[0], both), __hmul2(row.elements[1], both));
    if (speaks) scales[channel / kBlock] = exponent;
  } else {
    *reinterpret_cast<unsigned*>(values + channel) = dk::e4m3_of(x[0] * by, x[1] * by, x[2] * by, x[3] * by);
    if (speaks) *reinterpret_cast<float*>(scales) = dk::power_of_two(exponent);
  }
}

}  // namespace

// grid: kCluster blocks for every team_rows * (teams of a block) rows of the step, one-dimensional; cluster: kCluster
// blocks; block: Team::kBlock, 4 teams for keys of 128, else one; shared: 16 * kPerThread * kBlock bytes if kStaged
// tokens: [max_tokens, 4], of dk::StepToken; ug: [max_tokens, 2 * c * dim]; state: [ring_count, cap, 2 * c * dim]
// rings: [requests]; ape: [kRatio, c * dim]; weight: [dim]; cos_sin: [max_position, 64], 32 cosines, then 32 sines
// pool, ...: of dk::PagesOf
//
// kRatio is 4 or 128, a row of 128 elements is of 4 tokens, team_rows is at most 32, cap at least c * kRatio. A cluster
// of 8 shares the channels of an entry of 128 tokens; without one (kCluster 1) a block takes them in 8 turns, to the
// same bits.
template <int kRatio, int kFormat, bool kHadamard, int kCluster>
__global__ void __launch_bounds__(Team<kRatio, dk::Record<kFormat>::kDim>::kBlock,
                                  kRatio == 128 && kCluster == 1 ? 2 : 3)
    kv_compress(const int* tokens, const float* ug, float* state, const int* rings, const float* ape,
                const float* weight, const float* cos_sin, unsigned char* pool, const int* block_table, int pages,
                int table_width, int page_bits, long long page_bytes, int max_tokens, int team_rows, int ring_count,
                int cap, int max_position, float eps) {
  constexpr int kDim = dk::Record<kFormat>::kDim;
  using Team = Team<kRatio, kDim>;
  constexpr int kHalves = Team::kHalves, kColumns = Team::kColumns, kLanes = Team::kLanes, kOwn = Team::kOwn;
  constexpr int kPerThread = Team::kPerThread, kGroups = Team::kGroups, kSpread = Team::kSpread;
  constexpr int kChannels = kDim / kCluster;         // of a block
  constexpr int kStrips = kChannels / Team::kStrip;  // of a block
  constexpr int kTurns = kStrips * kSpread / Team::kWarps;
  constexpr int kSums = kDim / 64;  // of squares
  static_assert(kRatio == 4 || (kRatio == 128 && kDim == 512), "a key of 128 elements is of 4 tokens");
  static_assert(kCluster == 1 || (kRatio == 128 && kCluster == kSums), "each block of a cluster has one sum");
  static_assert(!kHadamard || kDim == 128, "a warp has the row");
  __shared__ float2 parts_of[kTurns > 1 ? 2 : 1][3][kSpread][32];  // of each warp
  __shared__ __align__(16) float squares_of[2][kSums];
  // Each thread's own: in registers there is no room.
  __shared__ Four bias_of[kPerThread][Team::kBlock];
  extern __shared__ Four value_of[];  // [kPerThread][kBlock]

  const int thread = threadIdx.x % Team::kThreads, lane = threadIdx.x % 32, warp = thread / 32;
  const int part = blockIdx.x % kCluster, first_channel = part * kChannels;
  const int team = blockIdx.x / kCluster * (Team::kBlock / Team::kThreads) + threadIdx.x / Team::kThreads;
  const int first_row = team * team_rows;
  if constexpr (kCluster > 1) dk::arrive_relaxed_cluster();
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

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

  // Rows that end nothing: of the block's channels u, then g, of each half.
  constexpr int kFours = kChannels / 4, kPieces = 2 * kHalves * kFours;
  constexpr int kRowsAtOnce = Team::kThreads > kPieces ? Team::kThreads / kPieces : 1;
  constexpr int kCopies = kPieces > Team::kThreads ? kPieces / Team::kThreads : 1;
  static_assert(kPieces % 32 == 0, "a warp has one row at a time");
#pragma unroll 1
  for (int row = thread / kPieces; row < team_rows; row += kRowsAtOnce) {
    if (!(saved >> row & 1)) continue;
    const dk::StepToken token = token_of(row);
    const int number = rings[token.request];
    const float* from = ug + static_cast<long long>(first_row + row) * 2 * kColumns;
    const auto half_of = [&](int i) -> int { return (i * Team::kThreads + thread) / kFours % kHalves; };
    const auto column = [&](int i) -> int {
      const int piece = (i * Team::kThreads + thread) % kPieces;
      return piece / (kPieces / 2) * kColumns + half_of(i) * kDim + first_channel + piece % kFours * 4;
    };
    Four four[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) four[i] = Four::load(from + column(i));
    const auto ring = ring_of<kRatio>(token, state, number, ring_count, cap, 2 * kColumns);
    if (!ring.rows) continue;
    float* to = ring.at(token.position);
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      if (!ring.waits(token, half_of(i))) four[i].store(to + column(i));
  }

  // Rows that end an entry.
  int side = 0;
  for (unsigned left = ending; left; left &= left - 1, side ^= 1) {
    const int row = __ffs(left) - 1;
    const dk::StepToken token = token_of(row);
    const int entry = token.position / kRatio, anchor = token.position + 1 - kRatio;
    const int first = token.position + 1 - Team::kSlots;  // position of the first slot
    const float* const own = ug + static_cast<long long>(first_row + row) * 2 * kColumns;
    const dk::PagesOf<kFormat, unsigned char> cache = {pool, block_table, pages, table_width, page_bits, page_bytes};
    const bool is_kept = token.position >= token.end - cap, needs_old = max(first, 0) < token.start;

    // What other loads wait for is loaded first; the page is needed in the end.
    const int ring_number = is_kept || needs_old ? rings[token.request] : 0;
    const int page = *cache.page_number(token.request, entry);

    // This thread's slots are those of its group, kPerThread from `first_own` on.
    const int group = (kSpread == 1 ? 0 : warp * (kGroups / kSpread)) + lane / kLanes;
    const int first_own = first + group * kPerThread;
    const auto half_of = [&](int i) -> int { return kHalves == 1 ? 0 : kPerThread == kRatio ? group : i / kRatio; };
    const auto channel_at = [&](int turn) -> int {
      return first_channel + (kSpread == 1 ? warp : turn) * Team::kStrip + 4 * (lane % kLanes);
    };
    const auto copy_biases = [&](int turn) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const float* from = ape + (kRatio == 4 ? i % 4 : group * kPerThread + i) * kColumns;
        from += half_of(i) * kDim + channel_at(turn);
        dk::copy_async_16(dk::shared_address(&bias_of[i][threadIdx.x]), from);
      }
    };

    // What the owners need in the end.
    const bool owns = warp < kStrips;
    const int channel = channel_at(warp % kStrips) + (kOwn == 4 ? 0 : lane / kLanes * kOwn);
    const bool is_turned = owns && channel >= kDim - dk::kRotary;
    dk::Vec<float, kOwn> scale = {};
    dk::Vec<float, kOwn / 2> cosines = {}, sines = {};
    if (owns) scale = dk::Vec<float, kOwn>::load(weight + channel);
    if (is_turned) {
      DK_CHECK(anchor < max_position, "request %d has an entry at position %d: cos_sin has %d rows\n", token.request,
               anchor, max_position);
      const float* angles = cos_sin + static_cast<long long>(min(anchor, max_position - 1)) * dk::kRotary;
      const int pair = (channel - (kDim - dk::kRotary)) / 2;
      cosines = dk::Vec<float, kOwn / 2>::load(angles + pair);
      sines = dk::Vec<float, kOwn / 2>::load(angles + dk::kRotary / 2 + pair);
    }

    copy_biases(0);
    const auto ring = ring_of<kRatio>(token, state, ring_number, ring_count, cap, 2 * kColumns);
    if (!ring.rows) continue;
    const int own_place = token.position % cap;
    float p[kOwn] = {};
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      // All loads first.
      if (turn > 0) copy_biases(turn);
      Four u[kPerThread], g[kPerThread];
      const float* const first_new = own + static_cast<long long>(first_own - token.position) * 2 * kColumns;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int position = first_own + i;
        // Before the first token there is nothing: of such a slot this row is read, and gets a weight of exactly 0.
        const bool exists = kHalves == 1 || position >= 0;
        const float* from = exists ? first_new + i * 2 * kColumns : own;
        if (exists && position < token.start) {
          const int place = own_place + position - token.position;
          from = ring.row(place < 0 ? place + cap : place);
        }
        from += half_of(i) * kDim + channel_at(turn);
        if constexpr (Team::kStaged)
          dk::copy_async_16(dk::shared_address(&value_of[i * Team::kBlock + threadIdx.x]), from);
        else
          u[i] = Four::load(from);
        g[i] = Four::load(from + kColumns);
      }
      dk::commit_copies();
      __syncwarp();  // or loads are moved behind the wait

      // Of each channel the largest score, then the sums of weights and of weighted values.
      float most[4] = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
      dk::wait_for_copies<0>();
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const Four bias = bias_of[i][threadIdx.x];
        const bool exists = kHalves == 1 || first_own + i >= 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          g[i].elements[j] = exists ? g[i].elements[j] + bias.elements[j] : -CUDART_INF_F;
          most[j] = fmaxf(most[j], g[i].elements[j]);
        }
      }
      if constexpr (kLanes == 16)
#pragma unroll
        for (float& x : most) x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
      float total[4] = {}, sum[4] = {};
      float base[4];  // a warp whose scores of a channel are all -inf adds nothing
#pragma unroll
      for (int j = 0; j < 4; ++j) base[j] = kSpread > 1 && most[j] == -CUDART_INF_F ? 0.0f : most[j];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const bool exists = kHalves == 1 || first_own + i >= 0;
        const Four value = Team::kStaged ? value_of[i * Team::kBlock + threadIdx.x] : u[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float by = dk::exp2_approx((g[i].elements[j] - base[j]) * dk::kLog2e);
          total[j] += by;
          sum[j] = fmaf(by, exists ? value.elements[j] : 0.0f, sum[j]);
        }
      }
      if constexpr (kLanes == 32) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) p[j] = __fdividef(sum[j], total[j]);
      } else {
        // Each half of the warp keeps two of the four channels.
        const bool low = lane < 16;
        float kept[3][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          kept[0][j] = low ? most[j] : most[2 + j];
          kept[1][j] = (low ? total[j] : total[2 + j]) + __shfl_xor_sync(~0u, low ? total[2 + j] : total[j], 16);
          kept[2][j] = (low ? sum[j] : sum[2 + j]) + __shfl_xor_sync(~0u, low ? sum[2 + j] : sum[j], 16);
        }
        if constexpr (kSpread == 1) {
#pragma unroll
          for (int j = 0; j < 2; ++j) p[j] = __fdividef(kept[2][j], kept[1][j]);
        } else {
          // The turn's warp merges what all of them have.
          const auto of_turn = parts_of[kTurns > 1 ? turn % 2 : 0];
#pragma unroll
          for (int k = 0; k < 3; ++k) of_turn[k][warp][lane] = {kept[k][0], kept[k][1]};
          __syncthreads();
          if (warp == turn) {
            float2 tops[kSpread], top = {-CUDART_INF_F, -CUDART_INF_F}, all = {}, weighted = {};
#pragma unroll
            for (int w = 0; w < kSpread; ++w) {
              tops[w] = of_turn[0][w][lane];
              top.x = fmaxf(top.x, tops[w].x), top.y = fmaxf(top.y, tops[w].y);
            }
#pragma unroll
            for (int w = 0; w < kSpread; ++w) {
              const float2 t = of_turn[1][w][lane], s = of_turn[2][w][lane];
              const float x = dk::exp2_approx((tops[w].x - top.x) * dk::kLog2e);
              const float y = dk::exp2_approx((tops[w].y - top.y) * dk::kLog2e);
              all.x = fmaf(x, t.x, all.x), all.y = fmaf(y, t.y, all.y);
              weighted.x = fmaf(x, s.x, weighted.x), weighted.y = fmaf(y, s.y, weighted.y);
            }
            p[0] = __fdividef(weighted.x, all.x), p[1] = __fdividef(weighted.y, all.y);
          }
        }
      }
    }

    // Of the squares a sum for every 64 channels, then the sum of these: in the same order for any number of blocks.
    float squares = 0.0f;
    for (int j = 0; j < kOwn; ++j) squares = fmaf(p[j], p[j], squares);
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    if constexpr (kDim != 128) {
      if constexpr (kCluster > 1) {
        if (thread < kCluster) dk::store_shared_cluster(&squares_of[side][part], thread, squares);
        dk::meet_acq_rel_cluster();
      } else {
        if (lane == 0) squares_of[side][warp] = squares;
        __syncthreads();
      }
      const float* const of = squares_of[side];
      squares = ((of[0] + of[1]) + (of[2] + of[3])) + ((of[4] + of[5]) + (of[6] + of[7]));
    }
    if (owns) {
      const float by = rsqrtf(squares * (1.0f / kDim) + eps);
      // Products rounded by themselves: of instances that differ in the format alone, all give the same row.
      float y[kOwn];
      for (int j = 0; j < kOwn; ++j) y[j] = __fmul_rn(__fmul_rn(p[j], by), scale.elements[j]);
      if (is_turned)
        for (int j = 0; j < kOwn / 2; ++j) dk::turn(y[2 * j], y[2 * j + 1], cosines.elements[j], sines.elements[j]);
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
            x = fmaf(x, lane & step ? -1.0f : 1.0f, other);
          }
        for (float& x : y) x = __fmul_rn(x, 0.0883883476f);  // 128^-0.5
      }
      // In a table that is a ring, a later entry of the step may come to the same place.
      const bool is_last = entry + (static_cast<long long>(table_width) << page_bits) >= token.end / kRatio;
      if (is_last && cache.has(page, token.request, entry)) {
        const int place = cache.place_of(entry);
        store_record<kFormat>(y, channel, cache.values(page, place), cache.scales(page, place));
      }
    }

    // This row, of which the last slot has the last half; and what comes to the places of old rows that were read.
    const auto save = [&](int position, int half, int turn) {
      const float* from = own + static_cast<long long>(position - token.position) * 2 * kColumns;
      float* to = ring.at(position);
      from += half * kDim + channel_at(turn), to += half * kDim + channel_at(turn);
      const Four value = Four::load(from), score = Four::load(from + kColumns);
      value.store(to), score.store(to + kColumns);
    };
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const bool is_own = kGroups == 1 || group == kGroups - kHalves + half;
        if (is_kept && is_own && !ring.waits(token, half)) save(token.position, half, turn);
      }
      if (!needs_old || !ring.has_successors(token, first)) continue;
#pragma unroll 1
      for (int i = 0; i < kPerThread; ++i) {
        const int position = first_own + i;
        if (position < 0 || position >= token.start) continue;
        const int successor = ring.successor(token, position);
        if (successor != position) save(successor, half_of(i), turn);
      }
    }
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
  const auto ring = ring_of<4>(token, state, rings[token.request], ring_count, cap, width);
  if (ring.rows) four.store(ring.at(token.position) + column);
}
