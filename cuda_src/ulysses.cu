// The two exchanges of Ulysses: each rank has some tokens of all heads before, and all tokens of some heads after, and back.
//
// Rank j has tokens [first_token(j), first_token(j) + tokens(j)) and query heads [first_head(j), first_head(j) + heads(j)).
// Local key head i of rank r is head (first_head(r) + i * per_key(r)) / group of all, where `group` query heads share one:
// per_key(r) query heads of the rank, one behind the other, use it. A key head may go to several ranks.
//
//   to_heads   q_r[first_token(j) + t, h] = q of j [t, first_head(r) + h], and keys and values in the same way
//   to_tokens  o_r[t, first_head(j) + h] = o of j [first_token(r) + t, h]
//
// kPackets   what is sent goes by mailboxes, each word beside the number of the call: one flight, twice the bytes.
// kFlags     what is sent goes to its place. A rank sends when the receiver has begun the call, for then whoever read what
//            was there has ended; a flag of each block follows.
//
// Results lie in symmetric memory. Of every kernel: parts, everywhere, stride, states, failures, rank, call_kind,
// limit_ns: see dk::Call; mailboxes: [dk::kGenerations, ranks, capacity] of 32 bytes. Units are of 16 bytes.

#include "dk/protocols.cuh"

namespace {

constexpr int kAtOnce = 4;  // units that a thread has in flight

// What the ranks have, in order; heads of keys and values alike.
struct Ranks {
  int first_token[dk::kMostRanks], tokens[dk::kMostRanks];
  int first_head[dk::kMostRanks], heads[dk::kMostRanks], key_heads[dk::kMostRanks], per_key[dk::kMostRanks];
};

// A tensor of a rank: where it begins, and units from token to token; heads are contiguous.
struct Tokens {
  const uint4* begin;
  long long row;
};

// Both ways are told by three functions of what rank `from` sends to rank `to`: how many units; where unit i is in the
// sender's memory; where it goes, in bytes of the receiver's part.
struct ToHeads {
  const Ranks& ranks;
  Tokens q, k, v;
  long long q_at, k_at, v_at;  // results, [all tokens, heads of the rank, dim]
  int group, units;            // query heads that share a key head; of a head

  __device__ int count(int from, int to) const {
    return ranks.tokens[from] * (ranks.heads[to] + 2 * ranks.key_heads[to]) * units;
  }
  __device__ uint4 load(int, int to, int i, int tokens) const {
    const int of_q = tokens * ranks.heads[to] * units, of_k = tokens * ranks.key_heads[to] * units;
    const bool query = i < of_q, value = i >= of_q + of_k;
    i -= query ? 0 : value ? of_q + of_k : of_q;
    const int of_row = (query ? ranks.heads[to] : ranks.key_heads[to]) * units;
    const int row = i / of_row, in_row = i % of_row, head = in_row / units;
    const int source = query ? ranks.first_head[to] + head : (ranks.first_head[to] + head * ranks.per_key[to]) / group;
    const uint4* const begin = query ? q.begin : value ? v.begin : k.begin;
    const long long to_row = row * (query ? q.row : value ? v.row : k.row);
    return begin[to_row + source * units + in_row % units];
  }
  __device__ long long place(int from, int to, int i) const {
    const int of_q = ranks.tokens[from] * ranks.heads[to] * units, of_k = ranks.tokens[from] * ranks.key_heads[to] * units;
    const long long before = ranks.first_token[from];
    if (i < of_q) return q_at + (before * ranks.heads[to] * units + i) * 16;
    const bool value = i >= of_q + of_k;
    return (value ? v_at : k_at) + (before * ranks.key_heads[to] * units + i - of_q - (value ? of_k : 0)) * 16;
  }
};

struct ToTokens {
  const Ranks& ranks;
  Tokens o;
  long long o_at;    // the result, [tokens of the rank, all heads, dim]
  int heads, units;  // of all ranks; of a head

  __device__ int count(int from, int to) const { return ranks.tokens[to] * ranks.heads[from] * units; }
  __device__ uint4 load(int from, int to, int i, int) const {
    const int of_row = ranks.heads[from] * units;
    return o.begin[(ranks.first_token[to] + i / of_row) * o.row + i % of_row];
  }
  __device__ long long place(int from, int, int i) const {
    const int of_row = ranks.heads[from] * units;
    return o_at + (1ll * (i / of_row) * heads * units + ranks.first_head[from] * units + i % of_row) * 16;
  }
};

template <int kProtocol, int kRanks, class Way>
__device__ void exchange(const Way& way, dk::Call<kRanks>& call, long long mailboxes, int capacity) {
  static_assert(kProtocol == dk::kPackets || kProtocol == dk::kFlags, "others replace some words");
  const int me = call.me, thread = threadIdx.x;
  const int first = blockIdx.x * blockDim.x + thread, step = gridDim.x * blockDim.x;
  const auto put = [&](int from, int to, int i, uint4 words) {
    *reinterpret_cast<uint4*>(call.part(to) + way.place(from, to, i)) = words;
  };
  const auto send = [&](int to) {
    const int count = way.count(me, to), tokens = way.ranks.tokens[me];
    for (int i = first; i < count; i += kAtOnce * step) {
      uint4 words[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * step < count) words[j] = way.load(me, to, i + j * step, tokens);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * step < count) put(me, to, i + j * step, words[j]);
    }
  };

  if constexpr (kProtocol == dk::kPackets) {
    const dk::Mailboxes<kRanks, false> boxes{call, mailboxes, capacity, 16, 0};
    for (int ahead = 1; ahead < kRanks && !call.failed; ++ahead) {
      const int to = (me + ahead) % kRanks, count = way.count(me, to);
      for (int i = first; i < count; i += step)
        dk::store_packets(call.part(to) + boxes.at(me, i, 2), call.number + 1,
                          way.load(me, to, i, way.ranks.tokens[me]));
    }
    send(me);
    for (int ahead = 1; ahead < kRanks; ++ahead) {
      const int from = (me + ahead) % kRanks, count = way.count(from, me);
      for (int i = first; i < count; i += step) {
        uint4 words{};
        while (!call.failed && !dk::load_packets(boxes.mine(from, i, 2), call.number + 1, words))
          if (!call.again(from)) break;
        put(from, me, i, call.failed ? dk::nothing() : words);
      }
    }
    __syncthreads();
  } else {
    // Blocks begin with different ranks, so that what is for this one is copied while the wire is busy.
    bool all_have_begun = false;
    call.failed = __syncthreads_or(call.failed);  // some threads may know it before others
    for (int i = 0; i < kRanks && !call.failed; ++i) {
      const int to = (me + 1 + (blockIdx.x + i) % kRanks) % kRanks;
      if (to != me && !all_have_begun) {
        if (thread < kRanks && thread != me) {
          while (!call.has_come(thread))
            if (!call.again(thread)) break;
          int by, waited_for;  // who has begun may have failed since: what it has now is to stay
          if (!call.failed && call.aborted(by, waited_for)) call.fail(dk::kAborted, waited_for, by);
        }
        call.failed = __syncthreads_or(call.failed);
        all_have_begun = true;
      }
      if (!call.failed) send(to);
    }
    dk::meet_by_flags<false>(call);
    for (int from = 0; from < kRanks && call.failed; ++from)
      for (int i = first; i < way.count(from, me); i += step) put(from, me, i, dk::nothing());
  }
  if (thread == 0) call.count();
  call.meet();
}

}  // namespace

// grid: (blocks, 1 or ranks), block: a thread for each unit at a time
// q: [tokens, heads, dim], k, v: [tokens, heads / group, dim], heads contiguous, token by token `_row` units on; those of
// virtual ranks `_rank` units on
template <int kProtocol, int kRanks>
__global__ void ulysses_to_heads(const void* q, const void* k, const void* v, long long q_row, long long k_row,
                                 long long v_row, long long q_rank, long long k_rank, long long v_rank, const __grid_constant__ Ranks ranks,
                                 long long q_at, long long k_at, long long v_at, int group, int units,
                                 long long mailboxes, int capacity, unsigned char* parts, unsigned char* everywhere,
                                 long long stride, unsigned* states, unsigned* failures, int rank, unsigned call_kind,
                                 long long limit_ns) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  call.tell();
  const auto own = [&](const void* x, long long row, long long of_rank) -> Tokens {
    return {static_cast<const uint4*>(x) + (rank < 0 ? call.me * of_rank : 0), row};
  };
  const ToHeads way{ranks, own(q, q_row, q_rank), own(k, k_row, k_rank), own(v, v_row, v_rank), q_at, k_at, v_at, group,
                    units};
  exchange<kProtocol, kRanks>(way, call, mailboxes, capacity);
}

// grid: (blocks, 1 or ranks), block: a thread for each unit at a time
// o: [all tokens, heads of the rank, dim], heads contiguous, token by token `row` units on; those of virtual ranks `of_rank`
// units on; heads: of all ranks
template <int kProtocol, int kRanks>
__global__ void ulysses_to_tokens(const void* o, long long row, long long of_rank, const __grid_constant__ Ranks ranks,
                                  long long o_at, int heads, int units, long long mailboxes, int capacity, unsigned char* parts,
                                  unsigned char* everywhere, long long stride, unsigned* states, unsigned* failures,
                                  int rank, unsigned call_kind, long long limit_ns) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  dk::Call<kRanks> call(parts, everywhere, stride, states, failures, rank, call_kind, limit_ns);
  call.tell();
  const ToTokens way{ranks, {static_cast<const uint4*>(o) + (rank < 0 ? call.me * of_rank : 0), row}, o_at, heads, units};
  exchange<kProtocol, kRanks>(way, call, mailboxes, capacity);
}
