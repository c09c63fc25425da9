"""What the cases of wrong calls share: a world of handles, params, and how calls are put.

A status is its name without ``CUDA_ERROR_``. `driver` is whom they ask: its ``module`` is set before a case is run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class _Asked:
    """The functions of a module that is named later."""

    module: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


driver = _Asked()

PTX = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
.visible .entry bounded() .maxntid 128,1,1 { ret; }
.visible .entry store(.param .u64 to, .param .u32 value) {
  .reg .b64 %rd<3>; .reg .b32 %r<2>;
  ld.param.u64 %rd1, [to]; cvta.to.global.u64 %rd2, %rd1; ld.param.u32 %r1, [value];
  st.global.u32 [%rd2], %r1;
  ret;
}
.visible .entry stat(.param .u64 to) {
  .reg .b64 %rd<3>; .reg .b32 %r<3>; .shared .align 4 .b8 s[400];
  ld.param.u64 %rd1, [to]; cvta.to.global.u64 %rd2, %rd1;
  mov.u32 %r1, 1; st.shared.u32 [s], %r1; ld.shared.u32 %r2, [s];
  st.global.u32 [%rd2], %r2;
  ret;
}
\0"""

Extent = tuple[int, int, int]
ONE: Extent = (1, 1, 1)
MODES = ("THREAD_LOCAL", "GLOBAL", "RELAXED")


class RefusedError(Exception):
    """A call that a case needs was refused."""


def status(result: Sequence[Any]) -> str:
    name: str = result[0].name
    return name.replace("CUDA_ERROR_", "").replace("CUDA_", "")


def must(result: Any) -> Any:
    """What a call gave beside its status."""
    if result[0]:
        raise RefusedError(status(result))
    return result[1] if len(result) == 2 else result[1:] or None


class World:
    """What the cases use: a context, kernels, memory, streams, events and an empty graph."""

    def __init__(self) -> None:
        must(driver.cuInit(0))
        self.device = must(driver.cuDeviceGet(0))
        self.context = must(driver.cuDevicePrimaryCtxRetain(self.device))
        must(driver.cuCtxSetCurrent(self.context))
        self.module = must(driver.cuModuleLoadData(PTX))
        self.empty = must(driver.cuModuleGetFunction(self.module, b"empty"))
        self.bounded = must(driver.cuModuleGetFunction(self.module, b"bounded"))
        self.store = must(driver.cuModuleGetFunction(self.module, b"store"))
        self.stat = must(driver.cuModuleGetFunction(self.module, b"stat"))
        self.memory = must(driver.cuMemAlloc(1024))
        self.other_memory = must(driver.cuMemAlloc(1024))
        self.pinned = must(driver.cuMemHostAlloc(1024, 0))
        self.stream = must(driver.cuStreamCreate(1))
        self.other_stream = must(driver.cuStreamCreate(1))
        self.blocking_stream = must(driver.cuStreamCreate(0))
        self.host = np.zeros(1024, np.uint8)
        self.graph = must(driver.cuGraphCreate(0))
        self.event = must(driver.cuEventCreate(0))
        self.untimed_event = must(driver.cuEventCreate(2))


Case = Callable[[World], Any]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


# ---- calls and their params ----------------------------------------------------------------------------------------


def launch(
    world: World,
    function: Any = None,
    grid: Extent = ONE,
    block: Extent = ONE,
    shared: int = 0,
    params: Any = None,
    stream: Any = None,
    attrs: Iterable[tuple[str, Callable[[Any], None]]] = (),
) -> str:
    """Launch with attributes, each the end of its name and what sets its value."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared
    config.hStream = stream or world.stream
    attributes = []
    for name, put in attrs:
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(driver.CUlaunchAttributeID, "CU_LAUNCH_ATTRIBUTE_" + name)
        value = driver.CUlaunchAttributeValue()
        put(value)
        attribute.value = value
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return status(driver.cuLaunchKernelEx(config, function or world.empty, params, 0))


def kernel_params(
    world: World,
    function: Any = None,
    grid: Extent = ONE,
    block: Extent = ONE,
    shared: int = 0,
    params: Any = None,
) -> Any:
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func = function or world.empty
    node.gridDimX, node.gridDimY, node.gridDimZ = grid
    node.blockDimX, node.blockDimY, node.blockDimZ = block
    node.sharedMemBytes = shared
    node.kernelParams = params or 0
    return node


def store_params(world: World, to: Any = None, value: int = 1) -> Any:
    params = ((int(to or world.memory), value), (ctypes.c_uint64, ctypes.c_uint32))
    return kernel_params(world, world.store, params=params)


def memset_params(
    world: World, dst: Any = None, value: int = 1, element: int = 4, width: int = 4, height: int = 1, pitch: int = 0
) -> Any:
    params = driver.CUDA_MEMSET_NODE_PARAMS()
    params.dst = dst or world.memory
    params.value = value
    params.elementSize = element
    params.width = width
    params.height = height
    params.pitch = pitch
    return params


def copy_params(
    world: World,
    dst: Any = None,
    src: Any = None,
    size: int = 16,
    to_host: bool = False,
    from_host: bool = False,
    height: int = 1,
    pitch: int = 0,
) -> Any:
    params = driver.CUDA_MEMCPY3D()
    params.WidthInBytes, params.Height, params.Depth = size, height, 1
    kinds = driver.CUmemorytype
    params.dstMemoryType = kinds.CU_MEMORYTYPE_HOST if to_host else kinds.CU_MEMORYTYPE_DEVICE
    params.srcMemoryType = kinds.CU_MEMORYTYPE_HOST if from_host else kinds.CU_MEMORYTYPE_DEVICE
    if to_host:
        params.dstHost = int(dst)
    else:
        params.dstDevice = dst or world.other_memory
    if from_host:
        params.srcHost = int(src)
    else:
        params.srcDevice = src or world.memory
    params.dstPitch = params.srcPitch = pitch
    params.dstHeight = params.srcHeight = height if pitch else 0
    return params


def do_nothing(_: int | None) -> None:
    pass


CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(do_nothing)
HOST_FUNCTION = ctypes.cast(CALLBACK, ctypes.c_void_p).value


def host_params() -> Any:
    params = driver.CUDA_HOST_NODE_PARAMS()
    params.fn = driver.CUhostFn(HOST_FUNCTION)
    params.userData = 0
    return params


def alloc_params(size: int = 1024) -> Any:
    params = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    params.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    params.poolProps.location.id = 0
    params.bytesize = size
    return params


def add_kernel(world: World, graph: Any, dependencies: Sequence[Any] = (), params: Any = None) -> Any:
    nodes = list(dependencies) or None
    return must(driver.cuGraphAddKernelNode(graph, nodes, len(dependencies), params or kernel_params(world)))


def add_memset(world: World, graph: Any, dependencies: Sequence[Any] = (), **params: Any) -> Any:
    nodes = list(dependencies) or None
    memset = memset_params(world, **params)
    return must(driver.cuGraphAddMemsetNode(graph, nodes, len(dependencies), memset, world.context))


def edge(from_port: int = 0, to_port: int = 0, kind: int = 0) -> Any:
    data = driver.CUgraphEdgeData()
    data.from_port = from_port
    data.to_port = to_port
    data.type = driver.CUgraphDependencyType(kind)
    return data


def connect(graph: Any, source: Any, target: Any, data: Any = None) -> str:
    return status(driver.cuGraphAddDependencies(graph, [source], [target], None if data is None else [data], 1))


def ports(graph: Any) -> list[tuple[int, int]]:
    """The ports and types of the edges."""
    count = must(driver.cuGraphGetEdges(graph))[3]
    edges = must(driver.cuGraphGetEdges(graph, count))[2][:count] if count else []
    return [(int(data.from_port), int(data.type)) for data in edges]


def instantiate(world: World, graph: Any, flags: int = 0, destroy: bool = True) -> Any:
    """The status, the result and whether a node was named; or the exec, when it was made and is to stay."""
    params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = flags
    result = driver.cuGraphInstantiateWithParams(graph, params)
    if not result[0]:
        if not destroy:
            return result[1]
        must(driver.cuGraphExecDestroy(result[1]))
    reason = params.result_out.name.replace("CUDA_GRAPH_INSTANTIATE_", "")
    return [status(result), reason, int(params.hErrNode_out) != 0]


def add_conditional(
    world: World, graph: Any, kind: str = "IF", size: int = 1, handle: Any = None
) -> tuple[Any, list[Any]]:
    """The node and its bodies."""
    if handle is None:
        handle = must(driver.cuGraphConditionalHandleCreate(graph, world.context, 1, 1))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = getattr(driver.CUgraphConditionalNodeType, "CU_GRAPH_COND_TYPE_" + kind)
    params.conditional.size = size
    params.conditional.ctx = world.context
    node = must(driver.cuGraphAddNode(graph, None, None, 0, params))
    return node, list(params.conditional.phGraph_out)


def move_child(world: World, graph: Any, child: Any) -> Any:
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = child
    params.graph.ownership = driver.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    return driver.cuGraphAddNode(graph, None, None, 0, params)


def begin_capture(stream: Any, mode: str = "THREAD_LOCAL") -> None:
    must(driver.cuStreamBeginCapture(stream, getattr(driver.CUstreamCaptureMode, "CU_STREAM_CAPTURE_MODE_" + mode)))


def fill(world: World, stream: Any) -> str:
    return status(driver.cuMemsetD32Async(world.memory, 1, 4, stream))


def end_capture(stream: Any) -> Any:
    """The kinds of the nodes and the ports and types of the edges that were captured."""
    result = driver.cuStreamEndCapture(stream)
    if result[0]:
        return status(result)
    graph = result[1]
    count = must(driver.cuGraphGetNodes(graph))[1]
    nodes = must(driver.cuGraphGetNodes(graph, count))[0][:count] if count else []
    kinds = [must(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_") for node in nodes]
    return ["ok", kinds, ports(graph)]


def in_thread(function: Callable[[], Any]) -> Any:
    answers = []

    def run() -> None:
        try:
            answers.append(function())
        except BaseException as error:
            answers.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return answers[0]


class UpdateResult(ctypes.Structure):
    """``CUgraphExecUpdateResultInfo``, whose nodes the bindings do not tell for all results."""

    _fields_ = (("result", ctypes.c_int), ("error_node", ctypes.c_void_p), ("error_from_node", ctypes.c_void_p))
    result: int
    error_node: int | None
    error_from_node: int | None


def update_exec(exec_: Any, graph: Any, names: Mapping[int, str] | None = None) -> Any:
    """The status, the result and the names of both nodes: "?" is a node with no name, None is no node."""
    found = UpdateResult()
    address = int(driver.cuGetProcAddress(b"cuGraphExecUpdate", 13000, 0)[1])
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)(address)
    code = function(int(exec_), int(graph), ctypes.addressof(found))

    def name_of(node: int | None) -> str | None:
        return (names or {}).get(node, "?") if node else None

    result = driver.CUgraphExecUpdateResult(found.result).name.removeprefix("CU_GRAPH_EXEC_UPDATE_")
    return [driver.CUresult(code).name[5:], result, name_of(found.error_node), name_of(found.error_from_node)]


def cluster(x: int, y: int = 1, z: int = 1) -> tuple[str, Callable[[Any], None]]:
    def put(value: Any) -> None:
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = (x, y, z)

    return ("CLUSTER_DIMENSION", put)
