// The next token of each row of logits: the best one, or one drawn from the best.
//
// A larger logit comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. NaN and -inf are
// never taken. A logit's order is a number of 32 bits, smaller for a better logit.
//
// What is drawn depends on the operands alone, not on the device, the block or who was faster: each float step is one
// that IEEE defines, with no product and sum joined, and weights are whole numbers, whose sums have no order.

#include <math_constants.h>

#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/order.cuh"
#include "dk/vec.cuh"
#include "dk/warp.cuh"

namespace {

constexpr int kThreads = 512;  // of a block of argmax
constexpr int kWarps = kThreads / 32;
constexpr int kBatch = 4;              // accesses of a thread that are on their way together
constexpr int kMostCandidates = 1024;  // each has a thread
constexpr unsigned kNobody = ~0u;      // the index where nothing can be taken; as a token, -1
constexpr unsigned long long kNever = ~0ull;
constexpr int kOne = 30;  // the weight of the best is 2^30: of 1024 the sum, times a draw of 24 bits, is below 2^64

using Four = dk::Vec<float, 4>;
using Whole = unsigned long long;

// An order and its index.
__device__ uint2 better(uint2 a, uint2 b) { return a.x < b.x || (a.x == b.x && a.y < b.y) ? a : b; }
__device__ uint2 best_of_warp(uint2 mine) {
  const unsigned order = __reduce_min_sync(~0u, mine.x);
  return {order, __reduce_min_sync(~0u, mine.x == order ? mine.y : kNobody)};
}

// The first word of Philox4x32-10 of key `seed` and counter (counter, 0, 0, 0).
__device__ unsigned philox(Whole seed, unsigned counter) {
  unsigned key[2] = {static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)};
  unsigned words[4] = {counter, 0, 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const Whole first = 0xd2511f53ull * words[0], second = 0xcd9e8d57ull * words[2];
    words[0] = static_cast<unsigned>(second >> 32) ^ words[1] ^ key[0];
    words[2] = static_cast<unsigned>(first >> 32) ^ words[3] ^ key[1];
    words[1] = static_cast<unsigned>(second), words[3] = static_cast<unsigned>(first);
    key[0] += 0x9e3779b9, key[1] += 0xbb67ae85;
  }
  return words[0];
}

// 2^30 exp(x) for x <= 0, as a whole number.
__device__ unsigned weight_of(float x) {
  // ln(2)^i / i!
  constexpr float kTaylor[] = {1.0f,           0.693147182f,   0.240226507f,    0.0555041097f,
                               0.00961812865f, 0.00133335579f, 0.000154035297f, 1.52527336e-05f};
  const float binary = __fmul_rn(x, 1.44269502f);
  if (!(binary > -32.0f)) return 0;  // NaN too: of infinities
  const float power = rintf(binary), rest = __fsub_rn(binary, power);
  float sum = kTaylor[7];
#pragma unroll
  for (int i = 6; i >= 0; --i) sum = __fadd_rn(__fmul_rn(sum, rest), kTaylor[i]);
  return __float2uint_rn(__fmul_rn(sum, __int_as_float(127 + kOne + static_cast<int>(power) << 23)));
}

// One key of each thread of a block whose size is a power of two, rising with the threads. Others come by shuffles, or
// from `shared`, of which there are two, so that one barrier is enough: who writes the first again has read the second.
__device__ Whole sorted(Whole key, Whole (&shared)[2][kMostCandidates]) {
  const int thread = threadIdx.x, threads = blockDim.x;
  int turn = 0;
#pragma unroll 1
  for (int size = 2; size <= threads; size *= 2) {
#pragma unroll 1
    for (int apart = size / 2; apart > 0; apart /= 2) {
      Whole other;
      if (apart < 32) {
        other = __shfl_xor_sync(~0u, key, apart);
      } else {
        shared[turn][thread] = key;
        __syncthreads();
        other = shared[turn][thread ^ apart];
        turn ^= 1;
      }
      const bool is_first = (thread & apart) == 0, rises = (thread & size) == 0;
      key = is_first == rises ? min(key, other) : max(key, other);
    }
  }
  return key;
}

}  // namespace

// grid: kCluster * rows in clusters of kCluster, block: 512
// logits: [rows, vocabulary], rows `row_stride` apart, a multiple of 4, the first aligned to 16 bytes
// counts: [rows], or null; tokens: [rows]
//
// tokens[r] = the index of the row's best logit; -1 where there is none, or counts[r] <= 0: then nothing of it is read.
// Each warp finds its best; all send it to the first block, of which one warp takes the best of these.
template <int kCluster>
__global__ void __launch_bounds__(kThreads)
    argmax(const float* logits, const int* counts, int* tokens, int vocabulary, long long row_stride) {
  static_assert(kCluster <= 8, "a cluster of more blocks is not portable");
  constexpr bool kAlone = kCluster == 1;
  constexpr int kParts = kCluster * kWarps, kStep = kCluster * kThreads * 4;
  __shared__ alignas(8) uint2 found[kParts];
  __shared__ alignas(8) unsigned long long found_here;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = blockIdx.x / kCluster, rank = blockIdx.x % kCluster;
  const int place = rank * kThreads + thread;
  if constexpr (!kAlone) {
    if (thread == 0) dk::init_mbarrier_release_cluster(&found_here, 1);
    __syncwarp();
    dk::arrive_relaxed_cluster();
  }
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  if (counts != nullptr && counts[row] <= 0) {
    if (place == 0) tokens[row] = -1;
    if constexpr (!kAlone) dk::wait_acquire_cluster();
    return;
  }

  // A thread's indices rise, so of equal logits it keeps the first.
  const float* const from = logits + row * row_stride;
  float best = -CUDART_INF_F;
  unsigned index = kNobody;
  const auto look = [&](float logit, int at) {
    if (logit > best) best = logit, index = at;  // never NaN
  };
#pragma unroll 1
  for (int start = place * 4; start + 4 <= vocabulary; start += kBatch * kStep) {
    Four loaded[kBatch];
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      const int at = start + step * kStep;
      loaded[step] = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
      if (at + 4 <= vocabulary) loaded[step] = Four::load(from + at);
    }
#pragma unroll
    for (int step = 0; step < kBatch; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) look(loaded[step].elements[i], start + step * kStep + i);
  }
  const int last = vocabulary / 4 * 4 + place;
  if (last < vocabulary) look(from[last], last);

  uint2 mine = best_of_warp({dk::order_of(best), index});
  if constexpr (kAlone) {
    if (lane == 0) found[warp] = mine;
    __syncthreads();
  } else {
    if (place == 0) dk::expect_relaxed_cluster(&found_here, 0, sizeof(found));
    dk::wait_acquire_cluster();  // the first block's mbarrier is there
    if (lane == 0) dk::store_async_release_cluster_8(&found[rank * kWarps + warp], 0, mine, &found_here);
  }
  if (rank > 0 || warp > 0) return;
  if constexpr (!kAlone) dk::wait_mbarrier_acquire_cluster(&found_here);
  mine = {kNobody, kNobody};
#pragma unroll
  for (int part = 0; part < kParts; part += 32)
    if (part + lane < kParts) mine = better(mine, found[part + lane]);
  mine = best_of_warp(mine);
  if (lane == 0) tokens[row] = static_cast<int>(mine.y);
}

// grid: rows, block: k rounded up to a power of two, of whole warps
// logits: [rows, vocabulary], rows `row_stride` apart; candidates: [rows, k], negative for none
// temperature, top_p, seeds, counters, tokens: [rows]
//
// Candidates in the order of their logits, l[0] the best, have weights w[i] = 2^30 exp((l[i] - l[0]) / temperature);
// where temperature is not above 0, only the first has one. Kept are the first, as few as have together at least
// top_p * (the sum of all): one at least, and all where they have less. tokens[r] is the first of the kept whose sum
// with those before is above draw / 2^24 * (the sum of the kept), with the upper 24 bits of a word of Philox4x32-10. -1
// where there is no candidate, or counters[r] <= 0: then nothing else of the row is read.
__global__ void __launch_bounds__(kMostCandidates)
    sample(const float* logits, const int* candidates, const float* temperature, const float* top_p,
           const unsigned long long* seeds, const int* counters, int* tokens, int vocabulary, int k,
           long long row_stride) {
  __shared__ Whole keys[2][kMostCandidates], sum_of_warp[32], best, kept;
  __shared__ unsigned draw;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  const int counter = counters[row];
  if (counter <= 0) {
    if (thread == 0) tokens[row] = -1;
    return;
  }

  // A key is an order, and below it the index.
  Whole key = kNever;
  if (thread < k) {
    const int index = candidates[1ll * row * k + thread];
    DK_CHECK(index < vocabulary, "candidates[%d, %d] is %d: a row has %d logits\n", row, thread, index, vocabulary);
    if (index >= 0 && index < vocabulary) {
      const float logit = logits[row * row_stride + index];
      if (logit > -CUDART_INF_F) key = Whole{dk::order_of(logit)} << 32 | static_cast<unsigned>(index);
    }
  }
  if (thread == 0) draw = philox(seeds[row], counter) >> 8;
  const float heat = temperature[row];
  key = sorted(key, keys);
  if (thread == 0) best = key;
  __syncthreads();
  if (best == kNever) {
    if (thread == 0) tokens[row] = -1;
    return;
  }

  const float logit = dk::value_of(key >> 32), most = dk::value_of(best >> 32);
  unsigned weight = 0;
  if (thread == 0) weight = 1u << kOne;
  else if (key != kNever && heat > 0.0f)
    weight = weight_of(logit == most ? 0.0f : __fdiv_rn(__fsub_rn(logit, most), heat));  // inf - inf is none
  Whole up_to = dk::sum_up_to_lane<Whole>(weight);
  if (lane == 31) sum_of_warp[warp] = up_to;
  __syncthreads();
  const Whole up_to_warp = dk::sum_up_to_lane(lane < blockDim.x / 32 ? sum_of_warp[lane] : 0);
  const Whole sum = __shfl_sync(~0u, up_to_warp, 31), before = __shfl_sync(~0u, up_to_warp, max(0, warp - 1));
  if (warp > 0) up_to += before;

  // One thread is the end of what is kept: the first that has enough, or the last of all.
  const double enough = static_cast<double>(top_p[row]) * static_cast<double>(sum);
  const bool is_enough = static_cast<double>(up_to) >= enough || thread == blockDim.x - 1;
  const bool was_enough = thread > 0 && static_cast<double>(up_to - weight) >= enough;
  if (is_enough && !was_enough) kept = up_to;
  __syncthreads();
  const Whole at = draw * kept >> 24;  // up_to is whole: it is above the product if it is above this
  if (up_to > at && up_to - weight <= at) tokens[row] = static_cast<int>(key);
}
