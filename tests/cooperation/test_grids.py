"""Grids that depend on each other, and one that meets as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from cooperation import Kernels, RandomWords, Words, blank, equal, kernels

import drvkit as dk

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


RELAY = r"""
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
OWN_BARRIER = r"""
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
"""
COOPERATIVE_GROUPS = r"""
#include <cooperative_groups.h>
__device__ void sync_grid(u32*) { cooperative_groups::this_grid().sync(); }
"""


@kernels("cooperative", OWN_BARRIER + RELAY)
@pytest.mark.parametrize("shape", [(1, 32), (2, 96), (33, 64), (132, 32)], ids=str)
def test_a_cooperative_grid_meets(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    assert relayed(run, words, *shape) == shape[0] * (ROUNDS - 1)


@kernels("cooperative groups", COOPERATIVE_GROUPS + RELAY)
@pytest.mark.parametrize("shape", [(1, 32), (33, 64)], ids=str)
def test_the_grid_of_cooperative_groups_meets(run: Kernels, words: RandomWords, shape: tuple[int, int]) -> None:
    relayed(run, words, *shape)
    relayed(run, words, *shape)


ROUNDS = 6


def relayed(run: Kernels, words: RandomWords, blocks: int, threads: int) -> int:
    """Run ``relay`` and look at what it leaves; gives what its own barrier has counted."""
    x = words(blocks * threads)
    y, arrived = blank(ROUNDS, x.size), np.zeros(1, np.uint32)
    _, found, count = run("relay", x, y, arrived, ROUNDS, grid=blocks, block=threads, cooperative=True)
    row = x
    for r in range(ROUNDS):
        if r:
            row = np.uint32(31) * np.roll(row, -(r * threads + 1)) + np.uint32(r)
        equal(found[r], row, err_msg=f"round {r}")
    return int(count[0])
