"""What launches and graphs cost the host: drvkit beside C, cuda.bindings, cuda.core and CuPy.

Run ``python tests/bench/bench_launch.py [--json FILE]`` where there is a GPU. All columns work on one device, stream
and kernel. A number is the median over rounds, in microseconds per operation; the columns take turns round by round, so
that drift hits all alike; a round is the mean of some runs after a first one that does not count, because the other
columns have emptied the caches. Only host calls are timed: the stream is synchronized before each run, and a run queues
no more than the driver takes without blocking. The statements that are timed stand below as text, for `timeit` to run
them in a loop with the garbage collector off. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from timeit import Timer
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from drvkit.device import Device
from drvkit.driver import DriverError
from drvkit.graph import Graph
from drvkit.native import how
from drvkit.source import Source

SOURCE = """
__global__ void scale(const float* x, float* y, int n, float alpha) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = alpha * x[i];
}
"""
ROUNDS, WARM_UP = 21, 3
LAUNCHES = 600  # the queue holds 1024; enough to meet what drvkit does once in 512 launches
GRAPH_LAUNCHES = {1: 20, 100: 10, 1000: 5}
UPDATES = 2000
UPDATED_NODES = 100  # of the graph of which one node is updated


class Missing(Exception):  # noqa: N818 - no error: a cell of the table stays empty
    """This column has no such operation, for the reason given."""


class Shared:
    """What all columns use: device, stream, kernel, memory, the packed arguments and the graphs to launch."""

    def __init__(self) -> None:
        self.device = Device("cuda:0")
        self.stream = self.device.stream()
        self.module = self.device.module(Source.from_text(SOURCE, "scale.cu"))
        self.cubin: bytes = self.module.loaded[0].image.data
        self.kernel = self.module.kernel("scale")
        self.x = self.device.array(np.ones(1024, np.float32))
        self.y = self.device.zeros(1024, np.float32)
        self.alpha = ctypes.c_float(2.0)
        pointers = ctypes.c_void_p(self.x.address), ctypes.c_void_p(self.y.address)
        self.values = (*pointers, ctypes.c_int(1024), self.alpha)
        self.packed = (ctypes.c_void_p * 4)(*map(ctypes.addressof, self.values))  # the driver's kernelParams
        self.replays: dict[int, Any] = {}

    def graph(self, nodes: int, last: str | None = None) -> tuple[Graph, Any]:
        """A chain of kernel nodes, and the last of them."""
        graph, node = Graph(self.device, "bench"), None
        for i in range(1, nodes + 1):
            name = last if i == nodes else None
            node = graph.kernel(self.kernel, grid=4, block=256, args=(self.x, self.y, 1024, 2.0), after=node, name=name)
        return graph, node

    def replay(self, nodes: int) -> Any:
        """The executable whose launch is timed."""
        if nodes not in self.replays:
            self.replays[nodes] = self.graph(nodes)[0].instantiate()
        return self.replays[nodes]

    @cached_property
    def updated(self) -> tuple[Any, Any]:
        """An executable, and the node "k" in it that is updated."""
        graph, node = self.graph(UPDATED_NODES, "k")
        return graph.instantiate(), node


class Peer:
    """A column. Each operation's method runs one round of it and returns microseconds per operation."""

    name = ""

    def __init__(self, shared: Shared, lack: str = "no such call in its API") -> None:
        self.shared, self.lack = shared, lack
        self.scope: dict[str, Any] = {}  # what the timed statements can name
        self.timers: dict[str, Timer] = {}
        self.replays: dict[int, Any] = {}

    def time(self, statement: str, count: int = 1, setup: str = "pass", **names: Any) -> float:
        """Microseconds per run of ``statement``, of ``count`` runs after one of ``setup``."""
        self.scope.update(names)
        if statement not in self.timers:
            self.timers[statement] = Timer(statement, setup, globals=self.scope)
        return self.timers[statement].timeit(count) * 1e6 / count

    def launch_prepared(self) -> float:
        raise Missing(self.lack)

    def launch_typed(self) -> float:
        raise Missing(self.lack)

    def add_nodes(self, nodes: int) -> float:
        """Per node, of a new graph that grows to a chain of ``nodes``."""
        raise Missing(self.lack)

    def instantiate(self, nodes: int) -> float:
        """Of a new graph."""
        raise Missing(self.lack)

    def launch_graph(self, nodes: int) -> float:
        raise Missing(self.lack)

    def update(self) -> float:
        raise Missing(self.lack)


class Floor(Peer):
    name = "C floor"

    def __init__(self, shared: Shared, directory: Path) -> None:
        super().__init__(shared)
        compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("nvcc")
        if compiler is None:
            raise Missing("no C compiler: gcc, cc or nvcc")
        source, library = Path(__file__).with_name("launch_floor.c"), directory / "launch_floor.so"
        pic = ["-Xcompiler", "-fPIC"] if Path(compiler).name == "nvcc" else ["-fPIC"]
        command = [compiler, "-O2", "-shared", *pic, "-o", str(library), str(source), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"{compiler}: {done.stderr.strip()}")
        self.floor = ctypes.CDLL(str(library))
        if self.floor.floor_open(4, 256):
            raise Missing("libcuda.so.1 lacks a function")
        self.function, self.stream = int(shared.kernel.handle), int(shared.stream.handle)

    def call(self, name: str, types: str, *args: Any) -> float:
        """Microseconds from a function of launch_floor.c; ``types`` has a p for a pointer, an i for an int."""
        function = getattr(self.floor, name)
        function.restype = ctypes.c_double
        function.argtypes = [{"p": ctypes.c_void_p, "i": ctypes.c_int}[kind] for kind in types]
        nanoseconds: float = function(*args)
        if nanoseconds < 0:
            raise RuntimeError(f"{name}: CUresult {-nanoseconds:.0f}")
        return nanoseconds / 1e3

    def launch_prepared(self) -> float:
        return self.call("floor_launch", "pppi", self.function, self.stream, self.shared.packed, LAUNCHES)

    launch_typed = launch_prepared

    def add_nodes(self, nodes: int) -> float:
        return self.call("floor_add_nodes", "ppi", self.function, self.shared.packed, nodes)

    def instantiate(self, nodes: int) -> float:
        return self.call("floor_instantiate", "ppi", self.function, self.shared.packed, nodes)

    def launch_graph(self, nodes: int) -> float:
        exe = int(self.shared.replay(nodes).handle)
        return self.call("floor_launch_graph", "ppi", exe, self.stream, GRAPH_LAUNCHES[nodes])

    def update(self) -> float:
        exe, node = (int(thing.handle) for thing in self.shared.updated)
        packed, alpha = self.shared.packed, ctypes.addressof(self.shared.alpha)
        return self.call("floor_update", "pppppi", exe, node, self.function, packed, alpha, UPDATES)


class Bindings(Peer):
    """cuda.bindings by hand: arguments packed beforehand where the row says so, else as (values, types)."""

    name = "cuda.bindings"

    NODE = """
params = driver.CUDA_KERNEL_NODE_PARAMS()
params.func = function
params.gridDimX, params.gridDimY, params.gridDimZ = 4, 1, 1
params.blockDimX, params.blockDimY, params.blockDimZ = 256, 1, 1
params.sharedMemBytes = 0
params.kernelParams = ((x, y, 1024, 2.0), types)
"""

    def __init__(self, shared: Shared, _: Path) -> None:
        super().__init__(shared)
        from cuda.bindings import driver

        self.driver = driver
        self.scope = {
            "driver": driver,
            "checked": self.checked,
            "function": shared.kernel.handle,
            "stream": shared.stream.handle,
            "packed": ctypes.addressof(shared.packed),
            "x": driver.CUdeviceptr(shared.x.address),
            "y": driver.CUdeviceptr(shared.y.address),
            "types": (None, None, ctypes.c_int, ctypes.c_float),
        }

    @staticmethod
    def checked(result: tuple[Any, ...]) -> Any:
        if result[0]:
            raise RuntimeError(result[0])
        return result[-1]

    def launch_prepared(self) -> float:
        return self.time("checked(driver.cuLaunchKernel(function, 4, 1, 1, 256, 1, 1, 0, stream, packed, 0))", LAUNCHES)

    def launch_typed(self) -> float:
        arguments = "((x, y, 1024, 2.0), types)"
        call = f"driver.cuLaunchKernel(function, 4, 1, 1, 256, 1, 1, 0, stream, {arguments}, 0)"
        return self.time(f"checked({call})", LAUNCHES)

    def add_nodes(self, nodes: int) -> float:
        graph = self.checked(self.driver.cuGraphCreate(0))
        add = "after = [checked(driver.cuGraphAddKernelNode(graph, after, len(after), params))]"
        us = self.time(self.NODE + add, nodes, setup="after = []", graph=graph)
        self.checked(self.driver.cuGraphDestroy(graph))
        return us

    def instantiate(self, nodes: int) -> float:
        graph = self.shared.graph(nodes)[0]  # made by drvkit: the time to make it does not count
        execs: list[Any] = []
        us = self.time("keep(checked(driver.cuGraphInstantiate(graph, 0)))", graph=graph.handle, keep=execs.append)
        for exe in execs:
            self.checked(self.driver.cuGraphExecDestroy(exe))
        graph.close()
        return us

    def launch_graph(self, nodes: int) -> float:
        exe = self.shared.replay(nodes).handle
        return self.time("checked(driver.cuGraphLaunch(exe, stream))", GRAPH_LAUNCHES[nodes], exe=exe)

    def update(self) -> float:
        exe, node = (thing.handle for thing in self.shared.updated)
        update = """
alpha = 5.0 - alpha
params.kernelParams = ((x, y, 1024, alpha), types)
checked(driver.cuGraphExecKernelNodeSetParams(exe, node, params))
"""
        return self.time(update, UPDATES, setup=f"{self.NODE}alpha = 2.0", exe=exe, node=node)


class Core(Peer):
    name = "cuda.core"

    def __init__(self, shared: Shared, _: Path) -> None:
        super().__init__(shared)
        core, self.graphs = import_module("cuda.core"), import_module("cuda.core.graph")
        core.Device(shared.device.ordinal).set_current()  # its primary context
        self.scope = {
            "np": np,
            "launch": core.launch,
            "stream": core.Stream.from_handle(int(shared.stream.handle)),
            "config": core.LaunchConfig(grid=4, block=256),
            "kernel": core.ObjectCode.from_cubin(shared.cubin).get_kernel(shared.kernel.symbol),
            "x": shared.x.address,
            "y": shared.y.address,
            "n": np.int32(1024),
            "two": np.float32(2.0),
            "five": np.float32(5.0),
        }

    def launch_typed(self) -> float:
        return self.time("launch(stream, config, kernel, x, y, n, two)", LAUNCHES)

    def add_nodes(self, nodes: int) -> float:
        definition = self.graphs.GraphDefinition()
        return self.time("node = node.launch(config, kernel, x, y, n, two)", nodes, "node = graph", graph=definition)

    def chain(self, nodes: int) -> tuple[Any, Any]:
        definition = self.graphs.GraphDefinition()
        node = definition
        for _ in range(nodes):
            node = node.launch(*(self.scope[name] for name in ("config", "kernel", "x", "y", "n", "two")))
        return definition, node

    def instantiate(self, nodes: int) -> float:
        return self.time("exe = graph.instantiate()", graph=self.chain(nodes)[0])

    def launch_graph(self, nodes: int) -> float:
        if nodes not in self.replays:
            self.replays[nodes] = self.chain(nodes)[0].instantiate()
        return self.time("exe.launch(stream)", GRAPH_LAUNCHES[nodes], exe=self.replays[nodes])

    @cached_property
    def updated(self) -> tuple[Any, Any]:
        definition, node = self.chain(UPDATED_NODES)
        return definition.instantiate(), node

    def update(self) -> float:
        exe, node = self.updated
        if not hasattr(exe, "__getitem__"):
            raise Missing("this version updates no single node of an executable")
        update = "alpha = five - alpha; exe[node].update(config=config, kernel=kernel, args=(x, y, n, alpha))"
        return self.time(update, UPDATES, setup="alpha = two", exe=exe, node=node)


class CuPy(Peer):
    name = "CuPy"

    def __init__(self, shared: Shared, directory: Path) -> None:
        super().__init__(shared)
        self.cupy = import_module("cupy")
        cubin = directory / "scale.cubin"
        cubin.write_bytes(shared.cubin)
        self.kernel = self.cupy.RawModule(path=str(cubin)).get_function(shared.kernel.symbol)
        self.stream = self.cupy.cuda.Stream.from_external(shared.stream)
        self.args = self.cupy.asarray(shared.x), self.cupy.asarray(shared.y), np.int32(1024), np.float32(2.0)
        self.scope = {"kernel": self.kernel, "stream": self.stream, **dict(zip("xyna", self.args, strict=True))}

    def launch_typed(self) -> float:
        with self.stream:
            return self.time("kernel((4,), (256,), (x, y, n, a))", LAUNCHES)

    def launch_graph(self, nodes: int) -> float:
        if nodes not in self.replays:
            with self.cupy.cuda.Stream(non_blocking=True) as stream:
                stream.begin_capture()
                for _ in range(nodes):
                    self.kernel((4,), (256,), self.args)
                self.replays[nodes] = stream.end_capture()
        return self.time("graph.launch(stream)", GRAPH_LAUNCHES[nodes], graph=self.replays[nodes])


class Drvkit(Peer):
    name = "drvkit"

    def __init__(self, shared: Shared, _: Path) -> None:
        super().__init__(shared)
        kernel, stream, x, y = shared.kernel, shared.stream, shared.x, shared.y
        ready = kernel.prepare(stream, grid=4, block=256, args=(x, y, 1024, 2.0))
        self.scope = {"kernel": kernel, "stream": stream, "x": x, "y": y, "ready": ready}

    def launch_prepared(self) -> float:
        return self.time("ready()", LAUNCHES)

    def launch_typed(self) -> float:
        return self.time("kernel.launch(stream, grid=4, block=256, args=(x, y, 1024, 2.0))", LAUNCHES)

    def add_nodes(self, nodes: int) -> float:
        with Graph(self.shared.device, "bench") as graph:
            add = "node = g.kernel(kernel, grid=4, block=256, args=(x, y, 1024, 2.0), after=node)"
            return self.time(add, nodes, setup="node = None", g=graph)

    def instantiate(self, nodes: int) -> float:
        with self.shared.graph(nodes)[0] as graph:
            return self.time("exe = g.instantiate()", g=graph)

    def launch_graph(self, nodes: int) -> float:
        return self.time("exe.launch(stream)", GRAPH_LAUNCHES[nodes], exe=self.shared.replay(nodes))

    def update(self) -> float:
        update = "alpha = 5.0 - alpha; exe['k'].set(alpha=alpha)"
        return self.time(update, UPDATES, setup="alpha = 2.0", exe=self.shared.updated[0])


@dataclass
class Operation:
    """A row: what is run, drvkit's bar, and then what came out, in microseconds by column."""

    label: str
    run: Callable[[Peer], float]
    at_most: float | None = None
    times: str = "us"  # or the column that the bar is a multiple of
    rounds: int = ROUNDS
    runs: int = 1  # of a round, after one that does not count
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        return statistics.median(self.samples[name]) if name in self.samples else None

    def spread(self, name: str) -> dict[str, float]:
        """Least, median, and what nine of ten rounds stay below."""
        samples = self.samples[name]
        p90 = statistics.quantiles(samples, n=10, method="inclusive")[8]
        return {"min": min(samples), "median": statistics.median(samples), "p90": p90}

    @property
    def ratio(self) -> float | None:
        mine, floor = self.median(Drvkit.name), self.median(Floor.name)
        return mine / floor if mine and floor else None

    @property
    def bar(self) -> str:
        return f"<= {self.at_most:.2f} {'' if self.times == 'us' else 'x '}{self.times}" if self.at_most else ""

    @property
    def met(self) -> bool | None:
        """Whether drvkit is within the bar; None where there is none or it cannot be told."""
        mine, unit = self.median(Drvkit.name), 1.0 if self.times == "us" else self.median(self.times)
        return None if self.at_most is None or mine is None or unit is None else mine <= self.at_most * unit


def operations() -> list[Operation]:
    rows = [
        Operation("kernel launch, prepared", lambda peer: peer.launch_prepared(), 1.15, Floor.name, runs=4),
        Operation("kernel launch, typed and checked", lambda peer: peer.launch_typed(), 1.0, Core.name, runs=4),
        Operation("add a kernel node, to 1000", lambda peer: peer.add_nodes(1000), 3.5),
        Operation("instantiate 100 nodes", lambda peer: peer.instantiate(100)),
        Operation("graph launch, 1 node", lambda peer: peer.launch_graph(1), 1.15, Floor.name, runs=20),
        Operation("graph launch, 100 nodes", lambda peer: peer.launch_graph(100), 1.15, Floor.name, runs=20),
        Operation("graph launch, 1000 nodes", lambda peer: peer.launch_graph(1000), 1.15, Floor.name, runs=20),
        Operation("update one scalar of one node", lambda peer: peer.update(), 1.0),
    ]
    for nodes, rounds in ((100, ROUNDS), (1000, ROUNDS), (10000, 15)):
        rows.append(Operation(f"build + instantiate {nodes}, per node", partial(build, nodes), rounds=rounds))
    return rows


def build(nodes: int, peer: Peer) -> float:
    return peer.add_nodes(nodes) + peer.instantiate(nodes) / nodes


def reason(error: Exception) -> str:
    return str(error) if isinstance(error, Missing) else f"{type(error).__name__}: {error}"


def open_peers(shared: Shared, directory: Path) -> list[Peer]:
    """The columns. One that cannot be had is there all the same, and says why at every operation."""
    peers: list[Peer] = []
    for kind in (Floor, Bindings, Core, CuPy, Drvkit):
        try:
            peers.append(kind(shared, directory))
        except Exception as error:
            peers.append(Peer(shared, reason(error)))
            peers[-1].name = kind.name
    return peers


def measure(row: Operation, peers: list[Peer], shared: Shared) -> dict[str, str]:
    """Run the rounds of a row. Returns the columns that have no number, with the reason."""
    active, missing = [], {}
    for peer in peers:
        try:
            for _ in range(WARM_UP):
                shared.stream.synchronize()
                row.run(peer)
            active.append(peer)
        except Exception as error:
            missing[peer.name] = reason(error)
    row.samples = {peer.name: [] for peer in active}
    gc.collect()
    gc.freeze()  # collecting between rounds looks at what they left, not at all that lives
    for _ in range(row.rounds):
        for peer in active:
            gc.collect()
            runs = []
            for _ in range(1 + row.runs):
                shared.stream.synchronize()
                runs.append(row.run(peer))
            row.samples[peer.name].append(statistics.fmean(runs[1:]))  # the first fills the caches
    gc.unfreeze()
    return missing


def header(shared: Shared) -> str:
    cpu = platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        models = [line.partition(": ")[2] for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{models[0]}, {len(models)} threads" if models else cpu
    cuda = shared.device.driver.cuDriverGetVersion()
    parts = [f"{shared.device.name}, driver for CUDA {cuda // 1000}.{cuda % 1000 // 10}", cpu]
    parts.append(f"Python {platform.python_version()}")
    parts.append(f"drvkit's calls {how()}")
    for package in ("cuda-bindings", "cuda-core", "cupy-cuda13x"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    return "; ".join(parts)


def show(rows: list[Operation], names: list[str], missing: dict[tuple[str, str], list[str]], console: Console) -> None:
    table = Table("median us per operation", title="host cost of launches and graphs")
    for name in (*names, "drvkit / floor", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        figures = [*map(row.median, names), row.ratio]
        verdict = {None: "", True: " [green]met[/]", False: " [red]missed[/]"}[row.met]
        table.add_row(row.label, *("-" if x is None else f"{x:.2f}" for x in figures), row.bar + verdict)
    console.print(table)
    for (name, why), labels in missing.items():
        where = "all rows" if len(labels) == len(rows) else "; ".join(labels)
        console.print(f"- {name}, {where}: {why}", markup=False, highlight=False, soft_wrap=True)
    shown = Floor.name, Drvkit.name
    table = Table("min .. median .. p90, us", *shown, title="spread over the rounds")
    for row in rows:
        spreads = [row.spread(name).values() if name in row.samples else () for name in shown]
        table.add_row(row.label, *(" .. ".join(f"{us:.2f}" for us in spread) or "-" for spread in spreads))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of launches and graphs: drvkit beside its peers.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    options = parser.parse_args()
    try:
        shared = Shared()
    except DriverError as error:
        raise SystemExit(f"no GPU to measure on: {error}") from None
    rows = operations()
    missing: dict[tuple[str, str], list[str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        peers = open_peers(shared, Path(directory))
        for row in rows:
            for name, why in measure(row, peers, shared).items():
                missing.setdefault((name, why), []).append(row.label)
    console = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width of its own
    console.print(header(shared), highlight=False, soft_wrap=True)
    show(rows, [peer.name for peer in peers], missing, console)
    if options.json:
        columns = [{"operation": row.label, "us": {name: row.spread(name) for name in row.samples}} for row in rows]
        verdicts = [{"ratio": row.ratio, "bar": row.bar, "met": row.met, "rounds": row.rounds} for row in rows]
        report = {
            "header": header(shared),
            "rows": [column | verdict for column, verdict in zip(columns, verdicts, strict=True)],
            "missing": [{"column": name, "why": why, "rows": labels} for (name, why), labels in missing.items()],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
