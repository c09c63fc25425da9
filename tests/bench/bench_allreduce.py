"""What an all-reduce with residual and RMSNorm costs between two or more GPUs of this process.

Run ``python tests/bench/bench_allreduce.py [--ranks N] [--json FILE]`` where there are as many GPUs. Each row is a
graph of chained calls on each GPU, whose output is the next one's input, launched behind a graph that makes the ranks
meet. A figure is the median over launches of the time of a launch, the largest of all ranks, divided by its calls; with
plain edges, and with programmatic ones. Nothing is asserted.

"flashinfer" is its one-shot Lamport kernel (0.6.18) between two H200, without and with programmatic launch, measured on
other machines by the same method. "NCCL" is measured here: NCCL's all-reduce and one kernel of residual and RMSNorm, in
a graph, through CuPy, without multicast (NVLS). The floor is a flag that goes from one GPU to the other and back.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from drvkit.channel import PROTOCOLS
from drvkit.device import Device, Event
from drvkit.graph import Graph
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.replay import Exec
from drvkit.source import Source
from drvkit.symmetric import SymmetricMemory
from drvkit.world import World

bf16 = ml_dtypes.bfloat16
LAUNCHES, MEET = 31, 20
HIDDEN, TOKENS = (2048, 4096, 8192), (1, 8, 16, 32, 128, 1024)

# hidden, tokens: flashinfer's Lamport kernel of two ranks, without and with programmatic launch, us
PEERS = {
    (2048, 1): (4.5, 4.1),
    (2048, 8): (5.2, 4.8),
    (2048, 16): (5.4, 5.1),
    (2048, 32): (5.6, 5.3),
    (2048, 128): (6.0, 5.8),
    (4096, 1): (5.0, 4.7),
    (4096, 8): (5.6, 5.4),
    (4096, 16): (5.8, 5.5),
    (4096, 32): (6.3, 6.0),
    (4096, 128): (8.0, 7.6),
    (8192, 1): (5.7, 5.4),
    (8192, 8): (6.3, 6.0),
    (8192, 16): (6.8, 6.5),
    (8192, 32): (7.3, 7.0),
    (8192, 128): (12.0, 11.4),
}


BOUNCES = 1000
PING_PONG = Source.from_text(
    """
    #include "dk/memory_order.cuh"
    // A flag goes to the other GPU and back, `bounces` times; nobody waits for longer than a second.
    __global__ void ping_pong(unsigned* mine, unsigned* theirs, unsigned bounces, int begins) {
      const unsigned long long end = dk::time_ns() + 1000000000;
      for (unsigned i = 1; i <= bounces; ++i) {
        if (begins) dk::store_relaxed_sys(theirs, i);
        while (dk::load_relaxed_sys(mine) < i)
          if (dk::time_ns() > end) return;
        if (!begins) dk::store_relaxed_sys(theirs, i);
      }
    }
    """,
    "ping_pong.cu",
)

# One block for each row: h = x + residual, out = h * rsqrt(mean(h^2) + eps) * weight.
ADD_RMSNORM = Source.from_text(
    """
    #include "dk/vec.cuh"
    using Row = dk::Vec<__nv_bfloat16, 8>;
    __global__ void add_rmsnorm(const __nv_bfloat16* x, __nv_bfloat16* residual, const __nv_bfloat16* weight,
                                __nv_bfloat16* out, int hidden, float eps) {
      __shared__ float sums[32];
      const int at = threadIdx.x * 8;
      const long long row = 1ll * blockIdx.x * hidden;
      float h[8], squares = 0.0f;
      Row a = Row::load(x + row + at), b = Row::load(residual + row + at), w = Row::load(weight + at);
      for (int i = 0; i < 8; ++i) {
        b.elements[i] = dk::from_float<__nv_bfloat16>(dk::to_float(a.elements[i]) + dk::to_float(b.elements[i]));
        h[i] = dk::to_float(b.elements[i]);
        squares += h[i] * h[i];
      }
      b.store(residual + row + at);
      for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
      __syncthreads();
      float total = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
      for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
      const float by = rsqrtf(total / hidden + eps);
      for (int i = 0; i < 8; ++i)
        a.elements[i] = dk::from_float<__nv_bfloat16>(h[i] * by * dk::to_float(w.elements[i]));
      a.store(out + row + at);
    }
    """,
    "add_rmsnorm.cu",
)


class Bench:
    def __init__(self, ranks: int) -> None:
        self.devices = [Device(f"cuda:{rank}") for rank in range(ranks)]
        self.world = World.of_devices(self.devices)
        self.streams = [device.stream() for device in self.devices]
        self.rng = np.random.default_rng(0)
        self.nccl: Any = None

    def ping_pong(self) -> float:
        """Of there and back, between the first two GPUs, us."""
        with SymmetricMemory(self.world, 4) as memory:
            kernels = [device.module(PING_PONG).kernel("ping_pong") for device in self.devices[:2]]
            times = []
            for _ in range(5):
                for rank, device in enumerate(self.devices):
                    memory.part(rank, 1, np.uint32).fill(0)
                    device.synchronize()
                events: list[tuple[Event, Event]] = []
                for rank, (each, stream) in enumerate(zip(kernels, self.streams, strict=False)):
                    flags = [memory.part(of, 1, np.uint32, of=rank) for of in (rank, 1 - rank)]
                    first = stream.record()
                    each.launch(stream, grid=1, block=1, args=(*flags, BOUNCES, int(rank == 0)))
                    events.append((first, stream.record()))
                for stream in self.streams[:2]:
                    stream.synchronize()
                times.append(min(first.elapsed_ms(last) for first, last in events) * 1e3 / BOUNCES)
            return statistics.median(times)

    def median(self, meets: list[Exec], chains: list[Exec], calls: int) -> float:
        """Of a call, us: the largest of all ranks, behind what makes them meet."""
        times = []
        for _ in range(LAUNCHES):
            events = []
            for exe, stream in zip(meets, self.streams, strict=True):
                exe.launch(stream)
            for exe, stream in zip(chains, self.streams, strict=True):
                first = stream.record()
                exe.launch(stream)
                events.append((first, stream.record()))
            for stream in self.streams:
                stream.synchronize()
            times.append(max(first.elapsed_ms(last) for first, last in events))
        return statistics.median(times) * 1e3 / calls

    def us(self, group: AllReduce, tokens: int, calls: int, *, programmatic: bool) -> float:
        """Of one call, in a graph of so many."""
        with ExitStack() as stack:
            meets, chains = self._meets(stack, group), []
            for device in self.devices:
                x, residual, weight, out = self._arrays(stack, device, tokens, group.hidden)
                graph = stack.enter_context(Graph(device, "all-reduce"))
                last: Any = None
                for i in range(calls):
                    a, b = (x, out) if i % 2 == 0 else (out, x)
                    after = last.port("programmatic") if last is not None and programmatic else last
                    last = allreduce_rmsnorm(graph, group, a, residual, weight, b, residual, after=after)
                chains.append(stack.enter_context(graph.instantiate()))
            us = self.median(meets, chains, calls)
            group.check()
            return us

    def nccl_us(self, group: AllReduce, tokens: int, calls: int) -> float:
        """Of NCCL's all-reduce, and residual and RMSNorm in one kernel."""
        from cupy.cuda import nccl

        if self.nccl is None:
            self.nccl = nccl.NcclCommunicator.initAll([device.ordinal for device in self.devices])
        with ExitStack() as stack:
            meets, graphs, arrays = self._meets(stack, group), [], []
            for device in self.devices:
                arrays.append(self._arrays(stack, device, tokens, group.hidden))
                graphs.append(stack.enter_context(Graph(device, "NCCL")))
            kernels = [device.module(ADD_RMSNORM).kernel("add_rmsnorm") for device in self.devices]
            handles = [int(stream.handle) for stream in self.streams]
            with ExitStack() as capturing:
                for graph, stream in zip(graphs, self.streams, strict=True):
                    capturing.enter_context(graph.capture(stream, mode="relaxed"))
                for i in range(calls):
                    nccl.groupStart()
                    for comm, (x, _, _, out), handle in zip(self.nccl, arrays, handles, strict=True):
                        a = x if i % 2 == 0 else out
                        comm.allReduce(a.address, a.address, a.size, 9, nccl.NCCL_SUM, handle)  # 9: bfloat16
                    nccl.groupEnd()
                    for each, (x, residual, weight, out), stream in zip(kernels, arrays, self.streams, strict=True):
                        a, b = (x, out) if i % 2 == 0 else (out, x)
                        args = (a, residual, weight, b, group.hidden, 1e-6)
                        each.launch(stream, grid=tokens, block=group.hidden // 8, args=args)
            chains = [stack.enter_context(graph.instantiate()) for graph in graphs]
            return self.median(meets, chains, calls)

    def _meets(self, stack: ExitStack, group: AllReduce) -> list[Exec]:
        """Graphs of some calls of one row."""
        made = []
        for device in self.devices:
            x, residual, weight, out = self._arrays(stack, device, 1, group.hidden)
            graph = stack.enter_context(Graph(device, "meet"))
            last: Any = None
            for _ in range(MEET):
                last = allreduce_rmsnorm(graph, group, x, residual, weight, out, residual, after=last)
            made.append(stack.enter_context(graph.instantiate()))
        return made

    def _arrays(self, stack: ExitStack, device: Device, tokens: int, hidden: int) -> tuple[Any, ...]:
        x, residual = (
            device.array(self.rng.normal(size=(tokens, hidden)).astype(np.float32).astype(bf16)) for _ in range(2)
        )
        made = x, residual, device.array(np.ones(hidden, np.float32).astype(bf16)), device.zeros(x.shape, bf16)
        for each in made:
            stack.enter_context(each)
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    bench, console, rows = Bench(options.ranks), Console(width=140), []
    console.print(f"a flag to the other GPU and back: {bench.ping_pong():.2f} us")
    title = f"all-reduce + residual + RMSNorm, bf16, {options.ranks} ranks, us a call"
    columns = ("20 calls", "100 calls", "flashinfer", "20, programmatic", "100, programmatic", "flashinfer", "NCCL, 20")
    table = Table("hidden", "tokens", *columns, title=title)
    other = Table("hidden", "tokens", *PROTOCOLS, title="by protocol, 20 calls, us a call")
    for hidden in HIDDEN:
        how: dict[str, Any] = {"max_tokens": max(TOKENS), "hidden": hidden, "timeout_s": 2}
        with AllReduce(bench.world, **how) as group:
            for tokens in TOKENS:
                us = [bench.us(group, tokens, n, programmatic=p) for p in (False, True) for n in (20, 100)]
                nccl = bench.nccl_us(group, tokens, 20) if hidden // 8 <= 1024 else float("nan")
                peers = PEERS.get((hidden, tokens)) if options.ranks == 2 else None
                shown = [f"{each:.2f}" for each in us]
                shown[2:2] = [f"{peers[0]:.1f}" if peers else ""]
                table.add_row(str(hidden), str(tokens), *shown, f"{peers[1]:.1f}" if peers else "", f"{nccl:.2f}")
                rows.append({"hidden": hidden, "tokens": tokens, "us": us, "nccl": nccl})
        by = dict[int, list[str]]()
        for protocol in PROTOCOLS:
            with AllReduce(bench.world, protocols={protocol: max(TOKENS)}, **how) as group:
                for tokens in TOKENS:
                    by.setdefault(tokens, []).append(f"{bench.us(group, tokens, 20, programmatic=False):.2f}")
        for tokens, shown in by.items():
            other.add_row(str(hidden), str(tokens), *shown)
    console.print(table)
    console.print(other)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
