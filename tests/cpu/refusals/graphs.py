"""Graphs: nodes, edges, conditions, and what can be asked of them."""

from __future__ import annotations

from typing import Any

from .world import (
    RefusedError,
    World,
    add_conditional,
    add_kernel,
    add_memset,
    alloc_params,
    begin_capture,
    case,
    cluster,
    connect,
    copy_params,
    driver,
    edge,
    end_capture,
    host_params,
    instantiate,
    kernel_params,
    launch,
    memset_params,
    move_child,
    must,
    ports,
    status,
    update_exec,
)


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


@case
def edge_data(world: World) -> Any:
    """Whether an edge is removed by its ends alone, and what an edge between the same ends does to it."""
    answers: list[Any] = []
    for first, second in ((None, edge(1, 0, 1)), (edge(1, 0, 1), None), (None, None)):
        for again in (True, False):
            graph = must(driver.cuGraphCreate(0))
            a, b = add_kernel(world, graph), add_kernel(world, graph)
            found: list[Any] = [connect(graph, a, b, first)]
            if again:
                found += [connect(graph, a, b, second), ports(graph)]
            found.append(status(driver.cuGraphRemoveDependencies(graph, [a], [b], [edge(2, 0, 0)], 1)))
            answers.append([*found, ports(graph)])
    return answers


@case
def edge_kinds(world: World) -> Any:
    """An edge between kernels, and one from a kernel to a fill."""
    answers = []
    for data in ((2, 0, 1), (1, 0, 0), (3, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1), (2, 0, 0)):
        graph = must(driver.cuGraphCreate(0))
        a, b, memset = add_kernel(world, graph), add_kernel(world, graph), add_memset(world, graph)
        added = [connect(graph, a, to, edge(*data)) for to in (b, memset)]
        answers.append([data, *added, ports(graph), instantiate(world, graph)])
    return answers


@case
def wide_value(world: World) -> Any:
    """A fill with a value wider than its elements."""
    node = add_memset(world, world.graph, element=1, value=300, width=4)
    answers = [must(driver.cuGraphMemsetNodeGetParams(node)).value]
    exec_ = instantiate(world, world.graph, destroy=False)
    answers += [status(driver.cuGraphLaunch(exec_, world.stream)), status(driver.cuStreamSynchronize(world.stream))]
    must(driver.cuMemcpyDtoH(world.host, world.memory, 4))
    return [*answers, world.host[:4].tolist()]


@case
def child_graph(world: World) -> Any:
    """What can be done with the graph of a child node."""
    child = must(driver.cuGraphCreate(0))
    add_memset(world, child)
    node = must(driver.cuGraphAddChildGraphNode(world.graph, None, 0, child))
    inside = must(driver.cuGraphChildGraphNodeGetGraph(node))
    return [
        instantiate(world, inside),
        status(driver.cuGraphClone(inside)),
        status(driver.cuGraphAddChildGraphNode(must(driver.cuGraphCreate(0)), None, 0, inside)),
        status(move_child(world, must(driver.cuGraphCreate(0)), inside)),
    ]


@case
def moved_clone(world: World) -> Any:
    child = must(driver.cuGraphCreate(0))
    add_memset(world, child)
    return [status(move_child(world, world.graph, child)), status(driver.cuGraphClone(child))]


@case
def moved_instantiated(world: World) -> Any:
    child = must(driver.cuGraphCreate(0))
    add_memset(world, child)
    return [status(move_child(world, world.graph, child)), instantiate(world, child)]


@case
def moved_with_exec(world: World) -> Any:
    child = must(driver.cuGraphCreate(0))
    add_memset(world, child)
    instantiate(world, child, destroy=False)
    return status(move_child(world, world.graph, child))


@case
def removed_condition(world: World) -> Any:
    """The handle of a conditional node that was removed."""
    handle = must(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 1, 1))
    node, _ = add_conditional(world, world.graph, handle=handle)
    removed = status(driver.cuGraphDestroyNode(node))
    add_conditional(world, world.graph, handle=handle)
    return [removed, instantiate(world, world.graph)]


@case
def body_condition(world: World) -> Any:
    """A handle made for a body, tested in the graph around it."""
    _, (body,) = add_conditional(world, world.graph)
    add_conditional(world, world.graph, handle=must(driver.cuGraphConditionalHandleCreate(body, world.context, 1, 1)))
    return instantiate(world, world.graph)


@case
def alloc_attributes(world: World) -> Any:
    """What is known of the memory of a graph before, during and after."""
    what = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    freed, left = alloc_params(100), alloc_params(100)
    node = must(driver.cuGraphAddMemAllocNode(world.graph, None, 0, freed))
    must(driver.cuGraphAddMemAllocNode(world.graph, [node], 1, left))
    must(driver.cuGraphAddMemFreeNode(world.graph, [node], 1, freed.dptr))
    answers: list[Any] = [int(left.dptr) - int(freed.dptr), status(driver.cuPointerGetAttribute(what, freed.dptr))]
    exec_ = instantiate(world, world.graph, destroy=False)
    answers.append(status(driver.cuPointerGetAttribute(what, freed.dptr)))
    answers.append(status(driver.cuGraphLaunch(exec_, world.stream)))
    must(driver.cuStreamSynchronize(world.stream))
    return [
        *answers,
        status(driver.cuPointerGetAttribute(what, freed.dptr)),
        status(driver.cuPointerGetAttribute(what, left.dptr)),
        status(driver.cuMemFree(left.dptr)),
        status(driver.cuPointerGetAttribute(what, left.dptr)),
    ]


@case
def updatable(world: World) -> Any:
    """Kernel nodes that kernels may change."""
    kernel, other = add_kernel(world, world.graph), add_kernel(world, world.graph)

    def put(value: int) -> str:
        attribute = driver.CUkernelNodeAttrValue()
        attribute.deviceUpdatableKernelNode.deviceUpdatable = value
        return status(driver.cuGraphKernelNodeSetAttribute(kernel, driver.CUlaunchAttributeID(13), attribute))

    answers: list[Any] = [
        put(0),
        put(1),
        put(1),
        put(0),
        status(driver.cuGraphKernelNodeCopyAttributes(other, kernel)),
        status(driver.cuGraphKernelNodeCopyAttributes(kernel, other)),
    ]
    exec_ = instantiate(world, world.graph, destroy=False)
    plain = must(driver.cuGraphCreate(0))
    for _ in range(2):
        add_kernel(world, plain)
    answers += [
        instantiate(world, world.graph),
        update_exec(exec_, world.graph),
        update_exec(instantiate(world, plain, destroy=False), world.graph),
        update_exec(exec_, plain),
        status(driver.cuGraphExecKernelNodeSetParams(exec_, kernel, kernel_params(world))),
        status(driver.cuGraphDestroyNode(other)),
        status(driver.cuGraphAddChildGraphNode(must(driver.cuGraphCreate(0)), None, 0, world.graph)),
    ]
    begin_capture(world.stream)

    def make_updatable(value: Any) -> None:
        value.deviceUpdatableKernelNode.deviceUpdatable = 1

    answers.append(launch(world, attrs=[("DEVICE_UPDATABLE_KERNEL_NODE", make_updatable)]))
    return [*answers, end_capture(world.stream)]


@case
def updatable_in_child(world: World) -> Any:
    """The copy that a child has of a kernel node that kernels may change."""

    def handle(node: Any) -> tuple[list[Any], int]:
        result = driver.cuGraphKernelNodeGetAttribute(node, driver.CUlaunchAttributeID(13))
        said = result[1].deviceUpdatableKernelNode
        return [status(result), int(said.deviceUpdatable)], int(said.devNode)

    child = must(driver.cuGraphCreate(0))
    kernel = add_kernel(world, child)
    value = driver.CUkernelNodeAttrValue()
    value.deviceUpdatableKernelNode.deviceUpdatable = 1
    must(driver.cuGraphKernelNodeSetAttribute(kernel, driver.CUlaunchAttributeID(13), value))
    node = must(driver.cuGraphAddChildGraphNode(world.graph, None, 0, child))
    (twin,) = must(driver.cuGraphGetNodes(must(driver.cuGraphChildGraphNodeGetGraph(node)), 1))[0]
    (said, own), (twin_said, twins) = handle(kernel), handle(twin)
    return [
        said,
        twin_said,
        own != twins,
        twins != 0,
        not isinstance(instantiate(world, world.graph, destroy=False), list),
        instantiate(world, world.graph),
        instantiate(world, child),
        status(driver.cuGraphClone(world.graph)),
        status(move_child(world, must(driver.cuGraphCreate(0)), child)),
    ]


@case
def moved_as_child(world: World) -> Any:
    child = must(driver.cuGraphCreate(0))
    add_memset(world, child)
    return [
        status(move_child(world, world.graph, child)),
        status(driver.cuGraphAddChildGraphNode(must(driver.cuGraphCreate(0)), None, 0, child)),
    ]


@case
def moved_once_with_exec(world: World) -> Any:
    """With memory of its own."""
    child, params = must(driver.cuGraphCreate(0)), alloc_params()
    node = must(driver.cuGraphAddMemAllocNode(child, None, 0, params))
    must(driver.cuGraphAddMemFreeNode(child, [node], 1, params.dptr))
    instantiate(world, child, destroy=False)
    return [status(move_child(world, world.graph, child)), instantiate(world, world.graph)]


@case
def sibling_condition(world: World) -> Any:
    """A handle made for a body, tested in the other one of the node."""
    _, (body, other) = add_conditional(world, world.graph, size=2)
    add_conditional(world, other, handle=must(driver.cuGraphConditionalHandleCreate(body, world.context, 1, 1)))
    return instantiate(world, world.graph)


@case
def body_condition_gone(world: World) -> Any:
    """A handle made for a body, tested in the graph around it, when the body is removed."""
    handle = must(driver.cuGraphConditionalHandleCreate(world.graph, world.context, 1, 1))
    node, (body,) = add_conditional(world, world.graph, handle=handle)
    add_conditional(world, world.graph, handle=must(driver.cuGraphConditionalHandleCreate(body, world.context, 1, 1)))
    removed = status(driver.cuGraphDestroyNode(node))
    return [removed, add_conditional(world, world.graph, handle=handle) is None, instantiate(world, world.graph)]
