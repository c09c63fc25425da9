"""Asynchronous copies: of threads, and in bulk."""

from __future__ import annotations

import numpy as np
import pytest
from cooperation import Kernels, RandomWords, blank, equal, kernels

# ---- copies of threads -----------------------------------------------------------------------------------------------

COPIES = r"""
template <int nbytes> __device__ void copy(u32 to, const void* from, u32 size, int kind) {
  if (kind == 0)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(to), "l"(from), "n"(nbytes), "r"(size) : "memory");
  if (kind == 1)  // all or nothing
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %3, 0; "
                 "cp.async.ca.shared::cta.global.L2::128B [%0], [%1], %2, p; }"
                 :: "r"(to), "l"(from), "n"(nbytes), "r"(size) : "memory");
  if (nbytes == 16 && kind == 2)
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(size) : "memory");
}

// Each thread copies four groups of `each` pieces, and has them back as it waits for one group after another.
template <int nbytes> __global__ void pieces(const char* x, const u32* sizes, u32* y, int each, int kind) {
  extern __shared__ char tile[];
  const int threads = gridDim.x * blockDim.x;
#pragma unroll 1
  for (int g = 0; g < 4; ++g) {
#pragma unroll 1
    for (int i = g * each; i < (g + 1) * each; ++i)
      copy<nbytes>(at(tile + (i * blockDim.x + threadIdx.x) * nbytes), x + size_t(i * threads + thread()) * nbytes,
                   sizes[i * threads + thread()], kind);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
#pragma unroll 1
  for (int g = 0; g < 4; ++g) {
    if (g == 0) asm volatile("cp.async.wait_group 3;" ::: "memory");
    if (g == 1) asm volatile("cp.async.wait_group 2;" ::: "memory");
    if (g == 2) asm volatile("cp.async.wait_group 1;" ::: "memory");
    if (g == 3) asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 1
    for (int i = g * each; i < (g + 1) * each; ++i)
      for (int w = 0; w < nbytes / 4; ++w)
        y[(i * threads + thread()) * (nbytes / 4) + w] =
            reinterpret_cast<u32*>(tile)[(i * blockDim.x + threadIdx.x) * (nbytes / 4) + w];
  }
}

// An mbarrier waits for the copies of all threads: each thread arrives when its own are there, and the object counts
// on that, or counts that beside what it counts on.
__global__ void tracked(const u32* x, u32* y, int rounds, int kind) {
  extern __shared__ u32 row[];
  __shared__ u64 barrier;
  const u32 t = threadIdx.x;
  if (t == 0) init(barrier, blockDim.x);
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    const u32* const from = x + r * gridDim.x * blockDim.x + thread();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&row[t])), "l"(from) : "memory");
    if (kind == 0) asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at(&barrier)) : "memory");
    if (kind == 1) asm volatile("cp.async.mbarrier.arrive.noinc.b64 [%0];" :: "l"(&barrier) : "memory");
    if (kind == 2) asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" :: "r"(at(&barrier)) : "memory");
    if (kind == 2) arrive(barrier);
    wait(barrier, r & 1);
    y[r * gridDim.x * blockDim.x + thread()] = row[blockDim.x - 1 - t];
    __syncthreads();
  }
}
"""


@kernels("copies", COPIES, "pieces<4>", "pieces<8>", "pieces<16>")
@pytest.mark.parametrize("shape", [(1, 32, 1), (3, 96, 2), (2, 40, 3)], ids=str)
@pytest.mark.parametrize(
    ("nbytes", "kind"), [(n, k) for n in (4, 8, 16) for k in (0, 1, 2) if n == 16 or k < 2], ids=str
)
def test_asynchronous_copies_fill_up_with_zeros(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], nbytes: int, kind: int
) -> None:
    blocks, threads, each = shape
    count = 4 * each * blocks * threads
    x = rng.integers(0, 256, (count, nbytes), np.uint8)
    sizes = rng.integers(0, nbytes + 1, count, np.uint32)
    how = {"grid": blocks, "block": threads, "shared_mem_bytes": 4 * each * threads * nbytes}
    y = run(f"pieces<{nbytes}>", x.view(np.int8), sizes, blank(count, nbytes // 4), each, kind, **how)[2]
    amounts = np.where(sizes > 0, nbytes, 0) if kind == 1 else sizes
    equal(y.view(np.uint8), np.where(np.arange(nbytes) < amounts[:, None], x, 0))


@kernels("copies", COPIES, "pieces<4>", "pieces<8>", "pieces<16>")
@pytest.mark.parametrize("shape", [(1, 32), (2, 96), (3, 33)], ids=str)
@pytest.mark.parametrize("kind", range(3), ids=["counted on", "counted on, generic", "counted beside"])
def test_an_mbarrier_waits_for_the_copies_of_threads(
    run: Kernels, words: RandomWords, shape: tuple[int, int], kind: int
) -> None:
    blocks, threads = shape
    x = words(5, blocks, threads)
    how = {"grid": blocks, "block": threads, "shared_mem_bytes": 4 * threads}
    equal(run("tracked", x, blank(*x.shape), len(x), kind, **how)[1], x[..., ::-1])


# ---- bulk copies -----------------------------------------------------------------------------------------------------

BULK = r"""
__device__ void fetch(u32 to, const void* from, u32 nbytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(nbytes), "r"(barrier) : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// The first `parts` threads each fetch a run of bytes in each round; all threads read them.
__global__ void load(const char* x, u32* y, int rounds, int parts, u32 nbytes, int kind) {
  extern __shared__ uint4 tile[];
  __shared__ u64 barrier;
  const u32 t = threadIdx.x, to = at(tile) + t * nbytes, all = parts * nbytes;
  if (t == 0) init(barrier, 1);
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    const char* const from = x + size_t(r * gridDim.x + blockIdx.x) * all + t * nbytes;
    if (kind == 2 && t < parts)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(nbytes) : "memory");
    if (t == 0) arrive_and_expect(barrier, all);
    __syncthreads();
    if (t < parts) {
      if (kind == 1)
        asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to), "l"(from), "r"(nbytes), "r"(at(&barrier)) : "memory");
      else
        fetch(to, from, nbytes, at(&barrier));
    }
    wait(barrier, r & 1);
#pragma unroll 1
    for (u32 i = t; i < all / 4; i += blockDim.x)
      y[(r * gridDim.x + blockIdx.x) * (all / 4) + i] = reinterpret_cast<u32*>(tile)[i];
    fence_proxy();
    __syncthreads();
  }
}

// Each warp puts runs of bytes into two buffers in turn, and lets lane 0 send them; a buffer is written again when what
// was sent from it has been read. kind 1: when it has arrived.
__global__ void store(const u32* x, char* y, int rounds, u32 nbytes, int kind) {
  extern __shared__ uint4 tile[];
  const u32 lane = lane_id(), warps = gridDim.x * blockDim.x / 32, warp = thread() / 32;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    char* const buffer = reinterpret_cast<char*>(tile) + (threadIdx.x / 32 * 2 + r % 2) * nbytes;
    if (lane == 0) {
      if (kind == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      if (kind == 1) asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
    }
    __syncwarp();
#pragma unroll 1
    for (u32 i = lane; i < nbytes / 4; i += 32)
      reinterpret_cast<u32*>(buffer)[i] = x[(r * warps + warp) * (nbytes / 4) + i];
    fence_proxy();
    __syncwarp();
    if (lane == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                   :: "l"(y + size_t(r * warps + warp) * nbytes), "r"(at(buffer)), "r"(nbytes) : "memory");
      commit();
    }
  }
  if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Each block passes on what it has to the next one of its cluster, once for each block.
__global__ void pass_on(const u32* x, u32* y, u32 nbytes) {
  extern __shared__ uint4 tile[];  // two buffers, which take turns
  __shared__ u64 full[2];
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  const u32 count = nbytes / 4;
  u32* const buffers = reinterpret_cast<u32*>(tile);
  if (t == 0) init(full[0], 1), init(full[1], 1);
#pragma unroll 1
  for (u32 i = t; i < count; i += blockDim.x) buffers[i] = x[blockIdx.x * count + i];
#pragma unroll 1
  for (u32 r = 0; r < blocks; ++r) {
    u32* const here = buffers + r % 2 * count;
    u32* const there = buffers + (r + 1) % 2 * count;
    u64& barrier = full[(r + 1) % 2];
    if (t == 0) arrive_and_expect(barrier, nbytes);
    fence_proxy();
    sync_cluster();
    const u32 next = (rank + 1) % blocks;
    if (t == 0)
      asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(in_block(next, there)), "r"(at(here)), "r"(nbytes), "r"(in_block(next, &barrier)) : "memory");
    wait(barrier, r / 2 & 1);
#pragma unroll 1
    for (u32 i = t; i < count; i += blockDim.x)
      y[(r * gridDim.x + blockIdx.x) * count + i] = there[i];
  }
  sync_cluster();
}

// Each block fetches a slice for those blocks of its cluster that its mask names; row `rank` of each of them gets it.
__global__ void spread(const char* x, const u32* masks, u32* y, u32 nbytes) {
  extern __shared__ uint4 tile[];
  __shared__ u64 full;
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  const u32 first = blockIdx.x - rank;
  u32* const rows = reinterpret_cast<u32*>(tile);
#pragma unroll 1
  for (u32 i = t; i < blocks * nbytes / 4; i += blockDim.x) rows[i] = 7;
  fence_proxy();
  if (t == 0) {
    u32 all = 0;
#pragma unroll 1
    for (u32 j = 0; j < blocks; ++j) all += (masks[first + j] >> rank & 1) * nbytes;
    init(full, 1);
    arrive_and_expect(full, all);
  }
  sync_cluster();
  if (t == 0 && masks[blockIdx.x])
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1], %2, [%3], %4;"
                 :: "r"(at(rows + rank * nbytes / 4)), "l"(x + size_t(blockIdx.x) * nbytes), "r"(nbytes),
                    "r"(at(&full)), "h"(static_cast<unsigned short>(masks[blockIdx.x])) : "memory");
  wait(full, 0);
#pragma unroll 1
  for (u32 i = t; i < blocks * nbytes / 4; i += blockDim.x) y[blockIdx.x * blocks * nbytes / 4 + i] = rows[i];
  sync_cluster();
}
"""
SIZES = [16, 48, 256, 1008, 4096]


@kernels("bulk", BULK)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 4, 96), (3, 11, 64)], ids=str)
@pytest.mark.parametrize("kind", range(3), ids=["cluster", "block", "prefetched"])
def test_bulk_copies_into_shared_memory(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], nbytes: int, kind: int
) -> None:
    blocks, parts, threads = shape
    x = words(3, blocks, parts, nbytes // 4)
    how = {"grid": blocks, "block": threads, "shared_mem_bytes": parts * nbytes}
    _, found = run("load", x.view(np.int8), blank(*x.shape), len(x), parts, nbytes, kind, **how)
    equal(found, x)


@kernels("bulk", BULK)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shape", [(1, 32), (2, 96)], ids=str)
@pytest.mark.parametrize("kind", range(2), ids=["read", "arrived"])
def test_bulk_copies_out_of_shared_memory(
    run: Kernels, words: RandomWords, shape: tuple[int, int], nbytes: int, kind: int
) -> None:
    blocks, threads = shape
    x = words(5, blocks * threads // 32, nbytes // 4)
    how = {"grid": blocks, "block": threads, "shared_mem_bytes": threads // 32 * 2 * nbytes}
    _, found = run("store", x, blank(*x.shape).view(np.int8), len(x), nbytes, kind, **how)
    equal(found.view(np.uint32), x)


@kernels("bulk", BULK)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shape", [(2, 2, 32), (4, 1, 96), (8, 1, 64)], ids=str)
def test_bulk_copies_from_block_to_block(
    run: Kernels, words: RandomWords, shape: tuple[int, int, int], nbytes: int
) -> None:
    cluster, count, threads = shape
    x = words(count, cluster, nbytes // 4)
    how = {"grid": cluster * count, "block": threads, "cluster": cluster, "shared_mem_bytes": 2 * nbytes}
    _, found = run("pass_on", x, blank(cluster, *x.shape), nbytes, **how)
    equal(found, np.stack([np.roll(x, r + 1, axis=1) for r in range(cluster)]))


@kernels("bulk", BULK)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("shape", [(1, 2, 32), (2, 2, 32), (4, 1, 96), (8, 2, 64)], ids=str)
def test_a_bulk_copy_goes_to_the_blocks_of_a_mask(
    run: Kernels, rng: np.random.Generator, words: RandomWords, shape: tuple[int, int, int], nbytes: int
) -> None:
    cluster, count, threads = shape
    x = words(count, cluster, nbytes // 4)
    masks = rng.integers(0, 1 << cluster, (count, cluster), np.uint32)
    masks[0, 0] = (1 << cluster) - 1
    how = {"grid": cluster * count, "block": threads, "cluster": cluster, "shared_mem_bytes": cluster * nbytes}
    found = run("spread", x.view(np.int8), masks, blank(count, cluster, *x.shape[1:]), nbytes, **how)[2]
    named = masks[:, None, :] >> np.arange(cluster)[:, None] & 1  # by cluster, receiver and sender
    equal(found, np.where(named[..., None] == 1, x[:, None], 7))
