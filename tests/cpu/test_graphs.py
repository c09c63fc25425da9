"""Graphs behind the names of the driver: structure, copies, updates and captures, as the manual has them.

What drvkit builds, the tests of drvkit run on every device; here are the corners that it does not reach.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from answers import code

from drvkit.cpu import driver as cpu
from drvkit.cpu.memory import memory
from drvkit.driver import DriverError, open_driver

driver = open_driver("cpu")

KERNELS = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry append(.param .u64 log, .param .u32 value)
{
  .reg .b64 %rd<5>; .reg .b32 %r<4>;
  ld.param.u64 %rd1, [log]; cvta.to.global.u64 %rd2, %rd1; ld.param.u32 %r1, [value];
  ld.global.u32 %r2, [%rd2]; add.u32 %r3, %r2, 1; st.global.u32 [%rd2], %r3;
  mul.wide.u32 %rd3, %r3, 4; add.s64 %rd4, %rd2, %rd3; st.global.u32 [%rd4], %r1;
  ret;
}
.visible .entry other(.param .u64 log, .param .u32 value) { ret; }
.visible .entry ranks(.param .u64 log, .param .u32 value)
{
  .reg .b64 %rd<4>; .reg .b32 %r<3>;
  ld.param.u64 %rd1, [log]; cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, %cluster_ctarank; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd2, %rd2, %rd3;
  mov.u32 %r2, %cluster_nctarank; st.global.u32 [%rd2], %r2;
  ret;
}
.visible .entry by_way_of(.param .u64 memory, .param .u64 to, .param .u32 value)
{
  .reg .b64 %rd<5>; .reg .b32 %r<3>;
  ld.param.u64 %rd1, [memory]; cvta.to.global.u64 %rd2, %rd1;
  ld.param.u64 %rd3, [to]; cvta.to.global.u64 %rd4, %rd3; ld.param.u32 %r1, [value];
  st.global.u32 [%rd2], %r1; ld.global.u32 %r2, [%rd2]; st.global.u32 [%rd4], %r2;
  ret;
}
\0"""


class World:
    """A device, two streams, a log in device memory, and what is needed to write graphs shortly."""

    def __init__(self) -> None:
        self.context = driver.cuDevicePrimaryCtxRetain(0)
        driver.cuCtxPushCurrent(self.context)
        self.stream, self.other = driver.cuStreamCreate(1), driver.cuStreamCreate(1)
        self.module = driver.cuModuleLoadData(KERNELS)
        self.log = driver.cuMemAlloc(1024)
        self.memory = driver.cuMemAlloc(1024)
        self.graphs: list[Any] = []
        self.clear()

    def clear(self) -> None:
        driver.cuMemsetD8(self.log, 0, 1024)
        driver.cuMemsetD8(self.memory, 0, 1024)

    def graph(self) -> Any:
        self.graphs.append(driver.cuGraphCreate(0))
        return self.graphs[-1]

    def params(self, value: int, kernel: bytes = b"append", grid: int = 1) -> Any:
        params = cpu.CUDA_KERNEL_NODE_PARAMS()
        params.func = driver.cuModuleGetFunction(self.module, kernel)
        params.gridDimX, params.gridDimY, params.gridDimZ = grid, 1, 1
        params.blockDimX = params.blockDimY = params.blockDimZ = 1
        params.kernelParams = ((int(self.log), value), (ctypes.c_uint64, ctypes.c_uint32))
        return params

    def node(self, graph: Any, value: int, *after: Any) -> Any:
        """Logs a value."""
        return driver.cuGraphAddKernelNode(graph, list(after) or None, len(after), self.params(value))

    def fill_params(self, value: int = 1, **changes: Any) -> Any:
        params = cpu.CUDA_MEMSET_NODE_PARAMS()
        given = {"dst": self.memory, "value": value, "elementSize": 4, "width": 4, "height": 1, "pitch": 16} | changes
        for name, what in given.items():
            setattr(params, name, what)
        return params

    def fill(self, graph: Any, *after: Any, **how: Any) -> Any:
        return driver.cuGraphAddMemsetNode(
            graph, list(after) or None, len(after), self.fill_params(**how), self.context
        )

    def launch(self, value: int, stream: Any = None) -> None:
        args = ((int(self.log), value), (ctypes.c_uint64, ctypes.c_uint32))
        kernel = driver.cuModuleGetFunction(self.module, b"append")
        driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream or self.stream, args, 0)

    def run(self, exec_: Any) -> list[int]:
        """What one launch logs."""
        driver.cuGraphLaunch(exec_, self.stream)
        driver.cuStreamSynchronize(self.stream)
        return self.logged()

    def logged(self) -> list[int]:
        host = np.zeros(256, np.uint32)
        driver.cuMemcpyDtoH(host, self.log, 1024)
        driver.cuMemsetD8(self.log, 0, 1024)
        return [int(n) for n in host[1 : 1 + host[0]]]

    def filled(self, count: int = 4) -> list[int]:
        host = np.zeros(count, np.uint32)
        driver.cuMemcpyDtoH(host, self.memory, 4 * count)
        return [int(n) for n in host]

    def close(self) -> None:
        driver.cuCtxSynchronize()
        for graph in self.graphs:
            cpu.cuGraphDestroy(graph)
        for stream in (self.stream, self.other):
            driver.cuStreamDestroy(stream)
        for address in (self.log, self.memory):
            driver.cuMemFree(address)
        driver.cuModuleUnload(self.module)
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def edge(from_port: int = 0, kind: int = 0) -> Any:
    data = cpu.CUgraphEdgeData()
    data.from_port, data.type = from_port, cpu.CUgraphDependencyType(kind)
    return data


def instantiated(graph: Any, flags: int = 0) -> tuple[Any, str, int]:
    """Result, ``result_out`` and the node that is to blame."""
    params = cpu.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = flags
    result = cpu.cuGraphInstantiateWithParams(graph, params)
    if not result[0]:
        driver.cuGraphExecDestroy(result[1])
    return code(result), params.result_out.name.removeprefix("CUDA_GRAPH_INSTANTIATE_"), int(params.hErrNode_out)


# ---- structure -----------------------------------------------------------------------------------------------------


def test_nodes_and_edges_are_listed_as_many_as_asked_for(world: World) -> None:
    graph = world.graph()
    a = world.node(graph, 1)
    b, c = world.node(graph, 2, a), world.node(graph, 3, a)
    assert driver.cuGraphGetNodes(graph) == ([], 3)
    nodes, count = driver.cuGraphGetNodes(graph, 5)
    assert ([int(node) for node in nodes], count) == ([int(a), int(b), int(c), 0, 0], 3)
    sources, targets, data, count = driver.cuGraphGetEdges(graph, 1)
    assert ([int(n) for n in sources], [int(n) for n in targets], len(data), count) == ([int(a)], [int(b)], 1, 1)
    assert driver.cuGraphGetRootNodes(graph)[1] == 1
    assert [int(n) for n in driver.cuGraphNodeGetDependentNodes(a, 2)[0]] == [int(b), int(c)]
    assert driver.cuGraphNodeGetDependencies(a)[2] == 0


EDGES: list[tuple[str, Callable[[World, Any, Any, Any], Any]]] = [
    ("twice", lambda w, g, a, m: [cpu.cuGraphAddDependencies(g, [a], [m], None, 1) for _ in range(2)][1]),
    ("to itself", lambda w, g, a, m: cpu.cuGraphAddDependencies(g, [a], [a], None, 1)),
    ("missing", lambda w, g, a, m: cpu.cuGraphRemoveDependencies(g, [m], [a], None, 1)),
    ("of another graph", lambda w, g, a, m: cpu.cuGraphAddDependencies(g, [world_node(w)], [a], None, 1)),
    ("dependency of another graph", lambda w, g, a, m: cpu.cuGraphAddEmptyNode(g, [world_node(w)], 1)),
    ("dependency twice", lambda w, g, a, m: cpu.cuGraphAddEmptyNode(g, [a, a], 2)),
    ("port of a fill", lambda w, g, a, m: cpu.cuGraphAddDependencies(g, [m], [a], [edge(1, 1)], 1)),
    ("port to a fill", lambda w, g, a, m: cpu.cuGraphAddDependencies(g, [a], [m], [edge(1, 1)], 1)),
    ("unknown port", lambda w, g, a, m: cpu.cuGraphAddDependencies(g, [a], [m], [edge(9)], 1)),
    ("dependency and its port", lambda w, g, a, m: cpu.cuGraphAddNode(g, [a, a], [edge(), edge(2)], 2, nothing())),
]


def nothing() -> Any:
    """An empty node."""
    params = cpu.CUgraphNodeParams()
    params.type = cpu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    return params


def world_node(world: World) -> Any:
    return world.node(world.graph(), 9)


@pytest.mark.parametrize(("what", "act"), EDGES, ids=[row[0] for row in EDGES])
def test_edges_that_cannot_be(world: World, what: str, act: Callable[..., Any]) -> None:
    graph = world.graph()
    a, m = world.node(graph, 1), world.fill(graph)
    assert code(act(world, graph, a, m)) == "INVALID_VALUE"
    assert driver.cuGraphGetNodes(graph)[1] == 2


def test_a_node_of_a_circle_is_named_when_it_is_instantiated(world: World) -> None:
    graph = world.graph()
    behind, before, a, b = (world.node(graph, value) for value in range(4))
    driver.cuGraphAddDependencies(graph, [before, a, b, b], [a, b, a, behind], None, 4)
    code_, reason, node = instantiated(graph)
    assert (code_, reason) == ("INVALID_VALUE", "INVALID_STRUCTURE")
    assert node in (int(a), int(b))


@pytest.mark.usefixtures("races_on_purpose")
def test_what_is_no_kernel_may_wait_for_the_start_of_one(world: World) -> None:
    graph = world.graph()
    a, m = world.node(graph, 1), world.fill(graph, value=5)
    driver.cuGraphAddDependencies(graph, [a], [m], [edge(2)], 1)
    _, _, data, _ = driver.cuGraphGetEdges(graph, 1)
    assert (data[0].from_port, int(data[0].type)) == (2, 0)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert world.run(exec_) == [1]
    assert world.filled() == [5] * 4
    driver.cuGraphExecDestroy(exec_)


@pytest.mark.usefixtures("races_on_purpose")
def test_programmatic_edges_in_a_chain_keep_the_order_of_ends(world: World) -> None:
    graph = world.graph()
    nodes = [world.node(graph, value) for value in range(20)]
    pairs = list(itertools.pairwise(nodes))
    for a, b in pairs[::2]:
        driver.cuGraphAddDependencies(graph, [a], [b], [edge(1, 1)], 1)
    for a, b in pairs[1::2]:
        driver.cuGraphAddDependencies(graph, [a], [b], None, 1)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert world.run(exec_) == list(range(20)), "kernels that do not trigger trigger at their end"
    driver.cuGraphExecDestroy(exec_)


# ---- graphs in graphs ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("races_on_purpose")
def test_children_of_every_shape_are_in_their_place(world: World) -> None:
    """Nothing, one node, two beside each other, and a child in a child: before and after are kept."""
    empty, one, two, nested = (world.graph() for _ in range(4))
    world.node(one, 1)
    world.node(two, 2)
    world.node(two, 3)
    driver.cuGraphAddChildGraphNode(nested, None, 0, one)
    graph = world.graph()
    last = world.node(graph, 10)
    for i, inner in enumerate((empty, one, two, nested, empty)):
        child = driver.cuGraphAddChildGraphNode(graph, [last], 1, inner)
        last = world.node(graph, 11 + i, child)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    logged = world.run(exec_)
    assert sorted(logged[4:6]) == [2, 3]
    logged[4:6] = [2, 3]
    assert logged == [10, 11, 1, 12, 2, 3, 13, 1, 14, 15]
    driver.cuGraphExecDestroy(exec_)


def test_an_event_in_a_child_is_recorded_in_its_order(world: World) -> None:
    inner, graph, event = world.graph(), world.graph(), driver.cuEventCreate(2)
    a = world.node(inner, 1)
    driver.cuGraphAddEventRecordNode(inner, [a], 1, event)
    driver.cuGraphAddChildGraphNode(graph, None, 0, inner)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    for _ in range(2):
        driver.cuGraphLaunch(exec_, world.stream)
        driver.cuStreamWaitEvent(world.other, event, 0)
        world.launch(2, world.other)
        driver.cuStreamSynchronize(world.other)
        assert world.logged() == [1, 2]
    driver.cuGraphExecDestroy(exec_)
    driver.cuEventDestroy(event)


def test_a_graph_may_wait_for_its_own_last_launch_by_an_event(world: World) -> None:
    graph, event = world.graph(), driver.cuEventCreate(2)
    waits = driver.cuGraphAddEventWaitNode(graph, None, 0, event)
    driver.cuGraphAddEventRecordNode(graph, [world.node(graph, 1, waits)], 1, event)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert [world.run(exec_) for _ in range(3)] == [[1]] * 3
    driver.cuGraphExecDestroy(exec_)
    driver.cuEventDestroy(event)


def test_a_graph_that_has_an_exec_may_move_into_another(world: World) -> None:
    graph, child = world.graph(), driver.cuGraphCreate(0)
    world.node(child, 1)
    alone = driver.cuGraphInstantiate(child, 0)
    params = cpu.CUgraphNodeParams()
    params.type = cpu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph, params.graph.ownership = child, cpu.CUgraphChildGraphNodeOwnership(1)
    node = driver.cuGraphAddNode(graph, None, None, 0, params)
    assert int(driver.cuGraphChildGraphNodeGetGraph(node)) == int(child)
    assert code(cpu.cuGraphAddChildGraphNode(world.graph(), None, 0, child)) == "NOT_SUPPORTED"
    world.node(driver.cuGraphClone(child), 2)
    whole = driver.cuGraphInstantiate(graph, 0)
    for exec_ in (alone, whole):
        assert world.run(exec_) == [1]
        driver.cuGraphExecDestroy(exec_)


def test_nodes_are_found_in_clones_of_clones(world: World) -> None:
    inner, graph = world.graph(), world.graph()
    deep = world.node(inner, 1)
    child = driver.cuGraphAddChildGraphNode(graph, None, 0, inner)
    inside = driver.cuGraphChildGraphNodeGetGraph(child)
    twin = driver.cuGraphNodeFindInClone(deep, inside)
    copy = driver.cuGraphClone(graph)
    child_twin = driver.cuGraphNodeFindInClone(child, copy)
    copied = driver.cuGraphNodeFindInClone(twin, driver.cuGraphChildGraphNodeGetGraph(child_twin))
    assert len({int(n) for n in (deep, twin, copied)}) == 3
    driver.cuGraphKernelNodeSetParams(copied, world.params(7))
    for each, want in ((graph, [1]), (copy, [7])):
        exec_ = driver.cuGraphInstantiate(each, 0)
        assert world.run(exec_) == want
        driver.cuGraphExecDestroy(exec_)
    assert code(cpu.cuGraphNodeFindInClone(deep, graph)) == "INVALID_VALUE"
    driver.cuGraphDestroy(copy)


# ---- conditions ----------------------------------------------------------------------------------------------------


def conditional(world: World, graph: Any, kind: str, size: int, *, default: int = 1, handle: Any = None) -> Any:
    params = cpu.CUgraphNodeParams()
    params.type = cpu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    handle = driver.cuGraphConditionalHandleCreate(graph, world.context, default, 1) if handle is None else handle
    params.conditional.handle, params.conditional.size = handle, size
    params.conditional.type = getattr(cpu.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
    params.conditional.ctx = world.context
    result = cpu.cuGraphAddNode(graph, None, None, 0, params)
    return code(result) if result[0] else list(params.conditional.phGraph_out)


@pytest.mark.parametrize(("kind", "size"), [("IF", 0), ("IF", 3), ("WHILE", 2), ("SWITCH", 0)])
def test_conditional_nodes_have_as_many_bodies_as_fit(world: World, kind: str, size: int) -> None:
    assert conditional(world, world.graph(), kind, size) == "INVALID_VALUE"


def test_a_condition_is_for_one_node_of_its_graph(world: World) -> None:
    graph, other = world.graph(), world.graph()
    handle = driver.cuGraphConditionalHandleCreate(graph, world.context, 0, 1)
    assert conditional(world, other, "IF", 1, handle=handle) == "INVALID_VALUE"
    (body,) = conditional(world, graph, "IF", 1, handle=handle)
    assert conditional(world, graph, "IF", 1, handle=handle) == "INVALID_VALUE"
    assert conditional(world, body, "IF", 1, handle=handle) == "INVALID_VALUE"
    assert instantiated(graph) == ("SUCCESS", "SUCCESS", 0)
    driver.cuGraphConditionalHandleCreate(graph, world.context, 0, 1)
    assert instantiated(graph)[:2] == ("INVALID_VALUE", "CONDITIONAL_HANDLE_UNUSED")


def test_a_body_may_test_a_condition_of_the_graph_around_it(world: World) -> None:
    graph = world.graph()
    outer = driver.cuGraphConditionalHandleCreate(graph, world.context, 1, 1)
    (body,) = conditional(world, graph, "IF", 1)
    yes, no = conditional(world, body, "IF", 2, handle=outer)
    world.node(yes, 1)
    world.node(no, 2)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert world.run(exec_) == [1]
    driver.cuGraphExecDestroy(exec_)


def test_a_graph_may_test_a_condition_of_a_body(world: World) -> None:
    """And goes on when the body is no more."""
    graph = world.graph()
    outer = driver.cuGraphConditionalHandleCreate(graph, world.context, 0, 1)
    (body,) = conditional(world, graph, "IF", 1, handle=outer)
    (holder,), _ = driver.cuGraphGetNodes(graph, 1)
    inner = driver.cuGraphConditionalHandleCreate(body, world.context, 0, 1)
    assert instantiated(graph)[:2] == ("INVALID_VALUE", "CONDITIONAL_HANDLE_UNUSED")
    yes, no = conditional(world, graph, "IF", 2, handle=inner)
    world.node(yes, 1)
    world.node(no, 2)
    for _ in range(2):
        exec_ = driver.cuGraphInstantiate(graph, 0)
        assert world.run(exec_) == [2]
        driver.cuGraphExecDestroy(exec_)
        cpu.cuGraphDestroyNode(holder)
        conditional(world, graph, "IF", 1, handle=outer)


def test_a_graph_inside_of_another_is_not_made_executable_alone(world: World) -> None:
    graph, inner = world.graph(), world.graph()
    (body,) = conditional(world, graph, "IF", 1)
    child = driver.cuGraphAddChildGraphNode(graph, None, 0, inner)
    for part in (body, driver.cuGraphChildGraphNodeGetGraph(child)):
        assert instantiated(part) == ("NOT_SUPPORTED", "ERROR", 0)
    assert instantiated(inner) == ("SUCCESS", "SUCCESS", 0), "of which the child is a clone"


def test_a_body_and_what_kernels_launch_copy_no_memory_that_is_of_the_host_alone(world: World) -> None:
    host = np.zeros(16, np.uint8)
    params = cpu.CUDA_MEMCPY3D()
    params.srcMemoryType = cpu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    params.dstMemoryType = cpu.CUmemorytype.CU_MEMORYTYPE_HOST
    params.srcDevice, params.dstHost = world.memory, host.ctypes.data
    params.WidthInBytes, params.Height, params.Depth = 16, 1, 1
    around, alone = world.graph(), world.graph()
    (body,) = conditional(world, around, "IF", 1)
    for graph, holder, flags, result in (
        (around, body, 0, "MULTIPLE_CTXS_NOT_SUPPORTED"),
        (alone, alone, 4, "NODE_OPERATION_NOT_SUPPORTED"),
    ):
        copy = driver.cuGraphAddMemcpyNode(holder, None, 0, params, world.context)
        assert instantiated(graph, flags) == ("INVALID_VALUE", result, int(copy))
    assert instantiated(alone)[0] == "SUCCESS"


def test_what_kernels_launch_is_on_one_device(world: World) -> None:
    graph, other = world.graph(), driver.cuDevicePrimaryCtxRetain(1)
    world.fill(graph)
    node = driver.cuGraphAddMemsetNode(graph, None, 0, world.fill_params(), other)
    assert instantiated(graph, 4) == ("INVALID_VALUE", "MULTIPLE_CTXS_NOT_SUPPORTED", int(node))
    assert instantiated(graph)[0] == "SUCCESS"
    driver.cuDevicePrimaryCtxRelease(1)


def test_what_a_body_cannot_hold_is_named_when_it_is_instantiated(world: World) -> None:
    graph = world.graph()
    (body,) = conditional(world, graph, "IF", 1)
    assert instantiated(graph)[0] == "SUCCESS"
    event = driver.cuEventCreate(2)
    node = driver.cuGraphAddEventRecordNode(body, None, 0, event)
    assert instantiated(graph)[2] == int(node)
    driver.cuGraphDestroyNode(node)
    assert instantiated(graph)[0] == "SUCCESS"
    driver.cuEventDestroy(event)


def test_a_graph_with_conditions_has_one_exec_and_no_clone(world: World) -> None:
    graph = world.graph()
    conditional(world, graph, "IF", 2)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert instantiated(graph)[0] == "NOT_SUPPORTED"
    assert code(cpu.cuGraphClone(graph)) == "NOT_SUPPORTED"
    driver.cuGraphExecDestroy(exec_)
    assert instantiated(graph)[0] == "SUCCESS"


def test_an_update_brings_the_condition_of_the_other_graph(world: World) -> None:
    """Its default, that is: kernels of the other graph set the other handle, too."""
    old, new = world.graph(), world.graph()
    for graph, default in ((old, 1), (new, 0)):
        yes, no = conditional(world, graph, "IF", 2, default=default)
        world.node(yes, 1)
        world.node(no, 2)
    exec_ = driver.cuGraphInstantiate(old, 0)
    assert world.run(exec_) == [1]
    driver.cuGraphExecUpdate(exec_, new)
    for graph in (old, new):
        driver.cuGraphDestroy(graph)
    assert world.run(exec_) == [2]
    driver.cuGraphExecDestroy(exec_)


# ---- execs ---------------------------------------------------------------------------------------------------------


class UpdateInfo(ctypes.Structure):
    _fields_ = [("result", ctypes.c_int), ("node", ctypes.c_uint64), ("from_node", ctypes.c_uint64)]


def update(exec_: Any, graph: Any) -> tuple[str, int, int]:
    """How it ends, and the nodes that are to blame: both ends of an edge, or one."""
    info = UpdateInfo()
    driver.raw("cuGraphExecUpdate", 3)(int(exec_), int(graph), ctypes.addressof(info))
    name = cpu.CUgraphExecUpdateResult(info.result).name.removeprefix("CU_GRAPH_EXEC_UPDATE_")
    return name.removeprefix("ERROR_"), info.node, info.from_node


def test_an_update_pairs_nodes_by_the_structure(world: World) -> None:
    """In whatever order they were made."""
    old, new = world.graph(), world.graph()
    world.node(old, 2, world.fill(old, value=1))
    kernel = world.node(new, 4)
    fill = world.fill(new, value=3)
    driver.cuGraphAddDependencies(new, [fill], [kernel], None, 1)
    exec_ = driver.cuGraphInstantiate(old, 0)
    assert update(exec_, new) == ("SUCCESS", 0, 0)
    assert world.run(exec_) == [4]
    assert world.filled() == [3] * 4
    driver.cuGraphExecDestroy(exec_)


def test_what_an_update_cannot_do_is_told_with_the_node(world: World) -> None:
    old = world.graph()
    world.fill(old, world.node(old, 1))
    exec_ = driver.cuGraphInstantiate(old, 0)
    wrong: list[tuple[str, Callable[[Any, Any], Any]]] = [
        ("TOPOLOGY_CHANGED", lambda g, a: None),
        ("TOPOLOGY_CHANGED", lambda g, a: world.fill(g) and None),
        ("NODE_TYPE_CHANGED", lambda g, a: world.node(g, 2, a)),
        ("PARAMETERS_CHANGED", lambda g, a: world.fill(g, a, height=2)),
    ]
    for reason, add in wrong:
        graph = world.graph()
        culprit = add(graph, world.node(graph, 5))
        said, node, _ = update(exec_, graph)
        assert said == reason
        if culprit is not None:
            assert node == int(culprit)
    assert world.run(exec_) == [1], "it is as it was"
    with pytest.raises(DriverError, match="GRAPH_EXEC_UPDATE_FAILURE"):
        driver.cuGraphExecUpdate(exec_, graph)
    driver.cuGraphExecDestroy(exec_)


@pytest.mark.usefixtures("races_on_purpose")
def test_an_update_pairs_what_a_node_waits_for_by_the_order_of_its_edges(world: World) -> None:
    """Names and the order of nodes say nothing: what stands first among the edges takes what stood first."""

    def build(*order: int) -> tuple[Any, list[Any]]:
        graph = world.graph()
        firsts = [world.node(graph, 1), world.node(graph, 2)]
        world.node(graph, 3, *(firsts[i] for i in order))
        return graph, firsts

    (old, nodes), (new, _) = build(0, 1), build(1, 0)
    exec_ = driver.cuGraphInstantiate(old, 0)
    assert update(exec_, new) == ("SUCCESS", 0, 0)
    driver.cuGraphNodeSetEnabled(exec_, nodes[0], 0)
    assert world.run(exec_) == [1, 3], "the first has become the second"
    driver.cuGraphExecDestroy(exec_)


def test_an_update_names_the_edge_that_leads_elsewhere(world: World) -> None:
    def build(*edges: tuple[int, int]) -> tuple[Any, list[int]]:
        graph = world.graph()
        nodes = [world.node(graph, value) for value in range(5)]
        for source, target in edges:
            driver.cuGraphAddDependencies(graph, [nodes[source]], [nodes[target]], None, 1)
        return graph, [int(node) for node in nodes]

    old, _ = build((0, 2), (0, 3), (1, 4))
    new, nodes = build((0, 2), (1, 3), (1, 4))
    more, ends = build((0, 3), (1, 4))
    exec_ = driver.cuGraphInstantiate(old, 0)
    assert update(exec_, new) == ("TOPOLOGY_CHANGED", nodes[3], nodes[1])
    assert update(exec_, more)[:2] == ("TOPOLOGY_CHANGED", ends[2]), "with one exit more"
    driver.cuGraphExecDestroy(exec_)


def test_a_change_is_seen_by_later_launches_only(world: World) -> None:
    graph = world.graph()
    node = world.node(graph, 1)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    for value in (2, 3, 4):
        driver.cuGraphLaunch(exec_, world.stream)
        driver.cuGraphExecKernelNodeSetParams(exec_, node, world.params(value))
    driver.cuGraphNodeSetEnabled(exec_, node, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuStreamSynchronize(world.stream)
    assert world.logged() == [1, 2, 3]
    driver.cuGraphExecDestroy(exec_)


def test_an_exec_outlives_its_graph_and_itself_while_it_runs(world: World) -> None:
    graph = world.graph()
    (body,) = conditional(world, graph, "IF", 1)
    world.node(body, 6)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    pinned = driver.cuMemHostAlloc(4, 0)
    word = ctypes.c_uint32.from_address(pinned)
    word.value = 0
    driver.cuStreamWaitValue32(world.stream, pinned, 1, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuGraphDestroy(graph)
    driver.cuGraphExecDestroy(exec_)
    word.value = 1
    driver.cuStreamSynchronize(world.stream)
    assert world.logged() == [6]
    driver.cuMemFreeHost(pinned)
    assert code(cpu.cuGraphLaunch(exec_, world.stream)) == "INVALID_VALUE"


def test_only_some_nodes_can_be_disabled(world: World) -> None:
    graph = world.graph()
    empty, node = driver.cuGraphAddEmptyNode(graph, None, 0), world.node(graph, 1)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert code(cpu.cuGraphNodeSetEnabled(exec_, empty, 0)) == "INVALID_VALUE"
    driver.cuGraphNodeSetEnabled(exec_, node, 0)
    assert driver.cuGraphNodeGetEnabled(exec_, node) == 0
    assert world.run(exec_) == []
    late = world.node(graph, 2)
    assert code(cpu.cuGraphNodeSetEnabled(exec_, late, 0)) == "INVALID_VALUE"
    driver.cuGraphExecDestroy(exec_)


def test_changes_that_need_another_exec_are_refused(world: World) -> None:
    graph = world.graph()
    line, box = world.fill(graph), world.fill(graph, height=2)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    pinned = driver.cuMemHostAlloc(64, 0)

    def put(node: Any, **how: Any) -> str:
        return code(cpu.cuGraphExecMemsetNodeSetParams(exec_, node, world.fill_params(**how), world.context))

    assert put(line, value=2, width=8) == "SUCCESS"
    assert put(line, height=2) == "INVALID_VALUE"
    assert put(line, dst=pinned) == "SUCCESS", "it is of the same context"
    assert put(box, height=2, value=9) == "SUCCESS"
    assert put(box, height=3) == "INVALID_VALUE"
    assert code(cpu.cuGraphExecKernelNodeSetParams(exec_, line, world.params(1))) == "INVALID_VALUE"
    driver.cuGraphExecDestroy(exec_)
    driver.cuMemFreeHost(pinned)


# ---- attributes ----------------------------------------------------------------------------------------------------


def put_attribute(node: Any, name: str, *integers: int) -> str:
    """Set an attribute whose value begins with these."""
    value = cpu.CUkernelNodeAttrValue()
    (ctypes.c_int * len(integers)).from_address(int(value.getPtr()))[:] = list(integers)
    return code(cpu.cuGraphKernelNodeSetAttribute(node, attribute_id(name), value))


def attribute_id(name: str) -> Any:
    return cpu.CUlaunchAttributeID.__members__[f"CU_LAUNCH_ATTRIBUTE_{name}"]


def test_a_device_updatable_node_stays_one_and_is_there_once(world: World) -> None:
    graph = world.graph()
    node, other = world.node(graph, 1), world.node(graph, 2)
    assert put_attribute(node, "DEVICE_UPDATABLE_KERNEL_NODE", 0) == "SUCCESS"
    assert put_attribute(node, "DEVICE_UPDATABLE_KERNEL_NODE", 1) == "SUCCESS"
    assert put_attribute(node, "DEVICE_UPDATABLE_KERNEL_NODE", 0) == "NOT_SUPPORTED"
    for pair in ((node, other), (other, node)):
        assert code(cpu.cuGraphKernelNodeCopyAttributes(*pair)) == "NOT_SUPPORTED"
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert instantiated(graph)[0] == "NOT_SUPPORTED"
    assert code(cpu.cuGraphExecUpdate(exec_, graph)) == "NOT_SUPPORTED"
    driver.cuGraphExecKernelNodeSetParams(exec_, node, world.params(3))
    driver.cuGraphNodeSetEnabled(exec_, other, 0)
    assert world.run(exec_) == [3]
    driver.cuGraphExecDestroy(exec_)


def test_a_copy_of_a_device_updatable_node_is_none_and_has_the_handle_of_the_original(world: World) -> None:
    """Which a captured launch is, too."""

    def handle(node: Any) -> int:
        value = driver.cuGraphKernelNodeGetAttribute(node, attribute_id("DEVICE_UPDATABLE_KERNEL_NODE"))
        return int(value.deviceUpdatableKernelNode.devNode)

    config, attribute = cpu.CUlaunchConfig(), cpu.CUlaunchAttribute()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    attribute.id = attribute_id("DEVICE_UPDATABLE_KERNEL_NODE")
    attribute.value.deviceUpdatableKernelNode.deviceUpdatable = 1
    config.attrs, config.numAttrs, config.hStream = [attribute], 1, world.stream
    kernel = driver.cuModuleGetFunction(world.module, b"other")
    args = ((int(world.log), 1), (ctypes.c_uint64, ctypes.c_uint32))
    assert code(cpu.cuLaunchKernelEx(config, kernel, args, 0)) == "NOT_SUPPORTED"
    begin(world.stream)
    driver.cuLaunchKernelEx(config, kernel, args, 0)
    world.graphs.append(captured := driver.cuStreamEndCapture(world.stream))
    graph = world.graph()
    child = driver.cuGraphAddChildGraphNode(graph, None, 0, captured)
    copied = driver.cuGraphChildGraphNodeGetGraph(child)
    (node,), (twin,) = (driver.cuGraphGetNodes(each, 1)[0] for each in (captured, copied))
    assert handle(node) == handle(twin) != 0
    assert handle(world.node(graph, 1)) == 0
    for each, second in ((graph, "SUCCESS"), (captured, "NOT_SUPPORTED")):
        exec_ = driver.cuGraphInstantiate(each, 0)
        assert instantiated(each)[0] == second
        driver.cuGraphExecDestroy(exec_)


def test_a_node_has_a_priority_that_the_device_has(world: World) -> None:
    node = world.node(world.graph(), 1)
    for given, want in ((-100, -5), (-2, -2), (100, 0)):
        assert put_attribute(node, "PRIORITY", given) == "SUCCESS"
        assert driver.cuGraphKernelNodeGetAttribute(node, attribute_id("PRIORITY")).priority == want


def test_a_larger_cluster_is_for_kernels_that_allow_it(world: World) -> None:
    graph = world.graph()
    node = driver.cuGraphAddKernelNode(graph, None, 0, world.params(0, b"ranks", grid=16))
    assert put_attribute(node, "CLUSTER_DIMENSION", 16, 1, 1) == "INVALID_CLUSTER_SIZE"
    allowed = cpu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    driver.cuFuncSetAttribute(driver.cuModuleGetFunction(world.module, b"ranks"), allowed, 1)
    assert put_attribute(node, "CLUSTER_DIMENSION", 16, 1, 1) == "SUCCESS"
    exec_ = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuStreamSynchronize(world.stream)
    host = np.zeros(17, np.uint32)
    driver.cuMemcpyDtoH(host, world.log, host.nbytes)
    assert host.tolist() == [16] * 16 + [0]
    driver.cuGraphExecDestroy(exec_)


def test_a_cluster_that_a_kernel_was_set_to_require_is_that_of_its_launches(world: World) -> None:
    kernel = driver.cuModuleGetFunction(world.module, b"ranks")
    extents = [
        cpu.CUfunction_attribute.__members__[f"CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_{name}"]
        for name in ("WIDTH", "HEIGHT", "DEPTH")
    ]
    args = ((int(world.log), 0), (ctypes.c_uint64, ctypes.c_uint32))
    driver.cuFuncSetAttribute(kernel, extents[0], 4)
    assert code(cpu.cuLaunchKernel(kernel, 8, 1, 1, 1, 1, 1, 0, world.stream, args, 0)) == "INVALID_CLUSTER_SIZE"
    for each in extents[1:]:
        driver.cuFuncSetAttribute(kernel, each, 1)
    assert code(cpu.cuLaunchKernel(kernel, 6, 1, 1, 1, 1, 1, 0, world.stream, args, 0)) == "INVALID_CLUSTER_SIZE"
    node = driver.cuGraphAddKernelNode(world.graph(), None, 0, world.params(0, b"ranks", grid=8))
    assert put_attribute(node, "CLUSTER_DIMENSION", 2, 1, 1) == "INVALID_CLUSTER_SIZE"
    driver.cuLaunchKernel(kernel, 8, 1, 1, 1, 1, 1, 0, world.stream, args, 0)
    host = np.zeros(5, np.uint32)
    driver.cuStreamSynchronize(world.stream)
    driver.cuMemcpyDtoH(host, world.log, host.nbytes)
    assert host.tolist() == [4] * 4 + [0]


# ---- memory of graphs ----------------------------------------------------------------------------------------------


def alloc_params(nbytes: int = 64) -> Any:
    params = cpu.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps.allocType = cpu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    params.poolProps.location.type = cpu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    params.bytesize = nbytes
    return params


def test_memory_that_a_launch_left_must_be_freed_before_the_next(world: World) -> None:
    graph, params = world.graph(), alloc_params()
    driver.cuGraphAddMemAllocNode(graph, None, 0, params)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert code(cpu.cuMemFree(params.dptr)) == "INVALID_VALUE", "there is none yet"
    driver.cuGraphLaunch(exec_, world.stream)
    assert code(cpu.cuGraphLaunch(exec_, world.stream)) == "INVALID_VALUE"
    driver.cuMemsetD8Async(params.dptr, 1, 64, world.stream)
    driver.cuMemFreeAsync(params.dptr, world.stream)
    assert code(cpu.cuMemFreeAsync(params.dptr, world.stream)) == "INVALID_VALUE"
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuMemFree(params.dptr)
    assert instantiated(graph)[0] == "NOT_SUPPORTED"
    driver.cuGraphExecDestroy(exec_)


def test_memory_that_a_launch_left_outlives_graph_and_exec(world: World) -> None:
    graph, params = world.graph(), alloc_params()
    driver.cuGraphAddMemAllocNode(graph, None, 0, params)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)
    driver.cuStreamSynchronize(world.stream)
    driver.cuMemsetD8(params.dptr, 1, 64)
    driver.cuMemFree(params.dptr)
    assert code(cpu.cuMemFree(params.dptr)) == "INVALID_VALUE"


def test_a_use_of_memory_after_its_free_node_is_a_fault(world: World) -> None:
    graph, params = world.graph(), alloc_params()
    alloc = driver.cuGraphAddMemAllocNode(graph, None, 0, params)
    free = driver.cuGraphAddMemFreeNode(graph, [alloc], 1, params.dptr)
    late = world.fill(graph, free, dst=params.dptr)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    assert code(cpu.cuStreamSynchronize(world.stream)) == "ILLEGAL_ADDRESS"
    report = str(cpu.explain("CUDA_ERROR_ILLEGAL_ADDRESS"))
    assert "fill of 4x1 elements" in report
    assert "graph allocation" in report
    driver.cuDevicePrimaryCtxReset(0)
    driver.cuGraphExecDestroy(exec_)
    assert code(cpu.cuGraphDestroyNode(late)) == "NOT_SUPPORTED", "of a graph that allocates"
    assert code(cpu.cuGraphAddMemFreeNode(graph, None, 0, params.dptr)) == "INVALID_VALUE"


def test_an_update_brings_the_memory_of_the_other_graph(world: World) -> None:
    """Of another size, too. Launches before it have the old memory until they are done."""

    def build(value: int) -> tuple[Any, int]:
        graph, params = world.graph(), alloc_params(64 << value)
        alloc = driver.cuGraphAddMemAllocNode(graph, None, 0, params)
        kernel, where = world.params(value, b"by_way_of"), int(world.memory) + 4 * value
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        kernel.kernelParams = ((int(params.dptr), where, value), types)
        used = driver.cuGraphAddKernelNode(graph, [alloc], 1, kernel)
        driver.cuGraphAddMemFreeNode(graph, [used], 1, params.dptr)
        return graph, int(params.dptr)

    def there() -> list[bool]:
        found = [memory.find(address) for address in (old_address, new_address)]
        return [allocation is not None and not allocation.freed for allocation in found]

    (old, old_address), (new, new_address) = build(0), build(1)
    exec_ = driver.cuGraphInstantiate(old, 0)
    pinned = driver.cuMemHostAlloc(4, 0)
    word = ctypes.c_uint32.from_address(pinned)
    word.value = 0
    driver.cuMemsetD8(world.memory, 9, 32)
    driver.cuStreamWaitValue32(world.stream, pinned, 1, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuGraphExecUpdate(exec_, new)
    for graph in (old, new):
        driver.cuGraphDestroy(graph)
    driver.cuGraphLaunch(exec_, world.stream)
    assert there() == [True, True]
    word.value = 1
    driver.cuStreamSynchronize(world.stream)
    assert there() == [False, True]
    assert world.filled(2) == [0, 1]
    driver.cuGraphExecDestroy(exec_)
    assert there() == [False, False]
    driver.cuMemFreeHost(pinned)


def test_memory_of_a_graph_is_known_while_a_launch_has_left_it(world: World) -> None:
    graph, params = world.graph(), alloc_params()
    driver.cuGraphAddMemAllocNode(graph, None, 0, params)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    what = cpu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
    assert code(cpu.cuPointerGetAttribute(what, params.dptr)) == "INVALID_VALUE"
    driver.cuGraphLaunch(exec_, world.stream)
    assert driver.cuPointerGetAttribute(what, params.dptr) == 64
    driver.cuMemFree(params.dptr)
    driver.cuGraphExecDestroy(exec_)


# ---- capture -------------------------------------------------------------------------------------------------------


def begin(stream: Any, mode: int = 1) -> None:
    driver.cuStreamBeginCapture(stream, cpu.CUstreamCaptureMode(mode))


def kinds(graph: Any) -> list[str]:
    nodes, count = driver.cuGraphGetNodes(graph, 64)
    names = [driver.cuGraphNodeGetType(node).name for node in nodes[:count]]
    return [name.removeprefix("CU_GRAPH_NODE_TYPE_").lower() for name in names]


def test_work_of_every_kind_is_captured(world: World) -> None:
    event = driver.cuEventCreate(2)
    begin(world.stream)
    world.launch(1)
    driver.cuMemcpyDtoDAsync(world.memory, world.log, 16, world.stream)
    driver.cuMemsetD8Async(world.memory, 1, 16, world.stream)
    driver.cuStreamWriteValue32(world.stream, world.memory, 5, 0)
    driver.cuEventRecordWithFlags(event, world.stream, 1)
    address = driver.cuMemAllocAsync(64, world.stream)
    driver.cuMemFreeAsync(address, world.stream)
    graph = driver.cuStreamEndCapture(world.stream)
    want = ["kernel", "memcpy", "memset", "batch_mem_op", "event_record", "mem_alloc", "mem_free"]
    assert kinds(graph) == want
    assert driver.cuGraphGetEdges(graph)[3] == 6
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert world.run(exec_) == [1]
    assert world.filled(2) == [5, 0x01010101]
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)
    driver.cuEventDestroy(event)


FORBIDDEN: list[tuple[str, Callable[[World], Any], str]] = [
    ("wait for it", lambda w: cpu.cuStreamSynchronize(w.stream), "STREAM_CAPTURE_UNSUPPORTED"),
    ("ask for it", lambda w: cpu.cuStreamQuery(w.stream), "STREAM_CAPTURE_UNSUPPORTED"),
    ("wait for all", lambda w: cpu.cuCtxSynchronize(), "STREAM_CAPTURE_UNSUPPORTED"),
    ("allocate", lambda w: cpu.cuMemAlloc(16), "STREAM_CAPTURE_UNSUPPORTED"),
    ("free", lambda w: cpu.cuMemFree(w.memory), "STREAM_CAPTURE_UNSUPPORTED"),
    ("unload", lambda w: cpu.cuModuleUnload(w.module), "STREAM_CAPTURE_UNSUPPORTED"),
]


@pytest.mark.parametrize(("what", "act", "refusal"), FORBIDDEN, ids=[row[0] for row in FORBIDDEN])
def test_what_is_forbidden_ends_the_capture(world: World, what: str, act: Callable[[World], Any], refusal: str) -> None:
    begin(world.stream)
    world.launch(1)
    assert code(act(world)) == refusal
    result = cpu.cuStreamEndCapture(world.stream)
    assert (code(result), result[1]) == ("STREAM_CAPTURE_INVALIDATED", None)
    world.launch(2)
    driver.cuStreamSynchronize(world.stream)
    assert world.logged() == [2]


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread local", "relaxed"])
def test_another_thread_may_do_what_the_mode_says(world: World, mode: int) -> None:
    codes: list[str] = []

    def allocate() -> None:
        driver.cuCtxSetCurrent(world.context)
        result = cpu.cuMemAlloc(16)
        codes.append(code(result))
        if not result[0]:
            driver.cuMemFree(result[1])

    begin(world.stream, mode)
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    result = cpu.cuStreamEndCapture(world.stream)
    assert [*codes, code(result)] == (
        ["STREAM_CAPTURE_UNSUPPORTED", "STREAM_CAPTURE_INVALIDATED"] if mode == 0 else ["SUCCESS", "SUCCESS"]
    )
    if not result[0]:
        driver.cuGraphDestroy(result[1])


def test_a_relaxed_capture_lets_its_thread_allocate(world: World) -> None:
    begin(world.stream, 2)
    driver.cuMemFree(driver.cuMemAlloc(16))
    driver.cuGraphDestroy(driver.cuStreamEndCapture(world.stream))
    before = driver.cuThreadExchangeStreamCaptureMode(cpu.CUstreamCaptureMode(2))
    begin(world.stream, 0)
    driver.cuMemFree(driver.cuMemAlloc(16))
    driver.cuGraphDestroy(driver.cuStreamEndCapture(world.stream))
    assert driver.cuThreadExchangeStreamCaptureMode(before).name.endswith("RELAXED")


def test_a_fork_must_be_joined(world: World) -> None:
    event = driver.cuEventCreate(2)
    begin(world.stream)
    world.launch(1)
    driver.cuEventRecord(event, world.stream)
    driver.cuStreamWaitEvent(world.other, event, 0)
    world.launch(2, world.other)
    assert code(cpu.cuStreamEndCapture(world.stream)) == "STREAM_CAPTURE_UNJOINED"
    world.launch(3, world.other)
    driver.cuStreamSynchronize(world.other)
    assert world.logged() == [3]
    driver.cuEventDestroy(event)


def test_events_lead_into_captures_and_not_out_of_them(world: World) -> None:
    inside, outside = driver.cuEventCreate(2), driver.cuEventCreate(2)
    driver.cuEventRecord(outside, world.other)
    begin(world.stream)
    world.launch(1)
    driver.cuEventRecord(inside, world.stream)
    assert code(cpu.cuEventQuery(inside)) == "CAPTURED_EVENT"
    assert code(cpu.cuStreamEndCapture(world.stream)) == "STREAM_CAPTURE_INVALIDATED"
    begin(world.stream)
    world.launch(1)
    assert code(cpu.cuStreamWaitEvent(world.stream, outside, 0)) == "STREAM_CAPTURE_ISOLATION"
    assert code(cpu.cuStreamEndCapture(world.stream)) == "STREAM_CAPTURE_INVALIDATED"
    begin(world.stream)
    begin(world.other)
    world.launch(1)
    driver.cuEventRecord(inside, world.stream)
    assert code(cpu.cuStreamWaitEvent(world.other, inside, 0)) == "STREAM_CAPTURE_MERGE"
    for stream in (world.stream, world.other):
        assert code(cpu.cuStreamEndCapture(stream)) == "STREAM_CAPTURE_INVALIDATED"
    for event in (inside, outside):
        driver.cuEventDestroy(event)


def test_the_end_is_for_the_stream_and_the_thread_that_began(world: World) -> None:
    codes: list[str] = []
    begin(world.stream)
    thread = threading.Thread(target=lambda: codes.append(code(cpu.cuStreamEndCapture(world.stream))))
    thread.start()
    thread.join()
    assert codes == ["STREAM_CAPTURE_WRONG_THREAD"]
    cpu.cuStreamEndCapture(world.stream)
    event = driver.cuEventCreate(2)
    begin(world.stream)
    world.launch(1)
    driver.cuEventRecord(event, world.stream)
    driver.cuStreamWaitEvent(world.other, event, 0)
    assert code(cpu.cuStreamEndCapture(world.other)) == "STREAM_CAPTURE_UNMATCHED"
    cpu.cuStreamEndCapture(world.stream)
    driver.cuEventDestroy(event)


def test_a_blocking_stream_that_is_captured_keeps_the_default_stream_out(world: World) -> None:
    blocking = driver.cuStreamCreate(0)
    begin(blocking)
    assert code(cpu.cuMemsetD8Async(world.memory, 1, 4, cpu.CUstream(0))) == "STREAM_CAPTURE_IMPLICIT"
    assert code(cpu.cuStreamEndCapture(blocking)) == "STREAM_CAPTURE_INVALIDATED"
    driver.cuStreamDestroy(blocking)


def test_what_a_capture_tells(world: World) -> None:
    assert int(driver.cuStreamGetCaptureInfo(world.stream)[0]) == 0
    begin(world.stream)
    world.launch(1)
    status, identity, graph, nodes, data, count = driver.cuStreamGetCaptureInfo(world.stream)
    assert (int(status), count, len(nodes), len(data)) == (1, 1, 1, 1)
    assert int(identity)
    driver.cuStreamUpdateCaptureDependencies(world.stream, None, None, 0, 1)
    world.launch(2)
    assert int(driver.cuStreamEndCapture(world.stream)) == int(graph)
    assert (driver.cuGraphGetNodes(graph)[1], driver.cuGraphGetEdges(graph)[3]) == (2, 0)
    driver.cuGraphDestroy(graph)


def test_a_capture_that_breaks_takes_the_graph_with_it(world: World) -> None:
    graph = driver.cuGraphCreate(0)
    first = world.node(graph, 1)
    driver.cuStreamBeginCaptureToGraph(world.stream, graph, [first], None, 1, cpu.CUstreamCaptureMode(1))
    world.launch(2)
    cpu.cuStreamQuery(world.stream)
    assert code(cpu.cuStreamEndCapture(world.stream)) == "STREAM_CAPTURE_INVALIDATED"
    assert code(cpu.cuGraphDestroy(graph)) == "INVALID_VALUE"


@pytest.mark.usefixtures("races_on_purpose")
def test_early_launches_are_captured_as_programmatic_edges(world: World) -> None:
    config = cpu.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = world.stream
    attribute = cpu.CUlaunchAttribute()
    attribute.id = cpu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    kernel = driver.cuModuleGetFunction(world.module, b"append")
    begin(world.stream)
    for value in (1, 2):
        args = ((int(world.log), value), (ctypes.c_uint64, ctypes.c_uint32))
        driver.cuLaunchKernelEx(config, kernel, args, 0)
    graph = driver.cuStreamEndCapture(world.stream)
    _, _, data, count = driver.cuGraphGetEdges(graph, 1)
    assert (count, data[0].from_port, int(data[0].type)) == (1, 1, 1)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    assert world.run(exec_) == [1, 2]
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)
