// The tokens of a step, few of them, times a matrix of weights: bound by reading the weights once.
//
// A warp-wide product has 16 tokens as its rows and 8 weight rows as its columns. In which order it takes its inputs is
// free, as long as both factors have the same one: so what a lane brings of a weight row, 16 bytes, is its share of two
// products as it is. No other lane reads it, and no barrier stands between a copy and its use.
//
// The inputs of a block are dealt, 32 at a time, to four groups of warps, so a block reads 256 bytes of each of its rows
// at a time. A group has a warp for every 32 rows. What they have made is added up in the order of groups; where there are
// too few rows for all multiprocessors the blocks of a cluster share the inputs, and are added up in the order of their
// ranks. Nothing of this depends on the number of tokens.

#include "dk/async_copy.cuh"
#include "dk/memory_order.cuh"
#include "dk/mma.cuh"
#include "dk/vec.cuh"

namespace {

constexpr int kGroups = 4;
constexpr int kStep = 32;  // inputs of a warp at a time
constexpr int kRound = kGroups * kStep;
constexpr int kRows = 32;  // weight rows of a warp
constexpr int kChunk = 2 * kRound;   // inputs of tokens that a block brings at a time
constexpr int kPieces = kChunk / 8;  // of 16 bytes, of a token
constexpr int kChunks = 3;           // in shared memory: one that is used, and two on their way

template <int kTokens>
struct Tile {
  static constexpr int kWarps = kTokens <= 16 ? 2 : 4;  // of a group: the more, the less often tokens are read
  static constexpr int kThreads = 32 * kGroups * kWarps;
  static constexpr int kDepth = kTokens <= 16 ? 4 : 3;  // steps whose weights are on their way: 64 KiB of a block, or 96
  static constexpr int kQuads = kTokens / 4;            // of a lane's results: four rows of a token
  // Where things are in shared memory, in pieces of 16 bytes: tokens and weights, and in the end what groups have
  // made instead; what the blocks of the cluster have made.
  static constexpr int kWeights = kChunks * kTokens * kPieces;
  static constexpr int kReceived = kWeights + kDepth * 4 * kThreads;
};

}  // namespace

// grid: (splits, ceil(tokens / kTokens), ceil(outputs / rows)), in clusters of (splits, 1, 1), splits 1, 2, 4 or 8; for up to
// 16 tokens rows are 64, block 256, shared 94208; for 32 and 64 tokens 128, 512, 163840 and 229376
// x: [tokens, inputs], out: [tokens, outputs], token by token `_row` elements on; weight: [outputs, inputs]
//
// out[t][n] = Out(sum over k of x[t][k] * weight[n][k])
//
// inputs and outputs are multiples of 8, all addresses and strides of 16 bytes. out overlaps neither x nor weight.
template <typename Out, int kTokens>
__global__ void __launch_bounds__(Tile<kTokens>::kThreads, kTokens <= 16 ? 2 : 1)
    linear(const __nv_bfloat16* x, const __nv_bfloat16* weight, Out* out, int tokens, int inputs, int outputs,
           long long x_row, long long out_row) {
  static_assert(kTokens % 16 == 0 && kTokens <= 64, "products have 16 tokens; a lane has registers for 64");
  using Shape = Tile<kTokens>;
  constexpr int kWarps = Shape::kWarps, kThreads = Shape::kThreads, kDepth = Shape::kDepth, kQuads = Shape::kQuads;
  static_assert(kGroups * kWarps * kQuads * 32 <= Shape::kReceived, "what groups have made is where the rest was");
  extern __shared__ uint4 shared[];
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const int splits = gridDim.x, rank = blockIdx.x;
  if (splits > 1) dk::arrive_relaxed_cluster();

  const int thread = threadIdx.x, lane = thread % 32, group = thread / 32 % kGroups, warp = thread / 32 / kGroups;
  const int r = lane / 4, c = lane % 4;  // see dk/mma.cuh
  const int first_token = blockIdx.y * kTokens;
  const int rounds = (inputs + kRound - 1) / kRound;
  const int begin = rounds * rank / splits * kRound, end = min(rounds * (rank + 1) / splits * kRound, inputs);
  const unsigned base = dk::shared_address(shared);

  // Of each token a thread brings the same piece. Of tokens with odd numbers pieces change places with those four on: so a
  // quarter of a warp finds its pieces, four of two tokens each, in different banks.
  constexpr int kTokensAtOnce = kThreads / kPieces;
  static_assert(kTokensAtOnce % 2 == 0, "the tokens of a thread have all odd numbers, or all even ones");
  const auto bring_tokens = [&](int k, int buffer) {
    const int of_thread = thread / kPieces, piece = thread % kPieces;
    const int to = (buffer * kTokens + of_thread) * kPieces + (piece ^ of_thread % 2 * 4);
    k += 8 * piece;
#pragma unroll 1
    for (int i = 0; i < kTokens; i += kTokensAtOnce) {
      const int token = first_token + of_thread + i;
      const bool exists = token < tokens && k < end;
      dk::copy_async_16(base + (to + i * kPieces) * 16, exists ? x + token * x_row + k : x, exists ? 16 : 0);
    }
  };
  // Of product i column j is row 4 * (j / 2) + 16 * (j % 2) + i of the warp, so that a lane has results of four rows side by
  // side, as have those beside it. Of the last block some rows are not there: it reads others, and writes nothing. Behind
  // the last input weights are 0, as tokens are: what is not a number times 0 would not be 0.
  const unsigned long long policy = dk::evict_first();
  const int row = min((blockIdx.z * kWarps + warp) * kRows + r / 2 * 4 + r % 2 * 16, outputs - 4);
  const __nv_bfloat16* const rows = weight + static_cast<long long>(row) * inputs;
  const uint4* const tokens_of_lane = shared + r * kPieces + ((group * 4 + c) ^ r % 2 * 4);
  const auto bring_weights = [&](int k, int slot) {
    k += group * kStep + 8 * c;
    const int to = Shape::kWeights + slot * 4 * kThreads + thread;
    for (int i = 0; i < 4; ++i)
      dk::copy_async_16(base + (to + i * kThreads) * 16, k < end ? rows + i * inputs + k : weight, k < end ? 16 : 0, policy);
  };

  bring_tokens(begin, 0);
  bring_tokens(begin + kChunk, 1);
#pragma unroll 1
  for (int step = 0; step < kDepth; ++step) {
    bring_weights(begin + step * kRound, step);
    dk::commit_copies();
  }
  static_assert(kDepth * kRound <= 2 * kChunk, "who waits for the weights of a step has the tokens of its chunk");
  float sums[kTokens / 16][4][4] = {};
  int slot = 0, buffer = 0;
  for (int k = begin; k < end; k += kChunk) {
#pragma unroll 1
    for (int step = 0; step < kChunk / kRound; ++step) {
      dk::wait_for_copies<kDepth - 1>();
      if (step == 0) {
        __syncthreads();
        bring_tokens(k + 2 * kChunk, buffer ? buffer - 1 : kChunks - 1);  // where the chunk before was; all have left it
      }
      uint4 w[4];
      for (int i = 0; i < 4; ++i) w[i] = shared[Shape::kWeights + (slot * 4 + i) * kThreads + thread];
      const uint4* const pieces = tokens_of_lane + buffer * kTokens * kPieces + step * (kRound / 8);
#pragma unroll
      for (int j = 0; j < kTokens / 16; ++j) {
        const uint4 low = pieces[16 * j * kPieces], high = pieces[(16 * j + 8) * kPieces];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dk::mma<__nv_bfloat16>(sums[j][i], {low.x, high.x, low.y, high.y}, {w[i].x, w[i].y});
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dk::mma<__nv_bfloat16>(sums[j][i], {low.z, high.z, low.w, high.w}, {w[i].z, w[i].w});
      }
      bring_weights(k + (step + kDepth) * kRound, slot);
      dk::commit_copies();
      slot = slot + 1 < kDepth ? slot + 1 : 0;
    }
    buffer = buffer + 1 < kChunks ? buffer + 1 : 0;
  }
  dk::wait_for_copies<0>();  // of zeros

  // Each warp adds up some of the results, by fours: a lane those of four rows of a token. A block of a cluster gives each
  // block what it has of some of them, and adds up its own.
  float4* const parts = reinterpret_cast<float4*>(shared);
  __syncthreads();  // all have left the last chunk
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const float(&of)[4][4] = sums[q / 4];
    const int part = (group * kWarps + warp) * kQuads + q;
    parts[part * 32 + lane] = {of[0][q % 4], of[1][q % 4], of[2][q % 4], of[3][q % 4]};
  }
  __syncthreads();
  const auto added = [&](const float4* first, int count, int distance) -> float4 {
    float4 total = first[0];
    for (int i = 1; i < count; ++i) {
      const float4 next = first[i * distance];
      total.x += next.x, total.y += next.y, total.z += next.z, total.w += next.w;
    }
    return total;
  };
  const auto store = [&](int part, float4 total) {
    const int q = part % kQuads, token = first_token + q / 4 * 16 + q % 4 / 2 * 8 + r;
    const int row = (blockIdx.z * kWarps + part / kQuads) * kRows + q % 2 * 16 + 4 * c;
    if (token >= tokens || row >= outputs) return;
    const dk::Vec<Out, 4> made = {dk::from_float<Out>(total.x), dk::from_float<Out>(total.y),
                                  dk::from_float<Out>(total.z), dk::from_float<Out>(total.w)};
    made.store(out + token * out_row + row);
  };
  constexpr int kParts = kWarps * kQuads;
  const int number = thread / 32, of_block = kParts / splits;
  if (splits > 1) dk::wait_acquire_cluster();  // all have begun
#pragma unroll 1
  for (int part = number; part < kParts; part += kThreads / 32) {
    const float4 total = added(parts + part * 32 + lane, kGroups, kParts * 32);
    if (splits == 1) {
      store(part, total);
    } else {
      const int to = Shape::kReceived + (rank * of_block + part % of_block) * 32 + lane;
      dk::store_shared_cluster_16(base + to * 16, part / of_block, reinterpret_cast<const uint4&>(total));
    }
  }
  if (splits == 1) return;
  dk::meet_acq_rel_cluster();
#pragma unroll 1
  for (int i = number; i < of_block; i += kThreads / 32)
    store(rank * of_block + i, added(parts + Shape::kReceived + i * 32 + lane, splits, of_block * 32));
}
