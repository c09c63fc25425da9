"""Asynchronous reductions: of threads of a cluster, and in bulk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cooperation import Kernels, blank, equal, kernels
from numpy.typing import NDArray

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


def cases(operations: list[str], instruction: str, *inputs: str) -> str:
    """What ``which`` chooses. In the instruction ``{}`` stands for the operation."""
    lines = []
    for operation in operations:
        text = f'"{instruction.format(operation)}" :: {", ".join(inputs)} : "memory"'
        lines.append(f"      case {IN_GLOBAL_MEMORY.index(operation)}: asm volatile({text}); break;")
    return "\n".join(lines)


RED_ASYNC = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{} [%0], %1, [%2];"
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
        cases(
            [operation], RED_ASYNC, '"r"(to)', '"l"(wide)' if operation.endswith("64") else '"r"(word)', '"r"(barrier)'
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


# ---- bulk reductions -------------------------------------------------------------------------------------------------

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
    + cases(
        IN_GLOBAL_MEMORY,
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.{} [%0], [%1], %2;",
        *('"l"(y)', '"r"(at(tile))', '"r"(nbytes)'),
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
    + cases(
        IN_A_CLUSTER,
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{} [%0], [%1], %2, [%3];",
        *('"r"(to)', '"r"(at(tile))', '"r"(nbytes)', '"r"(barrier)'),
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
