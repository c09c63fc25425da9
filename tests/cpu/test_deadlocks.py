"""Kernels that wait for what never comes: told at once, with who looks where and what is there; others end."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest

import drvkit as dk

SOURCE = r"""
#include <cuda_fp16.h>

__device__ int volatile_load(const int* at) { return *(const volatile int*)at; }
__device__ int weak_load(const int* at) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
#define LOOPS(name, looks)                                                                    \
  __global__ void name(int* at, int* go, int free) {                                          \
    if (blockIdx.x == 0) { while (looks); }                                                   \
    else if (free) { for (int i = 0; i < 1000; i++) *(volatile int*)go = i; atomicExch(at, 0); } \
  }

LOOPS(compare_and_swap, atomicCAS(at, 0, 1) != 0)  // LINE compare_and_swap
LOOPS(exchange, atomicExch(at, 1) != 0)  // LINE exchange
LOOPS(add_nothing, atomicAdd(at, 0) != 0)  // LINE add_nothing
LOOPS(most, atomicMax(at, -5) != 0)  // LINE most
LOOPS(or_same, atomicOr(at, 0x3c00) != 0)  // LINE or_same
LOOPS(add_zero, atomicAdd((float*)at, 0.f) != 0.f)  // LINE add_zero
LOOPS(add_half, __half2float(atomicAdd((__half*)at, __float2half(0.f))) != 0.f)  // LINE add_half
LOOPS(swap_wide, atomicCAS((unsigned long long*)at, 0ull, 1ull) != 0)  // LINE swap_wide
LOOPS(load, *(volatile int*)at != 0)  // LINE load
LOOPS(weak, weak_load(at) != 0)  // LINE weak

__global__ void tries_and_undoes(int* at, int* go, int free) {
  if (blockIdx.x == 0) {
    while (atomicAdd(at, -1) > 0) atomicAdd(at, 1);  // LINE tries_and_undoes
  } else if (free) { for (int i = 0; i < 1000; i++) *(volatile int*)go = i; atomicExch(at, -1000); }
}
__global__ void private_lock(int* at, int free) {
  __shared__ int lock;
  if (threadIdx.x == 0) lock = 1;
  __syncthreads();
  if (threadIdx.x / 32 == 1) while (atomicCAS(&lock, 0, 1));  // LINE private_lock
  else if (threadIdx.x == 0 && free) atomicExch(&lock, 0);
  if (threadIdx.x == 32) *at = 2;
}
__global__ void each_a_flag(int* flags) {
  while (*(volatile int*)(flags + threadIdx.x) == 0);  // LINE each_a_flag
}
__global__ void two_flags(int* flags) {
  while (volatile_load(flags) == 0) if (atomicAdd(flags + 1, 0)) break;  // LINE two_flags
}
__global__ void apart(int* flags) {
  if (threadIdx.x < 16) { while (*(volatile int*)flags == 0); }
  else { while (*(volatile int*)(flags + 1) == 0); }
}
__global__ void arrives(int* at, int count) {
  __shared__ __align__(8) unsigned long long bar;
  unsigned b = (unsigned)__cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 3;" :: "r"(b));
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 64;" :: "r"(b));
    asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 48;" :: "r"(b));
    for (int i = 0; i < count; i++) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
    if (count == 3) asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(b));
  }
  __syncthreads();
  asm volatile("{.reg .pred p;\n W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\n @!p bra W;}"
               :: "r"(b) : "memory");  // LINE arrives
  at[threadIdx.x] = 1;
}
__global__ void named(int* at) {
  if (threadIdx.x < 32) asm volatile("bar.sync 3, 96;" ::: "memory");  // LINE named
  *at = 1;
}
__global__ void round_and_round(int* at) {
  while (*at == 0);  // LINE round_and_round
}
__global__ void counts(unsigned* at, unsigned turns) {
  unsigned x = *at;
  for (unsigned i = 0; i < turns; i++) x = x * 1664525u + 1013904223u;
  *at = x;
}
__global__ void sleeps(int* at, long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles);
  *at = 1;
}
__global__ void naps(int* at, long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(100);
  *at = 1;
}
__global__ void gives_up(int* at, long long most) {
  long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  while (*(volatile int*)at == 0) {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (now - begin > most) { *at = 1; return; }
  }
}
__global__ void clocked(int* at, long long most) {
  long long begin = clock64();
  while (*(volatile int*)at != most);  // LINE clocked
  *at = clock64() - begin;
}
__global__ void until_later(cudaGraphConditionalHandle handle, long long* begin) {
  if (*begin == 0) *begin = clock64();
  else if (clock64() - *begin > 300000000) cudaGraphSetConditional(handle, 0);
}
__global__ void until_set(cudaGraphConditionalHandle handle, const long long* at) {
  if (*at) cudaGraphSetConditional(handle, 0);
}
__global__ void sets(long long* at, long long cycles) {
  long long begin = clock64();
  while (clock64() - begin < cycles);
  *at = 1;
}
__global__ void tickets(int* at, int limit) { while (atomicAdd(at, 1) < limit); }
"""
LINES = {
    match[1]: number
    for number, line in enumerate(SOURCE.splitlines(), 1)
    for match in [re.search(r"// LINE (\w+)", line)]
    if match
}
SPINS = [
    *("compare_and_swap", "exchange", "add_nothing", "most", "or_same", "add_zero", "add_half", "swap_wide", "load"),
    "tries_and_undoes",
]

HELD = np.array([0x3F803C00, 0], np.int32)  # also as a float, and as a half


@pytest.fixture
def victim() -> dk.Device:
    """A device that may be broken: whoever breaks it resets it."""
    return dk.Device("cpu:6")


def launched(device: dk.Device, name: str, args: Any, *, grid: int = 1, block: int = 32) -> None:
    with device.module(dk.Source.from_text(SOURCE, "stuck.cu")) as module, device.stream() as stream:
        try:
            module.kernel(name).launch(stream, grid=grid, block=block, args=args)
            stream.synchronize()
        except dk.DriverError:
            device.driver.cuDevicePrimaryCtxReset(device.handle)
            raise


def stuck(device: dk.Device, name: str, args: Any, *said: str, grid: int = 1, block: int = 32) -> str:
    """The report of a launch that never ends, and says so at the line of its name."""
    with pytest.raises(dk.DriverError) as told:
        launched(device, name, args, grid=grid, block=block)
    report = str(told.value)
    assert told.value.code == "CUDA_ERROR_LAUNCH_TIMEOUT", report
    for words in ("deadlock", *((f"stuck.cu:{LINES[name]}",) if name in LINES else ()), *said):
        assert words in report, report
    return report


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "checked") for name in SPINS), ("compare_and_swap", "unchecked"), ("add_half", "raced")],
)
def test_a_spin_that_nobody_ends(victim: dk.Device, name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRVKIT_CPU_MODE", mode)
    at, go = victim.array(HELD), victim.zeros(1, np.int32)
    opcode = "ld.volatile.global." if name == "load" else "atom."
    report = stuck(victim, name, (at, go, 0), f"({opcode}", f"{at.address:#x}", grid=2, block=1)
    assert "kernel" in report
    assert "block (0, 0, 0) warp 0: at stuck.cu" in report
    assert "0 bytes into a 8-byte device allocation made at test_deadlocks.py:" in report


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "checked") for name in (*SPINS, "weak")), ("compare_and_swap", "unchecked")]
)
def test_a_spin_that_another_block_ends_after_a_while(
    victim: dk.Device, name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRVKIT_CPU_MODE", mode)
    at, go = victim.array(HELD), victim.zeros(1, np.int32)
    launched(victim, name, (at, go, 1), grid=2, block=1)
    assert go.numpy()[0] == 999


def test_a_spin_is_found_at_once(victim: dk.Device) -> None:
    for _ in range(2):  # compiled by the first one
        at, go = victim.array(HELD), victim.zeros(1, np.int32)
        begin = time.perf_counter()
        stuck(victim, "compare_and_swap", (at, go, 0), grid=64, block=1)
    assert time.perf_counter() - begin < 1


def test_what_a_spin_sees_is_told(victim: dk.Device) -> None:
    at, go = victim.array(np.array([-7, 0], np.int32)), victim.zeros(1, np.int32)
    stuck(victim, "load", (at, go, 0), f"it sees {2**32 - 7} at", block=1)
    at = victim.array(np.array([2.5, 0], np.float32).view(np.int32))
    stuck(victim, "add_zero", (at, go, 0), "(atom.global.add.f32), it sees 2.5 at", block=1)


@pytest.mark.parametrize("mode", ["checked", "unchecked"])
def test_atomics_that_change_something_are_progress(
    victim: dk.Device, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRVKIT_CPU_MODE", mode)
    at = victim.zeros(1, np.int32)
    launched(victim, "tickets", (at, 20_000), grid=2, block=64)
    assert at.numpy()[0] == 20_000 + 128


def test_a_lock_in_shared_memory(victim: dk.Device) -> None:
    at = victim.zeros(1, np.int32)
    launched(victim, "private_lock", (at, 1), block=33)
    assert at.numpy()[0] == 2
    stuck(
        victim,
        "private_lock",
        (at, 0),
        "(atom.shared.cas.b32), it sees 1",
        "byte 0 of 4 bytes of shared memory",
        block=33,
    )


def test_lanes_that_look_at_flags_of_their_own(victim: dk.Device) -> None:
    flags = np.ones(32, np.int32)
    launched(victim, "each_a_flag", (victim.array(flags),))
    flags[[3, 30]] = 0
    given = victim.array(flags)
    report = stuck(victim, "each_a_flag", (given,))
    for lane in (3, 30):
        assert f"warp 0 lanes {lane}: at stuck.cu" in report
        assert f"it sees 0 at {given.address + 4 * lane:#x}, {4 * lane} bytes into a" in report
    assert "lanes 4" not in report


def test_all_that_a_round_looks_at_is_told(victim: dk.Device) -> None:
    flags = victim.zeros(2, np.int32)
    report = stuck(victim, "two_flags", (flags,), "(atom.global.add.u32), it sees 0", "4 bytes into a 8-byte", block=1)
    assert re.search(r"\(ld.volatile.global.u32\), it sees 0 at \w+, 0 bytes into", report), report


def test_lanes_of_a_warp_in_different_loops(victim: dk.Device) -> None:
    flags = victim.zeros(2, np.int32)
    report = stuck(victim, "apart", (flags,))
    assert "warp 0 lanes 0-15: at stuck.cu" in report
    assert "warp 0 lanes 16-31: at stuck.cu" in report


def test_an_mbarrier_that_one_never_arrives_at(victim: dk.Device) -> None:
    at = victim.zeros(64, np.int32)
    launched(victim, "arrives", (at, 3), block=64)
    assert at.numpy().all()
    stuck(
        victim,
        "arrives",
        (at, 2),
        "warp 0, block (0, 0, 0) warp 1: at stuck.cu",
        "(mbarrier.try_wait.parity.shared::cta.b64)",
        "it sees an mbarrier in phase 0, to which 1 of 3 arrivals and 16 bytes are to come",
        "byte 0 of 8 bytes of shared memory",
        block=64,
    )


def test_a_barrier_that_too_few_come_to(victim: dk.Device) -> None:
    said = "where 32 of 96 threads have arrived"
    stuck(victim, "named", (victim.zeros(1, np.int32),), "at barrier 3", said, block=64)


def test_a_loop_without_an_end(victim: dk.Device) -> None:
    """Its load is not volatile, so the compiler looks once."""
    at = victim.array(np.ones(1, np.int32))
    launched(victim, "round_and_round", (at,), grid=3, block=64)
    at.fill(0)
    stuck(victim, "round_and_round", (at,), "in an endless loop", "finds all as it was", grid=3, block=64)


def test_a_loop_of_loads_that_are_not_volatile(victim: dk.Device) -> None:
    at, go = victim.array(np.array([1, 0], np.int32)), victim.zeros(1, np.int32)
    stuck(victim, "weak", (at, go, 0), "in an endless loop", grid=2, block=1)


def test_long_loops_end(victim: dk.Device) -> None:
    turns = 3_000_000
    at = victim.array(np.array([5], np.uint32))
    launched(victim, "counts", (at, turns), block=1)
    x = 5
    for _ in range(turns):
        x = x * 1664525 + 1013904223 & 0xFFFFFFFF
    assert at.numpy()[0] == x


@pytest.mark.parametrize("name", ["sleeps", "naps", "gives_up"])
def test_a_loop_that_waits_for_the_clock_ends_soon(victim: dk.Device, name: str) -> None:
    """Where nothing else can happen time is let pass: these would take an hour."""
    at = victim.zeros(1, np.int32)
    begin = time.perf_counter()
    launched(victim, name, (at, 3600 * 10**9), block=1)
    assert at.numpy()[0] == 1
    assert time.perf_counter() - begin < 60


def test_a_clock_does_not_end_a_loop_that_does_not_look_at_it(victim: dk.Device) -> None:
    stuck(victim, "clocked", (victim.zeros(1, np.int32), 1), "it sees 0")


def test_a_graph_whose_loop_changes_nothing(victim: dk.Device) -> None:
    kernel = victim.module(dk.Source.from_text(SOURCE, "stuck.cu")).kernel("counts")
    at = victim.array(np.array([5], np.uint32))
    with dk.Graph(victim, "loops") as graph:
        body = graph.while_(graph.condition(default=1), name="again")
        body.kernel(kernel, grid=1, block=1, args=(at, 0), name="nothing")
        with graph.instantiate() as exe, victim.stream() as stream:
            begin = time.perf_counter()
            exe.launch(stream)
            with pytest.raises(
                dk.DriverError, match=r"again.*its body has run \d+ times, and leaves the condition"
            ) as told:
                stream.synchronize()
            assert time.perf_counter() - begin < 10
            assert told.value.code == "CUDA_ERROR_LAUNCH_TIMEOUT"
            victim.driver.cuDevicePrimaryCtxReset(victim.handle)


def test_a_graph_whose_loop_waits_for_the_clock_or_another_stream_ends(victim: dk.Device) -> None:
    module = victim.module(dk.Source.from_text(SOURCE, "stuck.cu"))
    with victim.stream() as one, victim.stream() as two:
        for name, slept in (("until_later", 0), ("until_set", 300_000_000)):
            at = victim.zeros(1, np.int64)
            with dk.Graph(victim, name) as graph:
                condition = graph.condition(default=1)
                body = graph.while_(condition, name="again")
                body.kernel(module.kernel(name), grid=1, block=1, args=(condition, at))
                with graph.instantiate() as exe:
                    exe.launch(one)
                    if slept:
                        module.kernel("sets").launch(two, grid=1, block=1, args=(at, slept))
                    one.synchronize()
            assert at.numpy()[0] != 0
    module.close()
