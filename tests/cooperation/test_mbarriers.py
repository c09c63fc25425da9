"""mbarrier objects: arrivals, bytes, phases, rings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cooperation import Kernels, RandomWords, blank, equal, kernels

# ---- mbarrier objects ------------------------------------------------------------------------------------------------

MBARRIERS = r"""
__device__ u32 tested(u64& barrier, u32 parity) {
  u32 over;
  TRUTH(over, "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2", "r"(at(&barrier)), "r"(parity));
  return over;
}

// One thread arrives for all: `each` times in a phase, by as much as `parts` says. The object lives several times.
__global__ void count(const u32* parts, u32* seen, int lives, int phases, int each) {
  __shared__ u64 barrier;
#pragma unroll 1
  for (int life = 0; life < lives; ++life) {
    u32 total = 0;
#pragma unroll 1
    for (int i = 0; i < each; ++i) total += parts[i];
    init(barrier, total);
#pragma unroll 1
    for (int phase = 0; phase < phases; ++phase)
#pragma unroll 1
      for (int i = 0; i < each; ++i, ++parts, seen += 6) {
        u64 state;
        u32 pending = 0;
        if (i + 1 < each)
          asm volatile("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%2], %3; mbarrier.pending_count.b64 %1, %0;"
                       : "=&l"(state), "=r"(pending) : "r"(at(&barrier)), "r"(*parts) : "memory");
        else
          asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1], %2;"
                       : "=l"(state) : "r"(at(&barrier)), "r"(*parts) : "memory");
        seen[0] = pending;
        TRUTH(seen[1], "mbarrier.test_wait.shared::cta.b64 p, [%1], %2", "r"(at(&barrier)), "l"(state));
        seen[2] = tested(barrier, phase & 1);
        seen[3] = tested(barrier, ~phase & 1);
        TRUTH(seen[4], "mbarrier.try_wait.acquire.cta.shared::cta.b64 p, [%1], %2, %3",
              "r"(at(&barrier)), "l"(state), "r"(500));
        TRUTH(seen[5], "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3",
              "r"(at(&barrier)), "r"(phase & 1), "r"(500));
      }
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at(&barrier)) : "memory");
  }
}

// Of each phase: whether it is over after an arrival, after the other one, after each part of the bytes.
__global__ void transact(const u32* parts, u32* seen, int phases, int each) {
  __shared__ u64 barrier;
  init(barrier, 2);
#pragma unroll 1
  for (int phase = 0; phase < phases; ++phase) {
    u32 rest = 0;
#pragma unroll 1
    for (int i = 1; i < each; ++i) rest += parts[i];
    arrive_and_expect(barrier, parts[0]);
    *seen++ = tested(barrier, phase & 1);
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(at(&barrier)), "r"(rest) : "memory");
    arrive(barrier);
    *seen++ = tested(barrier, phase & 1);
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                   :: "r"(at(&barrier)), "r"(*parts++) : "memory");
      *seen++ = tested(barrier, phase & 1);
    }
  }
}

// In each round all threads that still take part arrive, then wait: by the state that they got, by the parity, or by
// a test again and again. What they read was written before the others arrived. A thread leaves after its last round.
__global__ void rounds(const u32* x, const u32* last, u32* y, int count) {
  extern __shared__ u32 slots[];
  __shared__ u64 barriers[2];
  const u32 t = threadIdx.x;
  if (t == 0) init(barriers[0], blockDim.x), init(barriers[1], blockDim.x);
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < count; ++r) {
    slots[t] = x[r * blockDim.x + t];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      u64& barrier = barriers[half];
      u64 state;
      if (r == last[t])
        asm volatile("mbarrier.arrive_drop.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(&barrier)) : "memory");
      else
        asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(&barrier)) : "memory");
      if (half && r == last[t]) return;  // the phases go on without it: it could not tell them apart
      until([&] {
        u32 over;
        if (t % 3 == 0) {
          TRUTH(over, "mbarrier.test_wait.shared::cta.b64 p, [%1], %2", "r"(at(&barrier)), "l"(state));
        } else if (t % 3 == 1) {
          TRUTH(over, "mbarrier.try_wait.shared::cta.b64 p, [%1], %2", "r"(at(&barrier)), "l"(state));
        } else {
          over = tested(barrier, r & 1);
        }
        return over;
      });
      if (half == 0) y[r * blockDim.x + t] = slots[(t + r + 1) % blockDim.x];
    }
  }
}

// Warp 0 puts items into a ring, the others take each of them out.
__global__ void pipeline(const u32* x, u32* y, int items, int stages) {
  extern __shared__ u32 ring[];
  __shared__ u64 full[8], empty[8];
  const u32 lane = lane_id(), warp = threadIdx.x / 32, consumers = blockDim.x / 32 - 1;
  if (threadIdx.x == 0)
#pragma unroll 1
    for (int s = 0; s < stages; ++s) init(full[s], 32), init(empty[s], consumers);
  __syncthreads();
  u32 sum = 0;
#pragma unroll 1
  for (int i = 0; i < items; ++i) {
    const u32 stage = i % stages, parity = i / stages & 1;
    if (warp == 0) {
      wait(empty[stage], parity ^ 1);  // of the first round: the phase before the first is over
      ring[32 * stage + lane] = x[(blockIdx.x * items + i) * 32 + lane];
      arrive(full[stage]);
    } else {
      wait(full[stage], parity);
      sum = 31 * sum + ring[32 * stage + (lane + warp) % 32];
      __syncwarp();
      if (lane == 0) arrive(empty[stage]);
    }
  }
  if (warp) y[(blockIdx.x * consumers + warp - 1) * 32 + lane] = sum;
}

// All threads of a cluster store into the first block, and arrive there.
__global__ void gather(const u32* x, u32* y, int rounds) {
  extern __shared__ u32 row[];
  __shared__ u64 full;
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  const u32 all = blocks * blockDim.x;
  if (rank == 0 && t == 0) init(full, 2 * all);
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    sync_cluster();
    asm volatile("st.shared::cluster.u32 [%0], %1;"
                 :: "r"(in_block(0, &row[rank * blockDim.x + t])), "r"(x[r * gridDim.x * blockDim.x + thread()])
                 : "memory");
    if (t % 2)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], 2;"
                   :: "r"(in_block(0, &full)) : "memory");
    else
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0]; "
                   "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                   :: "r"(in_block(0, &full)) : "memory");
    if (rank == 0) {
      wait(full, r & 1);
#pragma unroll 1
      for (u32 i = t; i < all; i += blockDim.x)
        y[r * gridDim.x * blockDim.x + blockIdx.x * blockDim.x + i] = row[all - 1 - i];
    }
  }
  sync_cluster();
}
"""


def split(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    """Positive parts of a number."""
    cuts = sorted(rng.choice(np.arange(1, total), parts - 1, replace=False).tolist())
    return [end - start for start, end in itertools.pairwise([0, *cuts, total])]


@kernels("mbarriers", MBARRIERS)
@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 4, 2), (2, 2, 7)], ids=str)
def test_a_phase_is_over_when_all_have_arrived(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int]
) -> None:
    lives, phases, each = shape
    totals = rng.integers(each + 1, 1 << 20, lives)
    parts = np.array([[split(rng, total, each) for _ in range(phases)] for total in totals], np.uint32)
    _, found = run("count", parts, blank(*shape, 6), *shape, grid=1, block=1)
    before = totals[:, None, None] - parts.cumsum(axis=2) + parts
    over = np.broadcast_to(np.arange(each) == each - 1, shape)
    equal(found[..., 0], np.where(over, 0, before))
    for column, want in ((1, over), (2, over), (3, ~over), (4, over), (5, over)):
        equal(found[..., column], want, err_msg=str(column))


@kernels("mbarriers", MBARRIERS)
@pytest.mark.parametrize("each", [2, 3, 9])
def test_a_phase_is_over_when_all_bytes_are_there(run: Kernels, rng: np.random.Generator, each: int) -> None:
    parts = rng.integers(1, (1 << 20) // each, (5, each), np.uint32)
    _, found = run("transact", parts, blank(5, each + 2), *parts.shape, grid=1, block=1)
    equal(found, np.broadcast_to(np.arange(each + 2) == each + 1, found.shape))


@kernels("mbarriers", MBARRIERS)
@pytest.mark.parametrize("threads", [1, 32, 48, 256])
@pytest.mark.parametrize("drops", [False, True], ids=["all stay", "some drop out"])
def test_threads_exchange_around_mbarriers(
    run: Kernels, rng: np.random.Generator, words: RandomWords, threads: int, drops: bool
) -> None:
    count = 7
    x, last = words(count, threads), np.full(threads, count, np.uint32)
    if drops:
        last[1:] = rng.integers(0, count + 1, threads - 1)
    found = run("rounds", x, last, blank(count, threads), count, grid=1, block=threads, shared_mem_bytes=4 * threads)[2]
    slots = np.zeros(threads, np.uint32)
    for r in range(count):
        stays = last >= r
        slots[stays] = x[r][stays]
        equal(found[r], np.where(stays, np.roll(slots, -(r + 1)), blank(threads)), err_msg=f"round {r}")


@kernels("mbarriers", MBARRIERS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 2), (3, 2, 4), (1, 7, 8)], ids=str)
@pytest.mark.parametrize("items", [1, 5, 23])
def test_a_producer_and_consumers_share_a_ring(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], items: int
) -> None:
    blocks, consumers, stages = shape
    x = words(blocks, items, 32)
    how = {"grid": blocks, "block": 32 * (consumers + 1), "shared_mem_bytes": 128 * stages}
    _, found = run("pipeline", x, blank(blocks, consumers, 32), items, stages, **how)
    want = np.zeros_like(found)
    for item in x.swapaxes(0, 1):
        want = np.uint32(31) * want + np.stack([np.roll(item, -(1 + c), axis=1) for c in range(consumers)], axis=1)
    equal(found, want)


@kernels("mbarriers", MBARRIERS)
@pytest.mark.parametrize("shape", [(1, 2, 32), (2, 2, 96), (4, 1, 64), (8, 1, 40)], ids=str)
def test_blocks_arrive_at_an_mbarrier_of_another_block(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int]
) -> None:
    cluster, count, threads = shape
    x = words(5, count, cluster * threads)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster, "shared_mem_bytes": 4 * cluster * threads}
    _, found = run("gather", x, blank(*x.shape), len(x), **how)
    equal(found, x[..., ::-1])
