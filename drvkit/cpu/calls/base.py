"""What all functions of the stand-in share: how they are made, what they know, and how they read handles."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from ..graphs import EdgeData, Exec, Graph, Node, check_port
from ..handles import RefusedError, handles
from ..machine import Work, machine
from ..operations import GraphMemory, Kernel, LibraryKernel
from ..order import tracker
from ..storage import Pool
from ..streams import Context, Event, Stream, guard_legacy

__all__ = [
    "DEVICES",
    "HOST_BYTES",
    "OK",
    "State",
    "ThreadState",
    "call",
    "code_of",
    "context_of",
    "context_on",
    "cu",
    "current",
    "device_of",
    "drain",
    "edge_data",
    "edge_struct",
    "edges_of",
    "enter",
    "entered",
    "event_of",
    "exec_of",
    "graph_of",
    "host_address",
    "kernel_of",
    "node_of",
    "number_of",
    "report",
    "saw",
    "state",
    "stream_of",
    "thread_state",
    "wait",
    "wait_for_device",
]

DEVICES = int(os.environ.get("DRVKIT_CPU_DEVICES", "8"))
HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
OK = cu.CUresult.CUDA_SUCCESS


class State:
    """What the driver knows of the process."""

    def __init__(self) -> None:
        self.initialized = self.lost = False
        self.parts = False  # this process goes on in its forks
        self.contexts: dict[int, Context] = {}
        self.used: dict[int, int] = dict.fromkeys(range(DEVICES), 0)  # bytes of device memory
        self.pools: dict[int, Pool] = {}  # what devices allocate from
        self.default_pools: dict[int, Pool] = {}
        self.pool_of: dict[int, Pool] = {}  # by address
        self.freeing: set[int] = set()  # addresses of which the free has not come yet, in the order of a stream
        self.graph_memory: dict[int, GraphMemory] = {}  # by address


class ThreadState(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context | None] = [None]  # the current one is the last
        self.streams: dict[Context, Stream] = {}  # default streams of the thread
        self.reports: dict[str, str] = {}  # of its newest failures, by result code


state = State()
thread_state = ThreadState()


def _forked() -> None:
    """The driver cannot be used in the child of a process that used it."""
    if state.initialized and not state.parts:
        state.initialized, state.lost = False, True
        handles.forget_all()


os.register_at_fork(after_in_child=_forked)


def call(outputs: int = 0, *, locked: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """A function of the driver with so many results. ``locked``: it has the machine to itself, and does not wait."""

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        nothing = (None,) * outputs

        @functools.wraps(function)
        def call(*args: Any) -> tuple[Any, ...]:
            try:
                enter()
                if locked:
                    with machine:
                        result = function(*args)
                    machine.relieve()
                else:
                    result = function(*args)
            except RefusedError as refused:
                return (report(refused), *nothing)
            return (OK, result) if outputs == 1 else (OK, *result) if outputs else (OK,)

        return call

    return decorate


def enter() -> None:
    if not state.initialized:
        raise RefusedError("NOT_INITIALIZED")
    if machine.is_own_thread():
        raise RefusedError("NOT_PERMITTED")


def report(refused: RefusedError) -> Any:
    """The result code of a refusal, whose reason is kept for this thread to ask for."""
    code = code_of(refused.code)
    thread_state.reports[code.name] = refused.why
    return code


def code_of(name: str) -> Any:
    return cu.CUresult.__members__[f"CUDA_ERROR_{name}"]


# What went wrong in a context is told by each call that uses it: because it is the current one, or because of a handle.
# Calls that use none (definitions of graphs, pools, physical memory, devices) go on as before.


def entered() -> Context:
    """The current context, whatever went wrong there."""
    context = thread_state.contexts[-1]
    if context is None:
        raise RefusedError("INVALID_CONTEXT")
    return context


def current() -> Context:
    context = entered()
    context.check()
    return context


def context_of(handle: Any) -> Context:
    number = number_of(handle)
    context = handles.find(number, Context, "INVALID_CONTEXT") if number else entered()
    context.check()
    return context


def context_on(device: int) -> Context:
    """Of what is known to have one there."""
    context = state.contexts[device]
    context.check()
    return context


def number_of(handle: Any) -> int:
    return 0 if handle is None else int(handle)


def device_of(device: Any) -> int:
    number = int(device)
    if not 0 <= number < DEVICES:
        raise RefusedError("INVALID_DEVICE")
    return number


def stream_of(handle: Any) -> Stream:
    number = number_of(handle)
    if number > 2:
        stream = handles.find(number, Stream, "INVALID_HANDLE")
        stream.context.check()
        return stream
    context = current()
    if number == 2:
        own = thread_state.streams.get(context)
        if own is None:
            own = thread_state.streams[context] = Stream(context, blocking=True)
        return own
    guard_legacy(context)
    return context.legacy


def event_of(handle: Any) -> Event:
    """Its context is not used by that: graphs may have events of any."""
    return handles.find(number_of(handle), Event, "INVALID_HANDLE")


def kernel_of(handle: Any) -> Kernel:
    """Of a function, or of what the current device has of a library's kernel."""
    found = handles.find(number_of(handle), object, "INVALID_HANDLE")
    if isinstance(found, LibraryKernel):
        return found.on(current().device)
    if not isinstance(found, Kernel):
        raise RefusedError("INVALID_HANDLE")
    context_on(found.module.device)
    return found


def wait(context: Context, over: Callable[[], bool]) -> None:
    machine.wait(over)
    context.check()
    with machine:
        Pool.release(context.device)


def wait_for_device(context: Context) -> None:
    drain(context.device)
    context.check()


def drain(device: int) -> None:
    """Wait until a device has nothing to do any more, also because something went wrong there."""
    machine.wait(lambda: not machine.left.get(device))
    with machine:
        Pool.release(device)
        if tracker.on:
            tracker.saw_device(device)


def saw(work: Work | None) -> None:
    """The caller learns that a work is over: what it calls from now on comes after it."""
    if tracker.on and work is not None:
        with machine:
            tracker.saw(work.order)


def host_address(memory_: Any) -> int:
    """Of host memory given as an address or as an object with the buffer protocol."""
    if memory_ is None:
        return 0
    if hasattr(memory_, "__int__") and not isinstance(memory_, np.ndarray):
        return int(memory_)
    return int(np.frombuffer(memory_, np.uint8).ctypes.data)


# Graphs


def graph_of(handle: Any) -> Graph:
    return handles.find(number_of(handle), Graph)


def node_of(handle: Any, *kinds: str) -> Node:
    node = handles.find(number_of(handle), Node)
    if kinds and node.kind not in kinds:
        raise RefusedError("INVALID_VALUE")
    return node


def exec_of(handle: Any) -> Exec:
    return handles.find(number_of(handle), Exec)


def edges_of(graph: Graph, dependencies: Any, data: Any, count: int) -> list[tuple[Node, EdgeData]]:
    if not count:
        return []
    if len(dependencies) < count or (data is not None and len(data) < count):
        raise RefusedError("INVALID_VALUE")
    nodes = [node_of(handle) for handle in dependencies[:count]]
    if any(node.graph is not graph for node in nodes):
        raise RefusedError("INVALID_VALUE")
    edges = list(zip(nodes, edge_data(data, count), strict=True))
    for node, port in edges:
        check_port(node.kind, port)
    return edges


def edge_data(data: Any, count: int) -> list[EdgeData]:
    if data is None:
        return [(0, 0, 0)] * count
    return [(int(d.from_port), int(d.to_port), int(d.type)) for d in data[:count]]


def edge_struct(data: EdgeData) -> Any:
    made = cu.CUgraphEdgeData()
    made.from_port, made.to_port = data[:2]
    made.type = cu.CUgraphDependencyType(data[2])
    return made
