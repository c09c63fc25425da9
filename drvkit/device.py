"""Devices, streams and events.

A `Device` stands for one GPU and its primary context, which CuPy and the CUDA runtime share. A `Stream` remembers what
its pending work may still touch, so that a kernel's buffers, arrays and module stay alive until the work is done even
if the caller drops them at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from .driver import Driver, DriverError, open_driver
from .lifetime import ClosedError, Owned, release_parked

if TYPE_CHECKING:  # the verbs below that reach further down import when they are called
    from .build import Image
    from .memory import Buffer, MemoryPool
    from .module import Module
    from .source import Source

__all__ = ["Device", "Event", "Stream"]

HELD_PER_BATCH = 512  # pending references of a stream before it marks them with an event
LOST = tuple(
    f"CUDA_ERROR_{code}"
    for code in (
        *("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ILLEGAL_INSTRUCTION"),
        *("HARDWARE_STACK_ERROR", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ASSERT", "CONTEXT_IS_DESTROYED"),
    )
)  # what kernels do to their context
DEFAULT_STREAMS = (0, 1, 2)  # the null stream, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD


class Context:
    """A device's primary context; ``with device.context:`` makes it the thread's current one for the block."""

    def __init__(self, driver: Driver, handle: Any) -> None:
        self.driver, self.handle = driver, handle

    def __enter__(self) -> Context:
        self.driver.cuCtxPushCurrent(self.handle)
        here = self.driver.entered
        here.outer.append(here.context)
        here.context = self
        return self

    def __exit__(self, *_: object) -> None:
        here = self.driver.entered
        here.context = here.outer.pop()
        self.driver.cuCtxPopCurrent()

    def enter_thread(self) -> None:
        """Make it the calling thread's current one from now on, if it is not the newest that drvkit made so there."""
        here = self.driver.entered
        if here.context is not self:
            self.driver.cuCtxSetCurrent(self.handle)
            here.context = self

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """``function(*args)`` inside of it. For releases: the last reference may go in a thread that has no context.

        A context in which a kernel has failed is lost, with all that was in it: nothing is left to release.
        """
        here = self.driver.entered
        with self:
            outer, here.releasing = here.releasing, True
            try:
                function(*args)
            except DriverError as error:
                if error.code not in LOST:
                    raise
            finally:
                here.releasing = outer


class Device:
    """One device: ``Device("cuda:0")``, ``Device("cpu")``, ...

    ``Device()`` is what ``DRVKIT_DEVICE`` in the environment names, else the first GPU, else, said in a line on stderr,
    the CPU device, which executes the PTX that NVRTC emits. The same name gives the same object. Its primary context
    becomes current in the thread that makes it first. `DriverError` where there is no driver, `ValueError` where there
    is no such device.
    """

    _known: ClassVar[dict[str, Device]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __new__(cls, name: str | None = None) -> Device:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"device name: wanted text such as 'cuda:0', got {name!r}")
        name = name if name is not None else os.environ.get("DRVKIT_DEVICE") or _default()
        match = re.fullmatch(r"([a-z]+)(?::(\d+))?", name)
        if not match:
            raise ValueError(f"device name {name!r}: wanted 'cuda', 'cpu', 'cuda:<number>' or 'cpu:<number>'")
        kind, ordinal = match[1], int(match[2] or 0)
        identity = f"{kind}:{ordinal}"
        with cls._lock:
            if identity not in cls._known:
                self = super().__new__(cls)
                self._open(kind, ordinal, identity)
                cls._known[identity] = self
            return cls._known[identity]

    def _open(self, kind: str, ordinal: int, identity: str) -> None:
        driver = open_driver(kind)
        count = driver.cuDeviceGetCount()
        if ordinal >= count:
            raise ValueError(f"no device {identity!r}: the driver has {count} of kind {kind!r}")
        self.driver = driver
        self.alone = count == 1
        self.ordinal = ordinal
        self.id = identity  # "cuda:0"
        self.handle = driver.cuDeviceGet(ordinal)
        self.context = Context(driver, driver.cuDevicePrimaryCtxRetain(self.handle))
        self.callback_errors: deque[BaseException] = deque()  # raised by host nodes, told at the next synchronize
        self.ready_made: weakref.WeakValueDictionary[str, Module] = (
            weakref.WeakValueDictionary()
        )  # modules that graphs share
        self._attributes: dict[str, int] = {}
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._foreign_streams: dict[int, Stream] = {}
        self.enter_thread()

    def enter_thread(self) -> None:
        """See to it that the calling thread's current context is this device's.

        Some graph calls crash in a thread that never had one, and the default streams are those of the current one.
        Costs a thread-local read when it is.
        """
        self.context.enter_thread()

    # What it is

    @property
    def name(self) -> str:
        """The product name, such as ``"NVIDIA H200"``."""
        text: bytes = self.driver.cuDeviceGetName(128, self.handle)
        return text.split(b"\0")[0].decode()

    def attribute(self, name: str) -> int:
        """A device attribute by the manual's name without its prefix: ``dev.attribute("MULTIPROCESSOR_COUNT")``."""
        if name not in self._attributes:
            try:
                attribute = self.driver.CUdevice_attribute.__members__[f"CU_DEVICE_ATTRIBUTE_{name}"]
            except KeyError:
                raise ValueError(f"no device attribute CU_DEVICE_ATTRIBUTE_{name}") from None
            self._attributes[name] = self.driver.cuDeviceGetAttribute(attribute, self.handle)
        return self._attributes[name]

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def arch(self) -> str:
        """What kernels are compiled for: ``"sm_90a"``. From 9.0 on with the features of exactly this architecture.

        ``"compute_90a"`` for the CPU device: it takes PTX.
        """
        if self.driver.kind == "cpu":
            return "compute_90a"
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    @property
    def multiprocessors(self) -> int:
        return self.attribute("MULTIPROCESSOR_COUNT")

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total device memory, in bytes."""
        with self.context:
            free, total = self.driver.cuMemGetInfo()
        return int(free), int(total)

    def locate(self, address: int) -> int | None:
        """The ordinal of the device whose memory is at ``address``.

        None for memory that all of them reach (page-locked, managed), for an address that the driver does not know, and
        where there is but one device.
        """
        if self.alone:
            return None
        driver, names = self.driver, self.driver.CUpointer_attribute
        try:
            with self.context:
                kind = driver.cuPointerGetAttribute(names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
                if int(kind) != int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE):
                    return None
                if driver.cuPointerGetAttribute(names.CU_POINTER_ATTRIBUTE_IS_MANAGED, address):
                    return None
                ordinal = ctypes.c_int()  # the bindings (13.3) give 0 for every device
                at, which = ctypes.addressof(ordinal), int(names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
                code = driver.raw("cuPointerGetAttribute", 3)(at, which, address)
                if code:
                    raise driver.error("cuPointerGetAttribute", code)
                return ordinal.value
        except DriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            return None

    # What it makes

    def stream(self, *, priority: int = 0) -> Stream:
        """A new stream. It does not wait for the legacy default stream, nor is it waited for."""
        return Stream(self, priority=priority)

    def event(self, *, timing: bool = True) -> Event:
        return Event(self, timing=timing)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Buffer:
        """Device memory of ``shape`` and ``dtype``, its contents undefined."""
        from .memory import Buffer

        return Buffer.empty(self, shape, dtype)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike) -> Buffer:
        """Device memory of ``shape`` and ``dtype``, every byte 0."""
        return self.empty(shape, dtype).fill_bytes(0)

    def array(self, values: ArrayLike, dtype: DTypeLike | None = None) -> Buffer:
        """A copy of host ``values`` in device memory, complete when this returns."""
        if isinstance(values, np.ma.MaskedArray):
            raise TypeError("array: a masked array: device memory has no mask; fill or compress it first")
        host = np.ascontiguousarray(values, dtype)
        return self.empty(np.shape(values), host.dtype).copy_from(host.reshape(np.shape(values)))

    def pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> Buffer:
        """Page-locked host memory that the device can reach; ``.host`` is its numpy view."""
        from .memory import Buffer

        return Buffer.pinned(self, shape, dtype)

    def pool(self, *, release_threshold_bytes: int = 0) -> MemoryPool:
        """A stream-ordered memory pool; it keeps up to ``release_threshold_bytes`` of freed memory for reuse."""
        from .memory import MemoryPool

        return MemoryPool(self, release_threshold_bytes=release_threshold_bytes)

    def module(self, source: str | Source | Image, names: Sequence[str] = (), *, options: Sequence[str] = ()) -> Module:
        """The kernels of a source (found in ``cuda_src`` by name, or a `Source`), or of a built `Image`.

        ``names`` are template instantiations to compile together, such as ``"scale<float>"``; others are compiled when
        `Module.kernel` asks for them.
        """
        from .module import Module

        return Module(self, source, names, options=options)

    # Waiting

    def synchronize(self) -> None:
        """Wait for all work on the device. Raises what failed, or what a host node of a graph raised."""
        passed = [(stream, stream._take(), list(stream._batches)) for stream in list(self.streams)]
        try:
            with self.context:
                self.driver.cuCtxSynchronize()
        except BaseException:
            for stream, taken, _ in passed:
                stream._ledger[:0] = taken
            raise
        while passed:
            stream, _, batches = passed.pop()
            stream._pass(batches)
            del stream, _, batches
        release_parked()
        self.raise_callback_error()

    def raise_callback_error(self) -> None:
        if self.callback_errors:
            raise self.callback_errors.popleft()

    def as_stream(self, stream: Any) -> Stream:
        """``stream`` as a `Stream`: one of ours as it is, a foreign one by ``__cuda_stream__`` (CuPy, PyTorch, ...).

        What is queued on a foreign stream is held until this Stream, or the device, is synchronized; what is queued
        there while its owner captures it, the owner must keep alive with his graph.
        """
        if isinstance(stream, Stream):
            if stream.device is not self:
                raise ValueError(f"stream {stream.name} belongs to {stream.device.id}, not to {self.id}")
            stream.enter_thread()
            return stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None:
            raise TypeError(f"wanted a stream (drvkit's, or any with __cuda_stream__), got {type(stream).__name__}")
        pair = protocol() if callable(protocol) else protocol
        address = int(pair[1])
        known = self._foreign_streams.get(address)
        if known is None:
            kind = DefaultStream if address in DEFAULT_STREAMS else Stream
            known = self._foreign_streams.setdefault(address, kind._borrow(self, address))
        known.enter_thread()
        return known

    def __repr__(self) -> str:
        return f"<Device {self.id}>"

    def __reduce__(self) -> tuple[type[Device], tuple[str]]:
        return Device, (self.id,)


NO_GPU = ("NO_LIBRARY", "CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY")  # no driver, or nothing for it to drive


@cache
def _default() -> str:
    try:
        if open_driver("cuda").cuDeviceGetCount():
            return "cuda"
        why = "the driver has no device"
    except DriverError as error:
        if error.code not in NO_GPU:
            raise
        why = str(error)
    print(f"drvkit: no GPU here ({why}); kernels run on the CPU device", file=sys.stderr)
    return "cpu"


class Capturing:
    """A capture that is going on: the streams that take part, and what the work queued there refers to."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.references: list[object] = []

    def join(self, stream: Stream) -> None:
        if stream.capturing is not self:
            stream._capture_in(self)
            self.streams.append(stream)

    def end(self) -> tuple[object, ...]:
        """The streams are as they were; gives the references."""
        for stream in self.streams:
            stream._capture_in(None)
        references = tuple(self.references)
        self.streams.clear()
        self.references.clear()
        return references


class Event(Owned):
    """A point in a stream's work; with ``timing``, also the time at which the device reached it."""

    kind = "event"

    def __init__(self, device: Device, *, timing: bool = True) -> None:
        self.device, self.timing = device, timing
        self.capturing: Capturing | None = None  # it was recorded while its stream was captured
        driver = device.driver
        flags = driver.CUevent_flags
        with device.context:
            handle = driver.cuEventCreate(flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING)
        self._own(handle, partial(device.context.call, driver.cuEventDestroy, handle))

    def record(self, stream: Any) -> Event:
        """Reached when the work that ``stream`` has now is done."""
        stream = self.device.as_stream(stream)
        self.device.driver.cuEventRecord(self.handle, stream.handle)
        self.capturing = stream.capturing
        stream.hold(self.box)
        return self

    @property
    def done(self) -> bool:
        """Whether the device has reached it; true for an event that was never recorded."""
        code = self.device.driver.api.cuEventQuery(self.handle)[0]
        if code and code.name != "CUDA_ERROR_NOT_READY":
            raise self.device.driver.error("cuEventQuery", code)
        return not code

    def synchronize(self) -> None:
        """Wait until the device has reached it."""
        self.device.driver.cuEventSynchronize(self.handle)
        self.device.raise_callback_error()

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds of device time from this event to ``end``; both must have been reached."""
        for event in (self, end):
            if not event.timing:
                raise ValueError(f"event {event.name} was made with timing=False")
        return float(self.device.driver.cuEventElapsedTime(self.handle, end.handle))


class Life:
    """Whether something is destroyed: for releases that may come after it."""

    over = False


class _Raw(int):
    """A handle as a number that is one object for each owner: equal small integers are one and the same."""


class Stream(Owned):
    """A queue of device work, done in order.

    Everything that pending work may touch is held until the stream has passed it: released by `synchronize`, by
    `close` (which waits), and, for a stream that is never synchronized, batch by batch.
    """

    kind = "stream"

    def __init__(self, device: Device, *, priority: int = 0) -> None:
        driver = device.driver
        with device.context:
            least, greatest = driver.cuCtxGetStreamPriorityRange()
            if isinstance(priority, bool) or not hasattr(priority, "__index__") or not greatest <= priority <= least:
                raise ValueError(f"stream priority: wanted an integer in [{greatest}, {least}], got {priority!r}")
            handle = driver.cuStreamCreateWithPriority(driver.CUstream_flags.CU_STREAM_NON_BLOCKING, int(priority))
        self._begin(device, handle)
        # What it holds belongs to its box, not to the release: that is known to the interpreter for good, and may not
        # refer to what may refer to the stream.
        release = partial(device.context.call, _destroy_stream, driver, handle, self.life)
        self._own(handle, release, owner=(self._ledger, self._batches))

    def _begin(self, device: Device, handle: Any) -> None:
        self.device = device
        device.streams.add(self)
        self.weak = weakref.ref(self)
        self.life = Life()
        self.raw: int | None = _Raw(handle)  # the CUstream, as long as it is open; launches compare its identity
        self.capturing: Capturing | None = None
        self._ledger: list[object] = []  # what work may touch that no event marks yet
        self._batches: deque[tuple[Event, list[object]]] = deque()  # what it touched before each event
        self.pending: list[object] | None = self._ledger  # where to add to: launches do so directly; None when closed
        self._lock = threading.Lock()  # for taking out; adding needs none
        self.newest: object = None  # the newest of ``pending``, so that replays of one thing need not add it again

    def enter_thread(self) -> None:
        """See to it that the calling thread can queue work on it: an ordinary stream knows its context."""

    def in_thread(self, call: Callable[..., int]) -> Callable[..., int]:
        """``call``, which queues work on it, for any thread."""
        return call

    def _capture_in(self, capturing: Capturing | None) -> None:
        """While a stream is captured its work is not in flight, but in a graph: that holds the references."""
        self.capturing = capturing
        if self.pending is not None:
            self.pending = self._ledger if capturing is None else capturing.references
        self.newest = None

    @classmethod
    def _borrow(cls, device: Device, address: int) -> Stream:
        self = cls.__new__(cls)
        handle = device.driver.CUstream(address)
        self._begin(device, handle)
        self._own(handle, None, f"{address:#x} (foreign)")
        return self

    def hold(self, thing: object) -> None:
        """Keep ``thing`` alive until the work that the stream has now is done: to be called after queueing the work.

        Threads need no lock for that: whoever lets go of references first takes them out of ``pending``, then waits.
        """
        if self.newest is thing:
            return
        pending = self.pending
        if pending is None:
            raise ClosedError(f"{self.info} is closed")
        self.newest = thing  # before adding: whoever takes the list in between resets it
        pending.append(thing)
        if len(pending) > HELD_PER_BATCH:
            self.settle()

    def _take(self) -> list[object]:
        """What is pending now; it is no longer pending then.

        ``newest`` is reset last: who saw it before has queued its work before this returns, and so before the wait.
        """
        with self._lock:
            taken = self._ledger[:]
            del self._ledger[: len(taken)]
            self.newest = None
        return taken

    def settle(self) -> None:
        """Mark what is pending with an event; let go of the batches whose event was reached."""
        if self.capturing is not None:
            return
        event = Event(self.device, timing=False)
        taken = self._take()
        try:
            self.device.driver.cuEventRecord(event.handle, self.handle)
        except BaseException:
            self._ledger[:0] = taken
            raise
        finished = []
        with self._lock:  # nothing is let go inside: that may run code of anybody
            self._batches.append((event, taken))
            while self._batches and self._batches[0][0].done:
                finished.append(self._batches.popleft())

    @property
    def done(self) -> bool:
        """Whether all of its work is done."""
        code = self.device.driver.api.cuStreamQuery(self.handle)[0]
        if code and code.name != "CUDA_ERROR_NOT_READY":
            raise self.device.driver.error("cuStreamQuery", code)
        return not code

    def synchronize(self) -> None:
        """Wait for all of its work. Raises what failed there, or what a host node of a graph raised."""
        taken, batches = self._take(), list(self._batches)
        try:
            self.device.driver.cuStreamSynchronize(self.handle)
        except BaseException:
            self._ledger[:0] = taken
            raise
        self._pass(batches)
        del taken, batches
        release_parked()
        self.device.raise_callback_error()

    def _pass(self, batches: list[tuple[Event, list[object]]]) -> None:
        """The work of ``batches`` is done; later ones may have come meanwhile."""
        finished = []
        with self._lock:
            for batch in batches:
                if not self._batches or self._batches[0] is not batch:
                    break
                finished.append(self._batches.popleft())

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after ``event``; one that a capture recorded takes this stream into it."""
        if not isinstance(event, Event):
            raise TypeError(f"stream {self.name}: wait: wanted an Event, got {event!r}")
        self.device.driver.cuStreamWaitEvent(self.handle, event.handle, 0)
        if event.capturing is not None and event.capturing.streams:
            event.capturing.join(self)
        self.hold(event.box)

    def record(self, event: Event | None = None) -> Event:
        """Record ``event`` (a new one with timing if none is given) after the work so far."""
        if event is not None and not isinstance(event, Event):
            raise TypeError(f"stream {self.name}: record: wanted an Event, got {event!r}")
        return (event or Event(self.device)).record(self)

    def close(self) -> None:
        """Wait for its work, then destroy it. A foreign stream is left alone; only what it held is let go."""
        if not self.closed:
            try:
                self.synchronize()
            finally:
                self._shut()

    def _shut(self) -> None:
        if self.box is not None:
            self.device._foreign_streams.pop(int(self.box.handle), None)
        self.pending = self.newest = self.raw = None
        super().close()

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            self.close()
        else:  # the block's own error is the one to tell
            if not self.closed:
                # A stream of ours waits when it is destroyed, a foreign one here.
                with contextlib.suppress(DriverError):
                    self.device.driver.cuStreamSynchronize(self.handle)
            self._shut()

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self.handle)


class DefaultStream(Stream):
    """One of the `DEFAULT_STREAMS`: its handle means a stream of the calling thread's current context."""

    def enter_thread(self) -> None:
        self.device.context.enter_thread()

    def in_thread(self, call: Callable[..., int]) -> Callable[..., int]:
        def entered(*args: int) -> int:
            self.enter_thread()
            return call(*args)

        return entered

    @property
    def handle(self) -> Any:
        self.enter_thread()
        return super().handle


def _destroy_stream(driver: Driver, handle: Any, life: Life) -> None:
    """Destroying a stream does not stop its work: wait, so that what it holds outlives that."""
    life.over = True
    driver.cuStreamSynchronize(handle)
    driver.cuStreamDestroy(handle)
