"""Blocks of a cluster: who is who, barriers, memory of other blocks, asynchronous stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cooperation import Kernels, RandomWords, Words, blank, equal, kernels

# ---- clusters: who is who ------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 4, 2)]

PLACES = r"""
__device__ void describe(u32* to) {
  u32 is_explicit;
  TRUTH(is_explicit, "mov.pred p, %%is_explicit_cluster", "r"(0));
  const u32 seen[] = {
      SPECIAL("cluster_ctaid.x"), SPECIAL("cluster_ctaid.y"), SPECIAL("cluster_ctaid.z"),
      SPECIAL("cluster_nctaid.x"), SPECIAL("cluster_nctaid.y"), SPECIAL("cluster_nctaid.z"),
      SPECIAL("clusterid.x"), SPECIAL("clusterid.y"), SPECIAL("clusterid.z"),
      SPECIAL("nclusterid.x"), SPECIAL("nclusterid.y"), SPECIAL("nclusterid.z"),
      SPECIAL("cluster_ctarank"), SPECIAL("cluster_nctarank"), is_explicit};
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  if (threadIdx.x == 0)
    for (int i = 0; i < 15; ++i) to[15 * block + i] = seen[i];
}

__global__ void by_attribute(u32* to) { describe(to); }
template <int x, int y, int z> __global__ void __cluster_dims__(x, y, z) by_dims(u32* to) { describe(to); }
"""


def places(grid: tuple[int, ...], cluster: tuple[int, ...]) -> Words:
    """What the kernels above find, block by block."""
    rows = []
    for z, y, x in np.ndindex(*grid[::-1]):
        inside = [n % c for n, c in zip((x, y, z), cluster, strict=True)]
        outside = [n // c for n, c in zip((x, y, z), cluster, strict=True)]
        clusters = [n // c for n, c in zip(grid, cluster, strict=True)]
        rank = inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2])
        size = int(np.prod(cluster))
        rows.append([*inside, *cluster, *outside, *clusters, rank, size, size > 1])
    return np.array(rows, np.uint32)


@kernels("places", PLACES, *(f"by_dims<{x}, {y}, {z}>" for x, y, z in SHAPES))
@pytest.mark.parametrize("cluster", SHAPES, ids=str)
def test_blocks_know_their_place_in_a_cluster(
    run: Kernels, rng: np.random.Generator, cluster: tuple[int, int, int]
) -> None:
    grid = tuple(int(n * c) for n, c in zip(rng.integers(1, 4, 3), cluster, strict=True))
    want = places(grid, cluster)
    fields = slice(15 if want[0, -1] else 14)  # whether one block is a cluster is not asked
    x, y, z = cluster
    for name, how in (("by_attribute", {"cluster": cluster}), (f"by_dims<{x}, {y}, {z}>", {})):
        (found,) = run(name, blank(*want.shape), grid=grid, block=32, **how)
        equal(found[:, fields], want[:, fields], err_msg=name)


@kernels("places", PLACES)
def test_a_launch_without_clusters_has_clusters_of_one_block(run: Kernels) -> None:
    (found,) = run("by_attribute", blank(6, 15), grid=(3, 2), block=64)
    equal(found, places((3, 2, 1), (1, 1, 1)))


# ---- clusters: barriers --------------------------------------------------------------------------------------------

CLUSTER_BARRIERS = r"""
__device__ void arrive_cluster(int kind) {
  if (kind == 0) asm volatile("barrier.cluster.arrive;" ::: "memory");
  if (kind == 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  if (kind == 2) asm volatile("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ void wait_cluster(int kind) {
  if (kind == 0) asm volatile("barrier.cluster.wait;" ::: "memory");
  if (kind == 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (kind == 2) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// In each round a thread reads what another thread of another block has brought.
__global__ void exchange(const u32* x, u32* y, int rounds, int kind) {
  extern __shared__ u32 own[];
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank");
  u32 sum = 0;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    own[threadIdx.x] = x[r * gridDim.x * blockDim.x + thread()];
    arrive_cluster(kind);
    wait_cluster(kind);
    const u32 there = in_block((rank + r + 1) % blocks, &own[(threadIdx.x + 7 * r) % blockDim.x]);
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
    sum = 31 * sum + value;
    arrive_cluster(kind);
    wait_cluster(kind);
  }
  y[thread()] = sum;
}

// The same by way of global memory, where only the barrier orders the blocks.
__global__ void exchange_globally(const u32* x, u32* scratch, u32* y, int rounds) {
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank");
  u32 sum = 0;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    u32* const row = scratch + r * gridDim.x * blockDim.x;
    row[thread()] = x[r * gridDim.x * blockDim.x + thread()];
    sync_cluster();
    const u32 block = blockIdx.x - rank + (rank + r + 1) % blocks;
    sum = 31 * sum + row[block * blockDim.x + (threadIdx.x + 7 * r) % blockDim.x];
  }
  y[thread()] = sum;
}

// Warp w has a part in the first w + 1 rounds, and ends; every fourth warp has none.
__global__ void leave(const u32* x, u32* y) {
  extern __shared__ u32 own[];
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), warp = threadIdx.x / 32;
  if (warp % 4 == 2) return;
  u32 sum = 0;
#pragma unroll 1
  for (u32 r = 0; r <= warp; ++r) {
    own[threadIdx.x] = x[r * gridDim.x * blockDim.x + thread()];
    sync_cluster();
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value) : "r"(in_block((rank + r + 1) % blocks, &own[threadIdx.x])) : "memory");
    sum = 31 * sum + value;
    sync_cluster();
  }
  y[thread()] = sum;
}

// Lane 0 comes later than its warp.
__global__ void straggle(const u32* x, u32* flag, u32* y) {
  __shared__ u32 own;
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank");
  if (threadIdx.x == 64) atomicAdd(flag, 1);
  if (threadIdx.x == 0) {
    until([&] { return atomicAdd(flag, 0) >= gridDim.x; });
    own = x[blockIdx.x];
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  u32 value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(value) : "r"(in_block((rank + 1) % blocks, &own)) : "memory");
  y[thread()] = value;
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
"""
CLUSTERS = [(1, 1, 32), (2, 3, 96), (4, 2, 256), (8, 2, 64), (8, 1, 40)]  # blocks of one, how many, threads


def exchanged(x: Words, cluster: int) -> Words:
    """By ``exchange``: ``x`` of (rounds, blocks, threads)."""
    rounds, blocks, threads = x.shape
    rank, thread = np.arange(blocks) % cluster, np.arange(threads)
    first = np.arange(blocks) - rank
    total = np.zeros((blocks, threads), np.uint32)
    for r in range(rounds):
        block = first + (rank + r + 1) % cluster
        total = np.uint32(31) * total + x[r][block[:, None], (thread + 7 * r) % threads]
    return total


@kernels("cluster_barriers", CLUSTER_BARRIERS)
@pytest.mark.parametrize("shape", CLUSTERS, ids=str)
@pytest.mark.parametrize("kind", range(3), ids=["plain", "release", "relaxed"])
def test_cluster_barriers_order_rounds(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], kind: int
) -> None:
    cluster, count, threads = shape
    x = words(5, cluster * count, threads)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster, "shared_mem_bytes": 4 * threads}
    _, found = run("exchange", x, blank(*x.shape[1:]), len(x), kind, **how)
    equal(found, exchanged(x, cluster))


@kernels("cluster_barriers", CLUSTER_BARRIERS)
@pytest.mark.parametrize("shape", CLUSTERS, ids=str)
def test_cluster_barriers_order_global_memory(run: Kernels, words: RandomWords, shape: tuple[int, int, int]) -> None:
    cluster, count, threads = shape
    x = words(5, cluster * count, threads)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster}
    found = run("exchange_globally", x, blank(*x.shape), blank(*x.shape[1:]), len(x), **how)[-1]
    equal(found, exchanged(x, cluster))


@kernels("cluster_barriers", CLUSTER_BARRIERS)
@pytest.mark.parametrize("shape", [(1, 2, 4), (2, 3, 6), (4, 1, 9), (8, 1, 5)], ids=str)
def test_a_cluster_barrier_does_not_wait_for_warps_that_ended(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int]
) -> None:
    cluster, count, warps = shape
    blocks, threads = cluster * count, 32 * warps
    x = words(warps, blocks, threads)
    how = {"grid": blocks, "block": threads, "cluster": cluster, "shared_mem_bytes": 4 * threads}
    _, found = run("leave", x, blank(blocks, threads), **how)
    want = blank(blocks, threads)
    rank, warp = np.arange(blocks) % cluster, np.arange(threads) // 32
    for w in range(warps):
        if w % 4 != 2:
            total = np.zeros((blocks, 32), np.uint32)
            for r in range(w + 1):
                block = np.arange(blocks) - rank + (rank + r + 1) % cluster
                total = np.uint32(31) * total + x[r][block][:, warp == w]
            want[:, warp == w] = total
    equal(found, want)


@kernels("cluster_barriers", CLUSTER_BARRIERS)
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_a_cluster_barrier_waits_for_all_lanes_of_a_warp(run: Kernels, words: RandomWords, cluster: int) -> None:
    x = words(cluster)
    *_, found = run("straggle", x, np.zeros(1, np.uint32), blank(cluster, 96), grid=cluster, block=96, cluster=cluster)
    equal(found, np.broadcast_to(np.roll(x, -1)[:, None], (cluster, 96)))


# ---- clusters: memory of other blocks --------------------------------------------------------------------------------

DISTRIBUTED = r"""
template <class T> __device__ T* generic_in_block(u32 rank, T* place) {
  u64 there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// Row j of a block becomes row `rank` of block j; each thread has four words of a row.
__global__ void transpose(const uint4* x, uint4* y, int kind) {
  extern __shared__ uint4 rows[];
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  const u64 base = u64(blockIdx.x) * blocks * blockDim.x;
  if (kind >= 3)  // the readers fetch
#pragma unroll 1
    for (u32 j = 0; j < blocks; ++j) rows[j * blockDim.x + t] = x[base + j * blockDim.x + t];
  sync_cluster();
#pragma unroll 1
  for (u32 j = 0; j < blocks; ++j) {
    const uint4 v = x[base + j * blockDim.x + t];
    uint4* const mine = &rows[rank * blockDim.x + t];
    const u32 there = in_block(j, mine);
    uint4 got{};
    if (kind == 0)
      asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};"
                   :: "r"(there), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    if (kind == 1)
      asm volatile("st.shared::cluster.b32 [%0], %1; st.relaxed.cluster.shared::cluster.b32 [%0 + 4], %2; "
                   "st.shared::cluster.v2.u32 [%0 + 8], {%3, %4};"
                   :: "r"(there), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    if (kind == 2) *generic_in_block(j, mine) = v;
    if (kind == 3)
      asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "r"(there) : "memory");
    if (kind == 4)
      asm volatile("ld.shared::cluster.b32 %0, [%4]; ld.relaxed.cluster.shared::cluster.b32 %1, [%4 + 4]; "
                   "ld.acquire.cluster.shared::cluster.b32 %2, [%4 + 8]; ld.shared::cluster.u32 %3, [%4 + 12];"
                   : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w) : "r"(there) : "memory");
    if (kind == 5) got = *generic_in_block(j, mine);
    if (kind >= 3) y[base + j * blockDim.x + t] = got;
  }
  sync_cluster();
  if (kind < 3)
#pragma unroll 1
    for (u32 j = 0; j < blocks; ++j) y[base + j * blockDim.x + t] = rows[j * blockDim.x + t];
}

// Of an address in each block: whose it is, by its two spellings, and whether it is in the cluster's or in this
// block's shared memory.
__global__ void whose(u32* y) {
  __shared__ u32 place;
  const u32 blocks = SPECIAL("cluster_nctarank"), j = threadIdx.x;
  if (j >= blocks) return;
  u32 rank, same, in_cluster, in_own;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(rank) : "r"(in_block(j, &place)));
  asm volatile("getctarank.u64 %0, %1;" : "=r"(same) : "l"(generic_in_block(j, &place)));
  TRUTH(in_cluster, "isspacep.shared::cluster p, %1", "l"(generic_in_block(j, &place)));
  TRUTH(in_own, "isspacep.shared::cta p, %1", "l"(generic_in_block(j, &place)));
  u32* const to = y + 4 * (blockIdx.x * blocks + j);
  to[0] = rank, to[1] = same, to[2] = in_cluster, to[3] = in_own;
}
"""


@kernels("distributed", DISTRIBUTED)
@pytest.mark.parametrize("shape", [(1, 2, 32), (2, 2, 96), (4, 1, 128), (8, 2, 33)], ids=str)
@pytest.mark.parametrize("kind", range(6), ids=["st.v4", "st", "*p =", "ld.v4", "ld", "= *p"])
def test_blocks_of_a_cluster_read_and_write_each_others_memory(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], kind: int
) -> None:
    cluster, count, threads = shape
    x = words(count, cluster, cluster, threads, 4)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster}
    found = run("transpose", x, blank(*x.shape), kind, shared_mem_bytes=16 * cluster * threads, **how)[1]
    equal(found, x.swapaxes(1, 2))


@kernels("distributed", DISTRIBUTED)
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_an_address_tells_whose_it_is(run: Kernels, cluster: int) -> None:
    (found,) = run("whose", blank(2 * cluster, cluster, 4), grid=2 * cluster, block=32, cluster=cluster)
    own, other = np.meshgrid(np.arange(2 * cluster) % cluster, np.arange(cluster), indexing="ij")
    equal(found, np.stack([other, other, np.ones_like(own), own == other], axis=-1))


CLUSTER_ATOMICS = r"""
struct Totals { u32 tickets, sum, all, any, odd; int least, most; u32 swapped, last, count; float real; u64 wide; };

// All threads of a cluster at the totals of its first block.
__global__ void add_up(const u32* x, u32* tickets, Totals* y) {
  __shared__ Totals totals;
  if (threadIdx.x == 0) totals = Totals{0, 0, ~0u, 0, 0, 2147483647, -2147483647 - 1, 0, 0, 0, 0.0f, 0};
  sync_cluster();
  const u32 v = x[thread()];
  u32 ticket, old;
#define THERE(field) "r"(in_block(0, &totals.field))
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(ticket) : THERE(tickets) : "memory");
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" :: THERE(sum), "r"(v) : "memory");
  asm volatile("red.relaxed.cluster.shared::cluster.and.b32 [%0], %1;" :: THERE(all), "r"(v | 0xffff) : "memory");
  asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" :: THERE(any), "r"(v & 0x10101) : "memory");
  asm volatile("atom.shared::cluster.xor.b32 %0, [%1], %2;" : "=r"(old) : THERE(odd), "r"(v) : "memory");
  asm volatile("red.shared::cluster.min.s32 [%0], %1;" :: THERE(least), "r"(v) : "memory");
  asm volatile("atom.release.cluster.shared::cluster.max.s32 %0, [%1], %2;"
               : "=r"(old) : THERE(most), "r"(v) : "memory");
  asm volatile("red.shared::cluster.inc.u32 [%0], 4294967295;" :: THERE(count) : "memory");
  asm volatile("red.relaxed.cluster.shared::cluster.add.f32 [%0], %1;"
               :: THERE(real), "f"(float(v & 255)) : "memory");
  asm volatile("red.relaxed.cluster.shared::cluster.add.u64 [%0], %1;" :: THERE(wide), "l"(u64(v) << 20) : "memory");
  asm volatile("ld.relaxed.cluster.shared::cluster.u32 %0, [%1];" : "=r"(old) : THERE(swapped) : "memory");
  until([&] {
    const u32 expected = old;
    asm volatile("atom.acq_rel.cluster.shared::cluster.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old) : THERE(swapped), "r"(expected), "r"(expected + v) : "memory");
    return old == expected;
  });
  sync_cluster();
  asm volatile("atom.relaxed.cluster.shared::cluster.exch.b32 %0, [%1], %2;"
               : "=r"(old) : THERE(last), "r"(v) : "memory");
  tickets[thread()] = ticket;
  sync_cluster();
  if (threadIdx.x == 0 && SPECIAL("cluster_ctarank") == 0) y[blockIdx.x / SPECIAL("cluster_nctarank")] = totals;
}
"""
TOTALS = np.dtype(
    [
        *((name, "u4") for name in ("tickets", "sum", "all", "any", "odd")),
        *(("least", "i4"), ("most", "i4"), ("swapped", "u4"), ("last", "u4"), ("count", "u4")),
        *(("real", "f4"), ("wide", "u8")),
    ],
    align=True,
)


@kernels("cluster_atomics", CLUSTER_ATOMICS)
@pytest.mark.parametrize("shape", [(1, 2, 64), (2, 2, 96), (4, 3, 32), (8, 1, 128)], ids=str)
def test_atomics_of_a_cluster(run: Kernels, words: RandomWords, shape: tuple[int, int, int]) -> None:
    cluster, count, threads = shape
    x = words(count, cluster * threads)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster}
    _, tickets, found = run("add_up", x, blank(*x.shape), np.zeros(count, TOTALS).view(np.uint8), **how)
    equal(np.sort(tickets, axis=1), np.broadcast_to(np.arange(cluster * threads), x.shape))
    totals = found.view(TOTALS)
    sums = x.sum(axis=1, dtype=np.uint32)
    want: dict[str, Any] = {
        "tickets": cluster * threads, "count": cluster * threads, "sum": sums, "swapped": sums,
        "all": np.bitwise_and.reduce(x | 0xFFFF, axis=1), "any": np.bitwise_or.reduce(x & 0x10101, axis=1),
        "odd": np.bitwise_xor.reduce(x, axis=1), "least": x.view(np.int32).min(axis=1),
        "most": x.view(np.int32).max(axis=1), "real": (x & 255).sum(axis=1).astype(np.float32),
        "wide": x.sum(axis=1, dtype=np.uint64) << np.uint64(20),
    }  # fmt: skip
    for name, value in want.items():
        equal(totals[name], value, err_msg=name)
    assert all(last in row for last, row in zip(totals["last"], x, strict=True))


REDUCED = r"""
// The sum and the greatest of what the cluster has: of each warp by shuffles, of each block in its shared memory.
__global__ void reduce(const int* x, int* y, int each) {
  __shared__ int sums[32], greatest[32];
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank");
  int sum = 0, most = -2147483647 - 1;
  for (int i = 0; i < each; ++i) {
    const int value = x[i * gridDim.x * blockDim.x + thread()];
    sum += value;
    most = max(most, value);
  }
  for (int step = 16; step; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
    most = max(most, __shfl_xor_sync(~0u, most, step));
  }
  if (lane_id() == 0) sums[threadIdx.x / 32] = sum, greatest[threadIdx.x / 32] = most;
  sync_cluster();
  sum = 0, most = -2147483647 - 1;
  for (u32 i = lane_id(); i < blocks * blockDim.x / 32; i += 32) {
    const u32 block = (rank + i) % blocks, warp = i / blocks;
    int value;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(in_block(block, &sums[warp])) : "memory");
    sum += value;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(in_block(block, &greatest[warp])) : "memory");
    most = max(most, value);
  }
  sum = __reduce_add_sync(~0u, sum);
  most = __reduce_max_sync(~0u, most);
  y[2 * thread()] = sum;
  y[2 * thread() + 1] = most;
  sync_cluster();
}
"""


@kernels("reduced", REDUCED)
@pytest.mark.parametrize("shape", [(1, 3, 32), (2, 2, 256), (4, 2, 96), (8, 1, 512)], ids=str)
def test_a_cluster_reduces(run: Kernels, words: RandomWords, shape: tuple[int, int, int]) -> None:
    cluster, count, threads = shape
    x = words(3, count, cluster * threads).view(np.int32)
    y = blank(count, cluster * threads, 2).view(np.int32)
    found = run("reduce", x, y, 3, grid=cluster * count, block=threads, cluster=cluster)[1]
    equal(found[..., 0], np.broadcast_to(x.sum(axis=(0, 2), dtype=np.int32)[:, None], found.shape[:2]))
    equal(found[..., 1], np.broadcast_to(x.max(axis=(0, 2))[:, None], found.shape[:2]))


# ---- clusters: asynchronous stores and reductions --------------------------------------------------------------------

ASYNCHRONOUS = r"""
#define STORE_ASYNC "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"

// In each round every block stores into another one, in one form or another, and waits for its own four words a thread.
__global__ void mail(const uint4* x, uint4* y, int rounds, int kind) {
  extern __shared__ uint4 letters[];
  __shared__ u64 arrived;
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  if (t == 0) init(arrived, 1);
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    if (t == 0) arrive_and_expect(arrived, 16 * blockDim.x);
    sync_cluster();
    const uint4 v = x[r * gridDim.x * blockDim.x + thread()];
    const u32 block = (rank + 1 + r % (blocks - 1)) % blocks;
    const u32 to = in_block(block, &letters[t]), barrier = in_block(block, &arrived);
    const u64 low = v.x | u64(v.y) << 32, high = v.z | u64(v.w) << 32;
    if (kind == 0)
      asm volatile(STORE_ASYNC ".b32 [%0], %1, [%5]; " STORE_ASYNC ".u32 [%0 + 4], %2, [%5]; "
                   STORE_ASYNC ".s32 [%0 + 8], %3, [%5]; " STORE_ASYNC ".b32 [%0 + 12], %4, [%5];"
                   :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
    if (kind == 1)
      asm volatile(STORE_ASYNC ".b64 [%0], %1, [%3]; " STORE_ASYNC ".u64 [%0 + 8], %2, [%3];"
                   :: "r"(to), "l"(low), "l"(high), "r"(barrier) : "memory");
    if (kind == 2)
      asm volatile(STORE_ASYNC ".v2.b32 [%0], {%1, %2}, [%5]; " STORE_ASYNC ".v2.b32 [%0 + 8], {%3, %4}, [%5];"
                   :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
    if (kind == 3)
      asm volatile(STORE_ASYNC ".v2.b64 [%0], {%1, %2}, [%3];"
                   :: "r"(to), "l"(low), "l"(high), "r"(barrier) : "memory");
    if (kind == 4)
      asm volatile(STORE_ASYNC ".v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
                   :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
    wait(arrived, r & 1);
    y[r * gridDim.x * blockDim.x + thread()] = letters[t];
    sync_cluster();
  }
}
"""


@kernels("asynchronous", ASYNCHRONOUS)
@pytest.mark.parametrize("shape", [(2, 2, 32), (4, 1, 96), (8, 1, 40)], ids=str)
@pytest.mark.parametrize("kind", range(5), ids=["b32", "b64", "v2.b32", "v2.b64", "v4.b32"])
def test_an_asynchronous_store_is_seen_by_who_waits_for_its_bytes(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], kind: int
) -> None:
    cluster, count, threads = shape
    x = words(4, count, cluster, threads, 4)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster, "shared_mem_bytes": 16 * threads}
    found = run("mail", x, blank(*x.shape), len(x), kind, **how)[1]
    equal(found, np.stack([np.roll(row, 1 + r % (cluster - 1), axis=1) for r, row in enumerate(x)]))
