"""What the threads of a warp, a block, a cluster and a grid do together: barriers, exchanges, copies, products.

Every loop that waits for others ends: a wait that is given up is noted on the device and fails the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import drvkit as dk

PRELUDE = r"""
using u32 = unsigned;
using u64 = unsigned long long;

__device__ u32 late;  // waits that were given up

__device__ u64 now() {
  u64 nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds) :: "memory");
  return nanoseconds;
}

// Looks until it is so, for two seconds at most.
template <class Condition> __device__ void until(Condition holds) {
  for (const u64 end = now() + 2000000000; !holds();)
    if (now() > end) {
      atomicAdd(&late, 1);
      return;
    }
}

#define SPECIAL(name) ([] { u32 value; asm volatile("mov.u32 %0, %%" name ";" : "=r"(value)); return value; }())
#define TRUTH(yes, instruction, ...) \
  asm volatile("{ .reg .pred p; " instruction "; selp.u32 %0, 1, 0, p; }" : "=r"(yes) : __VA_ARGS__ : "memory")

__device__ u32 lane_id() { return SPECIAL("laneid"); }
__device__ u32 thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// An address in the window of shared memory: of this block, or of the same place in another one of the cluster.
__device__ u32 at(const void* place) { return static_cast<u32>(__cvta_generic_to_shared(place)); }
__device__ u32 in_block(u32 rank, const void* place) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(place)), "r"(rank));
  return there;
}

__device__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// mbarrier objects
__device__ void init(u64& barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;"
               :: "r"(at(&barrier)), "r"(count) : "memory");
}
__device__ void arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&barrier)) : "memory");
}
__device__ void arrive_and_expect(u64& barrier, u32 nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(&barrier)), "r"(nbytes) : "memory");
}
__device__ void wait(u64& barrier, u32 parity) {
  until([&] {
    u32 passed;
    TRUTH(passed, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2", "r"(at(&barrier)),
          "r"(parity));
    return passed;
  });
}

// Between accesses by instructions and those by bulk copies.
__device__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
"""

Words = NDArray[np.uint32]


class Kernels:
    """The kernels of a text, on a device."""

    def __init__(self, device: dk.Device, module: dk.Module) -> None:
        self.device, self.module = device, module
        self.late = module.variable("late", 1, np.uint32)

    def __call__(self, name: str, *args: Any, **how: Any) -> list[NDArray[Any]]:
        """Run one; gives the arrays among its arguments as it leaves them."""
        with ExitStack() as stack:
            stream = stack.enter_context(self.device.stream())
            given = [stack.enter_context(self.device.array(x)) if isinstance(x, np.ndarray) else x for x in args]
            self.module.kernel(name).launch(stream, args=given, **how)
            stream.synchronize()
            self.check()
            return [buffer.numpy() for buffer in given if isinstance(buffer, dk.Buffer)]

    def check(self) -> None:
        late = int(self.late.numpy()[0])
        if late:
            self.late.fill(0)
        assert not late, f"{late} waits were given up"


@pytest.fixture(scope="module")
def run(device: dk.Device, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels that stand above the test."""
    text, instantiations = request.param
    source = dk.Source.from_text(PRELUDE + text, "cooperation.cu")
    names = [kernel.qualified for kernel in source.kernels() if not kernel.template]
    with device.module(source, [*names, *instantiations]) as module:
        yield Kernels(device, module)


def kernels(title: str, text: str, *instantiations: str) -> pytest.MarkDecorator:
    """What the test runs: the kernels of a text and these instantiations of its templates."""
    return pytest.mark.parametrize("run", [pytest.param((text, instantiations), id=title)], indirect=True)


def blank(*shape: int) -> Words:
    """To be overwritten."""
    return np.full(shape, 0xEEEEEEEE, np.uint32)


RandomWords = Callable[..., Words]


@pytest.fixture
def words(rng: np.random.Generator) -> RandomWords:
    """``words(4, 32)``: an array of that shape."""
    return lambda *shape: rng.integers(0, 1 << 32, shape, np.uint32)


equal = np.testing.assert_array_equal

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


# Reductions, as instructions call them: what becomes of an element.
Change = Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
REDUCTIONS: dict[str, Change] = {
    "add": lambda old, x: old + x,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda old, x: np.where(old >= x, 0, old + 1).astype(old.dtype),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - 1).astype(old.dtype),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
TYPES = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
IN_A_CLUSTER = [
    *("add.u32", "add.s32", "add.u64", "min.u32", "max.u32", "min.s32", "max.s32"),
    *("inc.u32", "dec.u32", "and.b32", "or.b32", "xor.b32"),
]
IN_GLOBAL_MEMORY = [
    *IN_A_CLUSTER,
    *("min.u64", "max.u64", "min.s64", "max.s64", "and.b64", "or.b64", "xor.b64"),
    *("add.f32", "add.f64", "add.noftz.f16", "add.noftz.bf16", "min.f16", "max.f16", "min.bf16", "max.bf16"),
]


def operands(rng: np.random.Generator, operation: str, times: int, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """What is there, and ``times`` rows of operands, in whatever order: sums are exact, limits are the same."""
    name, dtype = operation.split(".")[0], np.dtype(TYPES[operation.split(".")[-1]])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if name in ("inc", "dec"):
            old = rng.integers(0, 12, count).astype(dtype)
            return old, np.broadcast_to(rng.integers(0, 10, count).astype(dtype), (times, count)).copy()
        numbers = rng.integers(limits.min, limits.max, (times + 1, count), dtype, endpoint=True)
    else:
        numbers = rng.integers(-3, 4, (times + 1, count)).astype(dtype)
        if name != "add":
            numbers = rng.normal(size=(times + 1, count)).astype(dtype)
    return numbers[0], numbers[1:]


def reduced(operation: str, old: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    for row in rows:
        old = REDUCTIONS[operation.split(".")[0]](old, row)
    return old


def case(operation: str, instruction: str, *inputs: str) -> str:
    """The choice of ``which``."""
    which = IN_GLOBAL_MEMORY.index(operation)
    return f'      case {which}: asm volatile("{instruction}" :: {", ".join(inputs)} : "memory"); break;'


RED_ASYNC = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
CLUSTER_REDUCTIONS = (
    r"""
// All blocks but the first of a cluster reduce their row, of an element a thread, into the first one's.
template <class T> __global__ void reduce(const T* x, T* y, int which) {
  extern __shared__ u64 memory[];
  __shared__ u64 done;
  T* const row = reinterpret_cast<T*>(memory);
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  row[t] = y[blockIdx.x / blocks * blockDim.x + t];
  if (t == 0) {
    init(done, 1);
    if (rank == 0) arrive_and_expect(done, (blocks - 1) * blockDim.x * sizeof(T));
  }
  sync_cluster();
  if (rank) {
    const u32 to = in_block(0, &row[t]), barrier = in_block(0, &done);
    const T v = x[thread()];
    const u32 word = u32(v);
    const u64 wide = u64(v);
    switch (which) {
"""
    + "\n".join(
        case(
            operation,
            f"{RED_ASYNC}.{operation} [%0], %1, [%2];",
            '"r"(to)',
            '"l"(wide)' if operation.endswith("64") else '"r"(word)',
            '"r"(barrier)',
        )
        for operation in IN_A_CLUSTER
    )
    + r"""
    }
  } else {
    wait(done, 0);
    y[blockIdx.x / blocks * blockDim.x + t] = row[t];
  }
  sync_cluster();
}
"""
)


@kernels("cluster_reductions", CLUSTER_REDUCTIONS, "reduce<u32>", "reduce<u64>")
@pytest.mark.parametrize("shape", [(2, 2, 64), (4, 1, 96), (8, 2, 32)], ids=str)
@pytest.mark.parametrize("operation", IN_A_CLUSTER)
def test_an_asynchronous_reduction_is_seen_by_who_waits_for_its_bytes(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], operation: str
) -> None:
    cluster, count, threads = shape
    old, rows = operands(rng, operation, cluster, count * threads)
    x = np.ascontiguousarray(rows.reshape(cluster, count, threads).swapaxes(0, 1))
    word = np.dtype(f"u{x.itemsize}")
    how = {"grid": cluster * count, "block": threads, "cluster": cluster, "shared_mem_bytes": 8 * threads}
    name = f"reduce<u{8 * x.itemsize}>"
    found = run(name, x.view(word), old.view(word), IN_GLOBAL_MEMORY.index(operation), **how)[1]
    equal(found.view(old.dtype), reduced(operation, old, rows[1:]))


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


# ---- bulk reductions -------------------------------------------------------------------------------------------------

BULK_REDUCE = "cp.reduce.async.bulk.{}.{} [%0], [%1], %2"
BULK_REDUCTIONS = (
    r"""
__device__ void fill(uint4* tile, const char* x, u32 nbytes) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < nbytes / 16; i += blockDim.x)
    tile[i] = reinterpret_cast<const uint4*>(x + size_t(blockIdx.x) * nbytes)[i];
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Every block reduces its row into the only one.
__global__ void globally(const char* x, char* y, u32 nbytes, int which) {
  extern __shared__ uint4 tile[];
  fill(tile, x, nbytes);
  __syncthreads();
  if (threadIdx.x) return;
  switch (which) {
"""
    + "\n".join(
        case(
            operation,
            BULK_REDUCE.format("global.shared::cta.bulk_group", operation) + ";",
            *('"l"(y)', '"r"(at(tile))', '"r"(nbytes)'),
        )
        for operation in IN_GLOBAL_MEMORY
    )
    + r"""
  }
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}

// Every block but the first of a cluster reduces its row into that of the first one.
__global__ void in_cluster(const char* x, u32* y, u32 nbytes, int which) {
  extern __shared__ uint4 tile[];
  __shared__ u64 full;
  const u32 rank = SPECIAL("cluster_ctarank"), blocks = SPECIAL("cluster_nctarank"), t = threadIdx.x;
  fill(tile, x, nbytes);
  if (rank == 0 && t == 0) {
    init(full, 1);
    arrive_and_expect(full, (blocks - 1) * nbytes);
  }
  sync_cluster();
  if (rank && t == 0) {
    const u32 to = in_block(0, tile), barrier = in_block(0, &full);
    switch (which) {
"""
    + "\n".join(
        case(
            operation,
            BULK_REDUCE.format("shared::cluster.shared::cta.mbarrier::complete_tx::bytes", operation) + ", [%3];",
            *('"r"(to)', '"r"(at(tile))', '"r"(nbytes)', '"r"(barrier)'),
        )
        for operation in IN_A_CLUSTER
    )
    + r"""
    }
  }
  if (rank == 0) {
    wait(full, 0);
#pragma unroll 1
    for (u32 i = t; i < nbytes / 4; i += blockDim.x)
      y[blockIdx.x / blocks * (nbytes / 4) + i] = reinterpret_cast<u32*>(tile)[i];
  }
  sync_cluster();
}
"""
)


@kernels("bulk_reductions", BULK_REDUCTIONS)
@pytest.mark.parametrize("shape", [(1, 16), (5, 208), (40, 1024)], ids=str)
@pytest.mark.parametrize("operation", IN_GLOBAL_MEMORY)
def test_bulk_reductions_into_global_memory(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int], operation: str
) -> None:
    blocks, nbytes = shape
    count = nbytes // np.dtype(TYPES[operation.split(".")[-1]]).itemsize
    old, rows = operands(rng, operation, blocks, count)
    how = {"grid": blocks, "block": 64, "shared_mem_bytes": nbytes}
    which = IN_GLOBAL_MEMORY.index(operation)
    found = run("globally", rows.view(np.int8), old.view(np.int8), nbytes, which, **how)[1]
    equal(found.view(old.dtype), reduced(operation, old, rows))


@kernels("bulk_reductions", BULK_REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 2, 16), (4, 1, 208), (8, 2, 1024)], ids=str)
@pytest.mark.parametrize("operation", IN_A_CLUSTER)
def test_bulk_reductions_into_a_block_of_the_cluster(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], operation: str
) -> None:
    cluster, count, nbytes = shape
    items = nbytes // np.dtype(TYPES[operation.split(".")[-1]]).itemsize
    old, rows = operands(rng, operation, cluster - 1, count * items)
    x = np.stack([old, *rows]).reshape(cluster, count, items).swapaxes(0, 1)
    how = {"grid": cluster * count, "block": 32, "cluster": cluster, "shared_mem_bytes": nbytes}
    which = IN_GLOBAL_MEMORY.index(operation)
    found = run("in_cluster", np.ascontiguousarray(x).view(np.int8), blank(count, nbytes // 4), nbytes, which, **how)[1]
    equal(found.reshape(-1).view(old.dtype), reduced(operation, old, rows))


# ---- grids that depend on each other ---------------------------------------------------------------------------------

DEPENDENT = r"""
// Lets the next grid begin, at once or at the end; reads what the one before has written, and takes its time.
__global__ void step(const u32* x, u32* y, int n, u32 factor, int early) {
  if (early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (const u64 end = now() + 20000; now() < end;) {}
  for (int i = thread(); i < n; i += gridDim.x * blockDim.x) y[i] = x[i] * factor + i;
  if (!early) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
"""
N = 5000
FACTORS = [3, 5, 7, 11]


def stepped(x: Words) -> list[Words]:
    """The rows that ``step`` makes, one from another."""
    rows = [x]
    for factor in FACTORS:
        rows.append((factor * rows[-1].astype(np.int64) + np.arange(N)).astype(np.uint32))
    return rows


@kernels("dependent", DEPENDENT)
@pytest.mark.parametrize("blocks", [1, 7, 40])
@pytest.mark.parametrize("early", [0, 1], ids=["late", "early"])
def test_programmatic_launches_wait_for_what_is_before_them(
    device: dk.Device, run: Kernels, words: RandomWords, blocks: int, early: int
) -> None:
    x, step = words(N), run.module.kernel("step")
    with ExitStack() as stack:
        stream = stack.enter_context(device.stream())
        rows = [stack.enter_context(device.array(row)) for row in (x, *[blank(N)] * len(FACTORS))]
        for _ in range(3):
            for i, factor in enumerate(FACTORS):
                args = (rows[i], rows[i + 1], N, factor, early)
                step.launch(stream, grid=blocks, block=128, args=args, programmatic=i > 0)
        stream.synchronize()
        for row, want in zip(rows, stepped(x), strict=True):
            equal(row.numpy(), want)


@kernels("dependent", DEPENDENT)
@pytest.mark.parametrize("blocks", [1, 7, 40])
@pytest.mark.parametrize("early", [0, 1], ids=["late", "early"])
def test_programmatic_edges_wait_for_what_is_before_them(
    device: dk.Device, run: Kernels, words: RandomWords, blocks: int, early: int
) -> None:
    x, step = words(N), run.module.kernel("step")
    with ExitStack() as stack:
        stream = stack.enter_context(device.stream())
        rows = [stack.enter_context(device.array(row)) for row in (x, *[blank(N)] * len(FACTORS))]
        graph = stack.enter_context(dk.Graph(device, "steps"))
        after: Any = None
        for i, factor in enumerate(FACTORS):
            args = (rows[i], rows[i + 1], N, factor, early)
            after = graph.kernel(step, grid=blocks, block=128, args=args, after=after).port("programmatic")
        with graph.instantiate() as exe:
            for _ in range(3):
                exe.launch(stream)
            stream.synchronize()
        for row, want in zip(rows, stepped(x), strict=True):
            equal(row.numpy(), want)


COOPERATIVE = r"""
// A barrier of the grid: it counts on, and is never reset.
__device__ void sync_grid(u32* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const u32 goal = (atomicAdd(arrived, 1) / gridDim.x + 1) * gridDim.x;
    until([&] {
      u32 seen;
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
      return int(seen - goal) >= 0;
    });
    __threadfence();
  }
  __syncthreads();
}

__global__ void relay(const u32* x, u32* y, u32* arrived, int rounds) {
  const u32 threads = gridDim.x * blockDim.x;
  y[thread()] = x[thread()];
#pragma unroll 1
  for (int r = 1; r < rounds; ++r) {
    sync_grid(arrived);
    const u32 from = (thread() + r * blockDim.x + 1) % threads;
    y[r * threads + thread()] = 31 * y[(r - 1) * threads + from] + r;
  }
}
"""


@kernels("cooperative", COOPERATIVE)
@pytest.mark.parametrize("shape", [(1, 32), (2, 96), (33, 64), (132, 32)], ids=str)
def test_a_cooperative_grid_meets(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, threads = shape
    rounds, x = 6, words(blocks * threads)
    y, arrived = blank(rounds, x.size), np.zeros(1, np.uint32)
    _, found, count = run("relay", x, y, arrived, rounds, grid=blocks, block=threads, cooperative=True)
    row = x
    for r in range(rounds):
        if r:
            row = np.uint32(31) * np.roll(row, -(r * threads + 1)) + np.uint32(r)
        equal(found[r], row, err_msg=f"round {r}")
    assert count[0] == blocks * (rounds - 1)


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


# ---- lanes of a warp -------------------------------------------------------------------------------------------------

LANES = r"""
// Lanes of one part of a warp exchange through memory, `rounds` times.
__device__ u32 exchanged(u32* slots, u32 value, u32 first, u32 size, int rounds, u32 factor) {
  const u32 members = (size == 32 ? ~0u : (1u << size) - 1) << first, me = lane_id() - first;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r) {
    slots[lane_id()] = value;
    __syncwarp(members);
    value = factor * value + slots[first + (me + r + 1) % size];
    __syncwarp(members);
  }
  return value;
}

// Two parts, each in a branch of its own, with as many rounds as its size.
__global__ void parts(const u32* x, u32* y, u32 cut) {
  extern __shared__ u32 memory[];
  u32* const slots = memory + threadIdx.x / 32 * 32;
  u32 value = x[thread()];
  if (lane_id() < cut) value = exchanged(slots, value, 0, cut, cut, 3);
  else value = exchanged(slots, value, cut, 32 - cut, 32 - cut, 5);
  __syncwarp();
  slots[lane_id()] = value;
  __syncwarp();
  y[thread()] = value + slots[31 - lane_id()];
}

// Four parts of eight lanes, each in a case of its own.
__global__ void cases(const u32* x, u32* y) {
  extern __shared__ u32 memory[];
  u32* const slots = memory + threadIdx.x / 32 * 32;
  u32 value = x[thread()];
  switch (lane_id() / 8) {
    case 0: value = exchanged(slots, value, 0, 8, 1, 3); break;
    case 1: value = exchanged(slots, value, 8, 8, 2, 5); break;
    case 2: value = exchanged(slots, value, 16, 8, 3, 7); break;
    default: value = exchanged(slots, value, 24, 8, 4, 9);
  }
  y[thread()] = value;
}

// Those that `members` names elect one of them, twice: who it is, and whether it is this lane.
__global__ void elected(const u32* members, u32* y) {
  const u32 mask = members[thread() / 32];
  if (~mask >> lane_id() & 1) return;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    u32 who, me;
    asm volatile("{ .reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p; }" : "=r"(who), "=r"(me) : "r"(mask));
    y[4 * thread() + 2 * i] = who;
    y[4 * thread() + 2 * i + 1] = me;
  }
}

// Lanes that have one key make a group, in which they reduce: seven answers each.
__global__ void reduce_groups(const u32* keys, const u32* x, u32* y) {
  const u32 key = keys[thread()], value = x[thread()];
  const u32 group = __match_any_sync(~0u, key);
  u32* const to = y + 8 * thread();
  to[0] = group;
  to[1] = __reduce_add_sync(group, value);
  to[2] = __reduce_min_sync(group, value);
  to[3] = static_cast<u32>(__reduce_max_sync(group, static_cast<int>(value)));
  to[4] = __reduce_and_sync(group, value);
  to[5] = __reduce_or_sync(group, value);
  to[6] = __reduce_xor_sync(group, value);
  to[7] = __popc(__match_any_sync(group, u64(value & 3) << 40));
}

// What lanes agree on, of those that `members` names.
__global__ void agree(const u32* members, const u32* x, u32* y) {
  const u32 mask = members[thread() / 32], value = x[thread()];
  if (~mask >> lane_id() & 1) return;
  int same;
  u32* const to = y + 6 * thread();
  to[0] = __match_all_sync(mask, value, &same);
  to[1] = same;
  to[2] = __ballot_sync(mask, value & 1);
  to[3] = __all_sync(mask, value & 1) + 2 * __any_sync(mask, value & 1) + 4 * __uni_sync(mask, value & 1);
  to[4] = __shfl_sync(mask, value, __ffs(mask) - 1);
  to[5] = __match_any_sync(mask, value);
}

// Who is active in each branch.
__global__ void active(const u32* x, u32* y) {
  u32 before = __activemask(), mask;
  if (x[thread()] & 1) mask = __activemask();
  else mask = ~__activemask();
  y[2 * thread()] = before;
  y[2 * thread() + 1] = mask;
}

// Lanes go round as often as each wants: in each round those that are left vote, shuffle and add up.
__global__ void go_round(const u32* trips, const u32* x, u32* y) {
  u32 left = trips[thread()], value = x[thread()], log = 0;
  u32 members = __ballot_sync(~0u, left > 0);
  if (left)
#pragma unroll 1  // else some lanes are in one copy of the loop and some in another
    while (true) {
      const u32 neighbour = __shfl_sync(members, value, __fns(members, lane_id(), 2) & 31);
      value = 3 * value + (lane_id() == 31 - __clz(members) ? 1 : neighbour);
      log = 7 * log + __popc(members) + __reduce_max_sync(members, value & 0xffff);
      --left;
      members = __ballot_sync(members, left > 0);
      if (!left) break;
    }
  __syncwarp();
  y[2 * thread()] = value + __shfl_xor_sync(~0u, value, 5);
  y[2 * thread() + 1] = log;
}

// Times as a thread reads them, with naps between, until the clock has gone on.
__global__ void clocks(u64* y, int count) {
  u64* const to = y + 2 * count * thread();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    to[2 * i] = now();
    to[2 * i + 1] = clock64();
    __nanosleep(20 * (threadIdx.x % 3));
    if (i + 2 == count) until([&] { return now() > to[0] && clock64() > to[1]; });
  }
}
"""


def exchange_parts(x: Words, rounds: int, factor: int) -> Words:
    for r in range(rounds):
        x = np.uint32(factor) * x + np.roll(x, -(r + 1), axis=-1)
    return x


def truths(masks: Words) -> NDArray[np.bool_]:
    """The bits of masks as lanes."""
    lanes: NDArray[np.bool_] = (masks[..., None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)
    return lanes


def mask_of(lanes: NDArray[Any]) -> Words:
    """The other way."""
    masks: Words = (lanes.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return masks


@kernels("lanes", LANES)
@pytest.mark.parametrize("cut", [1, 7, 16, 31])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)], ids=str)
def test_parts_of_a_warp_meet_in_branches(run: Kernels, words: RandomWords, shape: tuple[int, int], cut: int) -> None:
    blocks, warps = shape
    x = words(blocks, warps, 32)
    how = {"grid": blocks, "block": 32 * warps, "shared_mem_bytes": 128 * warps}
    _, found = run("parts", x, blank(*x.shape), cut, **how)
    low, high = exchange_parts(x[..., :cut], cut, 3), exchange_parts(x[..., cut:], 32 - cut, 5)
    want = np.concatenate([low, high], axis=-1)
    equal(found, want + want[..., ::-1])


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_four_parts_of_a_warp_meet_in_cases(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, warps = shape
    x = words(blocks, warps, 32)
    how = {"grid": blocks, "block": 32 * warps, "shared_mem_bytes": 128 * warps}
    _, found = run("cases", x, blank(*x.shape), **how)
    quarters = [exchange_parts(x[..., 8 * q : 8 * q + 8], q + 1, 3 + 2 * q) for q in range(4)]
    equal(found, np.concatenate(quarters, axis=-1))


def some_members(rng: np.random.Generator, warps: int) -> Words:
    masks = rng.integers(1, 1 << 32, warps, np.uint32)
    masks[:3] = 0xFFFFFFFF, 1 << rng.integers(32), 0xFFFF0000
    return masks


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 4), (5, 8)], ids=str)
def test_members_elect_one_of_them(run: Kernels, rng: np.random.Generator, shape: tuple[int, int]) -> None:
    blocks, warps = shape
    masks = some_members(rng, blocks * warps)
    _, found = run("elected", masks, blank(len(masks), 32, 4), grid=blocks, block=32 * warps)
    for mask, answers in zip(truths(masks), found, strict=True):
        leader = answers[mask][0, 0]
        assert mask[leader]
        equal(answers[mask][:, 0::2], leader)
        equal(answers[mask][:, 1::2], (np.flatnonzero(mask) == leader)[:, None].repeat(2, axis=1))
        equal(answers[~mask], blank(int((~mask).sum()), 4))


@kernels("lanes", LANES)
@pytest.mark.parametrize("kinds", [1, 2, 5, 32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_groups_of_one_key_reduce(
    run: Kernels, rng: np.random.Generator, words: RandomWords, shape: tuple[int, int], kinds: int
) -> None:
    blocks, warps = shape
    keys = words(kinds)[rng.integers(0, kinds, (blocks * warps, 32))]
    x = words(*keys.shape)
    found = run("reduce_groups", keys, x, blank(*keys.shape, 8), grid=blocks, block=32 * warps)[2]
    want = np.zeros_like(found)
    for w, lane in np.ndindex(*keys.shape):
        group = keys[w] == keys[w, lane]
        row = x[w][group]
        want[w, lane] = [
            mask_of(group), row.sum(dtype=np.uint32), row.min(), row.view(np.int32).max().astype(np.uint32),
            np.bitwise_and.reduce(row), np.bitwise_or.reduce(row), np.bitwise_xor.reduce(row),
            (row & 3 == x[w, lane] & 3).sum(),
        ]  # fmt: skip
    equal(found, want)


@kernels("lanes", LANES)
@pytest.mark.parametrize("kinds", [1, 2, 1 << 32])
@pytest.mark.parametrize("shape", [(1, 4), (4, 8)], ids=str)
def test_members_agree(run: Kernels, rng: np.random.Generator, shape: tuple[int, int], kinds: int) -> None:
    blocks, warps = shape
    masks = some_members(rng, blocks * warps)
    x = rng.integers(0, 1 << 32, (len(masks), 32), np.uint32) % np.uint64(kinds)
    x = (x + rng.integers(0, 2, (len(masks), 1), np.uint64)).astype(np.uint32)
    found = run("agree", masks, x, blank(*x.shape, 6), grid=blocks, block=32 * warps)[2]
    for mask, members, row, answers in zip(masks, truths(masks), x, found, strict=True):
        values, odd = row[members], (row & 1 == 1) & members
        same = bool((values == values[0]).all())
        votes = int(odd.sum() == members.sum()) + 2 * int(odd.any()) + 4 * int(odd.sum() in (0, members.sum()))
        equal(answers[members][:, :5], [[mask if same else 0, same, mask_of(odd), votes, values[0]]] * len(values))
        equal(answers[members][:, 5], [mask_of((row == value) & members) for value in values])


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (2, 40)], ids=str)
def test_the_active_lanes_of_a_branch_are_in_it(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, threads = shape
    x = words(*shape)
    _, found = run("active", x, blank(*shape, 2), grid=blocks, block=threads)
    padded = np.zeros((blocks, -(-threads // 32) * 32), bool)
    for odd in (False, True):
        padded[:, :threads] = (x & 1 == 1) == odd
        branch = mask_of(padded.reshape(blocks, -1, 32)).repeat(32, axis=1)[:, :threads]
        lane = np.uint32(1) << (np.arange(threads, dtype=np.uint32) % 32)
        mask = np.where(odd, found[..., 1], ~found[..., 1])
        inside = (x & 1 == 1) == odd
        assert (mask & lane != 0)[inside].all(), "a lane is active itself"
        assert (mask & ~branch == 0)[inside].all(), "nobody is active in a branch that it did not take"
    padded[:, :threads] = True
    everybody = mask_of(padded.reshape(blocks, -1, 32)).repeat(32, axis=1)[:, :threads]
    assert (found[..., 0] & ~everybody == 0).all()
    assert (found[..., 0] & lane != 0).all()


@kernels("lanes", LANES)
@pytest.mark.parametrize("most", [1, 3, 17])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_lanes_that_are_left_go_on_together(
    run: Kernels, rng: np.random.Generator, words: RandomWords, shape: tuple[int, int], most: int
) -> None:
    blocks, warps = shape
    trips = rng.integers(0, most + 1, (blocks * warps, 32), np.uint32)
    x = words(*trips.shape)
    found = run("go_round", trips, x, blank(*trips.shape, 2), grid=blocks, block=32 * warps)[2]
    value, log = x.copy(), np.zeros_like(x)
    for w, row in enumerate(trips):
        for r in range(most):
            members = np.flatnonzero(row > r)
            if len(members):
                following = np.append(value[w, members[1:]], np.uint32(1))
                value[w, members] = np.uint32(3) * value[w, members] + following
                greatest = (value[w, members] & 0xFFFF).max()
                log[w, members] = np.uint32(7) * log[w, members] + np.uint32(len(members)) + greatest
    equal(found[..., 0], value + value[:, np.arange(32) ^ 5])
    equal(found[..., 1], log)


@kernels("lanes", LANES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64)], ids=str)
def test_clocks_never_go_back(run: Kernels, shape: tuple[int, int]) -> None:
    blocks, threads = shape
    (found,) = run("clocks", np.zeros((blocks * threads, 20, 2), np.uint64), 20, grid=blocks, block=threads)
    assert (found[:, 1:] >= found[:, :-1]).all()
    assert (found[:, -1] > found[:, 0]).all()


# ---- matrices --------------------------------------------------------------------------------------------------------

FRAGMENTS = r"""
// Rows of 16 bytes, in the order that `where` tells, as fragments of 8 x 8 elements of 16 bits: y has the registers, z
// the rows that they are stored to. Each warp has 32 rows.
template <int count, bool transposed> __device__ void load(u32 (&a)[4], u32 from) {
#define LDMATRIX(form) "ldmatrix.sync.aligned.m8n8." form ".shared.b16 "
  if (count == 1 && !transposed) asm volatile(LDMATRIX("x1") "{%0}, [%1];" : "=r"(a[0]) : "r"(from) : "memory");
  if (count == 1 && transposed) asm volatile(LDMATRIX("x1.trans") "{%0}, [%1];" : "=r"(a[0]) : "r"(from) : "memory");
  if (count == 2 && !transposed)
    asm volatile(LDMATRIX("x2") "{%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(from) : "memory");
  if (count == 2 && transposed)
    asm volatile(LDMATRIX("x2.trans") "{%0, %1}, [%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(from) : "memory");
  if (count == 4 && !transposed)
    asm volatile(LDMATRIX("x4") "{%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
  if (count == 4 && transposed)
    asm volatile(LDMATRIX("x4.trans") "{%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
template <int count, bool transposed> __device__ void store(u32 to, const u32 (&a)[4]) {
#define STMATRIX(form) "stmatrix.sync.aligned.m8n8." form ".shared.b16 "
  if (count == 1 && !transposed) asm volatile(STMATRIX("x1") "[%0], {%1};" :: "r"(to), "r"(a[0]) : "memory");
  if (count == 1 && transposed) asm volatile(STMATRIX("x1.trans") "[%0], {%1};" :: "r"(to), "r"(a[0]) : "memory");
  if (count == 2 && !transposed)
    asm volatile(STMATRIX("x2") "[%0], {%1, %2};" :: "r"(to), "r"(a[0]), "r"(a[1]) : "memory");
  if (count == 2 && transposed)
    asm volatile(STMATRIX("x2.trans") "[%0], {%1, %2};" :: "r"(to), "r"(a[0]), "r"(a[1]) : "memory");
  if (count == 4 && !transposed)
    asm volatile(STMATRIX("x4") "[%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
  if (count == 4 && transposed)
    asm volatile(STMATRIX("x4.trans") "[%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

template <int count, bool in, bool out>
__global__ void move(const uint4* x, const u32* where, u32* y, uint4* z) {
  extern __shared__ uint4 rows[];
  uint4* const from = rows + threadIdx.x / 32 * 64;
  uint4* const to = from + 32;
  u32 a[4] = {};
  from[lane_id()] = x[thread()];
  to[lane_id()] = uint4{};
  __syncwarp();
  load<count, in>(a, at(from + where[thread()]));
  store<count, out>(at(to + where[thread()]), a);
  __syncwarp();
  for (int i = 0; i < 4; ++i) y[4 * thread() + i] = a[i];
  z[thread()] = to[lane_id()];
}

__global__ void turn(const u32* x, u32* y) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y[thread()]) : "r"(x[thread()]));
}
"""
MOVES = [(count, in_, out) for count in (1, 2, 4) for in_ in (False, True) for out in (False, True)]


@kernels("fragments", FRAGMENTS, *(f"move<{c}, {'true' if i else 'false'}, {'true' if o else 'false'}>"
                                   for c, i, o in MOVES))  # fmt: skip
@pytest.mark.parametrize("warps", [1, 3])
@pytest.mark.parametrize(("count", "turned_in", "turned_out"), MOVES, ids=str)
def test_fragments_are_loaded_and_stored(
    run: Kernels, rng: np.random.Generator, words: RandomWords, warps: int, count: int, turned_in: bool,
    turned_out: bool,
) -> None:  # fmt: skip
    x, where = words(warps, 32, 4), np.argsort(rng.random((warps, 32)), axis=1).astype(np.uint32)
    name = f"move<{count}, {str(turned_in).lower()}, {str(turned_out).lower()}>"
    how = {"grid": 1, "block": 32 * warps, "shared_mem_bytes": 1024 * warps}
    _, _, registers, rows = run(name, x, where, blank(warps, 32, 4), blank(*x.shape), **how)
    for w in range(warps):
        places = where[w, : 8 * count]
        matrices = x[w].view(np.uint16)[places].reshape(count, 8, 8)
        loaded = matrices.swapaxes(1, 2) if turned_in else matrices
        fragments = np.ascontiguousarray(loaded).view(np.uint32).reshape(count, 32)
        equal(registers[w, :, :count], fragments.T)
        stored = np.zeros((32, 8), np.uint16)
        stored[places] = (loaded.swapaxes(1, 2) if turned_out else loaded).reshape(8 * count, 8)
        equal(rows[w].view(np.uint16), stored)


@kernels("fragments", FRAGMENTS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 4)], ids=str)
def test_a_warp_turns_a_matrix(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    blocks, warps = shape
    x = words(blocks * warps, 32)
    _, found = run("turn", x, blank(*x.shape), grid=blocks, block=32 * warps)
    equal(found.view(np.uint16).reshape(-1, 8, 8), x.view(np.uint16).reshape(-1, 8, 8).swapaxes(1, 2))


# mma.sync of 16 x 8 elements with 32 bytes of each row of A and of each column of B: the type of A and B, that of C
# and D, how their registers are told the compiler.
PRODUCTS = {
    "f16": ("m16n8k16", "f32"),
    "bf16": ("m16n8k16", "f32"),
    "tf32": ("m16n8k8", "f32"),
    "e4m3": ("m16n8k32", "f32"),
    "e5m2": ("m16n8k32", "f32"),
    "s8": ("m16n8k32", "s32"),
    "u8": ("m16n8k32", "s32"),
}
ELEMENTS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
PRODUCT = r"""
// D = A B + C of a warp, over `steps` pieces of 32 bytes of A's rows and B's columns.
__global__ void NAME(const uint4* a, const uint4* b, const TYPE* c, TYPE* d, int steps) {
  extern __shared__ uint4 tiles[];
  const u32 lane = lane_id(), warp = thread() / 32, row = lane / 4, column = lane % 4 * 2;
  uint4* const left = tiles + threadIdx.x / 32 * 48;  // 16 rows of 2, then 8 columns of 2
  uint4* const right = left + 32;
  const u32 offset = warp * 128 + row * 8 + column;
  TYPE sum[4] = {c[offset], c[offset + 1], c[offset + 64], c[offset + 65]};
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    left[lane] = a[(warp * steps + s) * 32 + lane];
    if (lane < 16) right[lane] = b[(warp * steps + s) * 16 + lane];
    __syncwarp();
    u32 x[4], y[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at(left + lane % 16 * 2 + lane / 16)) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(y[0]), "=r"(y[1]) : "r"(at(right + lane % 8 * 2 + lane / 8 % 2)) : "memory");
    asm volatile("OPCODE {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+KIND"(sum[0]), "+KIND"(sum[1]), "+KIND"(sum[2]), "+KIND"(sum[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    __syncwarp();
  }
  d[offset] = sum[0], d[offset + 1] = sum[1], d[offset + 64] = sum[2], d[offset + 65] = sum[3];
}
"""


def product(name: str) -> str:
    shape, kind = PRODUCTS[name]
    replaced = {
        "NAME": f"of_{name}",
        "TYPE": "int" if kind == "s32" else "float",
        "OPCODE": f"mma.sync.aligned.{shape}.row.col.{kind}.{name}.{name}.{kind}",
        "KIND": "r" if kind == "s32" else "f",
    }
    text = PRODUCT
    for key, value in replaced.items():
        text = text.replace(key, value)
    return text


def multiplied(
    run: Kernels, name: str, a: NDArray[Any], b: NDArray[Any], c: NDArray[Any], warps: int
) -> NDArray[np.float64]:
    """By a kernel: A of (products, steps, 16, k), B of (products, steps, 8, k), which has its columns as rows."""
    x, y = (np.ascontiguousarray(each).view(np.uint32).reshape(*each.shape[:3], 8) for each in (a, b))
    how = {"grid": len(a) // warps, "block": 32 * warps, "shared_mem_bytes": 768 * warps}
    d: NDArray[np.float64] = run(f"of_{name}", x, y, c, np.full_like(c, 77), a.shape[1], **how)[3].astype(np.float64)
    return d


WARPS_AND_STEPS = [(1, 1, 1), (2, 3, 2), (1, 4, 5)]


@kernels("products", "".join(map(product, PRODUCTS)))
@pytest.mark.parametrize("shape", WARPS_AND_STEPS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_small_integers_are_exact(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], name: str
) -> None:
    blocks, warps, steps = shape
    element = np.dtype(ELEMENTS[name])
    low, high = {"s8": (-128, 128), "u8": (0, 256)}.get(name, (-4, 5))  # sums of 8-bit floats keep fewer bits than f32
    k = 32 // element.itemsize
    a, b = (rng.integers(low, high, (blocks * warps, steps, n, k)).astype(element) for n in (16, 8))
    c = rng.integers(-100, 100, (blocks * warps, 16, 8)).astype(np.int32 if PRODUCTS[name][1] == "s32" else "f4")
    found = multiplied(run, name, a, b, c, warps)
    want = (a.astype(np.float64) @ b.astype(np.float64).swapaxes(2, 3)).sum(axis=1) + c
    equal(found, want)


@kernels("products", "".join(map(product, PRODUCTS)))
@pytest.mark.parametrize("shape", WARPS_AND_STEPS, ids=str)
@pytest.mark.parametrize("name", [name for name, (_, kind) in PRODUCTS.items() if kind == "f32"])
def test_products_of_fractions_are_near(
    run: Kernels, rng: np.random.Generator, shape: tuple[int, int, int], name: str
) -> None:
    """The hardware aligns the products of a step to the largest and cuts off what is below its accumulator, which has
    fewer bits for elements of 8 bits; sums of one after another round instead."""
    blocks, warps, steps = shape
    element = np.dtype(ELEMENTS[name])
    k = 32 // element.itemsize
    a, b = (rng.normal(size=(blocks * warps, steps, n, k)).astype(element) for n in (16, 8))
    if name == "tf32":  # the low bits are not looked at
        a, b = ((each.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for each in (a, b))
    c = rng.normal(size=(blocks * warps, 16, 8)).astype(np.float32)
    found = multiplied(run, name, a, b, c, warps)
    x, y = a.astype(np.float64), b.astype(np.float64).swapaxes(2, 3)
    size = (np.abs(x) @ np.abs(y)).sum(axis=1) + np.abs(c)
    error = np.abs(found - ((x @ y).sum(axis=1) + c))
    allowed = steps * (2.0**-11 if element.itemsize == 1 else 2.0**-18)
    assert (error <= allowed * size).all(), (error / size).max()
