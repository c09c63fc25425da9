"""The cases: each is a function of a new `World` that returns what the driver said to some calls.

A status is its name without ``CUDA_ERROR_``. `driver` is the module asked, and is set before a case is run.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

driver: Any = None

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
    count = must(driver.cuGraphGetEdges(graph))[3]
    edges = must(driver.cuGraphGetEdges(graph, count))[2][:count] if count else []
    return ["ok", kinds, [(int(data.from_port), int(data.type)) for data in edges]]


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


# ---- the cases -----------------------------------------------------------------------------------------------------


@case
def device_attributes(world: World) -> Any:
    def value(attribute: Any) -> Any:
        result = driver.cuDeviceGetAttribute(attribute, world.device)
        return status(result) if result[0] else result[1]

    members = driver.CUdevice_attribute.__members__  # also the second names
    return {name.removeprefix("CU_DEVICE_ATTRIBUTE_"): value(attribute) for name, attribute in members.items()}


@case
def func_attributes(world: World) -> Any:
    return {
        name: {
            attribute.name[len("CU_FUNC_ATTRIBUTE_") :]: driver.cuFuncGetAttribute(attribute, getattr(world, name))[1]
            for attribute in driver.CUfunction_attribute
            if attribute.name != "CU_FUNC_ATTRIBUTE_MAX"
        }
        for name in ("empty", "bounded", "stat")
    }


@case
def priorities(world: World) -> Any:
    return [
        driver.cuCtxGetStreamPriorityRange()[1:],
        driver.cuStreamGetPriority(must(driver.cuStreamCreateWithPriority(1, -100)))[1],
        driver.cuStreamGetPriority(must(driver.cuStreamCreateWithPriority(1, 100)))[1],
        status(driver.cuStreamCreate(5)),
        status(driver.cuEventCreate(4)),
        status(driver.cuEventCreate(8)),
        status(driver.cuEventCreate(6)),
        status(driver.cuEventCreate(1)),
    ]


@case
def launch_extents(world: World) -> Any:
    return [
        launch(world),
        launch(world, block=(1025, 1, 1)),
        launch(world, block=(0, 1, 1)),
        launch(world, grid=(0, 1, 1)),
        launch(world, grid=(1, 65536, 1)),
        launch(world, block=(1, 1, 65)),
        launch(world, block=(64, 32, 1)),
        launch(world, world.bounded, block=(129, 1, 1)),
        launch(world, world.bounded, block=(64, 4, 1)),
    ]


@case
def launch_shared(world: World) -> Any:
    maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    return [
        launch(world, shared=49152),
        launch(world, shared=49153),
        status(driver.cuFuncSetAttribute(world.empty, maximum, 232448)),
        launch(world, shared=232448),
        status(driver.cuFuncSetAttribute(world.empty, maximum, 232449)),
        launch(world, shared=232449),
        status(driver.cuFuncSetAttribute(world.empty, maximum, -1)),
        status(driver.cuFuncSetAttribute(world.stat, maximum, 232448)),
        status(driver.cuFuncSetAttribute(world.stat, maximum, 232048)),
        status(driver.cuFuncSetAttribute(world.empty, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, 5)),
    ]


def cluster(x: int, y: int = 1, z: int = 1) -> tuple[str, Callable[[Any], None]]:
    def put(value: Any) -> None:
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = (x, y, z)

    return ("CLUSTER_DIMENSION", put)


@case
def launch_cluster(world: World) -> Any:
    def preferred(x: int) -> tuple[str, Callable[[Any], None]]:

        def put(value: Any) -> None:
            value.preferredClusterDim.x, value.preferredClusterDim.y, value.preferredClusterDim.z = (x, 1, 1)

        return ("PREFERRED_CLUSTER_DIMENSION", put)

    return [
        launch(world, grid=(4, 1, 1), attrs=[cluster(2)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(3)]),
        launch(world, grid=(16, 1, 1), attrs=[cluster(16)]),
        launch(world, grid=(8, 1, 1), attrs=[cluster(8)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(0)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(0, 0, 0)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(1), preferred(2)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(2), preferred(3)]),
        launch(
            world,
            grid=(4, 1, 1),
            attrs=[("NVLINK_UTIL_CENTRIC_SCHEDULING", lambda value: setattr(value, "nvlinkUtilCentricScheduling", 1))],
        ),
        launch(
            world,
            attrs=[
                (
                    "DEVICE_UPDATABLE_KERNEL_NODE",
                    lambda value: setattr(value.deviceUpdatableKernelNode, "deviceUpdatable", 1),
                )
            ],
        ),
        status(
            driver.cuFuncSetAttribute(
                world.empty, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
            )
        ),
        launch(world, grid=(16, 1, 1), attrs=[cluster(16)]),
        launch(world, grid=(32, 1, 1), attrs=[cluster(32)]),
    ]


@case
def launch_coop(world: World) -> Any:
    cooperative = ("COOPERATIVE", lambda value: setattr(value, "cooperative", 1))
    return [
        launch(world, attrs=[cooperative]),
        launch(world, grid=(132 * 32, 1, 1), attrs=[cooperative]),
        launch(world, grid=(132 * 32 + 1, 1, 1), attrs=[cooperative]),
        launch(world, grid=(132 * 2 + 1, 1, 1), block=(1024, 1, 1), attrs=[cooperative]),
    ]


@case
def launch_params(world: World) -> Any:
    return [
        status(driver.cuLaunchKernel(world.empty, 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuLaunchKernel(world.store, 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def occupancy(world: World) -> Any:
    return [
        [
            must(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, shared))
            for function in (world.empty, world.bounded, world.stat)
            for block, shared in (
                (1, 0),
                (32, 0),
                (33, 0),
                (128, 0),
                (1024, 0),
                (32, 10000),
                (32, 100000),
                (32, 232448),
                (32, 300000),
            )
        ],
        status(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(world.empty, 0, 0)),
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(world.bounded, 129, 0)[1],
    ]


@case
def mem_alloc(world: World) -> Any:
    memory = must(driver.cuMemAlloc(100))
    return [
        status(driver.cuMemAlloc(0)),
        status(driver.cuMemAlloc(1 << 50)),
        status(driver.cuMemFree(driver.CUdeviceptr(5))),
        status(driver.cuMemFree(driver.CUdeviceptr(0))),
        status(driver.cuMemFree(driver.CUdeviceptr(int(memory) + 4))),
        status(driver.cuMemFree(memory)),
        status(driver.cuMemFree(memory)),
        status(driver.cuMemFree(driver.CUdeviceptr(world.pinned))),
        status(driver.cuMemFreeHost(int(world.memory))),
        status(driver.cuMemFreeHost(5)),
        status(driver.cuMemHostAlloc(0, 0)),
        status(driver.cuMemHostAlloc(16, 99)),
    ]


@case
def mem_query(world: World) -> Any:
    return [
        status(driver.cuMemGetAddressRange(driver.CUdeviceptr(5))),
        must(driver.cuMemGetAddressRange(driver.CUdeviceptr(int(world.memory) + 7)))[1],
        status(driver.cuMemHostGetDevicePointer(world.host.ctypes.data, 0)),
        status(driver.cuMemHostGetDevicePointer(world.pinned, 0)),
        status(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 5)),
        str(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, world.memory)[1]),
        str(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, world.pinned)[1]),
        status(
            driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER, world.memory)
        ),
        int(world.memory) % 512,
        int(world.other_memory) - int(world.memory),
    ]


@case
def copies(world: World) -> Any:
    return [
        status(driver.cuMemcpyDtoH(world.host, driver.CUdeviceptr(5), 4)),
        status(driver.cuMemcpyHtoD(driver.CUdeviceptr(5), world.host, 4)),
        status(driver.cuMemcpyDtoH(world.host, world.memory, 0)),
        status(driver.cuMemcpyDtoD(world.other_memory, driver.CUdeviceptr(5), 4)),
        status(driver.cuMemcpyDtoHAsync(world.host, driver.CUdeviceptr(5), 4, world.stream)),
        status(driver.cuMemcpyHtoDAsync(driver.CUdeviceptr(5), world.host, 4, world.stream)),
        status(driver.cuMemcpyDtoDAsync(world.other_memory, driver.CUdeviceptr(5), 4, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def copies_long(world: World) -> Any:
    big = np.zeros(64 << 20, np.uint8)
    return [status(driver.cuMemcpyDtoH(big, world.memory, big.size))]


@case
def copies_3d(world: World) -> Any:
    return [
        status(driver.cuMemcpy3D(copy_params(world))),
        status(driver.cuMemcpy3D(copy_params(world, size=0))),
        status(driver.cuMemcpy3D(copy_params(world, height=0))),
        status(driver.cuMemcpy3D(copy_params(world, size=16, height=2, pitch=8))),
        status(driver.cuMemcpy3D(copy_params(world, size=16, height=2, pitch=16))),
        status(driver.cuMemcpy3D(copy_params(world, size=16, height=2, pitch=0))),
        status(driver.cuMemcpy3D(copy_params(world, src=driver.CUdeviceptr(5)))),
        status(driver.cuMemcpy3DAsync(copy_params(world, src=driver.CUdeviceptr(5)), world.stream)),
        status(driver.cuMemcpy3D(copy_params(world, dst=0, to_host=True))),
        status(driver.cuMemcpy3DAsync(copy_params(world, src=world.pinned, from_host=True), world.stream)),
    ]


@case
def fills(world: World) -> Any:
    return [
        status(driver.cuMemsetD32(world.memory, 1, 4)),
        status(driver.cuMemsetD32(driver.CUdeviceptr(int(world.memory) + 1), 1, 4)),
        status(driver.cuMemsetD16(driver.CUdeviceptr(int(world.memory) + 1), 1, 4)),
        status(driver.cuMemsetD8(driver.CUdeviceptr(5), 1, 4)),
        status(driver.cuMemsetD32(world.memory, 1, 0)),
        status(driver.cuMemsetD2D32(world.memory, 8, 1, 4, 2)),
        status(driver.cuMemsetD2D32(world.memory, 17, 1, 4, 2)),
        status(driver.cuMemsetD2D32(world.memory, 16, 1, 4, 0)),
        status(driver.cuMemsetD8Async(driver.CUdeviceptr(5), 1, 4, world.stream)),
        status(driver.cuMemsetD8(world.pinned, 1, 4)),
        status(driver.cuMemsetD32Async(world.memory, 1, 1 << 24, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def pools(world: World) -> Any:
    attributes = driver.CUmemPool_attribute

    def attribute(pool: Any, name: Any) -> Any:
        return int(must(driver.cuMemPoolGetAttribute(pool, getattr(attributes, "CU_MEMPOOL_ATTR_" + name))))

    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = must(driver.cuMemPoolCreate(properties))

    def look() -> Any:
        return [
            attribute(pool, name)
            for name in ("USED_MEM_CURRENT", "RESERVED_MEM_CURRENT", "USED_MEM_HIGH", "RESERVED_MEM_HIGH")
        ]

    answers: list[Any] = [look()]
    first = must(driver.cuMemAllocFromPoolAsync(1000, pool, world.stream))
    answers.append(look())
    second = must(driver.cuMemAllocFromPoolAsync(5 << 20, pool, world.stream))
    answers.append(look())
    answers.append(status(driver.cuMemFreeAsync(first, world.stream)))
    answers.append(look())
    answers.append(status(driver.cuMemFreeAsync(first, world.stream)))
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    answers.append(status(driver.cuMemFree(second)))
    answers.append(look())
    must(driver.cuStreamSynchronize(world.stream))
    answers.append(look())
    answers += [
        status(driver.cuMemAllocFromPoolAsync(0, pool, world.stream)),
        status(driver.cuMemAllocFromPoolAsync(1 << 50, pool, world.stream)),
        status(driver.cuMemFreeAsync(world.memory, world.stream)),
        status(driver.cuMemFreeAsync(driver.CUdeviceptr(5), world.stream)),
        status(driver.cuMemFreeAsync(driver.CUdeviceptr(0), world.stream)),
        status(driver.cuMemPoolTrimTo(pool, 0)),
        look(),
        status(driver.cuMemPoolDestroy(must(driver.cuDeviceGetDefaultMemPool(0)))),
        status(driver.cuMemPoolDestroy(pool)),
        status(driver.cuMemFreeHost(int(world.memory))),
    ]
    return answers


@case
def events(world: World) -> Any:
    answers = [
        status(driver.cuEventQuery(world.event)),
        status(driver.cuEventSynchronize(world.event)),
        status(driver.cuStreamWaitEvent(world.stream, world.event, 0)),
        status(driver.cuEventElapsedTime(world.event, world.event)),
    ]
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuEventRecord(world.untimed_event, world.stream))
    must(driver.cuStreamSynchronize(world.stream))
    never_recorded = must(driver.cuEventCreate(0))
    return [
        *answers,
        status(driver.cuEventElapsedTime(world.event, world.event)),
        status(driver.cuEventElapsedTime(world.event, world.untimed_event)),
        status(driver.cuEventElapsedTime(world.event, never_recorded)),
        status(driver.cuEventRecordWithFlags(world.event, world.stream, 1)),
        status(driver.cuEventRecordWithFlags(world.event, world.stream, 2)),
        status(driver.cuStreamWaitEvent(world.stream, world.event, 1)),
        status(driver.cuStreamWaitEvent(world.stream, world.event, 2)),
    ]


@case
def stream_ops(world: World) -> Any:
    return [
        status(driver.cuStreamWriteValue32(world.stream, world.memory, 1, 0)),
        status(driver.cuStreamWriteValue32(world.stream, driver.CUdeviceptr(int(world.memory) + 1), 1, 0)),
        status(driver.cuStreamWriteValue32(world.stream, driver.CUdeviceptr(5), 1, 0)),
        status(driver.cuStreamWriteValue64(world.stream, world.memory, 1, 0)),
        status(driver.cuStreamWaitValue32(world.stream, world.memory, 0, 0)),
        status(driver.cuStreamWaitValue32(world.stream, world.memory, 0, 7)),
        status(driver.cuStreamBatchMemOp(world.stream, 0, [], 0)),
        status(driver.cuStreamWriteValue32(world.stream, world.pinned, 1, 0)),
        status(driver.cuStreamWriteValue32(world.stream, world.host.ctypes.data, 1, 0)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def cap_basic(world: World) -> Any:
    begin_capture(world.stream)
    answers = [
        fill(world, world.stream),
        end_capture(world.stream),
        status(driver.cuStreamEndCapture(world.stream)),
        status(driver.cuStreamBeginCapture(driver.CUstream(0), driver.CUstreamCaptureMode(0))),
    ]
    begin_capture(world.stream)
    answers.append(status(driver.cuStreamBeginCapture(world.stream, driver.CUstreamCaptureMode(0))))
    answers.append(end_capture(world.stream))
    return answers


@case
def cap_query(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [
        status(driver.cuStreamQuery(world.stream)),
        str(driver.cuStreamIsCapturing(world.stream)[1]),
        fill(world, world.stream),
        end_capture(world.stream),
        fill(world, world.stream),
    ]


@case
def cap_sync(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamSynchronize(world.stream)), end_capture(world.stream)]


@case
def cap_other_sync(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuStreamSynchronize(world.other_stream)),
            status(driver.cuStreamQuery(world.other_stream)),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_ctx_sync(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuCtxSynchronize()), end_capture(world.stream)]
    return answers


@case
def cap_alloc(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        allocated = driver.cuMemAlloc(16)
        answers += [status(allocated), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemFree(driver.CUdeviceptr(0))), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemFree(world.other_memory)), end_capture(world.stream)]
        world.other_memory = must(driver.cuMemAlloc(1024))
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemHostAlloc(16, 0)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuModuleLoadData(PTX)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemcpyDtoH(world.host, world.memory, 4)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemsetD8(world.memory, 1, 4)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuStreamCreate(1)),
            status(driver.cuEventCreate(0)),
            status(driver.cuGraphCreate(0)),
            status(driver.cuMemGetInfo()),
            status(driver.cuFuncGetAttribute(driver.CUfunction_attribute(0), world.empty)),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuEventDestroy(must(driver.cuEventCreate(0)))),
            status(driver.cuStreamDestroy(must(driver.cuStreamCreate(1)))),
            status(driver.cuGraphDestroy(must(driver.cuGraphCreate(0)))),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_event_query(world: World) -> Any:
    answers: list[Any] = []
    must(driver.cuEventRecord(world.event, world.other_stream))
    must(driver.cuStreamSynchronize(world.other_stream))
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuEventQuery(world.event)),
            status(driver.cuEventSynchronize(world.event)),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_thread(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(lambda: [status(driver.cuCtxSetCurrent(world.context)), status(driver.cuMemAlloc(16))]),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(
                lambda: [
                    status(driver.cuCtxSetCurrent(world.context)),
                    status(driver.cuStreamSynchronize(world.other_stream)),
                ]
            ),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(lambda: [status(driver.cuCtxSetCurrent(world.context)), fill(world, world.stream)]),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(lambda: [status(driver.cuCtxSetCurrent(world.context)), end_capture(world.stream)]),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_captured_event(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [
        status(driver.cuEventQuery(world.event)),
        fill(world, world.stream),
        end_capture(world.stream),
        status(driver.cuEventQuery(world.event)),
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        status(driver.cuEventSynchronize(world.event)),
        status(driver.cuEventRecord(world.event, world.other_stream)),
        status(driver.cuStreamSynchronize(world.other_stream)),
        status(driver.cuEventQuery(world.event)),
    ]


@case
def cap_captured_event_sync(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [status(driver.cuEventSynchronize(world.event)), end_capture(world.stream)]


@case
def cap_captured_event_after(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [
        end_capture(world.stream),
        status(driver.cuEventQuery(world.event)),
        status(driver.cuEventSynchronize(world.event)),
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        status(driver.cuStreamSynchronize(world.other_stream)),
    ]


@case
def cap_isolation(world: World) -> Any:
    must(driver.cuEventRecord(world.event, world.other_stream))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [
        status(driver.cuStreamWaitEvent(world.stream, world.event, 0)),
        fill(world, world.stream),
        end_capture(world.stream),
    ]


@case
def cap_isolation_done(world: World) -> Any:
    must(driver.cuEventRecord(world.event, world.other_stream))
    must(driver.cuStreamSynchronize(world.other_stream))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamWaitEvent(world.stream, world.event, 0)), end_capture(world.stream)]


@case
def cap_unrecorded(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamWaitEvent(world.stream, world.event, 0)), end_capture(world.stream)]


@case
def cap_merge(world: World) -> Any:
    begin_capture(world.stream)
    begin_capture(world.other_stream)
    fill(world, world.stream)
    fill(world, world.other_stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        end_capture(world.other_stream),
        end_capture(world.stream),
    ]


@case
def cap_fork(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    answers = [
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        fill(world, world.other_stream),
        end_capture(world.other_stream),
    ]
    recorded = driver.cuEventRecord(world.untimed_event, world.other_stream)
    answers += [
        status(recorded),
        status(driver.cuStreamWaitEvent(world.stream, world.untimed_event, 0)),
        end_capture(world.stream),
    ]
    return answers


@case
def cap_unjoined(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuStreamWaitEvent(world.other_stream, world.event, 0))
    return [
        fill(world, world.other_stream),
        end_capture(world.stream),
        fill(world, world.other_stream),
        str(driver.cuStreamIsCapturing(world.other_stream)[1]),
    ]


@case
def cap_unjoined_empty(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuStreamWaitEvent(world.other_stream, world.event, 0))
    return [end_capture(world.stream), fill(world, world.other_stream)]


@case
def cap_joined(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuStreamWaitEvent(world.other_stream, world.event, 0))
    fill(world, world.other_stream)
    must(driver.cuEventRecord(world.untimed_event, world.other_stream))
    must(driver.cuStreamWaitEvent(world.stream, world.untimed_event, 0))
    return [end_capture(world.stream), fill(world, world.other_stream)]


@case
def cap_legacy(world: World) -> Any:
    answers: list[Any] = []
    for mode in ("THREAD_LOCAL", "RELAXED"):
        begin_capture(world.blocking_stream, mode)
        fill(world, world.blocking_stream)
        answers += [
            fill(world, driver.CUstream(0)),
            fill(world, world.blocking_stream),
            end_capture(world.blocking_stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            fill(world, driver.CUstream(0)),
            status(driver.cuStreamSynchronize(driver.CUstream(0))),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_graph_launch(world: World) -> Any:
    add_memset(world, world.graph)
    exec_ = must(driver.cuGraphInstantiate(world.graph, 0))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuGraphUpload(exec_, world.stream)),
        end_capture(world.stream),
    ]


@case
def cap_graph_launch_other(world: World) -> Any:
    add_memset(world, world.graph)
    exec_ = must(driver.cuGraphInstantiate(world.graph, 0))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuGraphLaunch(exec_, world.other_stream)), end_capture(world.stream)]


@case
def cap_upload(world: World) -> Any:
    add_memset(world, world.graph)
    exec_ = must(driver.cuGraphInstantiate(world.graph, 0))
    begin_capture(world.stream)
    return [status(driver.cuGraphUpload(exec_, world.stream)), end_capture(world.stream)]


@case
def cap_instantiate(world: World) -> Any:
    add_memset(world, world.graph)
    begin_capture(world.stream)
    return [status(driver.cuGraphInstantiate(world.graph, 0)), end_capture(world.stream)]


@case
def cap_destroy(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamDestroy(world.stream))]


@case
def cap_async_mem(world: World) -> Any:
    begin_capture(world.stream)
    allocated = driver.cuMemAllocAsync(100, world.stream)
    answers = [status(allocated)]
    answers += (
        [status(driver.cuMemFreeAsync(allocated[1], world.stream)), end_capture(world.stream)]
        if not allocated[0]
        else [end_capture(world.stream)]
    )
    begin_capture(world.stream)
    answers += [status(driver.cuMemFreeAsync(world.memory, world.stream)), end_capture(world.stream)]
    return answers


@case
def cap_kinds(world: World) -> Any:
    begin_capture(world.stream)
    return [
        launch(world),
        status(driver.cuMemcpyDtoDAsync(world.other_memory, world.memory, 16, world.stream)),
        status(driver.cuLaunchHostFunc(world.stream, driver.CUhostFn(HOST_FUNCTION), 0)),
        status(driver.cuStreamWriteValue32(world.stream, world.memory, 1, 0)),
        status(driver.cuEventRecordWithFlags(world.event, world.stream, 1)),
        status(driver.cuStreamWaitEvent(world.stream, world.untimed_event, 1)),
        end_capture(world.stream),
    ]


@case
def cap_programmatic(world: World) -> Any:
    programmatic = (
        "PROGRAMMATIC_STREAM_SERIALIZATION",
        lambda value: setattr(value, "programmaticStreamSerializationAllowed", 1),
    )
    begin_capture(world.stream)
    return [
        launch(world),
        launch(world, attrs=[programmatic]),
        fill(world, world.stream),
        launch(world, attrs=[programmatic]),
        end_capture(world.stream),
    ]


@case
def cap_programmatic_event(world: World) -> Any:
    def put_event(value: Any) -> None:
        value.programmaticEvent.event = world.untimed_event
        value.programmaticEvent.flags = 0
        value.programmaticEvent.triggerAtBlockStart = 0

    def put_completion(value: Any) -> None:
        value.launchCompletionEvent.event = world.untimed_event
        value.launchCompletionEvent.flags = 0

    answers: list[Any] = []
    for put, name in ((put_event, "PROGRAMMATIC_EVENT"), (put_completion, "LAUNCH_COMPLETION_EVENT")):
        begin_capture(world.stream)
        answers += [
            launch(world, attrs=[(name, put)]),
            status(driver.cuStreamWaitEvent(world.other_stream, world.untimed_event, 0)),
            launch(world, stream=world.other_stream),
            status(driver.cuEventRecord(world.event, world.other_stream)),
            status(driver.cuStreamWaitEvent(world.stream, world.event, 0)),
            launch(world),
            end_capture(world.stream),
        ]
        begin_capture(world.stream)
        answers += [
            launch(world, attrs=[(name, put)]),
            status(driver.cuStreamWaitEvent(world.other_stream, world.untimed_event, 0)),
            fill(world, world.other_stream),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_info(world: World) -> Any:
    info = driver.cuStreamGetCaptureInfo(world.stream)
    answers = [status(info), str(info[1]), len(info)]
    begin_capture(world.stream)
    fill(world, world.stream)
    info = driver.cuStreamGetCaptureInfo(world.stream)
    answers += [status(info), str(info[1]), len(info[4]), info[6]]
    answers += [
        status(driver.cuStreamUpdateCaptureDependencies(world.stream, None, None, 0, 1)),
        fill(world, world.stream),
        end_capture(world.stream),
        status(driver.cuStreamUpdateCaptureDependencies(world.stream, None, None, 0, 1)),
    ]
    return answers


@case
def cap_to_graph(world: World) -> Any:
    a = add_memset(world, world.graph)
    other_graph = must(driver.cuGraphCreate(0))
    b = add_memset(world, other_graph)
    answers = [
        status(
            driver.cuStreamBeginCaptureToGraph(world.stream, world.graph, [b], None, 1, driver.CUstreamCaptureMode(1))
        )
    ]
    answers += [
        status(
            driver.cuStreamBeginCaptureToGraph(world.stream, world.graph, [a], None, 1, driver.CUstreamCaptureMode(1))
        ),
        fill(world, world.stream),
        status(
            driver.cuStreamBeginCaptureToGraph(
                world.other_stream, world.graph, None, None, 0, driver.CUstreamCaptureMode(1)
            )
        ),
        end_capture(world.stream),
        instantiate(world, world.graph),
    ]
    return answers


@case
def cap_to_graph_broken(world: World) -> Any:
    a = add_memset(world, world.graph)
    must(driver.cuStreamBeginCaptureToGraph(world.stream, world.graph, [a], None, 1, driver.CUstreamCaptureMode(1)))
    fill(world, world.stream)
    return [status(driver.cuStreamSynchronize(world.stream)), end_capture(world.stream)]


@case
def edges(world: World) -> Any:
    a, b, memset = (add_kernel(world, world.graph), add_kernel(world, world.graph), add_memset(world, world.graph))
    other_graph = must(driver.cuGraphCreate(0))
    foreign = add_memset(world, other_graph)

    def add(source: Any, target: Any, data: Any = None) -> Any:
        return status(driver.cuGraphAddDependencies(world.graph, [source], [target], [data] if data else None, 1))

    def remove(source: Any, target: Any, data: Any = None) -> Any:
        return status(driver.cuGraphRemoveDependencies(world.graph, [source], [target], [data] if data else None, 1))

    return [
        add(a, b),
        add(a, b),
        add(a, b, edge(1, 0, 1)),
        add(a, a),
        add(foreign, a),
        add(a, foreign),
        remove(b, a),
        remove(a, b, edge(1, 0, 1)),
        remove(a, b),
        add(memset, a, edge(1, 0, 1)),
        add(a, memset, edge(1, 0, 1)),
        add(a, memset, edge(2, 0, 0)),
        add(a, b, edge(2, 0, 0)),
        add(a, b, edge(2, 0, 1)),
        add(a, b, edge(1, 0, 0)),
        add(a, b, edge(3, 0, 0)),
        add(a, b, edge(0, 0, 1)),
        add(a, b, edge(0, 1, 0)),
        add(memset, b, edge(2, 0, 0)),
        add(b, a),
        instantiate(world, world.graph),
    ]


@case
def deps(world: World) -> Any:
    a = add_kernel(world, world.graph)
    other_graph = must(driver.cuGraphCreate(0))
    foreign = add_memset(world, other_graph)
    return [
        status(driver.cuGraphAddEmptyNode(world.graph, [a, a], 2)),
        status(driver.cuGraphAddEmptyNode(world.graph, [foreign], 1)),
        status(driver.cuGraphAddEmptyNode(world.graph, [driver.CUgraphNode(0)], 1)),
        must(driver.cuGraphGetNodes(world.graph))[1],
        [int(x) != 0 for x in must(driver.cuGraphGetNodes(world.graph, 3))[0]],
        must(driver.cuGraphGetNodes(world.graph, 3))[1],
    ]


@case
def self_cycle(world: World) -> Any:
    a, b = (add_memset(world, world.graph), add_memset(world, world.graph))
    must(driver.cuGraphAddDependencies(world.graph, [a, b], [b, a], None, 2))
    return instantiate(world, world.graph)


@case
def nodes_bad(world: World) -> Any:
    return [
        status(driver.cuGraphAddKernelNode(world.graph, None, 0, kernel_params(world, block=(0, 1, 1)))),
        status(driver.cuGraphAddKernelNode(world.graph, None, 0, kernel_params(world, block=(2000, 1, 1)))),
        status(
            driver.cuGraphAddKernelNode(world.graph, None, 0, kernel_params(world, world.bounded, block=(129, 1, 1)))
        ),
        status(driver.cuGraphAddKernelNode(world.graph, None, 0, kernel_params(world, shared=50000))),
        status(driver.cuGraphAddKernelNode(world.graph, None, 0, kernel_params(world, world.store))),
        status(driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world, width=0), world.context)),
        status(driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world, height=0), world.context)),
        status(driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world, element=3), world.context)),
        status(
            driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world, element=1, value=300), world.context)
        ),
        status(
            driver.cuGraphAddMemsetNode(
                world.graph, None, 0, memset_params(world, dst=driver.CUdeviceptr(5)), world.context
            )
        ),
        status(
            driver.cuGraphAddMemsetNode(
                world.graph, None, 0, memset_params(world, dst=driver.CUdeviceptr(int(world.memory) + 2)), world.context
            )
        ),
        status(
            driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world, height=2, pitch=8), world.context)
        ),
        status(driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world), driver.CUcontext(0))),
        status(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world, size=0), world.context)),
        status(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world, height=0), world.context)),
        status(
            driver.cuGraphAddMemcpyNode(
                world.graph, None, 0, copy_params(world, src=driver.CUdeviceptr(5)), world.context
            )
        ),
        status(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world, size=1 << 26), world.context)),
        status(
            driver.cuGraphAddMemcpyNode(
                world.graph, None, 0, copy_params(world, size=16, height=2, pitch=8), world.context
            )
        ),
        status(
            driver.cuGraphAddMemcpyNode(
                world.graph, None, 0, copy_params(world, dst=world.host.ctypes.data, to_host=True), world.context
            )
        ),
        status(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world, dst=world.pinned), world.context)),
        status(driver.cuGraphAddMemFreeNode(world.graph, None, 0, world.memory)),
        status(driver.cuGraphAddMemAllocNode(world.graph, None, 0, alloc_params(0))),
        status(driver.cuGraphAddMemAllocNode(world.graph, None, 0, alloc_params(1 << 50))),
    ]


@case
def batch_bad(world: World) -> Any:
    def operation_of(kind: Any = "WRITE_VALUE_32", addr: Any = None, flags: Any = 0) -> Any:
        params = driver.CUstreamBatchMemOpParams()
        kind_ = getattr(driver.CUstreamBatchMemOpType, "CU_STREAM_MEM_OP_" + kind)
        operation = params.waitValue if "WAIT" in kind else params.writeValue
        operation.operation = kind_
        operation.address = driver.CUdeviceptr(int(addr if addr is not None else world.memory))
        operation.flags = flags
        params.operation = kind_
        return params

    def add(*ops: Any, flags: Any = 0, count: Any = None) -> Any:
        operation = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        operation.ctx = world.context
        operation.paramArray = list(ops)
        operation.count = len(ops) if count is None else count
        operation.flags = flags
        return status(driver.cuGraphAddBatchMemOpNode(world.graph, None, 0, operation))

    return [
        add(operation_of()),
        add(),
        add(operation_of(addr=int(world.memory) + 1)),
        add(operation_of(addr=5)),
        add(operation_of("WRITE_VALUE_64", addr=int(world.memory) + 4)),
        add(operation_of(), flags=1),
        add(operation_of("WAIT_VALUE_32", flags=9)),
        add(*[operation_of()] * 256),
        add(*[operation_of()] * 257),
        add(operation_of("BARRIER")),
        add(operation_of("FLUSH_REMOTE_WRITES")),
        instantiate(world, world.graph),
    ]


@case
def cond_bad(world: World) -> Any:
    other_graph = must(driver.cuGraphCreate(0))
    foreign = must(driver.cuGraphConditionalHandleCreate(other_graph, world.context, 0, 1))
    answers: list[Any] = []

    def attempt(act: Any) -> None:
        try:
            act()
            answers.append("SUCCESS")
        except RefusedError as refused:
            answers.append(str(refused))

    attempt(lambda: add_conditional(world, world.graph, handle=foreign))
    attempt(lambda: add_conditional(world, world.graph, size=0))
    attempt(lambda: add_conditional(world, world.graph, size=3))
    attempt(lambda: add_conditional(world, world.graph, "WHILE", 2))
    attempt(lambda: add_conditional(world, world.graph, "SWITCH", 0))
    attempt(lambda: add_conditional(world, world.graph, "SWITCH", 5))
    attempt(lambda: add_conditional(world, world.graph, handle=driver.CUgraphConditionalHandle(0)))
    handle = must(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 0, 1))
    attempt(lambda: add_conditional(world, world.graph, handle=handle))
    attempt(lambda: add_conditional(world, world.graph, handle=handle))
    answers.append(status(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 0, 2)))
    answers.append(status(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 7, 0)))
    answers.append(instantiate(world, world.graph))
    return answers


@case
def cond_unused(world: World) -> Any:
    add_memset(world, world.graph)
    must(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 0, 1))
    return instantiate(world, world.graph)


@case
def cond_nested_handle(world: World) -> Any:
    _, (body,) = add_conditional(world, world.graph)
    handle = must(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 0, 1))
    answers: list[Any] = []
    try:
        add_conditional(world, body, handle=handle)
        answers.append("SUCCESS")
    except RefusedError as refused:
        answers.append(str(refused))
    answers.append(instantiate(world, world.graph))
    return answers


@case
def cond_body_kinds(world: World) -> Any:
    answers: list[Any] = []

    def attempt(name: Any, add: Any) -> None:
        graph = must(driver.cuGraphCreate(0))
        _, (body,) = add_conditional(world, graph)
        result = add(body)
        answers.append([name, status(result) if isinstance(result, tuple) else result, instantiate(world, graph)])

    attempt("kernel", lambda body: driver.cuGraphAddKernelNode(body, None, 0, kernel_params(world)))
    attempt("memset", lambda body: driver.cuGraphAddMemsetNode(body, None, 0, memset_params(world), world.context))
    attempt("memcpy", lambda body: driver.cuGraphAddMemcpyNode(body, None, 0, copy_params(world), world.context))
    attempt(
        "memcpy host",
        lambda body: driver.cuGraphAddMemcpyNode(
            body, None, 0, copy_params(world, dst=world.host.ctypes.data, to_host=True), world.context
        ),
    )
    attempt(
        "memcpy pinned",
        lambda body: driver.cuGraphAddMemcpyNode(body, None, 0, copy_params(world, dst=world.pinned), world.context),
    )
    attempt("empty", lambda body: driver.cuGraphAddEmptyNode(body, None, 0))
    attempt("host", lambda body: driver.cuGraphAddHostNode(body, None, 0, host_params()))
    attempt("record", lambda body: driver.cuGraphAddEventRecordNode(body, None, 0, world.event))
    attempt("wait", lambda body: driver.cuGraphAddEventWaitNode(body, None, 0, world.event))
    attempt("alloc", lambda body: driver.cuGraphAddMemAllocNode(body, None, 0, alloc_params()))

    def ops(body: Any) -> Any:
        operation = driver.CUstreamBatchMemOpParams()
        kind = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        operation.writeValue.operation = kind
        operation.writeValue.address = world.memory
        operation.operation = kind
        params = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        params.ctx = world.context
        params.paramArray = [operation]
        params.count = 1
        return driver.cuGraphAddBatchMemOpNode(body, None, 0, params)

    attempt("ops", ops)

    def child(body: Any) -> Any:
        graph = must(driver.cuGraphCreate(0))
        add_memset(world, graph)
        return driver.cuGraphAddChildGraphNode(body, None, 0, graph)

    attempt("child", child)

    def child_with_host(body: Any) -> Any:
        graph = must(driver.cuGraphCreate(0))
        must(driver.cuGraphAddHostNode(graph, None, 0, host_params()))
        return driver.cuGraphAddChildGraphNode(body, None, 0, graph)

    attempt("child with host", child_with_host)
    attempt("nothing", lambda body: "none")
    return answers


@case
def exclusive(world: World) -> Any:
    answers: list[Any] = []
    graph = must(driver.cuGraphCreate(0))
    add_conditional(world, graph)
    exec_ = instantiate(world, graph, destroy=False)
    answers += [
        instantiate(world, graph),
        status(driver.cuGraphExecDestroy(exec_)),
        instantiate(world, graph),
        status(driver.cuGraphClone(graph)),
        status(driver.cuGraphAddChildGraphNode(world.graph, None, 0, graph)),
        status(move_child(world, world.graph, graph)),
    ]
    graph = must(driver.cuGraphCreate(0))
    params = alloc_params()
    alloc = must(driver.cuGraphAddMemAllocNode(graph, None, 0, params))
    free = must(driver.cuGraphAddMemFreeNode(graph, [alloc], 1, params.dptr))
    exec_ = instantiate(world, graph, destroy=False)
    answers += [
        instantiate(world, graph),
        status(driver.cuGraphExecDestroy(exec_)),
        instantiate(world, graph),
        status(driver.cuGraphClone(graph)),
        status(driver.cuGraphAddChildGraphNode(world.graph, None, 0, graph)),
        status(driver.cuGraphDestroyNode(free)),
        status(driver.cuGraphRemoveDependencies(graph, [alloc], [free], None, 1)),
        status(driver.cuGraphAddMemFreeNode(graph, [alloc], 1, params.dptr)),
        status(move_child(world, world.graph, graph)),
        instantiate(world, graph),
        instantiate(world, world.graph),
        status(move_child(world, world.graph, graph)),
        status(driver.cuGraphDestroy(graph)),
    ]
    return answers


@case
def moved_child(world: World) -> Any:
    graph = must(driver.cuGraphCreate(0))
    add_memset(world, graph)
    instantiate(world, graph, destroy=False)
    answers = [status(move_child(world, world.graph, graph))]
    other_graph = must(driver.cuGraphCreate(0))
    add_memset(world, other_graph)
    answers += [
        status(move_child(world, world.graph, other_graph)),
        instantiate(world, other_graph),
        status(driver.cuGraphClone(other_graph)),
        status(driver.cuGraphAddChildGraphNode(world.graph, None, 0, world.graph)),
        status(move_child(world, world.graph, world.graph)),
        status(driver.cuGraphAddChildGraphNode(other_graph, None, 0, world.graph)),
    ]
    return answers


@case
def body_graph(world: World) -> Any:
    node, (body,) = add_conditional(world, world.graph)
    add_memset(world, body)
    return [
        instantiate(world, body),
        status(driver.cuGraphClone(body)),
        status(driver.cuGraphAddChildGraphNode(must(driver.cuGraphCreate(0)), None, 0, body)),
        status(driver.cuGraphDestroyNode(node)),
        instantiate(world, world.graph),
    ]


@case
def node_kinds(world: World) -> Any:
    kernel, memset = (add_kernel(world, world.graph), add_memset(world, world.graph))
    must(driver.cuGraphAddHostNode(world.graph, None, 0, host_params()))
    return [
        status(driver.cuGraphKernelNodeGetParams(memset)),
        status(driver.cuGraphMemsetNodeGetParams(kernel)),
        status(driver.cuGraphMemcpyNodeGetParams(kernel)),
        status(driver.cuGraphHostNodeGetParams(kernel)),
        status(driver.cuGraphChildGraphNodeGetGraph(kernel)),
        status(driver.cuGraphEventRecordNodeGetEvent(kernel)),
        status(driver.cuGraphMemAllocNodeGetParams(kernel)),
        status(driver.cuGraphKernelNodeSetParams(memset, kernel_params(world))),
        status(driver.cuGraphMemsetNodeSetParams(kernel, memset_params(world))),
        status(driver.cuGraphKernelNodeGetAttribute(memset, driver.CUlaunchAttributeID(8))),
        status(driver.cuGraphKernelNodeGetAttribute(kernel, driver.CUlaunchAttributeID(8))),
    ]


@case
def node_attributes(world: World) -> Any:
    kernel = add_kernel(world, world.graph, params=kernel_params(world, grid=(4, 1, 1)))

    def set_to(name: Any, put: Any, node: Any = None) -> Any:
        value = driver.CUkernelNodeAttrValue()
        put(value)
        return status(
            driver.cuGraphKernelNodeSetAttribute(
                node or kernel, getattr(driver.CUlaunchAttributeID, "CU_LAUNCH_ATTRIBUTE_" + name), value
            )
        )

    def put_event(value: Any) -> None:
        value.programmaticEvent.event = world.untimed_event

    def put_completion(value: Any) -> None:
        value.launchCompletionEvent.event = world.untimed_event

    def put_updatable(value: Any) -> None:
        value.deviceUpdatableKernelNode.deviceUpdatable = 1

    answers = [
        set_to(*cluster(3)),
        set_to(*cluster(2)),
        set_to(*cluster(16)),
        set_to("COOPERATIVE", lambda value: setattr(value, "cooperative", 1)),
        set_to(
            "PROGRAMMATIC_STREAM_SERIALIZATION",
            lambda value: setattr(value, "programmaticStreamSerializationAllowed", 1),
        ),
        set_to("PROGRAMMATIC_EVENT", put_event),
        set_to("LAUNCH_COMPLETION_EVENT", put_completion),
        set_to("PRIORITY", lambda value: setattr(value, "priority", -100)),
        must(driver.cuGraphKernelNodeGetAttribute(kernel, driver.CUlaunchAttributeID(8))).priority,
        set_to("NVLINK_UTIL_CENTRIC_SCHEDULING", lambda value: setattr(value, "nvlinkUtilCentricScheduling", 1)),
        set_to("DEVICE_UPDATABLE_KERNEL_NODE", put_updatable),
        instantiate(world, world.graph),
        status(driver.cuGraphClone(world.graph)),
        status(driver.cuGraphDestroyNode(kernel)),
    ]

    def put_preferred(value: Any) -> None:
        value.preferredClusterDim.x, value.preferredClusterDim.y, value.preferredClusterDim.z = (4, 1, 1)

    preferred = add_kernel(world, must(driver.cuGraphCreate(0)), params=kernel_params(world, grid=(4, 1, 1)))
    answers += [
        set_to("PREFERRED_CLUSTER_DIMENSION", put_preferred, preferred),
        set_to(*cluster(2), node=preferred),
        set_to("PREFERRED_CLUSTER_DIMENSION", put_preferred, preferred),
    ]
    graph = must(driver.cuGraphCreate(0))
    node = add_kernel(world, graph, params=kernel_params(world, grid=(4, 1, 1)))
    answers += [
        set_to(*cluster(2), node=node),
        status(driver.cuGraphKernelNodeSetParams(node, kernel_params(world, grid=(3, 1, 1)))),
        instantiate(world, graph),
    ]
    graph = must(driver.cuGraphCreate(0))
    node = add_kernel(world, graph, params=kernel_params(world, grid=(132 * 32 + 1, 1, 1)))
    answers += [
        set_to("COOPERATIVE", lambda value: setattr(value, "cooperative", 1), node=node),
        instantiate(world, graph),
    ]
    value = must(driver.cuGraphKernelNodeGetAttribute(preferred, driver.CUlaunchAttributeID(4))).clusterDim
    answers.append([value.x, value.y, value.z])
    return answers


@case
def execs(world: World) -> Any:
    kernel, memset, copy = (
        add_kernel(world, world.graph, params=store_params(world)),
        add_memset(world, world.graph),
        must(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world), world.context)),
    )
    host = must(driver.cuGraphAddHostNode(world.graph, None, 0, host_params()))
    other_graph = must(driver.cuGraphCreate(0))
    foreign = add_memset(world, other_graph)
    exec_ = instantiate(world, world.graph, destroy=False)
    late = add_memset(world, world.graph)
    return [
        status(driver.cuGraphExecKernelNodeSetParams(exec_, kernel, store_params(world, world.other_memory))),
        status(driver.cuGraphExecKernelNodeSetParams(exec_, kernel, kernel_params(world))),
        status(driver.cuGraphExecKernelNodeSetParams(exec_, kernel, kernel_params(world, block=(0, 1, 1)))),
        status(
            driver.cuGraphExecKernelNodeSetParams(exec_, kernel, kernel_params(world, world.bounded, block=(129, 1, 1)))
        ),
        status(driver.cuGraphExecKernelNodeSetParams(exec_, memset, kernel_params(world))),
        status(
            driver.cuGraphExecMemsetNodeSetParams(exec_, memset, memset_params(world, value=2, width=9), world.context)
        ),
        status(
            driver.cuGraphExecMemsetNodeSetParams(
                exec_, memset, memset_params(world, element=1, width=9), world.context
            )
        ),
        status(
            driver.cuGraphExecMemsetNodeSetParams(
                exec_, memset, memset_params(world, dst=driver.CUdeviceptr(world.pinned)), world.context
            )
        ),
        status(
            driver.cuGraphExecMemsetNodeSetParams(
                exec_, memset, memset_params(world, height=2, pitch=64), world.context
            )
        ),
        status(driver.cuGraphExecMemsetNodeSetParams(exec_, memset, memset_params(world, width=0), world.context)),
        status(driver.cuGraphExecMemsetNodeSetParams(exec_, foreign, memset_params(world), world.context)),
        status(driver.cuGraphExecMemsetNodeSetParams(exec_, late, memset_params(world), world.context)),
        status(driver.cuGraphExecMemcpyNodeSetParams(exec_, copy, copy_params(world, size=32), world.context)),
        status(
            driver.cuGraphExecMemcpyNodeSetParams(
                exec_, copy, copy_params(world, dst=world.host.ctypes.data, to_host=True), world.context
            )
        ),
        status(driver.cuGraphExecMemcpyNodeSetParams(exec_, copy, copy_params(world, dst=world.pinned), world.context)),
        status(
            driver.cuGraphExecMemcpyNodeSetParams(exec_, copy, copy_params(world, height=2, pitch=64), world.context)
        ),
        status(driver.cuGraphExecMemcpyNodeSetParams(exec_, copy, copy_params(world, size=0), world.context)),
        status(driver.cuGraphNodeSetEnabled(exec_, kernel, 0)),
        status(driver.cuGraphNodeSetEnabled(exec_, host, 0)),
        status(driver.cuGraphNodeGetEnabled(exec_, host)),
        status(driver.cuGraphNodeSetEnabled(exec_, late, 0)),
        status(driver.cuGraphNodeSetEnabled(exec_, foreign, 0)),
        status(driver.cuGraphExecHostNodeSetParams(exec_, host, host_params())),
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def execs_2d(world: World) -> Any:
    memset = add_memset(world, world.graph, height=2, pitch=64)
    copy = must(
        driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world, height=2, pitch=64), world.context)
    )
    exec_ = instantiate(world, world.graph, destroy=False)
    return [
        status(
            driver.cuGraphExecMemsetNodeSetParams(
                exec_, memset, memset_params(world, dst=world.other_memory, value=3, height=2, pitch=64), world.context
            )
        ),
        status(
            driver.cuGraphExecMemsetNodeSetParams(
                exec_, memset, memset_params(world, height=3, pitch=64), world.context
            )
        ),
        status(driver.cuGraphExecMemsetNodeSetParams(exec_, memset, memset_params(world), world.context)),
        status(
            driver.cuGraphExecMemcpyNodeSetParams(
                exec_,
                copy,
                copy_params(world, dst=world.memory, src=world.other_memory, height=2, pitch=64),
                world.context,
            )
        ),
        status(
            driver.cuGraphExecMemcpyNodeSetParams(exec_, copy, copy_params(world, height=3, pitch=64), world.context)
        ),
        status(driver.cuGraphExecMemcpyNodeSetParams(exec_, copy, copy_params(world), world.context)),
    ]


@case
def exec_removed(world: World) -> Any:
    first = add_memset(world, world.graph)
    second = add_memset(world, world.graph, [first])
    exec_ = instantiate(world, world.graph, destroy=False)
    must(driver.cuGraphDestroyNode(second))
    return [
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuGraphExecMemsetNodeSetParams(exec_, first, memset_params(world), world.context)),
        status(driver.cuGraphDestroy(world.graph)),
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def updates(world: World) -> Any:
    answers: list[Any] = []

    def build(kind: Any) -> Any:
        graph = must(driver.cuGraphCreate(0))
        names = {}
        first = add_kernel(world, graph, params=store_params(world))
        names[int(first)] = "a"
        if kind == "chain":
            second = add_memset(world, graph, [first])
        elif kind == "alone":
            second = add_memset(world, graph)
        elif kind == "kernel":
            second = add_kernel(world, graph, [first])
        elif kind == "short":
            return (graph, names)
        elif kind == "long":
            second = add_memset(world, graph, [first])
            names[int(add_memset(world, graph, [second]))] = "c"
        elif kind == "2d":
            second = add_memset(world, graph, [first], height=2, pitch=64)
        elif kind == "pinned":
            second = add_memset(world, graph, [first], dst=driver.CUdeviceptr(world.pinned))
        elif kind == "width":
            second = add_memset(world, graph, [first], width=100)
        elif kind == "first":
            second = must(driver.cuGraphAddEmptyNode(graph, [first], 1))
        elif kind == "func":
            must(driver.cuGraphDestroyNode(first))
            first = add_kernel(world, graph)
            names[int(first)] = "a"
            second = add_memset(world, graph, [first])
        elif kind == "reordered":
            must(driver.cuGraphDestroyNode(first))
            second = add_memset(world, graph)
            first = add_kernel(world, graph, params=store_params(world))
            must(driver.cuGraphAddDependencies(graph, [first], [second], None, 1))
            names[int(first)] = "a"
        elif kind == "coop":
            second = add_memset(world, graph, [first])
            value = driver.CUkernelNodeAttrValue()
            value.cooperative = 1
            must(driver.cuGraphKernelNodeSetAttribute(first, driver.CUlaunchAttributeID(2), value))
        elif kind == "cluster":
            second = add_memset(world, graph, [first])
            value = driver.CUkernelNodeAttrValue()
            value.clusterDim.x = value.clusterDim.y = value.clusterDim.z = 1
            must(driver.cuGraphKernelNodeSetAttribute(first, driver.CUlaunchAttributeID(4), value))
        elif kind == "reversed":
            second = add_memset(world, graph)
            must(driver.cuGraphAddDependencies(graph, [second], [first], None, 1))
        names[int(second)] = "b"
        return (graph, names)

    for kind in [
        "chain",
        "alone",
        "kernel",
        "short",
        "long",
        "2d",
        "pinned",
        "width",
        "first",
        "func",
        "reordered",
        "coop",
        "cluster",
        "reversed",
    ]:
        graph, _ = build("chain")
        exec_ = instantiate(world, graph, destroy=False)
        other_graph, other_names = build(kind)
        answers.append([kind, update_exec(exec_, other_graph, other_names)])
    graph, _ = build("kernel")
    exec_ = instantiate(world, graph, destroy=False)
    other_graph = must(driver.cuGraphCreate(0))
    first = add_kernel(world, other_graph, params=store_params(world))
    second = add_kernel(world, other_graph)
    other_names = {int(first): "a", int(second): "b"}
    must(driver.cuGraphAddDependencies(other_graph, [first], [second], [edge(1, 0, 1)], 1))
    answers.append(["port", update_exec(exec_, other_graph, other_names)])
    return answers


@case
def update_more(world: World) -> Any:
    answers: list[Any] = []

    def build(kind: Any, turn: Any) -> Any:
        graph = must(driver.cuGraphCreate(0))
        if kind == "cond":
            add_conditional(world, graph)
        elif kind == "while":
            add_conditional(world, graph, "WHILE")
        elif kind == "if2":
            add_conditional(world, graph, size=2)
        elif kind == "alloc":
            params = alloc_params()
            before = must(driver.cuGraphAddMemAllocNode(graph, None, 0, params))
            must(driver.cuGraphAddMemFreeNode(graph, [before], 1, params.dptr))
        elif kind == "event":
            must(driver.cuGraphAddEventRecordNode(graph, None, 0, (world.event, world.untimed_event)[turn]))
        elif kind == "host":
            must(driver.cuGraphAddHostNode(graph, None, 0, host_params()))
        elif kind == "child":
            child = must(driver.cuGraphCreate(0))
            add_memset(world, child, value=turn + 1)
            must(driver.cuGraphAddChildGraphNode(graph, None, 0, child))
        elif kind == "child2":
            child = must(driver.cuGraphCreate(0))
            add_memset(world, child)
            add_memset(world, child)
            must(driver.cuGraphAddChildGraphNode(graph, None, 0, child))
        elif kind == "two":
            add_memset(world, graph)
            add_kernel(world, graph)
        elif kind == "two swapped":
            add_kernel(world, graph)
            add_memset(world, graph)
        return graph

    for before, after in (
        ("cond", "cond"),
        ("cond", "while"),
        ("cond", "if2"),
        ("alloc", "alloc"),
        ("event", "event"),
        ("host", "host"),
        ("child", "child"),
        ("child", "child2"),
        ("two", "two swapped"),
    ):
        graph = build(before, 0)
        exec_ = instantiate(world, graph, destroy=False)
        answers.append([before, after, update_exec(exec_, build(after, 1))])
    graph = build("child", 0)
    node = must(driver.cuGraphGetNodes(graph, 1))[0][0]
    exec_ = instantiate(world, graph, destroy=False)
    child = must(driver.cuGraphCreate(0))
    add_memset(world, child)
    add_memset(world, child)
    other_child = must(driver.cuGraphCreate(0))
    add_memset(world, other_child, value=5)
    answers += [
        status(driver.cuGraphExecChildGraphNodeSetParams(exec_, node, child)),
        status(driver.cuGraphExecChildGraphNodeSetParams(exec_, node, other_child)),
    ]
    return answers


@case
def alloc_launch(world: World) -> Any:
    graph = must(driver.cuGraphCreate(0))
    params = alloc_params()
    must(driver.cuGraphAddMemAllocNode(graph, None, 0, params))
    exec_ = instantiate(world, graph, destroy=False)
    answers = [
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuMemFreeAsync(params.dptr, world.stream)),
        status(driver.cuMemFreeAsync(params.dptr, world.stream)),
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuMemFree(params.dptr)),
        status(driver.cuMemFree(params.dptr)),
        status(driver.cuGraphLaunch(exec_, world.stream)),
    ]
    freeing = must(driver.cuGraphCreate(0))
    must(driver.cuGraphAddMemFreeNode(freeing, None, 0, params.dptr))
    freeing_exec = instantiate(world, freeing, destroy=False)
    answers += [
        status(driver.cuGraphLaunch(freeing_exec, world.stream)),
        status(driver.cuGraphLaunch(freeing_exec, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuGraphExecDestroy(exec_)),
        status(driver.cuGraphDestroy(graph)),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuMemsetD8(params.dptr, 1, 16)),
        status(driver.cuMemFree(params.dptr)),
    ]
    return answers


@case
def alloc_unlaunched(world: World) -> Any:
    params = alloc_params()
    must(driver.cuGraphAddMemAllocNode(world.graph, None, 0, params))
    return [
        status(driver.cuMemFree(params.dptr)),
        status(driver.cuMemFreeAsync(params.dptr, world.stream)),
        status(driver.cuPointerGetAttribute(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, params.dptr)),
        status(driver.cuGraphAddMemsetNode(world.graph, None, 0, memset_params(world, dst=params.dptr), world.context)),
        int(params.dptr) % 4096,
    ]


@case
def flags(world: World) -> Any:
    answers: list[Any] = []
    for flag in (0, 1, 2, 4, 5, 8, 16, 32, 6):
        graph = must(driver.cuGraphCreate(0))
        add_memset(world, graph)
        answers.append([flag, instantiate(world, graph, flag)])
    graph = must(driver.cuGraphCreate(0))
    must(driver.cuGraphAddHostNode(graph, None, 0, host_params()))
    answers.append(["host", instantiate(world, graph, 4)])
    answers.append(
        [
            "nothing",
            instantiate(world, must(driver.cuGraphCreate(0)), 4),
            instantiate(world, must(driver.cuGraphCreate(0))),
        ]
    )
    graph = must(driver.cuGraphCreate(0))
    add_conditional(world, graph)
    answers.append(["cond", instantiate(world, graph, 4)])
    graph = must(driver.cuGraphCreate(0))
    add_memset(world, graph)
    exec_ = instantiate(world, graph, 4, destroy=False)
    answers.append(
        [
            int(must(driver.cuGraphExecGetFlags(exec_))),
            status(driver.cuGraphLaunch(exec_, world.stream)),
            status(driver.cuStreamSynchronize(world.stream)),
        ]
    )
    answers.append(status(driver.cuGraphCreate(1)))
    return answers


@case
def vmm(world: World) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    granularities = [
        must(driver.cuMemGetAllocationGranularity(properties, driver.CUmemAllocationGranularity_flags(index)))
        for index in (0, 1)
    ]
    granularity = granularities[0]
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    answers = [
        granularities,
        status(driver.cuMemCreate(granularity + 1, properties, 0)),
        status(driver.cuMemCreate(0, properties, 0)),
        status(driver.cuMemAddressReserve(granularity + 1, 0, 0, 0)),
        status(driver.cuMemAddressReserve(0, 0, 0, 0)),
        status(driver.cuMemAddressReserve(granularity, 3, 0, 0)),
    ]
    handle = must(driver.cuMemCreate(2 * granularity, properties, 0))
    base = must(driver.cuMemAddressReserve(4 * granularity, 0, 0, 0))

    def at(index: Any) -> Any:
        return driver.CUdeviceptr(int(base) + index * granularity)

    answers += [
        status(driver.cuMemMap(at(0), 3 * granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(0), granularity, 1, handle, 0)),
        status(driver.cuMemMap(driver.CUdeviceptr(int(base) + 4096), granularity, 0, handle, 0)),
        status(driver.cuMemMap(driver.CUdeviceptr(int(world.memory)), granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(3), 2 * granularity, 0, handle, 0)),
        status(driver.cuMemSetAccess(at(0), granularity, [access], 1)),
        status(driver.cuMemMap(at(0), 2 * granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(1), granularity, 0, handle, 0)),
        status(driver.cuMemMap(at(2), 2 * granularity, 0, handle, 0)),
        status(driver.cuMemsetD8(at(0), 1, 16)),
        status(driver.cuMemSetAccess(at(0), granularity, [access], 1)),
        status(driver.cuMemSetAccess(at(0), 4 * granularity, [access], 1)),
        status(driver.cuMemSetAccess(at(0), 5 * granularity, [access], 1)),
        status(driver.cuMemsetD8(at(0), 1, 2 * granularity)),
        status(driver.cuMemUnmap(at(0), granularity)),
        status(driver.cuMemUnmap(at(0), 3 * granularity)),
        status(driver.cuMemAddressFree(at(0), 4 * granularity)),
        status(driver.cuMemRelease(handle)),
        status(driver.cuMemUnmap(at(0), 4 * granularity)),
        status(driver.cuMemAddressFree(at(0), 2 * granularity)),
        status(driver.cuMemAddressFree(at(0), 4 * granularity)),
        status(driver.cuMemUnmap(at(0), 4 * granularity)),
    ]
    return answers


@case
def vmm_share(world: World) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = must(driver.cuMemCreate(1 << 21, properties, 0))
    handle_type = driver.CUmemAllocationHandleType
    answers = [
        status(driver.cuMemExportToShareableHandle(handle, handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
    ]
    properties.requestedHandleTypes = handle_type.CU_MEM_HANDLE_TYPE_FABRIC
    answers.append(status(driver.cuMemCreate(1 << 21, properties, 0)))
    properties.requestedHandleTypes = handle_type.CU_MEM_HANDLE_TYPE_WIN32
    answers.append(status(driver.cuMemCreate(1 << 21, properties, 0)))
    properties.requestedHandleTypes = handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    handle = must(driver.cuMemCreate(1 << 21, properties, 0))
    result = driver.cuMemExportToShareableHandle(handle, handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
    answers += [status(result), type(result[1]).__name__]
    result = driver.cuMemImportFromShareableHandle(int(result[1]), handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    answers += [
        status(result),
        status(
            driver.cuMemImportFromShareableHandle(
                os.open("/dev/null", os.O_RDWR), handle_type.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            )
        ),
        status(driver.cuMemExportToShareableHandle(handle, handle_type.CU_MEM_HANDLE_TYPE_FABRIC, 0)),
    ]
    return answers


@case
def ipc(world: World) -> Any:
    result = driver.cuIpcGetMemHandle(world.memory)
    answers = [
        status(result),
        status(driver.cuIpcOpenMemHandle(result[1], 1)),
        status(driver.cuIpcGetMemHandle(world.pinned)),
        status(driver.cuIpcGetMemHandle(driver.CUdeviceptr(int(world.memory) + 8))),
        status(driver.cuIpcCloseMemHandle(world.memory)),
        status(driver.cuIpcGetMemHandle(driver.CUdeviceptr(5))),
    ]
    pooled = must(driver.cuMemAllocAsync(100, world.stream))
    answers.append(status(driver.cuIpcGetMemHandle(pooled)))
    return answers


@case
def modules(world: World) -> Any:
    return [
        status(driver.cuModuleGetFunction(world.module, b"nope")),
        status(driver.cuModuleGetGlobal(world.module, b"nope")),
        status(driver.cuModuleLoadData(b"nonsense\x00")),
        status(
            driver.cuModuleLoadData(
                b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() { foo.bar %r1; }\x00"
            )
        ),
        status(driver.cuModuleLoad(b"/no/such/file")),
        status(driver.cuFuncGetParamInfo(world.empty, 0)),
        driver.cuFuncGetParamInfo(world.store, 1)[1:],
        must(driver.cuModuleGetFunctionCount(world.module)),
        status(
            driver.cuModuleLoadData(b".version 8.0\n.target sm_100\n.address_size 64\n.visible .entry k() { ret; }\x00")
        ),
        status(
            driver.cuModuleLoadData(b".version 99.0\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\x00")
        ),
    ]


@case
def contexts(world: World) -> Any:
    return [
        status(driver.cuCtxPopCurrent()),
        status(driver.cuCtxPopCurrent()),
        status(driver.cuMemAlloc(16)),
        status(driver.cuCtxSynchronize()),
        status(driver.cuStreamCreate(0)),
        status(driver.cuMemcpyDtoH(world.host, world.memory, 4)),
        status(driver.cuStreamSynchronize(world.stream)),
        fill(world, world.stream),
        status(driver.cuEventCreate(0)),
        status(driver.cuGraphCreate(0)),
        status(driver.cuMemFree(world.memory)),
        status(driver.cuModuleLoadData(PTX)),
        status(driver.cuDeviceGet(99)),
        status(driver.cuDevicePrimaryCtxGetState(0)),
    ]


@case
def sticky(world: World) -> Any:
    return [
        status(
            driver.cuLaunchKernel(
                world.store, 1, 1, 1, 1, 1, 1, 0, world.stream, ((64, 1), (ctypes.c_uint64, ctypes.c_uint32)), 0
            )
        ),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuMemAlloc(16)),
        status(driver.cuMemFree(world.memory)),
        status(driver.cuStreamQuery(world.other_stream)),
        status(driver.cuGraphCreate(0)),
        status(driver.cuEventCreate(0)),
        status(driver.cuCtxGetCurrent()),
        status(driver.cuDeviceGetAttribute(driver.CUdevice_attribute(1), 0)),
        status(driver.cuCtxSetCurrent(world.context)),
        status(driver.cuCtxPushCurrent(world.context)),
        status(driver.cuCtxPopCurrent()),
        status(driver.cuStreamDestroy(world.other_stream)),
        status(driver.cuModuleUnload(world.module)),
        status(driver.cuFuncGetAttribute(driver.CUfunction_attribute(0), world.empty)),
        status(driver.cuMemGetInfo()),
        status(driver.cuDevicePrimaryCtxReset(0)),
        status(driver.cuMemAlloc(16)),
        status(driver.cuCtxSynchronize()),
        status(driver.cuDevicePrimaryCtxRetain(0)),
        status(driver.cuCtxSetCurrent(world.context)),
        status(driver.cuMemAlloc(16)),
    ]


@case
def host_calls(world: World) -> Any:
    answers: list[Any] = []
    function_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def call(_: Any) -> None:
        answers.append(
            [
                status(driver.cuMemAlloc(16)),
                status(driver.cuStreamQuery(world.other_stream)),
                status(driver.cuEventCreate(0)),
                status(driver.cuCtxGetCurrent()),
                status(driver.cuDeviceGetCount()),
                status(driver.cuGraphCreate(0)),
            ]
        )

    function = function_type(call)
    launched = status(
        driver.cuLaunchHostFunc(world.stream, driver.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0)
    )
    synchronized = status(driver.cuStreamSynchronize(world.stream))
    return [launched, synchronized, answers]


@case
def zero_handles(world: World) -> Any:
    return [
        status(driver.cuGraphInstantiate(driver.CUgraph(0), 0)),
        status(driver.cuGraphLaunch(driver.CUgraphExec(0), world.stream)),
        status(driver.cuEventRecord(driver.CUevent(0), world.stream)),
        status(driver.cuLaunchKernel(driver.CUfunction(0), 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuGraphAddEmptyNode(driver.CUgraph(0), None, 0)),
        status(driver.cuModuleGetFunction(driver.CUmodule(0), b"x")),
        status(driver.cuStreamDestroy(driver.CUstream(0))),
        status(driver.cuEventQuery(driver.CUevent(0))),
        status(driver.cuGraphNodeGetType(driver.CUgraphNode(0))),
        status(driver.cuCtxPushCurrent(driver.CUcontext(0))),
        status(driver.cuMemPoolDestroy(driver.CUmemoryPool(0))),
        status(driver.cuGraphExecDestroy(driver.CUgraphExec(0))),
        status(driver.cuGraphDestroy(driver.CUgraph(0))),
    ]


@case
def get_counts(world: World) -> Any:
    first = add_kernel(world, world.graph)
    add_memset(world, world.graph, [first])
    add_memset(world, world.graph, [first])
    edges = driver.cuGraphGetEdges(world.graph, 5)
    dependents = driver.cuGraphNodeGetDependentNodes(first, 1)
    return [
        len(edges[1]),
        len(edges[3]),
        edges[4],
        [int(x) != 0 for x in edges[1]],
        len(dependents[1]),
        dependents[3],
        driver.cuGraphGetNodes(world.graph, 2)[2],
        driver.cuGraphGetRootNodes(world.graph)[2],
        len(driver.cuGraphGetNodes(world.graph)[1]),
    ]


@case
def params_back(world: World) -> Any:
    memset = add_memset(world, world.graph, pitch=99)
    memset_back = must(driver.cuGraphMemsetNodeGetParams(memset))
    copy = must(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world), world.context))
    copy_back = must(driver.cuGraphMemcpyNodeGetParams(copy))
    begin_capture(world.stream)
    driver.cuMemsetD8Async(world.memory, 1, 10, world.stream)
    driver.cuMemsetD2D32Async(world.memory, 64, 1, 4, 2, world.stream)
    driver.cuMemcpyDtoDAsync(world.other_memory, world.memory, 16, world.stream)
    graph = must(driver.cuStreamEndCapture(world.stream))
    nodes = must(driver.cuGraphGetNodes(graph, 3))[0]

    def fields(node: Any) -> Any:
        return (lambda params: [params.value, params.elementSize, params.width, params.height, int(params.pitch)])(
            must(driver.cuGraphMemsetNodeGetParams(node))
        )

    captured_copy = must(driver.cuGraphMemcpyNodeGetParams(nodes[2]))
    return [
        [memset_back.value, memset_back.elementSize, memset_back.width, memset_back.height, int(memset_back.pitch)],
        [int(copy_back.dstPitch), copy_back.dstHeight, int(copy_back.srcPitch), str(copy_back.srcMemoryType)],
        fields(nodes[0]),
        fields(nodes[1]),
        [
            int(captured_copy.dstPitch),
            captured_copy.dstHeight,
            int(captured_copy.srcPitch),
            captured_copy.srcHeight,
            captured_copy.WidthInBytes,
            captured_copy.Height,
            captured_copy.Depth,
            str(captured_copy.srcMemoryType),
        ],
    ]
