"""Streams, events, and the capture of streams."""

from __future__ import annotations

import ctypes
from typing import Any

from ..graphs import EventRecord, Graph
from ..handles import RefusedError, handles
from ..machine import machine
from ..operations import BARRIER, WAIT, WRITE, HostCall, MemOp, MemOps
from ..storage import Records
from ..streams import (
    GREATEST_PRIORITY,
    LEAST_PRIORITY,
    Capture,
    Event,
    Stream,
    captured_graphs,
    guard,
    of_thread,
)
from .base import (
    call,
    cu,
    current,
    edge_struct,
    edges_of,
    event_of,
    graph_of,
    host_address,
    number_of,
    saw,
    stream_of,
    wait,
)


@call(1)
def cuStreamCreate(flags: Any) -> Any:
    return _new_stream(flags, 0)


@call(1)
def cuStreamCreateWithPriority(flags: Any, priority: int) -> Any:
    return _new_stream(flags, priority)


def _new_stream(flags: Any, priority: int) -> Any:
    if int(flags) not in (0, 1):
        raise RefusedError("INVALID_VALUE")
    clamped = max(GREATEST_PRIORITY, min(LEAST_PRIORITY, priority))
    return cu.CUstream(Stream(current(), blocking=int(flags) == 0, priority=clamped).handle)


@call()
def cuStreamDestroy(stream: Any) -> None:
    found = handles.find(number_of(stream), Stream, "INVALID_HANDLE")
    found.context.check()
    found.destroy()


@call(1)
def cuStreamGetPriority(stream: Any) -> int:
    return stream_of(stream).priority


@call(1)
def cuStreamGetFlags(stream: Any) -> int:
    return 0 if stream_of(stream).blocking else 1


@call(1)
def cuStreamGetCtx(stream: Any) -> Any:
    return cu.CUcontext(stream_of(stream).context.handle)


@call(1)
def cuStreamGetDevice(stream: Any) -> Any:
    return cu.CUdevice(stream_of(stream).context.device)


def idle_stream(handle: Any) -> Stream:
    """A stream that is not captured; asking for its work ends a capture."""
    stream = stream_of(handle)
    if stream.capture is not None:
        stream.capture.invalidate()
        raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")
    return stream


@call(locked=False)
def cuStreamSynchronize(stream: Any) -> None:
    with machine:
        found = idle_stream(stream)
        guard()
        work = found.tail
    wait(found.context, lambda: found.done)
    saw(work)


@call(locked=False)
def cuStreamQuery(stream: Any) -> None:
    with machine:
        found = idle_stream(stream)
        guard()
        work = found.tail
    if not found.done:
        machine.poll()
    found.context.check()
    if not found.done:
        raise RefusedError("NOT_READY")
    saw(work)


@call()
def cuStreamWaitEvent(stream: Any, event: Any, flags: int) -> None:
    queue, found = stream_of(stream), event_of(event)
    if flags not in (0, 1):
        raise RefusedError("INVALID_VALUE")
    queue.wait(found, external=flags == 1)


@call()
def cuLaunchHostFunc(stream: Any, function: Any, data: Any) -> None:
    queue = stream_of(stream)
    queue.queue(host_call(queue.context.device, function, data))


def host_call(device: int, function: Any, data: Any) -> HostCall:
    address = number_of(function)
    if not address:
        raise RefusedError("INVALID_VALUE")
    machine.host_thread(device)
    return HostCall(device, address, host_address(data))


@call()
def cuStreamWriteValue32(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(2, int(address), int(value), flags))


@call()
def cuStreamWriteValue64(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(5, int(address), int(value), flags))


@call()
def cuStreamWaitValue32(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(1, int(address), int(value), flags))


@call()
def cuStreamWaitValue64(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(4, int(address), int(value), flags))


@call()
def cuStreamBatchMemOp(stream: Any, count: int, params: Any, flags: int) -> None:
    if len(params) < count:
        raise RefusedError("INVALID_VALUE")
    _queue_ops(stream, *map(mem_op, params[:count]), flags=flags)


def _queue_ops(stream: Any, *ops: MemOp, flags: int = 0) -> None:
    queue = stream_of(stream)
    operation = MemOps(queue.context.device, ops, flags)
    operation.check()
    queue.queue(operation)


def mem_op(params: Any) -> MemOp:
    """A ``CUstreamBatchMemOpParams``."""
    operation = int(params.operation)
    if operation not in WAIT | WRITE:
        flags = params.memoryBarrier.flags if operation == BARRIER else 0
        return MemOp(operation, 0, 0, int(flags))
    part = params.waitValue if operation in WAIT else params.writeValue
    value = part.value64 if (WAIT | WRITE)[operation] == 8 else part.value
    return MemOp(operation, int(part.address), int(value), int(part.flags))


@call(1)
def cuEventCreate(flags: Any) -> Any:
    number = int(flags)
    if number & ~7 or (number & 4 and not number & 2):
        raise RefusedError("INVALID_VALUE")
    context = current()
    records = Records() if number & 4 else None
    return cu.CUevent(Event(context, timing=not number & 2, records=records).handle)


@call()
def cuEventDestroy(event: Any) -> None:
    found = event_of(event)
    found.context.check()
    handles.drop(found.handle)


@call(1)
def cuIpcGetEventHandle(event: Any) -> Any:
    if not number_of(event):
        raise RefusedError("INVALID_VALUE")
    found, handle = event_of(event), cu.CUipcEventHandle()
    found.context.check()
    if found.records is None:
        raise RefusedError("INVALID_HANDLE")
    ctypes.memmove(int(handle.getPtr()), found.records.export().ljust(64, b"\0"), 64)
    return handle


@call(1)
def cuIpcOpenEventHandle(handle: Any) -> Any:
    context = current()
    records = Records.open(ctypes.string_at(int(handle.getPtr()), 64))
    return cu.CUevent(Event(context, timing=False, records=records).handle)


@call()
def cuEventRecord(event: Any, stream: Any) -> None:
    _record(event, stream)


@call()
def cuEventRecordWithFlags(event: Any, stream: Any, flags: int) -> None:
    """With ``CU_EVENT_RECORD_EXTERNAL`` a captured record is a node."""
    if flags not in (0, 1):
        raise RefusedError("INVALID_VALUE")
    if not flags:
        _record(event, stream)
        return
    queue, found = stream_of(stream), event_of(event)
    if queue.capture is None:
        raise RefusedError("ILLEGAL_STATE")
    queue.queue(EventRecord(queue.context.device, found))


def _record(event: Any, stream: Any) -> None:
    queue, found = stream_of(stream), event_of(event)
    if queue.context is not found.context:
        raise RefusedError("INVALID_HANDLE")
    queue.record(found)


def _waitable(handle: Any) -> Event:
    """An event that was not recorded in a capture; asking for such a one ends the capture."""
    event = event_of(handle)
    event.context.check()
    inside = event.inside()
    if inside is not None:
        inside[0].invalidate()
        raise RefusedError("CAPTURED_EVENT")
    guard()
    return event


@call(locked=False)
def cuEventQuery(event: Any) -> None:
    with machine:
        found = _waitable(event)
        reached = found.reached
    if not reached:
        machine.poll()
    found.context.check()
    with machine:
        if not found.reached:  # where another process recorded it nothing waits for that yet
            raise RefusedError("NOT_READY")
        mark = found.mark
    saw(None if mark is None else mark.work)


@call(locked=False)
def cuEventSynchronize(event: Any) -> None:
    with machine:
        found = _waitable(event)
        mark = found.mark
    if mark is not None:
        wait(found.context, lambda: mark.reached)
        saw(mark.work)


@call(1)
def cuEventElapsedTime(start: Any, end: Any) -> float:
    marks = []
    for event in map(event_of, (start, end)):
        event.context.check()
        if event.inside() is not None:
            raise RefusedError("CAPTURED_EVENT")
        if not event.timing or event.mark is None:
            raise RefusedError("INVALID_HANDLE")
        marks.append(event.mark)
    if not all(mark.reached for mark in marks):
        raise RefusedError("NOT_READY")
    for mark in marks:
        saw(mark.work)
    return (marks[1].time_ns - marks[0].time_ns) * 1e-6


# Capture


def _no_capture(stream: Any) -> Stream:
    found = stream_of(stream)
    if found is found.context.legacy:
        raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")
    if found.capture is not None:
        raise RefusedError("ILLEGAL_STATE")
    return found


@call()
def cuStreamBeginCapture(stream: Any, mode: Any) -> None:
    Capture(_no_capture(stream), Graph(), {}, int(mode))


@call()
def cuStreamBeginCaptureToGraph(stream: Any, graph: Any, dependencies: Any, data: Any, count: int, mode: Any) -> None:
    into = graph_of(graph)
    frontier = dict(edges_of(into, dependencies, data, count))
    if into in captured_graphs():
        raise RefusedError("ILLEGAL_STATE")
    Capture(_no_capture(stream), into, frontier, int(mode))


@call(1)
def cuStreamEndCapture(stream: Any) -> Any:
    found = stream_of(stream)
    capture = found.capture
    if capture is None:
        raise RefusedError("ILLEGAL_STATE")
    if found is not capture.origin:
        capture.invalidate()
        raise RefusedError("STREAM_CAPTURE_UNMATCHED")
    return cu.CUgraph(capture.end().handle)


@call(1)
def cuStreamIsCapturing(stream: Any) -> Any:
    return _capture_status(stream_of(stream))


def _capture_status(stream: Stream) -> Any:
    capture = stream.capture
    return cu.CUstreamCaptureStatus(0 if capture is None else 1 if capture.valid else 2)


@call(6)
def cuStreamGetCaptureInfo(stream: Any) -> tuple[Any, ...]:
    found = stream_of(stream)
    capture = found.capture
    if capture is None or not capture.valid:
        return _capture_status(found), None, None, [], [], 0
    frontier = capture.frontier(found)
    nodes, data = [cu.CUgraphNode(node.handle) for node in frontier], [edge_struct(d) for d in frontier.values()]
    identity, graph = cu.cuuint64_t(capture.id), cu.CUgraph(capture.graph.handle)
    return _capture_status(found), identity, graph, nodes, data, len(nodes)


@call()
def cuStreamUpdateCaptureDependencies(stream: Any, dependencies: Any, data: Any, count: int, flags: int) -> None:
    found = stream_of(stream)
    capture = found.capture
    if capture is None:
        raise RefusedError("ILLEGAL_STATE")
    if flags not in (0, 1):
        raise RefusedError("INVALID_VALUE")
    given = dict(edges_of(capture.graph, dependencies, data, count))
    (capture.set_frontier if flags else capture.join)(found, given)


@call(1)
def cuThreadExchangeStreamCaptureMode(mode: Any) -> Any:
    before, of_thread.mode = of_thread.mode, int(mode)
    return cu.CUstreamCaptureMode(before)
