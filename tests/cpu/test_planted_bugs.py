"""Bugs that a GPU hides, each with its corrected twin: found with the right line, and no alarm on the twin."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest

import drvkit as dk

SOURCE = """
__global__ void past_the_end(float* y, const float* x, int n, int guard) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n + guard) y[i] = 2.f * x[i];  // LINE past_the_end
}
__global__ void aligned(float4* y, const float* x, int offset) {
  y[threadIdx.x] = *(const float4*)(x + offset + 4 * threadIdx.x);  // LINE aligned
}
__global__ void awaited(float* y, const float* x, int waits) {
  __shared__ float4 tile[32];
  unsigned target = (unsigned)__cvta_generic_to_shared(&tile[threadIdx.x]);
  const float4* source = (const float4*)x + threadIdx.x;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target), "l"(source) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (waits) asm volatile("cp.async.wait_group 0;" ::: "memory");
  y[threadIdx.x] = tile[threadIdx.x].x;  // LINE awaited
}
__global__ void half(float* y, int all) {
  if (all || threadIdx.x % 2) __syncthreads();  // LINE half
  y[threadIdx.x] = 1.f;
}
__global__ void between(float* y, int n) {
  float value = 1.f;
  if (threadIdx.x < n) __syncthreads();  // LINE between
  else value = y[threadIdx.x] + 2.f;
  y[threadIdx.x] = value;
}
__global__ void unordered(float* y, int waits) {
  __shared__ float tile[64];
  tile[threadIdx.x] = threadIdx.x;
  if (waits) __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];  // LINE unordered
}
__device__ void copy(float4* target, const float4* source);
__global__ void copied(float* y, const float* x) {
  __shared__ float4 tile[32];
  copy(tile + threadIdx.x, (const float4*)x + threadIdx.x);  // LINE copied
  y[threadIdx.x] = tile[threadIdx.x].x;
}
__global__ void bulk(float* y, int target, int source) {
  __shared__ __align__(128) char tile[256];
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 64, [%2];"
                 :: "r"((unsigned)__cvta_generic_to_shared(tile + target)), "l"((char*)y + source),
                    "r"((unsigned)__cvta_generic_to_shared(tile + 128)) : "memory");  // LINE bulk
}
__global__ void meet(int* arrived, int ranks) {
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1);
    while (*(volatile int*)arrived < ranks);  // LINE meet
  }
}
__global__ void crossed(int* flag) {
  if (threadIdx.x < 32) { __syncthreads(); *(volatile int*)flag = 1; }  // LINE crossed
  else { while (*(volatile int*)flag == 0); __syncthreads(); }
}
__global__ void shared_window(float* y, int n) {
  __shared__ float tile[32];
  tile[threadIdx.x] = 1.f;
  __syncthreads();
  y[threadIdx.x] = tile[(threadIdx.x + n) % 64];  // LINE shared_window
}
__global__ void stack(float* y, int n) {
  float own[8];
  for (int i = 0; i < n; i++) own[i] = i;
  y[threadIdx.x] = own[(threadIdx.x + 7) % 8];  // LINE stack
}
__global__ void check(const int* x) { if (*x) __trap(); }  // LINE check
// Each block writes into the other one, by a shared or a generic address.
__global__ void __cluster_dims__(2, 1, 1) pushed(float* y, int met, int generic) {
  __shared__ float place[32];
  if (met) asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(&place[threadIdx.x])), "r"(1 - blockIdx.x));
  if (generic) {
    float* p;
    asm("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"(&place[threadIdx.x]), "r"(1 - blockIdx.x));
    *p = blockIdx.x;
  } else {
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(there), "f"((float)blockIdx.x) : "memory");  // LINE pushed
  }
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  y[32 * blockIdx.x + threadIdx.x] = place[threadIdx.x];
}
// The first block reads of the second one.
__global__ void __cluster_dims__(2, 1, 1) pulled(float* y, int stays) {
  __shared__ float place[32];
  place[threadIdx.x] = threadIdx.x;
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  if (blockIdx.x == 0) {
    unsigned there;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, 1;"
        : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(&place[threadIdx.x])));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");  // LINE pulled
    y[threadIdx.x] = value;
  }
  if (stays) asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}
#line 1 "copies.cuh"
__device__ void copy(float4* target, const float4* source) {
  unsigned to = (unsigned)__cvta_generic_to_shared(target);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(source) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
}
"""
LINES = {
    match[1]: number
    for number, line in enumerate(SOURCE.splitlines(), 1)
    for match in [re.search(r"// LINE (\w+)", line)]
    if match
}


@pytest.fixture
def victim() -> dk.Device:
    """A device that may be broken: whoever breaks it resets it."""
    return dk.Device("cpu:5")


def reset(device: dk.Device) -> None:
    device.driver.cuDevicePrimaryCtxReset(device.handle)


def launched(device: dk.Device, name: str, args: Any, *, grid: int = 1, block: int = 32) -> None:
    """Launch a kernel and wait; if that fails the device is reset, so that all can be given back."""
    with device.module(dk.Source.from_text(SOURCE, "planted.cu")) as module, device.stream() as stream:
        try:
            module.kernel(name).launch(stream, grid=grid, block=block, args=args)
            stream.synchronize()
        except dk.DriverError:
            reset(device)
            raise


def refused(device: dk.Device, name: str, args: Any, code: str, *said: str, grid: int = 1, block: int = 32) -> str:
    """The report of a launch that must fail at the line of its name."""
    with pytest.raises(dk.DriverError) as told:
        launched(device, name, args, grid=grid, block=block)
    report = str(told.value)
    assert told.value.code == f"CUDA_ERROR_{code}", report
    for words in (f"planted.cu:{LINES[name]}", name, *said):
        assert words in report, report
    return report


@pytest.mark.parametrize(("count", "verb"), [(1000, "reads"), (1001, "writes")])
def test_one_past_the_end(victim: dk.Device, count: int, verb: str) -> None:
    x, y = victim.array(np.ones(count, np.float32)), victim.zeros(1000, np.float32)
    launched(victim, "past_the_end", (y, x, 1000, 0), grid=4, block=256)
    report = refused(
        victim,
        "past_the_end",
        (y, x, 1000, 1),
        "ILLEGAL_ADDRESS",
        f"{verb} 4 bytes at",
        "0 bytes past the end of a 4000-byte",
        grid=4,
        block=256,
    )
    assert "block (3, 0, 0), thread (232, 0, 0)" in report
    assert "made at test_planted_bugs.py:" in report


def test_memory_that_was_never_written(victim: dk.Device) -> None:
    x, y = victim.empty(64, np.float32), victim.zeros(64, np.float32)
    x.fill(1.0)
    launched(victim, "past_the_end", (y, x, 64, 0), block=64)
    unwritten = victim.empty(64, np.float32)
    refused(victim, "past_the_end", (y, unwritten, 64, 0), "ILLEGAL_ADDRESS", "nothing was written", block=64)


def test_a_misaligned_access(victim: dk.Device) -> None:
    x, y = victim.array(np.ones(256, np.float32)), victim.zeros(128, np.float32)
    raw = ctypes.c_void_p(y.address)
    launched(victim, "aligned", (raw, x, 4))
    refused(victim, "aligned", (raw, x, 1), "MISALIGNED_ADDRESS", "not a multiple of 16")


def test_a_read_before_the_copy_is_awaited(victim: dk.Device) -> None:
    x, y = victim.array(np.arange(128, dtype=np.float32)), victim.zeros(32, np.float32)
    launched(victim, "awaited", (y, x, 1))
    np.testing.assert_array_equal(y.numpy(), np.arange(0, 128, 4, dtype=np.float32))
    refused(victim, "awaited", (y, x, 0), "ILLEGAL_ADDRESS", "a cp.async that was not waited for writes there")


def test_a_barrier_that_half_a_warp_skips(victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(victim, "half", (y, 1))
    odd, even = (f"lanes {', '.join(map(str, range(first, 32, 2)))}" for first in (1, 0))
    said = f"not all threads of the warp come to this barrier: {odd} do; {even} at planted.cu:{LINES['half'] + 1} ("
    refused(victim, "half", (y, 0), "LAUNCH_FAILED", said)


def test_a_barrier_between_two_ways_to_shared_code(victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(victim, "between", (y, 32))
    refused(victim, "between", (y, 5), "LAUNCH_FAILED", "come to this barrier: lanes 0-4 do; lanes 5-31 at planted.cu:")


def test_a_missing_barrier_before_shared_memory_is_read(victim: dk.Device) -> None:
    y = victim.zeros(64, np.float32)
    launched(victim, "unordered", (y, 1), block=64)
    said = "reads 4 bytes", "nothing was written yet", "a barrier is missing", "byte 252 of 256 bytes of shared memory"
    refused(victim, "unordered", (y, 0), "ILLEGAL_ADDRESS", *said, block=64)


def test_a_copy_that_reads_past_the_end(victim: dk.Device) -> None:
    """Told with the address that it reads, at the line of the header and of the kernel."""
    y = victim.zeros(32, np.float32)
    launched(victim, "copied", (y, victim.array(np.ones(128, np.float32))))
    x = victim.array(np.ones(120, np.float32))
    said = "reads 16 bytes at", "0 bytes past the end of a 480-byte", "thread (30, 0, 0)"
    report = refused(victim, "copied", (y, x), "ILLEGAL_ADDRESS", *said)
    assert f"copies.cuh:3 inlined at planted.cu:{LINES['copied']} (cp.async.cg.shared.global)" in report


@pytest.mark.parametrize(("target", "source"), [(0, 4), (4, 0)])
def test_a_bulk_copy_that_is_misaligned(victim: dk.Device, target: int, source: int) -> None:
    y = victim.zeros(64, np.float32)
    said = f"{'reads' if source else 'writes'} 64 bytes", "address and size have to be multiples of 16"
    report = refused(victim, "bulk", (y, target, source), "MISALIGNED_ADDRESS", *said)
    assert ("shared memory" in report) == bool(source == 0)


def test_a_rank_that_is_never_launched(victim: dk.Device) -> None:
    arrived = victim.zeros(1, np.int32)
    launched(victim, "meet", (arrived, 3), grid=3)
    arrived.fill(0)
    report = refused(victim, "meet", (arrived, 3), "LAUNCH_TIMEOUT", "deadlock: nothing in flight can go on", grid=2)
    who = "block (0, 0, 0) warp 0 lanes 0, block (1, 0, 0) warp 0 lanes 0"
    where = f"at planted.cu:{LINES['meet']} (ld.volatile.global.u32)"
    seen = f"it sees 2 at {arrived.address:#x}, 0 bytes into a 4-byte device allocation made at test_planted_bugs.py:"
    for said in (who, f"{where}, {seen}"):
        assert said in report, report


def test_a_barrier_and_a_flag_that_wait_for_each_other(victim: dk.Device) -> None:
    report = refused(victim, "crossed", (victim.zeros(1, np.int32),), "LAUNCH_TIMEOUT", "at barrier 0", block=64)
    assert "block (0, 0, 0) warp 0" in report
    assert "block (0, 0, 0) warp 1" in report


def test_shared_memory_past_its_end(victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(victim, "shared_window", (y, 0))
    refused(victim, "shared_window", (y, 1), "ILLEGAL_ADDRESS", "byte 128 of 128 bytes of shared memory")


def test_local_memory_that_was_never_written(victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(victim, "stack", (y, 8))
    refused(victim, "stack", (y, 7), "ILLEGAL_ADDRESS", "nothing was written", "local memory")


def test_a_trap(victim: dk.Device) -> None:
    x = victim.zeros(1, np.int32)
    launched(victim, "check", (x,), block=1)
    x.fill(1)
    refused(victim, "check", (x,), "LAUNCH_FAILED", "trap", block=1)


@pytest.mark.parametrize("generic", [0, 1])
def test_a_block_that_writes_into_another_before_that_has_begun(victim: dk.Device, generic: int) -> None:
    y = victim.zeros(64, np.float32)
    launched(victim, "pushed", (y, 1, generic), grid=2)
    np.testing.assert_array_equal(y.numpy(), np.repeat(np.array([1, 0], np.float32), 32))
    said = (
        "it reaches into shared memory of block 1 of the cluster, which may not have begun: no barrier of the cluster"
    )
    with pytest.raises(dk.DriverError, match=rf"LAUNCH_FAILED: .*kernel pushed, planted.cu:\d+ .*{said} was before"):
        launched(victim, "pushed", (y, 0, generic), grid=2)


def test_a_block_that_ends_while_another_reads_of_it(victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(victim, "pulled", (y, 1), grid=2)
    np.testing.assert_array_equal(y.numpy(), np.arange(32, dtype=np.float32))
    said = "it reaches into shared memory of block 1 of the cluster, which has ended"
    report = refused(victim, "pulled", (y, 0), "LAUNCH_FAILED", said, grid=2)
    assert "block (0, 0, 0)" in report


def test_use_after_free(victim: dk.Device) -> None:
    x, y = victim.array(np.ones(64, np.float32)), victim.zeros(64, np.float32)
    stale = ctypes.c_void_p(x.address)
    launched(victim, "past_the_end", (y, stale, 64, 0), block=64)
    x.close()
    victim.synchronize()
    said = ("kernel past_the_end, planted.cu", "which was freed at test_planted_bugs.py:")
    refused(victim, "past_the_end", (y, stale, 64, 0), "ILLEGAL_ADDRESS", *said, block=64)


def test_use_after_a_graph_freed_it(victim: dk.Device) -> None:
    kernel = victim.module(dk.Source.from_text(SOURCE, "planted.cu")).kernel("past_the_end")
    y = victim.zeros(64, np.float32)

    def graph(late: bool) -> dk.Graph:
        made = dk.Graph(victim, "late" if late else "in time")
        alloc = made.alloc(64, np.float32, name="alloc")
        memory = alloc.buffer
        fill = made.memset(memory, 1.0, after=alloc)
        pointer = ctypes.c_void_p(memory.address)
        given: dict[str, Any] = {"grid": 1, "block": 64, "args": (y, pointer, 64, 0)}
        if late:
            free = made.free(memory, after=fill)
            made.kernel(kernel, after=free, name="late", **given)
        else:
            use = made.kernel(kernel, after=fill, name="use", **given)
            made.free(memory, after=use)
        return made

    with victim.stream() as stream:
        with graph(late=False) as good, good.instantiate() as exe:
            exe.launch(stream)
            exe.launch(stream)
            stream.synchronize()
        with graph(late=True) as bad, bad.instantiate() as exe:
            exe.launch(stream)
            with pytest.raises(dk.DriverError) as told:
                stream.synchronize()
            reset(victim)
    assert "which was freed by its graph" in str(told.value)
    assert f"planted.cu:{LINES['past_the_end']}" in str(told.value)


def test_memory_of_a_graph_that_was_not_written_since_it_was_allocated(victim: dk.Device) -> None:
    kernel = victim.module(dk.Source.from_text(SOURCE, "planted.cu")).kernel("past_the_end")
    y = victim.zeros(64, np.float32)
    graph = dk.Graph(victim, "undefined")
    alloc = graph.alloc(64, np.float32, name="alloc")
    fill = graph.memset(alloc.buffer[:63], 1.0, after=alloc, name="most")
    last = graph.memset(alloc.buffer[63:], 1.0, after=fill, name="last")
    use = graph.kernel(kernel, grid=1, block=64, args=(y, alloc.buffer, 64, 0), after=last)
    graph.free(alloc, after=use)
    with victim.stream() as stream, graph, graph.instantiate() as exe:
        exe.launch(stream)
        stream.synchronize()
        exe["last"].disable()  # what the launch before wrote there is gone
        exe.launch(stream)
        with pytest.raises(dk.DriverError, match=r"where nothing was written: 252 bytes into a 256-byte graph") as told:
            stream.synchronize()
        reset(victim)
    assert f"planted.cu:{LINES['past_the_end']}" in str(told.value)
    assert "thread (63, 0, 0)" in str(told.value)


def test_a_broken_device_says_why_and_a_reset_mends_it(victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    module = victim.module(dk.Source.from_text(SOURCE, "planted.cu"))
    stream = victim.stream()
    module.kernel("half").launch(stream, grid=1, block=32, args=(y, 0))
    for attempt in (stream.synchronize, lambda: victim.zeros(1, np.float32), lambda: y.fill(0)):
        with pytest.raises(dk.DriverError, match=r"CUDA_ERROR_LAUNCH_FAILED.*not all threads of the warp come"):
            attempt()
    reset(victim)
    module.kernel("half").launch(stream, grid=1, block=32, args=(y, 1))
    stream.synchronize()
    np.testing.assert_array_equal(y.numpy(), np.ones(32, np.float32))
    stream.close()
    module.close()
