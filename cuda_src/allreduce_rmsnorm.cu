// All-reduce between ranks, residual and RMSNorm in one kernel.
//
// x = sum over ranks of x_r, in rank order, in float, rounded to T; h = x + residual, rounded to T;
// out = h * rsqrt(mean(h^2) + eps) * weight. Every rank gets the same bits.
//
// Lamport: each rank stores its row into a mailbox of every other rank, and reads its own mailboxes until no word there
// is kAbsent any more. Who has read a mailbox makes it kAbsent again. A word that is kAbsent itself is replaced before it
// is sent: for 16-bit types it is the pair (-0, -0), which becomes (+0, +0), for float a subnormal number that becomes its
// neighbour.
//
// Mailboxes go round in three generations, by the number of the call. A rank in call k has got what all others sent in
// call k - 1, so these have finished call k - 2, and with it made the mailboxes of k - 2 empty: those of k + 1.

#include "dk/ranks.cuh"
#include "dk/vec.cuh"

constexpr unsigned kAbsent = 0x80008000u;
constexpr int kGenerations = 3;
constexpr int kMostWarps = 256;  // of a row: 8 blocks of 1024 threads

__device__ inline bool lacks(uint4 v) { return v.x == kAbsent || v.y == kAbsent || v.z == kAbsent || v.w == kAbsent; }

template <typename T>
__device__ unsigned present(unsigned word) {
  return word != kAbsent ? word : sizeof(T) == 4 ? kAbsent + 1 : 0u;
}

template <typename T>
__device__ T not_a_number() {
  return dk::from_float<T>(__int_as_float(0x7fffffff));
}

// grid: (kCluster * clusters, 1 or ranks), cluster: kCluster blocks, block: 16 bytes of a row for each thread
// x, residual, out, residual_out: [tokens, hidden], of virtual ranks one behind the other; weight: [hidden]
// parts: calls [kGenerations, ranks] of 8 bytes, then at byte `mailboxes` [kGenerations, ranks, capacity, row_bytes]
// state, failure: of this rank; of virtual ranks one behind the other
//
// rank is -1 for virtual ranks: then it is blockIdx.y. call_kind tells calls of different shapes apart.
template <typename T, int kRanks, int kCluster>
__global__ void allreduce_rmsnorm(const T* x, const T* residual, const T* weight, T* out, T* residual_out,
                                  unsigned char* parts, long long stride, int mailboxes, unsigned* state_words,
                                  unsigned* failure_words, int rank, int tokens, int hidden, int capacity, int row_bytes,
                                  unsigned call_kind, long long limit_ns, float eps) {
  constexpr int kElements = 16 / sizeof(T);
  using Row = dk::Vec<T, kElements>;
  __shared__ float sums[2][kMostWarps];  // of the squares of each warp of the row; every block has all of them
  const int thread = threadIdx.x, lane = thread % 32;
  const int warps = blockDim.x / 32 * kCluster;
  const int part_of_row = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const int chunk = part_of_row * blockDim.x + thread;
  const bool inside = chunk * kElements < hidden;
  const int virtual_rank = rank < 0 ? blockIdx.y : 0, me = rank < 0 ? blockIdx.y : rank;
  const dk::Parts all{parts, stride};
  dk::State* state = reinterpret_cast<dk::State*>(state_words) + virtual_rank;
  dk::Failure* failure = reinterpret_cast<dk::Failure*>(failure_words) + virtual_rank;

  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const unsigned call = dk::load_relaxed_gpu(&state->calls);
  bool failed = dk::load_relaxed_gpu(&state->failed) != 0;
  const int generation = call % kGenerations;
  dk::Deadline deadline(limit_ns);

  // What kind of call this is, for the others.
  const unsigned long long kind = static_cast<unsigned long long>(call + 1) << 32 | call_kind;
  const bool tells = blockIdx.x == 0 && thread < kRanks && thread != me;
  if (tells && !failed) dk::store_relaxed_sys_8(all.of(thread) + (generation * kRanks + me) * 8, kind);

  const auto mailbox = [&](int owner, int from, int token) -> unsigned char* {
    const long long slot = (1ll * generation * kRanks + from) * capacity + token;
    return all.of(owner) + mailboxes + slot * row_bytes + chunk * 16;
  };

  const int clusters = gridDim.x / kCluster;
  int turn = 0;
  bool counted = false;
  for (int token = blockIdx.x / kCluster; token < tokens; token += clusters, turn ^= 1) {
    const long long at = (1ll * virtual_rank * tokens + token) * hidden + chunk * kElements;
    uint4 words[kRanks] = {};
    Row old = {}, scale = {};
    uint4 mine = inside ? *reinterpret_cast<const uint4*>(x + at) : uint4{};
    mine = {present<T>(mine.x), present<T>(mine.y), present<T>(mine.z), present<T>(mine.w)};
    if (inside && !failed) {
#pragma unroll
      for (int step = 1; step < kRanks; ++step) {
        const int peer = (me + step) % kRanks;  // each at a time by one
        dk::store_relaxed_sys_16(mailbox(peer, me, token), mine);
      }
    }
    if (inside) old = Row::load(residual + at), scale = Row::load(weight + chunk * kElements);
    if (inside && !failed) {
      bool there = false;
      while (!there) {
        there = true;
#pragma unroll
        for (int from = 0; from < kRanks; ++from)
          if (from != me) words[from] = dk::load_relaxed_sys_16(mailbox(me, from, token));
#pragma unroll
        for (int from = 0; from < kRanks; ++from) there &= from == me || !lacks(words[from]);
        if (!there && !deadline.again()) {
          for (int from = 0; from < kRanks; ++from)
            if (from != me && lacks(words[from])) dk::fail(state, failure, dk::kTimedOut, call, from, 0);
          failed = there = true;
        }
      }
#pragma unroll
      for (int from = 0; from < kRanks; ++from)
        if (from != me && !failed)
          *reinterpret_cast<uint4*>(mailbox(me, from, token)) = {kAbsent, kAbsent, kAbsent, kAbsent};
    }

    // The row: the sum in rank order, the residual, and the square of what is stored.
    float sum[kElements] = {}, squares = 0.0f;
    Row h;
#pragma unroll
    for (int from = 0; from < kRanks; ++from) {
      const uint4 given = from == me ? mine : words[from];
      const Row& row = reinterpret_cast<const Row&>(given);
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[i] += dk::to_float(row.elements[i]);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float reduced = dk::to_float(dk::from_float<T>(sum[i]));
      h.elements[i] = failed ? not_a_number<T>() : dk::from_float<T>(reduced + dk::to_float(old.elements[i]));
      const float value = inside ? dk::to_float(h.elements[i]) : 0.0f;
      squares += value * value;
    }
    if (inside) h.store(residual_out + at);

    // The same order for any number of blocks: lanes, then warps.
    for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    float* const sum_of_warp = &sums[turn][chunk / 32];
    if constexpr (kCluster > 1) {
      if (lane < kCluster) dk::store_shared_cluster(sum_of_warp, lane, squares);
      dk::meet_acq_rel_cluster();
    } else {
      if (lane == 0) *sum_of_warp = squares;
      __syncthreads();
    }
    if (thread == 0 && !counted) {  // all threads of the block know the number of the call
      counted = true;
      if (dk::count_relaxed_gpu(&state->arrived, gridDim.x - 1) == gridDim.x - 1)
        dk::store_relaxed_gpu(&state->calls, call + 1);
    }
    float total = 0.0f;
    for (int w = lane; w < warps; w += 32) total += sums[turn][w];
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const float by = rsqrtf(total / hidden + eps);
    if (inside) {
      Row y;
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        y.elements[i] = dk::from_float<T>(dk::to_float(h.elements[i]) * by * dk::to_float(scale.elements[i]));
      y.store(out + at);
    }
  }

  // Nobody goes on before all others have made this call too, and it was the same.
  if (tells && !failed) {
    for (;;) {
      const unsigned long long seen = dk::load_relaxed_sys_8(all.of(me) + (generation * kRanks + thread) * 8);
      if (seen == kind) break;
      const bool other = static_cast<int>((seen >> 32) - (call + 1)) >= 0;
      if (!other && deadline.again()) continue;
      dk::fail(state, failure, other ? dk::kOtherCall : dk::kTimedOut, call, thread, seen);
      break;
    }
  }
}
