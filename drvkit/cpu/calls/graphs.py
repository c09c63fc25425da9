"""Graphs, nodes and execs: NVIDIA's structs to operations, and back."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..graphs import UPLOAD, Child, EdgeData, EventRecord, EventWait, Exec, Graph, InstantiateError, Node, UpdateError
from ..handles import RefusedError
from ..operations import WAIT, Allocate, Attribute, Copy, Empty, Fill, Free, HostCall, Launch, MemOps, Operation
from ..streams import GREATEST_PRIORITY, LEAST_PRIORITY, captured_graphs, guard
from .base import (
    call,
    context_of,
    cu,
    current,
    device_of,
    edge_data,
    edge_struct,
    edges_of,
    event_of,
    exec_of,
    graph_of,
    kernel_of,
    node_of,
    number_of,
    state,
    stream_of,
    thread_state,
)
from .kernels import packed_arguments
from .memory import copy_of, copy_params
from .sharing import graph_memory_of
from .streams import host_call, idle_stream, mem_op

_NODE_TYPES = {
    name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(): kind for name, kind in cu.CUgraphNodeType.__members__.items()
}


@call(1)
def cuGraphCreate(flags: int) -> Any:
    if flags:
        raise RefusedError("INVALID_VALUE")
    return cu.CUgraph(Graph().handle)


@call()
def cuGraphDestroy(graph: Any) -> None:
    found = graph_of(graph)
    if found.owner is not None:
        raise RefusedError("INVALID_VALUE")
    if any(found in graph.around() for graph in captured_graphs()):
        raise RefusedError("ILLEGAL_STATE")
    found.destroy()


@call(1)
def cuGraphClone(graph: Any) -> Any:
    return cu.CUgraph(graph_of(graph).clone().handle)


@call(1)
def cuGraphNodeFindInClone(node: Any, clone: Any) -> Any:
    found, graph = node_of(node), graph_of(clone)
    if found not in graph.twins or graph.twins[found] not in graph.nodes:
        raise RefusedError("INVALID_VALUE")
    return cu.CUgraphNode(graph.twins[found].handle)


# Nodes, by kind: what the driver's structs say as an operation, and back


_PARAMS = struct.Struct("=Q7I4xQQ")  # CUDA_KERNEL_NODE_PARAMS up to ``extra``


def launch_params(address: int, attributes: Mapping[int, bytes] = MappingProxyType({})) -> Launch:
    """A ``CUDA_KERNEL_NODE_PARAMS``, for a node that has these attributes."""
    function, gx, gy, gz, bx, by, bz, shared, params, extra = _PARAMS.unpack(ctypes.string_at(address, _PARAMS.size))
    kernel = kernel_of(function)
    packed = packed_arguments(kernel, params, extra)
    launch = Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, packed, attributes)
    launch.check()
    return launch


def _fill(params: Any, device: int) -> Fill:
    """A ``CUDA_MEMSET_NODE_PARAMS``."""
    pitch = int(params.pitch)
    fill = Fill(device, int(params.dst), params.value, params.elementSize, params.width, params.height, pitch)
    if not fill.width or not fill.height:
        raise RefusedError("INVALID_VALUE")
    fill.check()
    return fill


def _checked_copy(params: Any, device: int) -> Copy:
    copy = copy_of(params, device)
    if not (copy.width and copy.height and copy.depth):
        raise RefusedError("INVALID_VALUE")
    copy.check()
    return copy


def _ops(params: Any) -> MemOps:
    """A ``CUDA_BATCH_MEM_OP_NODE_PARAMS``."""
    count = int(params.count)
    if count and not params.paramArray:
        raise RefusedError("INVALID_VALUE")
    ops = MemOps(context_of(params.ctx).device, tuple(map(mem_op, params.paramArray[:count])), int(params.flags))
    ops.check()
    return ops


def _event_operation(kind: type[EventRecord] | type[EventWait], event: Any) -> Operation:
    found = event_of(event)
    return kind(found.context.device, found)


def _call_params(params: Any) -> HostCall:
    """A ``CUDA_HOST_NODE_PARAMS``."""
    return host_call(_device_of_graphs(), params.fn, params.userData)


def _device_of_graphs() -> int:
    """Where the nodes of graphs are that name no place: the current context's device."""
    context = thread_state.contexts[-1]
    return 0 if context is None else context.device


def _alloc(params: Any, graph: Graph) -> Allocate:
    """A ``CUDA_MEM_ALLOC_NODE_PARAMS``, whose address is put into it."""
    pool = params.poolProps
    if int(pool.allocType) != 1 or int(pool.location.type) != 1 or not int(params.bytesize):
        raise RefusedError("INVALID_VALUE")
    return Allocate(graph_memory_of(graph, device_of(pool.location.id), int(params.bytesize)))


def _free_of(address: Any, graph: Graph) -> Free:
    found = state.graph_memory.get(int(address))
    if found is None or any(isinstance(n.operation, Free) and n.operation.memory is found for n in graph.nodes):
        raise RefusedError("INVALID_VALUE")
    return Free(found)


def _add(graph: Any, dependencies: Any, count: int, make: Callable[[Graph], Operation]) -> Any:
    into = graph_of(graph)
    edges = edges_of(into, dependencies, None, count)
    return cu.CUgraphNode(into.add(make(into), edges).handle)


@call(1)
def cuGraphAddKernelNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: launch_params(int(params.getPtr())))


@call(1)
def cuGraphAddMemcpyNode(graph: Any, dependencies: Any, count: int, params: Any, context: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _checked_copy(params, context_of(context).device))


@call(1)
def cuGraphAddMemsetNode(graph: Any, dependencies: Any, count: int, params: Any, context: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _fill(params, context_of(context).device))


@call(1)
def cuGraphAddEmptyNode(graph: Any, dependencies: Any, count: int) -> Any:
    return _add(graph, dependencies, count, lambda _: Empty(_device_of_graphs()))


@call(1)
def cuGraphAddHostNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _call_params(params))


@call(1)
def cuGraphAddEventRecordNode(graph: Any, dependencies: Any, count: int, event: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _event_operation(EventRecord, event))


@call(1)
def cuGraphAddEventWaitNode(graph: Any, dependencies: Any, count: int, event: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _event_operation(EventWait, event))


@call(1)
def cuGraphAddBatchMemOpNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _ops(params))


@call(1)
def cuGraphAddMemAllocNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    into = graph_of(graph)
    edges = edges_of(into, dependencies, None, count)
    operation = _alloc(params, into)
    params.dptr = cu.CUdeviceptr(operation.memory.address)
    return cu.CUgraphNode(into.add(operation, edges).handle)


@call(1)
def cuGraphAddMemFreeNode(graph: Any, dependencies: Any, count: int, address: Any) -> Any:
    return _add(graph, dependencies, count, lambda into: _free_of(address, into))


@call(1)
def cuGraphAddChildGraphNode(graph: Any, dependencies: Any, count: int, child: Any) -> Any:
    into = graph_of(graph)
    edges = edges_of(into, dependencies, None, count)
    return cu.CUgraphNode(into.add_child(_device_of_graphs(), graph_of(child), edges, move=False).handle)


@call(1)
def cuGraphAddNode(graph: Any, dependencies: Any, data: Any, count: int, params: Any) -> Any:
    """A node of any kind; what comes out of it is put into ``params``."""
    into = graph_of(graph)
    edges = edges_of(into, dependencies, data, count)
    kind = params.type.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    if kind == "graph":
        move = int(params.graph.ownership) == 1
        node = into.add_child(_device_of_graphs(), graph_of(params.graph.graph), edges, move=move)
    elif kind == "conditional":
        given = params.conditional
        device = context_of(given.ctx).device
        node = into.add_conditional(device, int(given.type), int(given.handle), given.size, edges)
        bodies = (ctypes.c_uint64 * given.size)(*[body.handle for body in node.graphs])
        node.said = bodies
        ctypes.c_uint64.from_address(int(given.getPtr()) + 16).value = ctypes.addressof(bodies)  # phGraph_out
    elif kind == "empty":
        node = into.add(Empty(_device_of_graphs()), edges)
    elif kind == "mem_alloc":
        operation = _alloc(params.alloc, into)
        node = into.add(operation, edges)
        params.alloc.dptr = cu.CUdeviceptr(operation.memory.address)
    elif kind == "mem_free":
        node = into.add(_free_of(params.free.dptr, into), edges)
    else:
        node = into.add(_operation(params), edges)
    return cu.CUgraphNode(node.handle)


def _operation(params: Any) -> Operation:
    """``CUgraphNodeParams`` of the kinds of nodes that can be changed."""
    kind = params.type.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    makers: dict[str, Callable[[], Operation]] = {
        "kernel": lambda: launch_params(int(params.kernel.getPtr())),
        "memcpy": lambda: _checked_copy(params.memcpy.copyParams, context_of(params.memcpy.copyCtx).device),
        "memset": lambda: _fill(params.memset, context_of(params.memset.ctx).device),
        "host": lambda: _call_params(params.host),
        "event_record": lambda: _event_operation(EventRecord, params.eventRecord.event),
        "wait_event": lambda: _event_operation(EventWait, params.eventWait.event),
        "batch_mem_op": lambda: _ops(params.memOp),
    }
    if kind not in makers:
        raise RefusedError("NOT_SUPPORTED")
    return makers[kind]()


@call()
def cuGraphDestroyNode(node: Any) -> None:
    found = node_of(node)
    if found.graph in captured_graphs():
        raise RefusedError("ILLEGAL_STATE")
    found.graph.remove(found)


@call(1)
def cuGraphConditionalHandleCreate(graph: Any, context: Any, default: int, flags: int) -> Any:
    found = graph_of(graph)
    context_of(context)
    if flags & ~1:
        raise RefusedError("INVALID_VALUE")
    return cu.CUgraphConditionalHandle(found.add_condition(default if flags else None).address)


# Asking


@call(1)
def cuGraphNodeGetType(node: Any) -> Any:
    return _NODE_TYPES[node_of(node).kind]


def _some(nodes: Iterable[Node], count: int) -> list[Any]:
    """As many nodes as were asked for, the missing ones null."""
    found = [cu.CUgraphNode(node.handle) for node in nodes][:count]
    return found + [cu.CUgraphNode(0)] * (count - len(found))


@call(2)
def cuGraphGetNodes(graph: Any, count: int = 0) -> tuple[list[Any], int]:
    nodes = graph_of(graph).nodes
    return _some(nodes, count), min(count, len(nodes)) if count else len(nodes)


@call(2)
def cuGraphGetRootNodes(graph: Any, count: int = 0) -> tuple[list[Any], int]:
    roots = [node for node in graph_of(graph).nodes if not node.dependencies]
    return _some(roots, count), min(count, len(roots)) if count else len(roots)


@call(4)
def cuGraphGetEdges(graph: Any, count: int = 0) -> tuple[list[Any], list[Any], list[Any], int]:
    edges = graph_of(graph).edges()
    data = [edge_struct(d) for _, _, d in edges[:count]]
    data += [cu.CUgraphEdgeData() for _ in range(count - len(data))]
    total = min(count, len(edges)) if count else len(edges)
    return _some([a for a, _, _ in edges], count), _some([b for _, b, _ in edges], count), data, total


def _neighbours(edges: Mapping[Node, EdgeData], count: int) -> tuple[list[Any], list[Any], int]:
    data = [edge_struct(d) for d in edges.values()][:count]
    data += [cu.CUgraphEdgeData() for _ in range(count - len(data))]
    return _some(edges, count), data, min(count, len(edges)) if count else len(edges)


@call(3)
def cuGraphNodeGetDependencies(node: Any, count: int = 0) -> tuple[list[Any], list[Any], int]:
    return _neighbours(node_of(node).dependencies, count)


@call(3)
def cuGraphNodeGetDependentNodes(node: Any, count: int = 0) -> tuple[list[Any], list[Any], int]:
    return _neighbours(node_of(node).dependents, count)


@call()
def cuGraphAddDependencies(graph: Any, sources: Any, targets: Any, data: Any, count: int) -> None:
    into = graph_of(graph)
    for source, target, edge in zip(sources[:count], targets[:count], edge_data(data, count), strict=True):
        into.add_edge(node_of(source), node_of(target), edge)


@call()
def cuGraphRemoveDependencies(graph: Any, sources: Any, targets: Any, data: Any, count: int) -> None:
    """The data say nothing more: between two nodes there is one edge."""
    from_ = graph_of(graph)
    for source, target in zip(sources[:count], targets[:count], strict=True):
        from_.remove_edge(node_of(source), node_of(target))


def _operation_of(node: Any, kind: type[Any]) -> Any:
    operation = node_of(node).operation
    if not isinstance(operation, kind):
        raise RefusedError("INVALID_VALUE")
    return operation


@call(1)
def cuGraphKernelNodeGetParams(node: Any) -> Any:
    """``kernelParams`` points to memory of the node, until it is changed or asked again."""
    launch, params = _operation_of(node, Launch), cu.CUDA_KERNEL_NODE_PARAMS()
    parameters = launch.kernel.function.parameters
    packed = ctypes.create_string_buffer(launch.params, max(len(launch.params), 1))
    base = ctypes.addressof(packed)
    pointers = (ctypes.c_uint64 * max(len(parameters), 1))(*[base + offset for offset, _ in parameters])
    node_of(node).said = packed, pointers
    params.func = cu.CUfunction(launch.kernel.handle)
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.shared
    params.kernelParams = ctypes.addressof(pointers) if parameters else 0
    return params


@call()
def cuGraphKernelNodeSetParams(node: Any, params: Any) -> None:
    found, old = node_of(node), _operation_of(node, Launch)
    found.operation = launch_params(int(params.getPtr()), old.attributes)


@call(1)
def cuGraphMemcpyNodeGetParams(node: Any) -> Any:
    return copy_params(_operation_of(node, Copy))


@call()
def cuGraphMemcpyNodeSetParams(node: Any, params: Any) -> None:
    old = _operation_of(node, Copy)
    node_of(node).operation = _checked_copy(params, old.device)


@call(1)
def cuGraphMemsetNodeGetParams(node: Any) -> Any:
    fill, params = _operation_of(node, Fill), cu.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.elementSize = cu.CUdeviceptr(fill.address), fill.value, fill.element
    params.width, params.height, params.pitch = fill.width, fill.height, fill.pitch
    return params


@call()
def cuGraphMemsetNodeSetParams(node: Any, params: Any) -> None:
    old = _operation_of(node, Fill)
    node_of(node).operation = _fill(params, old.device)


@call(1)
def cuGraphHostNodeGetParams(node: Any) -> Any:
    host, params = _operation_of(node, HostCall), cu.CUDA_HOST_NODE_PARAMS()
    params.fn, params.userData = cu.CUhostFn(host.function), host.data
    return params


@call()
def cuGraphHostNodeSetParams(node: Any, params: Any) -> None:
    _operation_of(node, HostCall)
    node_of(node).operation = _call_params(params)


@call(1)
def cuGraphEventRecordNodeGetEvent(node: Any) -> Any:
    return cu.CUevent(_operation_of(node, EventRecord).event.handle)


@call()
def cuGraphEventRecordNodeSetEvent(node: Any, event: Any) -> None:
    _operation_of(node, EventRecord)
    node_of(node).operation = _event_operation(EventRecord, event)


@call(1)
def cuGraphEventWaitNodeGetEvent(node: Any) -> Any:
    return cu.CUevent(_operation_of(node, EventWait).event.handle)


@call()
def cuGraphEventWaitNodeSetEvent(node: Any, event: Any) -> None:
    _operation_of(node, EventWait)
    node_of(node).operation = _event_operation(EventWait, event)


@call(1)
def cuGraphChildGraphNodeGetGraph(node: Any) -> Any:
    return cu.CUgraph(_operation_of(node, Child).graph.handle)


@call(1)
def cuGraphMemAllocNodeGetParams(node: Any) -> Any:
    allocated, params = _operation_of(node, Allocate).memory, cu.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    params.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    params.poolProps.location.id = allocated.device
    params.bytesize, params.dptr = allocated.nbytes, cu.CUdeviceptr(allocated.address)
    return params


@call(1)
def cuGraphMemFreeNodeGetParams(node: Any) -> Any:
    return cu.CUdeviceptr(_operation_of(node, Free).memory.address)


@call(1)
def cuGraphBatchMemOpNodeGetParams(node: Any) -> Any:
    operation, params = _operation_of(node, MemOps), cu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = cu.CUcontext(state.contexts[operation.device].handle)
    entries = []
    for op in operation.ops:
        entry = cu.CUstreamBatchMemOpParams()
        kind = entry.operation = cu.CUstreamBatchMemOpType(op.operation)
        if op.nbytes is None:
            entry.memoryBarrier.operation, entry.memoryBarrier.flags = kind, op.flags
        else:
            part = entry.waitValue if op.operation in WAIT else entry.writeValue
            part.operation, part.address, part.flags = kind, cu.CUdeviceptr(op.address), op.flags
            setattr(part, "value64" if op.nbytes == 8 else "value", op.value)
        entries.append(entry)
    params.paramArray, params.count, params.flags = entries, len(entries), operation.flags
    return params


@call()
def cuGraphBatchMemOpNodeSetParams(node: Any, params: Any) -> None:
    _operation_of(node, MemOps)
    node_of(node).operation = _ops(params)


@call(1)
def cuGraphKernelNodeGetAttribute(node: Any, attribute: Any) -> Any:
    launch, value = _operation_of(node, Launch), cu.CUkernelNodeAttrValue()
    raw = launch.attributes.get(int(attribute))
    if raw is not None:
        ctypes.memmove(int(value.getPtr()), raw, 64)
    if int(attribute) == Attribute.DEVICE_UPDATABLE_KERNEL_NODE:
        handle = node_of(node).device_handle if launch.updatable else 0
        value.deviceUpdatableKernelNode.devNode = cu.CUgraphDeviceNode(handle)
    return value


@call()
def cuGraphKernelNodeSetAttribute(node: Any, attribute: Any, value: Any) -> None:
    found, launch = node_of(node), _operation_of(node, Launch)
    identity = int(attribute)
    if identity in (
        Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,
        Attribute.PROGRAMMATIC_EVENT,
        Attribute.LAUNCH_COMPLETION_EVENT,
        Attribute.PREFERRED_CLUSTER_DIMENSION,
    ):
        raise RefusedError("INVALID_VALUE")
    if identity == Attribute.DEVICE_UPDATABLE_KERNEL_NODE:
        given = value.deviceUpdatableKernelNode
        if launch.updatable and not given.deviceUpdatable:  # once for all
            raise RefusedError("NOT_SUPPORTED")
        given.devNode = cu.CUgraphDeviceNode(found.device_handle if given.deviceUpdatable else 0)
    raw = ctypes.string_at(int(value.getPtr()), 64)
    if identity == Attribute.PRIORITY:
        raw = struct.pack("=i60x", max(GREATEST_PRIORITY, min(LEAST_PRIORITY, value.priority)))
    changed = launch.having({**launch.attributes, identity: raw})
    changed.check()
    found.operation = changed


@call()
def cuGraphKernelNodeCopyAttributes(target: Any, source: Any) -> None:
    to, from_ = _operation_of(target, Launch), _operation_of(source, Launch)
    if to.updatable or from_.updatable:
        raise RefusedError("NOT_SUPPORTED")
    changed = to.having(from_.attributes)
    changed.check()
    node_of(target).operation = changed


# Execs


@call(1)
def cuGraphInstantiateWithParams(graph: Any, params: Any) -> Any:
    results = cu.CUgraphInstantiateResult
    params.hErrNode_out, params.result_out = cu.CUgraphNode(0), results.CUDA_GRAPH_INSTANTIATE_SUCCESS
    try:
        if int(params.flags) & UPLOAD:
            stream_of(params.hUploadStream)
        made = _instantiate(graph, params.flags)
    except InstantiateError as error:
        params.hErrNode_out = cu.CUgraphNode(0 if error.node is None else error.node.handle)
        params.result_out = results(error.result)
        raise
    except RefusedError:
        params.result_out = results.CUDA_GRAPH_INSTANTIATE_ERROR
        raise
    return cu.CUgraphExec(made.handle)


@call(1)
def cuGraphInstantiate(graph: Any, flags: int) -> Any:
    return cu.CUgraphExec(_instantiate(graph, flags).handle)


def _instantiate(graph: Any, flags: Any) -> Exec:
    current()
    guard()
    return Exec(graph_of(graph), int(flags))


@call()
def cuGraphExecDestroy(exec_: Any) -> None:
    guard()
    exec_of(exec_).destroy()


@call(1)
def cuGraphExecGetFlags(exec_: Any) -> Any:
    return cu.cuuint64_t(exec_of(exec_).flags)


@call()
def cuGraphUpload(exec_: Any, stream: Any) -> None:
    exec_of(exec_)
    idle_stream(stream)


@call()
def cuGraphLaunch(exec_: Any, stream: Any) -> None:
    graph_launch(number_of(exec_), number_of(stream))


def graph_launch(exec_: int, stream: int) -> None:
    found = exec_of(exec_)
    found.launch(idle_stream(stream))


@call()
def cuGraphExecKernelNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    exec_kernel_node_set_params(number_of(exec_), number_of(node), int(params.getPtr()))


def exec_kernel_node_set_params(exec_: int, node: int, params: int) -> None:
    found, definition = exec_of(exec_), node_of(node, "kernel")
    old = found.item(definition).operation
    assert isinstance(old, Launch)
    found.put(definition, launch_params(params, old.attributes))


@call()
def cuGraphExecMemcpyNodeSetParams(exec_: Any, node: Any, params: Any, context: Any) -> None:
    exec_of(exec_).put(node_of(node, "memcpy"), _checked_copy(params, context_of(context).device))


@call()
def cuGraphExecMemsetNodeSetParams(exec_: Any, node: Any, params: Any, context: Any) -> None:
    exec_of(exec_).put(node_of(node, "memset"), _fill(params, context_of(context).device))


@call()
def cuGraphExecHostNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    exec_of(exec_).put(node_of(node, "host"), _call_params(params))


@call()
def cuGraphExecEventRecordNodeSetEvent(exec_: Any, node: Any, event: Any) -> None:
    exec_of(exec_).put(node_of(node, "event_record"), _event_operation(EventRecord, event))


@call()
def cuGraphExecEventWaitNodeSetEvent(exec_: Any, node: Any, event: Any) -> None:
    exec_of(exec_).put(node_of(node, "wait_event"), _event_operation(EventWait, event))


@call()
def cuGraphExecBatchMemOpNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    exec_of(exec_).put(node_of(node, "batch_mem_op"), _ops(params))


@call()
def cuGraphExecChildGraphNodeSetParams(exec_: Any, node: Any, child: Any) -> None:
    exec_of(exec_).put_child(node_of(node, "graph"), graph_of(child))


@call()
def cuGraphExecNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    if params.type.name == "CU_GRAPH_NODE_TYPE_GRAPH":
        exec_of(exec_).put_child(node_of(node, "graph"), graph_of(params.graph.graph))
    else:
        exec_of(exec_).put(node_of(node), _operation(params))


@call()
def cuGraphNodeSetEnabled(exec_: Any, node: Any, enabled: int) -> None:
    exec_of(exec_).enable(node_of(node), bool(enabled))


@call(1)
def cuGraphNodeGetEnabled(exec_: Any, node: Any) -> int:
    return int(exec_of(exec_).is_enabled(node_of(node)))


@call(1)
def cuGraphExecUpdate(exec_: Any, graph: Any) -> Any:
    info = cu.CUgraphExecUpdateResultInfo()
    graph_exec_update(number_of(exec_), number_of(graph), int(info.getPtr()))
    return info


_UPDATE_INFO = struct.Struct("=i4xQQ")  # CUgraphExecUpdateResultInfo


def graph_exec_update(exec_: int, graph: int, info: int) -> None:
    results = cu.CUgraphExecUpdateResult.__members__
    result, node, from_node = 0, 0, 0
    try:
        exec_of(exec_).update(graph_of(graph))
    except UpdateError as error:
        result = int(results[f"CU_GRAPH_EXEC_UPDATE_ERROR_{error.result}".removesuffix("_")])
        node, from_node = (0 if n is None else n.handle for n in (error.node, error.from_node))
        raise
    finally:
        ctypes.memmove(info, _UPDATE_INFO.pack(result, node, from_node), _UPDATE_INFO.size)
