"""Contexts, streams and events, and the capture of streams into graphs.

Source: CUDA Driver API, "Stream Management", "Event Management"; CUDA programming guide, "Creating a Graph Using Stream
Capture".
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from .graphs import MOMENTS, PLAIN, PROGRAMMATIC, EdgeData, EventWait, Graph, Node
from .handles import RefusedError, handles
from .machine import END, TRIGGER, Once, Task, Until, Work, machine
from .operations import Attribute, Launch, Operation
from .order import tracker
from .storage import Records

__all__ = [
    "GREATEST_PRIORITY",
    "LEAST_PRIORITY",
    "Capture",
    "Context",
    "Event",
    "Mark",
    "Mode",
    "Stream",
    "captured_graphs",
    "guard",
    "guard_context",
    "guard_legacy",
    "of_thread",
]

LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5

Frontier = dict[Node, EdgeData]  # the nodes after which a captured stream goes on


class Context:
    """A device's primary context.

    Attributes:
        retained: how often it was asked for; there is one while that is above 0.
        blocking: streams that the default stream waits for, and that wait for it.
        legacy: the default stream.
        peers: the devices whose memory it may touch.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.handle = handles.add(self)
        self.retained = 0
        self.blocking: list[Stream] = []
        self.legacy = Stream(self, blocking=False)
        self.peers: set[int] = set()

    def check(self) -> None:
        """`RefusedError` if something went wrong on the device."""
        fault = machine.faults.get(self.device)
        if fault is not None:
            raise RefusedError(fault.code.removeprefix("CUDA_ERROR_"))


class Mark:
    """A point in the work of a device, and when it was reached: then ``tell`` is called."""

    def __init__(self, tell: Callable[[], object] = lambda: None) -> None:
        self.work: Work | None = None
        self.time_ns = 0
        self._tell = tell

    def begin(self, work: Work) -> Task:
        return Once(self._reach)

    def _reach(self) -> None:
        self.time_ns = time.perf_counter_ns()
        self._tell()

    @property
    def reached(self) -> bool:
        return self.work is None or self.work.over


class Event:
    """A point in the work of a stream, which can be recorded again and again.

    Attributes:
        captured: where it was recorded in a capture, if that was the last time.
        records: what is known of all records, where processes share it.
    """

    def __init__(self, context: Context, *, timing: bool, records: Records | None = None) -> None:
        self.context, self.timing, self.records = context, timing, records
        self.handle = handles.add(self)
        self.captured: tuple[Capture, Frontier] | None = None
        self._mark: Mark | None = None
        self._number = 0  # of the record that it marks

    def new_mark(self) -> Mark:
        self.captured = None
        if self.records is None:
            self._mark = Mark()
        else:
            self._number = self.records.add()
            self._mark = Mark(partial(self.records.reach, self._number))
        return self._mark

    @property
    def mark(self) -> Mark | None:
        """Where it was recorded last. The work of what another process recorded is to wait for that."""
        if self.records is not None and self._number != self.records.newest:
            number = self._number = self.records.newest
            self._mark = Mark()
            if not self.records.is_reached(number):
                what = f"record of {self} in another process"
                until = Until(partial(self.records.is_reached, number), lambda: "it was not reached")
                self._mark.work = machine.submit(Work(what, self.context.device, lambda _: until))
        return self._mark

    @property
    def reached(self) -> bool:
        if self.records is not None and self._number != self.records.newest:
            return self.records.is_reached(self.records.newest)
        return self._mark is None or self._mark.reached

    def inside(self) -> tuple[Capture, Frontier] | None:
        """The capture that it was recorded in; when that is over it is of no use until it is recorded again."""
        if self.captured is not None and not self.captured[0].valid:
            raise RefusedError("INVALID_VALUE")
        return self.captured

    def __str__(self) -> str:
        return f"event {self.handle:#x}"


class Stream:
    """A queue of work, done in order; ``tail`` is the newest of it."""

    def __init__(self, context: Context, *, blocking: bool, priority: int = 0) -> None:
        self.context, self.blocking, self.priority = context, blocking, priority
        self.handle = handles.add(self)
        self.tail: Work | None = None
        self.capture: Capture | None = None
        self.destroyed = False
        if blocking:
            context.blocking.append(self)

    def destroy(self) -> None:
        """Its work goes on. A capture that it began is over; another one misses it."""
        handles.drop(self.handle)
        self.destroyed = True
        if self.capture is not None and self.capture.origin is self:
            self.capture.discard()

    @property
    def done(self) -> bool:
        return self.tail is None or self.tail.over

    def queue(self, operation: Operation) -> Work | None:
        """Do it after what the stream has; or add it to the graph that the stream is captured into."""
        if self.capture is not None:
            self.capture.add(self, operation)
            return None
        work = Work(operation, operation.device, operation.begin)
        if isinstance(operation, Launch) and operation.attributes:
            return self._launch(work, operation)
        return self.append(work)

    def _launch(self, work: Work, launch: Launch) -> Work:
        tail = self.tail
        early = is_early(launch) and tail is not None and isinstance(tail.what, Launch)
        self.append(work, TRIGGER if early else END)
        return work

    def append(self, work: Work, moment: int = END) -> Work:
        """Submit work that comes after what the stream has, or after a moment of the newest of that."""
        context = self.context
        work.after(self.tail, moment)
        if self.blocking:
            work.after(context.legacy.tail)
        elif self is context.legacy:
            context.blocking = [stream for stream in context.blocking if not (stream.destroyed and stream.done)]
            for stream in context.blocking:
                work.after(stream.tail)
        machine.submit(work)
        self.tail = work
        return work

    def wait(self, event: Event, *, external: bool = False) -> None:
        """Later work comes after the event. ``external``: the wait is a node of the graph that is captured."""
        if self.capture is None:
            self._wait(event, external)
            return
        self.capture.check()
        try:
            self._wait_in(self.capture, event, external)
        except RefusedError:
            self.capture.invalidate()
            raise

    def _wait(self, event: Event, external: bool) -> None:
        inside = event.inside()
        if external:
            raise RefusedError("ILLEGAL_STATE")
        if inside is not None:
            capture, frontier = inside
            if self is self.context.legacy:
                capture.invalidate()
                raise RefusedError("STREAM_CAPTURE_IMPLICIT")
            capture.join(self, frontier)
        elif (mark := event.mark) is not None and (tracker.on or not mark.reached):
            work = Work(f"wait for {event}", self.context.device)
            work.after(mark.work)
            self.append(work)

    def _wait_in(self, capture: Capture, event: Event, external: bool) -> None:
        inside = event.inside()
        if external:
            capture.add(self, EventWait(event.context.device, event))
        elif inside is not None:
            other, frontier = inside
            if other is not capture:
                other.invalidate()
                raise RefusedError("STREAM_CAPTURE_MERGE")
            capture.join(self, frontier)
        elif event.records is not None:
            raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")
        elif event.mark is not None:
            raise RefusedError("STREAM_CAPTURE_ISOLATION")

    def record(self, event: Event) -> None:
        """The event is what the stream has now."""
        if self.capture is not None:
            frontier = dict(self.capture.frontier(self))
            if event.records is not None:
                raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")
            event.captured = self.capture, frontier
            return
        mark = event.new_mark()
        mark.work = self.append(Work(f"record of {event}", self.context.device, mark.begin))

    def record_moment(self, event: Event, kernel: Work | None, port: EdgeData) -> None:
        """The event is what a port of a kernel stands for that was just queued or captured."""
        if self.capture is not None:
            event.captured = self.capture, dict.fromkeys(self.capture.frontier(self), port)
            return
        mark = event.new_mark()
        mark.work = Work(f"record of {event}", self.context.device, mark.begin)
        mark.work.after(kernel, MOMENTS[port])
        machine.submit(mark.work)


def is_early(launch: Launch) -> bool:
    """Whether it may start before the kernel before it in its stream ends."""
    return launch.integer(Attribute.PROGRAMMATIC_STREAM_SERIALIZATION) != 0


class Mode:
    """Numbers of ``CUstreamCaptureMode``."""

    GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class _OfThread(threading.local):
    mode = Mode.GLOBAL  # what the thread refuses to do during captures


of_thread = _OfThread()
_captures: set[Capture] = set()  # that have not ended
_ids = itertools.count(1)


class Capture:
    """Streams whose work becomes nodes of a graph.

    Attributes:
        origin: the stream that began it, and must end it.
        valid: nothing forbidden was called.
    """

    def __init__(self, origin: Stream, graph: Graph, frontier: Frontier, mode: int) -> None:
        self.origin, self.graph, self.mode = origin, graph, mode
        self.id = next(_ids)
        self.thread = threading.get_ident()
        self.valid = True
        self._frontiers: dict[Stream, Frontier] = {}
        self._nodes: set[Node] = set()
        self.join(origin, frontier)
        _captures.add(self)

    def check(self) -> None:
        if not self.valid:
            raise RefusedError("STREAM_CAPTURE_INVALIDATED")

    def invalidate(self) -> None:
        self.valid = False

    def has_stream_of(self, context: Context) -> bool:
        return any(stream.context is context for stream in self._frontiers)

    def frontier(self, stream: Stream) -> Frontier:
        self.check()
        return self._frontiers[stream]

    def set_frontier(self, stream: Stream, frontier: Frontier) -> None:
        """The stream goes on behind these nodes; those that it leaves so need not be joined."""
        self.check()
        self._nodes -= self._frontiers[stream].keys() - frontier.keys()
        self._frontiers[stream] = frontier

    def join(self, stream: Stream, frontier: Frontier) -> None:
        """The stream goes on behind these nodes, too. The end of a node is behind all other moments of it."""
        self.check()
        stream.capture = self
        own = self._frontiers.setdefault(stream, {})
        own.update((node, port) for node, port in frontier.items() if own.get(node) != PLAIN)

    def add(self, stream: Stream, operation: Operation) -> None:
        edges = self.frontier(stream)
        if isinstance(operation, Launch) and is_early(operation):
            edges = {n: PROGRAMMATIC if d == PLAIN and n.kind == "kernel" else d for n, d in edges.items()}
        node = self.graph.add(operation)
        for source, port in edges.items():
            self.graph.connect(source, node, port)
        self._nodes.add(node)
        self._frontiers[stream] = {node: PLAIN}

    def end(self) -> Graph:
        """The streams are free again. `RefusedError` says what is wrong with the graph, which is then lost."""
        wrong = self._wrong()
        if wrong is not None:
            self.discard()
            raise RefusedError(wrong)
        self._close()
        return self.graph

    def _wrong(self) -> str | None:
        if not self.valid:
            return "STREAM_CAPTURE_INVALIDATED"
        if self.mode != Mode.RELAXED and self.thread != threading.get_ident():
            return "STREAM_CAPTURE_WRONG_THREAD"
        joined = self._frontiers[self.origin]
        unjoined = any(node not in joined and not node.dependents for node in self._nodes)
        return "STREAM_CAPTURE_UNJOINED" if unjoined else None

    def discard(self) -> None:
        """The streams are free again, and the graph is lost, also one that was there before."""
        self._close()
        self.graph.destroy()

    def _close(self) -> None:
        for stream in self._frontiers:
            stream.capture = None
        _captures.discard(self)
        self.valid = False  # events that it recorded take no stream into it any more


def captured_graphs() -> set[Graph]:
    """The graphs that streams are captured into now."""
    return {capture.graph for capture in _captures}


def guard() -> None:
    """Refuse a call that is unsafe while streams are captured, as far as the thread's mode says so."""
    if not _captures or of_thread.mode == Mode.RELAXED:
        return
    me = threading.get_ident()
    broken = [
        capture
        for capture in _captures
        if (capture.mode != Mode.RELAXED and capture.thread == me)
        or (capture.mode == Mode.GLOBAL and of_thread.mode == Mode.GLOBAL)
    ]
    if broken:
        invalidate(broken)
        raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")


def invalidate(captures: Iterable[Capture]) -> None:
    for capture in captures:
        capture.invalidate()


def guard_context(context: Context) -> None:
    """Refuse to wait for all streams of a context while one of them is captured, in whatever mode."""
    hit = [capture for capture in _captures if capture.has_stream_of(context)]
    if hit:
        invalidate(hit)
        raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")


def guard_legacy(context: Context) -> None:
    """Refuse work on the legacy stream that would wait for a stream which is captured."""
    hit = [stream.capture for stream in context.blocking if stream.capture is not None]
    if hit:
        invalidate(hit)
        raise RefusedError("STREAM_CAPTURE_IMPLICIT")
