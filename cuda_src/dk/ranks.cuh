// What kernels of several ranks share: where each rank's part of symmetric memory is, the state of a rank's calls, and
// waits that end.
//
// A wait that its deadline ends tells what it waited for, and lets the kernel go on: its results are NaN, and every later
// call of this rank ends at once with NaN too, until the host resets the group.

#pragma once

#include "memory_order.cuh"

namespace dk {

// Rank r's part begins at base + r * stride.
struct Parts {
  unsigned char* base;
  long long stride;

  __device__ unsigned char* of(int rank) const { return base + rank * stride; }
};

// Of one rank, in its own memory, in words. A call reads `calls` before it counts itself in `arrived`; the last block
// that does adds 1 to it, so the next call has the next number.
struct State {
  unsigned calls, arrived, failed, unused;
};

// Why a call failed.
constexpr unsigned kTimedOut = 1, kOtherCall = 2;

// What the host reads, in page-locked memory: written once, by whoever finds the first failure.
struct Failure {
  unsigned code, call, rank, block, thread, seen_low, seen_high, unused;
};

// A bounded wait. `again()` is asked whenever what is waited for is not there yet.
struct Deadline {
  unsigned long long limit_ns, begun_ns = 0;
  unsigned tries = 0;

  __device__ explicit Deadline(unsigned long long limit_ns) : limit_ns(limit_ns) {}

  // Whether there is time left. The clock is read every 64th time only.
  __device__ bool again() {
    if (++tries % 64) return true;
    const unsigned long long now = time_ns();
    if (!begun_ns) begun_ns = now;
    return now - begun_ns < limit_ns;
  }
};

__device__ inline void fail(State* state, Failure* failure, unsigned code, unsigned call, int rank,
                            unsigned long long seen) {
  if (atomicExch(&state->failed, code) == 0) {
    failure->call = call, failure->rank = rank, failure->block = blockIdx.x, failure->thread = threadIdx.x;
    failure->seen_low = static_cast<unsigned>(seen), failure->seen_high = static_cast<unsigned>(seen >> 32);
    __threadfence_system();  // the code comes last: who sees it sees the rest
    *reinterpret_cast<volatile unsigned*>(&failure->code) = code;
  }
}

}  // namespace dk
