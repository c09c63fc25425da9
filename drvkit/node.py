"""The kinds of graph nodes: what each was told, what it keeps alive, what the driver says about it.

A node is made by a verb of `drvkit.graph.Graph`. It holds the image of its kernel and the memory that its parameters
point to, for as long as the node, a clone or an exec of its graph exists.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .device import Device, Event
from .driver import Driver, DriverError
from .lifetime import ClosedError, ReleaseLater
from .memory import Buffer, FillParams, holder, view_of
from .module import Config, Kernel
from .scalars import Unfit, bits, said
from .signature import Signature, kernel_label, mangled_types

if TYPE_CHECKING:
    from .graph import Condition, Graph

__all__ = [
    "After",
    "AllocNode",
    "BatchMemOpNode",
    "CapturedNode",
    "ChildNode",
    "ConditionalNode",
    "EmptyNode",
    "EventRecordNode",
    "EventWaitNode",
    "FreeNode",
    "HostNode",
    "KernelNode",
    "MemcpyNode",
    "MemsetNode",
    "Node",
    "Port",
    "WaitValue",
    "WriteValue",
]

After = Any  # what a node waits for: None, a Node, a Port, or a sequence of them

PORTS = {"full": 0, "programmatic": 1, "launch_order": 2}  # CU_GRAPH_KERNEL_NODE_PORT_*


class Port(NamedTuple):
    """Where an edge leaves a node: ``after=node.port("programmatic")``."""

    node: Node
    name: str


class Node:
    """One node of a graph.

    Attributes:
        graph: the graph, or the body, that it is in.
        name: unique in that graph.
        held: what it keeps alive.
    """

    __slots__ = ("__weakref__", "_graph", "_handle", "held", "name")
    kind: ClassVar[str] = "node"

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, held: tuple[object, ...] = ()) -> None:
        self._graph, self.name, self.held = graph, name, held
        self._handle: int | None = int(handle)  # None when it was removed

    @property
    def handle(self) -> Any:
        """The raw ``CUgraphNode``."""
        graph = self.graph
        graph._check_open()
        return graph.device.driver.CUgraphNode(self._handle)

    @property
    def graph(self) -> Graph:
        graph = self._graph()  # weak: graphs hold their nodes, and must go as soon as nobody holds them
        if graph is None:
            raise ClosedError(f"the graph of node {self.name!r} is gone")
        if self._handle is None:
            raise ClosedError(f"node {self.name!r} was removed from graph {graph.root.name!r}")
        return graph

    @property
    def path(self) -> str:
        """Its name from the outermost graph on: ``"branch/then/inc"``."""
        return f"{self.graph.path}{self.name}"

    def port(self, name: str) -> Port:
        """A port of it, for an edge that does not wait for its end.

        ``"programmatic"``: when every block has triggered (``griddepcontrol.launch_dependents``) or ended;
        ``"launch_order"``: when every block has started. Both are for edges between kernel nodes.
        """
        if name not in PORTS:
            raise ValueError(f"node {self.path!r} has no port {name!r}; there are {', '.join(PORTS)}")
        return Port(self, name)

    @property
    def dependencies(self) -> list[Node]:
        """The nodes it waits for."""
        return self.graph.neighbours(self, "cuGraphNodeGetDependencies")

    @property
    def dependents(self) -> list[Node]:
        """The nodes that wait for it."""
        return self.graph.neighbours(self, "cuGraphNodeGetDependentNodes")

    @property
    def parameters(self) -> dict[str, Any]:
        """Its parameters as the driver has them now, by name; addresses, handles and sizes as numbers."""
        graph = self.graph
        graph._check_open()
        read = _READ.get(self.kind)
        return read(graph.device.driver, self._handle) if read else {}

    def let_go(self) -> None:
        """Hold nothing any more: its graph is closed, or it was removed from it."""
        self.held = ()
        for body in self.bodies.values():
            body._close()

    def said(self) -> str:
        """Its parameters in a few words, as they were given."""
        return ""

    @property
    def bodies(self) -> dict[str, Graph]:
        """The graphs inside of it, by label."""
        return {}

    def __repr__(self) -> str:
        if self._handle is None or self._graph() is None:
            return f"<{type(self).__name__} {self.name!r}, removed>"
        return f"<{type(self).__name__} {self.path!r} of graph {self.graph.root.name!r}>"


class KernelNode(Node):
    """A kernel launch. ``args`` are the arguments as given."""

    __slots__ = ("_device_handle", "args", "config", "kernel")
    kind = "kernel"
    _device_handle: int

    def __init__(
        self,
        graph: weakref.ref[Graph],
        handle: int,
        name: str,
        held: tuple[object, ...],
        kernel: Kernel,
        config: Config,
        args: tuple[Any, ...],
    ) -> None:
        self._graph, self._handle, self.name, self.held = graph, handle, name, held
        self.kernel, self.config, self.args = kernel, config, args

    def let_go(self) -> None:
        super().let_go()
        self.args = ()
        self.config = self.config._replace(attributes={})

    @property
    def device_handle(self) -> int | None:
        """What kernels call it (``cudaGraphDeviceNode_t``); None if it is not ``device_updatable``."""
        return getattr(self, "_device_handle", None)

    @property
    def parameters(self) -> dict[str, Any]:
        """``kernel``, ``grid``, ``block``, ``shared_mem_bytes`` and ``args`` by name (pointers as addresses)."""
        graph = self.graph
        graph._check_open()
        return kernel_parameters(graph.device.driver, self._handle, self.kernel.signature)

    def said(self) -> str:
        names = [p.name or str(p.index) for p in self.kernel.signature.parameters]
        args = ", ".join(f"{name}={_short(value)}" for name, value in zip(names, self.args, strict=False))
        grid, block = (_extents(extents) for extents in (self.config.grid, self.config.block))
        shared = f" shared {self.config.shared_mem_bytes}" if self.config.shared_mem_bytes else ""
        attributes = "".join(f" {name}={_short(value)}" for name, value in self.config.attributes.items())
        return f"{self.kernel.name}({args}) grid {grid} block {block}{shared}{attributes}"


def kernel_parameters(driver: Driver, node: Any, signature: Signature | None) -> dict[str, Any]:
    """What the driver says of a kernel node, decoded by ``signature`` or, without one, by the function's own name."""
    params = driver.cuGraphKernelNodeGetParams(node)
    if signature is None:
        symbol = driver.cuFuncGetName(params.func).decode()
        layout: list[tuple[int, int]] = []
        while not (found := driver.api.cuFuncGetParamInfo(params.func, len(layout)))[0]:
            layout.append((int(found[1]), int(found[2])))
        types = mangled_types(symbol)
        signature = Signature(symbol, types if types and len(types) == len(layout) else None, None, layout)
    values = packed_values(params, signature)
    args = {p.name or str(p.index): p.unpack(values[p.index]) for p in signature.parameters}
    return {
        "kernel": signature.kernel,
        "grid": (params.gridDimX, params.gridDimY, params.gridDimZ),
        "block": (params.blockDimX, params.blockDimY, params.blockDimZ),
        "shared_mem_bytes": params.sharedMemBytes,
        "args": args,
    }


def packed_values(params: Any, signature: Signature) -> list[bytes]:
    """The arguments in ``CUDA_KERNEL_NODE_PARAMS`` that the driver gave, packed, one by one."""
    if not signature.parameters:
        return []
    pointers = (ctypes.c_void_p * len(signature)).from_address(int(params.kernelParams))
    return [ctypes.string_at(pointers[p.index] or 0, p.size) for p in signature.parameters]


class MemcpyNode(Node):
    """A copy of ``source`` into ``target``, in up to three dimensions."""

    __slots__ = ("source", "target")
    kind = "memcpy"

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, target: Any, source: Any) -> None:
        super().__init__(graph, handle, name, (holder(target), holder(source)))
        self.target, self.source = target, source

    def let_go(self) -> None:
        super().let_go()
        self.target = self.source = None

    def said(self) -> str:
        return f"{_short(self.target)} <- {_short(self.source)}"


def _memcpy_parameters(driver: Driver, node: Any) -> dict[str, Any]:
    params = driver.cuGraphMemcpyNodeGetParams(node)
    said: dict[str, Any] = {}
    for role, side in (("target", "dst"), ("source", "src")):
        on_host = int(getattr(params, f"{side}MemoryType")) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        said[role] = int(getattr(params, f"{side}{'Host' if on_host else 'Device'}") or 0)
        said[f"{role}_on_host"] = on_host
        said[f"{role}_pitch"] = int(getattr(params, f"{side}Pitch"))
    said["width_bytes"], said["height"], said["depth"] = params.WidthInBytes, params.Height, params.Depth
    return said


class MemsetNode(Node):
    """Every element of ``target`` set to ``value``."""

    __slots__ = ("fill", "target", "value")
    kind = "memset"

    def __init__(
        self, graph: weakref.ref[Graph], handle: Any, name: str, target: Any, value: Any, fill: FillParams
    ) -> None:
        super().__init__(graph, handle, name, (holder(target),))
        self.target, self.value, self.fill = target, value, fill

    def let_go(self) -> None:
        super().let_go()
        self.target = None

    def said(self) -> str:
        return f"{_short(self.target)} <- {_short(self.value)}"


def _memset_parameters(driver: Driver, node: Any) -> dict[str, Any]:
    params = driver.cuGraphMemsetNodeGetParams(node)
    return {
        "address": int(params.dst),
        "value": params.value,
        "element": params.elementSize,
        "width": params.width,
        "height": params.height,
        "pitch": params.pitch,
    }


class EmptyNode(Node):
    """Does nothing; joins and forks dependencies."""

    __slots__ = ()
    kind = "empty"


class HostNode(Node):
    """A Python function called by a thread of the driver."""

    __slots__ = ("function",)
    kind = "host"

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, callback: HostCallback) -> None:
        super().__init__(graph, handle, name, (callback,))
        self.function: Callable[[], Any] | None = callback.function

    def let_go(self) -> None:
        super().let_go()
        self.function = None

    def said(self) -> str:
        return f"{getattr(self.function, '__qualname__', self.function)}()"


_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostCallback:
    """A Python function in the form that the driver calls.

    What it raises cannot travel through the driver: it waits in the device for the next synchronize.
    """

    def __init__(self, device: Device, function: Callable[[], Any], label: str) -> None:
        if not callable(function):
            raise TypeError(f"{label}: wanted a function without arguments, got {function!r}")
        self.function = function
        errors = device.callback_errors

        def call(_: int | None) -> None:
            with ReleaseLater(then_release=False):  # no call of CUDA is allowed here, and a release is one
                try:
                    function()
                except BaseException as error:
                    error.add_note(f"raised in {label}")
                    errors.append(error)

        self._c_function = _HostFunction(call)
        self.address = ctypes.cast(self._c_function, ctypes.c_void_p).value or 0

    def params(self, driver: Driver) -> Any:
        params = driver.CUDA_HOST_NODE_PARAMS()
        params.fn = driver.CUhostFn(self.address)
        params.userData = 0
        return params


class _EventNode(Node):
    __slots__ = ("event",)

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, event: Event) -> None:
        super().__init__(graph, handle, name, (event.box,))
        self.event: Event | None = event

    def let_go(self) -> None:
        super().let_go()
        self.event = None

    def said(self) -> str:
        return f"event {self.event.name}" if self.event is not None else ""


class EventRecordNode(_EventNode):
    """Records ``event``."""

    __slots__ = ()
    kind = "event record"


class EventWaitNode(_EventNode):
    """Waits for ``event``."""

    __slots__ = ()
    kind = "event wait"


class ChildNode(Node):
    """Another graph as one node: a clone of it, or (moved) itself. ``inner`` is what runs."""

    __slots__ = ("inner",)
    kind = "child"
    inner: Graph

    @property
    def bodies(self) -> dict[str, Graph]:
        return {"": self.inner}

    def said(self) -> str:
        return f"graph {self.inner.name!r}"


class AllocNode(Node):
    """Memory that exists from here on until a free node; ``buffer`` is it, at the same address on every launch."""

    __slots__ = ("buffer",)
    kind = "alloc"

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, buffer: Buffer) -> None:
        super().__init__(graph, handle, name)
        self.buffer = buffer

    def let_go(self) -> None:
        super().let_go()
        self.buffer.close()

    def said(self) -> str:
        return _short(self.buffer)


class FreeNode(Node):
    """The end of the memory of an alloc node."""

    __slots__ = ("buffer",)
    kind = "free"

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, buffer: Buffer) -> None:
        super().__init__(graph, handle, name, (buffer.box,))
        self.buffer: Buffer | None = buffer

    def let_go(self) -> None:
        super().let_go()
        self.buffer = None

    def said(self) -> str:
        return _short(self.buffer) if self.buffer is not None else ""


class ConditionalNode(Node):
    """Bodies that run as a condition says: ``variety`` is "if", "if-else", "while" or "switch"."""

    __slots__ = ("_bodies", "condition", "variety")
    kind = "conditional"

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, condition: Condition, variety: str) -> None:
        super().__init__(graph, handle, name)
        self.condition, self.variety = condition, variety
        self._bodies: dict[str, Graph] = {}

    @property
    def bodies(self) -> dict[str, Graph]:
        return self._bodies

    @property
    def parameters(self) -> dict[str, Any]:
        """``variety``, ``condition`` and ``bodies``, as they were given: drivers before 13.2 do not tell."""
        return {"variety": self.variety, "condition": self.condition.handle, "bodies": list(self._bodies)}

    def said(self) -> str:
        return f"{self.variety} {self.condition.name}"


class WaitValue(NamedTuple):
    """Wait until the integer in ``buffer`` (a device array of one element of 4 or 8 bytes) compares with ``value``:
    ``"geq"`` (cyclic), ``"eq"``, ``"and"`` (a common bit) or ``"nor"`` (a bit clear in both)."""

    buffer: Any
    value: int
    compare: str = "geq"


class WriteValue(NamedTuple):
    """Write ``value`` to the integer in ``buffer`` (a device array of one element of 4 or 8 bytes)."""

    buffer: Any
    value: int


class BatchMemOpNode(Node):
    """Waits and writes of single integers, in order, without a kernel."""

    __slots__ = ("ops",)
    kind = "memory operations"

    def __init__(
        self, graph: weakref.ref[Graph], handle: Any, name: str, ops: tuple[WaitValue | WriteValue, ...]
    ) -> None:
        super().__init__(graph, handle, name, tuple(holder(op.buffer) for op in ops))
        self.ops = ops

    def let_go(self) -> None:
        super().let_go()
        self.ops = ()

    def said(self) -> str:
        words = {WaitValue: "wait", WriteValue: "write"}
        return "; ".join(f"{words[type(op)]} {op.value} {_short(op.buffer)}" for op in self.ops)


def mem_op_params(driver: Driver, context: Any, ops: tuple[WaitValue | WriteValue, ...], label: str) -> Any:
    """``CUDA_BATCH_MEM_OP_NODE_PARAMS``; `TypeError` or `ValueError` names the operation that does not fit."""
    params = driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = context
    entries = []
    for i, op in enumerate(ops):
        if not isinstance(op, (WaitValue, WriteValue)):
            raise TypeError(f"{label}: operation {i}: wanted WaitValue or WriteValue, got {op!r}")
        view, value = view_of(op.buffer), op.value
        if view is None or view.on_host or view.dtype.kind not in "iu" or view.nbytes not in (4, 8) or view.size != 1:
            raise TypeError(
                f"{label}: operation {i}: wanted one 4 or 8 byte integer on the device, got {said(op.buffer)}"
            )
        try:
            raw = bits(value, view.dtype)
        except Unfit as unfit:
            wanted, got = unfit.args
            raise ValueError(f"{label}: operation {i}: value: wanted {wanted}, got {got}") from None
        size = view.nbytes
        entry = driver.CUstreamBatchMemOpParams()
        kinds = driver.CUstreamBatchMemOpType
        if isinstance(op, WaitValue):
            kind, part = kinds.__members__[f"CU_STREAM_MEM_OP_WAIT_VALUE_{8 * size}"], entry.waitValue
            try:
                part.flags = int(
                    driver.CUstreamWaitValue_flags.__members__[f"CU_STREAM_WAIT_VALUE_{op.compare.upper()}"]
                )
            except KeyError:
                raise ValueError(
                    f"{label}: operation {i}: compare is geq, eq, and or nor, not {op.compare!r}"
                ) from None
        else:
            kind, part = kinds.__members__[f"CU_STREAM_MEM_OP_WRITE_VALUE_{8 * size}"], entry.writeValue
            part.flags = 0
        part.operation, part.address = kind, driver.CUdeviceptr(view.address)
        setattr(part, "value" if size == 4 else "value64", int.from_bytes(raw, "little"))
        entry.operation = kind
        entries.append(entry)
    params.paramArray = entries
    params.count = len(entries)  # assigning the list does not count it
    return params


class CapturedNode(Node):
    """A node that capturing a stream made; ``kind`` is the driver's word for it."""

    __slots__ = ("kind",)
    kind: str  # type: ignore[misc]

    def __init__(self, graph: weakref.ref[Graph], handle: Any, name: str, kind: str, held: tuple[object, ...]) -> None:
        super().__init__(graph, handle, name, held)
        self.kind = kind

    @property
    def bodies(self) -> dict[str, Graph]:
        return {}

    def said(self) -> str:
        try:
            told = self.parameters
        except DriverError:  # a kernel of a library that hides it
            return "captured"
        if self.kind == "kernel":
            kernel, grid, block = kernel_label(told["kernel"]), _extents(told["grid"]), _extents(told["block"])
            return f"{kernel} grid {grid} block {block}"
        return " ".join(f"{name}={value:#x}" if value > 1 << 16 else f"{name}={value}" for name, value in told.items())


def _host_parameters(driver: Driver, node: Any) -> dict[str, Any]:
    params = driver.cuGraphHostNodeGetParams(node)
    return {"function_address": int(params.fn), "user_data": int(params.userData or 0)}


def _alloc_parameters(driver: Driver, node: Any) -> dict[str, Any]:
    params = driver.cuGraphMemAllocNodeGetParams(node)
    return {"address": int(params.dptr), "nbytes": int(params.bytesize)}


def _mem_op_parameters(driver: Driver, node: Any) -> dict[str, Any]:
    params = driver.cuGraphBatchMemOpNodeGetParams(node)
    return {"count": params.count, "flags": params.flags}


# kind -> what the driver tells of a node of that kind
_READ: dict[str, Callable[[Driver, Any], dict[str, Any]]] = {
    "kernel": lambda driver, node: kernel_parameters(driver, node, None),
    "memcpy": _memcpy_parameters,
    "memset": _memset_parameters,
    "host": _host_parameters,
    "event record": lambda driver, node: {"event": int(driver.cuGraphEventRecordNodeGetEvent(node))},
    "event wait": lambda driver, node: {"event": int(driver.cuGraphEventWaitNodeGetEvent(node))},
    "child": lambda driver, node: {"graph": int(driver.cuGraphChildGraphNodeGetGraph(node))},
    "alloc": _alloc_parameters,
    "free": lambda driver, node: {"address": int(driver.cuGraphMemFreeNodeGetParams(node))},
    "memory operations": _mem_op_parameters,
}


def _short(value: Any) -> str:
    if isinstance(value, Buffer):
        extents = "x".join(map(str, value.shape)) or "1"
        place = "closed" if value.closed else f"{value.address:#x}"
        return f"{value.dtype}[{extents}]@{place}"
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape:
        return f"{type(value).__module__.split('.')[0]} {value.dtype}[{'x'.join(map(str, value.shape))}]"
    return str(value)


def _extents(extents: tuple[int, int, int]) -> str:
    significant = max((i for i, extent in enumerate(extents) if extent != 1), default=0) + 1
    return "x".join(map(str, extents[:significant]))
