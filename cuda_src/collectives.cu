// All-reduce, reduce-scatter, all-gather and barrier between ranks, of the parts that allreduce_rmsnorm.cu is made of.
//
// Of every kernel: parts, everywhere, stride, states, failures, rank, call_kind, limit_ns: see dk::Call; mailboxes: see
// dk::Mailboxes, at byte `mailboxes` of each part, of `capacity` rows. Arrays of virtual ranks lie one behind the other.

#include "dk/protocols.cuh"

namespace {

// Which rows, and which 16 bytes of them, a thread has: a row for each kCluster blocks.
template <typename T, int kCluster>
struct Share {
  int hidden, chunk, first, step;

  __device__ explicit Share(int hidden)
      : hidden(hidden),
        chunk(static_cast<int>(blockIdx.x % kCluster * blockDim.x + threadIdx.x)),
        first(blockIdx.x / kCluster),
        step(gridDim.x / kCluster) {}
  __device__ bool inside() const { return chunk * static_cast<int>(16 / sizeof(T)) < hidden; }
  __device__ long long at(long long row) const { return row * hidden + chunk * static_cast<int>(16 / sizeof(T)); }
  __device__ uint4 load(const T* x, long long row) const {
    return inside() ? dk::present<T>(*reinterpret_cast<const uint4*>(x + at(row))) : uint4{};
  }
  __device__ void store(T* out, long long row, uint4 words, bool failed) const {
    if (inside()) *reinterpret_cast<uint4*>(out + at(row)) = failed ? dk::nothing() : words;
  }
};

}  // namespace

// grid: (kCluster * rows at a time, 1 or ranks), block: 16 bytes of a row for each thread
// x, out: [tokens, hidden]
//
// out = sum over ranks of x_r, in rank order, in float, rounded to T
template <typename T, int kProtocol, bool kMulticast, int kRanks, int kCluster>
__global__ void __launch_bounds__(dk::kMostThreads<kRanks>, 1)
    allreduce(const T* x, T* out, int tokens, int hidden, long long mailboxes, int capacity,
                          unsigned char* parts, unsigned char* everywhere, long long stride, unsigned* states,
                          unsigned* failures, int rank, unsigned call_kind, long long limit_ns) {
  const Share<T, kCluster> share(hidden);
  const long long before = rank < 0 ? 1ll * blockIdx.y * tokens : 0;
  const auto own = [&](int token) { return share.load(x, before + token); };

  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  call.tell();
  const int row_bytes = hidden * static_cast<int>(sizeof(T));
  dk::Exchange<T, kProtocol, kRanks, kMulticast> exchange{{call, mailboxes, capacity, row_bytes, share.chunk},
                                                          share.inside()};
  exchange.send(share.first, share.step, tokens, own);
  for (int token = share.first; token < tokens; token += share.step) {
    const uint4 sum = exchange.reduced(token, own(token));
    share.store(out, before + token, sum, call.failed);
  }
  __syncthreads();
  if (threadIdx.x == 0) call.count();
  call.meet();
}

// grid: (kCluster * rows at a time, 1 or ranks), block: 16 bytes of a row for each thread
// x: [ranks, tokens, hidden], out: [tokens, hidden]
//
// out = sum over ranks r of x_r[rank], in rank order, in float, rounded to T. By mailboxes as of dk::kLamport.
template <typename T, int kProtocol, bool kMulticast, int kRanks, int kCluster>
__global__ void __launch_bounds__(dk::kMostThreads<kRanks>, 1)
    reduce_scatter(const T* x, T* out, int tokens, int hidden, long long mailboxes, int capacity,
                               unsigned char* parts, unsigned char* everywhere, long long stride, unsigned* states,
                               unsigned* failures, int rank, unsigned call_kind, long long limit_ns) {
  static_assert(kProtocol == dk::kLamport && !kMulticast, "each rank gets other rows");
  const Share<T, kCluster> share(hidden);
  const long long before = rank < 0 ? 1ll * blockIdx.y * tokens : 0;

  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  call.tell();
  const int row_bytes = hidden * static_cast<int>(sizeof(T));
  dk::Mailboxes<kRanks, false> boxes{call, mailboxes, capacity, row_bytes, share.chunk};
  const auto own = [&](int to, int token) { return share.load(x, before * kRanks + 1ll * to * tokens + token); };
  if (share.inside() && !call.failed)
    for (int token = share.first; token < tokens; token += share.step)
      for (int step = 1; step < kRanks; ++step) {
        const int to = (call.me + step) % kRanks;
        dk::store_relaxed_sys_16(call.part(to) + boxes.at(call.me, token), own(to, token));
      }
  for (int token = share.first; token < tokens; token += share.step) {
    const uint4 mine = own(call.me, token);
    uint4 words[kRanks] = {};
    if (share.inside() && !call.failed) boxes.take(words, token, false);
    share.store(out, before + token, dk::sum<T>(words, call.me, mine), call.failed);
  }
  __syncthreads();
  if (threadIdx.x == 0) call.count();
  call.meet();
}

// grid: (blocks, 1 or ranks), block: a thread for each 16 bytes at a time
// x: [n], out: [ranks, n], in 16 bytes; mailboxes of kPackets or kFlags
//
// out[r] = x_r, whatever the bits are
template <int kProtocol, bool kMulticast, int kRanks>
__global__ void all_gather(const void* x, void* out, int n, long long mailboxes, int capacity, unsigned char* parts,
                           unsigned char* everywhere, long long stride, unsigned* states, unsigned* failures, int rank,
                           unsigned call_kind, long long limit_ns) {
  static_assert(kProtocol == dk::kPackets || kProtocol == dk::kFlags, "others replace some words");
  const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;

  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  call.tell();
  const long long before = rank < 0 ? 1ll * blockIdx.y * n : 0;
  const uint4* const own = static_cast<const uint4*>(x) + before;
  uint4* const all = static_cast<uint4*>(out) + before * kRanks;
  const dk::Mailboxes<kRanks, kMulticast> boxes{call, mailboxes, capacity, 16, 0};
  for (int i = first; i < n; i += step) {
    const uint4 mine = own[i];
    if (kProtocol == dk::kPackets && !call.failed) dk::send_packets<kMulticast>(call, boxes.at(call.me, i, 2), mine);
    if (kProtocol == dk::kFlags && !call.failed) boxes.send(boxes.at(call.me, i), mine);
    all[1ll * call.me * n + i] = mine;
  }
  if (kProtocol == dk::kFlags) dk::meet_by_flags<kMulticast>(call);
  for (int i = first; i < n; i += step)
    for (int ahead = 1; ahead < kRanks; ++ahead) {
      const int from = (call.me + ahead) % kRanks;
      uint4 words{};
      if (kProtocol == dk::kFlags) {
        words = dk::load_weak_16(boxes.mine(from, i));
      } else {
        while (!call.failed && !dk::load_packets(boxes.mine(from, i, 2), call.number + 1, words))
          if (!call.again(from)) break;
      }
      all[1ll * from * n + i] = call.failed ? dk::nothing() : words;
    }
  __syncthreads();
  if (threadIdx.x == 0) call.count();
  call.meet();
}

// grid: (1, 1 or ranks), block: a warp
//
// Ends when all ranks have begun. What kernels before it wrote, to any rank, is seen by kernels behind it of all ranks.
template <int kRanks>
__global__ void barrier(unsigned char* parts, unsigned char* everywhere, long long stride, unsigned* states,
                        unsigned* failures, int rank, unsigned call_kind, long long limit_ns) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  __threadfence_system();
  call.tell();
  __syncthreads();
  if (threadIdx.x == 0) call.count();
  call.meet();
  __threadfence_system();
}
