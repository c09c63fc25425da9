"""Memory: allocated, asked about, copied and filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...lifetime import caller
from ..handles import RefusedError
from ..machine import machine
from ..memory import Allocation, memory
from ..operations import Copy, Fill, Side
from ..streams import Stream, guard
from .base import (
    HOST_BYTES,
    call,
    context_on,
    cu,
    current,
    host_address,
    saw,
    state,
    stream_of,
    thread_state,
    wait,
    wait_for_device,
)


def take(device: int, nbytes: int) -> None:
    """Count device memory as used."""
    if nbytes > HOST_BYTES - state.used[device]:
        raise RefusedError("OUT_OF_MEMORY")
    state.used[device] += nbytes


def allocate(nbytes: int, kind: str, device: int) -> Allocation:
    if nbytes <= 0:
        raise RefusedError("INVALID_VALUE")
    try:
        return memory.allocate(nbytes, kind, device, written=kind == "pinned")  # the host writes unseen
    except MemoryError:
        raise RefusedError("OUT_OF_MEMORY") from None


@call(1)
def cuMemAlloc(nbytes: int) -> Any:
    context = current()
    guard()
    if nbytes > HOST_BYTES - state.used[context.device]:
        raise RefusedError("OUT_OF_MEMORY")
    allocation = allocate(nbytes, "device", context.device)
    state.used[context.device] += nbytes
    return cu.CUdeviceptr(allocation.address)


@call(2)
def cuMemAllocPitch(width: int, height: int, element: int) -> tuple[Any, int]:
    context = current()
    guard()
    if element not in (4, 8, 16) or not width or not height:
        raise RefusedError("INVALID_VALUE")
    pitch = -(-width // 512) * 512
    allocation = allocate(pitch * height, "device", context.device)
    take(context.device, pitch * height)
    return cu.CUdeviceptr(allocation.address), pitch


@call(locked=False)
def cuMemFree(pointer: Any) -> None:
    _free_now(int(pointer), ("device", "pool"))


def _free_now(address: int, kinds: Sequence[str]) -> None:
    """It needs no current context: memory knows its own."""
    context = thread_state.contexts[-1]
    if context is not None:
        context.check()
    guard()
    if not address:
        return
    with machine:
        owner = context_on((state.graph_memory.get(address) or freeable(address, kinds)).device)
    wait_for_device(owner)
    with machine:
        free(address, kinds)


def free(address: int, kinds: Sequence[str]) -> None:
    """Free an allocation of one of these kinds, or the memory that a launch left, now."""
    graph_memory = state.graph_memory.get(address)
    if graph_memory is not None and "pool" in kinds:
        if not graph_memory.held:
            raise RefusedError("INVALID_VALUE", f"{address:#x} is {memory.place(address)}")
        graph_memory.shut()
        graph_memory.hold(False)
        return
    allocation = freeable(address, kinds)
    give_back(allocation, in_order=False)
    memory.free(address)


def freeable(address: int, kinds: Sequence[str]) -> Allocation:
    """The allocation of one of these kinds that starts there, and that nobody freed."""
    allocation = memory.find(address)
    if allocation is None or allocation.address != address:
        raise RefusedError("INVALID_VALUE", f"{address:#x} is {memory.place(address)}")
    if allocation.freed or address in state.freeing:
        raise RefusedError("INVALID_VALUE", f"{address:#x} was freed at {allocation.freed_at}: {allocation}")
    if allocation.kind not in kinds:
        raise RefusedError("INVALID_VALUE", f"{address:#x} is for another call to free: {allocation}")
    return allocation


def give_back(allocation: Allocation, *, in_order: bool) -> None:
    """Count it as free. ``in_order``: of a stream."""
    allocation.freed_at = caller()
    pool = state.pool_of.pop(allocation.address, None)
    if pool is not None:
        pool.give_back(allocation.nbytes, in_order=in_order)
    if allocation.kind in ("device", "pool"):
        state.used[allocation.device] -= allocation.nbytes


_HOST_ALLOC_FLAGS = 1 | 2 | 4  # portable, mapped, write-combined: all of it is portable and mapped anyway


@call(1)
def cuMemHostAlloc(nbytes: int, flags: int) -> int:
    if flags & ~_HOST_ALLOC_FLAGS:
        raise RefusedError("INVALID_VALUE")
    return _allocate_host(nbytes)


@call(1)
def cuMemAllocHost(nbytes: int) -> int:
    return _allocate_host(nbytes)


def _allocate_host(nbytes: int) -> int:
    """No bytes are at no address."""
    context = current()
    guard()
    return allocate(nbytes, "pinned", context.device).address if nbytes else 0


@call(locked=False)
def cuMemFreeHost(pointer: Any) -> None:
    _free_now(host_address(pointer), ("pinned",))


@call(1)
def cuMemHostGetDevicePointer(pointer: Any, flags: int) -> Any:
    address = host_address(pointer)
    if memory_kind(address) != "pinned":
        raise RefusedError("INVALID_VALUE")
    return cu.CUdeviceptr(address)


def memory_kind(address: int) -> str | None:
    allocation = memory.find(address) if address in memory else None
    return None if allocation is None or allocation.freed else allocation.kind


@call(2)
def cuMemGetInfo() -> tuple[int, int]:
    return HOST_BYTES - state.used[current().device], HOST_BYTES


@call(2)
def cuMemGetAddressRange(pointer: Any) -> tuple[Any, int]:
    current()
    allocation = memory.find(int(pointer))
    if allocation is None or allocation.freed:
        raise RefusedError("NOT_FOUND")
    return cu.CUdeviceptr(allocation.address), allocation.nbytes


@call(1)
def cuPointerGetAttribute(attribute: Any, pointer: Any) -> Any:
    return pointer_attribute(int(attribute), int(pointer))


def pointer_attribute(attribute: int, address: int) -> Any:
    allocation = memory.find(address)
    if allocation is None or allocation.freed or allocation.absent:
        raise RefusedError("INVALID_VALUE")
    on_host = allocation.kind == "pinned"
    values: dict[str, Any] = {
        "CONTEXT": cu.CUcontext(state.contexts[allocation.device].handle),
        "MEMORY_TYPE": _HOST if on_host else _DEVICE,  # the bindings give no enum
        "DEVICE_POINTER": cu.CUdeviceptr(address),
        "HOST_POINTER": address,
        "DEVICE_ORDINAL": allocation.device,
        "RANGE_START_ADDR": cu.CUdeviceptr(allocation.address),
        "RANGE_SIZE": allocation.nbytes,
        "IS_MANAGED": False,
        "MAPPED": True,
        "IS_LEGACY_CUDA_IPC_CAPABLE": allocation.kind == "device",
    }
    name = cu.CUpointer_attribute(attribute).name.removeprefix("CU_POINTER_ATTRIBUTE_")
    if name not in values or (name == "HOST_POINTER" and not on_host):
        raise RefusedError("INVALID_VALUE")
    return values[name]


# Copies and fills

_HOST, _DEVICE, _UNIFIED = 1, 2, 4  # CUmemorytype


def _linear(target: tuple[int, int], source: tuple[int, int], nbytes: int, device: int) -> Copy:
    """What is not in rows has no pitch."""
    return Copy(device, Side(*target, 0, 0), Side(*source, 0, 0), nbytes)


def _side(params: Any, side: str) -> Side:
    """The "src" or the "dst" of a 3-D copy, or of a 2-D copy, which has one plane."""
    try:
        memory_type = int(getattr(params, f"{side}MemoryType"))
    except ValueError:
        raise RefusedError("INVALID_VALUE") from None
    address = int(getattr(params, f"{side}Host" if memory_type == _HOST else f"{side}Device"))
    names = ("Pitch", "Height", "XInBytes", "Y", "Z")
    pitch, height, x, y, z = (int(getattr(params, f"{side}{name}", 0)) for name in names)
    if not pitch and params.Height + y > 1:  # rows that lie together
        pitch = x + int(params.WidthInBytes)
    return Side(memory_type, address, pitch, height, x, y, z)


def copy_of(params: Any, device: int) -> Copy:
    """A ``CUDA_MEMCPY3D``."""
    sides = _side(params, "dst"), _side(params, "src")
    return Copy(device, *sides, params.WidthInBytes, params.Height, params.Depth)


def copy_params(copy: Copy) -> Any:
    params = cu.CUDA_MEMCPY3D()
    params.WidthInBytes, params.Height, params.Depth = copy.width, copy.height, copy.depth
    for prefix, side in (("dst", copy.target), ("src", copy.source)):
        setattr(params, f"{prefix}MemoryType", cu.CUmemorytype(side.memory_type))
        on_host = side.memory_type == _HOST
        setattr(params, f"{prefix}Host" if on_host else f"{prefix}Device", side.address)
        for name, value in zip(("Pitch", "Height", "XInBytes", "Y", "Z"), side[2:], strict=True):
            setattr(params, f"{prefix}{name}", value)
    return params


def _now(operation: Copy | Fill) -> None:
    """Do it on the legacy stream, and wait."""
    with machine:
        context = current()
        stream = stream_of(0)
        _later(operation, stream)
        work = stream.tail
    wait(context, lambda: stream.done)
    saw(work)


def _later(operation: Copy | Fill, stream: Stream) -> None:
    operation.check()
    if stream.capture is None and operation.absent is not None:
        raise RefusedError("INVALID_VALUE", f"{operation.absent:#x} is {memory.place(operation.absent)}")
    stream.queue(operation)


@call(locked=False)
def cuMemcpy3D(params: Any) -> None:
    _now(copy_of(params, current().device))


@call()
def cuMemcpy3DAsync(params: Any, stream: Any) -> None:
    queue = stream_of(stream)
    _later(copy_of(params, queue.context.device), queue)


def _copy_2d(params: Any, device: int) -> Copy:
    """A ``CUDA_MEMCPY2D``."""
    return Copy(device, _side(params, "dst"), _side(params, "src"), params.WidthInBytes, params.Height)


@call(locked=False)
def cuMemcpy2D(params: Any) -> None:
    _now(_copy_2d(params, current().device))


globals()["cuMemcpy2DUnaligned"] = cuMemcpy2D


@call()
def cuMemcpy2DAsync(params: Any, stream: Any) -> None:
    queue = stream_of(stream)
    _later(_copy_2d(params, queue.context.device), queue)


def _memcpy_pair(target: int, source: int) -> tuple[Any, Any]:
    """A 1-D copy between kinds of memory, at once and queued."""

    def end(memory_type: int, given: Any) -> tuple[int, int]:
        return memory_type, int(given) if memory_type == _DEVICE else host_address(given)

    def copy(to: Any, from_: Any, nbytes: int, device: int) -> Copy:
        return _linear(end(target, to), end(source, from_), nbytes, device)

    @call(locked=False)
    def at_once(to: Any, from_: Any, nbytes: int) -> None:
        _now(copy(to, from_, nbytes, current().device))

    @call()
    def queued(to: Any, from_: Any, nbytes: int, stream: Any) -> None:
        queue = stream_of(stream)
        _later(copy(to, from_, nbytes, queue.context.device), queue)

    return at_once, queued


for _name, _to, _from in (
    ("cuMemcpyHtoD", _DEVICE, _HOST),
    ("cuMemcpyDtoH", _HOST, _DEVICE),
    ("cuMemcpyDtoD", _DEVICE, _DEVICE),
    ("cuMemcpy", _UNIFIED, _UNIFIED),
):
    globals()[_name], globals()[f"{_name}Async"] = _memcpy_pair(_to, _from)


@call(locked=False)
def cuMemcpyPeer(to: Any, _to: Any, from_: Any, _from: Any, nbytes: int) -> None:
    _now(_linear((_DEVICE, int(to)), (_DEVICE, int(from_)), nbytes, current().device))


@call()
def cuMemcpyPeerAsync(to: Any, _to: Any, from_: Any, _from: Any, nbytes: int, stream: Any) -> None:
    queue = stream_of(stream)
    _later(_linear((_DEVICE, int(to)), (_DEVICE, int(from_)), nbytes, queue.context.device), queue)


def _memsets(element: int) -> tuple[Any, Any, Any, Any]:
    """Fills with elements of so many bytes: 1-D and 2-D, at once and queued."""

    def fill(to: Any, pitch: int, value: int, width: int, height: int, device: int) -> Fill:
        if not 0 <= value < 1 << 8 * element:
            raise RefusedError("INVALID_VALUE")
        return Fill(device, int(to), int(value), element, width, height, pitch)

    @call(locked=False)
    def line(to: Any, value: int, count: int) -> None:
        _now(fill(to, 0, value, count, 1, current().device))

    @call()
    def line_queued(to: Any, value: int, count: int, stream: Any) -> None:
        queue = stream_of(stream)
        _later(fill(to, 0, value, count, 1, queue.context.device), queue)

    @call(locked=False)
    def rows(to: Any, pitch: int, value: int, width: int, height: int) -> None:
        _now(fill(to, pitch, value, width, height, current().device))

    @call()
    def rows_queued(to: Any, pitch: int, value: int, width: int, height: int, stream: Any) -> None:
        queue = stream_of(stream)
        _later(fill(to, pitch, value, width, height, queue.context.device), queue)

    return line, line_queued, rows, rows_queued


for _bits in (8, 16, 32):
    _names = (f"cuMemset{_extents}{_bits}{_when}" for _extents in ("D", "D2D") for _when in ("", "Async"))
    globals().update(zip(_names, _memsets(_bits // 8), strict=True))
