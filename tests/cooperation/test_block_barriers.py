"""Barriers of a block."""

from __future__ import annotations

import numpy as np
import pytest
from cooperation import Kernels, RandomWords, blank, equal, kernels

# ---- barriers of a block ---------------------------------------------------------------------------------------------

BARRIERS = r"""
__device__ void sync_some(int kind, u32 id, u32 threads) {
  if (kind == 0) asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
  if (kind == 1) asm volatile("bar.cta.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
  if (kind == 2) asm volatile("barrier.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
  if (kind == 3) asm volatile("barrier.cta.sync.aligned %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Groups of warps, each with a barrier of its own, exchange so many times as their number says.
__global__ void groups(const u32* x, u32* y, u32 warps, int kind) {
  extern __shared__ u32 slots[];
  const u32 group = threadIdx.x / 32 / warps, first = group * warps * 32, size = warps * 32, t = threadIdx.x - first;
  const u32 id = 15 - group;
  u32 value = x[thread()];
#pragma unroll 1
  for (u32 r = 0; r <= group; ++r) {
    slots[threadIdx.x] = value;
    sync_some(kind, id, size);
    value = 31 * value + slots[first + (t + r + 1) % size];
    sync_some(kind, id, size);
  }
  y[thread()] = value;
}

// Even warps produce for the odd ones after them: two barriers for each pair, at which one arrives and the other waits.
__global__ void pairs(const u32* x, u32* y, int items, int kind) {
  extern __shared__ u32 slots[];
  const u32 lane = lane_id(), pair = threadIdx.x / 64, full = 1 + 2 * pair, empty = 2 + 2 * pair;
  u32* const slot = slots + 32 * pair;
  u32 sum = 0;
  if (threadIdx.x / 32 % 2 == 0) {
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      if (i) sync_some(kind, empty, 64);
      slot[lane] = x[(pair * items + i) * 32 + lane];
      if (kind < 2) asm volatile("bar.arrive %0, 64;" :: "r"(full) : "memory");
      else asm volatile("barrier.cta.arrive %0, 64;" :: "r"(full) : "memory");
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      sync_some(kind, full, 64);
      sum = 31 * sum + slot[(lane + 1) % 32];
      if (i + 1 == items) break;
      if (kind < 2) asm volatile("bar.arrive %0, 64;" :: "r"(empty) : "memory");
      else asm volatile("barrier.cta.arrive %0, 64;" :: "r"(empty) : "memory");
    }
    y[pair * 32 + lane] = sum;
  }
}

// What all threads of a block, and what those of each group of warps, say of their values: seven answers a thread.
__global__ void votes(const u32* x, u32* y, u32 warps, u32 limit) {
  const u32 id = 1 + threadIdx.x / 32 / warps, size = 32 * warps;
  u32* const to = y + 7 * thread();
  const u32 yes = x[thread()] < limit;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.popc.u32 %0, 0, p; }"
               : "=r"(to[0]) : "r"(yes) : "memory");
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.and.pred q, 0, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(to[1]) : "r"(yes) : "memory");
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.aligned.pred q, 0, p; "
               "selp.u32 %0, 1, 0, q; }" : "=r"(to[2]) : "r"(yes) : "memory");
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; barrier.red.popc.u32 %0, %2, %3, p; }"
               : "=r"(to[3]) : "r"(yes), "r"(id), "r"(size) : "memory");
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.and.pred q, %2, %3, !p; "
               "selp.u32 %0, 1, 0, q; }" : "=r"(to[4]) : "r"(yes), "r"(id), "r"(size) : "memory");
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.cta.red.or.pred q, %2, %3, !p; selp.u32 %0, 1, 0, q; }"
               : "=r"(to[5]) : "r"(yes), "r"(id), "r"(size) : "memory");
  to[6] = __syncthreads_count(yes) + 10000 * (__syncthreads_and(yes) != 0) + 20000 * (__syncthreads_or(yes) != 0);
}

// Warp w meets the others w times, and ends.
__global__ void shrink(const u32* x, u32* y) {
  extern __shared__ u32 sums[];
  const u32 warps = (blockDim.x + 31) / 32, warp = threadIdx.x / 32;
  for (u32 i = threadIdx.x; i < warps; i += blockDim.x) sums[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 r = 0; r < warp; ++r) {
    atomicAdd(&sums[r], x[thread()] + r);
    __syncthreads();
    y[r * gridDim.x * blockDim.x + thread()] = sums[r];
  }
}
"""

LEAVERS = r"""
// Threads from n on leave before the others meet: where they work, they add to what is there.
template <int how> __global__ void leave(const u32* x, u32* y, u32 n) {
  extern __shared__ u32 values[];
  const u32 i = threadIdx.x;
  const u32 some = __ballot_sync(__activemask(), i >= n);
  if (how == 0 && i >= n) return;
  if (how == 1 && i >= n) {
    atomicAdd(y + i, x[i]);
    return;
  }
  if (how == 2 && (i >= n + (x[i] & 1) || i >= n)) {
    atomicAdd(y + i, x[i]);
    return;
  }
  if (how == 3 && i >= n) {
    for (u32 k = 0; k < i % 5; ++k) atomicAdd(y + i, 1);
    *static_cast<volatile u32*>(y + i) += x[i] - i % 5;
    return;
  }
  if (how == 4 && i >= n) {
    atomicAdd(y + i, __shfl_sync(some, x[i], 31 - __clz(some)));
    return;
  }
  if (how == 5 && i < n) {
    values[i] = x[i];
    __syncthreads();
    y[i] = values[n - 1 - i];
    return;
  } else if (how == 5) {
    atomicAdd(y + i, x[i]);
    return;
  }
#pragma unroll 1
  for (u32 r = 0; r < 3; ++r) {
    if (how == 6 && i >= n + 2 - r) return;
    values[i] = x[i];
    __syncthreads();
    if (i < n) y[i] = values[n - 1 - i];
    __syncthreads();
  }
}
"""


@kernels("leavers", LEAVERS, *(f"leave<{how}>" for how in range(7)))
@pytest.mark.parametrize("n", [0, 1, 31, 37, 64, 100])
@pytest.mark.parametrize("how", range(7))
def test_a_barrier_does_not_wait_for_threads_that_have_left(run: Kernels, words: RandomWords, how: int, n: int) -> None:
    x, threads = words(100), np.arange(100)
    _, found = run(f"leave<{how}>", x, blank(100), n, grid=1, block=100, shared_mem_bytes=400)
    last = np.minimum(threads | 31, 99)
    added = {0: 0, 4: x[last], 6: 0}.get(how, x)
    equal(found, np.where(threads < n, x[np.maximum(n - 1 - threads, 0)], blank(100) + np.uint32(added)))


@kernels("barriers", BARRIERS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 1), (1, 5, 2), (2, 2, 4), (1, 15, 2)], ids=str)
@pytest.mark.parametrize("kind", range(4), ids=["bar", "bar.cta", "barrier", "barrier.cta"])
def test_groups_of_warps_meet_at_barriers_of_their_own(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], kind: int
) -> None:
    blocks, groups, warps = shape
    x = words(blocks, groups, 32 * warps)
    threads = groups * 32 * warps
    how = {"grid": blocks, "block": threads, "shared_mem_bytes": 4 * threads}
    _, found = run("groups", x, blank(*x.shape), warps, kind, **how)
    want = x.copy()
    for r in range(groups):
        want[:, r:] = np.uint32(31) * want[:, r:] + np.roll(want[:, r:], -(r + 1), axis=2)
    equal(found, want)


@kernels("barriers", BARRIERS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (3, 5), (7, 4)], ids=str)
@pytest.mark.parametrize("kind", [0, 2], ids=["bar", "barrier"])
def test_one_warp_arrives_and_another_one_waits(
    run: Kernels, words: RandomWords, shape: tuple[int, int], kind: int
) -> None:
    pairs, items = shape
    x = words(pairs, items, 32)
    _, found = run("pairs", x, blank(pairs, 32), items, kind, grid=1, block=64 * pairs, shared_mem_bytes=128 * pairs)
    want = np.zeros_like(found)
    for item in x.swapaxes(0, 1):
        want = np.uint32(31) * want + np.roll(item, -1, axis=1)
    equal(found, want)


@kernels("barriers", BARRIERS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 1), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("limit", [0, 1, 50, 99, 100])
def test_barriers_count_votes(run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], limit: int) -> None:
    blocks, groups, warps = shape
    x = rng.integers(0, 100, (blocks, groups, 32 * warps), np.uint32)
    _, found = run("votes", x, blank(*x.shape, 7), warps, limit, grid=blocks, block=groups * 32 * warps)
    yes = x < limit
    for axes, columns in (((1, 2), (0, 1, 2, 6)), ((2,), (3, 4, 5))):
        count, every = yes.sum(axis=axes, keepdims=True), yes.all(axis=axes, keepdims=True)
        some = yes.any(axis=axes, keepdims=True)
        answers = {0: count, 1: every, 2: some, 3: count, 4: ~some, 5: ~every, 6: count + 10000 * every + 20000 * some}
        for column in columns:
            equal(found[..., column], np.broadcast_to(answers[column], yes.shape), err_msg=str(column))


@kernels("barriers", BARRIERS)
@pytest.mark.parametrize("shape", [(1, 64), (2, 160), (1, 72), (3, 250)], ids=str)
def test_a_barrier_does_not_wait_for_warps_that_ended(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, threads = shape
    warp = np.arange(threads) // 32
    rounds = int(warp[-1])
    x = words(blocks, threads)
    _, found = run("shrink", x, blank(rounds, *shape), grid=blocks, block=threads, shared_mem_bytes=4 * (rounds + 1))
    for r in range(rounds):
        total = (x + np.uint32(r))[:, warp > r].sum(axis=1, dtype=np.uint32, keepdims=True)
        equal(found[r], np.where(warp > r, total, blank(*shape)), err_msg=f"round {r}")
