"""Streams of the CPU devices: what a capture forbids and how it ends, events, memory operations, other processes.

What an H200 answers to the calls of `tests/cpu/refusals` is compared there.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import code

from drvkit.cpu import driver as cpu
from drvkit.cpu.machine import machine
from drvkit.driver import open_driver

ROOT = Path(__file__).resolve().parent.parent.parent
driver = open_driver("cpu")

KERNELS = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry early(.param .u64 from, .param .u32 value)
{
  .reg .b64 %rd<3>; .reg .b32 %r<3>; .reg .pred %p1;
  ld.param.u64 %rd1, [from]; cvta.to.global.u64 %rd2, %rd1; ld.param.u32 %r1, [value];
  griddepcontrol.launch_dependents;
again:
  ld.volatile.global.u32 %r2, [%rd2];
  setp.ne.u32 %p1, %r2, %r1;
  @%p1 bra again;
  ret;
}
\0"""

THREAD_LOCAL, RELAXED = 1, 2
PROGRAMMATIC_EVENT, LAUNCH_COMPLETION_EVENT = "PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT"


class World:
    """A context, three streams, a kernel, 1024 bytes of memory, 4 of the host's and two events."""

    def __init__(self) -> None:
        self.context = driver.cuDevicePrimaryCtxRetain(0)
        driver.cuCtxSetCurrent(self.context)
        self.stream, self.other, self.third = (driver.cuStreamCreate(1) for _ in range(3))
        self.module = driver.cuModuleLoadData(KERNELS)
        self.kernel = driver.cuModuleGetFunction(self.module, b"early")
        self.memory, self.pinned = driver.cuMemAlloc(1024), driver.cuMemHostAlloc(4, 0)
        self.word = ctypes.c_uint32.from_address(self.pinned)
        self.word.value = 0
        self.event, self.second = (driver.cuEventCreate(2) for _ in range(2))
        driver.cuMemsetD8(self.memory, 0, 1024)

    def close(self) -> None:
        for stream in (self.stream, self.other, self.third):
            if not int(cpu.cuStreamGetPriority(stream)[0]):
                cpu.cuStreamEndCapture(stream)
                driver.cuStreamDestroy(stream)
        for event in (self.event, self.second):
            driver.cuEventDestroy(event)
        driver.cuMemFree(self.memory)
        driver.cuMemFreeHost(self.pinned)
        driver.cuModuleUnload(self.module)
        driver.cuDevicePrimaryCtxRelease(0)

    def fill(self, stream: Any, value: int = 9) -> str:
        return code(cpu.cuMemsetD32Async(self.memory, value, 1, stream))

    def fork(self) -> None:
        """The other stream joins the capture of the first, and gets work."""
        driver.cuEventRecord(self.event, self.stream)
        driver.cuStreamWaitEvent(self.other, self.event, 0)
        assert self.fill(self.other) == "SUCCESS"

    def read(self) -> int:
        host = np.zeros(1, np.uint32)
        driver.cuMemcpyDtoH(host, self.memory, 4)
        return int(host[0])

    def launch(self, event: str | None = None, *, at_start: bool = False, which: Any = None) -> str:
        """A kernel on the first stream that ends when the word is 1, and may record an event before."""
        config = cpu.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimX = config.blockDimY = config.blockDimZ = 1
        config.hStream = self.stream
        if event is not None:
            attribute = cpu.CUlaunchAttribute()
            attribute.id = getattr(cpu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{event}")
            programmatic = event == PROGRAMMATIC_EVENT
            part = attribute.value.programmaticEvent if programmatic else attribute.value.launchCompletionEvent
            part.event = self.event if which is None else which
            if programmatic:
                part.triggerAtBlockStart = int(at_start)
            config.attrs, config.numAttrs = [attribute], 1
        args = ((self.pinned, 1), (ctypes.c_uint64, ctypes.c_uint32))
        return code(cpu.cuLaunchKernelEx(config, self.kernel, args, 0))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def begin(stream: Any, mode: int = THREAD_LOCAL) -> None:
    driver.cuStreamBeginCapture(stream, cpu.CUstreamCaptureMode(mode))


def begin_into(stream: Any, graph: Any) -> Any:
    return cpu.cuStreamBeginCaptureToGraph(stream, graph, None, None, 0, cpu.CUstreamCaptureMode(THREAD_LOCAL))


def status(stream: Any) -> str:
    name: str = driver.cuStreamIsCapturing(stream).name
    return name.removeprefix("CU_STREAM_CAPTURE_STATUS_").lower()


def end(stream: Any) -> str:
    result = cpu.cuStreamEndCapture(stream)
    if not result[0]:
        driver.cuGraphDestroy(result[1])
    return code(result)


def in_thread(function: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()))
    thread.start()
    thread.join()
    return answers[0]


def edges(graph: Any) -> list[tuple[int, int]]:
    """The ports and types of its edges."""
    *_, count = driver.cuGraphGetEdges(graph)
    data = driver.cuGraphGetEdges(graph, count)[2] if count else []
    return [(int(each.from_port), int(each.type)) for each in data]


def ports(stream: Any) -> list[tuple[int, int]]:
    """Those of the edges that the next work of a captured stream would have."""
    return [(int(each.from_port), int(each.type)) for each in driver.cuStreamGetCaptureInfo(stream)[4]]


# ---- what a capture forbids ----------------------------------------------------------------------------------------

UNSAFE: dict[str, Callable[[World], Any]] = {
    "ask for another stream": lambda w: cpu.cuStreamQuery(w.other),
    "wait for another stream": lambda w: cpu.cuStreamSynchronize(w.other),
    "ask for an event": lambda w: cpu.cuEventQuery(w.event),
    "free nothing": lambda w: cpu.cuMemFree(cpu.CUdeviceptr(0)),
    "free nonsense": lambda w: cpu.cuMemFree(cpu.CUdeviceptr(64)),
    "allocate in order": lambda w: cpu.cuMemAllocAsync(64, w.other),
    "free in order": lambda w: cpu.cuMemFreeAsync(cpu.CUdeviceptr(64), w.other),
    "ask a pool": lambda w: cpu.cuMemPoolGetAttribute(
        driver.cuDeviceGetDefaultMemPool(0), cpu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    ),
    "trim a pool": lambda w: cpu.cuMemPoolTrimTo(driver.cuDeviceGetDefaultMemPool(0), 0),
    "instantiate": lambda w: cpu.cuGraphInstantiate(driver.cuGraphCreate(0), 0),
    "destroy an exec": lambda w: cpu.cuGraphExecDestroy(cpu.CUgraphExec(5)),
    "unload": lambda w: cpu.cuModuleUnload(w.module),
}
SAFE: dict[str, Callable[[World], Any]] = {
    "copy at once": lambda w: cpu.cuMemcpyDtoH(np.zeros(4, np.uint8), w.memory, 4),
    "fill at once": lambda w: cpu.cuMemsetD8(w.memory, 1, 4),
    "load": lambda w: cpu.cuModuleLoadData(KERNELS),
    "launch elsewhere": lambda w: cpu.cuMemsetD8Async(w.memory, 1, 4, w.other),
    "allocate in a capture": lambda w: cpu.cuMemAllocAsync(64, w.stream),
    "make a stream": lambda w: cpu.cuStreamDestroy(driver.cuStreamCreate(1)),
    "clone": lambda w: cpu.cuGraphClone(driver.cuGraphCreate(0)),
}


@pytest.mark.parametrize("what", UNSAFE)
def test_what_is_unsafe_breaks_the_captures_of_its_thread_that_are_not_relaxed(world: World, what: str) -> None:
    begin(world.stream)
    begin(world.third, RELAXED)
    assert code(UNSAFE[what](world)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert (status(world.stream), status(world.third)) == ("invalidated", "active")
    assert (end(world.stream), end(world.third)) == ("STREAM_CAPTURE_INVALIDATED", "SUCCESS")


@pytest.mark.parametrize("what", SAFE)
def test_what_is_safe_leaves_captures_alone(world: World, what: str) -> None:
    begin(world.stream)
    assert code(SAFE[what](world)) == "SUCCESS"
    assert end(world.stream) == "SUCCESS"


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["global", "thread local", "relaxed"])
def test_to_wait_for_a_context_breaks_all_captures_there_and_none_elsewhere(world: World, mode: int) -> None:
    def synchronize() -> str:
        driver.cuCtxSetCurrent(world.context)
        return code(cpu.cuCtxSynchronize())

    elsewhere = driver.cuDevicePrimaryCtxRetain(1)
    driver.cuCtxPushCurrent(elsewhere)
    distant = driver.cuStreamCreate(1)
    begin(distant, mode)
    driver.cuCtxPopCurrent()
    begin(world.stream, mode)
    assert in_thread(synchronize) == "STREAM_CAPTURE_UNSUPPORTED"
    assert (end(world.stream), end(distant)) == ("STREAM_CAPTURE_INVALIDATED", "SUCCESS")
    assert in_thread(synchronize) == "SUCCESS"
    driver.cuStreamDestroy(distant)
    driver.cuDevicePrimaryCtxRelease(1)


def test_the_default_stream_does_not_join_a_capture(world: World) -> None:
    begin(world.stream)
    driver.cuEventRecord(world.event, world.stream)
    assert code(cpu.cuStreamWaitEvent(cpu.CUstream(0), world.event, 0)) == "STREAM_CAPTURE_IMPLICIT"
    assert end(world.stream) == "STREAM_CAPTURE_INVALIDATED"


# ---- how a capture ends --------------------------------------------------------------------------------------------


def test_another_thread_ends_a_capture_and_loses_its_graph(world: World) -> None:
    graph = driver.cuGraphCreate(0)
    driver.cuStreamBeginCaptureToGraph(world.stream, graph, None, None, 0, cpu.CUstreamCaptureMode(THREAD_LOCAL))
    world.fork()
    assert in_thread(lambda: code(cpu.cuStreamEndCapture(world.other))) == "STREAM_CAPTURE_UNMATCHED"
    assert status(world.stream) == "invalidated"
    assert in_thread(lambda: code(cpu.cuStreamEndCapture(world.stream))) == "STREAM_CAPTURE_INVALIDATED"
    assert (status(world.stream), status(world.other)) == ("none", "none")
    assert code(cpu.cuGraphGetNodes(graph)) == "INVALID_VALUE"


def test_a_capture_goes_with_the_stream_that_began_it(world: World) -> None:
    origin = driver.cuStreamCreate(1)
    begin(origin)
    driver.cuEventRecord(world.event, origin)
    driver.cuStreamWaitEvent(world.other, world.event, 0)
    graph = driver.cuStreamGetCaptureInfo(world.other)[2]
    driver.cuStreamDestroy(origin)
    assert status(world.other) == "none"
    assert code(cpu.cuGraphDestroy(graph)) == "INVALID_VALUE"
    assert code(cpu.cuEventQuery(world.event)) == "INVALID_VALUE"
    assert code(cpu.cuMemFree(driver.cuMemAlloc(16))) == "SUCCESS"


def test_what_a_destroyed_stream_had_to_do_is_not_joined(world: World) -> None:
    joins = driver.cuStreamCreate(1)
    begin(world.stream)
    assert world.fill(world.stream) == "SUCCESS"
    driver.cuEventRecord(world.event, world.stream)
    driver.cuStreamWaitEvent(joins, world.event, 0)
    driver.cuStreamDestroy(joins)
    assert end(world.stream) == "SUCCESS", "it had nothing to do"
    forked, begun = driver.cuStreamCreate(1), world.stream
    begin(begun)
    driver.cuEventRecord(world.event, begun)
    driver.cuStreamWaitEvent(forked, world.event, 0)
    assert world.fill(forked) == "SUCCESS"
    driver.cuStreamDestroy(forked)
    assert status(begun) == "active"
    assert end(begun) == "STREAM_CAPTURE_UNJOINED"


def test_a_graph_that_is_captured_into_takes_no_other_capture_and_stays(world: World) -> None:
    graph = driver.cuGraphCreate(0)
    assert code(begin_into(world.stream, graph)) == "SUCCESS"
    assert world.fill(world.stream) == "SUCCESS"
    (node,), _ = driver.cuGraphGetNodes(graph, 1)
    assert code(begin_into(world.other, graph)) == "ILLEGAL_STATE"
    assert code(cpu.cuGraphDestroy(graph)) == "ILLEGAL_STATE"
    assert code(cpu.cuGraphDestroyNode(node)) == "ILLEGAL_STATE"
    assert code(cpu.cuGraphAddEmptyNode(graph, [node], 1)) == "SUCCESS"
    driver.cuStreamEndCapture(world.stream)
    assert driver.cuGraphGetNodes(graph)[1] == 2
    for call in (cpu.cuGraphDestroyNode(node), begin_into(world.other, graph)):
        assert code(call) == "SUCCESS"
    assert end(world.other) == "SUCCESS"


def test_a_broken_capture_takes_the_body_that_it_went_into(world: World) -> None:
    graph, params = driver.cuGraphCreate(0), cpu.CUgraphNodeParams()
    params.type = cpu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = driver.cuGraphConditionalHandleCreate(graph, world.context, 1, 1)
    params.conditional.type = cpu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size, params.conditional.ctx = 1, world.context
    driver.cuGraphAddNode(graph, None, None, 0, params)
    (body,) = params.conditional.phGraph_out
    assert code(begin_into(world.stream, body)) == "SUCCESS"
    assert code(cpu.cuGraphDestroy(graph)) == "ILLEGAL_STATE"
    cpu.cuStreamQuery(world.stream)
    assert end(world.stream) == "STREAM_CAPTURE_INVALIDATED"
    assert code(cpu.cuGraphGetNodes(body)) == "INVALID_VALUE"
    assert code(cpu.cuGraphInstantiate(graph, 0)) == "INVALID_VALUE"
    assert code(cpu.cuGraphDestroy(graph)) == "SUCCESS"


# ---- events --------------------------------------------------------------------------------------------------------


def test_an_event_of_a_capture_that_is_over_is_of_no_use_until_it_is_recorded(world: World) -> None:
    timed, other = driver.cuEventCreate(0), driver.cuEventCreate(0)
    driver.cuEventRecord(other, world.other)
    driver.cuStreamSynchronize(world.other)
    begin(world.stream)
    driver.cuEventRecord(timed, world.stream)
    assert code(cpu.cuEventElapsedTime(other, timed)) == "CAPTURED_EVENT"
    assert end(world.stream) == "SUCCESS", "a time that is asked for breaks nothing"
    asked = [
        cpu.cuEventQuery(timed),
        cpu.cuEventSynchronize(timed),
        cpu.cuEventElapsedTime(timed, other),
        cpu.cuStreamWaitEvent(world.other, timed, 0),
        cpu.cuStreamWaitEvent(world.other, timed, 1),
    ]
    assert [code(result) for result in asked] == ["INVALID_VALUE"] * 5
    begin(world.stream)
    assert code(cpu.cuStreamWaitEvent(world.stream, timed, 0)) == "INVALID_VALUE"
    assert end(world.stream) == "STREAM_CAPTURE_INVALIDATED"
    driver.cuEventRecord(timed, world.other)
    driver.cuEventSynchronize(timed)
    assert driver.cuEventElapsedTime(other, timed) >= 0
    for event in (timed, other):
        driver.cuEventDestroy(event)


def test_a_wait_in_a_broken_capture_leaves_others_alone(world: World) -> None:
    begin(world.stream)
    begin(world.other)
    driver.cuEventRecord(world.event, world.stream)
    cpu.cuStreamQuery(world.other)
    for external in (0, 1):
        assert code(cpu.cuStreamWaitEvent(world.other, world.event, external)) == "STREAM_CAPTURE_INVALIDATED"
    assert (end(world.stream), end(world.other)) == ("SUCCESS", "STREAM_CAPTURE_INVALIDATED")


def test_an_external_wait_is_a_node_that_waits_at_each_launch(world: World) -> None:
    assert code(cpu.cuStreamWaitEvent(world.stream, world.event, 1)) == "ILLEGAL_STATE"
    begin(world.stream)
    driver.cuStreamWaitEvent(world.stream, world.event, 1)
    assert world.fill(world.stream, 7) == "SUCCESS"
    graph = driver.cuStreamEndCapture(world.stream)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    driver.cuStreamWaitValue32(world.other, world.pinned, 1, 1)
    assert world.fill(world.other, 3) == "SUCCESS"
    driver.cuEventRecord(world.event, world.other)
    driver.cuGraphLaunch(exec_, world.stream)
    assert code(cpu.cuStreamQuery(world.stream)) == "NOT_READY"
    world.word.value = 1
    driver.cuStreamSynchronize(world.stream)
    assert world.read() == 7
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)


@pytest.mark.parametrize(
    ("event", "at_start", "port"),
    [
        (PROGRAMMATIC_EVENT, False, (1, 1)),
        (PROGRAMMATIC_EVENT, True, (2, 1)),
        (LAUNCH_COMPLETION_EVENT, False, (2, 0)),
    ],
)
def test_the_event_of_a_kernel_is_a_port_of_it_for_work_of_any_kind(
    world: World, event: str, at_start: bool, port: tuple[int, int]
) -> None:
    begin(world.stream)
    assert world.launch(event, at_start=at_start) == "SUCCESS"
    driver.cuStreamWaitEvent(world.other, world.event, 0)
    assert ports(world.other) == [port]
    driver.cuEventRecord(world.second, world.stream)
    driver.cuStreamWaitEvent(world.third, world.second, 0)
    driver.cuStreamWaitEvent(world.third, world.event, 0)
    assert ports(world.third) == [(0, 0)], "its end is behind all other moments of it"
    assert world.fill(world.other) == "SUCCESS"
    driver.cuEventRecord(world.second, world.other)
    driver.cuStreamWaitEvent(world.stream, world.second, 0)
    graph = driver.cuStreamEndCapture(world.stream)
    assert edges(graph) == [port]
    clone = driver.cuGraphClone(graph)
    assert edges(clone) == [port]
    for each in (graph, clone):
        driver.cuGraphExecDestroy(driver.cuGraphInstantiate(each, 0))
        driver.cuGraphDestroy(each)


@pytest.mark.usefixtures("races_on_purpose")
def test_behind_a_programmatic_port_only_a_kernel_begins_early(world: World) -> None:
    begin(world.stream)
    assert world.launch(PROGRAMMATIC_EVENT) == "SUCCESS"
    driver.cuStreamWaitEvent(world.other, world.event, 0)
    assert world.fill(world.other, 9) == "SUCCESS"
    driver.cuEventRecord(world.second, world.other)
    driver.cuStreamWaitEvent(world.stream, world.second, 0)
    graph = driver.cuStreamEndCapture(world.stream)
    exec_ = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    for _ in range(20):
        assert code(cpu.cuStreamQuery(world.stream)) == "NOT_READY"
    assert world.read() == 0, "the kernel has not ended"
    world.word.value = 1
    driver.cuStreamSynchronize(world.stream)
    assert world.read() == 9
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)


def test_ports_that_a_kernel_does_not_have_are_refused(world: World) -> None:
    def begins(node: Any, *port: int) -> str:
        data = cpu.CUgraphEdgeData()
        data.from_port, data.type = port[0], cpu.CUgraphDependencyType(port[1])
        mode = cpu.CUstreamCaptureMode(THREAD_LOCAL)
        result = cpu.cuStreamBeginCaptureToGraph(world.stream, graph, [node], [data], 1, mode)
        if not result[0]:
            assert world.fill(world.stream) == "SUCCESS"
            driver.cuStreamEndCapture(world.stream)
        return code(result)

    begin(world.stream)
    assert world.launch() == "SUCCESS"
    assert world.fill(world.stream) == "SUCCESS"
    graph = driver.cuStreamEndCapture(world.stream)
    kernel, fill = driver.cuGraphGetNodes(graph, 2)[0]
    assert [begins(kernel, *port) for port in ((1, 1), (2, 1), (2, 0), (0, 0))] == ["SUCCESS"] * 4
    assert [begins(kernel, *port) for port in ((1, 0), (7, 0), (0, 1))] == ["INVALID_VALUE"] * 3
    assert begins(fill, 1, 1) == "INVALID_VALUE"
    assert edges(graph) == [(0, 0), (1, 1), (2, 1), (2, 0), (0, 0)]
    driver.cuGraphDestroy(graph)


def test_a_kernel_records_no_event_with_a_time(world: World) -> None:
    timed = driver.cuEventCreate(0)
    assert world.launch(PROGRAMMATIC_EVENT, which=timed) == "NOT_SUPPORTED"
    assert code(cpu.cuStreamQuery(world.stream)) == "SUCCESS", "what is refused is not launched"
    driver.cuEventDestroy(timed)


# ---- memory operations ---------------------------------------------------------------------------------------------


def memory_operation(world: World, kind: str, flags: int = 0) -> Any:
    params = cpu.CUstreamBatchMemOpParams()
    params.operation = getattr(cpu.CUstreamBatchMemOpType, f"CU_STREAM_MEM_OP_{kind}")
    if kind == "BARRIER":
        params.memoryBarrier.operation, params.memoryBarrier.flags = params.operation, flags
        return params
    part = params.waitValue if kind.startswith("WAIT") else params.writeValue
    part.operation, part.address, part.flags = params.operation, world.memory, flags
    return params


def test_how_many_memory_operations_make_a_batch(world: World) -> None:
    write = memory_operation(world, "WRITE_VALUE_32")
    codes = [code(cpu.cuStreamBatchMemOp(world.stream, count, [write] * count, 0)) for count in (0, 1, 255, 256)]
    assert codes == ["SUCCESS", "SUCCESS", "SUCCESS", "INVALID_VALUE"]
    assert code(cpu.cuStreamBatchMemOp(world.stream, 0, [], 1)) == "INVALID_VALUE"
    begin(world.stream)
    driver.cuStreamBatchMemOp(world.stream, 0, [], 0)
    graph = driver.cuStreamEndCapture(world.stream)
    assert driver.cuGraphGetNodes(graph)[1] == 1, "also of none"
    exec_ = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphLaunch(exec_, world.stream)
    driver.cuStreamSynchronize(world.stream)
    driver.cuGraphExecDestroy(exec_)
    driver.cuGraphDestroy(graph)


@pytest.mark.parametrize(
    ("kind", "flags", "answer"),
    [
        ("WAIT_VALUE_32", 3, "SUCCESS"),
        ("WAIT_VALUE_64", 4, "INVALID_VALUE"),
        ("WAIT_VALUE_32", 1 << 30, "NOT_SUPPORTED"),
        ("WRITE_VALUE_32", 1, "INVALID_VALUE"),
        ("WRITE_VALUE_64", 1 << 30, "INVALID_VALUE"),
        ("BARRIER", 1, "SUCCESS"),
        ("BARRIER", 2, "INVALID_VALUE"),
        ("FLUSH_REMOTE_WRITES", 0, "NOT_SUPPORTED"),
    ],
)
def test_the_flags_of_memory_operations(world: World, kind: str, flags: int, answer: str) -> None:
    assert code(cpu.cuStreamBatchMemOp(world.stream, 1, [memory_operation(world, kind, flags)], 0)) == answer
    driver.cuStreamSynchronize(world.stream)


def test_a_node_tells_the_flags_of_its_barriers(world: World) -> None:
    params = cpu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx, params.count = world.context, 2
    params.paramArray = [memory_operation(world, "BARRIER", 1), memory_operation(world, "WAIT_VALUE_32", 2)]
    graph = driver.cuGraphCreate(0)
    node = driver.cuGraphAddBatchMemOpNode(graph, None, 0, params)
    found = driver.cuGraphBatchMemOpNodeGetParams(node)  # its entries lie in its memory
    barrier, wait = found.paramArray
    assert (barrier.memoryBarrier.flags, wait.waitValue.flags) == (1, 2)
    driver.cuGraphDestroy(graph)


# ---- events that processes share -----------------------------------------------------------------------------------

SHARED = 6  # without a time, for other processes

CHILD = """
import ctypes, sys
from drvkit.cpu import driver as cpu
from drvkit.driver import open_driver
driver = open_driver("cpu")
driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(0))
handle = cpu.CUipcEventHandle()
ctypes.memmove(int(handle.getPtr()), bytes.fromhex(sys.argv[1]), 64)
event, stream = driver.cuIpcOpenEventHandle(handle), driver.cuStreamCreate(1)
def say(*results):
    print(*[result[0].name.removeprefix("CUDA_").removeprefix("ERROR_") for result in results], flush=True)
    sys.stdin.readline()
"""


class Other:
    """Another process that opened an event; it says something, then waits for its turn."""

    def __init__(self, script: str, handle: Any) -> None:
        raw = ctypes.string_at(int(handle.getPtr()), 64).hex()
        command = [sys.executable, "-c", CHILD + script, raw]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def says(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *exc: object) -> None:
        """It ends, whatever it has left to say."""
        if exc[0] is not None:
            self.process.kill()
        self.process.communicate("\n" * 9, timeout=60)
        assert exc[0] is not None or self.process.returncode == 0


@pytest.fixture
def _not_shared() -> Iterator[None]:
    """Tests that come later share nothing with other processes."""
    shared = machine.shared
    yield
    machine.shared = shared


@pytest.mark.usefixtures("_not_shared")
def test_processes_wait_for_each_other_by_an_event(world: World) -> None:
    event = driver.cuEventCreate(SHARED)
    script = """
say(cpu.cuEventQuery(event), cpu.cuEventSynchronize(event), cpu.cuIpcGetEventHandle(event))
driver.cuStreamWaitEvent(stream, event, 0)
say(cpu.cuEventQuery(event), cpu.cuStreamQuery(stream), cpu.cuCtxGetCurrent())
say(cpu.cuEventSynchronize(event), cpu.cuStreamSynchronize(stream))
pinned = driver.cuMemHostAlloc(4, 0)
ctypes.c_uint32.from_address(pinned).value = 0
driver.cuStreamWaitValue32(stream, pinned, 1, 1)
say(cpu.cuEventRecord(event, stream), cpu.cuEventQuery(event))
ctypes.c_uint32.from_address(pinned).value = 1
say(cpu.cuStreamSynchronize(stream), cpu.cuEventQuery(event))
"""
    with Other(script, driver.cuIpcGetEventHandle(event)) as other:
        assert other.says() == ["SUCCESS", "SUCCESS", "INVALID_HANDLE"], "it was not recorded yet"
        driver.cuStreamWaitValue32(world.stream, world.pinned, 1, 1)
        driver.cuEventRecord(event, world.stream)
        other.go_on()
        assert other.says() == ["NOT_READY", "NOT_READY", "SUCCESS"]
        world.word.value = 1
        driver.cuEventSynchronize(event)
        other.go_on()
        assert other.says() == ["SUCCESS", "SUCCESS"]
        other.go_on()
        assert other.says() == ["SUCCESS", "NOT_READY"]
        assert code(cpu.cuEventQuery(event)) == "NOT_READY", "the other has recorded it since"
        driver.cuCtxSynchronize()  # which is no work of this process
        driver.cuStreamWaitEvent(world.other, event, 0)
        assert code(cpu.cuStreamQuery(world.other)) == "NOT_READY"
        other.go_on()
        driver.cuStreamSynchronize(world.other)
        assert code(cpu.cuEventQuery(event)) == "SUCCESS"
        assert other.says() == ["SUCCESS", "SUCCESS"]
    driver.cuEventDestroy(event)


@pytest.mark.usefixtures("_not_shared")
def test_a_record_that_another_process_never_reaches_is_a_deadlock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "patience_s", 0.5)
    event = driver.cuEventCreate(SHARED)
    script = """
driver.cuStreamWaitValue32(stream, driver.cuMemAlloc(4), 1, 1)
say(cpu.cuEventRecord(event, stream))
import os
os._exit(0)
"""
    with Other(script, driver.cuIpcGetEventHandle(event)) as other:
        assert other.says() == ["SUCCESS"]
    assert code(cpu.cuEventSynchronize(event)) == "LAUNCH_TIMEOUT"
    assert "in another process" in str(cpu.explain("CUDA_ERROR_LAUNCH_TIMEOUT"))
    driver.cuDevicePrimaryCtxReset(0)
    driver.cuEventDestroy(event)


@pytest.mark.usefixtures("_not_shared")
def test_what_is_no_event_of_another_process_is_refused(world: World) -> None:
    event = driver.cuEventCreate(SHARED)
    handle = driver.cuIpcGetEventHandle(event)
    raw = ctypes.string_at(int(handle.getPtr()), 64)
    assert ctypes.string_at(int(driver.cuIpcGetEventHandle(event).getPtr()), 64) == raw
    assert code(cpu.cuIpcOpenEventHandle(handle)) == "INVALID_CONTEXT", "this process has it already"
    assert code(cpu.cuIpcOpenEventHandle(cpu.CUipcEventHandle())) == "MAP_FAILED"
    assert code(cpu.cuIpcGetEventHandle(world.event)) == "INVALID_HANDLE"
    assert code(cpu.cuIpcGetEventHandle(cpu.CUevent(0))) == "INVALID_VALUE"
    with Other("say(cpu.cuIpcOpenEventHandle(handle))\nsay(cpu.cuIpcOpenEventHandle(handle))\n", handle) as other:
        assert other.says() == ["SUCCESS"], "once more"
        driver.cuEventDestroy(event)
        later = [driver.cuEventCreate(SHARED) for _ in range(20)]
        starts = [ctypes.string_at(int(driver.cuIpcGetEventHandle(each).getPtr()), 8) for each in later]
        assert raw[:8] in starts, "a later one has a file of the same number"
        other.go_on()
        assert other.says() == ["MAP_FAILED"]
    for each in later:
        driver.cuEventDestroy(each)


def test_only_an_external_record_or_wait_of_a_shared_event_is_captured(world: World) -> None:
    event = driver.cuEventCreate(SHARED)
    begin(world.stream)
    assert code(cpu.cuEventRecord(event, world.stream)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert code(cpu.cuEventRecordWithFlags(event, world.stream, 1)) == "SUCCESS"
    assert code(cpu.cuStreamWaitEvent(world.stream, event, 1)) == "SUCCESS"
    assert world.launch(PROGRAMMATIC_EVENT, which=event) == "NOT_SUPPORTED"
    assert driver.cuGraphGetNodes(driver.cuStreamGetCaptureInfo(world.stream)[2])[1] == 2
    assert code(cpu.cuStreamWaitEvent(world.stream, event, 0)) == "STREAM_CAPTURE_UNSUPPORTED"
    assert end(world.stream) == "STREAM_CAPTURE_INVALIDATED", "which a record does not do"
    driver.cuEventDestroy(event)
