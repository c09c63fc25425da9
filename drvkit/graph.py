"""Graphs, built node by node.

Every verb of a `Graph` adds one node and gives it back; ``after=`` says what the node waits for. Nothing is inferred:
without ``after`` a node waits for nothing. The bodies of conditional nodes are graphs with the same verbs.

Source: CUDA Driver API, "Graph Management".
"""

from __future__ import annotations

import ctypes
import difflib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from numpy.typing import DTypeLike

from . import show
from .attributes import Attributes, encode, held
from .device import Capturing, Device, Event, Stream
from .driver import Driver, DriverError
from .lifetime import Box, ClosedError, Owned, ReleaseLater
from .memory import Buffer, copy_params, fill_params, view_of
from .module import Kernel, Module, shared_module
from .node import (
    PORTS,
    After,
    AllocNode,
    BatchMemOpNode,
    CapturedNode,
    ChildNode,
    ConditionalNode,
    EmptyNode,
    EventRecordNode,
    EventWaitNode,
    FreeNode,
    HostCallback,
    HostNode,
    KernelNode,
    MemcpyNode,
    MemsetNode,
    Node,
    Port,
    WaitValue,
    WriteValue,
    mem_op_params,
)
from .scalars import said
from .signature import UNFIT, ArgumentError

if TYPE_CHECKING:
    from .replay import Exec

__all__ = ["After", "Condition", "Edge", "Graph", "GraphError"]

_N = TypeVar("_N", bound=Node)

# What a conditional node's body may hold; the driver refuses the rest with no more than "invalid argument".
BODY_KINDS = ("kernel", "memcpy", "memset", "empty", "child", "conditional")


class GraphError(RuntimeError):
    """A graph, node or exec cannot do what was asked; the message names them."""


class Edge(NamedTuple):
    """``target`` waits for ``source``, or only for the named port of it."""

    source: Node
    target: Node
    port: str = "full"


class Condition:
    """The value that a conditional node tests on the device.

    Kernels set it: pass it for a parameter of type ``cudaGraphConditionalHandle`` and call
    ``cudaGraphSetConditional(handle, value)``; or use `Graph.set_condition`. It is ``default`` at every launch, or,
    without a default, undefined until it is set.
    """

    def __init__(self, graph: Graph, handle: int, default: int | None, name: str) -> None:
        self.graph, self.handle, self.default, self.name = weakref.ref(graph), handle, default, name
        self.root = weakref.ref(graph.root)
        self.node: str | None = None  # path of the conditional node that tests it

    def __index__(self) -> int:
        return self.handle

    def __repr__(self) -> str:
        return f"<Condition {self.name}{'' if self.default is None else f' default {self.default}'}>"


class Graph(Owned):
    """A graph definition.

    Args:
        device: where its nodes run.
        name: what errors and pictures call it.

    Attributes:
        root: the outermost graph; itself, unless it is a body or a child.
        node: the conditional or child node that it is inside of; None for a root.
    """

    kind = "graph"

    def __init__(self, device: Device, name: str = "graph") -> None:
        if not isinstance(device, Device):
            raise TypeError(f"graph {name!r}: wanted a Device, got {device!r}")
        driver = device.driver
        handle = driver.cuGraphCreate(0)
        self._begin(device, None, "")
        self._own(handle, partial(device.context.call, driver.cuGraphDestroy, handle), name)

    def _begin(self, device: Device, parent: Node | None, label: str) -> None:
        self.device = device
        self.label = label
        self._ref = weakref.ref(self)
        self._add_kernel = device.driver.raw("cuGraphAddKernelNode", 5)
        self._entered, self._context = device.driver.entered, device.context
        self._parent = weakref.ref(parent) if parent is not None else None
        self._nodes: dict[str, Node] = {}
        self._by_handle: dict[int, Node] = {}  # made anew when it is asked for and nodes have come or gone
        self._numbered = 0
        self._rewired = 0  # how often edges between nodes that were there have come or gone
        self._broken: str | None = None
        self._modules: list[Module] = []  # of ready-made kernels

    @classmethod
    def _inside(cls, node: Node, label: str, handle: Any, name: str, owner: object) -> Graph:
        """The graph inside of a node: its life is the driver's business, which ``owner`` carries on."""
        self = cls.__new__(cls)
        self._begin(node.graph.device, node, label)
        self._own(handle, None, name, owner)
        return self

    # Where it is, and what is in it

    @property
    def node(self) -> Node | None:
        if self._parent is None:
            return None
        node = self._parent()
        if node is None:
            raise ClosedError(f"the graph around {self.info} is gone")
        return node

    @property
    def root(self) -> Graph:
        node = self.node
        return self if node is None else node.graph.root

    @property
    def path(self) -> str:
        """What stands before the names of its nodes: ``""`` for a root, ``"branch/then/"`` for a body."""
        node = self.node
        return "" if node is None else f"{node.path}/{self.label}/" if self.label else f"{node.path}/"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes in the order in which they were added; those of bodies and children are in there."""
        return tuple(self._nodes.values())

    def __getitem__(self, path: str) -> Node:
        """A node by its name; inside of others by path: ``graph["branch/then/inc"]``."""
        node = self._find(path)
        if node is None:
            near = difflib.get_close_matches(path, [node.path for node in self.walk()], n=8, cutoff=0.4)
            hint = f"; there are {', '.join(near)}" if near else f"; there are {len(self)} nodes"
            raise GraphError(f"graph {self.name!r} has no node {path!r}{hint}")
        return node

    def _find(self, path: str) -> Node | None:
        node = self._nodes.get(path)
        if node is None and isinstance(path, str) and "/" in path:
            name, rest = path.split("/", 1)
            bodies = self._nodes[name].bodies if name in self._nodes else {}
            if "" in bodies:  # a child has no label
                return bodies[""]._find(rest)
            label, _, rest = rest.partition("/")
            return bodies[label]._find(rest) if label in bodies else None
        return node

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, path: str) -> bool:
        return self._find(path) is not None

    def walk(self) -> Iterator[Node]:
        """All nodes, those of bodies and children behind the node that they are in."""
        return (node for _, node in self.paths())

    def paths(self, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """As `walk`, each with its path from here."""
        for name, node in self._nodes.items():
            yield prefix + name, node
            for label, body in node.bodies.items():
                yield from body.paths(f"{prefix}{name}/{label}/" if label else f"{prefix}{name}/")

    def graphs(self) -> Iterator[Graph]:
        """Itself and all graphs inside of it."""
        yield self
        for node in self._nodes.values():
            for body in node.bodies.values():
                yield from body.graphs()

    def _break(self, why: str) -> None:
        self._broken = why
        for node in self._nodes.values():
            for body in node.bodies.values():
                body._break(why)

    def _check_open(self) -> None:
        if self._broken:
            raise GraphError(self._broken)
        super()._check_open()

    def close(self) -> None:
        """Refuse further use of it, of the graphs inside of it and of its alloc nodes' buffers; let go of what its
        nodes hold. Its execs go on.

        A graph inside of another is closed with that one, and not before.
        """
        if self._parent is None:
            self._close()

    def _close(self) -> None:
        super().close()
        for node in self._nodes.values():
            node.let_go()
        self._modules.clear()

    # Kernels

    def kernel(
        self,
        kernel: Kernel,
        *,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any] = (),
        after: After = None,
        name: str | None = None,
        shared_mem_bytes: int = 0,
        **attributes: Unpack[Attributes],
    ) -> KernelNode:
        """A kernel launch; arguments and configuration as for `Kernel.launch`.

        The values of ``args`` are frozen into the node. What pointers point to is read when it runs.
        """
        box = self.box
        if box is None or self._broken:
            self._check_open()
            raise AssertionError  # it has said why
        if kernel.__class__ is not Kernel or args.__class__ is not tuple:
            args = self._kernel_args(kernel, args, name)
        if name is None:
            name = f"{kernel.name}#{self._numbered}"
            self._numbered += 1
        else:
            self._check_name(name)
        first = 0
        several, ports = None, None
        if after is None:
            count = 0
        elif after.__class__ is KernelNode and self._nodes.get(after.name) is after:
            first, count = after._handle or 0, 1
        else:
            handles, ports = self._dependencies(after, name, for_kernel=True)
            count = len(handles)
            several = (ctypes.c_uint64 * count)(*handles)
        signature = kernel.signature
        if kernel.device is not self.device or signature.takes_handles:
            self._check_kernel(kernel, args, name)
        if self._entered.context is not self._context:
            self._context.enter_thread()
        image = kernel.image_box  # as `Kernel.image_in_use`
        if image is None:
            raise ClosedError(kernel._closed_as)
        free = kernel._free_blocks
        ready = free.pop() if free else kernel._new_block()
        config = ready.node_config
        if (
            config is None
            or ready.node_grid is not grid
            or ready.node_block is not block
            or ready.node_shared is not shared_mem_bytes
            or attributes
        ):
            config = kernel.config(grid, block, shared_mem_bytes, attributes)
            ready.configure_node(config, grid, block, shared_mem_bytes)
        try:
            references = signature.write(args, ready.memory, ready.base, image)
        except UNFIT:
            raise signature.explain(args) from None
        address = ready.nodes_address
        if several is None:
            ready.nodes[1] = first
            dependencies = address + 8
        else:
            dependencies = ctypes.addressof(several)
        code = self._add_kernel(address, box.raw, dependencies, count, ready.node_params_address)
        if code:
            error = kernel.refusal("cuGraphAddKernelNode", code, config)
            raise GraphError(f"graph {self.root.name!r}: kernel node {self.path + name!r}: {error}") from error
        node = KernelNode(self._ref, ready.nodes[0], name, references, kernel, config, args)
        free.append(ready)
        self._nodes[name] = node
        if attributes or ports:
            self._finish_kernel(node, ports)
        return node

    def _finish_kernel(self, node: KernelNode, ports: list[Port] | None) -> None:
        driver = self.device.driver
        attributes = node.config.attributes
        try:
            self._add_port_edges(node, ports)
            # A device-updatable node cannot be removed any more: nothing may fail behind that.
            ordered = dict(sorted(attributes.items(), key=lambda item: item[0] == "device_updatable"))
            for identity, value in encode(driver, ordered, node=True):
                try:
                    driver.cuGraphKernelNodeSetAttribute(node._handle, identity, value)
                except DriverError as error:
                    word = identity.name.removeprefix("CU_LAUNCH_ATTRIBUTE_").lower()
                    raise self._error(f"kernel node {node.path!r} cannot have attribute {word}", error) from error
                if identity.name.endswith("DEVICE_UPDATABLE_KERNEL_NODE"):
                    node._device_handle = int(value.deviceUpdatableKernelNode.devNode)
            node.held += held(attributes)
        except BaseException:
            self.remove(node)
            raise

    def _kernel_args(self, kernel: Any, args: Any, name: str | None) -> tuple[Any, ...]:
        if not isinstance(kernel, Kernel):
            hint = "; dev.module(...).kernel(name) gives one" if isinstance(kernel, str) else ""
            raise TypeError(
                f"graph {self.root.name!r}: kernel node {name or ''}: wanted a Kernel, got {kernel!r}{hint}"
            )
        return kernel.arguments(args)

    def _check_kernel(self, kernel: Kernel, args: Sequence[Any], name: str) -> None:
        if kernel.device is not self.device:
            raise GraphError(
                f"graph {self.root.name!r}: kernel node {self.path + name!r}: kernel {kernel.name} is on "
                f"{kernel.device.id}, the graph on {self.device.id}"
            )
        check_conditions(kernel, enumerate(args), self.root)

    def set_condition(
        self, condition: Condition, flag: Any, *, after: After = None, name: str | None = None
    ) -> KernelNode:
        """Set ``condition`` to the value of ``flag`` when the node runs: a device array of one bool or integer."""
        view = view_of(flag)
        if view is None or view.nbytes != view.dtype.itemsize:
            raise TypeError(f"set_condition: flag: wanted a device array of one element, got {said(flag)}")
        types = {"bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short"}
        types |= {"uint16": "unsigned short", "int32": "int", "uint32": "unsigned int"}
        types |= {"int64": "long", "uint64": "unsigned long"}
        if view.dtype.name not in types:
            raise TypeError(f"set_condition: flag: wanted a bool or an integer, got {view.dtype}")
        kernel = self._ready_made("set_condition").kernel(f"set_condition<{types[view.dtype.name]}>")
        return self.kernel(kernel, grid=1, block=1, args=(condition, flag), after=after, name=name)

    def set_condition_above(
        self, condition: Condition, x: Any, limit: float, *, after: After = None, name: str | None = None
    ) -> KernelNode:
        """Set ``condition`` to whether any element of ``x`` (contiguous float32 or int32) is above ``limit``."""
        view = view_of(x)
        types = {"float32": "float", "int32": "int"}
        if view is None or view.dtype.name not in types:
            raise TypeError(f"set_condition_above: x: wanted a device array of float32 or int32, got {said(x)}")
        kernel = self._ready_made("set_condition").kernel(f"set_condition_above<{types[view.dtype.name]}>")
        args = (condition, x, math.prod(view.shape), limit)
        return self.kernel(kernel, grid=1, block=1024, args=args, after=after, name=name)

    def set_condition_below_count(
        self, condition: Condition, counter: Any, limit: int, *, after: After = None, name: str | None = None
    ) -> KernelNode:
        """Add 1 to ``counter`` (a device array of one int32) and set ``condition`` to whether it is below ``limit``: a
        WHILE whose body ends so is bounded."""
        view = view_of(counter)
        if view is None or view.nbytes != 4:
            raise TypeError(
                f"set_condition_below_count: counter: wanted a device array of one int32, got {said(counter)}"
            )
        kernel = self._ready_made("set_condition").kernel("set_condition_below_count<int>")
        return self.kernel(kernel, grid=1, block=1, args=(condition, counter, limit), after=after, name=name)

    def _ready_made(self, source: str) -> Module:
        module = shared_module(self.device, source)
        if module not in self._modules:
            self._modules.append(module)
        return module

    # Copies and fills

    def memcpy(self, target: Any, source: Any, *, after: After = None, name: str | None = None) -> MemcpyNode:
        """Copy ``source`` into ``target`` of the same shape and dtype: Buffers, device arrays, numpy arrays, in any
        direction. Strided ones become 2-D and 3-D copies. A host array is read or written when the node runs."""
        driver = self.device.driver
        params = self._prepare("memcpy", name, copy_params, driver, target, source)
        if self.label and any(view is None or view.on_host for view in (view_of(target), view_of(source))):
            raise self._refusal("memcpy", name, "in the body of a conditional node no numpy array can be copied")
        if params is None:
            raise self._refusal("memcpy", name, "there is nothing to copy: use empty()")
        add = driver.cuGraphAddMemcpyNode
        return self._add("memcpy", name, after, add, (params, self.device.context.handle), MemcpyNode, target, source)

    def memset(self, target: Any, value: Any, *, after: After = None, name: str | None = None) -> MemsetNode:
        """Set every element of ``target`` to ``value``; what can be filled, `Buffer.fill` says."""
        fill = self._prepare("memset", name, fill_params, target, value)
        if not fill.width:
            raise self._refusal("memset", name, "there is nothing to fill: use empty()")
        driver = self.device.driver
        params = fill.params(driver)
        add = driver.cuGraphAddMemsetNode
        return self._add(
            "memset", name, after, add, (params, self.device.context.handle), MemsetNode, target, value, fill
        )

    def mem_ops(
        self, ops: Sequence[WaitValue | WriteValue], *, after: After = None, name: str | None = None
    ) -> BatchMemOpNode:
        """Wait for and write single integers in device memory, in order, without a kernel."""
        driver = self.device.driver
        label = f"graph {self.root.name!r}: memory operations {name or ''}".rstrip()
        ops = tuple(ops)
        params = mem_op_params(driver, self.device.context.handle, ops, label)
        return self._add(
            "memory operations", name, after, driver.cuGraphAddBatchMemOpNode, (params,), BatchMemOpNode, ops
        )

    # Memory that lives inside the graph

    def alloc(
        self, shape: int | Sequence[int], dtype: DTypeLike, *, after: After = None, name: str | None = None
    ) -> AllocNode:
        """Memory that exists from this node on: ``node.buffer``, at the same address on every launch. The Buffer is
        closed with the graph.

        It exists until a `free` node, of this graph or of one launched later; or until the next launch, if the exec is
        made with ``auto_free``. Nodes that use it must come after the alloc node and before the free node.
        """
        driver = self.device.driver
        outline = Buffer.borrow(self.device, 0, shape, dtype, where="graph")
        params = driver.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        params.poolProps.location.id = self.device.ordinal
        params.bytesize = max(outline.nbytes, 1)
        node = self._add("alloc", name, after, driver.cuGraphAddMemAllocNode, (params,), AllocNode, outline)
        node.buffer = Buffer.borrow(
            self.device, int(params.dptr), outline.shape, outline.dtype, where="graph", owner=self.box
        )
        return node

    def free(self, memory: AllocNode | Buffer, *, after: After = None, name: str | None = None) -> FreeNode:
        """The end of memory that an alloc node made."""
        buffer = memory.buffer if isinstance(memory, AllocNode) else memory
        if not isinstance(buffer, Buffer) or buffer.where != "graph":
            raise self._refusal("free", name, f"wanted an alloc node or its buffer, got {memory!r}")
        driver = self.device.driver
        return self._add("free", name, after, driver.cuGraphAddMemFreeNode, (buffer.address,), FreeNode, buffer)

    # Order, events, the host

    def empty(self, *, after: After = None, name: str | None = None) -> EmptyNode:
        """Nothing but a place where edges meet."""
        return self._add("empty", name, after, self.device.driver.cuGraphAddEmptyNode, (), EmptyNode)

    def record(self, event: Event, *, after: After = None, name: str | None = None) -> EventRecordNode:
        """Record ``event``."""
        self._check_event("event record", name, event)
        add = self.device.driver.cuGraphAddEventRecordNode
        return self._add("event record", name, after, add, (event.handle,), EventRecordNode, event)

    def wait(self, event: Event, *, after: After = None, name: str | None = None) -> EventWaitNode:
        """Wait for ``event``, recorded outside or by another graph."""
        self._check_event("event wait", name, event)
        add = self.device.driver.cuGraphAddEventWaitNode
        return self._add("event wait", name, after, add, (event.handle,), EventWaitNode, event)

    def _check_event(self, kind: str, name: str | None, event: Any) -> None:
        if not isinstance(event, Event):
            raise TypeError(f"graph {self.root.name!r}: {kind} node {name or ''}: wanted an Event, got {said(event)}")

    def host(self, function: Callable[[], Any], *, after: After = None, name: str | None = None) -> HostNode:
        """Call ``function()`` on a thread of the driver. It must not call CUDA. What it raises is raised by the next
        synchronize of a stream, an event or the device, and the graph goes on."""
        label = f"host node {name or getattr(function, '__name__', 'function')!r} of graph {self.root.name!r}"
        callback = HostCallback(self.device, function, label)
        driver = self.device.driver
        return self._add("host", name, after, driver.cuGraphAddHostNode, (callback.params(driver),), HostNode, callback)

    # Graphs inside of graphs

    def child(self, graph: Graph, *, move: bool = False, after: After = None, name: str | None = None) -> ChildNode:
        """Another graph as one node.

        A clone of it, as it is now: ``graph`` stays as it was and may be used again. With ``move``, itself: ``graph``
        goes on as a part of this one; only so may it have alloc, free and device-updatable nodes. Conditional nodes
        cannot be in a child.
        """
        driver = self.device.driver
        if not isinstance(graph, Graph):
            raise TypeError(f"graph {self.root.name!r}: child node {name or ''}: wanted a Graph, got {said(graph)}")
        if graph.root is self.root:
            raise self._refusal("child", name, f"graph {graph.name!r} is part of graph {self.root.name!r}")
        if graph.node is not None:
            raise self._refusal("child", name, f"graph {graph.name!r} is inside of another graph")
        updatable = next((node for node in graph.walk() if is_updatable(node)), None)
        if updatable is not None and not move:
            why = f"device-updatable node {updatable.path!r} can be in a child only with move=True"
            raise self._refusal("child", name, f"{why}: kernels know the handle of this one, not of a clone")
        source = graph._in_use()
        add = partial(_add_moved if move else _add_cloned, driver, source.handle)
        try:
            node = self._add("child", name, after, add, (), ChildNode)
        except GraphError as error:
            if isinstance(error.__cause__, DriverError) and error.__cause__.code == "CUDA_ERROR_NOT_SUPPORTED":
                hint = "no conditional node can be in a child; alloc and free ones only with move=True"
                raise GraphError(f"{error}; {hint}") from error.__cause__
            raise
        if move:
            graph._moved_into(self, node, source)
            node.inner = graph
        else:
            inside = driver.cuGraphChildGraphNodeGetGraph(node._handle)
            node.inner = Graph._inside(node, "", inside, graph.name, (self.box, source))
            node.inner._adopt_clone(graph)
        return node

    def _moved_into(self, parent: Graph, node: ChildNode, box: Box) -> None:
        """From now on the parent destroys it, whose box this is."""
        box.disown()
        box.owner = (box.owner, parent.box)  # an exec that was made of it before holds the parent now
        self._parent = weakref.ref(node)
        self._own(box.handle, None, self.name, (parent.box, box))

    def _adopt_clone(self, original: Graph) -> dict[Node, Node]:
        """Fill it with nodes like those of ``original``, of which its handle is a clone."""
        driver = self.device.driver
        pairs: dict[Node, Node] = {}
        for name, node in original._nodes.items():
            handle = driver.cuGraphNodeFindInClone(node._handle, self.handle)
            twin = _copied(node, self._ref, handle)
            self._nodes[name] = pairs[node] = twin
            if isinstance(node, ChildNode) and isinstance(twin, ChildNode):
                inside = driver.cuGraphChildGraphNodeGetGraph(handle)
                twin.inner = Graph._inside(twin, "", inside, node.inner.name, (self.box, node.inner.box))
                pairs |= twin.inner._adopt_clone(node.inner)
        self._numbered = original._numbered
        self._modules = original._modules[:]
        return pairs

    def clone(self, name: str | None = None) -> tuple[Graph, dict[Node, Node]]:
        """A copy of it, and which node of the copy stands for which of its own.

        `GraphError` for a graph with alloc, free, conditional or device-updatable nodes, which the driver cannot clone.
        """
        driver = self.device.driver
        for node in self.walk():
            if isinstance(node, AllocNode | FreeNode | ConditionalNode) or is_updatable(node):
                kind = "device-updatable" if is_updatable(node) else node.kind
                raise GraphError(f"graph {self.name!r} cannot be cloned: {kind} node {node.path!r} exists only once")
        box = self._in_use()
        handle = driver.cuGraphClone(box.handle)
        copy = Graph.__new__(Graph)
        copy._begin(self.device, None, "")
        copy._own(
            handle, partial(self.device.context.call, driver.cuGraphDestroy, handle), name or f"{self.name} (clone)"
        )
        return copy, copy._adopt_clone(self)

    def condition(self, default: int | None = None, name: str | None = None) -> Condition:
        """A value for one conditional node of this very graph to test, ``default`` at every launch."""
        driver = self.device.driver
        if default is not None and (not hasattr(default, "__index__") or not 0 <= default < 1 << 32):
            raise ValueError(f"graph {self.root.name!r}: condition default: wanted 0..2**32-1, got {default!r}")
        flags = 0 if default is None else driver.CU_GRAPH_COND_ASSIGN_DEFAULT
        box = self._in_use()
        handle = driver.cuGraphConditionalHandleCreate(box.handle, self.device.context.handle, int(default or 0), flags)
        name = name or f"condition{self._numbered}"
        self._numbered += 1
        return Condition(self, int(handle), default, name)

    def if_(self, condition: Condition, *, after: After = None, name: str | None = None) -> Graph:
        """A body that runs if ``condition`` is not 0. ``body.node`` is the node."""
        return self._conditional("if", "IF", ("then",), condition, after, name)[0]

    def if_else(self, condition: Condition, *, after: After = None, name: str | None = None) -> tuple[Graph, Graph]:
        """Two bodies: the first runs if ``condition`` is not 0, the second if it is."""
        yes, no = self._conditional("if-else", "IF", ("then", "else"), condition, after, name)
        return yes, no

    def while_(self, condition: Condition, *, after: After = None, name: str | None = None) -> Graph:
        """A body that runs as long as ``condition`` is not 0, tested before each turn; it must set it."""
        return self._conditional("while", "WHILE", ("body",), condition, after, name)[0]

    def switch(
        self, condition: Condition, count: int, *, after: After = None, name: str | None = None
    ) -> tuple[Graph, ...]:
        """``count`` bodies, of which that runs whose index ``condition`` is; none if there is no such body."""
        if isinstance(count, bool) or not hasattr(count, "__index__") or count < 1:
            raise self._refusal("conditional", name, f"switch: wanted the number of bodies, got {count!r}")
        return self._conditional("switch", "SWITCH", tuple(map(str, range(int(count)))), condition, after, name)

    def _conditional(
        self,
        variety: str,
        word: str,
        labels: tuple[str, ...],
        condition: Condition,
        after: After,
        name: str | None,
    ) -> tuple[Graph, ...]:
        driver = self.device.driver
        if not isinstance(condition, Condition):
            raise self._refusal("conditional", name, f"wanted a condition of graph.condition(), got {condition!r}")
        if condition.graph() is not self:
            place = "the graph that the conditional node is in"
            raise self._refusal("conditional", name, f"{condition.name} was made by another graph; make it by {place}")
        if condition.node is not None:
            raise self._refusal("conditional", name, f"{condition.name} is tested by node {condition.node!r} already")
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = driver.CUgraphConditionalHandle(condition.handle)
        params.conditional.type = driver.CUgraphConditionalNodeType.__members__[f"CU_GRAPH_COND_TYPE_{word}"]
        params.conditional.size = len(labels)
        params.conditional.ctx = self.device.context.handle

        def add(into: Any, dependencies: Any, count: int) -> Any:
            return driver.cuGraphAddNode(into, dependencies, None, count, params)

        node = self._add("conditional", name, after, add, (), ConditionalNode, condition, variety)
        condition.node = node.path
        for label, handle in zip(labels, params.conditional.phGraph_out, strict=True):
            node.bodies[label] = Graph._inside(node, label, handle, f"{self.root.name}:{node.path}/{label}", self.box)
        return tuple(node.bodies.values())

    # Capture

    @contextmanager
    def capture(
        self, stream: Any, *, after: After = None, mode: str = "thread_local", name: str = "captured"
    ) -> Iterator[Stream]:
        """What the block queues on ``stream``, by whatever library, becomes nodes of this graph::

            with graph.capture(stream):
                with cupy.cuda.Stream.from_external(stream):
                    cupy.multiply(x, 2, out=y)

        The first of them wait for ``after``. They are called ``name#0``, ``name#1``, ...

        Args:
            mode: what else may be called meanwhile (``CUstreamCaptureMode``): with ``"global"`` no thread may call what
                is unsafe during a capture (allocate, free, wait for the device), with ``"thread_local"`` this thread
                may not, with ``"relaxed"`` anything goes that does not touch the capture itself.

        Raises:
            GraphError: a forbidden call ended the capture; it is named. The driver then discards the whole graph.
        """
        driver = self.device.driver
        stream = self.device.as_stream(stream)
        if self.node is not None and isinstance(self.node, ChildNode):
            raise GraphError(f"capture: graph {self.name!r} is a child of another graph")
        handles, _ = self._dependencies(after, name)
        dependencies, count = self._raw_nodes(handles), len(handles)
        if not _is_name(name):
            raise GraphError(f"graph {self.root.name!r}: capture: name: text without '/' and '#', not {name!r}")
        try:
            mode_value = driver.CUstreamCaptureMode.__members__[f"CU_STREAM_CAPTURE_MODE_{mode.upper()}"]
        except KeyError:
            raise ValueError(f"capture mode: wanted global, thread_local or relaxed, got {mode!r}") from None
        before = {int(handle) for handle in self._driver_nodes()}
        capturing = Capturing()
        driver.in_capture.refused = None
        with self.device.context, ReleaseLater(everywhere=mode == "global"):
            driver.cuStreamBeginCaptureToGraph(stream.handle, self.handle, dependencies, None, count, mode_value)
            capturing.join(stream)
            failure: BaseException | None = None
            try:
                yield stream
            except BaseException as error:
                failure = error
            references = capturing.end()
            code = driver.api.cuStreamEndCapture(stream.handle)[0]
        if code:
            breaker = driver.in_capture.refused  # of drvkit's own calls; the error of the end counts as one too
            end = driver.error("cuStreamEndCapture", code)
            cause = str(breaker or end)
            if failure is not None and breaker is None:  # a call by another library
                cause = f"{type(failure).__name__}: {failure}"
            self._break(f"graph {self.root.name!r} was discarded by the driver: its capture was ended by {cause}")
            if self.box is not None:
                self.box.disown()  # it is destroyed already
            raise GraphError(f"{self._broken}" if cause == str(end) else f"{self._broken} ({end})") from failure
        for handle in self._driver_nodes():
            if int(handle) not in before:
                self._adopt_captured(handle, name, references)
        if failure is not None:
            failure.add_note(f"raised while capturing into graph {self.root.name!r}; what was captured so far is in it")
            raise failure

    def _driver_nodes(self) -> list[Any]:
        driver, box = self.device.driver, self._in_use()
        _, count = driver.cuGraphGetNodes(box.handle)
        return list(driver.cuGraphGetNodes(box.handle, count)[0]) if count else []

    def _adopt_captured(self, handle: Any, name: str, references: tuple[object, ...]) -> None:
        kind = self.device.driver.cuGraphNodeGetType(handle).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        kind = {"graph": "child", "mem_alloc": "alloc", "mem_free": "free"}.get(kind, kind.replace("_", " "))
        captured = CapturedNode(self._ref, handle, self._name(name, None), kind, references)
        self._nodes[captured.name] = captured

    # Edges

    def edges(self) -> list[Edge]:
        """Its edges, as the driver has them."""
        driver, box = self.device.driver, self._in_use()
        _, _, _, count = driver.cuGraphGetEdges(box.handle)
        if not count:
            return []
        sources, targets, data, _ = driver.cuGraphGetEdges(box.handle, count)
        ports = {number: name for name, number in PORTS.items()}
        return [
            Edge(self._node_of(a), self._node_of(b), ports.get(int(d.from_port), str(d.from_port)))
            for a, b, d in zip(sources[:count], targets[:count], data[:count], strict=True)
        ]

    def neighbours(self, node: Node, call: str) -> list[Node]:
        """What `Node.dependencies` and `Node.dependents` are."""
        self._check_open()
        get = getattr(self.device.driver, call)
        _, _, count = get(node._handle)
        return [self._node_of(handle) for handle in get(node._handle, count)[0][:count]] if count else []

    def _node_of(self, handle: Any) -> Node:
        if len(self._by_handle) != len(self._nodes):
            self._by_handle = {node._handle: node for node in self._nodes.values() if node._handle is not None}
        return self._by_handle[int(handle)]

    def add_edge(self, source: Node | Port, target: Node) -> None:
        """``target`` waits for ``source``, or for a port of it."""
        self._rewired += 1
        self._change_edge("add", "cuGraphAddDependencies", source, target)

    def remove_edge(self, source: Node | Port, target: Node) -> None:
        """``target`` no longer waits for ``source``."""
        self._rewired += 1
        self._change_edge("remove", "cuGraphRemoveDependencies", source, target)

    def _change_edge(self, verb: str, call: str, source: Node | Port, target: Node) -> None:
        driver, box = self.device.driver, self._in_use()
        node, port = (source.node, source.name) if isinstance(source, Port) else (source, "full")
        self._own_node(node, "edge")
        self._own_node(target, "edge")
        try:
            getattr(driver, call)(box.handle, [node.handle], [target.handle], [_edge_data(driver, port)], 1)
        except DriverError as error:
            what = f"cannot {verb} the edge from {node.path!r} ({port}) to {target.path!r}"
            raise self._error(what, error) from error

    def remove(self, node: Node) -> None:
        """Take a node and its edges out, and close the graph or the memory inside of it.

        Execs keep it as it was, but can no longer change it. A conditional node cannot be taken out: the driver would
        never again instantiate the graph, because of the condition that is left over. Nor can a device-updatable one.
        """
        self._check_open()
        self._own_node(node, "remove")
        if is_updatable(node):
            raise self._refusal("kernel", node.name, "it cannot be removed: it is device-updatable")
        if isinstance(node, ConditionalNode):
            raise self._refusal("conditional", node.name, "it cannot be removed: its condition would be left over")
        self.device.driver.cuGraphDestroyNode(node._handle)
        self._rewired += 1
        del self._nodes[node.name]
        self._by_handle = {}
        for body in node.bodies.values():
            for inner in body.walk():
                inner._handle = None
        node.let_go()
        node._handle = None

    # Making and showing it

    def instantiate(
        self,
        *,
        auto_free: bool = False,
        device_launch: bool = False,
        use_node_priority: bool = False,
        upload: Any = None,
    ) -> Exec:
        """Make it executable.

        Args:
            auto_free: free at a launch what the launch before it allocated and did not free.
            device_launch: kernels may launch it.
            use_node_priority: nodes run at their own priorities, not at the stream's.
            upload: a stream on which to bring it to the device now, rather than at the first launch.

        `GraphError` names the node that cannot be instantiated.
        """
        from .replay import Exec

        return Exec(
            self, auto_free=auto_free, device_launch=device_launch, use_node_priority=use_node_priority, upload=upload
        )

    def __str__(self) -> str:
        return show.text(self)

    def dot(self) -> str:
        """It as Graphviz DOT, with names, parameters and nested bodies."""
        return show.dot(self)

    def __repr__(self) -> str:
        state = " broken" if self._broken else " closed" if self.closed else ""
        return f"<Graph {self.name!r} on {self.device.id}, {len(self._nodes)} nodes{state}>"

    # What the verbs share

    def _add(
        self,
        kind: str,
        name: str | None,
        after: After,
        add: Callable[..., Any],
        params: tuple[Any, ...],
        node_type: Callable[..., _N],
        *details: Any,
    ) -> _N:
        box = self._in_use()
        name = self._name(kind, name)
        if kind not in BODY_KINDS and self.label:
            allowed = ", ".join(BODY_KINDS)
            raise self._refusal(kind, name, f"the body of a conditional node may hold {allowed} nodes only")
        handles, _ = self._dependencies(after, name)
        self.device.enter_thread()
        try:
            handle = add(box.handle, self._raw_nodes(handles), len(handles), *params)
        except DriverError as error:
            raise self._error(f"cannot add {kind} node {self.path + name!r}", error) from error
        node = node_type(self._ref, handle, name, *details)
        self._nodes[name] = node
        return node

    def _name(self, kind: str, name: str | None) -> str:
        if name is None:
            self._numbered += 1
            return f"{kind}#{self._numbered - 1}"  # no name that was given has a #
        self._check_name(name)
        return name

    def _check_name(self, name: str) -> None:
        if not _is_name(name):
            raise GraphError(f"graph {self.root.name!r}: a node's name is text without '/' and '#', not {name!r}")
        if name in self._nodes:
            raise GraphError(f"graph {self.root.name!r} has a node {self.path + name!r} already")

    def _dependencies(self, after: After, name: str, *, for_kernel: bool = False) -> tuple[list[int], list[Port]]:
        """Handles of the nodes to wait for, and the ports, which take edges of their own."""
        if after is None:
            return [], []
        handles: dict[int, None] = {}
        ports: list[Port] = []
        for item in after if isinstance(after, Iterable) and not isinstance(after, Port | Mapping) else (after,):
            node = item.node if isinstance(item, Port) else item
            if not isinstance(node, Node):
                hint = "; the node of a body is body.node" if isinstance(node, Graph) else ""
                raise self._refusal("", name, f"after: wanted nodes, got {item!r}{hint}")
            if node._graph is not self._ref:
                raise self._refusal("", name, f"it cannot wait for {node!r}, which is in another graph")
            if self._nodes.get(node.name) is not node:
                raise GraphError(f"graph {self.root.name!r}: node {node.name!r} was removed")
            if isinstance(item, Port) and item.name != "full":
                if not for_kernel:
                    raise self._refusal("", name, f"port {item.name!r} of {node.path!r} is for edges to kernel nodes")
                ports.append(item)
            else:
                assert node._handle is not None
                handles[node._handle] = None
        return list(handles), ports

    def _raw_nodes(self, handles: list[int]) -> list[Any] | None:
        """As the bindings take lists of nodes."""
        return [self.device.driver.CUgraphNode(handle) for handle in handles] or None

    def _add_port_edges(self, node: Node, ports: list[Port] | None) -> None:
        for port in ports or ():
            self._change_edge("add", "cuGraphAddDependencies", port, node)

    def _own_node(self, node: Node, verb: str) -> None:
        if not isinstance(node, Node) or self._nodes.get(node.name) is not node:
            raise GraphError(f"graph {self.root.name!r}: {verb}: {node!r} is no node of it")

    def _prepare(self, kind: str, name: str | None, make: Callable[..., Any], *args: Any) -> Any:
        try:
            return make(*args)
        except (TypeError, ValueError) as error:
            label = (
                f"graph {self.root.name!r}: {kind} node {self.path + name!r}" if name else f"graph {self.root.name!r}"
            )
            raise type(error)(f"{label}: {error}") from None

    def _refusal(self, kind: str, name: str | None, why: str) -> GraphError:
        what = f"{kind} node".lstrip()
        return GraphError(f"graph {self.root.name!r}: {what} {self.path + (name or '?')!r}: {why}")

    def _error(self, what: str, error: DriverError) -> GraphError:
        return GraphError(f"graph {self.root.name!r}: {what}: {error}")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "/" not in name and "#" not in name and name.isprintable()


def is_updatable(node: Node) -> bool:
    """Whether it is a kernel node that kernels may change."""
    return isinstance(node, KernelNode) and bool(node.device_handle)


def check_conditions(kernel: Kernel, args: Iterable[tuple[int, Any]], root: Graph) -> None:
    """Refuse conditions of other graphs than ``root`` as arguments, which are given with their positions."""
    for i, value in args:
        if isinstance(value, Condition) and value.root() is not root:
            name = kernel.signature.parameters[i].name if i < len(kernel.signature) else None
            wanted = f"a condition of graph {root.name!r}"
            raise ArgumentError(kernel.name, i, name, wanted, f"{value!r} of another graph")


def _add_cloned(driver: Driver, graph: Any, into: Any, dependencies: Any, count: int) -> Any:
    """Add a clone of ``graph`` as a child node."""
    return driver.cuGraphAddChildGraphNode(into, dependencies, count, graph)


def _add_moved(driver: Driver, graph: Any, into: Any, dependencies: Any, count: int) -> Any:
    """Add ``graph`` itself as a child node."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = graph
    params.graph.ownership = driver.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    return driver.cuGraphAddNode(into, dependencies, None, count, params)


def _edge_data(driver: Driver, port: str) -> Any:
    data = driver.CUgraphEdgeData()
    data.from_port = PORTS[port]
    if port == "programmatic":
        data.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return data


def _copied(node: _N, graph: weakref.ref[Graph], handle: Any) -> _N:
    """A node like ``node`` with another handle in another graph."""
    twin = node.__class__.__new__(node.__class__)
    for cls in node.__class__.__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if slot not in ("__weakref__", "inner") and hasattr(node, slot):
                setattr(twin, slot, getattr(node, slot))
    twin._graph, twin._handle = graph, int(handle)
    return twin
