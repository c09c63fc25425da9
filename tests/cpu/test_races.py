"""Races that a GPU hides, each with its corrected twin: both sides are named, and the twin gives no alarm."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import drvkit as dk
from drvkit.cpu.order import tracker

SOURCE = r"""
#define BARRIER(...) asm volatile(__VA_ARGS__ ::: "memory")

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__global__ void reduce(const float* x, float* y, int synced) {
  __shared__ float sums[32];
  if (threadIdx.x < 32) sums[threadIdx.x] = 0;
  __syncthreads();
  float v = x[threadIdx.x];
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;  // LINE reduce
  if (synced) __syncthreads();
  if (threadIdx.x < 32) {
    float t = sums[threadIdx.x];
    for (int o = 16; o; o >>= 1) t += __shfl_xor_sync(~0u, t, o);
    if (threadIdx.x == 0) y[0] = t;
  }
}

// The last warp reads what the first one wrote.
__global__ void last_reads(float* y, int synced) {
  __shared__ float word[32];
  if (threadIdx.x < 32) word[threadIdx.x] = threadIdx.x;
  if (synced) __syncthreads(); else __syncwarp();
  if (threadIdx.x >= 32) y[threadIdx.x - 32] = word[threadIdx.x - 32];  // LINE last_reads
}

// Bytes of one word, each of another warp.
__global__ void bytes(int* y, int overlap) {
  __shared__ unsigned char s[128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  s[(4 * lane + warp + (warp == 1 && overlap)) % 128] = threadIdx.x;  // LINE bytes
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}

__global__ void histogram(int* y, int synced) {
  __shared__ int bins[32];
  if (threadIdx.x < 32) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[threadIdx.x % 7], 1);  // LINE histogram
  if (synced) __syncthreads();
  if (threadIdx.x < 32) y[threadIdx.x] = bins[threadIdx.x];
}

// One warp hands words to the other by a flag.
__global__ void handed(float* y, int fenced) {
  __shared__ float word[32];
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    word[threadIdx.x] = 2.f * threadIdx.x;
    if (fenced) __threadfence_block();
    __syncwarp();
    if (threadIdx.x == 0) *(volatile int*)&flag = 1;
  } else {
    while (*(volatile int*)&flag == 0);
    if (fenced) __threadfence_block();
    y[threadIdx.x - 32] = word[threadIdx.x - 32];  // LINE handed
  }
}

__global__ void named(float* y, int id) {
  __shared__ float word[32];
  if (threadIdx.x < 32) {
    word[threadIdx.x] = threadIdx.x;
    BARRIER("bar.arrive 1, 64;");
    BARRIER("bar.sync 2, 64;");
    word[threadIdx.x] = 0;
  } else {
    if (id == 1) BARRIER("bar.sync 1, 64;");
    y[threadIdx.x - 32] = word[threadIdx.x - 32];
    BARRIER("bar.arrive 2, 64;");
    if (id != 1) BARRIER("bar.sync 1, 64;");
  }
}

__device__ void wait_for(unsigned long long* barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// A ring of two places between a producer's and a consumer's warp.
__global__ void ring(float* y, int rounds, int waits) {
  __shared__ float place[2][32];
  __shared__ unsigned long long full[2], empty[2];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 2) {
    asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(shared_address(&full[threadIdx.x])) : "memory");
    asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(shared_address(&empty[threadIdx.x])) : "memory");
  }
  if (threadIdx.x < 64) place[threadIdx.x / 32][lane] = 0;
  __syncthreads();
  for (int r = 0; r < rounds; r++) {
    const int p = r % 2, parity = r / 2 % 2;
    if (threadIdx.x < 32) {
      if (waits) wait_for(&empty[p], parity ^ 1);
      place[p][lane] = r;  // LINE ring
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(&full[p])) : "memory");
    } else {
      wait_for(&full[p], parity);
      y[32 * r + lane] = place[p][lane];
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(&empty[p])) : "memory");
    }
  }
}

// A bulk copy that is waited for, or only followed by a barrier.
__global__ void bulk(const float* x, float* y, int waits) {
  __shared__ __align__(16) float tile[64];
  __shared__ unsigned long long full;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(shared_address(&full)) : "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "r"(shared_address(&full)) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                 :: "r"(shared_address(tile)), "l"(x), "r"(shared_address(&full)) : "memory");
  }
  if (waits) wait_for(&full, 0); else __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x];  // LINE bulk
}

// A tile is filled again while another warp may still read it.
__global__ void refilled(const float* x, float* y, int synced) {
  __shared__ float tile[64];
  float sum = 0;
  for (int r = 0; r < 3; r++) {
    const unsigned to = shared_address(&tile[threadIdx.x]);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + 64 * r + threadIdx.x) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    sum += tile[63 - threadIdx.x];  // LINE refilled
    if (synced) __syncthreads();
  }
  y[threadIdx.x] = sum;
}

// Each block of a cluster reads what the next one wrote.
__global__ void __cluster_dims__(2, 1, 1) neighbour(float* y, int synced) {
  __shared__ float word[32];
  word[threadIdx.x] = blockIdx.x + 1;
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  unsigned remote;
  float value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote) : "r"(shared_address(&word[threadIdx.x])), "r"((blockIdx.x + 1) % 2));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");  // LINE neighbour
  y[32 * blockIdx.x + threadIdx.x] = value;
  if (synced) asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  word[threadIdx.x] = value;
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");  // nobody ends before
}

// Warps that end early, before a barrier of the rest.
__global__ void leaves(float* y) {
  __shared__ float word[64];
  word[threadIdx.x] = threadIdx.x;
  if (threadIdx.x >= 32) return;
  __syncthreads();
  y[threadIdx.x] = word[threadIdx.x + 32];
}

__global__ void scale(const float* x, float* y, int n, float by) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = by * x[i];  // LINE scale
}

__global__ void every_other(unsigned char* y, int first, int n) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x) + first;
  if (i < n) y[i] = i;
}

__global__ void count(int* y) { atomicAdd(y, 1); }
__global__ void peek(const int* y, int* z) { *z = *y; }

__global__ void publish(float* x, int* flag) {
  x[threadIdx.x] = 3.f;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(flag, 1);
}
__global__ void follow(const float* x, int* flag, float* y, int polls) {
  if (threadIdx.x == 0 && polls) while (atomicAdd(flag, 0) == 0);
  __syncthreads();
  __threadfence();
  y[threadIdx.x] = x[threadIdx.x];
}

__global__ void primary(float* x) {
  BARRIER("griddepcontrol.launch_dependents;");
  x[threadIdx.x] = 1.f;
}
__global__ void secondary(const float* x, float* y, int waits) {
  __shared__ int unused[32];
  if (threadIdx.x < 32) unused[threadIdx.x] = 0;
  if (waits == 2 || (waits == 1 && threadIdx.x < 32)) BARRIER("griddepcontrol.wait;");
  __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];  // LINE secondary
  if (waits == 0) BARRIER("griddepcontrol.wait;");
}
"""
LINES = {
    match[1]: number
    for number, line in enumerate(SOURCE.splitlines(), 1)
    for match in [re.search(r"// LINE (\w+)", line)]
    if match
}


@pytest.fixture
def victim(monkeypatch: pytest.MonkeyPatch) -> Iterator[dk.Device]:
    """A device on which races are looked for, and which may be broken: it is reset afterwards."""
    always = os.environ.get("DRVKIT_CPU_MODE") == "raced"
    monkeypatch.setenv("DRVKIT_CPU_MODE", "raced")
    device = dk.Device("cpu:6")
    yield device
    gc.collect()
    device.driver.cuDevicePrimaryCtxReset(device.handle)
    if not always:
        tracker.end()


@pytest.fixture
def module(victim: dk.Device) -> dk.Module:
    return victim.module(dk.Source.from_text(SOURCE, "races.cu"))


Act = Callable[[], object]


def race(act: Act, *said: str, line: str = "") -> str:
    """The report of what must be a race."""
    with pytest.raises((dk.DriverError, dk.GraphError)) as told:
        act()
    report = str(told.value)
    assert "race: " in report, report
    for words in (*said, *([f"races.cu:{LINES[line]} "] if line else [])):
        assert words in report, report
    return report


def launched(module: dk.Module, name: str, args: Any, *, grid: int = 1, block: int = 64) -> None:
    with module.device.stream() as stream:
        module.kernel(name).launch(stream, grid=grid, block=block, args=args)
        stream.synchronize()


# ---- shared memory


def test_a_reduction_without_a_barrier(module: dk.Module, victim: dk.Device) -> None:
    x, y = victim.array(np.ones(256, np.float32)), victim.zeros(1, np.float32)
    launched(module, "reduce", (x, y, 1), block=256)
    assert y.numpy()[0] == 256
    said = "writes 4 bytes", "byte 4 of 128 bytes of shared memory", "warp 0 (threads 0 to 31) reads"
    race(lambda: launched(module, "reduce", (x, y, 0), block=256), *said, "thread (32, 0, 0)", line="reduce")


def test_a_warp_barrier_does_not_order_warps(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(module, "last_reads", (y, 1))
    said = "reads 4 bytes", "warp 0 (threads 0 to 31) writes", "thread (32, 0, 0)"
    race(lambda: launched(module, "last_reads", (y, 0)), *said, line="last_reads")


def test_bytes_of_one_word_are_apart(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(128, np.int32)
    launched(module, "bytes", (y, 0), block=128)
    race(lambda: launched(module, "bytes", (y, 1), block=128), "writes 1 bytes", line="bytes")


def test_atomics_race_with_plain_accesses_only(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(32, np.int32)
    launched(module, "histogram", (y, 1), block=128)
    race(lambda: launched(module, "histogram", (y, 0), block=128), line="histogram")


def test_a_flag_orders_with_fences_only(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(module, "handed", (y, 1))
    np.testing.assert_array_equal(y.numpy(), 2 * np.arange(32, dtype=np.float32))
    race(lambda: launched(module, "handed", (y, 0)), line="handed")


def test_named_barriers_order_those_who_take_part(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(32, np.float32)
    launched(module, "named", (y, 1))
    race(lambda: launched(module, "named", (y, 3)))


def test_mbarriers_order_a_ring(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(32 * 9, np.float32)
    launched(module, "ring", (y, 9, 1))
    np.testing.assert_array_equal(y.numpy(), np.repeat(np.arange(9), 32))
    race(lambda: launched(module, "ring", (y, 9, 0)), line="ring")


def test_a_barrier_does_not_order_a_bulk_copy(module: dk.Module, victim: dk.Device) -> None:
    x, y = victim.array(np.arange(64, dtype=np.float32)), victim.zeros(64, np.float32)
    launched(module, "bulk", (x, y, 1))
    np.testing.assert_array_equal(y.numpy(), x.numpy())
    race(lambda: launched(module, "bulk", (x, y, 0)), "a cp.async.bulk that was not waited for", line="bulk")


def test_a_tile_that_is_filled_while_it_is_read(module: dk.Module, victim: dk.Device) -> None:
    x, y = victim.array(np.arange(192, dtype=np.float32)), victim.zeros(64, np.float32)
    launched(module, "refilled", (x, y, 1))
    race(lambda: launched(module, "refilled", (x, y, 0)), line="refilled")


def test_shared_memory_of_a_cluster(module: dk.Module, victim: dk.Device) -> None:
    y = victim.zeros(64, np.float32)
    launched(module, "neighbour", (y, 1), grid=2, block=32)
    said = "of block ", "of the cluster"
    race(lambda: launched(module, "neighbour", (y, 0), grid=2, block=32), *said, line="neighbour")


def test_warps_that_end_count_at_barriers(module: dk.Module, victim: dk.Device) -> None:
    launched(module, "leaves", (victim.zeros(32, np.float32),))


# ---- works


class Floats:
    """Arrays of 256 floats, and kernels on them."""

    def __init__(self, device: dk.Device, module: dk.Module) -> None:
        self.device, self.module, self.scale = device, module, module.kernel("scale")
        self.x, self.y, self.z = (device.array(np.full(256, k, np.float32)) for k in (1, 2, 3))

    def node(self, graph: dk.Graph, name: str, source: Any, target: Any, after: Any = None) -> Any:
        return graph.kernel(self.scale, grid=2, block=128, args=(source, target, 256, 2.0), name=name, after=after)

    def launch(self, stream: dk.Stream, source: Any, target: Any) -> None:
        self.scale.launch(stream, grid=2, block=128, args=(source, target, 256, 2.0))

    def replay(self, graph: dk.Graph, times: int = 1) -> None:
        with graph.instantiate() as exe, self.device.stream() as stream:
            for _ in range(times):
                exe.launch(stream)
            stream.synchronize()


@pytest.fixture
def floats(victim: dk.Device, module: dk.Module) -> Floats:
    return Floats(victim, module)


@pytest.mark.parametrize("reader_first", [False, True])
def test_a_missing_edge_between_kernels(floats: Floats, reader_first: bool) -> None:
    graph = dk.Graph(floats.device, "twin")
    floats.node(graph, "b", floats.y, floats.z, floats.node(graph, "a", floats.x, floats.y))
    floats.replay(graph, 3)
    graph = dk.Graph(floats.device, "planted")
    nodes = {"a": (floats.x, floats.y), "b": (floats.y, floats.z)}
    for name in sorted(nodes, reverse=reader_first):
        floats.node(graph, name, *nodes[name])
    said = "node 'a' of graph 'planted'", "node 'b' of graph 'planted'", "writes", "reads", "no edge orders them"
    report = race(lambda: floats.replay(graph), *said, "made at test_races.py:", line="scale")
    assert "1024-byte device allocation" in report


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_missing_edge_between_a_kernel_and_a_copy(floats: Floats, copy_first: bool) -> None:
    graph = dk.Graph(floats.device, "twin")
    graph.memcpy(floats.z, floats.y, name="copy", after=floats.node(graph, "a", floats.x, floats.y))
    floats.replay(graph, 2)
    graph = dk.Graph(floats.device, "planted")
    steps: list[Act] = [
        lambda: floats.node(graph, "a", floats.x, floats.y),
        lambda: graph.memcpy(floats.z, floats.y, name="copy"),
    ]
    for step in reversed(steps) if copy_first else steps:
        step()
    race(lambda: floats.replay(graph), "node 'a' of graph", "node 'copy' of graph", "no edge orders them")


def test_readers_need_no_order_but_a_writer_comes_after_all(floats: Floats) -> None:
    def built(name: str, *, all_of_them: bool) -> dk.Graph:
        graph = dk.Graph(floats.device, name)
        first = floats.node(graph, "first", floats.x, floats.z)
        w = floats.device.array(np.zeros(256, np.float32))
        second = floats.node(graph, "second", floats.x, w)
        floats.node(graph, "writer", floats.y, floats.x, [first, second] if all_of_them else [second])
        return graph

    floats.replay(built("twin", all_of_them=True), 2)
    said = "node 'writer' of graph 'planted' (kernel", "node 'first' of graph 'planted'"
    race(lambda: floats.replay(built("planted", all_of_them=False)), *said)


def test_a_missing_wait_between_streams(floats: Floats) -> None:
    device = floats.device
    with device.stream() as first, device.stream() as second:
        for _ in range(2):
            floats.launch(first, floats.x, floats.y)
            second.wait(first.record())
            floats.launch(second, floats.y, floats.z)
            first.wait(second.record())
        device.synchronize()

    def unordered() -> None:
        with device.stream() as first, device.stream() as second:
            floats.launch(first, floats.x, floats.y)
            floats.launch(second, floats.y, floats.z)

    race(unordered, "kernel scale with grid (2, 1, 1)", "no edge, stream, event or wait", line="scale")


@pytest.mark.parametrize("ordered", [True, False])
def test_copies_and_fills_before_there_is_any_module(ordered: bool) -> None:
    script = f"""
import numpy as np, drvkit as dk
device = dk.Device("cpu")
x, y = device.array(np.ones(64, np.float32)), device.zeros(64, np.float32)
with device.stream() as first, device.stream() as second:
    x.fill(3.0, first)
    if {ordered}:
        second.wait(first.record())
    y.copy_from(x, second)
"""
    environment = {**os.environ, "DRVKIT_CPU_MODE": "raced"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    said = [line for line in ended.stderr.splitlines() if "race: copy of 256x1 bytes" in line]
    assert (ended.returncode, bool(said)) == ((0, False) if ordered else (1, True)), ended.stderr
    assert all("which fill of 64x1 elements of 4 bytes" in line for line in said)


def test_a_wait_for_an_event_that_is_over_orders_too(floats: Floats) -> None:
    device = floats.device
    with device.stream() as first, device.stream() as second, device.stream() as third:
        floats.launch(first, floats.x, floats.y)
        event = first.record()
        third.synchronize()  # which is not about the first
        second.wait(event)
        floats.launch(second, floats.y, floats.z)
        second.synchronize()
        floats.launch(third, floats.y, floats.x)
        device.synchronize()


def test_a_host_copy_that_does_not_wait(floats: Floats) -> None:
    device, driver = floats.device, floats.device.driver
    host = np.zeros(256, np.float32)
    with device.stream() as stream:
        floats.launch(stream, floats.x, floats.y)
        stream.synchronize()
        driver.cuMemcpyDtoH(host.ctypes.data, floats.y.address, host.nbytes)

    def early() -> None:
        with device.stream() as stream:
            floats.launch(stream, floats.x, floats.y)
            driver.cuMemcpyDtoH(host.ctypes.data, floats.y.address, host.nbytes)

    race(early, "copy of 1024x1 bytes", "kernel scale with")


def test_memory_of_a_graph_that_a_node_uses_without_an_edge(floats: Floats) -> None:
    def built(name: str, *, ordered: bool) -> dk.Graph:
        graph = dk.Graph(floats.device, name)
        alloc = graph.alloc(256, np.float32, name="alloc")
        fill = graph.memset(alloc.buffer, 1.0, name="fill", after=alloc)
        user = floats.node(graph, "user", alloc.buffer, floats.y, fill)
        graph.free(alloc, name="free", after=user if ordered else fill)
        return graph

    floats.replay(built("twin", ordered=True), 2)
    race(
        lambda: floats.replay(built("planted", ordered=False)), "node 'free' of graph 'planted'", "node 'user' of graph"
    )


def test_atomics_of_works_race_with_plain_accesses_only(floats: Floats, module: dk.Module) -> None:
    device = floats.device
    counter, seen = device.zeros(1, np.int32), device.zeros(1, np.int32)
    with device.stream() as first, device.stream() as second:
        for stream in (first, second, first):
            module.kernel("count").launch(stream, grid=2, block=32, args=(counter,))
        device.synchronize()
        assert counter.numpy()[0] == 192

    def mixed() -> None:
        with device.stream() as first, device.stream() as second:
            module.kernel("count").launch(first, grid=2, block=32, args=(counter,))
            module.kernel("peek").launch(second, grid=1, block=1, args=(counter, seen))

    race(mixed, "kernel count with", "kernel peek with")


def test_bytes_of_one_word_are_apart_among_works(floats: Floats, module: dk.Module) -> None:
    device = floats.device
    y = device.zeros(64, np.uint8)
    with device.stream() as first, device.stream() as second:
        for start, stream in enumerate((first, second)):
            module.kernel("every_other").launch(stream, grid=1, block=32, args=(y, start, 64))
        device.synchronize()
        np.testing.assert_array_equal(y.numpy(), np.arange(64))


def test_a_flag_orders_kernels_that_run_at_a_time(floats: Floats, module: dk.Module) -> None:
    device = floats.device
    flag = device.zeros(1, np.int32)
    x, y = device.zeros(64, np.float32), device.zeros(64, np.float32)

    def pair(polls: int) -> None:
        with device.stream() as first, device.stream() as second:
            module.kernel("follow").launch(second, grid=1, block=64, args=(x, flag, y, polls))
            module.kernel("publish").launch(first, grid=1, block=64, args=(x, flag))
            device.synchronize()

    pair(1)
    np.testing.assert_array_equal(y.numpy(), np.full(64, 3, np.float32))
    flag.fill(0)
    race(lambda: pair(0), "kernel follow with", "kernel publish with")


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_programmatic_launch_is_ordered_by_its_wait(floats: Floats, module: dk.Module, in_graph: bool) -> None:
    device = floats.device
    primary, secondary = module.kernel("primary"), module.kernel("secondary")

    def pair(waits: int) -> None:
        if in_graph:
            graph = dk.Graph(device, "dependent")
            first = graph.kernel(primary, grid=1, block=128, args=(floats.x,), name="first")
            args = (floats.x, floats.y, waits)
            graph.kernel(secondary, grid=1, block=128, args=args, name="second", after=first.port("programmatic"))
            floats.replay(graph, 2)
            return
        with device.stream() as stream:
            for _ in range(2):
                primary.launch(stream, grid=1, block=128, args=(floats.x,))
                secondary.launch(stream, grid=1, block=128, args=(floats.x, floats.y, waits), programmatic=True)
            stream.synchronize()

    pair(2)
    pair(1)
    race(lambda: pair(0), "node 'second'" if in_graph else "kernel secondary", line="secondary")


def test_memory_that_is_used_again_has_no_past(floats: Floats) -> None:
    device = floats.device
    with device.stream() as first, device.stream() as second:
        with device.pool() as pool:
            for stream in (first, second) * 40:
                with pool.empty(256, np.float32, stream) as memory:
                    floats.launch(stream, floats.x, memory)
        device.synchronize()


def test_many_works_are_told_apart(floats: Floats) -> None:
    graph = dk.Graph(floats.device, "long")
    node = None
    for i in range(40):
        node = floats.node(graph, f"n{i}", *((floats.x, floats.y) if i % 2 else (floats.y, floats.x)), node)
    with graph.instantiate() as exe, floats.device.stream() as stream:
        for _ in range(60):
            exe.launch(stream)
        floats.launch(stream, floats.y, floats.z)
        stream.synchronize()
