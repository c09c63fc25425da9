"""Executable graphs: flags, changes, updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .world import (
    World,
    add_conditional,
    add_kernel,
    add_memset,
    alloc_params,
    begin_capture,
    case,
    copy_params,
    driver,
    edge,
    host_params,
    instantiate,
    kernel_params,
    memset_params,
    must,
    status,
    store_params,
    update_exec,
)


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
def pairing(world: World) -> Any:
    """Which node of a graph is paired with which of an exec, and which is named when that does not go."""

    def build(kinds: str, edges: list[tuple[int, int]]) -> tuple[Any, dict[int, Any]]:
        graph = must(driver.cuGraphCreate(0))
        nodes = [add_kernel(world, graph) if kind == "k" else add_memset(world, graph) for kind in kinds]
        for source, target in edges:
            must(driver.cuGraphAddDependencies(graph, [nodes[source]], [nodes[target]], None, 1))
        return graph, {int(node): place for place, node in enumerate(nodes)}

    chain, fork = [(0, 1), (1, 2)], [(0, 2), (0, 3), (1, 4)]
    answers = []
    for old, new in (
        (("kmk", [(0, 2), (1, 2)]), ("kmk", [(1, 2), (0, 2)])),
        (("kkm", [(0, 2), (1, 2)]), ("kkm", [(1, 2), (0, 2)])),
        (("km", []), ("mk", [])),
        (("kk", []), ("kk", [(0, 1)])),
        (("kkk", [(0, 2)]), ("kkk", [(2, 0)])),
        (("kkkkk", fork), ("kkkkk", [(0, 2), (1, 3), (1, 4)])),
        (("kkkkk", fork), ("kkkkk", [(0, 3), (1, 4)])),
        (("kkk", chain), ("kkk", [])),
        (("kkk", chain), ("kmm", [(0, 1), (0, 2)])),
        (("kkk", chain), ("mkm", chain)),
        (("kkk", chain), ("kmk", [(1, 0), (0, 2)])),
        (("kkk", [(0, 2), (1, 2)]), ("mkm", chain)),
        (("kkk", chain), ("kkk", [(0, 1), (1, 0), (1, 2)])),
    ):
        exec_ = instantiate(world, build(*old)[0], destroy=False)
        answers.append(update_exec(exec_, *build(*new)))
    return answers


@case
def alloc_update(world: World) -> Any:
    """Whose memory an exec has after an update, and whether sizes may differ."""

    def build(nbytes: int) -> tuple[Any, Any]:
        graph, params = must(driver.cuGraphCreate(0)), alloc_params(nbytes)
        must(driver.cuGraphAddMemAllocNode(graph, None, 0, params))
        return graph, int(params.dptr)  # not the view of it, which ends with params

    (graph, old), (other_graph, new), (large, _) = build(1024), build(1024), build(1 << 20)
    exec_ = instantiate(world, graph, destroy=False)
    return [
        int(old) % (1 << 21),
        int(new) % (1 << 21),
        update_exec(exec_, other_graph),
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuStreamSynchronize(world.stream)),
        status(driver.cuMemsetD8(new, 1, 16)),
        status(driver.cuMemsetD8(old, 1, 16)),
        status(driver.cuMemFree(new)),
        status(driver.cuMemFree(old)),
        update_exec(exec_, large),
    ]


@case
def device_launched(world: World) -> Any:
    """What graphs that kernels launch may hold."""
    answers = []

    def attempt(name: str, *adds: Callable[[Any], Any]) -> None:
        graph = must(driver.cuGraphCreate(0))
        for add in adds:
            add(graph)
        answers.append([name, instantiate(world, graph, 4)])

    def copy(**to: Any) -> Callable[[Any], Any]:
        params = copy_params(world, **to)
        return lambda graph: must(driver.cuGraphAddMemcpyNode(graph, None, 0, params, world.context))

    def empty(graph: Any) -> None:
        must(driver.cuGraphAddEmptyNode(graph, None, 0))

    def child(graph: Any) -> None:
        inner = must(driver.cuGraphCreate(0))
        add_memset(world, inner)
        must(driver.cuGraphAddChildGraphNode(graph, None, 0, inner))

    attempt("pageable", copy(dst=world.host.ctypes.data, to_host=True))
    attempt("empty", empty)
    attempt("empty and memset", empty, lambda graph: add_memset(world, graph))
    attempt("child", child)
    attempt("pinned", copy(dst=world.pinned))
    return answers


@case
def exec_memory_types(world: World) -> Any:
    """Copies of an exec that go elsewhere: to memory of the host, pinned and not, and back."""

    def add(**to: Any) -> Any:
        return must(driver.cuGraphAddMemcpyNode(world.graph, None, 0, copy_params(world, **to), world.context))

    within, out = add(), add(dst=world.pinned, to_host=True)
    exec_ = instantiate(world, world.graph, destroy=False)

    def put(node: Any, **to: Any) -> str:
        return status(driver.cuGraphExecMemcpyNodeSetParams(exec_, node, copy_params(world, **to), world.context))

    return [
        put(within, dst=world.pinned, to_host=True),
        put(out, dst=world.host.ctypes.data, to_host=True),
        put(out),
        put(out, dst=world.pinned),
    ]


@case
def alloc_update_used(world: World) -> Any:
    """Updates of an exec that allocates, fills and frees, and what it copies from there before and after."""

    def build(nbytes: int, value: int) -> Any:
        graph, params = must(driver.cuGraphCreate(0)), alloc_params(nbytes)
        made = must(driver.cuGraphAddMemAllocNode(graph, None, 0, params))
        filled = add_memset(world, graph, [made], dst=params.dptr, value=value)
        copy = copy_params(world, src=params.dptr)
        copied = must(driver.cuGraphAddMemcpyNode(graph, [filled], 1, copy, world.context))
        must(driver.cuGraphAddMemFreeNode(graph, [copied], 1, params.dptr))
        return graph

    exec_ = instantiate(world, build(1024, 1), destroy=False)
    answers: list[Any] = []
    for graph in (None, build(1024, 2), build(1 << 22, 3)):
        if graph is not None:
            answers.append(update_exec(exec_, graph))
        answers += [status(driver.cuGraphLaunch(exec_, world.stream)), status(driver.cuStreamSynchronize(world.stream))]
        must(driver.cuMemcpyDtoH(world.host, world.other_memory, 16))
        answers.append(world.host[:16:4].tolist())
    return answers


@case
def unified_update(world: World) -> Any:
    """What a captured copy of unified addresses says, and what its exec takes instead."""
    pinned = driver.CUdeviceptr(world.pinned)

    def captured(target: Any) -> tuple[Any, Any, list[int]]:
        begin_capture(world.stream)
        must(driver.cuMemcpyAsync(target, world.memory, 16, world.stream))
        graph = must(driver.cuStreamEndCapture(world.stream))
        (node,) = must(driver.cuGraphGetNodes(graph, 1))[0]
        said = must(driver.cuGraphMemcpyNodeGetParams(node))
        return graph, node, [int(said.dstMemoryType), int(said.srcMemoryType)]

    graph, node, said = captured(world.other_memory)
    exec_ = instantiate(world, graph, destroy=False)

    def put(target: Any, to_host: bool = False) -> str:
        params = copy_params(world, dst=target, to_host=to_host)
        return status(driver.cuGraphExecMemcpyNodeSetParams(exec_, node, params, world.context))

    answers: list[Any] = [*said, put(pinned), put(world.pinned, to_host=True)]
    graph, _, said = captured(pinned)
    return [*answers, *said, update_exec(exec_, graph)]
