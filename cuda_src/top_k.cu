// The k largest scores of each row, exactly, whatever stands in it.
//
// A larger score comes before a smaller one, of equal ones that of the smaller index; -0 equals +0. NaN and -inf are
// never chosen. A score's order is a number of 32 bits, smaller for a better score.
//
// First a bound. k/4 groups of lanes find the fourth best of what they have read: what is worse than the worst of these
// cannot be among the k best. Of most rows a few thousand scores are left.
//
// Then a radix selection, from the best order to the bound: how many scores have which first bits says into which of
// 2048 bins the k-th falls, and that bin is divided again, until it is taken whole or has one order, or so few scores
// that they are compared with each other. Of equal ones those that stand first are taken, which are counted. So is what
// stands before each warp's part of the row: chosen indices rise, and do not depend on who was faster.
//
// top_k_short: a block has a row in its registers. top_k_long: the blocks of a cluster have a row. What is left by the
// bound goes into lists of the first block, which selects alone. They have room for what is left of scores in random
// order, not for all: where one overflows, such as with many ties or rising scores, no list is used and all blocks
// select together, from the row itself. So bound and lists are for speed, and the result does not depend on them.

#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/order.cuh"
#include "dk/vec.cuh"
#include "dk/warp.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 4 * kThreads;  // of 11 bits: four for each thread
constexpr int kFew = 32;             // scores that are compared with each other
constexpr int kStep = 4 * 32;        // scores that a warp reads at a time
constexpr int kBatch = 4;            // steps whose scores are on their way together

constexpr unsigned kWorst = 0xff7fffff;  // the order of the lowest finite score
constexpr unsigned kNever = ~0u;         // the order of what is not there

using Four = dk::Vec<float, 4>;
using Words = dk::Vec<unsigned, 4>;

__device__ unsigned order_of(float score) { return dk::order_of(fmaxf(score, -CUDART_INF_F)); }  // no NaN

// What stands at from, from + apart, ... of a row's first n scores, four at a time; -inf behind the end.
template <int kSteps>
__device__ void load(Four (&into)[kSteps], const float* row, int from, int apart, int n) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = from + step * apart;
    into[step] = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
    if (at + 4 <= n) into[step] = Four::load(row + at);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int at = from + step * apart;
    if (at >= n || at + 4 <= n) continue;
#pragma unroll
    for (int i = 0; i < 3; ++i)
      if (at + i < n) into[step].elements[i] = row[at + i];
  }
}

__device__ void sort(unsigned& better, unsigned& worse) {
  const unsigned best = min(better, worse);
  worse = max(better, worse), better = best;
}
// Of the four orders that each lane has: the warp's best, and the worst of the fourth best ones of its groups of lanes.
// `full` warps, of which this may be one, share k/4 groups evenly; where they have not so many lanes there is no bound.
__device__ uint2 bounds_of(unsigned (&best)[4], int k, int full, bool is_full) {
  const int groups = __popc(__ballot_sync(~0u, threadIdx.x % 32 < 6 && k <= full * kStep >> threadIdx.x % 32));
  sort(best[0], best[1]), sort(best[2], best[3]);
  sort(best[0], best[2]), sort(best[1], best[3]), sort(best[1], best[2]);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    if (lanes >= 1 << groups >> 1) break;
    unsigned others[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) others[i] = __shfl_xor_sync(~0u, best[3 - i], lanes);
#pragma unroll
    for (int i = 0; i < 4; ++i) best[i] = min(best[i], others[i]);
    sort(best[0], best[2]), sort(best[1], best[3]);
    sort(best[0], best[1]), sort(best[2], best[3]);
  }
  const unsigned first = __reduce_min_sync(~0u, best[0]), worst = __reduce_max_sync(~0u, best[3]);
  return {first, groups == 0 ? kNever : is_full ? worst : 0};
}

// Of the first `count` of at most 32 words, by all lanes together.
__device__ unsigned sum_of(const unsigned* words, int count) {
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < count ? words[lane] : 0);
}

struct alignas(8) Entry { unsigned order; int index; };

// What a warp selects from. each(visit) is by all lanes together: four entries of each, with rising indices. In shared
// memory,
struct List {
  const Entry* entries;
  int count;

  template <typename Visit>
  __device__ void each(Visit visit) const {
#pragma unroll 1
    for (int from = 0; from < count; from += kStep) {
      const int at = from + static_cast<int>(threadIdx.x) % 32 * 4;
      Entry four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = at + i < count ? entries[at + i] : Entry{kNever, 0};
      visit(four);
    }
  }
};
// [first, end) of a row, of which kAtOnce steps are on their way together,
template <int kAtOnce>
struct Part {
  const float* row;
  int first, end;

  template <typename Visit>
  __device__ void each(Visit visit) const {
#pragma unroll 1
    for (int from = first; from < end; from += kAtOnce * kStep) {
      int at = from + static_cast<int>(threadIdx.x) % 32 * 4;
      Four loaded[kAtOnce];
      load(loaded, row, at, kStep, end);
#pragma unroll 1
      for (int step = 0; step < kAtOnce; ++step, at += kStep) {
        Entry four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = {order_of(loaded[0].elements[i]), at + i};
        visit(four);
#pragma unroll
        for (int i = 1; i < kAtOnce; ++i) loaded[i - 1] = loaded[i];
      }
    }
  }
};
// or orders that a lane has, four of each step.
template <int kSteps>
struct Registers {
  const unsigned (&orders)[kSteps][4];
  int first;

  template <typename Visit>
  __device__ void each(Visit visit) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Entry four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = {orders[step][i], first + step * kStep + i};
      visit(four);
    }
  }
};

// Taken are the `better` scores whose orders are below low, and the first `wanted` of those in [low, last].
struct Window {
  unsigned low, last, better, wanted;

  // Of what warps found: nothing is wanted where nothing is finite.
  template <int kParts>
  static __device__ Window of(const uint2 (&bounds)[kParts], int k) {
    const int lane = threadIdx.x % 32;
    unsigned low = kNever, last = 0;
#pragma unroll
    for (int part = 0; part < kParts; part += 32) {
      const uint2 bound = bounds[part + lane % min(kParts, 32)];
      low = min(low, bound.x), last = max(last, bound.y);
    }
    low = __reduce_min_sync(~0u, low), last = min(kWorst, __reduce_max_sync(~0u, last));
    return {low, last, 0, low <= last ? k : 0u};
  }
  __device__ bool is_better(unsigned order) const { return order < low; }
  __device__ bool is_tied(unsigned order) const { return order - low <= last - low; }
};

// What blocks count in; a cluster of kCluster has such a thing in each.
template <int kCluster>
struct Counts {
  alignas(16) unsigned bins[kBins];                                                // of this block's scores
  alignas(16) unsigned of_row[kCluster > 1 ? 2 : 1][kCluster > 1 ? kBins : 4];  // of all blocks', by turns
  unsigned of_warps[2][kWarps], of_blocks[2][kCluster];
  struct alignas(16) { unsigned low, last, before, count; } found;  // the bin
  unsigned few[kFew], few_count;

  // This thread's part of it; others may count behind a barrier.
  __device__ void begin() {
    Words{}.store(bins + 4 * threadIdx.x);
    if (threadIdx.x == 0) few_count = 0;
  }
  static __device__ Words taken_from(unsigned* bins) {  // this thread's four, of which zeros are left
    const Words four = Words::load(bins + 4 * threadIdx.x);
    Words{}.store(bins + 4 * threadIdx.x);
    return four;
  }

  // Narrow the window, until what is wanted of it is what stands first. Each warp has its part of the scores, which are
  // kBlocks blocks': one's, or the cluster's.
  template <int kBlocks, typename Scores>
  __device__ void narrow(Window& window, const Scores& scores) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned &low = window.low, &last = window.last, &better = window.better, &wanted = window.wanted;
    for (int turn = 0; wanted > 0; turn ^= 1) {
      const unsigned span = last - low;
      const int shift = max(0, 32 - __clz(span) - 11);
      scores.each([&](const Entry (&four)[4]) {
#pragma unroll
        for (const Entry& entry : four)
          if (entry.order - low <= span) atomicAdd(bins + (entry.order - low >> shift), 1u);
      });
      __syncthreads();
      Words four = taken_from(bins);
      if constexpr (kBlocks > 1) {
        // Most bins are empty: to send the others is less than to read all. The turn before is behind everybody by now.
#pragma unroll 1
        for (int block = 0; (four.elements[0] | four.elements[1] | four.elements[2] | four.elements[3]) > 0 &&
                            block < kBlocks; ++block) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            unsigned* const bin = &of_row[turn][4 * threadIdx.x + i];
            if (four.elements[i] > 0) dk::add_relaxed_shared_cluster(bin, block, four.elements[i]);
          }
        }
        dk::meet_acq_rel_cluster();
        four = taken_from(of_row[turn]);
      }

      const unsigned mine = four.elements[0] + four.elements[1] + four.elements[2] + four.elements[3];
      const unsigned up_to_mine = dk::sum_up_to_lane(mine);
      if (lane == 31) of_warps[0][warp] = up_to_mine;
      __syncthreads();
      wanted = min(wanted, sum_of(of_warps[0], kWarps));
      unsigned before = sum_of(of_warps[0], warp) + up_to_mine - mine;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned count = four.elements[i];
        if (before < wanted && wanted <= before + count) {
          const unsigned first = low + (4 * threadIdx.x + i << shift);
          found = {first, min(last, first + (1u << shift) - 1), before, count};
        }
        before += count;
      }
      __syncthreads();
      low = found.low, last = found.last;
      better += found.before, wanted -= found.before;
      if (found.count == wanted || shift == 0) return;

      if constexpr (kBlocks == 1) {
        if (found.count > kFew) continue;
        scores.each([&](const Entry (&four)[4]) {
#pragma unroll
          for (const Entry& entry : four)
            if (window.is_tied(entry.order)) few[atomicAdd(&few_count, 1u)] = entry.order;
        });
        __syncthreads();
        const unsigned order = lane < found.count ? few[lane] : kNever;
        unsigned below = 0, up_to = 0;
#pragma unroll 1
        for (unsigned i = 0; i < found.count; ++i) below += few[i] < order, up_to += few[i] <= order;
        const int kth = __ffs(__ballot_sync(~0u, lane < found.count && below < wanted && wanted <= up_to)) - 1;
        low = last = __shfl_sync(~0u, order, kth);
        better += __shfl_sync(~0u, below, kth), wanted -= __shfl_sync(~0u, below, kth);
        return;
      }
    }
  }

  // How many scores of both kinds, better and tied, stand before this warp's part, out of how many it has itself.
  template <int kBlocks>
  __device__ uint2 before_warp(unsigned betters, unsigned ties, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) of_warps[0][warp] = betters, of_warps[1][warp] = ties;
    __syncthreads();
    uint2 before = {sum_of(of_warps[0], warp), sum_of(of_warps[1], warp)};
    if constexpr (kBlocks > 1) {
      const unsigned of_block[2] = {sum_of(of_warps[0], kWarps), sum_of(of_warps[1], kWarps)};
      if (threadIdx.x < kBlocks)
        for (int kind = 0; kind < 2; ++kind)
          dk::store_shared_cluster(&of_blocks[kind][rank], threadIdx.x, of_block[kind]);
      dk::meet_acq_rel_cluster();  // the last one: nobody reaches into a block that has ended
      before.x += sum_of(of_blocks[0], rank), before.y += sum_of(of_blocks[1], rank);
    }
    return before;
  }
};

// Each index below `taken` from `from` on, then -1, by `blocks` blocks of which this is the rank-th.
__device__ void fill(int* to, int from, int k, int taken, int rank, int blocks) {
#pragma unroll 1
  for (int i = from + rank * kThreads + static_cast<int>(threadIdx.x); i < k; i += blocks * kThreads)
    to[i] = i < taken ? i : -1;
}

// A row's k best, by kBlocks blocks of which each warp has what it selects from.
template <int kBlocks, int kCluster, typename Scores>
__device__ void select(Counts<kCluster>& counts, Window window, const Scores& scores, int* to, int k, int rank) {
  counts.template narrow<kBlocks>(window, scores);

  unsigned betters = 0, ties = 0;
  scores.each([&](const Entry (&four)[4]) {
    for (const Entry& entry : four) betters += window.is_better(entry.order), ties += window.is_tied(entry.order);
  });
  betters = __reduce_add_sync(~0u, betters), ties = __reduce_add_sync(~0u, ties);
  uint2 before = counts.template before_warp<kBlocks>(betters, ties, rank);
  scores.each([&](const Entry (&four)[4]) {
    unsigned here = 0;  // of the better ones, and from bit 16 on of the tied ones
    for (const Entry& entry : four) here += window.is_better(entry.order) + (window.is_tied(entry.order) << 16);
    if (!__any_sync(~0u, here > 0)) return;
    const unsigned up_to_here = dk::sum_up_to_lane(here), all = __shfl_sync(~0u, up_to_here, 31);
    unsigned better = before.x + (up_to_here - here & 0xffff), tied = before.y + (up_to_here - here >> 16);
    for (const Entry& entry : four) {
      const bool is_better = window.is_better(entry.order), is_tied = window.is_tied(entry.order);
      if (is_better || (is_tied && tied < window.wanted)) to[better + min(tied, window.wanted)] = entry.index;
      better += is_better, tied += is_tied;
    }
    before.x += all & 0xffff, before.y += all >> 16;
  });
  fill(to, window.better + window.wanted, k, 0, rank, kBlocks);
}

}  // namespace

// grid: rows for top_k_short, kCluster * rows in clusters of kCluster for top_k_long; block: 512; all one-dimensional
// scores: [rows, width], rows `row_stride` apart, a multiple of 4, the first aligned to 16 bytes; lengths: [rows]
// indices: [rows, k]
// width: at most 2048 * kSteps for top_k_short
// shared memory: room * 8 bytes for each warp of the cluster for top_k_long
//
// indices[r] = the min(k, n) best of the first n = lengths[r] scores, with rising indices, then -1. At most k scores
// are all taken, whatever they are, without a look at them. From n on nothing is read, though it may come into the L2
// cache; n <= 0 is an empty row.
template <int kSteps>
__global__ void __launch_bounds__(kThreads, 1)
    top_k_short(const float* scores, const int* lengths, int* indices, int width, int k, long long row_stride) {
  __shared__ Counts<1> counts;
  __shared__ uint2 bounds[kWarps];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x;
  const float* const from = scores + row * row_stride;
  if (thread == 0 && width >= 4) dk::prefetch_bulk_l2(from, width / 4 * 16);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  int n = lengths[row];
  counts.begin();
  DK_CHECK(n <= width, "lengths[%d] is %d: a row has %d scores\n", row, n, width);
  n = max(0, min(n, width));
  int* const to = indices + 1ll * row * k;
  if (n <= k) return fill(to, 0, k, n, 0, 1);

  const int steps = (n - 1) / kStep + 1, of_warp = ((steps - 1) / kWarps + 1) * kStep;
  const int first = warp * of_warp + lane * 4;
  unsigned orders[kSteps][4], best[4] = {kNever, kNever, kNever, kNever};
  Four loaded[kSteps];
  load(loaded, from, first, kStep, min(n, (warp + 1) * of_warp));
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      orders[step][i] = order_of(loaded[step].elements[i]);
      best[i] = min(best[i], orders[step][i]);
    }
  const int full = n / of_warp;  // warps that have no place empty
  const uint2 bound = bounds_of(best, k, full, warp < full);
  if (lane == 0) bounds[warp] = bound;
  __syncthreads();
  Window window = Window::of(bounds, k);
  counts.narrow<1>(window, Registers<kSteps>{orders, first});

  // Of each step, a byte: how many of both kinds there are up to this lane.
  unsigned here[2] = {}, before[2], all[2];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      here[0] += window.is_better(orders[step][i]) << 8 * step;
      here[1] += window.is_tied(orders[step][i]) << 8 * step;
    }
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    before[kind] = dk::sum_up_to_lane(here[kind]);
    all[kind] = __shfl_sync(~0u, before[kind], 31);
    before[kind] -= here[kind];
  }
  uint2 start = counts.before_warp<1>(__dp4a(all[0], 0x01010101u, 0u), __dp4a(all[1], 0x01010101u, 0u), 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned better = start.x + (before[0] >> 8 * step & 255), tied = start.y + (before[1] >> 8 * step & 255);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_better = window.is_better(orders[step][i]), is_tied = window.is_tied(orders[step][i]);
      if (is_better || (is_tied && tied < window.wanted))
        to[better + min(tied, window.wanted)] = first + step * kStep + i;
      better += is_better, tied += is_tied;
    }
    start.x += all[0] >> 8 * step & 255, start.y += all[1] >> 8 * step & 255;
  }
  fill(to, window.better + window.wanted, k, 0, 0, 1);
}

template <int kCluster>
__global__ void __launch_bounds__(kThreads, kCluster == 1 ? 3 : 1)
    top_k_long(const float* scores, const int* lengths, int* indices, int width, int k, long long row_stride,
               int room) {
  static_assert(kCluster <= 8, "a cluster of more blocks is not portable");
  constexpr bool kAlone = kCluster == 1;
  constexpr int kParts = kCluster * kWarps;
  extern __shared__ Entry lists[];
  __shared__ Counts<kCluster> counts;
  __shared__ uint2 bounds[kParts], listed_of[kParts];  // the second: how many each warp has found for its list
  __shared__ alignas(8) unsigned long long bounds_here, listed_here, lists_here;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = blockIdx.x / kCluster, rank = blockIdx.x % kCluster, part = rank * kWarps + warp;
  const float* const from = scores + row * row_stride;
  for (int step = 0; step < kBatch; ++step) {
    const int at = (part + step * kParts) * kStep + lane * 4;
    dk::prefetch_l2(from + at, at < width && lane % 8 == 0);
  }
  if constexpr (!kAlone) {
    if (thread == 0) {
      dk::init_mbarrier_release_cluster(&bounds_here, 1);
      dk::init_mbarrier_release_cluster(&listed_here, 1);
      dk::init_mbarrier_release_cluster(&lists_here, kParts);
    }
    __syncwarp();
    dk::arrive_relaxed_cluster();
  }
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  int n = lengths[row];
  counts.begin();
  DK_CHECK(n <= width, "lengths[%d] is %d: a row has %d scores\n", row, n, width);
  n = max(0, min(n, width));
  const auto to = [&] { return indices + 1ll * row * k; };  // made when it is used: there are 40 registers
  if (n <= k) {
    fill(to(), 0, k, n, rank, kCluster);
    if constexpr (!kAlone) dk::wait_acquire_cluster();
    return;
  }

  float best_scores[4] = {-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F};
#pragma unroll 1
  for (int at = part * kStep; at < n; at += kBatch * kParts * kStep) {
    Four loaded[kBatch];
    load(loaded, from, at + lane * 4, kParts * kStep, n);
#pragma unroll
    for (int step = 0; step < kBatch; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) best_scores[i] = fmaxf(best_scores[i], loaded[step].elements[i]);
  }
  unsigned best[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) best[i] = order_of(best_scores[i]);
  const int full = min(kParts, n / kStep);  // warps that have a whole step
  const uint2 bound = bounds_of(best, k, full, part < full);
  if constexpr (kAlone) {
    if (lane == 0) bounds[part] = bound;
    __syncthreads();
  } else {
    if (thread == 0) {
      dk::expect_relaxed_cluster(&bounds_here, rank, sizeof(bounds));
      dk::expect_relaxed_cluster(&listed_here, rank, sizeof(listed_of));
    }
    dk::wait_acquire_cluster();  // everybody's mbarriers are there
    if (lane < kCluster) dk::store_async_release_cluster_8(&bounds[part], lane, bound, &bounds_here);
    dk::wait_mbarrier_acquire_cluster(&bounds_here);
  }

  // What is within the bound goes to the first block's lists.
  const int of_warp = ((n - 1) / (kParts * kStep) + 1) * kStep;
  const Part<kAlone ? 1 : kBatch> whole = {from, part * of_warp, min(n, (part + 1) * of_warp)};
  const float worst = dk::value_of(Window::of(bounds, k).last);
  Entry* const list = lists + part * room;
  int listed = 0;
#pragma unroll 1
  for (int at = whole.first + lane * 4; at < whole.end + lane * 4; at += kBatch * kStep) {
    Four loaded[kBatch];
    load(loaded, from, at, kStep, whole.end);
    unsigned here = 0;  // of each step, a byte
#pragma unroll
    for (int step = 0; step < kBatch; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) here += loaded[step].elements[i] >= worst ? 1u << 8 * step : 0;
    if (!__any_sync(~0u, here > 0)) continue;
    const unsigned up_to_here = dk::sum_up_to_lane(here), before = up_to_here - here, all = __shfl_sync(~0u, up_to_here, 31);
#pragma unroll
    for (int step = 0; step < kBatch; ++step) {
      int place = listed + (before >> 8 * step & 255);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(loaded[step].elements[i] >= worst)) continue;
        if (place < room) {
          const Entry entry = {order_of(loaded[step].elements[i]), at + step * kStep + i};
          if constexpr (kAlone) list[place] = entry;
          else dk::store_async_release_cluster_8(list + place, 0, {entry.order, unsigned(entry.index)}, &lists_here);
        }
        ++place;
      }
      listed += all >> 8 * step & 255;
    }
  }
  if constexpr (kAlone) {
    const bool overflowed = __syncthreads_or(listed > room);
    const Window window = Window::of(bounds, k);
    if (overflowed) return select<1>(counts, window, whole, to(), k, rank);
    return select<1>(counts, window, List{list, listed}, to(), k, rank);
  } else {
    if (lane == 0) dk::expect_relaxed_cluster(&lists_here, 0, min(listed, room) * sizeof(Entry));
    const uint2 mine = {static_cast<unsigned>(listed), 0};
    if (lane < kCluster) dk::store_async_release_cluster_8(&listed_of[part], lane, mine, &listed_here);
    dk::wait_mbarrier_acquire_cluster(&listed_here);
    if (rank == 0) dk::wait_mbarrier_acquire_cluster(&lists_here);
    bool overflowed = false;  // for all blocks alike
    for (int i = lane; i < kParts; i += 32) overflowed |= listed_of[i].x > room;
    const Window window = Window::of(bounds, k);
    if (__any_sync(~0u, overflowed)) {
      for (auto& bins : counts.of_row) Words{}.store(bins + 4 * thread);
      dk::meet_acq_rel_cluster();
      return select<kCluster>(counts, window, whole, to(), k, rank);
    }
    if (rank > 0) return;

    // A warp has the lists of kCluster warps that follow each other: put them together.
    Entry* const joined = lists + warp * kCluster * room;
    const int up_to = dk::sum_up_to_lane(lane < kCluster ? listed_of[warp * kCluster + lane].x : 0);
    listed = __shfl_sync(~0u, up_to, 31);
    int ends[kCluster - 1];
#pragma unroll
    for (int i = 0; i < kCluster - 1; ++i) ends[i] = __shfl_sync(~0u, up_to, i);
#pragma unroll 1
    for (int at = lane; at < listed + lane; at += 32) {
      int place = at;
#pragma unroll
      for (int i = 0; i < kCluster - 1; ++i)
        if (at >= ends[i]) place = (i + 1) * room + at - ends[i];
      Entry moved = {};
      if (at < listed) moved = joined[place];
      __syncwarp();
      if (at < listed) joined[at] = moved;
      __syncwarp();
    }
    __syncthreads();  // there are bins
    select<1>(counts, window, List{joined, listed}, to(), k, rank);
  }
}
