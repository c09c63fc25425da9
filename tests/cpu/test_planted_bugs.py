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


def test_one_past_the_end(victim: dk.Device) -> None:
    x, y = victim.array(np.ones(1000, np.float32)), victim.zeros(1000, np.float32)
    launched(victim, "past_the_end", (y, x, 1000, 0), grid=4, block=256)
    report = refused(
        victim,
        "past_the_end",
        (y, x, 1000, 1),
        "ILLEGAL_ADDRESS",
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
    refused(victim, "half", (y, 0), "LAUNCH_FAILED", "not all threads of the warp come to this barrier")


def test_a_rank_that_is_never_launched(victim: dk.Device) -> None:
    arrived = victim.zeros(1, np.int32)
    launched(victim, "meet", (arrived, 3), grid=3)
    arrived.fill(0)
    refused(victim, "meet", (arrived, 3), "LAUNCH_TIMEOUT", "deadlock: nothing in flight can go on", grid=2)


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


def test_use_after_free(victim: dk.Device) -> None:
    x, y = victim.array(np.ones(64, np.float32)), victim.zeros(64, np.float32)
    stale = ctypes.c_void_p(x.address)
    launched(victim, "past_the_end", (y, stale, 64, 0), block=64)
    x.close()
    victim.synchronize()
    refused(victim, "past_the_end", (y, stale, 64, 0), "ILLEGAL_ADDRESS", "which was freed", block=64)


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
