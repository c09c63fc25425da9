// What kernels of several ranks share: where each rank's part of symmetric memory is, the number and kind of a call, and
// waits that end.
//
// Calls of a group have numbers, and what they send goes round in three generations by it. Every rank tells every other
// what call it makes, and ends none before it was told by all. So who is in call k has got all of call k - 1 from the
// others; these have finished call k - 2, and nobody reads what was sent in it any more: call k + 1 may write there.
//
// A wait that its deadline ends tells the host what it waited for, and the other ranks that there will be nothing more,
// and lets the kernel go on. Its results are NaN where they can be, and every later call of this rank ends at once, until
// the host resets the group.

#pragma once

#include "memory_order.cuh"

namespace dk {

constexpr int kMostRanks = 8, kGenerations = 3;
constexpr unsigned kCalls = 3u << 30;  // numbers of calls, a multiple of kGenerations: behind the last comes 0
__device__ inline unsigned number_behind(unsigned number) { return number + 1 == kCalls ? 0 : number + 1; }

// How each rank's part begins. Others write it, by sys-scope accesses.
struct Lines {
  unsigned long long calls[kGenerations][kMostRanks];  // the number of each rank's call and 1 more, above its kind
  unsigned aborts[kMostRanks];                         // who has failed: for which rank it waited, and 1 more
  unsigned unused[kMostRanks];
  unsigned flags[1][kMostRanks];  // of each block: which calls' data are there, by number and 1 more
};

// Of one rank, in its own memory, in words. A call reads `calls` before it counts itself in `arrived`; the last block
// that does makes it the next call's number.
struct State {
  unsigned calls, arrived, failed, unused;
};

// Why a call failed: a rank did not come, it made a call of another kind, or it has told that it failed.
constexpr unsigned kTimedOut = 1, kOtherCall = 2, kAborted = 3;

// What the host reads, in page-locked memory: written once, by whoever finds the first failure. `rank` was waited for in
// vain, by `by`: this rank, or the one that told of it.
struct Failure {
  unsigned code, call, rank, by, block, thread, seen_call, seen_kind;
};

// What stands where nothing came: a NaN of every type that has one, -1 of integers.
__device__ inline uint4 nothing() { return {~0u, ~0u, ~0u, ~0u}; }

// A call of a group, as a thread sees it. Most of it are the kernel's parameters, which take no registers.
template <int kRanks>
struct Call {
  unsigned char* parts;       // rank r's part begins at parts + r * stride
  unsigned char* everywhere;  // what is stored here by multimem goes to all parts; null without multicast
  long long stride;
  State* states;  // of the ranks of this launch
  Failure* failures;
  bool is_virtual;
  unsigned call_kind;
  unsigned long long limit_ns, begun_ns = 0;
  int me;
  unsigned number, tries = 0;
  bool failed;

  // After wait_for_kernels_before(): another call may change the state before it. `rank` is -1 for virtual ranks: then it
  // is blockIdx.y.
  __device__ Call(unsigned char* parts, unsigned char* everywhere, long long stride, unsigned* states,
                  unsigned* failures, int rank, unsigned call_kind, long long limit_ns)
      : parts(parts),
        everywhere(everywhere),
        stride(stride),
        states(reinterpret_cast<State*>(states)),
        failures(reinterpret_cast<Failure*>(failures)),
        is_virtual(rank < 0),
        call_kind(call_kind),
        limit_ns(limit_ns),
        me(rank < 0 ? blockIdx.y : rank) {
    number = load_relaxed_gpu(&state()->calls);
    failed = load_relaxed_gpu(&state()->failed) != 0;
  }

  __device__ unsigned char* part(int of) const { return parts + of * stride; }
  __device__ Lines* lines(int of) const { return reinterpret_cast<Lines*>(part(of)); }
  __device__ State* state() const { return states + (is_virtual ? blockIdx.y : 0); }
  __device__ int generation() const { return number % kGenerations; }
  // What calls[][] says of this call.
  __device__ unsigned long long kind() const { return static_cast<unsigned long long>(number + 1) << 32 | call_kind; }

  // Tell the others what call this is. Its first block does, a thread for each rank.
  __device__ bool tells() const { return blockIdx.x == 0 && threadIdx.x < kRanks && threadIdx.x != me; }
  __device__ void tell() const {
    if (tells() && !failed) store_relaxed_sys_8(&lines(threadIdx.x)->calls[generation()][me], kind());
  }

  // One thread of each block, when all its threads know the number.
  __device__ void count() const {
    const unsigned last = gridDim.x - 1;
    if (count_relaxed_gpu(&state()->arrived, last) == last) store_relaxed_gpu(&state()->calls, number_behind(number));
  }

  // Whether a rank has told that it failed: which, and for whom it had waited.
  __device__ bool aborted(int& by, int& waited_for) const {
    for (int rank = 0; rank < kRanks; ++rank)
      if (const unsigned told = load_relaxed_sys(&lines(me)->aborts[rank])) {
        by = rank, waited_for = told - 1;
        return true;
      }
    return false;
  }

  // What rank `from` waits for is not there yet: whether to look again. The clock and the others' news are read every
  // 64th time only.
  __device__ bool again(int from) {
    if (++tries % 64) return true;
    const unsigned long long seen = load_relaxed_sys_8(&lines(me)->calls[generation()][from]);
    unsigned code = seen != kind() && seen >> 32 == number + 1 ? kOtherCall : 0u;
    int by = me;
    if (!code && aborted(by, from)) code = kAborted;
    const unsigned long long now = time_ns();
    if (!begun_ns) begun_ns = now;
    if (!code && now - begun_ns >= limit_ns) {
      code = kTimedOut;
#pragma unroll 1
      for (int rank = 0; kRanks > 2 && rank < kRanks && has_come(from); ++rank)  // who has come may wait itself
        if (rank != me && !has_come(rank)) from = rank;
    }
    if (code) fail(code, from, by);
    else failed = load_relaxed_gpu(&state()->failed) != 0;  // another thread found out
    return !failed;
  }

  // Whether a rank makes this call.
  __device__ bool has_come(int from) const {
    return load_relaxed_sys_8(&lines(me)->calls[generation()][from]) == kind();
  }

  // No call ends before all others have made it too, and it was the same. All threads of the first block.
  __device__ void meet() {
    if (!tells() || failed) return;
    const int from = threadIdx.x;
    while (!has_come(from))
      if (!again(from)) return;
  }

  __device__ void fail(unsigned code, int rank, int by) {
    failed = true;
    if (atomicExch(&state()->failed, code)) return;
    unsigned long long seen = 0;  // the rank's newest call, of whatever generation
#pragma unroll 1
    for (int each = 0; each < kGenerations; ++each) seen = max(seen, load_relaxed_sys_8(&lines(me)->calls[each][rank]));
    for (int other = 0; other < kRanks && code != kAborted; ++other)
      if (other != me) store_relaxed_sys(&lines(other)->aborts[me], static_cast<unsigned>(rank + 1));
    Failure* const failure = failures + (is_virtual ? blockIdx.y : 0);
    failure->call = number, failure->rank = rank, failure->by = by;
    failure->block = blockIdx.x, failure->thread = threadIdx.x;
    failure->seen_call = static_cast<unsigned>(seen >> 32), failure->seen_kind = static_cast<unsigned>(seen);
    __threadfence_system();  // the code comes last: who sees it sees the rest
    *reinterpret_cast<volatile unsigned*>(&failure->code) = code;
  }
};

}  // namespace dk
