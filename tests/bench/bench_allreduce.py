"""What an all-reduce with residual and RMSNorm costs between two or more GPUs of this process.

Run ``python tests/bench/bench_allreduce.py [--ranks N] [--json FILE]`` where there are as many GPUs. Each row is a
graph of chained calls on each GPU, whose output is the next one's input, launched behind a graph that makes the ranks
meet. A figure is the median over launches of the time of a launch, the largest of all ranks, divided by its calls; with
plain edges, and with programmatic ones. Nothing is asserted.

"peer" is flashinfer 0.6.18's one-shot Lamport kernel between two H200, without and with programmatic launch, measured
on other machines by the same protocol.
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

from drvkit.device import Device
from drvkit.graph import Graph
from drvkit.ops.allreduce_rmsnorm import AllReduce, allreduce_rmsnorm
from drvkit.replay import Exec
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


class Bench:
    def __init__(self, ranks: int) -> None:
        self.devices = [Device(f"cuda:{rank}") for rank in range(ranks)]
        self.world = World.of_devices(self.devices)
        self.streams = [device.stream() for device in self.devices]
        self.rng = np.random.default_rng(0)

    def us(self, group: AllReduce, tokens: int, calls: int, *, programmatic: bool) -> float:
        """Of one call, in a graph of so many."""
        with ExitStack() as stack:
            meets: list[Exec] = []
            chains: list[Exec] = []
            for device in self.devices:
                x, residual = (
                    stack.enter_context(
                        device.array(self.rng.normal(size=(tokens, group.hidden)).astype(np.float32).astype(bf16))
                    )
                    for _ in range(2)
                )
                out = stack.enter_context(device.zeros(x.shape, bf16))
                weight = stack.enter_context(device.array(np.ones(group.hidden, np.float32).astype(bf16)))
                for made, count in ((meets, MEET), (chains, calls)):
                    graph = stack.enter_context(Graph(device, "all-reduce"))
                    last: Any = None
                    for i in range(count):
                        a, b = (x, out) if i % 2 == 0 else (out, x)
                        after = last.port("programmatic") if last is not None and programmatic else last
                        last = allreduce_rmsnorm(graph, group, a, residual, weight, b, residual, after=after)
                    made.append(stack.enter_context(graph.instantiate()))
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
            group.check()
            return statistics.median(times) * 1e3 / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    bench = Bench(options.ranks)
    title = f"all-reduce + residual + RMSNorm, bf16, {options.ranks} ranks, us a call"
    columns = ("hidden", "tokens", "20 calls", "100 calls", "peer", "20, programmatic", "100, programmatic", "peer")
    table, rows = Table(*columns, title=title), []
    for hidden in HIDDEN:
        with AllReduce(bench.world, max_tokens=max(TOKENS), hidden=hidden, timeout_s=2) as group:
            for tokens in TOKENS:
                us = [bench.us(group, tokens, n, programmatic=p) for p in (False, True) for n in (20, 100)]
                peers = PEERS.get((hidden, tokens)) if options.ranks == 2 else None
                shown = [f"{each:.2f}" for each in us]
                shown[2:2] = [f"{peers[0]:.1f}" if peers else ""]
                table.add_row(str(hidden), str(tokens), *shown, f"{peers[1]:.1f}" if peers else "")
                rows.append({"hidden": hidden, "tokens": tokens, "us": us})
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
