"""What an all-reduce over groups of groups costs on two GPUs, and what that says of many hosts.

Run ``python tests/bench/bench_groups.py [--hosts H] [--gpus G] [--nic GB/S] [--step US] [--json FILE]`` where there are
two GPUs and CuPy finds NCCL. Measured as in `bench_allreduce`: graphs of chained calls, the largest of both GPUs, us a
call. Nothing is asserted.

1. The whole, with each GPU as a group of two virtual ranks and NCCL between them, and its three parts alone.
2. The parts as they are on hosts: reduce-scatter and all-gather over NVLink, with both GPUs as one group, and NCCL's
   all-reduce of the half that is left. A straight line through the first and the last size of each gives its latency
   ``a`` and the rate ``b`` at which a rank sends.
3. Of these, what H hosts of G GPUs would take for n bytes of each rank; each GPU has a network card of rate W, and all
   of a host send at a time, each its n / G bytes:

       T(n)    = a_rs + a_ag + (G - 1) / G * n * (1 / b_rs + 1 / b_ag) + T_b(n / G)
       T_b(m)  = a_nccl + the smaller of
                 ring:  2 (H - 1) s + 2 (H - 1) / H * m / W
                 tree:  2 ceil(log2 H) s + 2 m / W

   ``s``, a step from host to host, cannot be measured on one host: it is an assumption, as W is. ``a_nccl`` has a
   launch and two steps over NVLink. What is left out: that ranks wait for the slowest of all, not of two; that G - 1
   ranks send to one at a time; other traffic in the network.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
from bench_allreduce import Bench
from rich.console import Console
from rich.table import Table

from drvkit.graph import Graph
from drvkit.nccl import Nccl
from drvkit.ops.allreduce_rmsnorm import AllReduce
from drvkit.ops.collectives import AllGather, AllReduceOfGroups, all_gather, allreduce_of_groups, reduce_scatter
from drvkit.world import World

bf16 = ml_dtypes.bfloat16
HIDDEN, TOKENS, CALLS = 8192, (1, 8, 32, 128, 512, 1024), 20
WIDTH, MOST = HIDDEN // 2, max(TOKENS)
PROTOCOLS = {"lamport": MOST}


class Line(NamedTuple):
    """What something takes for so many bytes."""

    latency_us: float
    rate: float  # bytes a us, which are MB/s

    @classmethod
    def through(cls, points: list[tuple[float, float]]) -> Line:
        (few, first), (many, last) = points[0], points[-1]
        rate = (many - few) / (last - first)
        return cls(first - few / rate, rate)


def hosts_us(n: float, rs: Line, ag: Line, nccl_us: float, hosts: int, gpus: int, nic: float, step: float) -> Any:
    """Of n bytes of each rank: inside, and between by ring and by tree."""
    inside = rs.latency_us + ag.latency_us + (gpus - 1) / gpus * n * (1 / rs.rate + 1 / ag.rate)
    m = n / gpus
    ring = nccl_us + 2 * (hosts - 1) * step + 2 * (hosts - 1) / hosts * m / nic
    tree = nccl_us + 2 * math.ceil(math.log2(hosts)) * step + 2 * m / nic
    return inside, ring, tree


class Groups(Bench):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__(2)
        self.stack = stack
        enter = stack.enter_context
        self.communicator = enter(Nccl(self.world))
        self.meeting = enter(AllReduce(self.world, max_tokens=1, hidden=HIDDEN))
        self.pair = self._channels(self.world)
        virtual = [enter(World.of_virtual(device, 2)) for device in self.devices]
        self.virtual = [self._channels(each) for each in virtual]
        self.groups = enter(AllReduceOfGroups(virtual, [self.communicator], max_tokens=MOST, hidden=HIDDEN))

    def _channels(self, world: World) -> tuple[AllReduce, AllGather]:
        sums = AllReduce(world, max_tokens=MOST, hidden=WIDTH, protocols=PROTOCOLS)
        gathers = AllGather(world, max_bytes=MOST * WIDTH * 2)
        return self.stack.enter_context(sums), self.stack.enter_context(gathers)

    def us_of(self, shapes: list[tuple[int, ...]], add: Callable[..., Any]) -> float:
        """Of a call of ``add(rank, graph, *arrays, after)``, which gives the nodes to come after."""
        with ExitStack() as stack:
            meets, chains = self._meets(stack, self.meeting), []
            for rank, device in enumerate(self.devices):
                arrays = [stack.enter_context(device.zeros(shape, bf16)) for shape in shapes]
                graph = stack.enter_context(Graph(device, "chain"))
                last: Any = None
                for _ in range(CALLS):
                    last = add(rank, graph, *arrays, last)
                chains.append(stack.enter_context(graph.instantiate()))
            return self.median(meets, chains, CALLS)

    def row(self, tokens: int) -> dict[str, float]:
        """All figures for so many tokens of each rank, us."""
        whole, part = (tokens, HIDDEN), (tokens, WIDTH)
        parts = (2, *part)

        def scatter(of: Callable[[int], AllReduce]) -> Callable[..., Any]:
            return lambda rank, graph, x, out, after: reduce_scatter(graph, of(rank), x, out, after=after)

        def gather(of: Callable[[int], AllGather]) -> Callable[..., Any]:
            return lambda rank, graph, x, out, after: all_gather(graph, of(rank), x, out, after=after)

        def between(rank: int, graph: Graph, x: Any, after: Any) -> Any:
            return self.communicator.allreduce(graph, x, after=after)

        def groups(rank: int, graph: Graph, x: Any, out: Any, after: Any) -> Any:
            return allreduce_of_groups(graph, self.groups, x, out, after=after)

        return {
            "bytes": tokens * HIDDEN * 2,
            "virtual_rs": self.us_of([(2, *parts), parts], scatter(lambda rank: self.virtual[rank][0])),
            "virtual_nccl": self.us_of([parts], between),  # both places at a time
            "virtual_ag": self.us_of([parts, (2, *parts)], gather(lambda rank: self.virtual[rank][1])),
            "whole": self.us_of([(2, *whole), (2, *whole)], groups),
            "rs": self.us_of([parts, part], scatter(lambda _: self.pair[0])),
            "nccl": self.us_of([part], between),
            "ag": self.us_of([part, parts], gather(lambda _: self.pair[1])),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=8, help="of a host")
    parser.add_argument("--nic", type=float, default=50.0, help="GB/s of each GPU's network card: 400 Gb/s are 50")
    parser.add_argument("--step", type=float, default=5.0, help="us from host to host")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    console = Console(width=140)
    with ExitStack() as stack:
        bench = Groups(stack)
        rows = [bench.row(tokens) for tokens in TOKENS]
        bench.groups.check()

    table = Table("KB a rank", "reduce-scatter", "NCCL", "all-gather", "their sum", "the whole")
    table.title = "two groups of two virtual ranks, a GPU each, bf16, us"
    for row in rows:
        three = [row[f"virtual_{part}"] for part in ("rs", "nccl", "ag")]
        table.add_row(f"{row['bytes'] / 1024:g}", *(f"{each:.2f}" for each in (*three, sum(three), row["whole"])))
    console.print(table)

    # A rank sends half of its bytes in each: to the other one, or around a ring of two.
    lines = {part: Line.through([(row["bytes"] / 2, row[part]) for row in rows]) for part in ("rs", "nccl", "ag")}
    table = Table("KB a rank", "reduce-scatter", "NCCL, of half", "all-gather", title="one group of two GPUs, us")
    for row in rows:
        table.add_row(f"{row['bytes'] / 1024:g}", *(f"{row[part]:.2f}" for part in ("rs", "nccl", "ag")))
    table.add_section()
    table.add_row("a, us", *(f"{lines[part].latency_us:.2f}" for part in ("rs", "nccl", "ag")))
    table.add_row("b, GB/s", *(f"{lines[part].rate / 1e3:.0f}" for part in ("rs", "nccl", "ag")))
    console.print(table)

    hosts, gpus, nic = options.hosts, options.gpus, options.nic * 1e3
    title = (
        f"computed: {hosts} hosts of {gpus} GPUs, a card of {options.nic:g} GB/s each, {options.step:g} us a step, us"
    )
    table = Table("KB a rank", "inside", "ring between", "tree between", "T", "of which network", title=title)
    computed = []
    for row in rows:
        n = row["bytes"]
        inside, ring, tree = hosts_us(
            n, lines["rs"], lines["ag"], lines["nccl"].latency_us, hosts, gpus, nic, options.step
        )
        total = inside + min(ring, tree)
        computed.append({"bytes": n, "inside": inside, "ring": ring, "tree": tree, "total": total})
        share = (min(ring, tree) - lines["nccl"].latency_us) / total
        table.add_row(f"{n / 1024:g}", *(f"{each:.1f}" for each in (inside, ring, tree, total)), f"{share:.0%}")
    console.print(table)
    console.print(
        "T(n) = a_rs + a_ag + (G-1)/G n (1/b_rs + 1/b_ag) + a_nccl + "
        "min(2(H-1) s + 2(H-1)/H n/G/W, 2 ceil(log2 H) s + 2 n/G/W)"
    )
    if options.json:
        said = {"measured": rows, "lines": {part: line._asdict() for part, line in lines.items()}, "computed": computed}
        options.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
