// The k largest scores of each row, exactly, whatever stands in it.
//
// A larger score comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. NaN and -inf are
// never chosen. A score's order is a number of 32 bits, smaller for a better score. How many scores have which first 11
// bits says into which of these bins the k-th falls; of those in it the next 11 bits are counted, then the last 10,
// until a bin is taken whole or all bits are known. Nothing is collected on the way, so nothing can overflow.
//
// A warp has a part of the row, its orders in shared memory as far as there is room, so that scores are read once; what
// has none is read again each time. Where chosen indices go follows from how many are chosen before them in the row.

#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/vec.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 4 * kThreads;  // of 11 bits: four for each thread
constexpr int kStep = 4 * 32;        // scores that a warp reads at a time

constexpr unsigned kNever = ~0u;  // the order of what is not chosen

using Words = dk::Vec<unsigned, 4>;

__device__ unsigned order_of(float score) {
  if (!(score > -CUDART_INF_F)) return kNever;  // NaN too
  const unsigned bits = score == 0.0f ? 0 : __float_as_uint(score);
  return static_cast<int>(bits) < 0 ? bits : bits ^ 0x7fffffff;
}

// A warp's part of a row: `steps` times kStep scores from `first` on, or less at the row's end.
struct Part {
  const float* row;
  Words* kept;  // this lane's orders of the first `held` steps
  int first, n, steps, held;

  __device__ int index(int step) const { return first + step * kStep + static_cast<int>(threadIdx.x) % 32 * 4; }

  // Begin to copy what is held. A lane has the same scores all the time, so nobody waits for others' copies.
  __device__ void fetch() const {
#pragma unroll 1
    for (int step = 0; step < min(steps, held); ++step) {
      const int bytes = max(0, min(4, n - index(step))) * 4;
      const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(kept + step * 32));
      dk::copy_async_16(to, bytes > 0 ? row + index(step) : row, bytes);
    }
    dk::commit_copies();
  }
  // Wait for it; from now on there are orders.
  __device__ void settle() const {
    dk::wait_for_copies<0>();
#pragma unroll 1
    for (int step = 0; step < min(steps, held); ++step) kept[step * 32] = orders_of(kept[step * 32], index(step));
  }

  // visit(index of the first, orders of four scores), in order, by all lanes together. The next four are on their way.
  template <typename Visit>
  __device__ void each(Visit visit) const {
    Words next = words(0);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      Words orders = next;
      next = words(step + 1);
      if (step >= held) orders = orders_of(orders, index(step));
      visit(index(step), orders.elements);
    }
  }

  // This lane's orders, or scores of what is not held.
  __device__ Words words(int step) const {
    if (step >= steps) return {};
    if (step < held) return kept[step * 32];
    const int at = index(step);
    const unsigned* const scores = reinterpret_cast<const unsigned*>(row) + at;
    if (at + 4 <= n) return Words::load(scores);
    Words some = {};
    for (int i = 0; i < 3; ++i)
      if (at + i < n) some.elements[i] = scores[i];
    return some;
  }
  __device__ Words orders_of(const Words& scores, int at) const {
    Words orders;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      orders.elements[i] = at + i < n ? order_of(__uint_as_float(scores.elements[i])) : kNever;
    return orders;
  }
};

__device__ unsigned sum_of(const Words& four) {
  return four.elements[0] + four.elements[1] + four.elements[2] + four.elements[3];
}
// Of the first `count` of at most 32 words, by all lanes together.
__device__ unsigned sum_of(const unsigned* words, int count) {
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < count ? words[lane] : 0);
}

}  // namespace

// grid: kCluster * rows, cluster: kCluster blocks, block: 512, all one-dimensional
// scores: [rows, width], rows `row_stride` apart, a multiple of 4, the first aligned to 16 bytes; lengths: [rows]
// indices: [rows, k]
// shared memory: 8192 * held bytes
//
// indices[r] = the min(k, n) best of the first n = lengths[r] scores, with rising indices, then -1. At most k scores
// are all taken, whatever they are, without a look at them. From n on nothing is read; n <= 0 is an empty row.
template <int kCluster>
__global__ void __launch_bounds__(kThreads, 3)
    top_k(const float* scores, const int* lengths, int* indices, int width, int k, long long row_stride, int held) {
  static_assert(kCluster <= 8, "a cluster of more blocks is not portable");
  constexpr bool kAlone = kCluster == 1;
  extern __shared__ Words kept[];
  __shared__ alignas(16) unsigned counts[kBins];                                // of the bins, in this block's part
  __shared__ alignas(16) unsigned of_row[kAlone ? 1 : 2][kAlone ? 4 : kBins];  // in the row, by turns
  __shared__ unsigned of_warps[3][kWarps];
  __shared__ unsigned of_blocks[2][kCluster];
  __shared__ struct { unsigned bin, before, count; } found;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = blockIdx.x / kCluster, rank = blockIdx.x % kCluster;
  const auto meet = [] {
    if constexpr (kAlone) __syncthreads();
    else dk::meet_acq_rel_cluster();
  };

  int n = lengths[row];
  DK_CHECK(n <= width, "lengths[%d] is %d: a row has %d scores\n", row, n, width);
  n = max(0, min(n, width));
  int* const to = indices + 1ll * row * k;
  const auto fill = [&](int from, int taken) {  // from there on, each index below `taken`, then -1
#pragma unroll 1
    for (int i = from + rank * kThreads + thread; i < k; i += kCluster * kThreads) to[i] = i < taken ? i : -1;
  };
  if (n <= k) return fill(0, n);

  const int steps = (n - 1) / kStep + 1, of_warp = (steps - 1) / (kCluster * kWarps) + 1;
  const int first = (rank * kWarps + warp) * of_warp;
  const Part part = {scores + row * row_stride, kept + warp * held * 32 + lane, first * kStep, n,
                     max(0, min(of_warp, steps - first)), held};
  part.fetch();
  const auto zero = [&](unsigned* bins) { Words{}.store(bins + 4 * thread); };
  zero(counts);
  if constexpr (!kAlone) zero(of_row[0]), zero(of_row[1]);
  meet();
  part.settle();

  // Taken are the `better` scores whose orders are below low, and `wanted` of those whose orders are in [low, last]. It
  // becomes narrower until these are the ones that stand first.
  unsigned low = 0, last = kNever - 1, better = 0, wanted = k;
  for (int shift = 21, turn = 0;; shift = max(shift - 11, 0), turn ^= 1) {
    part.each([&](int, const unsigned (&orders)[4]) {
      for (const unsigned order : orders)
        if (order - low <= last - low) atomicAdd(counts + ((order - low) >> shift), 1u);
    });
    __syncthreads();
    const auto taken_from = [&](unsigned* bins) {  // this thread's four, of which zeros are left
      const Words four = Words::load(bins + 4 * thread);
      zero(bins);
      return four;
    };
    Words four = taken_from(counts);
    if constexpr (!kAlone) {
      // Most bins are empty: to send the others is less than to read all. The turn before is behind everybody by now.
#pragma unroll 1
      for (int block = 0; sum_of(four) > 0 && block < kCluster; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          unsigned* const bin = &of_row[turn][4 * thread + i];
          if (four.elements[i] > 0) dk::add_relaxed_shared_cluster(bin, block, four.elements[i]);
        }
      }
      meet();
      four = taken_from(of_row[turn]);
    }

    const unsigned mine = sum_of(four);
    unsigned up_to_mine = mine;
    for (int step = 1; step < 32; step *= 2) {
      const unsigned lower = __shfl_up_sync(~0u, up_to_mine, step);
      if (lane >= step) up_to_mine += lower;
    }
    if (lane == 31) of_warps[0][warp] = up_to_mine;
    __syncthreads();
    wanted = min(wanted, sum_of(of_warps[0], kWarps));
    unsigned before = sum_of(of_warps[0], warp) + up_to_mine - mine;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned count = four.elements[i];
      if (before < wanted && wanted <= before + count) found = {4u * thread + i, before, count};
      before += count;
    }
    __syncthreads();
    if (wanted == 0) break;  // nothing but NaN and -inf
    low += found.bin << shift, last = low + (1u << shift) - 1;
    better += found.before, wanted -= found.before;
    if (found.count == wanted || shift == 0) break;
  }

  // How many of both kinds stand before this warp's part.
  unsigned betters = 0, ties = 0;
  part.each([&](int, const unsigned (&orders)[4]) {
    for (const unsigned order : orders) betters += order < low, ties += order - low <= last - low;
  });
  betters = __reduce_add_sync(~0u, betters), ties = __reduce_add_sync(~0u, ties);
  if (lane == 0) of_warps[1][warp] = betters, of_warps[2][warp] = ties;
  __syncthreads();
  betters = sum_of(of_warps[1], warp), ties = sum_of(of_warps[2], warp);
  if constexpr (!kAlone) {
    const unsigned of_block[2] = {sum_of(of_warps[1], kWarps), sum_of(of_warps[2], kWarps)};
    if (thread < kCluster)
      for (int kind = 0; kind < 2; ++kind) dk::store_shared_cluster(&of_blocks[kind][rank], thread, of_block[kind]);
    meet();  // the last one: nobody reaches into a block that has ended
    betters += sum_of(of_blocks[0], rank), ties += sum_of(of_blocks[1], rank);
  }

  part.each([&](int index, const unsigned (&orders)[4]) {
    const unsigned best = min(min(orders[0], orders[1]), min(orders[2], orders[3]));
    if (!__any_sync(~0u, best <= last)) return;
    const unsigned lower_lanes = (1u << lane) - 1;
    unsigned of_step[2] = {}, here[2] = {betters, ties};
    for (const unsigned order : orders) {
      const unsigned are_better = __ballot_sync(~0u, order < low);
      const unsigned are_tied = __ballot_sync(~0u, order - low <= last - low);
      of_step[0] += __popc(are_better), of_step[1] += __popc(are_tied);
      here[0] += __popc(are_better & lower_lanes), here[1] += __popc(are_tied & lower_lanes);
    }
    for (int i = 0; i < 4; ++i) {
      const bool is_better = orders[i] < low, is_tied = orders[i] - low <= last - low;
      if (is_better || (is_tied && here[1] < wanted)) to[here[0] + min(here[1], wanted)] = index + i;
      here[0] += is_better, here[1] += is_tied;
    }
    betters += of_step[0], ties += of_step[1];
  });
  fill(better + wanted, 0);
}
