// A step of one token a request, in one launch: its query and key turned by position, its key and value into their page,
// and its attention to all tokens so far. For few tokens, where all that counts is how long a launch takes.
//
// The lanes that have a row of keys between them are a stream, and take every n-th token; each has a maximum and sums of
// its own, and meets the others in the end: those of its warp, of the block, of the cluster. Which stream has a token does
// not depend on what the other requests are.

#include "dk/attention.cuh"
#include "dk/memory_order.cuh"
#include "dk/paged.cuh"
#include "dk/rope.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kAhead = 2;           // tokens of a stream that are on their way
constexpr int kPerLane = 8;         // elements of a row
constexpr float kLowest = -1e30f;   // the maximum of who has had no token: below all others, and finite

__device__ void load_floats(const float* from, float (&x)[kPerLane]) {
  const auto low = dk::Vec<float, 4>::load(from), high = dk::Vec<float, 4>::load(from + 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = low.elements[i], x[4 + i] = high.elements[i];
}

}  // namespace

// grid: (kBlocks, kv_heads, rows), in clusters of (kBlocks, 1, 1), block: 128
// qkv: [rows, kGroup * kv_heads + 2 * kv_heads, kDim], out: [rows, kGroup * kv_heads, kDim], rows `_row` elements on
// k_pool, v_pool: [pages, ...], by strides; block_table: [rows, table_width]; lengths: [rows]
// cos_sin: [max_position, kDim], in each row the cosines of all pairs, then the sines
//
// With p = lengths[r] - 1, the pairs (2i, 2i + 1) of queries and the key are turned by p, key and value become token p of
// request r, and
//   out[r][h] = sum over t <= p of softmax_t(scale * q[h] . k[t]) * v[t]
// Where lengths[r] is 0 or less out is 0, and nothing else is read or written.
//
// Lengths, table and pools are read before the kernel before this one has ended.
template <typename T, int kDim, int kGroup, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps)
    decode_attention(const float* qkv, T* k_pool, T* v_pool, const int* block_table, const int* lengths,
                     const float* cos_sin, float* out, long long qkv_row, long long out_row, long long page_stride,
                     long long head_stride, long long token_stride, int pages, int table_width, int page_bits,
                     int max_position, float scale) {
  using Row = dk::Vec<T, kPerLane>;
  constexpr int kLanes = kDim / kPerLane, kOfWarp = 32 / kLanes;  // lanes of a stream; streams
  constexpr int kStreams = kOfWarp * kWarps * kBlocks;
  struct alignas(8) Part {
    float sums[kGroup][kDim], weights[kGroup][2];  // what they weigh: the maximum, and the sum of all
  };
  __shared__ Part of_warp[kWarps], of_block[kBlocks];
  __shared__ alignas(8) unsigned long long all_here;

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % kLanes, first = lane * kPerLane;
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z, heads = gridDim.y;
  const int of_warp_before = (rank * kWarps + warp) * kOfWarp, stream = of_warp_before + thread % 32 / kLanes;
  if constexpr (kBlocks > 1) {
    if (thread == 0) dk::init_mbarrier_release_cluster(&all_here, 1);
    __syncwarp();
    dk::arrive_relaxed_cluster();
  }

  const int capacity = min(table_width << page_bits, max_position);
  DK_CHECK(lengths[row] <= capacity, "lengths[%d] is %d: the block table and cos_sin have room for %d\n", row,
           lengths[row], capacity);
  const int position = min(lengths[row], capacity) - 1;
  const auto place_in = [&](int page, int token) -> long long {
    return page * page_stride + head * head_stride + (token & (1 << page_bits) - 1) * token_stride + first;
  };
  Row keys[kAhead], values[kAhead];
  bool is_there[kAhead];
  const auto bring = [&](int start) {
    int of_tokens[kAhead];  // pages, all before any of them is used
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int token = start + stream - of_warp_before + i * kStreams;
      of_tokens[i] = token < position ? dk::page_of(block_table, row, token >> page_bits, table_width, pages) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const long long place = place_in(of_tokens[i], start + stream - of_warp_before + i * kStreams);
      is_there[i] = of_tokens[i] >= 0;
      keys[i] = is_there[i] ? Row::load(k_pool + place) : Row{}, values[i] = is_there[i] ? Row::load(v_pool + place) : Row{};
    }
  };
  bring(of_warp_before);
  using Four = dk::Vec<float, kPerLane / 2>;  // of the lane's pairs
  const float* const angles = cos_sin + 1ll * max(position, 0) * kDim + first / 2;
  const Four cosines = Four::load(angles), sines = Four::load(angles + kDim / 2);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  float* const to = out + row * out_row + head * kGroup * kDim;
  if (position < 0) {
    for (int i = thread; rank == 0 && i < kGroup * kDim; i += 32 * kWarps) to[i] = 0.0f;
    if constexpr (kBlocks > 1) dk::wait_acquire_cluster();
    return;
  }
  // All that is read of the row, before any of it is used. The new token is one stream's, in its last turn.
  const float* const of_row = qkv + row * qkv_row + first;
  const bool has_new = position % kStreams / kOfWarp == rank * kWarps + warp;
  float q[kGroup][kPerLane], new_key[kPerLane], new_value[kPerLane];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) load_floats(of_row + (head * kGroup + g) * kDim, q[g]);
  if (has_new) {
    load_floats(of_row + (heads * kGroup + head) * kDim, new_key);
    load_floats(of_row + (heads * (kGroup + 1) + head) * kDim, new_value);
  }
  const auto turn = [&](float (&x)[kPerLane]) {
#pragma unroll
    for (int i = 0; i < kPerLane; i += 2) dk::turn(x[i], x[i + 1], cosines.elements[i / 2], sines.elements[i / 2]);
  };
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    turn(q[g]);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) q[g][i] *= scale * dk::kLog2e;
  }

  float sums[kGroup][kPerLane] = {}, maximum[kGroup], total[kGroup] = {};
  for (int g = 0; g < kGroup; ++g) maximum[g] = kLowest;
  const auto take = [&](const Row (&k)[kAhead], const Row (&v)[kAhead], const bool (&is)[kAhead]) {
    float logits[kAhead][kGroup];
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) dot = __fmaf_rn(q[g][i], dk::to_float(k[n].elements[i]), dot);
#pragma unroll
        for (int step = kLanes / 2; step; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
        logits[n][g] = is[n] ? dot : kLowest;
      }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      float most = maximum[g];
#pragma unroll
      for (int n = 0; n < kAhead; ++n) most = fmaxf(most, logits[n][g]);
      const float by = dk::exp2_approx(maximum[g] - most);
      maximum[g] = most, total[g] *= by;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sums[g][i] *= by;
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        const float p = is[n] ? dk::exp2_approx(logits[n][g] - most) : 0.0f;
        total[g] += p;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) sums[g][i] = __fmaf_rn(p, dk::to_float(v[n].elements[i]), sums[g][i]);
      }
    }
  };
  Row newest[2] = {};
  if (has_new) {
    turn(new_key);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      newest[0].elements[i] = dk::from_float<T>(new_key[i]), newest[1].elements[i] = dk::from_float<T>(new_value[i]);
    if (position % kStreams == stream) {
      const int page = dk::page_of(block_table, row, position >> page_bits, table_width, pages);
      const long long place = place_in(page, position);
      if (page >= 0) newest[0].store(k_pool + place), newest[1].store(v_pool + place);
    }
  }
  // The turns of a warp are those of its first stream: all its lanes meet in each.
  for (int start = of_warp_before; start <= position; start += kAhead * kStreams) {
    Row k[kAhead], v[kAhead];
    bool is[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool is_new = start + stream - of_warp_before + i * kStreams == position;
      k[i] = is_new ? newest[0] : keys[i], v[i] = is_new ? newest[1] : values[i], is[i] = is_new || is_there[i];
    }
    bring(start + kAhead * kStreams);
    take(k, v, is);
  }

  // Streams of a warp, warps, blocks: each time those of a larger maximum weigh more.
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      const float other = __shfl_xor_sync(~0u, maximum[g], step), most = fmaxf(maximum[g], other);
      const float by = dk::exp2_approx(maximum[g] - most), by_other = dk::exp2_approx(other - most);
      maximum[g] = most;
      total[g] = total[g] * by + __shfl_xor_sync(~0u, total[g], step) * by_other;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sums[g][i] = sums[g][i] * by + __shfl_xor_sync(~0u, sums[g][i], step) * by_other;
    }
  if (thread % 32 < kLanes)
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      for (int i = 0; i < kPerLane; ++i) of_warp[warp].sums[g][first + i] = sums[g][i];
      if (lane == 0) of_warp[warp].weights[g][0] = maximum[g], of_warp[warp].weights[g][1] = total[g];
    }
  __syncthreads();
  const auto merged = [&](const Part* parts, int count, int g, int i, float& most, float& below) {
    float sum = 0.0f;
    most = kLowest, below = 0.0f;
    for (int n = 0; n < count; ++n) most = fmaxf(most, parts[n].weights[g][0]);
    for (int n = 0; n < count; ++n) {
      const float by = dk::exp2_approx(parts[n].weights[g][0] - most);
      sum = __fmaf_rn(parts[n].sums[g][i], by, sum), below = __fmaf_rn(parts[n].weights[g][1], by, below);
    }
    return sum;
  };
  // Where blocks share a request, all send what they have to the first one, and only that waits.
  constexpr int kPairs = kGroup * kDim / 2;
  if constexpr (kBlocks > 1) {
    if (rank == 0 && thread == 0) dk::expect_relaxed_cluster(&all_here, 0, sizeof(of_block));
    dk::wait_acquire_cluster();  // the first block's mbarrier is there
  }
  float most, below;
  for (int i = thread; i < kPairs; i += 32 * kWarps) {
    const int g = 2 * i / kDim, at = 2 * i % kDim;
    const float even = merged(of_warp, kWarps, g, at, most, below), odd = merged(of_warp, kWarps, g, at + 1, most, below);
    if constexpr (kBlocks == 1) {
      to[2 * i] = __fdiv_rn(even, below), to[2 * i + 1] = __fdiv_rn(odd, below);
    } else {
      const auto send = [&](float* p, float first, float second) {
        dk::store_async_release_cluster_8(p, 0, {__float_as_uint(first), __float_as_uint(second)}, &all_here);
      };
      send(&of_block[rank].sums[g][at], even, odd);
      if (at == 0) send(&of_block[rank].weights[g][0], most, below);
    }
  }
  if constexpr (kBlocks > 1) {
    if (rank > 0) return;
    dk::wait_mbarrier_acquire_cluster(&all_here);
    for (int i = thread; i < kGroup * kDim; i += 32 * kWarps) {
      const float sum = merged(of_block, kBlocks, i / kDim, i % kDim, most, below);
      to[i] = __fdiv_rn(sum, below);
    }
  }
}
