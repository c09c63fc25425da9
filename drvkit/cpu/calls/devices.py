"""The driver itself, devices and their contexts."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from ..handles import RefusedError, handles
from ..machine import machine
from ..operations import (
    MAX_BLOCK,
    MAX_GRID,
    MULTIPROCESSORS,
    REGISTERS,
    RESERVED_SHARED,
    SHARED_PER_BLOCK,
    SHARED_PER_MULTIPROCESSOR,
    SHARED_WITHOUT_ASKING,
)
from ..order import tracker
from ..program import usual_mode
from ..streams import GREATEST_PRIORITY, LEAST_PRIORITY, Context, guard_context
from .base import (
    DEVICES,
    HOST_BYTES,
    OK,
    call,
    code_of,
    cu,
    current,
    device_of,
    entered,
    number_of,
    state,
    thread_state,
    wait_for_device,
)

DRIVER_VERSION = 13000


def cuInit(flags: int) -> tuple[Any]:
    if flags or state.lost:
        return (code_of("INVALID_VALUE" if flags else "NOT_INITIALIZED"),)
    state.initialized = True
    return (OK,)


def cuDriverGetVersion() -> tuple[Any, int]:
    return OK, DRIVER_VERSION


def cuGetErrorName(code: Any) -> tuple[Any, bytes | None]:
    return OK, cu.CUresult(code).name.encode()


def cuGetErrorString(code: Any) -> tuple[Any, bytes | None]:
    words = cu.CUresult(code).name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_").replace("_", " ").lower()
    return OK, words.encode()


@call(1)
def cuDeviceGetCount() -> int:
    return DEVICES


@call(1)
def cuDeviceGet(ordinal: int) -> Any:
    return cu.CUdevice(device_of(ordinal))


@call(1)
def cuDeviceGetName(length: int, device: Any) -> bytes:
    device_of(device)
    return b"drvkit CPU device"[: length - 1].ljust(length, b"\0")


@call(1)
def cuDeviceGetUuid(device: Any) -> Any:
    value = cu.CUuuid()
    name = uuid.uuid5(uuid.NAMESPACE_OID, f"drvkit cpu:{device_of(device)}").bytes
    ctypes.memmove(int(value.getPtr()), name, 16)
    return value


@call(1)
def cuDeviceTotalMem(device: Any) -> int:
    device_of(device)
    return HOST_BYTES


# An H200's, but for what the CPU device lacks: that is 0, as is all that is not named.
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
    "MAX_REGISTERS_PER_BLOCK": REGISTERS,
    "CLOCK_RATE": 1980000,
    "TEXTURE_ALIGNMENT": 512,
    "TEXTURE_PITCH_ALIGNMENT": 32,
    "SURFACE_ALIGNMENT": 512,
    "GPU_OVERLAP": 1,
    "MULTIPROCESSOR_COUNT": MULTIPROCESSORS,
    "CAN_MAP_HOST_MEMORY": 1,
    "CONCURRENT_KERNELS": 1,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6016,
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
    "MAX_REGISTERS_PER_MULTIPROCESSOR": REGISTERS,
    "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2,
    "COMPUTE_PREEMPTION_SUPPORTED": 1,
    "CAN_USE_64_BIT_STREAM_MEM_OPS": 1,
    "CAN_USE_STREAM_WAIT_VALUE_NOR": 1,
    "COOPERATIVE_LAUNCH": 1,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": SHARED_PER_BLOCK,
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
    "MAX_PERSISTING_L2_CACHE_SIZE": 39321600,
    "MAX_ACCESS_POLICY_WINDOW_SIZE": 128 << 20,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": RESERVED_SHARED,
    "MEMORY_POOLS_SUPPORTED": 1,
    "CLUSTER_LAUNCH": 1,
    "IPC_EVENT_SUPPORTED": 1,
    "MULTICAST_SUPPORTED": 1,
    "MEM_SYNC_DOMAIN_COUNT": 4,
}
# By number: some have two names.
_DEVICE_ATTRIBUTE_VALUES = {
    int(cu.CUdevice_attribute.__members__[f"CU_DEVICE_ATTRIBUTE_{name}"]): value
    for name, value in _DEVICE_ATTRIBUTES.items()
}
# Newer bindings name attributes that this version of the driver does not know.
_NEWEST_DEVICE_ATTRIBUTE = int(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_ONLY_PARTIAL_HOST_NATIVE_ATOMIC_SUPPORTED)


@call(1)
def cuDeviceGetAttribute(attribute: Any, device: Any) -> int:
    device_of(device)
    if not 0 < int(attribute) <= _NEWEST_DEVICE_ATTRIBUTE:
        raise RefusedError("INVALID_VALUE")
    return _DEVICE_ATTRIBUTE_VALUES.get(int(attribute), 0)


@call(1)
def cuDeviceCanAccessPeer(device: Any, peer: Any) -> int:
    return int(device_of(device) != device_of(peer))


@call(1)
def cuDeviceGetP2PAttribute(attribute: Any, source: Any, target: Any) -> int:
    if device_of(source) == device_of(target):
        raise RefusedError("INVALID_DEVICE")
    name = cu.CUdevice_P2PAttribute(attribute).name
    return int(name.endswith(("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED", "ACCESS_ACCESS_SUPPORTED")))


@call(1)
def cuDevicePrimaryCtxRetain(device: Any) -> Any:
    number = device_of(device)
    if usual_mode() == "raced":  # there may be copies and fills before there is a module
        tracker.begin()
    context = state.contexts.get(number)
    if context is None:
        context = state.contexts[number] = Context(number)
    context.retained += 1
    return cu.CUcontext(context.handle)


@call()
def cuDevicePrimaryCtxRelease(device: Any) -> None:
    context = state.contexts.get(device_of(device))
    if context is None or not context.retained:
        raise RefusedError("INVALID_CONTEXT")
    context.retained -= 1


@call(2)
def cuDevicePrimaryCtxGetState(device: Any) -> tuple[int, int]:
    context = state.contexts.get(device_of(device))
    return 0, int(context is not None and context.retained > 0)


@call()
def cuDevicePrimaryCtxReset(device: Any) -> None:
    """What the device has to do, and what went wrong there, is forgotten. Its memory and handles stay, unlike those of
    a GPU, so that their owners can release them."""
    machine.reset(device_of(device))


@call()
def cuCtxSetCurrent(context: Any) -> None:
    number = number_of(context)
    thread_state.contexts[-1] = handles.find(number, Context, "INVALID_CONTEXT") if number else None


@call()
def cuCtxPushCurrent(context: Any) -> None:
    number = number_of(context)
    thread_state.contexts.append(handles.find(number, Context, "INVALID_CONTEXT" if number else "INVALID_VALUE"))


@call(1)
def cuCtxPopCurrent() -> Any:
    context = entered()
    thread_state.contexts.pop()
    if not thread_state.contexts:
        thread_state.contexts.append(None)
    return cu.CUcontext(context.handle)


@call(1)
def cuCtxGetCurrent() -> Any:
    context = thread_state.contexts[-1]
    return cu.CUcontext(0 if context is None else context.handle)


@call(1)
def cuCtxGetDevice() -> Any:
    return cu.CUdevice(entered().device)


@call(2)
def cuCtxGetStreamPriorityRange() -> tuple[int, int]:
    current()
    return LEAST_PRIORITY, GREATEST_PRIORITY


@call(locked=False)
def cuCtxSynchronize() -> None:
    context = current()
    guard_context(context)
    wait_for_device(context)


@call()
def cuCtxEnablePeerAccess(peer: Any, flags: int) -> None:
    context, other = current(), handles.find(number_of(peer), Context, "INVALID_CONTEXT")
    if other is context or flags:
        raise RefusedError("PEER_ACCESS_UNSUPPORTED" if other is context else "INVALID_VALUE")
    if other.device in context.peers:
        raise RefusedError("PEER_ACCESS_ALREADY_ENABLED")
    context.peers.add(other.device)


@call()
def cuCtxDisablePeerAccess(peer: Any) -> None:
    context, other = current(), handles.find(number_of(peer), Context, "INVALID_CONTEXT")
    if other.device not in context.peers:
        raise RefusedError("PEER_ACCESS_NOT_ENABLED")
    context.peers.discard(other.device)
