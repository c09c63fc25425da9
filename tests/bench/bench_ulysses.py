"""What the exchanges of Ulysses cost between the GPUs of this process, beside NCCL's sends and receives.

Run ``python tests/bench/bench_ulysses.py [--ranks N] [--json FILE]``. Each figure is the median over launches of a
graph of 20 exchanges, the largest of all ranks, divided by 20, us, and what that is of the bytes that each pair of
ranks exchanges, GB/s a direction and pair. NCCL's all-to-all moves as many bytes between contiguous buffers, in a
graph, through CuPy; what its users do besides, to bring heads together, is not counted. The bandwidth beside which both
stand is that of the copy engines, both ways at a time. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.ops.ulysses import Ulysses, ulysses_to_heads, ulysses_to_tokens
from drvkit.replay import Exec
from drvkit.symmetric import SymmetricMemory
from drvkit.world import World

bf16 = ml_dtypes.bfloat16
CALLS, LAUNCHES, COPY = 20, 21, 256 << 20
HEADS_EACH, DIM = 8, 128
TOKENS = (2, 8, 32, 128, 512, 2048, 8192)  # of a rank: 4 KB to 16 MB from one to another, of one tensor


class Bench:
    def __init__(self, ranks: int) -> None:
        self.devices = [Device(f"cuda:{rank}") for rank in range(ranks)]
        self.world = World.of_devices(self.devices)
        self.streams = [device.stream() for device in self.devices]
        self.nccl: Any = None

    def us(self, chains: list[Exec], calls: int) -> float:
        times = []
        for _ in range(LAUNCHES + 3):
            events = []
            for exe, stream in zip(chains, self.streams, strict=True):
                exe.launch(stream)  # so that the ranks meet
                first = stream.record()
                exe.launch(stream)
                events.append((first, stream.record()))
            for stream in self.streams:
                stream.synchronize()
            times.append(max(first.elapsed_ms(last) for first, last in events))
        return statistics.median(times[3:]) * 1e3 / calls

    def exchange(self, group: Ulysses, tokens: int, way: str, *, programmatic: bool = False) -> float:
        with ExitStack() as stack:
            chains = []
            for rank, device in enumerate(self.devices):
                graph = stack.enter_context(Graph(device, way))
                last: Any = None

                def behind(last: Any) -> Any:
                    return last.port("programmatic") if last is not None and programmatic else last

                if way == "to heads":
                    x = stack.enter_context(device.zeros((tokens, group.heads, DIM), bf16))
                    for _ in range(CALLS):
                        last = ulysses_to_heads(graph, group, x, x, x, after=behind(last))
                else:
                    o = stack.enter_context(
                        device.zeros((tokens * len(self.devices), len(group.heads_of[rank]), DIM), bf16)
                    )
                    for _ in range(CALLS):
                        last = ulysses_to_tokens(graph, group, o, after=behind(last))
                chains.append(stack.enter_context(graph.instantiate()))
            us = self.us(chains, CALLS)
            group.check()
            return us

    def captured(self, work: Callable[[int], None]) -> float:
        """Of a call of ``work``, which queues something on every stream, in graphs."""
        with ExitStack() as stack:
            graphs = [stack.enter_context(Graph(device, "captured")) for device in self.devices]
            with ExitStack() as capturing:
                for graph, stream in zip(graphs, self.streams, strict=True):
                    capturing.enter_context(graph.capture(stream, mode="relaxed"))
                for call in range(CALLS):
                    work(call)
            return self.us([stack.enter_context(graph.instantiate()) for graph in graphs], CALLS)

    def all_to_all(self, nbytes: int) -> float:
        """NCCL's, of so many bytes from each rank to each."""
        from cupy.cuda import nccl

        size = len(self.devices)
        if self.nccl is None:
            self.nccl = nccl.NcclCommunicator.initAll([device.ordinal for device in self.devices])
        streams = [int(stream.handle) for stream in self.streams]
        with ExitStack() as stack:
            sent, got = (
                [stack.enter_context(device.zeros((size, nbytes), np.uint8)) for device in self.devices]
                for _ in range(2)
            )

            def work(_: int) -> None:
                nccl.groupStart()
                for rank, (comm, stream) in enumerate(zip(self.nccl, streams, strict=True)):
                    for peer in range(size):
                        comm.send(sent[rank].address + peer * nbytes, nbytes, nccl.NCCL_UINT8, peer, stream)
                        comm.recv(got[rank].address + peer * nbytes, nbytes, nccl.NCCL_UINT8, peer, stream)
                nccl.groupEnd()

            return self.captured(work)

    def copies(self, nbytes: int, calls: int = CALLS) -> float:
        """Copies from each rank to the next one, all at a time, by the copy engines."""
        with SymmetricMemory(self.world, nbytes) as memory, ExitStack() as stack:
            chains = []
            for rank, device in enumerate(self.devices):
                graph = stack.enter_context(Graph(device, "copy"))
                own = stack.enter_context(device.zeros(nbytes, np.uint8))
                there = memory.part((rank + 1) % len(self.devices), nbytes, np.uint8, of=rank)
                last: Any = None
                for _ in range(calls):
                    last = graph.memcpy(there, own, after=last)
                chains.append(stack.enter_context(graph.instantiate()))
            return self.us(chains, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    bench, console, rows = Bench(options.ranks), Console(width=140), []
    peak = COPY / bench.copies(COPY, 2) / 1e3
    console.print(f"copy engines, all ways at a time, {COPY >> 20} MB: {peak:.0f} GB/s")
    columns = (
        *("way", "KB a pair", "packets", "flags", "flags, programmatic", "NCCL all-to-all", "copies of as many bytes"),
        *("flags, GB/s", f"of {peak:.0f}", "of the copies"),
    )
    table = Table(*columns, title=f"exchanges of Ulysses, {options.ranks} ranks, us")
    heads = HEADS_EACH * options.ranks
    how: dict[str, Any] = {"heads": heads, "kv_heads": heads, "dim": DIM, "timeout_s": 2}
    most = max(TOKENS) * options.ranks
    for way, tensors in (("to heads", 3), ("to tokens", 1)):
        for tokens in TOKENS:
            nbytes = tokens * HEADS_EACH * DIM * 2 * tensors
            us = [float("nan")] * 3
            if nbytes <= 2 << 20:
                with Ulysses(bench.world, max_tokens=most, packets_up_to=2 << 20, **how) as group:
                    us[0] = bench.exchange(group, tokens, way)
            with Ulysses(bench.world, max_tokens=most, packets_up_to=0, **how) as group:
                us[1:] = (bench.exchange(group, tokens, way, programmatic=each) for each in (False, True))
            nccl, copies, rate = bench.all_to_all(nbytes), bench.copies(nbytes), nbytes / min(us[1:]) / 1e3
            shown = [f"{each:.2f}" for each in (*us, nccl, copies)]
            shares = (rate / peak, copies / min(us[1:]))
            table.add_row(way, f"{nbytes / 1024:.0f}", *shown, f"{rate:.0f}", *(f"{share:.0%}" for share in shares))
            rows.append({"way": way, "bytes": nbytes, "us": us, "nccl": nccl, "copies": copies, "peak": peak})
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
