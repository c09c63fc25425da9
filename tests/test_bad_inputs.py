"""What cannot be is refused, in words that name it. Two tables: what needs no device, and what needs one.

A row is an action and what its error says; an action that should be refused in several places stands in several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kernels import SOURCE

import drvkit as dk
from drvkit.signature import CType


class Bad(NamedTuple):
    """``act`` raises ``error``, which says all of ``said``."""

    what: str
    act: Callable[..., Any]
    error: type[Exception]
    said: tuple[str, ...]


def bad(what: str, act: Callable[..., Any], error: type[Exception], *said: str) -> Bad:
    return Bad(what, act, error, said)


def each(**groups: list[Bad]) -> pytest.MarkDecorator:
    rows = [(group, case) for group, cases in groups.items() for case in cases]
    return pytest.mark.parametrize("case", [pytest.param(case, id=f"{group}: {case.what}") for group, case in rows])


def check(case: Bad, *given: Any) -> None:
    with pytest.raises(Exception) as told:  # noqa: PT011 - its exact type is looked at below
        case.act(*given)
    text = "\n".join([str(told.value), *getattr(told.value, "__notes__", ())])
    assert type(told.value) is case.error, text
    for piece in case.said:
        assert piece in text


def _build(source: Any = SOURCE, **how: Any) -> Any:
    return dk.build(source, **({"arch": "sm_90a", "cache": None} | how))


# ---- without a device ----------------------------------------------------------------------------------------------

WITHOUT_DEVICE = [
    bad(
        "device name",
        lambda: dk.Device("the first"),
        ValueError,
        "device name 'the first': wanted 'cuda', 'cpu', 'cuda:<number>' or 'cpu:<number>'",
    ),
    bad(
        "device kind",
        lambda: dk.Device("tpu:0"),
        ValueError,
        "no driver for device kind 'tpu'; there are 'cuda' and 'cpu'",
    ),
    bad("source", lambda: dk.Source.find("no_such"), FileNotFoundError, "no no_such.cu in: ", "cuda_src"),
    bad(
        "source that is misspelt",
        lambda: dk.Source.find("scael"),
        FileNotFoundError,
        "no scael.cu in: ",
        "there is scale",
    ),
    bad("source file", lambda: dk.Source.find(Path("no_such.cu")), FileNotFoundError, "no no_such.cu in: "),
    bad("source without a name", lambda: dk.Source.find(""), ValueError, "source: wanted a name or a path, got ''"),
    bad("source that is a folder", lambda: dk.Source.find(Path()), ValueError, "wanted a name or a path, got "),
    bad("source by number", lambda: dk.Source.find(5), TypeError, "source: wanted a name or a path, got 5"),  # type: ignore[arg-type]
    bad("source of bytes", lambda: dk.Source.from_text(b"x"), TypeError, "source: text: wanted str, got bytes"),  # type: ignore[arg-type]
    bad("source with a path for a name", lambda: dk.Source.from_text("", Path("k")), TypeError, "source: name: wanted"),  # type: ignore[arg-type]
    bad(
        "build of a name",
        lambda: _build("scale"),
        TypeError,
        "build: source: wanted a Source, got 'scale'; Source.find",
    ),
    bad("build of nothing", lambda: _build(None), TypeError, "build: source: wanted a Source, got None"),
    bad("arch", lambda: _build(arch=90), TypeError, "build: arch: wanted text such as 'sm_90a', got 90"),
    bad("standard", lambda: _build(std=17), TypeError, "build: std: wanted text such as 'c++17', got 17"),
    bad("one name", lambda: _build(names="k"), TypeError, "build: names: a sequence of str is wanted, not the one str"),
    bad("number for names", lambda: _build(names=5), TypeError, "build: names: wanted a sequence of str, got 5"),
    bad("number as an option", lambda: _build(options=["-G", 5]), TypeError, "build: options: wanted", "got 5"),
    bad("cache", lambda: _build(cache="/tmp"), TypeError, "build: cache: wanted a Cache or None, got '/tmp'"),
    bad(
        "include",
        lambda: dk.Source.from_text('#include "no_such.cuh"'),
        FileNotFoundError,
        "no_such.cuh",
    ),
    bad(
        "image",
        lambda: dk.Image.from_bytes(b"not an image"),
        ValueError,
        "not a GPU image: 12 bytes that begin with b'not an image'; there are cubin, fatbin and PTX",
    ),
    bad("image of nothing", lambda: dk.Image.from_bytes(b""), ValueError, "not a GPU image: no bytes"),
    bad(
        "image of the host",
        lambda: dk.Image.from_bytes(b"\x7fELF\x02".ljust(18, b"\0") + b"\x3e\0" + bytes(60)),
        ValueError,
        "not a GPU image: an ELF file for machine 62; a cubin has 190",
    ),
    bad("type", lambda: CType.parse("void (*)(int)"), ValueError, "not a parameter type: 'void (*)(int)'"),
]


@each(found=WITHOUT_DEVICE)
def test_without_a_device(case: Bad) -> None:
    check(case)


# ---- with a device -------------------------------------------------------------------------------------------------

N = 1024


@dataclass
class World:
    """What the rows below act on, all of it right."""

    device: dk.Device
    module: dk.Module
    stream: dk.Stream
    x: dk.Buffer  # [N] float32
    y: dk.Buffer
    ints: dk.Buffer  # [4, 6] int32
    doubles: dk.Buffer  # [4] float64
    graph: dk.Graph  # "plain": kernel "first" -> kernel "second" -> host "call"; "fill", "copy"
    other: dk.Graph  # "other": kernel "there"
    branching: dk.Graph  # "branching": if "branch"

    def __post_init__(self) -> None:
        self.scale = self.module.kernel("scale")
        self.args = (self.x, self.y, N, 2.0)
        first = self.first = self.node("first")
        second = self.node("second", after=first)
        self.graph.host(int, after=second, name="call")
        self.graph.memset(self.ints, 7, name="fill")
        self.graph.memcpy(self.y, self.x, name="copy")
        self.other.kernel(self.scale, grid=4, block=256, args=self.args, name="there")
        self.condition = self.branching.condition(default=0, name="flag")
        self.body = self.branching.if_(self.condition, name="branch")

    def launch(self, *args: Any, **how: Any) -> None:
        """A launch that is right but for what is given."""
        given: dict[str, Any] = {"grid": 4, "block": 256, "args": args or self.args} | how
        self.scale.launch(self.stream, **given)

    def node(self, name: str | None = None, **how: Any) -> Any:
        """A node that is right but for what is given."""
        given: dict[str, Any] = {"grid": 4, "block": 256, "args": self.args, "name": name} | how
        return self.graph.kernel(self.scale, **given)

    def exec(self, graph: dk.Graph | None = None) -> dk.Exec:
        return (graph or self.graph).instantiate()

    def update(self, fill: str) -> None:
        """Give an exec of kernel "a" -> kernel "b" to a graph where "b" is what ``fill`` says."""
        old, new = dk.Graph(self.device, "old"), dk.Graph(self.device, "new")
        for graph in (old, new):
            a = graph.kernel(self.scale, grid=4, block=256, args=self.args, name="a")
            if graph is old or fill == "alone":
                graph.kernel(
                    self.scale, grid=4, block=256, args=self.args, after=None if fill == "alone" else a, name="b"
                )
            elif fill == "memset":
                graph.memset(self.y, 0.0, after=a, name="b")
        if fill == "alone":
            old.add_edge(old["a"], old["b"])
        old.instantiate().update(new)

    def broken(self) -> dk.Graph:
        """A graph that a forbidden call during a capture ended."""
        with pytest.raises(dk.GraphError), self.graph.capture(self.stream):
            self.stream.synchronize()
        return self.graph


@pytest.fixture
def world(device: dk.Device, module: dk.Module, stream: dk.Stream) -> Iterator[World]:
    extents: list[tuple[Any, Any]] = [(N, "f4"), (N, "f4"), ((4, 6), "i4"), (4, "f8")]
    arrays: list[Any] = [device.zeros(shape, dtype) for shape, dtype in extents]
    graphs: list[Any] = [dk.Graph(device, name) for name in ("plain", "other", "branching")]
    world = World(device, module, stream, *arrays, *graphs)
    yield world
    for thing in (*graphs, *arrays):
        thing.close()
    vars(world).clear()


def closed(thing: Any) -> Any:
    thing.close()
    return thing


ARGUMENTS = [
    bad(
        "dtype",
        lambda w: w.launch(w.doubles, w.y, N, 2.0),
        dk.ArgumentError,
        "kernel scale: args[0] 'x' wanted const float*, a device array of float32, got float64",
    ),
    bad(
        "address as a number",
        lambda w: w.launch(w.x.address, w.y, N, 2.0),
        dk.ArgumentError,
        "args[0] 'x' wanted const float*",
        "a bare address is given as ctypes.c_void_p",
    ),
    bad("host array", lambda w: w.launch(np.zeros(N, "f4"), w.y, N, 2.0), dk.ArgumentError, "in host memory"),
    bad(
        "strided array",
        lambda w: w.launch(w.x[::2], w.y, N, 2.0),
        dk.ArgumentError,
        "args[0] 'x' wanted const float*, a device array of float32, contiguous, got strides (8,) of shape (512,)",
    ),
    bad(
        "misaligned array",
        lambda w: w.launch(w.x.view(np.uint8)[1:5].view(np.float32), w.y, 1, 2.0),
        dk.ArgumentError,
        "aligned to 4 bytes, got address",
    ),
    bad(
        "argument that is missing",
        lambda w: w.launch(w.x, w.y, N),
        dk.ArgumentError,
        "kernel scale: wanted 4 arguments (const float* x, float* y, int n, float alpha), got 3",
    ),
    bad(
        "argument too many",
        lambda w: w.launch(*w.args, 1),
        dk.ArgumentError,
        "kernel scale: wanted 4 arguments (const float* x, float* y, int n, float alpha), got 5",
    ),
    bad("no tuple", lambda w: w.launch(args=5), dk.ArgumentError, "kernel scale: wanted a tuple of arguments"),
    bad(
        "integer out of range",
        lambda w: w.launch(w.x, w.y, 2**31, 2.0),
        dk.ArgumentError,
        "args[2] 'n' wanted int32, an integer in [-2147483648, 2147483647], got int 2147483648",
    ),
    bad(
        "float for an integer",
        lambda w: w.launch(w.x, w.y, 4.0, 2.0),
        dk.ArgumentError,
        "args[2] 'n' wanted int32, an integer in [-2147483648, 2147483647], got float 4.0",
    ),
    bad("bool for an integer", lambda w: w.launch(w.x, w.y, True, 2.0), dk.ArgumentError, "'n'", "got bool True"),
    bad(
        "text for a float",
        lambda w: w.launch(w.x, w.y, N, "2"),
        dk.ArgumentError,
        "args[3] 'alpha' wanted float32, a number, got '2'",
    ),
    bad(
        "float out of range",
        lambda w: w.launch(w.x, w.y, N, 1e40),
        dk.ArgumentError,
        "args[3] 'alpha' wanted float, which is in range, got float 1e+40",
    ),
    bad("argument of a node", lambda w: w.node(args=(w.x, w.y, N, None)), dk.ArgumentError, "'alpha'", "got None"),
    bad(
        "argument of a prepared launch",
        lambda w: w.scale.prepare(w.stream, grid=1, block=1, args=w.args).set(alpha="2"),
        dk.ArgumentError,
        "args[3] 'alpha' wanted float32, a number, got '2'",
    ),
    bad(
        "condition of another graph",
        lambda w: w.graph.kernel(w.module.kernel("set"), grid=1, block=1, args=(w.condition, 1)),
        dk.ArgumentError,
        "kernel set: args[0] 'handle' wanted a condition of graph 'plain', got <Condition flag default 0> of another",
    ),
    bad("stream", lambda w: w.scale.launch(0, grid=1, block=1, args=w.args), TypeError, "wanted a stream", "got int"),
]

EXTENTS = [
    bad(
        "empty grid",
        lambda w: w.launch(grid=0),
        ValueError,
        "kernel scale: grid: every extent must be at least 1, got 0",
    ),
    bad("negative block", lambda w: w.launch(block=(32, -1)), ValueError, "block: every extent must be at least 1"),
    bad(
        "four extents",
        lambda w: w.launch(grid=(1, 2, 3, 4)),
        ValueError,
        "kernel scale: grid: wanted one to three extents, got (1, 2, 3, 4)",
    ),
    bad("no extents", lambda w: w.launch(block=()), ValueError, "block: wanted one to three extents, got ()"),
    bad(
        "fraction",
        lambda w: w.launch(grid=1.5),
        TypeError,
        "kernel scale: grid: wanted an integer or a tuple of integers, got 1.5",
    ),
    bad(
        "bool",
        lambda w: w.launch(block=True),
        TypeError,
        "kernel scale: block: wanted an integer or a tuple of integers, got True",
    ),
    bad("list", lambda w: w.launch(grid=[4]), TypeError, "grid: wanted an integer or a tuple of integers, got [4]"),
    bad("list for a node", lambda w: w.node(block=[256]), TypeError, "block: wanted an integer or a tuple of integers"),
    bad("grid of a node", lambda w: w.node(grid=0), ValueError, "kernel scale: grid: every extent must be at least 1"),
    bad(
        "grid too high",
        lambda w: w.launch(grid=(1, 65536)),
        ValueError,
        "kernel scale: grid (1, 65536, 1): y is at most 65535",
    ),
    bad("block too deep", lambda w: w.launch(block=(1, 1, 65)), ValueError, "block (1, 1, 65): z is at most 64"),
    bad(
        "too many threads",
        lambda w: w.launch(block=(64, 32)),
        ValueError,
        "kernel scale: block (64, 32, 1) is 2048 threads",
        "takes at most 1024",
    ),
    bad(
        "more threads than the kernel's bound",
        lambda w: w.module.kernel("static_shared").launch(w.stream, grid=1, block=129, args=(w.ints[0],)),
        ValueError,
        "kernel static_shared: block (129, 1, 1) is 129 threads",
        "takes at most 128",
    ),
    bad(
        "shared memory",
        lambda w: w.launch(shared_mem_bytes=10**6),
        ValueError,
        "kernel scale: 1000000 bytes of dynamic shared memory; at most ",
    ),
    bad(
        "shared memory beside static",
        lambda w: w.module.kernel("static_shared").occupancy(32, 10**6),
        ValueError,
        "beside its 400 static bytes on c",
    ),
    bad("negative shared memory", lambda w: w.launch(shared_mem_bytes=-1), ValueError, "shared_mem_bytes is -1"),
    bad(
        "shared memory of a fraction", lambda w: w.launch(shared_mem_bytes=1.5), TypeError, "wanted an integer, got 1.5"
    ),
    bad(
        "grid that clusters do not divide",
        lambda w: w.launch(cluster=3),
        ValueError,
        "kernel scale: grid (4, 1, 1) is no multiple of cluster 3",
    ),
    bad("empty cluster", lambda w: w.launch(cluster=0), ValueError, "cluster: every extent must be at least 1"),
    bad(
        "cooperative grid that does not fit",
        lambda w: w.launch(grid=10**6, cooperative=True),
        ValueError,
        "kernel scale: a cooperative grid of 1000000 blocks, of which ",
        "fit on c",
    ),
]

ATTRIBUTES = [
    bad("unknown", lambda w: w.launch(clutser=2), TypeError, "no launch attribute 'clutser'; there are cluster, "),
    bad(
        "programmatic node",
        lambda w: w.node(programmatic=True),
        TypeError,
        "attribute 'programmatic' means nothing on a kernel node: edges with ports order the nodes of a graph",
    ),
    bad(
        "completion event of a node",
        lambda w: w.node(launch_completion_event=w.device.event(timing=False)),
        TypeError,
        "attribute 'launch_completion_event' means nothing on a kernel node",
    ),
    bad(
        "device-updatable launch",
        lambda w: w.launch(device_updatable=True),
        TypeError,
        "attribute 'device_updatable' means nothing on a launch: it is for graph nodes",
    ),
    bad("flag", lambda w: w.launch(cooperative=1), TypeError, "attribute 'cooperative'", "wanted True or False, got 1"),
    bad(
        "choice",
        lambda w: w.launch(cluster_scheduling="random"),
        ValueError,
        "cluster_scheduling: wanted one of default, spread, load_balancing",
        "got 'random'",
    ),
    bad(
        "percentage",
        lambda w: w.launch(shared_carveout_percent=101),
        ValueError,
        "shared_carveout_percent: wanted -1..100, got 101",
    ),
    bad("event", lambda w: w.launch(programmatic_event=3), TypeError, "attribute 'programmatic_event': 3 does not fit"),
    bad(
        "window",
        lambda w: w.launch(access_policy_window=dk.AccessPolicyWindow(w.x, hit="sticky")),
        ValueError,
        "access_policy_window.hit: wanted one of normal, streaming, persisting, got 'sticky'",
    ),
]

NAMES = [
    bad("kernel", lambda w: w.module.kernel("scael"), dk.CompileError, "scael", "its kernels: ", "scale"),
    bad(
        "kernel of an image",
        lambda w: w.device.module(dk.Image.from_bytes(w.module.loaded[0].image.data)).kernel("scael"),
        KeyError,
        "has no kernel 'scael'; it has ",
        "plain",
    ),
    bad("variable", lambda w: w.module.variable("nope"), KeyError, "module 'kernels.cu' has no variable 'nope'"),
    bad(
        "variable of another size",
        lambda w: w.module.variable("counters", 3, np.int32),
        ValueError,
        "variable 'counters' of module 'kernels.cu' has 16 bytes, int32 of shape (3,) has 12",
    ),
    bad("attribute of a kernel", lambda w: w.scale.attribute("NOPE"), ValueError, "no function attribute CU_FUNC_ATTR"),
    bad(
        "attribute of a device", lambda w: w.device.attribute("NOPE"), ValueError, "no device attribute CU_DEVICE_ATTR"
    ),
    bad(
        "node",
        lambda w: w.graph["frist"],
        dk.GraphError,
        "graph 'plain' has no node 'frist'; there are first",
    ),
    bad(
        "node of a body",
        lambda w: w.branching["branch/then/inc"],
        dk.GraphError,
        "graph 'branching' has no node 'branch/then/inc'; there are branch",
    ),
    bad(
        "node that is like no other",
        lambda w: w.graph["xyzzy"],
        dk.GraphError,
        "graph 'plain' has no node 'xyzzy'; there are 5 nodes",
    ),
    bad("node of an exec", lambda w: w.exec()["frist"], dk.GraphError, "has no node 'frist'; there are first"),
    bad(
        "parameter",
        lambda w: w.exec()["first"].set(beta=1.0),
        dk.ArgumentError,
        "kernel scale: wanted a parameter of (const float* x, float* y, int n, float alpha), got 'beta'",
    ),
    bad(
        "parameter of a copy",
        lambda w: w.exec()["copy"].set(destination=w.x),
        TypeError,
        "memcpy node 'copy': no parameter 'destination'; there are target, source",
    ),
    bad("node name twice", lambda w: w.node("first"), dk.GraphError, "graph 'plain' has a node 'first' already"),
    bad("node name twice, copy", lambda w: w.graph.empty(name="copy"), dk.GraphError, "has a node 'copy' already"),
    bad("node name with a slash", lambda w: w.node("a/b"), dk.GraphError, "text without '/' and '#', not 'a/b'"),
    bad("node name with a number", lambda w: w.node("a#1"), dk.GraphError, "text without '/' and '#', not 'a#1'"),
    bad("node name that cannot be printed", lambda w: w.node("a\nb"), dk.GraphError, r"not 'a\nb'"),
    bad("node name that is no text", lambda w: w.graph.empty(name=b"a"), dk.GraphError, "not b'a'"),
    bad("capture name", lambda w: w.graph.capture(w.stream, name="a/b").__enter__(), dk.GraphError, "capture: name"),
    bad("node name without text", lambda w: w.graph.empty(name=""), dk.GraphError, "text without '/' and '#', not ''"),
    bad(
        "port",
        lambda w: w.graph["first"].port("half"),
        ValueError,
        "node 'first' has no port 'half'; there are full, programmatic, launch_order",
    ),
    bad(
        "names of what is compiled",
        lambda w: w.device.module(w.module.loaded[0].image, ["scale"]),
        TypeError,
        "names and options are for sources",
    ),
    bad(
        "declared signature",
        lambda w: w.module.kernel("plain", signature="const float* x, float* y"),
        ValueError,
        "kernel plain: 2 parameter types (const float*, float*), but the compiled kernel takes 3",
    ),
    bad(
        "declared type",
        lambda w: w.module.kernel("plain", signature="const float* x, float* y, double n"),
        ValueError,
        "parameter 2 is double n, 8 bytes, but the compiled kernel takes 4 bytes there",
    ),
]

ORDER = [
    bad(
        "node of another graph",
        lambda w: w.node("third", after=w.other["there"]),
        dk.GraphError,
        "graph 'plain': node 'third': it cannot wait for <KernelNode 'there' of graph 'other'>, which is in another",
    ),
    bad(
        "body",
        lambda w: w.branching.empty(name="last", after=w.body),
        dk.GraphError,
        "graph 'branching': node 'last': after: wanted nodes, got <Graph 'branching:branch/then'",
        "the node of a body is body.node",
    ),
    bad(
        "node outside of the body",
        lambda w: w.body.memset(w.ints, 0, after=w.branching["branch"]),
        dk.GraphError,
        "it cannot wait for <ConditionalNode 'branch' of graph 'branching'>, which is in another graph",
    ),
    bad("name", lambda w: w.node(after="first"), dk.GraphError, "after: wanted nodes, got "),
    bad(
        "node that was removed",
        lambda w: [w.graph.remove(w.graph["copy"]), w.node(after=w.graph["copy"])],
        dk.GraphError,
        "graph 'plain' has no node 'copy'",
    ),
    bad(
        "node that was removed, by reference",
        lambda w: [(node := w.graph["copy"]), w.graph.remove(node), w.node(after=node)],
        dk.GraphError,
        "graph 'plain': node 'copy' was removed",
    ),
    bad(
        "port into a capture",
        lambda w: w.graph.capture(w.stream, after=w.graph["first"].port("programmatic")).__enter__(),
        dk.GraphError,
        "graph 'plain': node 'captured': port 'programmatic' of 'first' is for edges to kernel nodes",
    ),
    bad(
        "port to a node that is no kernel",
        lambda w: w.graph.empty(name="last", after=w.graph["first"].port("programmatic")),
        dk.GraphError,
        "graph 'plain': node 'last': port 'programmatic' of 'first' is for edges to kernel nodes",
    ),
    bad(
        "programmatic edge of a node that is no kernel",
        lambda w: w.node("third", after=w.graph["fill"].port("programmatic")),
        dk.GraphError,
        "graph 'plain': cannot add the edge from 'fill' (programmatic) to 'third': cuGraphAddDependencies",
    ),
    bad(
        "edge of another graph's node",
        lambda w: w.graph.add_edge(w.other["there"], w.graph["first"]),
        dk.GraphError,
        "graph 'plain': edge: <KernelNode 'there' of graph 'other'> is no node of it",
    ),
    bad(
        "edge that is not there",
        lambda w: w.graph.remove_edge(w.graph["fill"], w.graph["first"]),
        dk.GraphError,
        "graph 'plain': cannot remove the edge from 'fill' (full) to 'first': cuGraphRemoveDependencies",
    ),
    bad(
        "removal of another graph's node",
        lambda w: w.graph.remove(w.other["there"]),
        dk.GraphError,
        "remove: <KernelNode 'there' of graph 'other'> is no node of it",
    ),
    bad(
        "circle",
        lambda w: [w.graph.add_edge(w.graph["second"], w.graph["first"]), w.exec()],
        dk.GraphError,
        "graph 'plain' cannot be instantiated",
    ),
    bad(
        "priority of a stream",
        lambda w: w.device.stream(priority=10**6),
        ValueError,
        "stream priority: wanted an integer in [",
        "got 1000000",
    ),
    bad("priority of a bool", lambda w: w.device.stream(priority=True), ValueError, "stream priority", "got True"),
    bad("event for a stream", lambda w: w.stream.wait(w.x), TypeError, "wait: wanted an Event"),
    bad(
        "end of a timed event",
        lambda w: w.device.event().elapsed_ms(w.device.event(timing=False)),
        ValueError,
        "was made with timing=False",
    ),
    bad(
        "no launches to time", lambda w: w.exec().time_ms(w.stream, 0), ValueError, "wanted at least one launch, got 0"
    ),
]

CONDITIONS = [
    bad(
        "twice",
        lambda w: w.branching.while_(w.condition, name="again"),
        dk.GraphError,
        "conditional node 'again': flag is tested by node 'branch' already",
    ),
    bad(
        "of another graph",
        lambda w: w.graph.if_(w.condition, name="if"),
        dk.GraphError,
        "graph 'plain': conditional node 'if': flag was made by another graph",
    ),
    bad(
        "of the graph around",
        lambda w: w.body.if_(w.branching.condition(name="outer"), name="inner"),
        dk.GraphError,
        "graph 'branching': conditional node 'branch/then/inner': outer was made by another graph",
    ),
    bad("none", lambda w: w.graph.if_(True), dk.GraphError, "wanted a condition of graph.condition(), got True"),
    bad(
        "default",
        lambda w: w.graph.condition(default=-1),
        ValueError,
        "graph 'plain': condition default: wanted 0..2**32-1, got -1",
    ),
    bad(
        "switch without bodies",
        lambda w: w.graph.switch(w.graph.condition(), 0),
        dk.GraphError,
        "switch: wanted the number of bodies, got 0",
    ),
    bad("switch of a bool", lambda w: w.graph.switch(w.graph.condition(), True), dk.GraphError, "bodies, got True"),
    bad(
        "flag of floats",
        lambda w: w.branching.set_condition(w.condition, w.x[:1]),
        TypeError,
        "set_condition: flag: wanted a bool or an integer, got float32",
    ),
    bad("flag of many", lambda w: w.branching.set_condition(w.condition, w.ints), TypeError, "array of one element"),
    bad("flag of the host", lambda w: w.branching.set_condition(w.condition, 1), TypeError, "wanted a device array"),
    bad(
        "host node in a body",
        lambda w: w.body.host(int, name="call"),
        dk.GraphError,
        "graph 'branching': host node 'branch/then/call': the body of a conditional node may hold kernel, memcpy,",
    ),
    bad(
        "numpy array in a body",
        lambda w: w.body.memcpy(w.x, np.zeros(N, "f4"), name="copy"),
        dk.GraphError,
        "memcpy node 'branch/then/copy': in the body of a conditional node no numpy array can be copied",
    ),
    bad("event in a body", lambda w: w.body.record(w.device.event()), dk.GraphError, "event record node 'branch/then/"),
    bad(
        "second exec",
        lambda w: [w.exec(w.branching), w.exec(w.branching)],
        dk.GraphError,
        "graph 'branching' cannot be instantiated",
        "a graph with conditional or alloc nodes can have one exec at a time: close the other one",
    ),
    bad(
        "clone",
        lambda w: w.branching.clone(),
        dk.GraphError,
        "graph 'branching' cannot be cloned: conditional node 'branch' exists only once",
    ),
    bad(
        "clone as a child",
        lambda w: w.graph.child(w.branching, name="kid"),
        dk.GraphError,
        "graph 'plain': cannot add child node 'kid': cuGraphAddChildGraphNode: CUDA_ERROR_",
    ),
]

CHILDREN = [
    bad("itself", lambda w: w.graph.child(w.graph), dk.GraphError, "graph 'plain' is part of graph 'plain'"),
    bad("its own body", lambda w: w.branching.child(w.body), dk.GraphError, "is part of graph 'branching'"),
    bad("body of another", lambda w: w.graph.child(w.body), dk.GraphError, "is inside of another graph"),
    bad(
        "one that is moved twice",
        lambda w: [w.graph.child(w.other, move=True), w.branching.child(w.other, move=True)],
        dk.GraphError,
        "graph 'other' is inside of another graph",
    ),
]

EXECS = [
    bad(
        "update with fewer nodes",
        lambda w: w.update("nothing"),
        dk.GraphError,
        "exec of graph 'old' cannot take over graph 'new'",
        "the structure differs",
        "TOPOLOGY_CHANGED",
    ),
    bad(
        "update with other edges",
        lambda w: w.update("alone"),
        dk.GraphError,
        "the structure differs",
        "TOPOLOGY_CHANGED",
    ),
    bad(
        "update with another kind of node",
        lambda w: w.update("memset"),
        dk.GraphError,
        "exec of graph 'old' cannot take over graph 'new' at node 'b'",
        "the kind of node differs",
        "NODE_TYPE_CHANGED",
    ),
    bad(
        "node that was added later",
        lambda w: [(exe := w.exec()), w.node("late"), exe["late"]],
        dk.GraphError,
        "exec of graph 'plain' was made before node 'late' was added",
    ),
    bad(
        "disabling a conditional node",
        lambda w: w.exec(w.branching)["branch"].disable(),
        dk.GraphError,
        "exec of graph 'branching': node 'branch': a conditional node cannot be disabled; kernel, memcpy",
    ),
    bad("disabling a host node", lambda w: w.exec()["call"].disable(), dk.GraphError, "a host node cannot be disabled"),
    bad("asking a host node", lambda w: w.exec()["call"].enabled, dk.GraphError, "a host node cannot be disabled"),
    bad(
        "changing a conditional node",
        lambda w: w.exec(w.branching)["branch"].set(value=1),
        dk.GraphError,
        "node 'branch': a node of this kind (ConditionalNode) cannot be changed by name",
    ),
    bad("argument", lambda w: w.exec()["first"].set(alpha="2"), dk.ArgumentError, "args[3] 'alpha' wanted float32"),
    bad(
        "function", lambda w: w.exec()["call"].set(function=3), TypeError, "host node 'call' of graph 'plain'", "got 3"
    ),
    bad("grid", lambda w: w.exec()["first"].configure(grid=0), ValueError, "kernel scale: grid: every extent must be"),
    bad(
        "kernel without arguments",
        lambda w: w.exec()["first"].configure(kernel=w.module.kernel("add")),
        TypeError,
        "kernel node 'first': another kernel needs args=",
    ),
    bad(
        "value of a fill", lambda w: w.exec()["fill"].set(value=0.5), ValueError, "fill: wanted int32", "got float 0.5"
    ),
    bad("source of a copy", lambda w: w.exec()["copy"].set(source=w.doubles), TypeError, "source is float64"),
]

CAPTURE = [
    bad(
        "synchronize",
        lambda w: _capture(w, w.stream.synchronize),
        dk.GraphError,
        "graph 'plain' was discarded by the driver: its capture was ended by cuStreamSynchronize: CUDA_ERROR_",
    ),
    bad(
        "synchronize of the device",
        lambda w: _capture(w, w.device.synchronize),
        dk.GraphError,
        "graph 'plain' was discarded by the driver: its capture was ended by cuCtxSynchronize",
    ),
    bad(
        "use of the graph afterwards",
        lambda w: w.broken().instantiate(),
        dk.GraphError,
        "graph 'plain' was discarded by the driver: its capture was ended by cuStreamSynchronize",
    ),
    bad(
        "node afterwards", lambda w: [w.broken(), w.node()], dk.GraphError, "its capture was ended by cuStreamSynchron"
    ),
    bad(
        "error of the block",
        lambda w: _capture(w, lambda: 1 / 0),
        ZeroDivisionError,
        "raised while capturing into graph",
    ),
    bad(
        "mode",
        lambda w: w.graph.capture(w.stream, mode="loose").__enter__(),
        ValueError,
        "capture mode: wanted global, thread_local or relaxed, got 'loose'",
    ),
]

MEMORY = [
    bad("negative shape", lambda w: w.device.empty((2, -1), "f4"), ValueError, "shape (2, -1) has a negative extent"),
    bad("shape of fractions", lambda w: w.device.empty(1.5, "f4"), TypeError, "shape: wanted an integer", "got 1.5"),
    bad("dtype of objects", lambda w: w.device.empty(1, object), TypeError, "dtype object holds Python objects"),
    bad("dtype of another byte order", lambda w: w.device.empty(1, ">f4"), TypeError, "is not in native byte order"),
    bad("dtype without size", lambda w: w.device.empty(1, "S0"), TypeError, "dtype |S0 is no dtype of device memory"),
    bad("dtype of text", lambda w: w.device.empty(1, "U3"), TypeError, "dtype <U3 is no dtype of device memory"),
    bad("dtype of time", lambda w: w.device.empty(1, "m8[s]"), TypeError, "is no dtype of device memory"),
    bad("dtype of dates", lambda w: w.device.array(np.zeros(1, "M8[s]")), TypeError, "is no dtype of device memory"),
    bad("index that copies", lambda w: w.x[[0, 1]], TypeError, "index [0, 1] would copy"),
    bad("index by a bool", lambda w: w.x[True], TypeError, "index True would copy"),
    bad("index out of range", lambda w: w.x[N], IndexError, "index 1024 is out of bounds"),
    bad("reshape", lambda w: w.ints.reshape(5, 5), ValueError, "of 24 elements cannot be reshaped to (5, 5)"),
    bad("reshape of a strided one", lambda w: w.ints[:, 1].reshape(2, 2), ValueError, "is strided: reshape needs"),
    bad("view", lambda w: w.x[:3].view(np.float64), ValueError, "rows of 12 bytes are no multiple of its size"),
    bad("length of a scalar", lambda w: len(w.x[0]), TypeError, "a Buffer of shape () has no length"),
    bad("host view of device memory", lambda w: w.x.host, TypeError, "is not host memory: .numpy() copies it"),
    bad(
        "copy of another dtype", lambda w: w.x.copy_from(np.zeros(N)), TypeError, "target is float32, source is float64"
    ),
    bad(
        "copy of another shape",
        lambda w: w.x.copy_from(np.zeros(3, "f4")),
        ValueError,
        "copy: target has shape (1024,), source has shape (3,)",
    ),
    bad(
        "copy into what is read-only",
        lambda w: w.x.copy_to(np.broadcast_to(np.float32(0), N)),
        TypeError,
        "copy target: the numpy.ndarray of float32, shape (1024,) is read-only",
    ),
    bad("copy of no array", lambda w: w.x.copy_from(5), TypeError, "copy source: wanted a Buffer", "got int 5"),
    bad(
        "copy that is no 3-D copy",
        lambda w: w.ints.reshape(2, 2, 2, 3)[:, :, :, 1:].copy_from(np.zeros((2, 2, 2, 2), "i4")[:, :, ::-1]),
        ValueError,
        "copy: ",
    ),
    bad(
        "copy node",
        lambda w: w.graph.memcpy(w.x, w.ints, name="c"),
        TypeError,
        "graph 'plain': memcpy node 'c': copy: target is float32, source is int32",
    ),
    bad("copy node of nothing", lambda w: w.graph.memcpy(w.x[:0], w.y[:0]), dk.GraphError, "there is nothing to copy"),
    bad(
        "fill that repeats no 4 bytes",
        lambda w: w.doubles.fill(1.1),
        ValueError,
        "fill: 1.1 as float64 has no period of 1, 2 or 4 bytes",
    ),
    bad(
        "fill node",
        lambda w: w.graph.memset(w.ints, 2**31, name="m"),
        ValueError,
        "graph 'plain': memset node 'm': fill: wanted int32, an integer in [-2147483648, 2147483647], got int 21474836",
    ),
    bad("fill with a fraction", lambda w: w.ints.fill(0.5), ValueError, "fill: wanted int32", "got float 0.5"),
    bad("fill with many", lambda w: w.ints.fill([1, 2]), ValueError, "fill: wanted int32", "got builtins.list"),
    bad("fill node of nothing", lambda w: w.graph.memset(w.x[:0], 0), dk.GraphError, "there is nothing to fill"),
    bad("fill of a host array", lambda w: w.graph.memset(np.zeros(3), 0), TypeError, "fill target: wanted a Buffer"),
    bad("fill of strides", lambda w: w.ints.reshape(2, 2, 6)[:, :1, ::2].fill(0), ValueError, "are no 2-D rows"),
    bad(
        "free of memory that no graph made",
        lambda w: w.graph.free(w.x, name="end"),
        dk.GraphError,
        "graph 'plain': free node 'end': wanted an alloc node or its buffer, got <Buffer float32 1024 device c",
    ),
    bad(
        "memory operation",
        lambda w: w.graph.mem_ops([5]),
        TypeError,
        "operation 0: wanted WaitValue or WriteValue, got 5",
    ),
    bad(
        "memory operation on floats",
        lambda w: w.graph.mem_ops([dk.WriteValue(w.x[0], 1)], name="ops"),
        TypeError,
        "graph 'plain': memory operations ops: operation 0: wanted one 4 or 8 byte integer on the device, got <Buffer",
    ),
    bad(
        "memory operation on many",
        lambda w: w.graph.mem_ops([dk.WriteValue(w.ints, 1)]),
        TypeError,
        "operation 0: wanted one 4 or 8 byte integer on the device, got <Buffer int32 4x6",
    ),
    bad(
        "memory operation out of range",
        lambda w: w.graph.mem_ops([dk.WriteValue(w.ints[0, 0], 1), dk.WriteValue(w.ints[0, 0], 2**31)]),
        ValueError,
        "operation 1: value: wanted int32, an integer in [-2147483648, 2147483647], got int 2147483648",
    ),
    bad(
        "comparison",
        lambda w: w.graph.mem_ops([dk.WaitValue(w.ints[0, 0], 1, "gt")]),
        ValueError,
        "operation 0: compare is geq, eq, and or nor, not 'gt'",
    ),
]

CLOSED = [
    bad("buffer", lambda w: closed(w.x).numpy(), dk.ClosedError, "buffer of 4096 bytes of device memory", "is closed"),
    bad("window", lambda w: [(part := w.x[3:]), w.x.close(), part.numpy()], dk.ClosedError, "buffer of", "is closed"),
    bad("argument", lambda w: [w.x.close(), w.launch()], dk.ArgumentError, "args[0] 'x'", "closed"),
    bad("argument of a node", lambda w: [w.x.close(), w.node()], dk.ArgumentError, "args[0] 'x'", "closed"),
    bad("target of a fill", lambda w: closed(w.x).fill(0), dk.ClosedError, "buffer of", "is closed"),
    bad("target of a copy", lambda w: closed(w.x).copy_from(w.y), dk.ClosedError, "buffer of", "is closed"),
    bad("address", lambda w: closed(w.x).address, dk.ClosedError, "(made at test_bad_inputs.py:", "is closed"),
    bad("stream", lambda w: closed(w.device.stream()).synchronize(), dk.ClosedError, "stream ", "is closed"),
    bad("stream to launch on", lambda w: [closed(w.stream), w.launch()], dk.ClosedError, "stream ", "is closed"),
    bad(
        "stream to replay on",
        lambda w: [(exe := w.exec()), closed(w.stream), exe.launch(w.stream)],
        dk.ClosedError,
        "stream ",
        "is closed",
    ),
    bad("event", lambda w: closed(w.device.event()).record(w.stream), dk.ClosedError, "event ", "is closed"),
    bad("event of a node", lambda w: w.graph.wait(closed(w.device.event())), dk.ClosedError, "event ", "is closed"),
    bad("event to wait for", lambda w: w.stream.wait(closed(w.device.event())), dk.ClosedError, "event ", "is closed"),
    bad(
        "module", lambda w: closed(w.device.module(SOURCE)).kernel("scale"), dk.ClosedError, "module 'kernels.cu' (made"
    ),
    bad(
        "variable", lambda w: closed(w.device.module(SOURCE)).variable("factor"), dk.ClosedError, "module 'kernels.cu'"
    ),
    bad(
        "kernel",
        lambda w: _kernel_of_closed_module(w).launch(w.stream, grid=1, block=1, args=w.args),
        dk.ClosedError,
        "module 'kernels.cu' (made at test_bad_inputs.py:",
        "is closed, and kernel 'scale' with it",
    ),
    bad(
        "kernel of a node",
        lambda w: w.graph.kernel(_kernel_of_closed_module(w), grid=1, block=1, args=w.args),
        dk.ClosedError,
        "is closed, and kernel 'scale' with it",
    ),
    bad(
        "kernel that was launched before",
        lambda w: _kernel_of_closed_module(w, used=True).launch(w.stream, grid=1, block=1, args=w.args),
        dk.ClosedError,
        "is closed, and kernel 'scale' with it",
    ),
    bad(
        "kernel of a node, used before",
        lambda w: w.graph.kernel(_kernel_of_closed_module(w, used=True), grid=1, block=1, args=w.args),
        dk.ClosedError,
        "is closed, and kernel 'scale' with it",
    ),
    bad(
        "prepared launch",
        lambda w: _kernel_of_closed_module(w, prepared=True)(),
        dk.ClosedError,
        "is closed, and kernel 'scale' with it",
    ),
    bad(
        "kernel's facts", lambda w: _kernel_of_closed_module(w).registers, dk.ClosedError, "and kernel 'scale' with it"
    ),
    bad("graph", lambda w: closed(w.graph).empty(), dk.ClosedError, "graph plain (made at test_bad_inputs.py:"),
    bad("handle of a node", lambda w: [w.graph.close(), w.first.handle], dk.ClosedError, "graph plain", "is closed"),
    bad("graph of a kernel node", lambda w: [w.graph.close(), w.node()], dk.ClosedError, "graph plain", "is closed"),
    bad("graph to instantiate", lambda w: closed(w.graph).instantiate(), dk.ClosedError, "graph plain", "is closed"),
    bad("exec", lambda w: closed(w.exec()).launch(w.stream), dk.ClosedError, "exec plain (made at", "is closed"),
    bad("node of an exec", lambda w: closed(w.exec())["first"], dk.ClosedError, "exec plain", "is closed"),
    bad(
        "node of an exec, found before",
        lambda w: [(exe := w.exec()), (node := exe["first"]), exe.close(), node.set(alpha=3.0)],
        dk.ClosedError,
        "exec of graph 'plain' is closed",
    ),
    bad(
        "switch of an exec",
        lambda w: [(exe := w.exec()), (node := exe["first"]), exe.close(), node.disable()],
        dk.ClosedError,
        "exec of graph 'plain' is closed",
    ),
    bad(
        "pool", lambda w: closed(w.device.pool()).empty(1, "f4", w.stream), dk.ClosedError, "memory pool ", "is closed"
    ),
    bad("with block", lambda w: closed(w.device.event()).__enter__(), dk.ClosedError, "event ", "is closed"),
]


def _capture(w: World, forbidden: Callable[[], Any]) -> None:
    with w.graph.capture(w.stream):
        w.launch()
        forbidden()


def _kernel_of_closed_module(w: World, *, used: bool = False, prepared: bool = False) -> Any:
    module = w.device.module(SOURCE)
    kernel = module.kernel("scale")
    ready = kernel.prepare(w.stream, grid=1, block=1, args=w.args) if prepared else None
    if used:
        kernel.launch(w.stream, grid=1, block=1, args=w.args)
        w.other.kernel(kernel, grid=1, block=1, args=w.args)
    module.close()
    return ready or kernel


@each(
    argument=ARGUMENTS,
    extent=EXTENTS,
    attribute=ATTRIBUTES,
    name=NAMES,
    order=ORDER,
    condition=CONDITIONS,
    child=CHILDREN,
    exec=EXECS,
    capture=CAPTURE,
    memory=MEMORY,
    closed=CLOSED,
)
def test_with_a_device(case: Bad, world: World) -> None:
    check(case, world)


@each(argument=ARGUMENTS, extent=EXTENTS, attribute=ATTRIBUTES, memory=MEMORY)
def test_what_was_refused_leaves_no_trace(case: Bad, world: World) -> None:
    """Nothing was queued, no node was added, and what is right still works."""
    names = [node.name for node in world.graph.nodes]
    check(case, world)
    assert [node.name for node in world.graph.nodes] == names
    assert len(world.graph.edges()) == 2
    world.launch()
    world.node("works")
    world.exec().launch(world.stream)
    world.stream.synchronize()
