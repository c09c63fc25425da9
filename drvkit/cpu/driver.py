"""The CPU devices behind the names of ``cuda.bindings.driver``: what stands in for that module.

Functions have the names, the arguments and the results of NVIDIA's bindings, whose enums, structs and handle types are
used as they are: they need no libcuda. What a function is given is checked when it is called; what its work does wrong
is told by later calls, as with a GPU. A name that is not here is refused by `drvkit.driver.Driver`, which says so.

Source: CUDA Driver API.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import struct
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cu

from .fault import ImageError
from .graphs import (
    Child,
    EdgeData,
    EventRecord,
    EventWait,
    Exec,
    Graph,
    InstantiateError,
    Node,
    UpdateError,
)
from .handles import RefusedError, handles
from .machine import START, TRIGGER, machine
from .memory import Allocation, memory
from .operations import (
    MAX_BLOCK,
    MAX_GRID,
    MULTIPROCESSORS,
    RESERVED_SHARED,
    SHARED_PER_BLOCK,
    SHARED_PER_MULTIPROCESSOR,
    SHARED_WITHOUT_ASKING,
    Act,
    Allocate,
    Attribute,
    Copy,
    Empty,
    Fill,
    Free,
    GraphMemory,
    HostCall,
    Kernel,
    Launch,
    MemOp,
    MemOps,
    Module,
    Operation,
    Side,
    blocks_per_multiprocessor,
)
from .program import load
from .storage import GRANULARITY, Multicast, Physical, Pool, Shareable, addresses, heap, import_file
from .streams import Capture, Context, Event, Mode, Stream, guard, guard_legacy, of_thread

# Enums, structs, handle types and constants: all of the bindings that is no function.
globals().update(
    {
        name: member
        for name, member in vars(cu).items()
        if name[:2] in ("CU", "cu") and not (name.startswith("cu") and name[2:3].isupper())
    }
)

DRIVER_VERSION = 13000
DEVICES = int(os.environ.get("DRVKIT_CPU_DEVICES", "8"))
HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
LEAST_PRIORITY, GREATEST_PRIORITY = 0, -5
OK = cu.CUresult.CUDA_SUCCESS


# ---- how calls are made ----------------------------------------------------------------------------------------------


class _State:
    """What the driver knows of the process."""

    def __init__(self) -> None:
        self.initialized = False
        self.contexts: dict[int, Context] = {}
        self.used: dict[int, int] = dict.fromkeys(range(DEVICES), 0)  # bytes of device memory
        self.pools: dict[int, Pool] = {}  # what devices allocate from
        self.default_pools: dict[int, Pool] = {}
        self.pool_of: dict[int, Pool] = {}  # by address
        self.graph_memory: dict[int, GraphMemory] = {}  # by address
        self.registered: dict[int, int] = {}  # host memory
        self.reports: dict[str, str] = {}  # by result code


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context | None] = [None]  # the current one is the last
        self.streams: dict[Context, Stream] = {}  # default streams of the thread


_state = _State()
_thread_state = _Thread()


def _forked() -> None:
    _state.initialized = False
    handles.forget_all()


os.register_at_fork(after_in_child=_forked)


def _call(outputs: int = 0, *, locked: bool = True, faults: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """A function of the driver with so many results. ``locked``: it has the machine to itself, and does not wait.
    ``faults``: it tells what went wrong in the current context before."""

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        nothing = (None,) * outputs

        @functools.wraps(function)
        def call(*args: Any) -> tuple[Any, ...]:
            try:
                _enter(faults)
                if locked:
                    with machine:
                        result = function(*args)
                    machine.relieve()
                else:
                    result = function(*args)
            except RefusedError as refused:
                return (_code(refused.code), *nothing)
            return (OK, result) if outputs == 1 else (OK, *result) if outputs else (OK,)

        return call

    return decorate


def _enter(faults: bool) -> None:
    if not _state.initialized:
        raise RefusedError("NOT_INITIALIZED")
    if machine.is_own_thread():
        raise RefusedError("NOT_PERMITTED")
    context = _thread_state.contexts[-1]
    if faults and context is not None:
        context.check()


def _code(name: str) -> Any:
    return cu.CUresult.__members__[f"CUDA_ERROR_{name}"]


def explain(code: Any) -> str | None:
    """What is known of the newest failure with this result code (the enum or its name): the device's own report."""
    name = code if isinstance(code, str) else cu.CUresult(code).name
    fault = machine.newest_fault
    if fault is not None and fault.code == name:
        return str(fault)
    return _state.reports.get(name)


def _current() -> Context:
    context = _thread_state.contexts[-1]
    if context is None:
        raise RefusedError("INVALID_CONTEXT")
    return context


def _context(handle: Any) -> Context:
    number = _number(handle)
    return handles.find(number, Context, "INVALID_CONTEXT") if number else _current()


def _number(handle: Any) -> int:
    return 0 if handle is None else int(handle)


def _device(device: Any) -> int:
    number = int(device)
    if not 0 <= number < DEVICES:
        raise RefusedError("INVALID_DEVICE")
    return number


def _stream(handle: Any) -> Stream:
    number = _number(handle)
    if number > 2:
        stream = handles.find(number, Stream, "INVALID_HANDLE")
        stream.context.check()
        return stream
    context = _current()
    if number == 2:
        own = _thread_state.streams.get(context)
        if own is None:
            own = _thread_state.streams[context] = Stream(context, blocking=True)
        return own
    guard_legacy(context)
    return context.legacy


def _event(handle: Any) -> Event:
    event = handles.find(_number(handle), Event, "INVALID_HANDLE")
    event.context.check()
    return event


def _kernel(handle: Any) -> Kernel:
    return handles.find(_number(handle), Kernel, "INVALID_HANDLE")


def _wait(context: Context, over: Callable[[], bool]) -> None:
    machine.wait(over)
    context.check()


def _wait_for_device(context: Context) -> None:
    _wait(context, lambda: not machine.left.get(context.device))


def _host_address(memory_: Any) -> int:
    """Of host memory given as an address or as an object with the buffer protocol."""
    if memory_ is None:
        return 0
    if hasattr(memory_, "__int__") and not isinstance(memory_, np.ndarray):
        return int(memory_)
    return int(np.frombuffer(memory_, np.uint8).ctypes.data)


# ---- the driver, devices, contexts -----------------------------------------------------------------------------------


def cuInit(flags: int) -> tuple[Any]:
    if flags:
        return (_code("INVALID_VALUE"),)
    _state.initialized = True
    return (OK,)


def cuDriverGetVersion() -> tuple[Any, int]:
    return OK, DRIVER_VERSION


def cuGetErrorName(code: Any) -> tuple[Any, bytes | None]:
    return OK, cu.CUresult(code).name.encode()


def cuGetErrorString(code: Any) -> tuple[Any, bytes | None]:
    words = cu.CUresult(code).name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_").replace("_", " ").lower()
    return OK, words.encode()


@_call(1, faults=False)
def cuDeviceGetCount() -> int:
    return DEVICES


@_call(1, faults=False)
def cuDeviceGet(ordinal: int) -> Any:
    return cu.CUdevice(_device(ordinal))


@_call(1, faults=False)
def cuDeviceGetName(length: int, device: Any) -> bytes:
    _device(device)
    return b"drvkit CPU device"[: length - 1].ljust(length, b"\0")


@_call(1, faults=False)
def cuDeviceGetUuid(device: Any) -> Any:
    value = cu.CUuuid()
    name = uuid.uuid5(uuid.NAMESPACE_OID, f"drvkit cpu:{_device(device)}").bytes
    ctypes.memmove(int(value.getPtr()), name, 16)
    return value


@_call(1, faults=False)
def cuDeviceTotalMem(device: Any) -> int:
    _device(device)
    return HOST_BYTES


_DEVICE_ATTRIBUTES = {
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_BLOCK_DIM_X": MAX_BLOCK[0],
    "MAX_BLOCK_DIM_Y": MAX_BLOCK[1],
    "MAX_BLOCK_DIM_Z": MAX_BLOCK[2],
    "MAX_GRID_DIM_X": MAX_GRID[0],
    "MAX_GRID_DIM_Y": MAX_GRID[1],
    "MAX_GRID_DIM_Z": MAX_GRID[2],
    "MAX_SHARED_MEMORY_PER_BLOCK": SHARED_WITHOUT_ASKING,
    "TOTAL_CONSTANT_MEMORY": 64 * 1024,
    "WARP_SIZE": 32,
    "MAX_PITCH": 2**31 - 1,
    "MAX_REGISTERS_PER_BLOCK": 65536,
    "CLOCK_RATE": 1980000,
    "TEXTURE_ALIGNMENT": 512,
    "GPU_OVERLAP": 1,
    "MULTIPROCESSOR_COUNT": MULTIPROCESSORS,
    "CAN_MAP_HOST_MEMORY": 1,
    "CONCURRENT_KERNELS": 1,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "L2_CACHE_SIZE": 60 << 20,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "ASYNC_ENGINE_COUNT": 3,
    "UNIFIED_ADDRESSING": 1,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "STREAM_PRIORITIES_SUPPORTED": 1,
    "GLOBAL_L1_CACHE_SUPPORTED": 1,
    "LOCAL_L1_CACHE_SUPPORTED": 1,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": SHARED_PER_MULTIPROCESSOR,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "CONCURRENT_MANAGED_ACCESS": 0,
    "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
    "CAN_USE_STREAM_MEM_OPS_V1": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS_V1": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR_V1": 1,
    "COOPERATIVE_LAUNCH": 1,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": SHARED_PER_BLOCK,
    "CAN_FLUSH_REMOTE_WRITES": 1,
    "HOST_REGISTER_SUPPORTED": 1,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "MAX_PERSISTING_L2_CACHE_SIZE": 0,
    "MAX_ACCESS_POLICY_WINDOW_SIZE": 128 << 20,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": RESERVED_SHARED,
    "MEMORY_POOLS_SUPPORTED": 1,
    "CLUSTER_LAUNCH": 1,
    "MULTICAST_SUPPORTED": 1,
    "IPC_EVENT_SUPPORTED": 0,
    "MEM_SYNC_DOMAIN_COUNT": 4,
    "UNIFIED_FUNCTION_POINTERS": 0,
}


@_call(1, faults=False)
def cuDeviceGetAttribute(attribute: Any, device: Any) -> int:
    _device(device)
    return _DEVICE_ATTRIBUTES.get(cu.CUdevice_attribute(attribute).name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)


@_call(1, faults=False)
def cuDeviceCanAccessPeer(device: Any, peer: Any) -> int:
    return int(_device(device) != _device(peer))


@_call(1, faults=False)
def cuDeviceGetP2PAttribute(attribute: Any, source: Any, target: Any) -> int:
    if _device(source) == _device(target):
        raise RefusedError("INVALID_DEVICE")
    name = cu.CUdevice_P2PAttribute(attribute).name
    return int(name.endswith(("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED", "ACCESS_ACCESS_SUPPORTED")))


@_call(1, faults=False)
def cuDevicePrimaryCtxRetain(device: Any) -> Any:
    number = _device(device)
    context = _state.contexts.get(number)
    if context is None:
        context = _state.contexts[number] = Context(number)
    context.retained += 1
    return cu.CUcontext(context.handle)


@_call(faults=False)
def cuDevicePrimaryCtxRelease(device: Any) -> None:
    context = _state.contexts.get(_device(device))
    if context is None or not context.retained:
        raise RefusedError("INVALID_CONTEXT")
    context.retained -= 1


@_call(2, faults=False)
def cuDevicePrimaryCtxGetState(device: Any) -> tuple[int, int]:
    context = _state.contexts.get(_device(device))
    return 0, int(context is not None and context.retained > 0)


@_call(faults=False)
def cuDevicePrimaryCtxReset(device: Any) -> None:
    """What the device has to do, and what went wrong there, is forgotten. Its memory and handles stay, unlike those of
    a GPU, so that their owners can release them."""
    machine.reset(_device(device))


@_call(faults=False)
def cuCtxSetCurrent(context: Any) -> None:
    number = _number(context)
    _thread_state.contexts[-1] = handles.find(number, Context, "INVALID_CONTEXT") if number else None


@_call(faults=False)
def cuCtxPushCurrent(context: Any) -> None:
    _thread_state.contexts.append(handles.find(_number(context), Context, "INVALID_CONTEXT"))


@_call(1, faults=False)
def cuCtxPopCurrent() -> Any:
    context = _current()
    _thread_state.contexts.pop()
    if not _thread_state.contexts:
        _thread_state.contexts.append(None)
    return cu.CUcontext(context.handle)


@_call(1, faults=False)
def cuCtxGetCurrent() -> Any:
    context = _thread_state.contexts[-1]
    return cu.CUcontext(0 if context is None else context.handle)


@_call(1, faults=False)
def cuCtxGetDevice() -> Any:
    return cu.CUdevice(_current().device)


@_call(2, faults=False)
def cuCtxGetStreamPriorityRange() -> tuple[int, int]:
    _current()
    return LEAST_PRIORITY, GREATEST_PRIORITY


@_call(locked=False)
def cuCtxSynchronize() -> None:
    context = _current()
    guard()
    _wait_for_device(context)


@_call()
def cuCtxEnablePeerAccess(peer: Any, flags: int) -> None:
    context, other = _current(), handles.find(_number(peer), Context, "INVALID_CONTEXT")
    if other is context or flags:
        raise RefusedError("INVALID_DEVICE" if other is context else "INVALID_VALUE")
    if other.device in context.peers:
        raise RefusedError("PEER_ACCESS_ALREADY_ENABLED")
    context.peers.add(other.device)


@_call()
def cuCtxDisablePeerAccess(peer: Any) -> None:
    context, other = _current(), handles.find(_number(peer), Context, "INVALID_CONTEXT")
    if other.device not in context.peers:
        raise RefusedError("PEER_ACCESS_NOT_ENABLED")
    context.peers.discard(other.device)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _take(device: int, nbytes: int) -> None:
    """Count device memory as used."""
    if nbytes > HOST_BYTES - _state.used[device]:
        raise RefusedError("OUT_OF_MEMORY")
    _state.used[device] += nbytes


def _allocate(nbytes: int, kind: str, device: int) -> Allocation:
    if nbytes <= 0:
        raise RefusedError("INVALID_VALUE")
    try:
        return memory.allocate(nbytes, kind, device, written=kind == "pinned")  # the host writes unseen
    except MemoryError:
        raise RefusedError("OUT_OF_MEMORY") from None


@_call(1)
def cuMemAlloc(nbytes: int) -> Any:
    context = _current()
    guard()
    if nbytes > HOST_BYTES - _state.used[context.device]:
        raise RefusedError("OUT_OF_MEMORY")
    allocation = _allocate(nbytes, "device", context.device)
    _state.used[context.device] += nbytes
    return cu.CUdeviceptr(allocation.address)


@_call(2)
def cuMemAllocPitch(width: int, height: int, element: int) -> tuple[Any, int]:
    context = _current()
    guard()
    if element not in (4, 8, 16) or not width or not height:
        raise RefusedError("INVALID_VALUE")
    pitch = -(-width // 512) * 512
    allocation = _allocate(pitch * height, "device", context.device)
    _take(context.device, pitch * height)
    return cu.CUdeviceptr(allocation.address), pitch


@_call(locked=False)
def cuMemFree(pointer: Any) -> None:
    context, address = _current(), int(pointer)
    if not address:
        return
    guard()
    _wait_for_device(context)
    with machine:
        _free(address, ("device", "pool"))


def _free(address: int, kinds: Sequence[str]) -> None:
    """Free an allocation of one of these kinds, or the memory that a launch left, now."""
    graph_memory = _state.graph_memory.get(address)
    if graph_memory is not None and "pool" in kinds:
        if not graph_memory.held:
            raise RefusedError("INVALID_VALUE")
        graph_memory.shut()
        graph_memory.hold(False)
        return
    allocation = memory.find(address)
    if allocation is None or allocation.freed or allocation.address != address or allocation.kind not in kinds:
        raise RefusedError("INVALID_VALUE")
    pool = _state.pool_of.pop(address, None)
    if pool is not None:
        pool.give_back(allocation.nbytes)
    memory.free(address)
    if allocation.kind in ("device", "pool"):
        _state.used[allocation.device] -= allocation.nbytes


@_call(1)
def cuMemHostAlloc(nbytes: int, flags: int) -> int:
    context = _current()
    guard()
    return _allocate(nbytes, "pinned", context.device).address


@_call(1)
def cuMemAllocHost(nbytes: int) -> int:
    context = _current()
    guard()
    return _allocate(nbytes, "pinned", context.device).address


@_call(locked=False)
def cuMemFreeHost(pointer: Any) -> None:
    context, address = _current(), _host_address(pointer)
    if not address:
        return
    guard()
    _wait_for_device(context)
    with machine:
        _free(address, ("pinned",))


@_call(1)
def cuMemHostGetDevicePointer(pointer: Any, flags: int) -> Any:
    address = _host_address(pointer)
    if memory_kind(address) != "pinned":
        raise RefusedError("INVALID_VALUE")
    return cu.CUdeviceptr(address)


def memory_kind(address: int) -> str | None:
    allocation = memory.find(address) if address in memory else None
    return None if allocation is None or allocation.freed else allocation.kind


@_call(2)
def cuMemGetInfo() -> tuple[int, int]:
    return HOST_BYTES - _state.used[_current().device], HOST_BYTES


@_call(2)
def cuMemGetAddressRange(pointer: Any) -> tuple[Any, int]:
    allocation = memory.find(int(pointer))
    if allocation is None or allocation.freed:
        raise RefusedError("NOT_FOUND")
    return cu.CUdeviceptr(allocation.address), allocation.nbytes


@_call(1)
def cuPointerGetAttribute(attribute: Any, pointer: Any) -> Any:
    return _pointer_attribute(int(attribute), int(pointer))


def _pointer_attribute(attribute: int, address: int) -> Any:
    allocation = memory.find(address)
    if allocation is None or allocation.freed:
        raise RefusedError("INVALID_VALUE")
    on_host = allocation.kind == "pinned"
    values: dict[str, Any] = {
        "CONTEXT": cu.CUcontext(_state.contexts[allocation.device].handle),
        "MEMORY_TYPE": cu.CUmemorytype.CU_MEMORYTYPE_HOST if on_host else cu.CUmemorytype.CU_MEMORYTYPE_DEVICE,
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


# ---- copies and fills

_HOST, _DEVICE, _UNIFIED = 1, 2, 4  # CUmemorytype


def _line(memory_type: int, address: int, nbytes: int) -> Side:
    return Side(memory_type, address, nbytes, 1)


def _linear(target: tuple[int, int], source: tuple[int, int], nbytes: int, device: int) -> Copy:
    return Copy(device, _line(*target, nbytes), _line(*source, nbytes), nbytes)


def _copy(params: Any, device: int) -> Copy:
    """A ``CUDA_MEMCPY3D``."""
    sides = {}
    for side in ("dst", "src"):
        try:
            memory_type = int(getattr(params, f"{side}MemoryType"))
        except ValueError:
            raise RefusedError("INVALID_VALUE") from None
        address = int(getattr(params, f"{side}Host" if memory_type == _HOST else f"{side}Device"))
        place = (int(getattr(params, f"{side}{name}")) for name in ("Pitch", "Height", "XInBytes", "Y", "Z"))
        sides[side] = Side(memory_type, address, *place)
    return Copy(device, sides["dst"], sides["src"], params.WidthInBytes, params.Height, params.Depth)


def _copy_params(copy: Copy) -> Any:
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
        context = _current()
        guard()
        operation.check()
        stream = _stream(0)
        stream.queue(operation)
    _wait(context, lambda: stream.done)


def _later(operation: Copy | Fill, stream: Stream) -> None:
    operation.check()
    stream.queue(operation)


@_call(locked=False)
def cuMemcpy3D(params: Any) -> None:
    _now(_copy(params, _current().device))


@_call()
def cuMemcpy3DAsync(params: Any, stream: Any) -> None:
    queue = _stream(stream)
    _later(_copy(params, queue.context.device), queue)


def _copy_2d(params: Any, device: int) -> Copy:
    """A ``CUDA_MEMCPY2D``."""
    sides = {}
    for side in ("dst", "src"):
        try:
            memory_type = int(getattr(params, f"{side}MemoryType"))
        except ValueError:
            raise RefusedError("INVALID_VALUE") from None
        address = int(getattr(params, f"{side}Host" if memory_type == _HOST else f"{side}Device"))
        pitch, x, y = (int(getattr(params, f"{side}{name}")) for name in ("Pitch", "XInBytes", "Y"))
        sides[side] = Side(memory_type, address, pitch or int(params.WidthInBytes), params.Height + y, x, y)
    return Copy(device, sides["dst"], sides["src"], params.WidthInBytes, params.Height)


@_call(locked=False)
def cuMemcpy2D(params: Any) -> None:
    _now(_copy_2d(params, _current().device))


globals()["cuMemcpy2DUnaligned"] = cuMemcpy2D


@_call()
def cuMemcpy2DAsync(params: Any, stream: Any) -> None:
    queue = _stream(stream)
    _later(_copy_2d(params, queue.context.device), queue)


def _memcpy_pair(target: int, source: int) -> tuple[Any, Any]:
    """A 1-D copy between kinds of memory, at once and queued."""

    def copy(to: Any, from_: Any, nbytes: int, device: int) -> Copy:
        to = _host_address(to) if target != _DEVICE else int(to)
        from_ = _host_address(from_) if source != _DEVICE else int(from_)
        return _linear((target, to), (source, from_), nbytes, device)

    @_call(locked=False)
    def at_once(to: Any, from_: Any, nbytes: int) -> None:
        _now(copy(to, from_, nbytes, _current().device))

    @_call()
    def queued(to: Any, from_: Any, nbytes: int, stream: Any) -> None:
        queue = _stream(stream)
        _later(copy(to, from_, nbytes, queue.context.device), queue)

    return at_once, queued


for _name, _to, _from in (
    ("cuMemcpyHtoD", _DEVICE, _HOST),
    ("cuMemcpyDtoH", _HOST, _DEVICE),
    ("cuMemcpyDtoD", _DEVICE, _DEVICE),
    ("cuMemcpy", _HOST, _HOST),  # any memory: what is in the address space is known as such
):
    globals()[_name], globals()[f"{_name}Async"] = _memcpy_pair(_to, _from)


@_call(locked=False)
def cuMemcpyPeer(to: Any, _to: Any, from_: Any, _from: Any, nbytes: int) -> None:
    _now(_linear((_DEVICE, int(to)), (_DEVICE, int(from_)), nbytes, _current().device))


@_call()
def cuMemcpyPeerAsync(to: Any, _to: Any, from_: Any, _from: Any, nbytes: int, stream: Any) -> None:
    queue = _stream(stream)
    _later(_linear((_DEVICE, int(to)), (_DEVICE, int(from_)), nbytes, queue.context.device), queue)


def _memsets(element: int) -> tuple[Any, Any, Any, Any]:
    """Fills with elements of so many bytes: 1-D and 2-D, at once and queued."""

    def fill(to: Any, pitch: int, value: int, width: int, height: int, device: int) -> Fill:
        return Fill(device, int(to), int(value), element, width, height, pitch)

    @_call(locked=False)
    def line(to: Any, value: int, count: int) -> None:
        _now(fill(to, count * element, value, count, 1, _current().device))

    @_call()
    def line_queued(to: Any, value: int, count: int, stream: Any) -> None:
        queue = _stream(stream)
        _later(fill(to, count * element, value, count, 1, queue.context.device), queue)

    @_call(locked=False)
    def rows(to: Any, pitch: int, value: int, width: int, height: int) -> None:
        _now(fill(to, pitch, value, width, height, _current().device))

    @_call()
    def rows_queued(to: Any, pitch: int, value: int, width: int, height: int, stream: Any) -> None:
        queue = _stream(stream)
        _later(fill(to, pitch, value, width, height, queue.context.device), queue)

    return line, line_queued, rows, rows_queued


for _bits in (8, 16, 32):
    _names = (f"cuMemset{_extents}{_bits}{_when}" for _extents in ("D", "D2D") for _when in ("", "Async"))
    globals().update(zip(_names, _memsets(_bits // 8), strict=True))


# ---- pools


def _pool(handle: Any) -> Pool:
    return handles.find(_number(handle), Pool)


def _default_pool(device: int) -> Pool:
    if device not in _state.default_pools:
        _state.default_pools[device] = Pool(device)
    return _state.default_pools[device]


@_call(1)
def cuMemPoolCreate(properties: Any) -> Any:
    location = properties.location
    if int(properties.allocType) != 1 or int(location.type) != 1:
        raise RefusedError("INVALID_VALUE" if int(properties.allocType) != 1 else "NOT_SUPPORTED")
    if int(properties.handleTypes):
        raise RefusedError("NOT_SUPPORTED")
    return cu.CUmemoryPool(Pool(_device(location.id), maximum=int(properties.maxSize)).handle)


@_call()
def cuMemPoolDestroy(pool: Any) -> None:
    """What was allocated from it goes on until it is freed."""
    found = _pool(pool)
    if found in _state.default_pools.values():
        raise RefusedError("INVALID_VALUE")
    handles.drop(found.handle)


@_call()
def cuMemPoolTrimTo(pool: Any, keep: int) -> None:
    _pool(pool).trim(keep)


@_call(1)
def cuMemPoolGetAttribute(pool: Any, attribute: Any) -> Any:
    found, name = _pool(pool), cu.CUmemPool_attribute(attribute).name.removeprefix("CU_MEMPOOL_ATTR_")
    counts = {
        "RESERVED_MEM_CURRENT": found.reserved,
        "RESERVED_MEM_HIGH": found.reserved_high,
        "USED_MEM_CURRENT": found.used,
        "USED_MEM_HIGH": found.used_high,
    } | found.attributes
    if name not in counts:
        raise RefusedError("INVALID_VALUE")
    return counts[name] if name.startswith("REUSE") else cu.cuuint64_t(counts[name])


@_call()
def cuMemPoolSetAttribute(pool: Any, attribute: Any, value: Any) -> None:
    found, name = _pool(pool), cu.CUmemPool_attribute(attribute).name.removeprefix("CU_MEMPOOL_ATTR_")
    if name in found.attributes:
        found.attributes[name] = int(value)
    elif name in ("RESERVED_MEM_HIGH", "USED_MEM_HIGH") and not int(value):
        found.reserved_high, found.used_high = found.reserved, found.used
    else:
        raise RefusedError("INVALID_VALUE")


@_call(1)
def cuDeviceGetDefaultMemPool(device: Any) -> Any:
    return cu.CUmemoryPool(_default_pool(_device(device)).handle)


@_call(1)
def cuDeviceGetMemPool(device: Any) -> Any:
    number = _device(device)
    return cu.CUmemoryPool(_state.pools.get(number, _default_pool(number)).handle)


@_call()
def cuDeviceSetMemPool(device: Any, pool: Any) -> None:
    _state.pools[_device(device)] = _pool(pool)


@_call(1)
def cuMemAllocFromPoolAsync(nbytes: int, pool: Any, stream: Any) -> Any:
    return _allocate_async(nbytes, _pool(pool), _stream(stream))


@_call(1)
def cuMemAllocAsync(nbytes: int, stream: Any) -> Any:
    queue = _stream(stream)
    device = queue.context.device
    return _allocate_async(nbytes, _state.pools.get(device, _default_pool(device)), queue)


def _allocate_async(nbytes: int, pool: Pool, stream: Stream) -> Any:
    if nbytes <= 0:
        raise RefusedError("INVALID_VALUE")
    if stream.capture is not None:
        graph_memory = _graph_memory(pool.device, nbytes)
        stream.queue(Allocate(graph_memory))
        return cu.CUdeviceptr(graph_memory.address)
    if nbytes > HOST_BYTES - _state.used[pool.device]:
        raise RefusedError("OUT_OF_MEMORY")
    allocation = pool.allocate(nbytes)
    _state.used[pool.device] += nbytes
    _state.pool_of[allocation.address] = pool
    return cu.CUdeviceptr(allocation.address)


def _graph_memory(device: int, nbytes: int) -> GraphMemory:
    made = GraphMemory(device, nbytes, _state.graph_memory.pop)
    _state.graph_memory[made.address] = made
    return made


@_call()
def cuMemFreeAsync(pointer: Any, stream: Any) -> None:
    queue, address = _stream(stream), int(pointer)
    device = queue.context.device
    graph_memory = _state.graph_memory.get(address)
    if graph_memory is not None:
        if queue.capture is not None:
            queue.queue(Free(graph_memory))
        elif graph_memory.held:
            queue.queue(Act(device, f"free of {address:#x}", graph_memory.shut))
            graph_memory.hold(False)
        else:
            raise RefusedError("INVALID_VALUE")
        return
    pool = _state.pool_of.get(address)
    if pool is None or queue.capture is not None:
        raise RefusedError("INVALID_VALUE")
    del _state.pool_of[address]
    allocation = memory.find(address)
    assert allocation is not None
    pool.give_back(allocation.nbytes)
    _state.used[allocation.device] -= allocation.nbytes
    queue.queue(Act(device, f"free of {address:#x}", functools.partial(memory.free, address)))


@_call()
def cuDeviceGraphMemTrim(device: Any) -> None:
    _device(device)


# ---- physical memory, and what processes share


def _shareable(handle: Any) -> Shareable:
    return handles.find(_number(handle), Shareable)


def _kept(shared: Shareable) -> Any:
    shared.keep()
    return cu.CUmemGenericAllocationHandle(handles.add(shared))


@_call(1)
def cuMemGetAllocationGranularity(properties: Any, option: Any) -> int:
    _device(properties.location.id)
    return GRANULARITY


@_call(1)
def cuMemAddressReserve(nbytes: int, align: int, address: Any, flags: int) -> Any:
    if flags:
        raise RefusedError("INVALID_VALUE")
    return cu.CUdeviceptr(addresses.reserve(nbytes, align))


@_call()
def cuMemAddressFree(address: Any, nbytes: int) -> None:
    addresses.free(int(address), nbytes)


@_call(1)
def cuMemCreate(nbytes: int, properties: Any, flags: int) -> Any:
    if not nbytes or nbytes % GRANULARITY or flags or int(properties.type) != 1 or int(properties.location.type) != 1:
        raise RefusedError("INVALID_VALUE")
    if int(properties.requestedHandleTypes) & ~1:
        raise RefusedError("NOT_SUPPORTED" if int(properties.requestedHandleTypes) != 8 else "NOT_PERMITTED")
    device = _device(properties.location.id)
    _take(device, nbytes)
    shareable = bool(int(properties.requestedHandleTypes))

    def released() -> None:
        _state.used[device] -= nbytes

    return _kept(Physical(device, nbytes, shareable=shareable, released=released))


@_call()
def cuMemRelease(handle: Any) -> None:
    """Memory goes when it is mapped and bound nowhere any more."""
    shared = _shareable(handle)
    handles.drop(_number(handle))
    shared.let_go()


@_call(1)
def cuMemRetainAllocationHandle(address: Any) -> Any:
    return _kept(addresses.at(_host_address(address)).shared)


@_call()
def cuMemMap(address: Any, nbytes: int, offset: int, handle: Any, flags: int) -> None:
    if flags:
        raise RefusedError("INVALID_VALUE")
    addresses.map(int(address), nbytes, _shareable(handle), offset)


@_call(locked=False)
def cuMemUnmap(address: Any, nbytes: int) -> None:
    context = _thread_state.contexts[-1]
    if context is not None:
        _wait_for_device(context)
    with machine:
        addresses.unmap(int(address), nbytes)


@_call()
def cuMemSetAccess(address: Any, nbytes: int, descriptions: Any, count: int) -> None:
    devices: dict[int, bool] = {}
    for description in list(descriptions)[:count]:
        flags = int(description.flags)
        if flags not in (0, 1, 3) or int(description.location.type) != 1:
            raise RefusedError("INVALID_VALUE")
        devices[_device(description.location.id)] = flags != 0
    addresses.set_access(int(address), nbytes, devices)


@_call(1)
def cuMemGetAccess(location: Any, address: Any) -> int:
    return 3 if _device(location.id) in addresses.at(int(address)).accessible else 0


@_call(1)
def cuMemExportToShareableHandle(handle: Any, handle_type: Any, flags: int) -> int:
    shared = _shareable(handle)
    if flags or int(handle_type) != 1 or not shared.shareable:
        raise RefusedError("INVALID_VALUE" if int(handle_type) == 1 else "NOT_SUPPORTED")
    machine.shared = True
    return os.dup(shared.fd)


@_call(1)
def cuMemImportFromShareableHandle(handle: Any, handle_type: Any) -> Any:
    if int(handle_type) != 1:
        raise RefusedError("NOT_SUPPORTED")
    machine.shared = True
    return _kept(import_file(int(handle)))


@_call(1)
def cuIpcGetMemHandle(pointer: Any) -> Any:
    allocation = memory.find(int(pointer))
    if allocation is None or allocation.freed or allocation.kind != "device":
        raise RefusedError("INVALID_VALUE")
    handle = cu.CUipcMemHandle()
    raw = heap.export(allocation).ljust(64, b"\0")
    ctypes.memmove(int(handle.getPtr()), raw, 64)
    return handle


@_call(1)
def cuIpcOpenMemHandle(handle: Any, flags: int) -> Any:
    _current()
    if flags != 1:
        raise RefusedError("INVALID_VALUE")
    return cu.CUdeviceptr(heap.open(ctypes.string_at(int(handle.getPtr()), 64)))


@_call(locked=False)
def cuIpcCloseMemHandle(pointer: Any) -> None:
    _wait_for_device(_current())
    with machine:
        heap.close(int(pointer))


# ---- multicast


def _multicast(handle: Any) -> Multicast:
    return handles.find(_number(handle), Multicast)


@_call(1)
def cuMulticastGetGranularity(properties: Any, option: Any) -> int:
    return GRANULARITY


@_call(1)
def cuMulticastCreate(properties: Any) -> Any:
    nbytes, devices = int(properties.size), int(properties.numDevices)
    if not nbytes or nbytes % GRANULARITY or not 0 < devices <= 64 or int(properties.flags):
        raise RefusedError("INVALID_VALUE")
    return _kept(Multicast(nbytes, devices, shareable=bool(int(properties.handleTypes) & 1)))


@_call()
def cuMulticastAddDevice(handle: Any, device: Any) -> None:
    _multicast(handle).add_device(_device(device))


@_call(locked=False)
def cuMulticastBindMem(handle: Any, offset: int, physical: Any, at: int, nbytes: int, flags: int) -> None:
    with machine:
        multicast, found = _multicast(handle), handles.find(_number(physical), Physical)
        if flags:
            raise RefusedError("INVALID_VALUE")
    machine.wait(multicast.is_complete)  # another process may have to add its device first
    with machine:
        multicast.bind(offset, found, at, nbytes)


@_call(locked=False)
def cuMulticastBindAddr(handle: Any, offset: int, pointer: Any, nbytes: int, flags: int) -> None:
    with machine:
        multicast, mapping = _multicast(handle), addresses.at(int(pointer))
        if flags or not isinstance(mapping.shared, Physical):
            raise RefusedError("INVALID_VALUE")
    machine.wait(multicast.is_complete)
    with machine:
        multicast.bind(offset, mapping.shared, mapping.offset + int(pointer) - mapping.address, nbytes)


@_call()
def cuMulticastUnbind(handle: Any, device: Any, offset: int, nbytes: int) -> None:
    _multicast(handle).unbind(_device(device), offset, nbytes)


# ---- streams and events ----------------------------------------------------------------------------------------------


@_call(1)
def cuStreamCreate(flags: Any) -> Any:
    return _new_stream(flags, 0)


@_call(1)
def cuStreamCreateWithPriority(flags: Any, priority: int) -> Any:
    return _new_stream(flags, priority)


def _new_stream(flags: Any, priority: int) -> Any:
    if int(flags) not in (0, 1):
        raise RefusedError("INVALID_VALUE")
    clamped = max(GREATEST_PRIORITY, min(LEAST_PRIORITY, priority))
    return cu.CUstream(Stream(_current(), blocking=int(flags) == 0, priority=clamped).handle)


@_call()
def cuStreamDestroy(stream: Any) -> None:
    handles.find(_number(stream), Stream, "INVALID_HANDLE").destroy()


@_call(1)
def cuStreamGetPriority(stream: Any) -> int:
    return _stream(stream).priority


@_call(1)
def cuStreamGetFlags(stream: Any) -> int:
    return 0 if _stream(stream).blocking else 1


@_call(1)
def cuStreamGetCtx(stream: Any) -> Any:
    return cu.CUcontext(_stream(stream).context.handle)


@_call(1)
def cuStreamGetDevice(stream: Any) -> Any:
    return cu.CUdevice(_stream(stream).context.device)


def _idle_stream(handle: Any) -> Stream:
    """A stream that is not captured; asking for its work ends a capture."""
    stream = _stream(handle)
    if stream.capture is not None:
        stream.capture.invalidate()
        raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")
    return stream


@_call(locked=False)
def cuStreamSynchronize(stream: Any) -> None:
    with machine:
        found = _idle_stream(stream)
        guard()
    _wait(found.context, lambda: found.done)


@_call(locked=False)
def cuStreamQuery(stream: Any) -> None:
    with machine:
        found = _idle_stream(stream)
    if not found.done:
        machine.poll()
    found.context.check()
    if not found.done:
        raise RefusedError("NOT_READY")


@_call()
def cuStreamWaitEvent(stream: Any, event: Any, flags: int) -> None:
    _stream(stream).wait(_event(event))


@_call()
def cuLaunchHostFunc(stream: Any, function: Any, data: Any) -> None:
    queue = _stream(stream)
    queue.queue(_host_call(queue.context.device, function, data))


def _host_call(device: int, function: Any, data: Any) -> HostCall:
    address = _number(function)
    if not address:
        raise RefusedError("INVALID_VALUE")
    machine.host_thread(device)
    return HostCall(device, address, _host_address(data))


@_call()
def cuStreamWriteValue32(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(2, int(address), int(value), flags))


@_call()
def cuStreamWriteValue64(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(5, int(address), int(value), flags))


@_call()
def cuStreamWaitValue32(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(1, int(address), int(value), flags))


@_call()
def cuStreamWaitValue64(stream: Any, address: Any, value: Any, flags: int) -> None:
    _queue_ops(stream, MemOp(4, int(address), int(value), flags))


@_call()
def cuStreamBatchMemOp(stream: Any, count: int, params: Any, flags: int) -> None:
    if len(params) < count:
        raise RefusedError("INVALID_VALUE")
    _queue_ops(stream, *map(_mem_op, params[:count]), flags=flags)


def _queue_ops(stream: Any, *ops: MemOp, flags: int = 0) -> None:
    queue = _stream(stream)
    operation = MemOps(queue.context.device, ops, flags)
    operation.check()
    queue.queue(operation)


def _mem_op(params: Any) -> MemOp:
    """A ``CUstreamBatchMemOpParams``."""
    operation = int(params.operation)
    part = params.waitValue if operation in (1, 4) else params.writeValue if operation in (2, 5) else None
    if part is None:
        return MemOp(operation, 0, 0, 0)
    value = part.value64 if operation in (4, 5) else part.value
    return MemOp(operation, int(part.address), int(value), int(part.flags))


@_call(1)
def cuEventCreate(flags: Any) -> Any:
    number = int(flags)
    if number & ~7 or (number & 4 and not number & 2):
        raise RefusedError("INVALID_VALUE")
    if number & 4:
        raise RefusedError("NOT_SUPPORTED")
    return cu.CUevent(Event(_current(), timing=not number & 2).handle)


@_call()
def cuEventDestroy(event: Any) -> None:
    handles.drop(handles.find(_number(event), Event, "INVALID_HANDLE").handle)


@_call()
def cuEventRecord(event: Any, stream: Any) -> None:
    _record(event, stream)


@_call()
def cuEventRecordWithFlags(event: Any, stream: Any, flags: int) -> None:
    """With ``CU_EVENT_RECORD_EXTERNAL`` a captured record is a node."""
    if flags not in (0, 1):
        raise RefusedError("INVALID_VALUE")
    queue = _stream(stream)
    if flags and queue.capture is not None:
        queue.queue(EventRecord(queue.context.device, _event(event)))
    else:
        _record(event, stream)


def _record(event: Any, stream: Any) -> None:
    queue, found = _stream(stream), _event(event)
    if queue.context is not found.context:
        raise RefusedError("INVALID_HANDLE")
    queue.record(found)


def _recorded(event: Any) -> Event:
    found = _event(event)
    if found.captured is not None:
        found.captured[0].invalidate()
        raise RefusedError("CAPTURED_EVENT")
    return found


@_call(locked=False)
def cuEventQuery(event: Any) -> None:
    with machine:
        found = _recorded(event)
        guard()
    if not found.reached:
        machine.poll()
    found.context.check()
    if not found.reached:
        raise RefusedError("NOT_READY")


@_call(locked=False)
def cuEventSynchronize(event: Any) -> None:
    with machine:
        found = _recorded(event)
        guard()
        mark = found.mark
    if mark is not None:
        _wait(found.context, lambda: mark.reached)


@_call(1)
def cuEventElapsedTime(start: Any, end: Any) -> float:
    marks = []
    for event in (_recorded(start), _recorded(end)):
        if not event.timing or event.mark is None:
            raise RefusedError("INVALID_HANDLE")
        marks.append(event.mark)
    if not all(mark.reached for mark in marks):
        raise RefusedError("NOT_READY")
    return (marks[1].time_ns - marks[0].time_ns) * 1e-6


# ---- capture


def _no_capture(stream: Any) -> Stream:
    found = _stream(stream)
    if found is found.context.legacy:
        raise RefusedError("STREAM_CAPTURE_UNSUPPORTED")
    if found.capture is not None:
        raise RefusedError("ILLEGAL_STATE")
    return found


@_call()
def cuStreamBeginCapture(stream: Any, mode: Any) -> None:
    Capture(_no_capture(stream), Graph(), {}, int(mode))


@_call()
def cuStreamBeginCaptureToGraph(stream: Any, graph: Any, dependencies: Any, data: Any, count: int, mode: Any) -> None:
    into = _graph(graph)
    Capture(_no_capture(stream), into, dict(_edges(into, dependencies, data, count)), int(mode))


@_call(1)
def cuStreamEndCapture(stream: Any) -> Any:
    found = _stream(stream)
    capture = found.capture
    if capture is None:
        raise RefusedError("ILLEGAL_STATE")
    if capture.mode != Mode.RELAXED and capture.thread != threading.get_ident():
        capture.invalidate()
        raise RefusedError("STREAM_CAPTURE_WRONG_THREAD")
    if found is not capture.origin:
        capture.invalidate()
        raise RefusedError("STREAM_CAPTURE_UNMATCHED")
    wrong = capture.end()
    if wrong is not None:
        capture.graph.destroy()
        raise RefusedError(wrong)
    return cu.CUgraph(capture.graph.handle)


@_call(1)
def cuStreamIsCapturing(stream: Any) -> Any:
    return _capture_status(_stream(stream))


def _capture_status(stream: Stream) -> Any:
    capture = stream.capture
    return cu.CUstreamCaptureStatus(0 if capture is None else 1 if capture.valid else 2)


@_call(6)
def cuStreamGetCaptureInfo(stream: Any) -> tuple[Any, ...]:
    found = _stream(stream)
    capture = found.capture
    if capture is None or not capture.valid:
        return _capture_status(found), None, None, [], [], 0
    frontier = capture.frontier(found)
    nodes, data = [cu.CUgraphNode(node.handle) for node in frontier], [_edge_struct(d) for d in frontier.values()]
    identity, graph = cu.cuuint64_t(capture.id), cu.CUgraph(capture.graph.handle)
    return _capture_status(found), identity, graph, nodes, data, len(nodes)


@_call()
def cuStreamUpdateCaptureDependencies(stream: Any, dependencies: Any, data: Any, count: int, flags: int) -> None:
    found = _stream(stream)
    capture = found.capture
    if capture is None:
        raise RefusedError("ILLEGAL_STATE")
    given = dict(_edges(capture.graph, dependencies, data, count))
    capture.set_frontier(found, given if flags == 1 else capture.frontier(found) | given)


@_call(1)
def cuThreadExchangeStreamCaptureMode(mode: Any) -> Any:
    before, of_thread.mode = of_thread.mode, int(mode)
    return cu.CUstreamCaptureMode(before)


# ---- modules and kernels ---------------------------------------------------------------------------------------------


@_call(1)
def cuModuleLoad(path: Any) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        raise RefusedError("FILE_NOT_FOUND") from None
    return _load(data, os.path.basename(os.fsdecode(path)))


@_call(1)
def cuModuleLoadData(image: Any) -> Any:
    return _load(_image(image))


globals()["cuModuleLoadFatBinary"] = cuModuleLoadData


@_call(1)
def cuModuleLoadDataEx(image: Any, count: int, options: Any, values: Any) -> Any:
    """Options are for a compiler that is not needed here."""
    return _load(_image(image))


def _image(image: Any) -> bytes:
    """The bytes of an image that is given as such, or as an address: PTX ends with a zero byte."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    address = int(image)
    if not address:
        raise RefusedError("INVALID_VALUE")
    head = ctypes.string_at(address, 4)
    return ctypes.string_at(address, 64) if not head.isascii() or head == b"\x7fELF" else ctypes.string_at(address)


def _load(data: bytes, name: str = "") -> Any:
    guard()
    device = _current().device
    try:
        program = load(data, name)
    except ImageError as error:
        _state.reports[error.code] = str(error)
        raise RefusedError(error.code.removeprefix("CUDA_ERROR_")) from None
    module = Module(0, device, program)
    module.handle = handles.add(module)
    return cu.CUmodule(module.handle)


def _module(handle: Any) -> Module:
    return handles.find(_number(handle), Module, "INVALID_HANDLE")


@_call(locked=False)
def cuModuleUnload(module: Any) -> None:
    found = _module(module)
    guard()
    _wait_for_device(_current())
    with machine:
        handles.drop(found.handle)
        for kernel in found.kernels.values():
            handles.drop(kernel.handle)
        found.closed = True
        found.program.unload()


@_call(1)
def cuModuleGetFunction(module: Any, name: bytes) -> Any:
    return cu.CUfunction(_kernel_of(_module(module), name.decode()).handle)


def _kernel_of(module: Module, name: str) -> Kernel:
    kernel = module.kernels.get(name)
    if kernel is None:
        function = module.program.functions.get(name)
        if function is None:
            raise RefusedError("NOT_FOUND")
        kernel = module.kernels[name] = Kernel(0, module, function)
        kernel.handle = handles.add(kernel)
    return kernel


@_call(1)
def cuModuleGetFunctionCount(module: Any) -> int:
    return len(_module(module).program.functions)


@_call(1)
def cuModuleEnumerateFunctions(count: int, module: Any) -> list[Any]:
    found = _module(module)
    names = list(found.program.functions)[:count]
    return [cu.CUfunction(_kernel_of(found, name).handle) for name in names]


@_call(2)
def cuModuleGetGlobal(module: Any, name: bytes) -> tuple[Any, int]:
    variable = _module(module).program.variables.get(name.decode())
    if variable is None:
        raise RefusedError("NOT_FOUND")
    return cu.CUdeviceptr(variable[0]), variable[1]


@_call(1)
def cuFuncGetName(function: Any) -> bytes:
    return _kernel(function).function.name.encode()


@_call(1)
def cuFuncGetModule(function: Any) -> Any:
    return cu.CUmodule(_kernel(function).module.handle)


@_call(2)
def cuFuncGetParamInfo(function: Any, index: int) -> tuple[int, int]:
    parameters = _kernel(function).function.parameters
    if index >= len(parameters):
        raise RefusedError("INVALID_VALUE")
    offset, size = parameters[index]
    return offset, size


@_call(1)
def cuFuncGetParamCount(function: Any) -> int:
    return len(_kernel(function).function.parameters)


@_call(1)
def cuFuncGetAttribute(attribute: Any, function: Any) -> int:
    known = _kernel(function).function
    width, height, depth = known.cluster or (0, 0, 0)
    values = {
        "MAX_THREADS_PER_BLOCK": known.max_threads,
        "SHARED_SIZE_BYTES": known.shared_bytes,
        "CONST_SIZE_BYTES": known.const_bytes,
        "LOCAL_SIZE_BYTES": known.local_bytes,
        "NUM_REGS": known.registers,
        "PTX_VERSION": 90,
        "BINARY_VERSION": 90,
        "MAX_DYNAMIC_SHARED_SIZE_BYTES": known.max_dynamic_shared,
        "PREFERRED_SHARED_MEMORY_CARVEOUT": -1,
        "CLUSTER_SIZE_MUST_BE_SET": int(known.cluster is not None),
        "REQUIRED_CLUSTER_WIDTH": width,
        "REQUIRED_CLUSTER_HEIGHT": height,
        "REQUIRED_CLUSTER_DEPTH": depth,
    }
    return int(values.get(cu.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_"), 0))


@_call()
def cuFuncSetAttribute(function: Any, attribute: Any, value: int) -> None:
    known = _kernel(function).function
    name = cu.CUfunction_attribute(attribute).name.removeprefix("CU_FUNC_ATTRIBUTE_")
    if name == "MAX_DYNAMIC_SHARED_SIZE_BYTES":
        if not 0 <= value <= SHARED_PER_BLOCK - known.shared_bytes:
            raise RefusedError("INVALID_VALUE")
        known.max_dynamic_shared = value
    elif name not in ("PREFERRED_SHARED_MEMORY_CARVEOUT", "NON_PORTABLE_CLUSTER_SIZE_ALLOWED"):
        raise RefusedError("INVALID_VALUE")


@_call(1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(function: Any, threads: int, shared: int) -> int:
    if threads <= 0:
        raise RefusedError("INVALID_VALUE")
    return blocks_per_multiprocessor(_kernel(function).function, threads, shared)


@_call(1)
def cuOccupancyMaxActiveClusters(function: Any, config: Any) -> int:
    launch, _ = _launch_of(int(config.getPtr()), _kernel(function), 0)
    x, y, z = launch.cluster
    bx, by, bz = launch.block
    resident = blocks_per_multiprocessor(launch.kernel.function, bx * by * bz, launch.shared)
    return MULTIPROCESSORS * resident // (x * y * z)


# ---- launches

_CONFIG = struct.Struct("=7I4xQQI")  # CUlaunchConfig
_ATTRIBUTE_BYTES = 72  # of a CUlaunchAttribute: id, 4 bytes of padding, value
_NODE_CONFIG = struct.Struct("=Q7I4xQQ")  # CUDA_KERNEL_NODE_PARAMS up to ``extra``


def _packed(kernel: Kernel, params: int, extra: int) -> bytes:
    """The arguments of a launch, from the array ``kernelParams`` or from the buffer that ``extra`` names."""
    function = kernel.function
    if params:
        count = len(function.parameters)
        pointers = struct.unpack(f"={count}Q", ctypes.string_at(params, 8 * count))
        packed = bytearray(function.params_bytes)
        for (offset, size), pointer in zip(function.parameters, pointers, strict=True):
            packed[offset : offset + size] = ctypes.string_at(pointer, size)
        return bytes(packed)
    if not extra:
        if function.parameters:
            raise RefusedError("INVALID_VALUE")
        return b""
    address = nbytes = 0
    while (word := ctypes.c_uint64.from_address(extra).value) != 0:
        value = ctypes.c_uint64.from_address(extra + 8).value
        if word == 1:  # CU_LAUNCH_PARAM_BUFFER_POINTER
            address = value
        elif word == 2:  # CU_LAUNCH_PARAM_BUFFER_SIZE
            nbytes = ctypes.c_uint64.from_address(value).value
        extra += 16
    if not address or nbytes < function.params_bytes:
        raise RefusedError("INVALID_VALUE")
    return ctypes.string_at(address, function.params_bytes)


def _launch_of(config: int, kernel: Kernel, params: int, extra: int = 0) -> tuple[Launch, int]:
    """A ``CUlaunchConfig``, and its stream."""
    gx, gy, gz, bx, by, bz, shared, stream, attributes, count = _CONFIG.unpack(ctypes.string_at(config, 52))
    packed = _packed(kernel, params, extra) if params or extra or not kernel.function.parameters else b""
    raw = {}
    for at in range(attributes, attributes + count * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES):
        identity = ctypes.c_int.from_address(at).value
        if identity in (Attribute.PREFERRED_CLUSTER_DIMENSION, Attribute.DEVICE_UPDATABLE_KERNEL_NODE):
            raise RefusedError("INVALID_VALUE")
        raw[identity] = ctypes.string_at(at + 8, 64)
    return Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, packed, raw), stream


def _queue_launch(launch: Launch, stream: Stream) -> None:
    if launch.kernel.module.device != stream.context.device:
        raise RefusedError("INVALID_HANDLE")
    launch.check()
    work = stream.queue(launch)
    if launch.attributes:
        for attribute, usual in ((Attribute.PROGRAMMATIC_EVENT, TRIGGER), (Attribute.LAUNCH_COMPLETION_EVENT, START)):
            raw = launch.attributes.get(attribute)
            if raw is not None:
                (event,) = struct.unpack_from("=Q", raw)
                at_start = attribute == Attribute.PROGRAMMATIC_EVENT and launch.integer(attribute, 12)
                stream.record_moment(_event(event), work, START if at_start else usual)


@_call()
def cuLaunchKernel(
    function: Any,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared: int,
    stream: Any,
    params: Any,
    extra: Any,
) -> None:
    kernel = _kernel(function)
    holder = cu.CUDA_KERNEL_NODE_PARAMS()  # its setter takes every form of arguments that the bindings take
    holder.kernelParams = params if params is not None else 0
    packed = _packed(kernel, int(holder.kernelParams), _number(extra))
    _queue_launch(Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, packed), _stream(stream))


@_call()
def cuLaunchKernelEx(config: Any, function: Any, params: Any, extra: Any) -> None:
    holder = cu.CUDA_KERNEL_NODE_PARAMS()
    holder.kernelParams = params if params is not None else 0
    _launch_kernel_ex(int(config.getPtr()), _number(function), int(holder.kernelParams), _number(extra))


def _launch_kernel_ex(config: int, function: int, params: int, extra: int) -> None:
    kernel = _kernel(function)
    launch, stream = _launch_of(config, kernel, params, extra)
    if kernel.function.parameters and not params and not extra:
        raise RefusedError("INVALID_VALUE")
    _queue_launch(launch, _stream(stream))


# ---- graphs ----------------------------------------------------------------------------------------------------------

_NODE_TYPES = {
    name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(): kind for name, kind in cu.CUgraphNodeType.__members__.items()
}


def _graph(handle: Any) -> Graph:
    return handles.find(_number(handle), Graph)


def _node(handle: Any, *kinds: str) -> Node:
    node = handles.find(_number(handle), Node)
    if kinds and node.kind not in kinds:
        raise RefusedError("INVALID_VALUE")
    return node


def _exec(handle: Any) -> Exec:
    return handles.find(_number(handle), Exec)


def _edges(graph: Graph, dependencies: Any, data: Any, count: int) -> list[tuple[Node, EdgeData]]:
    if not count:
        return []
    if len(dependencies) < count or (data is not None and len(data) < count):
        raise RefusedError("INVALID_VALUE")
    nodes = [_node(handle) for handle in dependencies[:count]]
    if any(node.graph is not graph for node in nodes):
        raise RefusedError("INVALID_VALUE")
    return list(zip(nodes, _edge_data(data, count), strict=True))


def _edge_data(data: Any, count: int) -> list[EdgeData]:
    if data is None:
        return [(0, 0, 0)] * count
    return [(int(d.from_port), int(d.to_port), int(d.type)) for d in data[:count]]


def _edge_struct(data: EdgeData) -> Any:
    made = cu.CUgraphEdgeData()
    made.from_port, made.to_port = data[:2]
    made.type = cu.CUgraphDependencyType(data[2])
    return made


@_call(1)
def cuGraphCreate(flags: int) -> Any:
    if flags:
        raise RefusedError("INVALID_VALUE")
    return cu.CUgraph(Graph().handle)


@_call()
def cuGraphDestroy(graph: Any) -> None:
    found = _graph(graph)
    if found.owner is not None:
        raise RefusedError("INVALID_VALUE")
    found.destroy()


@_call(1)
def cuGraphClone(graph: Any) -> Any:
    return cu.CUgraph(_graph(graph).clone().handle)


@_call(1)
def cuGraphNodeFindInClone(node: Any, clone: Any) -> Any:
    found, graph = _node(node), _graph(clone)
    if found not in graph.twins or graph.twins[found] not in graph.nodes:
        raise RefusedError("INVALID_VALUE")
    return cu.CUgraphNode(graph.twins[found].handle)


# Nodes, by kind: what the driver's structs say as an operation, and back


def _launch_params(address: int) -> Launch:
    """A ``CUDA_KERNEL_NODE_PARAMS``."""
    function, gx, gy, gz, bx, by, bz, shared, params, extra = _NODE_CONFIG.unpack(ctypes.string_at(address, 56))
    kernel = _kernel(function)
    launch = Launch(kernel, (gx, gy, gz), (bx, by, bz), shared, _packed(kernel, params, extra))
    launch.check()
    return launch


def _fill(params: Any, device: int) -> Fill:
    """A ``CUDA_MEMSET_NODE_PARAMS``."""
    fill = Fill(
        device, int(params.dst), params.value, params.elementSize, params.width, params.height, int(params.pitch)
    )
    if not fill.width or not fill.height:
        raise RefusedError("INVALID_VALUE")
    fill.check()
    return fill


def _checked_copy(params: Any, device: int) -> Copy:
    copy = _copy(params, device)
    if not (copy.width and copy.height and copy.depth):
        raise RefusedError("INVALID_VALUE")
    copy.check()
    return copy


def _ops(params: Any) -> MemOps:
    """A ``CUDA_BATCH_MEM_OP_NODE_PARAMS``."""
    count = int(params.count)
    if count and not params.paramArray:
        raise RefusedError("INVALID_VALUE")
    ops = MemOps(_context(params.ctx).device, tuple(map(_mem_op, params.paramArray[:count])), int(params.flags))
    ops.check()
    return ops


def _event_operation(kind: type[EventRecord] | type[EventWait], event: Any) -> Operation:
    found = _event(event)
    return kind(found.context.device, found)


def _call_params(params: Any) -> HostCall:
    """A ``CUDA_HOST_NODE_PARAMS``."""
    return _host_call(_device_of_graphs(), params.fn, params.userData)


def _device_of_graphs() -> int:
    """Where the nodes of graphs are that name no place: the current context's device."""
    context = _thread_state.contexts[-1]
    return 0 if context is None else context.device


def _alloc(params: Any) -> Allocate:
    """A ``CUDA_MEM_ALLOC_NODE_PARAMS``, whose address is put into it."""
    pool = params.poolProps
    if int(pool.allocType) != 1 or int(pool.location.type) != 1 or not int(params.bytesize):
        raise RefusedError("INVALID_VALUE")
    return Allocate(_graph_memory(_device(pool.location.id), int(params.bytesize)))


def _free_of(address: Any, graph: Graph) -> Free:
    found = _state.graph_memory.get(int(address))
    if found is None or any(isinstance(n.operation, Free) and n.operation.memory is found for n in graph.nodes):
        raise RefusedError("INVALID_VALUE")
    return Free(found)


def _add(graph: Any, dependencies: Any, count: int, make: Callable[[Graph], Operation]) -> Any:
    into = _graph(graph)
    edges = _edges(into, dependencies, None, count)
    return cu.CUgraphNode(into.add(make(into), edges).handle)


@_call(1)
def cuGraphAddKernelNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _launch_params(int(params.getPtr())))


@_call(1)
def cuGraphAddMemcpyNode(graph: Any, dependencies: Any, count: int, params: Any, context: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _checked_copy(params, _context(context).device))


@_call(1)
def cuGraphAddMemsetNode(graph: Any, dependencies: Any, count: int, params: Any, context: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _fill(params, _context(context).device))


@_call(1)
def cuGraphAddEmptyNode(graph: Any, dependencies: Any, count: int) -> Any:
    return _add(graph, dependencies, count, lambda _: Empty(_device_of_graphs()))


@_call(1)
def cuGraphAddHostNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _call_params(params))


@_call(1)
def cuGraphAddEventRecordNode(graph: Any, dependencies: Any, count: int, event: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _event_operation(EventRecord, event))


@_call(1)
def cuGraphAddEventWaitNode(graph: Any, dependencies: Any, count: int, event: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _event_operation(EventWait, event))


@_call(1)
def cuGraphAddBatchMemOpNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    return _add(graph, dependencies, count, lambda _: _ops(params))


@_call(1)
def cuGraphAddMemAllocNode(graph: Any, dependencies: Any, count: int, params: Any) -> Any:
    into = _graph(graph)
    edges = _edges(into, dependencies, None, count)
    operation = _alloc(params)
    params.dptr = cu.CUdeviceptr(operation.memory.address)
    return cu.CUgraphNode(into.add(operation, edges).handle)


@_call(1)
def cuGraphAddMemFreeNode(graph: Any, dependencies: Any, count: int, address: Any) -> Any:
    return _add(graph, dependencies, count, lambda into: _free_of(address, into))


@_call(1)
def cuGraphAddChildGraphNode(graph: Any, dependencies: Any, count: int, child: Any) -> Any:
    into = _graph(graph)
    edges = _edges(into, dependencies, None, count)
    return cu.CUgraphNode(into.add_child(_device_of_graphs(), _graph(child), edges, move=False).handle)


@_call(1)
def cuGraphAddNode(graph: Any, dependencies: Any, data: Any, count: int, params: Any) -> Any:
    """A node of any kind; what comes out of it is put into ``params``."""
    into = _graph(graph)
    edges = _edges(into, dependencies, data, count)
    kind = params.type.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    if kind == "graph":
        move = int(params.graph.ownership) == 1
        node = into.add_child(_device_of_graphs(), _graph(params.graph.graph), edges, move=move)
    elif kind == "conditional":
        given = params.conditional
        device = _context(given.ctx).device
        node = into.add_conditional(device, int(given.type), int(given.handle), given.size, edges)
        bodies = (ctypes.c_uint64 * given.size)(*[body.handle for body in node.graphs])
        node.said = bodies
        ctypes.c_uint64.from_address(int(given.getPtr()) + 16).value = ctypes.addressof(bodies)  # phGraph_out
    elif kind == "empty":
        node = into.add(Empty(_device_of_graphs()), edges)
    elif kind == "mem_free":
        node = into.add(_free_of(params.free.dptr, into), edges)
    else:
        operation = _operation(params)
        node = into.add(operation, edges)
        if isinstance(operation, Allocate):
            params.alloc.dptr = cu.CUdeviceptr(operation.memory.address)
    return cu.CUgraphNode(node.handle)


def _operation(params: Any) -> Operation:
    """``CUgraphNodeParams`` of the kinds of nodes that can be changed, or allocate."""
    kind = params.type.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    makers: dict[str, Callable[[], Operation]] = {
        "kernel": lambda: _launch_params(int(params.kernel.getPtr())),
        "memcpy": lambda: _checked_copy(params.memcpy.copyParams, _context(params.memcpy.copyCtx).device),
        "memset": lambda: _fill(params.memset, _context(params.memset.ctx).device),
        "host": lambda: _call_params(params.host),
        "event_record": lambda: _event_operation(EventRecord, params.eventRecord.event),
        "wait_event": lambda: _event_operation(EventWait, params.eventWait.event),
        "batch_mem_op": lambda: _ops(params.memOp),
        "mem_alloc": lambda: _alloc(params.alloc),
    }
    if kind not in makers:
        raise RefusedError("NOT_SUPPORTED")
    return makers[kind]()


@_call()
def cuGraphDestroyNode(node: Any) -> None:
    found = _node(node)
    found.graph.remove(found)


@_call(1)
def cuGraphConditionalHandleCreate(graph: Any, context: Any, default: int, flags: int) -> Any:
    found = _graph(graph)
    _context(context)
    if flags & ~1:
        raise RefusedError("INVALID_VALUE")
    return cu.CUgraphConditionalHandle(found.add_condition(default if flags else None).address)


# Asking


@_call(1)
def cuGraphNodeGetType(node: Any) -> Any:
    return _NODE_TYPES[_node(node).kind]


def _some(nodes: Iterable[Node], count: int) -> list[Any]:
    """As many nodes as were asked for, the missing ones null."""
    found = [cu.CUgraphNode(node.handle) for node in nodes][:count]
    return found + [cu.CUgraphNode(0)] * (count - len(found))


@_call(2)
def cuGraphGetNodes(graph: Any, count: int = 0) -> tuple[list[Any], int]:
    nodes = _graph(graph).nodes
    return _some(nodes, count), min(count, len(nodes)) if count else len(nodes)


@_call(2)
def cuGraphGetRootNodes(graph: Any, count: int = 0) -> tuple[list[Any], int]:
    roots = [node for node in _graph(graph).nodes if not node.dependencies]
    return _some(roots, count), min(count, len(roots)) if count else len(roots)


@_call(4)
def cuGraphGetEdges(graph: Any, count: int = 0) -> tuple[list[Any], list[Any], list[Any], int]:
    edges = _graph(graph).edges()
    data = [_edge_struct(d) for _, _, d in edges[:count]]
    data += [cu.CUgraphEdgeData() for _ in range(count - len(data))]
    total = min(count, len(edges)) if count else len(edges)
    return _some([a for a, _, _ in edges], count), _some([b for _, b, _ in edges], count), data, total


def _neighbours(edges: Mapping[tuple[Node, EdgeData], None], count: int) -> tuple[list[Any], list[Any], int]:
    data = [_edge_struct(d) for _, d in edges][:count]
    data += [cu.CUgraphEdgeData() for _ in range(count - len(data))]
    return _some([n for n, _ in edges], count), data, min(count, len(edges)) if count else len(edges)


@_call(3)
def cuGraphNodeGetDependencies(node: Any, count: int = 0) -> tuple[list[Any], list[Any], int]:
    return _neighbours(_node(node).dependencies, count)


@_call(3)
def cuGraphNodeGetDependentNodes(node: Any, count: int = 0) -> tuple[list[Any], list[Any], int]:
    return _neighbours(_node(node).dependents, count)


@_call()
def cuGraphAddDependencies(graph: Any, sources: Any, targets: Any, data: Any, count: int) -> None:
    into = _graph(graph)
    for source, target, edge in zip(sources[:count], targets[:count], _edge_data(data, count), strict=True):
        into.add_edge(_node(source), _node(target), edge)


@_call()
def cuGraphRemoveDependencies(graph: Any, sources: Any, targets: Any, data: Any, count: int) -> None:
    from_ = _graph(graph)
    for source, target, edge in zip(sources[:count], targets[:count], _edge_data(data, count), strict=True):
        from_.remove_edge(_node(source), _node(target), edge)


def _operation_of(node: Any, kind: type[Any]) -> Any:
    operation = _node(node).operation
    if not isinstance(operation, kind):
        raise RefusedError("INVALID_VALUE")
    return operation


@_call(1)
def cuGraphKernelNodeGetParams(node: Any) -> Any:
    """``kernelParams`` points to memory of the node, until it is changed or asked again."""
    launch, params = _operation_of(node, Launch), cu.CUDA_KERNEL_NODE_PARAMS()
    parameters = launch.kernel.function.parameters
    packed = ctypes.create_string_buffer(launch.params, max(len(launch.params), 1))
    base = ctypes.addressof(packed)
    pointers = (ctypes.c_uint64 * max(len(parameters), 1))(*[base + offset for offset, _ in parameters])
    _node(node).said = packed, pointers
    params.func = cu.CUfunction(launch.kernel.handle)
    params.gridDimX, params.gridDimY, params.gridDimZ = launch.grid
    params.blockDimX, params.blockDimY, params.blockDimZ = launch.block
    params.sharedMemBytes = launch.shared
    params.kernelParams = ctypes.addressof(pointers) if parameters else 0
    return params


@_call()
def cuGraphKernelNodeSetParams(node: Any, params: Any) -> None:
    found, old = _node(node), _operation_of(node, Launch)
    found.operation = _launch_params(int(params.getPtr())).having(old.attributes)


@_call(1)
def cuGraphMemcpyNodeGetParams(node: Any) -> Any:
    return _copy_params(_operation_of(node, Copy))


@_call()
def cuGraphMemcpyNodeSetParams(node: Any, params: Any) -> None:
    old = _operation_of(node, Copy)
    _node(node).operation = _checked_copy(params, old.device)


@_call(1)
def cuGraphMemsetNodeGetParams(node: Any) -> Any:
    fill, params = _operation_of(node, Fill), cu.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.elementSize = cu.CUdeviceptr(fill.address), fill.value, fill.element
    params.width, params.height, params.pitch = fill.width, fill.height, fill.pitch
    return params


@_call()
def cuGraphMemsetNodeSetParams(node: Any, params: Any) -> None:
    old = _operation_of(node, Fill)
    _node(node).operation = _fill(params, old.device)


@_call(1)
def cuGraphHostNodeGetParams(node: Any) -> Any:
    host, params = _operation_of(node, HostCall), cu.CUDA_HOST_NODE_PARAMS()
    params.fn, params.userData = cu.CUhostFn(host.function), host.data
    return params


@_call()
def cuGraphHostNodeSetParams(node: Any, params: Any) -> None:
    _operation_of(node, HostCall)
    _node(node).operation = _call_params(params)


@_call(1)
def cuGraphEventRecordNodeGetEvent(node: Any) -> Any:
    return cu.CUevent(_operation_of(node, EventRecord).event.handle)


@_call()
def cuGraphEventRecordNodeSetEvent(node: Any, event: Any) -> None:
    _operation_of(node, EventRecord)
    _node(node).operation = _event_operation(EventRecord, event)


@_call(1)
def cuGraphEventWaitNodeGetEvent(node: Any) -> Any:
    return cu.CUevent(_operation_of(node, EventWait).event.handle)


@_call()
def cuGraphEventWaitNodeSetEvent(node: Any, event: Any) -> None:
    _operation_of(node, EventWait)
    _node(node).operation = _event_operation(EventWait, event)


@_call(1)
def cuGraphChildGraphNodeGetGraph(node: Any) -> Any:
    return cu.CUgraph(_operation_of(node, Child).graph.handle)


@_call(1)
def cuGraphMemAllocNodeGetParams(node: Any) -> Any:
    allocated, params = _operation_of(node, Allocate).memory, cu.CUDA_MEM_ALLOC_NODE_PARAMS()
    params.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    params.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    params.poolProps.location.id = allocated.device
    params.bytesize, params.dptr = allocated.nbytes, cu.CUdeviceptr(allocated.address)
    return params


@_call(1)
def cuGraphMemFreeNodeGetParams(node: Any) -> Any:
    return cu.CUdeviceptr(_operation_of(node, Free).memory.address)


@_call(1)
def cuGraphBatchMemOpNodeGetParams(node: Any) -> Any:
    operation, params = _operation_of(node, MemOps), cu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
    params.ctx = cu.CUcontext(_state.contexts[operation.device].handle)
    entries = []
    for op in operation.ops:
        entry = cu.CUstreamBatchMemOpParams()
        kind = entry.operation = cu.CUstreamBatchMemOpType(op.operation)
        part = entry.waitValue if op.operation in (1, 4) else entry.writeValue
        part.operation, part.address, part.flags = kind, cu.CUdeviceptr(op.address), op.flags
        setattr(part, "value64" if op.operation in (4, 5) else "value", op.value)
        entries.append(entry)
    params.paramArray, params.count, params.flags = entries, len(entries), operation.flags
    return params


@_call()
def cuGraphBatchMemOpNodeSetParams(node: Any, params: Any) -> None:
    _operation_of(node, MemOps)
    _node(node).operation = _ops(params)


@_call(1)
def cuGraphKernelNodeGetAttribute(node: Any, attribute: Any) -> Any:
    launch, value = _operation_of(node, Launch), cu.CUkernelNodeAttrValue()
    raw = launch.attributes.get(int(attribute))
    if raw is not None:
        ctypes.memmove(int(value.getPtr()), raw, 64)
    return value


@_call()
def cuGraphKernelNodeSetAttribute(node: Any, attribute: Any, value: Any) -> None:
    found, launch = _node(node), _operation_of(node, Launch)
    identity = int(attribute)
    if identity in (
        Attribute.PROGRAMMATIC_STREAM_SERIALIZATION,
        Attribute.PROGRAMMATIC_EVENT,
        Attribute.LAUNCH_COMPLETION_EVENT,
        Attribute.PREFERRED_CLUSTER_DIMENSION,
    ):
        raise RefusedError("INVALID_VALUE")
    if identity == Attribute.DEVICE_UPDATABLE_KERNEL_NODE:
        devnode = value.deviceUpdatableKernelNode
        devnode.devNode = cu.CUgraphDeviceNode(found.handle if devnode.deviceUpdatable else 0)
    raw = ctypes.string_at(int(value.getPtr()), 64)
    changed = launch.having({**launch.attributes, identity: raw})
    changed.check()
    found.operation = changed


@_call()
def cuGraphKernelNodeCopyAttributes(target: Any, source: Any) -> None:
    changed = _operation_of(target, Launch).having(_operation_of(source, Launch).attributes)
    changed.check()
    _node(target).operation = changed


# Execs


@_call(1)
def cuGraphInstantiateWithParams(graph: Any, params: Any) -> Any:
    results = cu.CUgraphInstantiateResult
    params.hErrNode_out, params.result_out = cu.CUgraphNode(0), results.CUDA_GRAPH_INSTANTIATE_SUCCESS
    try:
        made = Exec(_graph(graph), int(params.flags))
        if int(params.flags) & 2:
            _stream(params.hUploadStream)
    except InstantiateError as error:
        params.hErrNode_out = cu.CUgraphNode(0 if error.node is None else error.node.handle)
        params.result_out = results(error.result)
        raise
    except RefusedError:
        params.result_out = results.CUDA_GRAPH_INSTANTIATE_ERROR
        raise
    return cu.CUgraphExec(made.handle)


@_call(1)
def cuGraphInstantiate(graph: Any, flags: int) -> Any:
    return cu.CUgraphExec(Exec(_graph(graph), int(flags)).handle)


@_call()
def cuGraphExecDestroy(exec_: Any) -> None:
    _exec(exec_).destroy()


@_call(1)
def cuGraphExecGetFlags(exec_: Any) -> Any:
    return cu.cuuint64_t(_exec(exec_).flags)


@_call()
def cuGraphUpload(exec_: Any, stream: Any) -> None:
    _exec(exec_)
    _idle_stream(stream)


@_call()
def cuGraphLaunch(exec_: Any, stream: Any) -> None:
    _graph_launch(_number(exec_), _number(stream))


def _graph_launch(exec_: int, stream: int) -> None:
    found = _exec(exec_)
    found.launch(_idle_stream(stream))


@_call()
def cuGraphExecKernelNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    _exec_kernel_node_set_params(_number(exec_), _number(node), int(params.getPtr()))


def _exec_kernel_node_set_params(exec_: int, node: int, params: int) -> None:
    found, definition = _exec(exec_), _node(node, "kernel")
    old = found.item(definition).operation
    assert isinstance(old, Launch)
    launch = _launch_params(params)
    if old.attributes:
        launch = launch.having(old.attributes)
        launch.check()
    found.put(definition, launch)


@_call()
def cuGraphExecMemcpyNodeSetParams(exec_: Any, node: Any, params: Any, context: Any) -> None:
    _exec(exec_).put(_node(node, "memcpy"), _checked_copy(params, _context(context).device))


@_call()
def cuGraphExecMemsetNodeSetParams(exec_: Any, node: Any, params: Any, context: Any) -> None:
    _exec(exec_).put(_node(node, "memset"), _fill(params, _context(context).device))


@_call()
def cuGraphExecHostNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    _exec(exec_).put(_node(node, "host"), _call_params(params))


@_call()
def cuGraphExecEventRecordNodeSetEvent(exec_: Any, node: Any, event: Any) -> None:
    _exec(exec_).put(_node(node, "event_record"), _event_operation(EventRecord, event))


@_call()
def cuGraphExecEventWaitNodeSetEvent(exec_: Any, node: Any, event: Any) -> None:
    _exec(exec_).put(_node(node, "wait_event"), _event_operation(EventWait, event))


@_call()
def cuGraphExecBatchMemOpNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    _exec(exec_).put(_node(node, "batch_mem_op"), _ops(params))


@_call()
def cuGraphExecChildGraphNodeSetParams(exec_: Any, node: Any, child: Any) -> None:
    _exec(exec_).put_child(_node(node, "graph"), _graph(child))


@_call()
def cuGraphExecNodeSetParams(exec_: Any, node: Any, params: Any) -> None:
    if params.type.name == "CU_GRAPH_NODE_TYPE_GRAPH":
        _exec(exec_).put_child(_node(node, "graph"), _graph(params.graph.graph))
    else:
        _exec(exec_).put(_node(node), _operation(params))


@_call()
def cuGraphNodeSetEnabled(exec_: Any, node: Any, enabled: int) -> None:
    _exec(exec_).enable(_node(node), bool(enabled))


@_call(1)
def cuGraphNodeGetEnabled(exec_: Any, node: Any) -> int:
    return int(_exec(exec_).is_enabled(_node(node)))


@_call(1)
def cuGraphExecUpdate(exec_: Any, graph: Any) -> Any:
    info = cu.CUgraphExecUpdateResultInfo()
    _graph_exec_update(_number(exec_), _number(graph), int(info.getPtr()))
    return info


_UPDATE_INFO = struct.Struct("=i4xQQ")  # CUgraphExecUpdateResultInfo


def _graph_exec_update(exec_: int, graph: int, info: int) -> None:
    results = cu.CUgraphExecUpdateResult.__members__
    result, node, from_node = 0, 0, 0
    try:
        _exec(exec_).update(_graph(graph))
    except UpdateError as error:
        result = int(results[f"CU_GRAPH_EXEC_UPDATE_ERROR_{error.result}"])
        node, from_node = (0 if n is None else n.handle for n in (error.node, error.from_node))
        raise
    except RefusedError:
        result = int(results["CU_GRAPH_EXEC_UPDATE_ERROR"])
        raise
    finally:
        ctypes.memmove(info, _UPDATE_INFO.pack(result, node, from_node), _UPDATE_INFO.size)


# ---- functions at addresses ------------------------------------------------------------------------------------------


def _graph_add_kernel_node(out: int, graph: int, dependencies: int, count: int, params: int) -> None:
    into = _graph(graph)
    numbers = struct.unpack(f"={count}Q", ctypes.string_at(dependencies, 8 * count)) if count else ()
    edges: list[tuple[Node, EdgeData]] = [(handles.find(number, Node), (0, 0, 0)) for number in numbers]
    ctypes.c_uint64.from_address(out).value = into.add(_launch_params(params), edges).handle


def _module_load_data_ex(out: int, image: int, count: int, options: int, values: int) -> None:
    names = (ctypes.c_int * count).from_address(options) if count else ()
    given = dict(zip(names, (ctypes.c_uint64 * count).from_address(values), strict=True)) if count else {}
    log, size = given.get(5, 0), given.get(6, 0)  # CU_JIT_ERROR_LOG_BUFFER, and its size
    try:
        ctypes.c_uint64.from_address(out).value = int(_load(_image(image)))
    except RefusedError as refused:
        text = _state.reports.get(f"CUDA_ERROR_{refused.code}", "").encode()[: max(size - 1, 0)]
        if log and size:
            ctypes.memmove(log, text + b"\0", len(text) + 1)
        raise


def _pointer_get_attribute(out: int, attribute: int, address: int) -> None:
    value = _pointer_attribute(attribute, address)
    wide = cu.CUpointer_attribute(attribute).name.endswith(("CONTEXT", "POINTER", "ADDR", "SIZE"))
    (ctypes.c_uint64 if wide else ctypes.c_uint32).from_address(out).value = int(value)


class _Raw(NamedTuple):
    function: Callable[..., None]
    parameters: int


# Functions of integers: handles and addresses. What calls them cannot pass on what they raise.
_RAW = {
    "cuLaunchKernelEx": _Raw(_launch_kernel_ex, 4),
    "cuGraphLaunch": _Raw(_graph_launch, 2),
    "cuGraphAddKernelNode": _Raw(_graph_add_kernel_node, 5),
    "cuGraphExecKernelNodeSetParams": _Raw(_exec_kernel_node_set_params, 3),
    "cuGraphExecUpdate": _Raw(_graph_exec_update, 3),
    "cuModuleLoadDataEx": _Raw(_module_load_data_ex, 5),
    "cuPointerGetAttribute": _Raw(_pointer_get_attribute, 3),
}
_callbacks: dict[str, Any] = {}  # for ever: their addresses were given away


def cuGetProcAddress(name: bytes, version: int, flags: Any) -> tuple[Any, int | None, Any]:
    """The address of a C function that takes integers and gives the result code, for the few names that have one."""
    results, raw = cu.CUdriverProcAddressQueryResult, _RAW.get(name.decode())
    if raw is None:
        return _code("NOT_FOUND"), 0, results.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    if name.decode() not in _callbacks:
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * raw.parameters)
        _callbacks[name.decode()] = prototype(_raw_call(raw.function))
    address = ctypes.cast(_callbacks[name.decode()], ctypes.c_void_p).value
    return OK, address, results.CU_GET_PROC_ADDRESS_SUCCESS


def _raw_call(function: Callable[..., None]) -> Callable[..., int]:
    codes = {name.removeprefix("CUDA_ERROR_"): int(code) for name, code in cu.CUresult.__members__.items()}

    def call(*args: int) -> int:
        try:
            _enter(faults=True)
            with machine:
                function(*args)
            machine.relieve()
        except RefusedError as refused:
            return codes[refused.code]
        except KeyboardInterrupt:
            _thread.interrupt_main()  # it comes as soon as the caller is back in Python
            return codes["UNKNOWN"]
        except BaseException as bug:
            _state.reports["CUDA_ERROR_UNKNOWN"] = "".join(traceback.format_exception(bug))
            print(_state.reports["CUDA_ERROR_UNKNOWN"], file=sys.stderr)
            return codes["UNKNOWN"]
        return 0

    return call
