"""Executable graphs: launched again and again, and changed between launches by the names of their nodes.

An `Exec` keeps what its graph had when it was made, and what was put into it since, until it is closed and its last
launch is done; what was put in and replaced again goes when the launches that may use it are done.

What a change can be, the driver says: values and sizes, not the structure.

Source: CUDA Driver API, "Graph Management" (``cuGraphInstantiateWithParams``, ``cuGraphExec*SetParams``,
``cuGraphExecUpdate``).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .device import Event, Stream
from .driver import DriverError
from .graph import Graph, GraphError, check_conditions
from .lifetime import Box, ClosedError, Owned
from .memory import copy_params, fill_params, holder
from .module import Block, Config, Kernel
from .node import (
    BatchMemOpNode,
    CapturedNode,
    ChildNode,
    EventRecordNode,
    EventWaitNode,
    HostCallback,
    HostNode,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    WaitValue,
    WriteValue,
    mem_op_params,
    packed_values,
)
from .scalars import said
from .signature import UNFIT

__all__ = ["Exec", "ExecKernelNode", "ExecNode"]


class _UpdateInfo(ctypes.Structure):
    """``CUgraphExecUpdateResultInfo``, which the bindings do not give back when an update fails."""

    _fields_ = [
        ("result", ctypes.c_int),
        ("error_node", ctypes.c_void_p),
        ("error_from_node", ctypes.c_void_p),
    ]


class Exec(Owned):
    """A graph made executable by `Graph.instantiate`."""

    kind = "exec"

    def __init__(
        self, graph: Graph, *, auto_free: bool, device_launch: bool, use_node_priority: bool, upload: Any
    ) -> None:
        device, driver = graph.device, graph.device.driver
        self.device, self.graph = device, graph
        flags = driver.CUgraphInstantiate_flags
        params = driver.CUDA_GRAPH_INSTANTIATE_PARAMS()
        params.flags = sum(
            int(flag)
            for wanted, flag in (
                (auto_free, flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH),
                (device_launch, flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH),
                (use_node_priority, flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY),
                (upload is not None, flags.CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD),
            )
            if wanted
        )
        stream = device.as_stream(upload) if upload is not None else None
        if stream is not None:
            params.hUploadStream = stream.handle
        paths = tuple(graph.paths())
        nodes = [node for _, node in paths]
        definition = graph._in_use()
        name_node = getattr(driver.api, "name_node", None)  # the CPU device can tell what it does
        if name_node is not None:
            for path, node in paths:
                name_node(node.handle, f"node {path!r} of graph {graph.name!r}")
        with device.context:
            try:
                handle = driver.cuGraphInstantiateWithParams(definition.handle, params)
            except DriverError as error:
                raise _instantiate_error(graph, nodes, params, error) from error
        # What launches may touch, by where it is used. The box owns it too, so that launches in flight do; what is
        # replaced goes to the stream of the newest launch, behind which all others are.
        self._kept: dict[object, object] = {path: node.held for path, node in paths if node.held}
        self._nodes = dict(paths)
        self._wired = [(part, part._rewired) for part in graph.graphs()]
        release = partial(device.context.call, driver.cuGraphExecDestroy, handle)
        self._own(handle, release, graph.name, (definition, self._kept))
        self._launch = driver.raw("cuGraphLaunch", 2)
        self._device_launch = device_launch
        self._newest_stream: Callable[[], Stream | None] = lambda: None
        self._exec_nodes: dict[str, ExecNode] = {}
        # Nodes whose parameters were taken over from other graphs since, by path; None: from one that does not tell.
        self._given: dict[str, Node | None] = {}
        self._unsettled: dict[str, tuple[dict[str, Node], dict[str, Node], list[tuple[Graph, int]]]] = {}
        if stream is not None:
            stream.hold(self.box)

    def launch(self, stream: Any) -> None:
        """Queue one run of it on ``stream``. Runs of one exec follow each other, on whatever streams."""
        if stream.__class__ is not Stream or stream.device is not self.device:
            stream = self.device.as_stream(stream)
        box, stream_raw = self.box, stream.raw
        if box is None or stream_raw is None:
            raise ClosedError(f"{(self if box is None else stream).info} is closed")
        code = self._launch(box.raw, stream_raw)
        if code:
            error = self.device.driver.error("cuGraphLaunch", code)
            raise GraphError(f"exec of graph {self.name!r}: {error}") from error
        if stream.capturing is None:
            self._newest_stream = stream.weak
        if stream.newest is not box:
            # A graph that is being captured takes a copy of it, with what is in it now.
            stream.hold(box if stream.capturing is None else (box, tuple(self._kept.values())))

    def _keep(self, place: object, thing: object) -> None:
        """From now on launches use ``thing`` at this place instead of what is kept there."""
        if self.box is None:  # closed meanwhile: there will be none
            return
        old = self._kept.get(place)
        self._kept[place] = thing
        if old is None or old is thing:
            return
        if self._device_launch:  # launches by kernels are not known here
            self._kept[id(old)] = old
        stream = self._newest_stream()
        if stream is not None and not stream.closed:  # a closed one has waited
            stream.hold(old)

    def upload(self, stream: Any) -> None:
        """Bring it to the device ahead of its first launch."""
        stream, box = self.device.as_stream(stream), self._in_use()
        self.device.driver.cuGraphUpload(box.handle, stream.handle)
        stream.hold(box)

    def time_ms(self, stream: Any, launches: int = 1) -> float:
        """Mean time of a launch on the device, in milliseconds, by events around ``launches`` of them. Waits."""
        if launches < 1:
            raise ValueError(f"time_ms: wanted at least one launch, got {launches}")
        stream = self.device.as_stream(stream)
        with Event(self.device) as start, Event(self.device) as end:
            start.record(stream)
            for _ in range(launches):
                self.launch(stream)
            end.record(stream)
            stream.synchronize()
            return start.elapsed_ms(end) / launches

    # Changing it

    def __getitem__(self, path: str) -> Any:
        """The node of that name (``"branch/then/inc"`` inside of others), to be changed for the launches to come."""
        node = self._exec_nodes.get(path)
        if node is None:
            if self.box is None:
                raise ClosedError(f"{self.info} is closed")
            node = self._exec_nodes[path] = self._exec_node(path)
        return node

    def _exec_node(self, path: str) -> ExecNode:
        definition = self.graph[path]
        if self._nodes.get(path) is not definition:
            raise GraphError(f"exec of graph {self.name!r} was made before node {path!r} was added")
        kind = _EXEC_NODES.get(type(definition), ExecNode)
        self._settle()
        return kind(self, definition, path, self._given.get(path, definition))

    def update(self, graph: Graph) -> None:
        """Take over all parameters of ``graph``, which must have the same structure.

        `GraphError` names the node that differs and how; the exec is then as it was. Where the nodes of ``graph`` have
        other names, or they or their edges came in another order, parameters are taken over all the same, but drvkit
        does not know which are whose: `ExecKernelNode.set` then needs all of them first, by `ExecKernelNode.configure`.
        """
        if not isinstance(graph, Graph):
            raise TypeError(f"exec of graph {self.name!r}: update: wanted a Graph, got {said(graph)}")
        driver = self.device.driver
        info = _UpdateInfo()
        box, definition = self._in_use(), graph._in_use()
        with self.device.context:
            code = driver.raw("cuGraphExecUpdate", 3)(box.raw, definition.raw, ctypes.addressof(info))
        if code:
            raise self._update_error(graph, driver.error("cuGraphExecUpdate", code), info)
        self._take_over("", graph, definition)

    def _take_over(self, prefix: str, graph: Graph, definition: Box) -> None:
        """The parameters of the nodes whose paths begin with ``prefix`` are those of ``graph``, of this box, now."""
        takers = {path: node for path, node in self._nodes.items() if path.startswith(prefix)}
        givers = {prefix + path: node for path, node in graph.paths()}
        self._keep(("graph", prefix), (definition, tuple(node.held for node in givers.values())))
        for earlier in [p for p in self._unsettled if p.startswith(prefix)]:
            del self._unsettled[earlier]
        self._unsettled[prefix] = takers, givers, [(part, part._rewired) for part in graph.graphs()]
        found = [path for path in takers if path in self._exec_nodes]
        if found:
            self._settle()
        for path in found:
            self._exec_nodes[path]._take(self._given[path])

    def _settle(self) -> None:
        """Tell whose parameters were taken over: the driver pairs nodes by their order and that of their edges, so
        these must be alike for names to tell it. Only who changes single nodes has to know."""
        for takers, givers, graphs in self._unsettled.values():
            alike = all(part._rewired == rewired for part, rewired in (*self._wired, *graphs))
            alike = alike and self._structure(takers) == self._structure(givers)
            self._given |= givers if alike else dict.fromkeys(takers)
        self._unsettled.clear()

    def _structure(self, nodes: dict[str, Node]) -> list[tuple[str, str, list[str]]]:
        """Path, kind and what it waits for of each node."""
        get = self.device.driver.cuGraphNodeGetDependencies
        paths = {node._handle: path for path, node in nodes.items()}
        structure = []
        for path, node in nodes.items():
            count = get(node._handle)[2]
            sources = get(node._handle, count)[0][:count] if count else ()
            structure.append((path, node.kind, [paths.get(int(source), "") for source in sources]))
        return structure

    def _update_error(self, graph: Graph, error: DriverError, info: _UpdateInfo) -> GraphError:
        driver = self.device.driver
        paths = (*self._nodes.items(), *graph.paths())
        names = {node._handle: path for path, node in paths if node._handle is not None}
        try:
            reason = driver.CUgraphExecUpdateResult(info.result).name.removeprefix("CU_GRAPH_EXEC_UPDATE_ERROR_")
        except ValueError:
            reason = str(info.result)
        culprits = [names.get(handle) for handle in (info.error_node, info.error_from_node) if handle]
        where = f" at node {' from '.join(repr(name or '?') for name in culprits)}" if culprits else ""
        what = _UPDATE_REASONS.get(reason, reason.lower().replace("_", " "))
        return GraphError(
            f"exec of graph {self.name!r} cannot take over graph {graph.name!r}{where}: {what} ({error.code}, {reason})"
        )

    def close(self) -> None:
        """Refuse further use; it is destroyed when its last launch is done, and then lets go of what it kept."""
        super().close()
        for node in self._exec_nodes.values():
            node._box = None
            node._take(None)
        self._exec_nodes.clear()
        self._kept, self._nodes, self._given, self._unsettled, self._wired = {}, {}, {}, {}, []


_UPDATE_REASONS = {
    "TOPOLOGY_CHANGED": "the structure differs",
    "NODE_TYPE_CHANGED": "the kind of node differs",
    "FUNCTION_CHANGED": "the kernel differs in a way that an exec cannot take over",
    "PARAMETERS_CHANGED": "a parameter differs that an exec cannot take over",
    "NOT_SUPPORTED": "this kind of node cannot be updated",
    "UNSUPPORTED_FUNCTION_CHANGE": "the kernel differs in a way that an exec cannot take over",
    "ATTRIBUTES_CHANGED": "an attribute differs that an exec cannot take over",
    "CU_GRAPH_EXEC_UPDATE_ERROR": "it cannot be taken over; does it touch memory of a graph that is not allocated?",
}


def _instantiate_error(graph: Graph, nodes: Sequence[Node], params: Any, error: DriverError) -> GraphError:
    culprit = int(params.hErrNode_out or 0)
    path = next((node.path for node in nodes if node._handle == culprit), None)
    where = f" at node {path!r}" if path else ""
    reason = getattr(params.result_out, "name", str(params.result_out)).removeprefix("CUDA_GRAPH_INSTANTIATE_")
    hint = ""
    if error.code == "CUDA_ERROR_NOT_SUPPORTED" and any(node.kind in ("conditional", "alloc") for node in nodes):
        hint = "; a graph with conditional or alloc nodes can have one exec at a time: close the other one"
    if reason == "CONDITIONAL_HANDLE_UNUSED":
        hint = "; every condition of the graph must be tested by a conditional node"
    return GraphError(f"graph {graph.name!r} cannot be instantiated{where}: {error} ({reason}){hint}")


class ExecNode:
    """A node of an exec."""

    def __init__(self, exec_: Exec, node: Node, path: str, given: Node | None) -> None:
        self.node = node
        self.path = path
        self.device = exec_.device
        self._exec = weakref.ref(exec_)
        self._exec_name = exec_.name
        self._box: Box | None = exec_.box
        self._take(given)

    def _take(self, node: Node | None) -> None:
        """The exec has the parameters of ``node`` now; None: drvkit does not know which."""

    def set(self, **changes: Any) -> None:
        """Change parameters by name, for the launches to come; what is not named stays."""
        raise self._error(f"a node of this kind ({type(self.node).__name__}) cannot be changed by name")

    @property
    def enabled(self) -> bool:
        """Whether it does anything. A disabled node is passed as if it were empty."""
        self._switchable()
        box = self._in_use()
        return bool(self.device.driver.cuGraphNodeGetEnabled(box.handle, self._node_handle))

    def enable(self) -> None:
        """Let it do its work again."""
        self._switch(1)

    def disable(self) -> None:
        """Make it do nothing until `enable`; only kernel, memcpy and memset nodes can be."""
        self._switch(0)

    def _switch(self, on: int) -> None:
        self._switchable()
        self._call("cuGraphNodeSetEnabled", self._node_handle, on)

    def _switchable(self) -> None:
        if self.node.kind not in ("kernel", "memcpy", "memset"):
            raise self._error(f"a {self.node.kind} node cannot be disabled; kernel, memcpy and memset nodes can")

    def _in_use(self) -> Box:
        """The box of the exec, to hold while the driver works with it; `ClosedError` if that is closed."""
        box = self._box
        if box is None:
            raise ClosedError(f"exec of graph {self._exec_name!r} is closed")
        return box

    @property
    def _node_handle(self) -> int:
        if self.node._handle is None:
            raise self._error("it was removed from its graph, so that it can no longer be changed")
        return self.node._handle

    def _call(self, name: str, *args: Any) -> None:
        box = self._in_use()
        self.device.enter_thread()
        try:
            getattr(self.device.driver, name)(box.handle, *args)
        except DriverError as error:
            raise self._error(str(error)) from error

    def _keep(self, place: object, thing: object) -> None:
        exec_ = self._exec()
        if exec_ is None:
            raise ClosedError(f"exec of graph {self._exec_name!r} is gone")
        exec_._keep((self.path, place), thing)

    def _known(self, changes: dict[str, Any], *names: str) -> list[Any]:
        """The changes in the order of ``names``; `TypeError` for others, and where there is none."""
        for name in changes:
            if name not in names:
                has = f"there are {', '.join(names)}"
                raise TypeError(f"{self.node.kind} node {self.path!r}: no parameter {name!r}; {has}")
        if not changes:
            raise TypeError(f"{self.node.kind} node {self.path!r}: set needs {' or '.join(names)}")
        return [changes.get(name) for name in names]

    def _error(self, why: str) -> GraphError:
        return GraphError(f"exec of graph {self._exec_name!r}: node {self.path!r}: {why}")

    def _unknown(self, needs: str) -> GraphError:
        why = "its graph is closed, or it took parameters over from one with other names"
        return self._error(f"its parameters are not known ({why}): give {needs}")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r} of graph {self._exec_name!r}>"


class ExecKernelNode(ExecNode):
    """A kernel node of an exec: `set` changes arguments, `configure` everything else."""

    node: KernelNode
    _block: Block | None  # the parameters that the exec has; None: not known
    _places: dict[str, tuple[int, Callable[[bytearray, int, Any], None], bool]]

    def _take(self, node: Node | None) -> None:
        self._apply = self.device.driver.raw("cuGraphExecKernelNodeSetParams", 3)
        self._entered, self._context = self.device.driver.entered, self.device.context
        self._kernel, self._config = self.node.kernel, self.node.config
        self._block, self._places = None, {}
        self._takes_handles = self._kernel.signature.takes_handles
        if isinstance(node, KernelNode) and node._handle is not None:
            driver = self.device.driver
            params = driver.cuGraphKernelNodeGetParams(node._handle)
            block = Block(node.kernel.signature, driver, params.func)
            for index, packed in enumerate(packed_values(params, node.kernel.signature)):
                block.swap(index, packed)
            block.configure_node(node.config)
            self._use(node.kernel, node.config, block)

    def _use(self, kernel: Kernel, config: Config, block: Block) -> None:
        self._kernel, self._config, self._block = kernel, config, block
        self._takes_handles = kernel.signature.takes_handles
        signature, base = kernel.signature, block.base
        self._places = {  # where it is in the block's memory, how it is written, whether it is a pointer
            p.name: (base + p.offset, signature.put[p.index], p.is_pointer) for p in signature.parameters if p.name
        }

    def set(self, **arguments: Any) -> None:
        """Change arguments by their names in the source: ``exe["double"].set(alpha=4.0)``.

        `ArgumentError` names the one that does not fit; then none is changed.
        """
        if self._takes_handles:
            signature = self._kernel.signature
            given = ((signature.locate(name), value) for name, value in arguments.items())
            check_conditions(self._kernel, given, self.node.graph.root)
        if self._entered.context is not self._context:
            self._context.enter_thread()
        box, block = self._box, self._block  # held while the driver reads: another thread may close the exec
        if box is None or block is None:
            self._in_use()
            raise self._unknown("kernel, grid, block and args to configure()")
        memory, places = block.memory, self._places
        before = memory[:]
        pointers = None
        try:
            for name, value in arguments.items():
                at, put, is_pointer = places[name]
                put(memory, at, value)
                if is_pointer:
                    pointers = [*(pointers or ()), (name, holder(value))]
            handle = self.node._handle
            if handle is None:
                handle = self._node_handle  # tells that it was removed
            code = self._apply(box.raw, handle, block.node_params_address)
        except BaseException as error:
            memory[:] = before
            self._explain(arguments, error)
            raise
        if code:
            memory[:] = before
            raise self._error(str(self._kernel.refusal("cuGraphExecKernelNodeSetParams", code, self._config)))
        if pointers:
            for name, thing in pointers:
                self._keep(name, thing)

    def _explain(self, arguments: dict[str, Any], error: BaseException) -> None:
        """Raise what says why `set` failed, where ``error`` does not."""
        self._in_use()
        if isinstance(error, (KeyError, *UNFIT)):
            for name, value in arguments.items():
                self._kernel.signature.value(self._kernel.signature.locate(name), value)

    def configure(
        self,
        *,
        kernel: Kernel | None = None,
        grid: int | tuple[int, ...] | None = None,
        block: int | tuple[int, ...] | None = None,
        shared_mem_bytes: int | None = None,
        args: Sequence[Any] | None = None,
    ) -> None:
        """Change the launch: what is left out stays. Another kernel needs all its ``args``."""
        old = self._config
        self._in_use()
        if self._block is None and None in (kernel, grid, block, args):
            raise self._unknown("kernel, grid, block and args")
        if kernel is None:
            kernel = self._kernel
        elif not isinstance(kernel, Kernel):
            raise TypeError(f"kernel node {self.path!r}: wanted a Kernel, got {said(kernel)}")
        elif args is None:
            raise TypeError(f"kernel node {self.path!r}: another kernel needs args=")
        config = kernel.config(
            old.grid if grid is None else grid,
            old.block if block is None else block,
            old.shared_mem_bytes if shared_mem_bytes is None else shared_mem_bytes,
            old.attributes,
        )
        image: Box | None = None
        if kernel is self._kernel and self._block is not None:
            function = self._block.node_params.func  # of which the exec keeps the image, also if it is closed
        else:
            image, function = kernel.image_in_use(), kernel.handle
        fresh = Block(kernel.signature, self.device.driver, function)
        held: tuple[object, ...] = ()
        if args is not None:
            args = kernel.arguments(args)
            if kernel.signature.takes_handles:
                check_conditions(kernel, enumerate(args), self.node.graph.root)
            held = fresh.pack(args)
        else:
            assert self._block is not None
            fresh.packed = self._block.packed
        fresh.configure_node(config)
        self._call("cuGraphExecKernelNodeSetParams", self._node_handle, fresh.node_params)
        self._use(kernel, config, fresh)
        if image is not None:
            self._keep("image", image)
        if args is not None:
            pointers = (p.name or p.index for p in kernel.signature.parameters if p.is_pointer)
            for place, thing in zip(pointers, held, strict=True):
                self._keep(place, thing)


class _ExecOperands(ExecNode):
    """A node with two parameters, either of which may be changed."""

    names: tuple[str, str]
    _operands: tuple[Any, Any] | None

    def _take(self, node: Node | None) -> None:
        self._operands = None
        if isinstance(node, MemcpyNode | MemsetNode) and node.target is not None:  # else its graph is closed
            self._operands = getattr(node, self.names[0]), getattr(node, self.names[1])

    def set(self, **changes: Any) -> None:
        self._known(changes, *self.names)
        self._in_use()
        if self._operands is None and len(changes) < 2:
            raise self._unknown(" and ".join(self.names))
        first, second = (
            changes[name] if name in changes else self._operands and self._operands[i]
            for i, name in enumerate(self.names)
        )
        self._apply(first, second)
        self._operands = (first, second)

    def _apply(self, first: Any, second: Any) -> None:
        raise NotImplementedError


class ExecMemcpyNode(_ExecOperands):
    """``set(target=..., source=...)``: other memory of the same kind, the same or another extent."""

    names = ("target", "source")

    def _apply(self, first: Any, second: Any) -> None:
        driver = self.device.driver
        params = copy_params(driver, first, second)
        if params is None:
            raise self._error("there is nothing to copy: disable() it")
        box = self._in_use()
        self.device.enter_thread()
        try:
            driver.cuGraphExecMemcpyNodeSetParams(box.handle, self._node_handle, params, self.device.context.handle)
        except DriverError as error:
            limits = "an exec takes 1-D copies only, between the same kinds of memory as before"
            raise self._error(f"{error}; {limits}") from error
        self._keep("target", holder(first))
        self._keep("source", holder(second))


class ExecMemsetNode(_ExecOperands):
    """``set(target=..., value=...)``."""

    names = ("target", "value")

    def _apply(self, first: Any, second: Any) -> None:
        fill = fill_params(first, second)
        if not fill.width:
            raise self._error("there is nothing to fill: disable() it")
        params = fill.params(self.device.driver)
        self._call("cuGraphExecMemsetNodeSetParams", self._node_handle, params, self.device.context.handle)
        self._keep("target", holder(first))


class ExecEventNode(ExecNode):
    """``set(event=...)``."""

    def set(self, **changes: Any) -> None:
        (event,) = self._known(changes, "event")
        if not isinstance(event, Event):
            raise TypeError(f"{self.node.kind} node {self.path!r}: event: wanted an Event, got {said(event)}")
        verb = "Record" if isinstance(self.node, EventRecordNode) else "Wait"
        self._call(f"cuGraphExecEvent{verb}NodeSetEvent", self._node_handle, event.handle)
        self._keep("event", event.box)


class ExecHostNode(ExecNode):
    """``set(function=...)``."""

    def set(self, **changes: Any) -> None:
        (function,) = self._known(changes, "function")
        label = f"host node {self.path!r} of graph {self._exec_name!r}"
        callback = HostCallback(self.device, function, label)
        self._call("cuGraphExecHostNodeSetParams", self._node_handle, callback.params(self.device.driver))
        self._keep("function", callback)


class ExecChildNode(ExecNode):
    """``set(graph=...)``: the parameters of another graph of the same structure."""

    def set(self, **changes: Any) -> None:
        (graph,) = self._known(changes, "graph")
        if not isinstance(graph, Graph):
            raise TypeError(f"child node {self.path!r}: graph: wanted a Graph, got {said(graph)}")
        definition = graph._in_use()
        self._call("cuGraphExecChildGraphNodeSetParams", self._node_handle, definition.handle)
        exec_ = self._exec()
        if exec_ is not None and isinstance(self.node, ChildNode):
            exec_._take_over(f"{self.path}/", graph, definition)


class ExecBatchMemOpNode(ExecNode):
    """``set(ops=...)``: as many operations as before."""

    def set(self, **changes: Any) -> None:
        (ops,) = self._known(changes, "ops")
        ops = tuple[WaitValue | WriteValue, ...](ops)
        params = mem_op_params(self.device.driver, self.device.context.handle, ops, f"node {self.path!r}")
        self._call("cuGraphExecBatchMemOpNodeSetParams", self._node_handle, params)
        self._keep("ops", tuple(holder(op.buffer) for op in ops))


_EXEC_NODES: dict[type[Node], type[ExecNode]] = {
    KernelNode: ExecKernelNode,
    MemcpyNode: ExecMemcpyNode,
    MemsetNode: ExecMemsetNode,
    EventRecordNode: ExecEventNode,
    EventWaitNode: ExecEventNode,
    HostNode: ExecHostNode,
    ChildNode: ExecChildNode,
    BatchMemOpNode: ExecBatchMemOpNode,
    CapturedNode: ExecNode,
}
