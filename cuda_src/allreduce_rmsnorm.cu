// All-reduce between ranks, residual and RMSNorm in one kernel.
//
// x = sum over ranks of x_r, in rank order, in float, rounded to T; h = x + residual, rounded to T;
// out = h * rsqrt(mean(h^2) + eps) * weight, for an 8-bit Out divided by *out_scale. Every rank gets the same bits,
// whatever the protocol (dk/protocols.cuh).

#include "dk/fp8.cuh"
#include "dk/protocols.cuh"

constexpr int kMostWarps = 256;  // of a row: 8 blocks of 1024 threads

template <typename T>
__device__ T not_a_number() {
  return dk::from_float<T>(__int_as_float(0x7fffffff));
}

// grid: (kCluster * clusters, 1 or ranks), cluster: kCluster blocks, block: 16 bytes of a row for each thread
// x, residual, out, residual_out: [tokens, hidden], of virtual ranks one behind the other; weight: [hidden]; out_scale: [1]
// for 8-bit Out, else unused
// parts, everywhere, stride, states, failures, rank, call_kind, limit_ns: see dk::Call
// mailboxes: see dk::Mailboxes; at byte `mailboxes` of each part, of `capacity` rows
template <typename T, typename Out, int kProtocol, bool kMulticast, int kRanks, int kCluster>
__global__ void __launch_bounds__(dk::kMostThreads<kRanks>, 1)
    allreduce_rmsnorm(const T* x, const T* residual, const T* weight, Out* out, T* residual_out,
                                  const float* out_scale, float eps, int tokens, int hidden, long long mailboxes, int capacity,
                                  unsigned char* parts, unsigned char* everywhere, long long stride, unsigned* states,
                                  unsigned* failures, int rank, unsigned call_kind, long long limit_ns) {
  constexpr int kElements = 16 / sizeof(T);
  using Row = dk::Vec<T, kElements>;
  __shared__ float sums[2][kMostWarps];  // of the squares of each warp of the row; every block has all of them
  const int thread = threadIdx.x, lane = thread % 32;
  const int warps = blockDim.x / 32 * kCluster;
  const int part_of_row = kCluster > 1 ? blockIdx.x % kCluster : 0;
  const int chunk = part_of_row * blockDim.x + thread;
  const bool inside = chunk * kElements < hidden;
  const int first = blockIdx.x / kCluster, clusters = gridDim.x / kCluster;
  const long long before = rank < 0 ? 1ll * blockIdx.y * tokens : 0;  // rows of other virtual ranks
  const auto at = [&](int token) { return (before + token) * hidden + chunk * kElements; };
  const auto own = [&](int token) {
    return inside ? dk::present<T>(*reinterpret_cast<const uint4*>(x + at(token))) : uint4{};
  };

  if constexpr (kCluster > 1) dk::arrive_relaxed_cluster();
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  call.tell();
  const int row_bytes = hidden * static_cast<int>(sizeof(T));
  dk::Exchange<T, kProtocol, kRanks, kMulticast> exchange{{call, mailboxes, capacity, row_bytes, chunk}, inside};
  exchange.send(first, clusters, tokens, own);
  if constexpr (kCluster > 1) dk::wait_acquire_cluster();  // all have begun

  int turn = 0;
  for (int token = first; token < tokens; token += clusters, turn ^= 1) {
    Row old = {}, scale = {};
    const uint4 mine = own(token);
    if (inside) old = Row::load(residual + at(token)), scale = Row::load(weight + chunk * kElements);
    const uint4 words = exchange.reduced(token, mine);
    const Row& reduced = reinterpret_cast<const Row&>(words);

    Row h;
    float squares = 0.0f;  // of what is stored
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float sum = dk::to_float(reduced.elements[i]) + dk::to_float(old.elements[i]);
      h.elements[i] = call.failed ? not_a_number<T>() : dk::from_float<T>(sum);
      const float value = inside ? dk::to_float(h.elements[i]) : 0.0f;
      squares += value * value;
    }
    if (inside) h.store(residual_out + at(token));

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
    if (thread == 0 && token == first) call.count();
    float total = 0.0f;
    for (int w = lane; w < warps; w += 32) total += sums[turn][w];
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const float by = rsqrtf(total / hidden + eps);
    if (inside) {
      float y[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) y[i] = dk::to_float(h.elements[i]) * by * dk::to_float(scale.elements[i]);
      if constexpr (sizeof(Out) == 1) {
        *reinterpret_cast<dk::E4m3<kElements>*>(out + at(token)) = dk::quantised(y, *out_scale);
      } else {
        Row made;
#pragma unroll
        for (int i = 0; i < kElements; ++i) made.elements[i] = dk::from_float<T>(y[i]);
        made.store(out + at(token));
      }
    }
  }
  call.meet();
}
